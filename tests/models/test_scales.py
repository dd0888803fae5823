"""Calibration and scales files, on the trained digit models: accuracy, observers, refusals."""

import json

import pytest
import torch

import intflash
from intflash.digits import load_model, load_split
from intflash.errors import InputError
from intflash.models.calibration import _Observed
from intflash.quant.calibrate import (
    OBSERVERS,
    Histogram,
    LayerScales,
    Scales,
    observed_scales,
    percentile_clip,
)
from oracle import randn, sqnr
from peaked_models import run

LAYERS = 4
FEW = 48  # images, where accuracy is not the question


@pytest.fixture(scope="module")
def digits():
    return load_split()


@pytest.fixture(scope="module", params=["vit", "swin"])
def trained(request, digits):
    """Returns (model, held-out images, labels, float logits, training images)."""
    model = load_model(request.param)
    train, held_out = digits
    return model, held_out.images, held_out.labels, run(model, held_out.images), train.images[:192]


def top1(logits, labels):
    return 100 * float((logits.argmax(1) == labels).float().mean())


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_digits_keep_their_accuracy(trained, static):
    """On the whole held-out third, Top-1 stays within 0.4 points of float32."""
    model, images, labels, reference, calibration = trained
    scales = intflash.calibrate(model, [calibration]) if static else None
    with intflash.patch(model, scales=scales) as report:
        logits = run(model, images)
    assert len(report.replaced) == LAYERS
    assert abs(top1(logits, labels) - top1(reference, labels)) <= 0.4
    assert sqnr(reference, logits) > 45


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("method", ["intflash_p8", "intflash_online"])
def test_every_observer(trained, observer, method):
    model, images, _, reference, calibration = trained
    scales = intflash.calibrate(model, [calibration], method, observer=observer)
    with intflash.patch(model, method, scales) as report:
        logits = run(model, images[:FEW])
    assert len(report.replaced) == LAYERS
    assert sqnr(reference[:FEW], logits) > 36


def test_finer_scales_are_closer(trained):
    model, images, _, reference, calibration = trained
    found = {}
    for name, granularity in {"tensor": {}, "head": dict.fromkeys("qkv", "head"), "channel": {"v": "channel"}}.items():
        scales = intflash.calibrate(model, [calibration], granularity=granularity | {"out": name})
        with intflash.patch(model, scales=scales):
            found[name] = sqnr(reference[:FEW], run(model, images[:FEW]))
    assert found["head"] > found["tensor"] - 1 and found["channel"] > found["tensor"] - 1


def test_file_is_readable_and_round_trips(tmp_path):
    model, path = load_model("vit"), tmp_path / "scales.json"
    scales = intflash.calibrate(model, [torch.rand(8, 1, 8, 8)], granularity={"k": "head"}, path=path)
    assert Scales.load(path) == scales
    content = json.loads(path.read_text())
    assert content["model"] == "DigitsViT" and content["images"] == 8 and "torch" in content["versions"]
    assert content["granularity"] == {"q": "tensor", "k": "head", "v": "tensor", "out": "tensor"}
    assert len(content["layers"]["blocks.0"]["k"]) == 4
    assert len(path.read_text().splitlines()) < 80
    image = torch.rand(2, 1, 8, 8)
    with intflash.patch(model, scales=scales):
        given = run(model, image)
    with intflash.patch(model, scales=path) as report:
        assert torch.equal(run(model, image), given) and report.static and report.method == "auto"


def test_a_file_of_another_model_is_refused_with_the_difference(tmp_path):
    path = tmp_path / "scales.json"
    intflash.calibrate(load_model("vit"), [torch.rand(4, 1, 8, 8)], path=path)
    with pytest.raises(InputError, match=r"model: the file is for DigitsViT, this is DigitsSwin(.|\n)*not in the file"):
        intflash.patch(load_model("swin"), scales=path)
    other = load_model("vit")
    torch.manual_seed(0)
    with torch.no_grad():
        other.blocks[1].qkv.weight.copy_(torch.randn_like(other.blocks[1].qkv.weight) * 0.1)
    with pytest.raises(InputError, match="layer blocks.1: calibrated with other weights"):
        intflash.patch(other, scales=path)
    content = json.loads(path.read_text())
    content["layers"]["blocks.0"]["heads"] = 8
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="layer blocks.0: heads 8 in the file, 4 in the model"):
        intflash.patch(load_model("vit"), scales=path)
    with pytest.raises(InputError, match=r"\(1 difference\):"):
        intflash.patch(load_model("vit"), scales=path)
    path.write_text("{}")
    with pytest.raises(InputError, match="has format None"):
        intflash.patch(load_model("vit"), scales=path)


def test_differences_are_in_the_models_order():
    scales = intflash.calibrate(load_model("vit"), [torch.rand(4, 1, 8, 8)])
    other = load_model("vit")
    torch.manual_seed(1)
    with torch.no_grad():
        for block in other.blocks:
            block.qkv.weight.copy_(torch.randn_like(block.qkv.weight) * 0.1)
    with pytest.raises(InputError, match=r"\(4 differences\)") as refused:
        intflash.patch(other, scales=scales)
    named = [line.split()[1] for line in str(refused.value).splitlines()[1:]]
    assert named == [f"blocks.{i}:" for i in range(4)]


def test_one_input_instead_of_batches_is_refused():
    x = torch.rand(4, 1, 8, 8)
    for given, what in ((x, "Tensor"), ({"images": x}, "dict")):
        with pytest.raises(InputError, match=rf"batches must be an iterable of inputs, got one {what}: pass \[x\]"):
            intflash.calibrate(load_model("vit"), given)


def test_a_path_that_cannot_be_written_is_refused_before_any_batch(tmp_path):
    (tmp_path / "file").touch()
    batches = iter([torch.rand(4, 1, 8, 8)])
    for path in ("/proc/x/s.json", tmp_path, tmp_path / "file" / "s.json"):
        with pytest.raises(InputError, match="expected a file that can be written, got"):
            intflash.calibrate(load_model("vit"), batches, path=path)
    intflash.calibrate(load_model("vit"), batches, path=tmp_path / "new" / "s.json")
    assert Scales.load(tmp_path / "new" / "s.json").batches == 1


def test_half_precision_of_the_same_weights_matches(tmp_path):
    scales = intflash.calibrate(load_model("vit"), [torch.rand(4, 1, 8, 8)])
    intflash.patch(load_model("vit").to(torch.bfloat16), scales=scales)


def test_methods_without_static_scales_are_refused():
    model = load_model("vit")
    with pytest.raises(InputError, match="no scales to calibrate"):
        intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], "fp32")
    with pytest.raises(InputError, match="can have static q scales per"):
        intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], granularity={"q": "channel"})
    half = intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], "int_flash_half")
    assert half.granularity["v"] == "none" and half.layers["blocks.0"].v == []
    with intflash.patch(model, scales=half) as report:
        assert report.method == "int_flash_half"
        run(model, torch.rand(1, 1, 8, 8))
    scales = intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], granularity={"v": "channel"})
    with pytest.raises(InputError, match="per channel for v"):
        intflash.patch(model, "qflash", scales)
    with pytest.raises(InputError, match="observer must be one of"):
        intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], observer="median")
    with pytest.raises(InputError, match="no images were given"):
        intflash.calibrate(model, [])
    for unknown in ("Q", "x"):
        with pytest.raises(InputError, match=f"granularity is of q, k, v, out, got '{unknown}'"):
            intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], granularity={unknown: "head"})
    with pytest.raises(InputError, match="output scales are per .* got 'row'"):
        intflash.calibrate(model, [torch.rand(1, 1, 8, 8)], granularity={"out": "row"})


@pytest.mark.parametrize("granularity, groups", [("tensor", 1), ("head", 2), ("channel", 6)])
def test_observers_on_known_data(granularity, groups):
    """An outlier beyond 5 sigma: absmax includes it, percentile and mse clip it. Batches add up."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 2000, 3)
    x[0, 0, 0, 0] = 40.0
    split, whole = Histogram(granularity), Histogram(granularity)
    for part in (x[1:], x[:1]):
        split.observe(part)
    whole.observe(x)
    assert split.counts.sum() == whole.counts.sum() == x.numel()
    scales = {name: observed_scales(split, name) for name in OBSERVERS}
    assert all(len(values) == groups for values in scales.values())
    assert scales["absmax"][0] == pytest.approx(40 / 127)
    if granularity != "channel":  # of 8000 values, 99.99 % are all of them
        assert 3 < scales["percentile"][0] * 127 < 6
    assert scales["mse"][0] < scales["absmax"][0]
    for name in ("percentile", "mse"):
        clips = torch.tensor(observed_scales(whole, name)) / torch.tensor(scales[name])
        assert torch.allclose(clips, torch.ones(groups), rtol=0.1)


def test_mse_clip_is_a_minimum():
    torch.manual_seed(0)
    x = torch.distributions.StudentT(3.0).sample((1, 1, 1, 20000))
    histogram = Histogram("tensor")
    histogram.observe(x)

    def error(scale):
        return float(((x / scale).round().clamp(-127, 127) * scale - x).square().mean())

    best = observed_scales(histogram, "mse")[0]
    assert error(best) <= min(error(best * 1.15), error(best / 1.15), error(observed_scales(histogram, "absmax")[0]))


@pytest.mark.parametrize("last", [True, False])
def test_the_largest_value_of_any_batch_counts(last):
    x = torch.randn(4, 2, 50, 3)
    x[0, 0, 0, 0] = 40.0
    histogram = Histogram("head")
    for part in (x[1:], x[:1]) if last else (x[:1], x[1:]):
        histogram.observe(part)
    assert observed_scales(histogram, "absmax") == pytest.approx((x.abs().amax((0, 2, 3)) / 127).tolist())


def test_a_percentile_is_the_upper_edge_of_its_bin():
    histogram = Histogram("tensor")
    histogram.observe(torch.arange(1, 4097).view(1, 1, 1, -1) / 4096)
    assert 0.5 <= float(percentile_clip(histogram, 50.0)) <= 0.5 + 2 / 4096


def test_scales_of_outputs_and_of_grouped_values():
    q, k, v = randn(2, 4, 20, 16)
    granularity = {"q": "tensor", "k": "tensor", "v": "head", "out": "tensor"}
    observed = _Observed(granularity)
    out = observed(q, k[:, :2], v[:, :2] * 3, enable_gqa=True)
    found = {name: observed_scales(histogram, "absmax") for name, histogram in observed.histograms.items()}
    assert found["out"] == pytest.approx([out.abs().max().item() / 127])
    assert found["v"] == pytest.approx((3 * v[:, :2].abs().amax((0, 2, 3)) / 127).tolist())
    layer = LayerScales(*observed.sizes, 0.1, **found)
    layer.check(granularity)
    assert layer.tensor("v", "head").shape == (1, 2, 1, 1)
