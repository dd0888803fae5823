"""Conversion: the graph is the model, bits do not depend on batch, threads or backend, bad input is refused by name."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch
from torch import nn

from integer.conversion import check_parts
from intflash import InputError, integer
from intflash.digits import load_model, load_split
from intflash.integer.calibration import bind
from intflash.integer.executors import EXECUTORS
from intflash.integer.lower import Options, fixed_point
from intflash.integer.registry import translate
from intflash.integer.simulate import simulate
from oracle import sqnr

OPTIONS = [
    {}, {"method": "intflash_p8"}, {"residual_bits": 32}, {"activation_bits": 8}, {"activation_bits": 12},
    {"observer": "mse"}, {"observer": "percentile"}, {"fold": False}, {"scales": "tensor"},
]  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    """(digit ViT, calibration, 96 held-out images, its logits)."""
    train, held_out = load_split()
    model, images = load_model("vit"), held_out.images[:96]
    return model, integer.calibrate(model, [train.images[:64], train.images[64:128]]), images, model(images)


def test_graph_is_the_model(digits):
    model, _, images, logits = digits
    check_parts(model)
    found = translate(model).run({"images": images}, torch.float64)["logits"]
    assert torch.allclose(found, copy.deepcopy(model).double()(images.double()), atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(digits, options):
    """Both executors have the same bits, and the logits are what the scheme's quantizers leave of the float ones."""
    model, calibration, images, logits = digits
    made = integer.convert(model, calibration, **options)
    found = made(images)
    reference = integer.convert(model, calibration, backend="reference", **options)
    assert reference.backend == "reference" and torch.equal(reference(images[:8]), found[:8])
    simulated = simulate(model, calibration, Options(**options), {"images": images})["logits"]
    within = 2.0 if "method" in options else 1.0  # dB; 8-bit P is not the scheme's
    assert sqnr(logits, found) > max(40, sqnr(logits, simulated) - within)
    assert (found.argmax(1) == logits.argmax(1)).sum() >= 95


def test_options_change_the_program(digits):
    """No option is ignored."""
    model, calibration, images, _ = digits
    results = [integer.convert(model, calibration, **options)(images[:16]) for options in OPTIONS]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert not torch.equal(one, other)


def test_top1_of_held_out_digits():
    """At most two of 599 images below float32."""
    train, held_out = load_split()
    model = load_model("vit")
    made = integer.convert(model, integer.calibrate(model, [train.images[:64]]))
    floats = int((model(held_out.images).argmax(1) == held_out.labels).sum())
    assert int((made(held_out.images).argmax(1) == held_out.labels).sum()) >= floats - 2


@pytest.mark.parametrize("backend", EXECUTORS)
def test_bits_do_not_depend_on_batch_threads_or_backend(digits, backend):
    """Alone, in parts, in another order, on one thread and on several: the bits of one batch by the default backend."""
    model, calibration, images, _ = digits
    images = images[:4]
    made = integer.convert(model, calibration)
    expected = made(images)
    reason = EXECUTORS[backend].refused(made.program, made.device)
    if reason:
        pytest.skip(reason)
    made = integer.convert(model, calibration, backend=backend)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(made(images), expected)
            assert torch.equal(torch.cat([made(x) for x in images.split([1, 3])]), expected)
            assert torch.equal(made(images.flip(0)).flip(0), expected)
    finally:
        torch.set_num_threads(threads)


def test_pieces_do_not_change_bits(digits, monkeypatch):
    model, calibration, images, _ = digits
    made = integer.convert(model, calibration)
    whole = made(images[:4])
    monkeypatch.setattr("intflash.integer.portable.PIECE", 20_000)
    assert torch.equal(made(images[:4]), whole)


def test_uint8_images(digits):
    """Raw pixels with the normalization folded in are the float images to the rounding of weights."""
    model, _, _, _ = digits
    train, held_out = load_split()
    mean, std = (0.1,), (0.7,)
    pixels = (train.images[:128] * 255).round().to(torch.uint8)

    def normalized(x):
        return (x.float() / 255 - mean[0]) / std[0]

    calibration = integer.calibrate(model, [normalized(pixels)])
    made = integer.convert(model, calibration, image="uint8", mean=mean, std=std)
    test = (held_out.images[:64] * 255).round().to(torch.uint8)
    assert made(test).shape == (64, 10)
    assert sqnr(model(normalized(test)), made(test)) > 38
    with pytest.raises(InputError, match="expected uint8, got torch.float32"):
        made(test.float())
    with pytest.raises(InputError, match="mean must be 1 numbers"):
        integer.convert(model, calibration, image="uint8")


def test_call_is_the_models(digits):
    model, calibration, images, _ = digits
    made = integer.convert(model, calibration)
    assert torch.equal(made(images=images), made(images))
    assert not made.training and made.eval() is made
    for wrong, message in (
        (images[:, :, :4], r"shape \[B, 1, 8, 8\], got \[96, 1, 4, 8\]"),
        (images.long(), "float32, float16 or bfloat16, got torch.int64"),
        (images[:0], "expected a batch"),
        (torch.full_like(images, float("nan")), "finite values"),
        ("image", "expected a tensor, got str"),
    ):
        with pytest.raises(InputError, match=message):
            made(wrong)
    with pytest.raises(InputError, match="unknown inputs"):
        made(pixels=images)
    with pytest.raises(InputError, match="expected the input 'images'"):
        made()


def test_torchs_modes_change_no_bit(digits):
    """Autocast, other precisions of float32 products, another dtype of the module, compilation around it, pickle."""
    model, calibration, images = digits[0], digits[1], digits[2][:4]
    made = integer.convert(model, calibration)
    expected = made(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made(images), expected)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(made(images), expected)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.equal(torch.compile(lambda x: 2 * made(x), backend="eager")(images), 2 * expected)
    assert torch.equal(pickle.loads(pickle.dumps(made))(images), expected)
    assert torch.equal(copy.deepcopy(made).half()(images), expected)
    assert not made(images.clone().requires_grad_()).requires_grad
    assert made(images.half()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(digits, dtype):
    images, logits = digits[2][:32], digits[3][:32]
    model = copy.deepcopy(digits[0]).to(dtype)
    made = integer.convert(model, integer.calibrate(model, [images.to(dtype)]))
    assert (made(images.to(dtype)).argmax(1) == logits.argmax(1)).sum() >= 31


def test_report_shows_every_operation(digits):
    model, calibration, _, _ = digits
    made = integer.convert(model, calibration, backend="reference")
    lines = made.report().splitlines()
    assert len(lines) == 1 + len(made.program.operations) + 1
    for operation, line in zip(made.program.operations, lines[1:-1], strict=True):
        assert line.split()[0] == operation.name and line.endswith("reference")
    for name, formats in {
        "pixels": r"patches 8x8, rounded to steps of 0.0039\d*  float -> int8 1x64",
        "patches": r"linear, codes +int8 1x64 \* int8 weights -> int16 65x64",
        "blocks.0.qkv": r"linear, codes +int8 65x64 \* int8 weights -> 3 of int8 1x4x65x16",
        "blocks.0.proj": r"linear, residual +int8 65x64 \* int8 weights \+ int16 -> int16 65x64",
        "blocks.0.mlp.0": r"linear, 10-bit table +int8 65x64 \* int8 weights -> int8 65x256",
        "logits": r"times a scale for each channel +int32 1x10 -> float32 10 +float",
    }.items():
        assert any(re.match(rf"{name} +{formats}", line) for line in lines), (name, lines)
    portable = integer.convert(model, calibration, backend="torch").report()
    assert re.search("attention intflash.* torch, by (cpu|torch)", portable)  # attention is by its own backend there
    assert "blocks.0.attention" in repr(made) and "DigitsViT" in repr(made)


def test_calibration_refuses(digits):
    model, images = digits[0], digits[2][:4]
    with pytest.raises(InputError, match="asked for 5 images, 4 came"):
        integer.calibrate(model, [images], images=5)
    with pytest.raises(InputError, match="none were given"):
        integer.calibrate(model, [])
    with pytest.raises(InputError, match=r"pass \[x\]"):
        integer.calibrate(model, images)
    with pytest.raises(InputError, match="images: expected finite values"):
        integer.calibrate(model, [images * float("inf")])
    with pytest.raises(InputError, match="call model.eval"):
        integer.calibrate(copy.deepcopy(model).train(), [images])
    with pytest.raises(InputError, match="Linear has no converter"):
        integer.calibrate(nn.Linear(2, 2).eval(), [images])


def test_nan_and_changes_are_named(digits):
    model, images = digits[0], digits[2][:4]
    broken = copy.deepcopy(model)
    broken.blocks[2].mlp[0].weight[3, 1] = float("nan")
    with pytest.raises(InputError, match="blocks.2.mlp.0: expected a finite weight"):
        integer.calibrate(broken, [images])
    large = copy.deepcopy(model)
    large.blocks[1].mlp[0].weight.mul_(1e38)
    large.blocks[1].mlp[0].bias.fill_(3.4e38)  # which any positive product passes
    with pytest.raises(InputError, match="blocks.1.mlp.0.pre: calibration needs finite values"):
        integer.calibrate(large, [images])
    large = copy.deepcopy(model)
    large.head.weight.mul_(1e38)
    large.head.bias.fill_(3.4e38)
    with pytest.raises(InputError, match="head: calibration needs finite values"):
        integer.calibrate(large, [images])
    flat = copy.deepcopy(model)
    flat.blocks[3].norm2.weight.zero_()
    flat.blocks[3].norm2.bias.zero_()
    with pytest.raises(InputError, match="blocks.3.norm2: its calibrated range is zero"):
        integer.calibrate(flat, [images])


def _set(path, value):
    def change(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


CHANGES = {
    "blocks.1.proj": lambda model: model.blocks[1].proj.bias[0].add_(1e-3),
    "blocks.2.norm1": _set("blocks.2.norm1.eps", 1e-3),
    "blocks.3.mlp.0": _set("blocks.3.mlp.1", nn.GELU("tanh")),
    "blocks.0.qkv": _set("blocks.0.heads", 2),
    "blocks.3.norm1": lambda model: model.blocks.__delitem__(3),
}


@pytest.mark.parametrize("layer", CHANGES)
def test_a_model_that_was_changed_is_refused(digits, layer):
    """Weights, an option, a function, the split into heads, a layer less: by the name of the first such layer."""
    changed = copy.deepcopy(digits[0])
    CHANGES[layer](changed)
    with pytest.raises(InputError, match=f"^{layer}: the model was changed after its calibration"):
        integer.convert(changed, digits[1])


def test_what_the_graph_does_not_see_is_found(digits):
    """A hook changes what the model computes, but not its modules."""
    model, images = digits[0], digits[2][:4]
    hooked = copy.deepcopy(model)
    hooked.blocks[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(InputError, match="logits differ from those of its translation"):
        integer.calibrate(hooked, [images])


def test_conversion_refuses(digits):
    model, calibration, _, _ = digits
    with pytest.raises(InputError, match="method must be one of"):
        integer.convert(model, calibration, method="qflash")
    with pytest.raises(InputError, match="options of convert are method, .*got metod"):
        integer.convert(model, calibration, metod="intflash")
    with pytest.raises(InputError, match="backend of an integer model must be one of"):
        integer.convert(model, calibration, backend="npu")
    with pytest.raises(InputError, match="takes what calibrate returned, got dict"):
        integer.convert(model, {})
    with pytest.raises(InputError, match="the calibration is of Other, this is DigitsViT"):
        integer.convert(model, dataclasses.replace(calibration, model="Other"))
    other = copy.deepcopy(model)
    other.blocks[1] = nn.Identity()
    with pytest.raises(InputError, match=r"blocks.1 \(Identity\) has no integer form"):
        integer.convert(other, calibration)


def test_progress(digits):
    model, _, images, _ = digits
    seen = []
    integer.calibrate(model, [images[:8], images[8:32]], images=32, progress=seen.append)
    assert seen == [8, 32]


def test_progress_on_a_terminal(digits, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal's
    integer.calibrate(digits[0], [digits[2][:8], digits[2][8:32]], images=32)
    shown = capsys.readouterr().err
    assert "calibrating" in shown and "32/32" in shown


def test_fixed_point_uses_31_bits():
    factors = torch.tensor([0.0, 1e-9, 0.3, 0.75], dtype=torch.float64)
    multiplier, shift = fixed_point(factors, "layer")
    assert 1 << 30 <= int(multiplier.max()) < 1 << 31
    assert ((multiplier.double() / 2.0**shift - factors).abs() <= 0.5 / 2.0**shift).all()
    with pytest.raises(InputError, match="layer: expected requantization factors below 2"):
        fixed_point(torch.tensor([2.0**30], dtype=torch.float64), "layer")


def test_bind_broadcasts_optional_inputs():
    from intflash.integer.program import Input

    wanted = (
        Input("ids", "index", (3,), 10),
        Input("types", "index", (3,), 2, True),
        Input("mask", "mask", (3,), 0, True),
    )
    found = bind(wanted, {"ids": torch.tensor([[1, 2, 9]])}, torch.device("cpu"))
    assert found["types"].tolist() == [[0, 0, 0]] and found["mask"].tolist() == [[True] * 3]
    with pytest.raises(InputError, match=r"indices in \[0, 10\), got 1 to 10"):
        bind(wanted, {"ids": torch.tensor([[1, 2, 10]])}, torch.device("cpu"))
    with pytest.raises(InputError, match="different batches"):
        bind(wanted, (torch.ones(1, 3).long(), torch.ones(2, 3).long()), torch.device("cpu"))


def test_bind_copies_nothing_to_the_device():
    """A graph capture forbids copies from CPU memory."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from intflash.integer.program import Input

    class Devices(TorchDispatchMode):
        seen = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen.add(out.device.type)
            return out

    wanted = (
        Input("ids", "index", (3,), 10),
        Input("types", "index", (3,), 2, True),
        Input("mask", "mask", (3,), 0, True),
    )
    device = torch.device("meta")
    ids = torch.ones(1, 2, dtype=torch.int64, device=device)
    with Devices() as devices:
        found = bind(wanted, {"ids": ids}, device)
    assert devices.seen == {"meta"} and {x.shape for x in found.values()} == {(1, 3)}
