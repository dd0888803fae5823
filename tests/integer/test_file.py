"""The file of an integer model: read without the float model, and refused where it is damaged or foreign."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from intflash import InputError, integer
from intflash.digits import load_model


@pytest.fixture(scope="module")
def model():
    float_model = load_model("vit")
    torch.manual_seed(0)
    return integer.convert(float_model, integer.calibrate(float_model, [torch.rand(16, 1, 8, 8)]))


@pytest.fixture
def saved(model, tmp_path):
    path = tmp_path / "digits.safetensors"
    model.save(path)
    with safe_open(str(path), framework="pt") as file:
        return path, load_file(path), file.metadata()


def test_round_trip(model, saved):
    path, _, _ = saved
    images = torch.rand(5, 1, 8, 8)
    read = integer.load(path)
    assert torch.equal(read(images), model(images))
    assert read.report() == model.report()
    assert read.program.operations == model.program.operations
    assert read.provenance == json.loads(json.dumps(model.provenance))
    assert {"model", "images", "fingerprints", "versions", "options"} <= read.provenance.keys()
    assert integer.load(path, backend="reference").backend == "reference"


def test_refused_files(saved, tmp_path):
    path, tensors, metadata = saved
    bad = tmp_path / "bad"
    with pytest.raises(InputError, match="there is no such file"):
        integer.load(tmp_path / "none")
    bad.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read"):
        integer.load(bad)
    save_file(tensors, bad)
    with pytest.raises(InputError, match="no integer model: its format is None, expected 'intflash-integer'"):
        integer.load(bad)
    save_file(tensors, bad, metadata | {"version": "0"})
    with pytest.raises(InputError, match="is of version 0 of the definition, this library has 1"):
        integer.load(bad)
    save_file(tensors, bad, {k: v for k, v in metadata.items() if k != "digest"})
    with pytest.raises(InputError, match="damaged: it misses digest"):
        integer.load(bad)
    changed = dict(tensors, **{"head.bias": tensors["head.bias"] + 1})
    save_file(changed, bad, metadata)
    with pytest.raises(InputError, match="damaged: its program and constants are not those that were written"):
        integer.load(bad)


@pytest.mark.parametrize("position", [0.3, 0.6, 0.95])
def test_every_flipped_byte_is_found(saved, position, tmp_path):
    path, _, _ = saved
    content = bytearray(path.read_bytes())
    content[int(len(content) * position)] ^= 1
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(InputError):
        integer.load(tmp_path / "bad")


def test_a_program_that_is_none_is_refused(saved, tmp_path):
    """A file with a digest of its own still has its program checked."""
    from intflash.integer.file import _digest

    _, tensors, metadata = saved
    changes = {
        "operation 'Exec' is none of": lambda p: p["operations"][0].update(kind="Exec"),
        "Linear has the fields": lambda p: p["operations"][1].pop("shift"),
        "expected a shift in": lambda p: p["operations"][1].update(shift=63),
        "expected a tensor of the program, got nothing": lambda p: p["operations"][1].update(weight="nothing"),
        "to be written before it is read": lambda p: p["operations"].reverse(),
        "expected codes of .* in 'pixels'": lambda p: p["buffers"]["pixels"].update(bits=16),
        "expected eps in": lambda p: p["operations"][2].update(eps=0),
        "'list' object|expected a buffer": lambda p: p.update(buffers=[]),
    }
    for message, change in changes.items():
        program = json.loads(metadata["program"])
        change(program)
        text = json.dumps(program)
        save_file(tensors, tmp_path / "bad", metadata | {"program": text, "digest": _digest(text, tensors)})
        with pytest.raises(InputError, match=message):
            integer.load(tmp_path / "bad")
