"""The file of an integer model: read without the float model, and refused where it is damaged or foreign."""

import copy
import functools
import json
import math
import random
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from intflash import InputError, integer
from intflash.digits import load_model
from intflash.integer import reference
from intflash.integer.executors import EXECUTORS
from intflash.integer.file import _MALFORMED, _described, _read


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
    other = json.dumps(json.loads(metadata["provenance"]) | {"model": "Other"})
    for constants, more in ((changed, {}), (tensors, {"provenance": other})):
        save_file(constants, bad, metadata | more)
        with pytest.raises(InputError, match="damaged: its program, constants and provenance are not those that"):
            integer.load(bad)


def test_foreign_files_are_refused(tmp_path):
    for content in (b"", b"{}", b"not a model" * 100, b"\x80\x02}q\x00.", bytes(4096)):
        (tmp_path / "foreign").write_bytes(content)
        with pytest.raises(InputError, match="foreign cannot be read"):
            integer.load(tmp_path / "foreign")
    with pytest.raises(InputError, match="cannot be read"):
        integer.load(tmp_path)


def test_every_flipped_bit_is_found(saved, tmp_path):
    """In the header, which holds program and provenance, and in the constants."""
    path, _, _ = saved
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    chosen = random.Random(0)
    positions = [chosen.randrange(header) for _ in range(120)] + [chosen.randrange(len(content)) for _ in range(40)]
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << chosen.randrange(8)
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(InputError):
            integer.load(tmp_path / "bad")


def test_load_needs_no_model_library(saved):
    """Not those of the float model, and not the digits' own code either."""
    script = (
        "import sys\n"
        "for name in ('timm', 'torchvision', 'transformers', 'intflash.digits'): sys.modules[name] = None\n"
        "import torch\n"
        "from intflash import integer\n"
        f"print(integer.load({str(saved[0])!r})(torch.zeros(1, 1, 8, 8)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "torch.Size([1, 10])\n", done.stderr


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
        "expected shift of the type <class 'int'>, got '8'": lambda p: p["operations"][2].update(shift="8"),
        "expected outputs": lambda p: p["operations"][1].update(out=[]),
        "a map of rows with a residual only": lambda p: p["operations"][3].update(store_rows="norm.load_rows"),
        "'list' object|expected a buffer": lambda p: p.update(buffers=[]),
    }
    for message, change in changes.items():
        program = json.loads(metadata["program"])
        change(program)
        text = json.dumps(program)
        digest = _digest(text, metadata["provenance"], tensors)
        save_file(tensors, tmp_path / "bad", metadata | {"program": text, "digest": digest})
        with pytest.raises(InputError, match=message):
            integer.load(tmp_path / "bad")


def _paths(content, path=()):
    """Where something stands in a JSON value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def test_a_program_with_any_wrong_value_is_refused_or_runs(model):
    """One value replaced by one of another type or size: an InputError, or a program whose executors agree."""
    content = json.loads(json.dumps(_described(model.program)))
    paths, chosen = list(_paths(content)), random.Random(0)
    strange = [0, -1, 2, 63, 1 << 40, 0.5, math.nan, None, True, "", [], [1], {}, "pixels", "head.bias", "norm"]
    image, ran = torch.rand(1, 1, 8, 8), 0
    for _ in range(400):
        changed = copy.deepcopy(content)
        *path, key = chosen.choice(paths)
        functools.reduce(lambda value, part: value[part], path, changed)[key] = chosen.choice(strange)
        try:
            program = _read(changed, model.program.tensors).check()
        except (InputError, *_MALFORMED):
            continue
        ran += 1
        inputs = {i.name: image for i in program.inputs}
        expected = reference.run(program, inputs)
        for name in EXECUTORS:
            if EXECUTORS[name].refused(program, torch.device("cpu")) is None:
                found = EXECUTORS[name].run(program, inputs)
                assert all(torch.equal(found[buffer], x) for buffer, x in expected.items())
    assert ran
