"""Histograms and scales files: values that cannot be or give a scale are refused. Accuracy:
tests/models/test_scales.py.
"""

import json

import pytest
import torch

from intflash.errors import InputError
from intflash.quant.calibrate import Histogram, LayerScales, Scales

LAYER = LayerScales(heads=2, kv_heads=1, head_dim=4, weights=0.1, q=[0.1, 0.2], k=[0.1], v=[0.1] * 4, out=[])
GRANULARITY = {"q": "head", "k": "tensor", "v": "channel", "out": "none"}
SCALES = Scales("Net", "intflash", "absmax", GRANULARITY, 1, 8, {}, {"a": LAYER, "b": LAYER})


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("first", [True, False])
def test_values_that_are_not_finite_are_refused(value, first):
    histogram, x = Histogram("head"), torch.ones(1, 2, 3, 4)
    if not first:
        histogram.observe(x)
    x[0, 1, 2, 3] = value
    with pytest.raises(InputError, match="needs finite values, got (inf|nan)"):
        histogram.observe(x)


def layer(name, value):
    return lambda content: content["layers"]["b"].__setitem__(name, value)


@pytest.mark.parametrize(
    "change, message",
    [
        (layer("q", [0.1]), r"layer b: q has 1 scales, expected 2 \(per head, 2 heads\)"),
        (layer("v", [0.1] * 3 + [0.0]), "layer b: v has the scale 0.0, expected a number that is finite and > 0"),
        (layer("k", [float("nan")]), "layer b: k has the scale nan"),
        (layer("k", []), "layer b: k has 0 scales, expected 1"),
        (layer("out", [0.1]), "layer b: out has 1 scales, expected 0"),
        (layer("heads", 0), "layer b: heads is 0, expected an integer from 1 to"),
        (layer("heads", True), "layer b: heads is True, expected an integer from 1 to"),
        (layer("kv_heads", 10**400), r"layer b: kv_heads is 10+\.\.\.0+, expected an integer from 1 to"),
        (layer("head_dim", 10**400), r"layer b: head_dim is 10+\.\.\.0+, expected an integer from 1 to"),
        (layer("head_dim", 4.0), "layer b: head_dim is 4.0, expected an integer from 1 to"),
        (layer("k", [10**400]), r"layer b: k has the scale 10+\.\.\.0+, expected a number that is finite"),
        (layer("k", [1e39]), r"layer b: k has the scale 1e\+39, expected a number that is finite"),
        (layer("k", [1e-45]), "layer b: k has the scale 1e-45, expected a number that is finite"),
        (layer("k", [True]), "layer b: k has the scale True, expected a number"),
        (layer("k", 0.1), "layer b: k is 0.1, expected a list of scales"),
        (layer("k", {"0": 0.1}), "layer b: k is {'0': 0.1}, expected a list of scales"),
        (layer("weights", 10**400), r"layer b: weights is 10+\.\.\.0+, expected a finite number"),
        (layer("weights", "0.1"), "layer b: weights is '0.1', expected a finite number"),
        (layer("bias", 1), "layer b has unknown 'bias'; its fields are heads, kv_heads,"),
        (lambda content: content["layers"]["b"].pop("q"), "layer b misses 'q'; its fields are heads"),
        (
            lambda content: content["layers"].update(b=3),
            "layer b is 3, expected an object with the fields of LayerScales",
        ),
        (lambda content: content.pop("layers"), "the file misses 'layers'; its fields are model"),
        (lambda content: content.update(model=["Net"]), r"model is \['Net'\], expected a string"),
        (lambda content: content.update(images=-1), "images is -1, expected an integer of at least 0"),
        (lambda content: content.update(versions=[]), r"versions is \[\], expected an object of named values"),
        (lambda content: content.update(granularity=[["q"]]), r"granularity is \[\['q'\]\], expected an object"),
        (lambda content: content["granularity"].update(q=["head"]), "granularity must give each of"),
        (layer("weights", float("nan")), "layer b: weights is nan"),
        (layer("q", "many"), "layer b: q is 'many', expected a list of scales"),
        (layer("q", [None, None]), "layer b: q has the scale None, expected a number"),
        (lambda content: content["granularity"].pop("q"), "granularity must give each of"),
        (lambda content: content["granularity"].update(q="block"), "granularity must give each of"),
        (lambda content: content.update(layers=[]), r"layers is \[\], expected an object of named values"),
        (lambda content: content.update(format="intflash-scales/0"), "has format 'intflash-scales/0', expected"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(tmp_path, change, message):
    path = tmp_path / "scales.json"
    SCALES.save(path)
    assert Scales.load(path) == SCALES
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"scales.json is not a valid scales file: .*{message}"):
        Scales.load(path)


@pytest.mark.parametrize("moved, told", [(0.004, False), (0.006, True), (-0.006, True)])
def test_other_weights_are_detected_at_the_tolerance(moved, told):
    here = dict(heads=2, kv_heads=1, head_dim=4, weights=0.1 + moved)
    found = SCALES.differences("Net", {"a": here, "b": here})
    assert len(found) == (2 if told else 0) and all("other weights" in line for line in found)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\x81", b"{", b"[1]", b"[" * 100_000, b'{"layers": ' * 100_000, b"1" * 10_000]
)
def test_a_file_without_a_json_object_is_refused(tmp_path, content):
    path = tmp_path / "scales.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="scales.json is not a valid scales file"):
        Scales.load(path)


def test_a_layer_may_repeat_its_kv_heads_before_the_call():
    scales = Scales(
        "M", "auto", "absmax", dict.fromkeys(("q", "k", "v", "out"), "tensor"), 1, 1, {},
        {"a": LayerScales(4, 4, 8, 0.1, [1.0], [1.0], [1.0], [1.0])},
    )  # fmt: skip
    assert scales.differences("M", {"a": dict(heads=4, kv_heads=2, head_dim=8, weights=0.1)}) == []
    assert scales.differences("M", {"a": dict(heads=8, kv_heads=2, head_dim=8, weights=0.1)})
