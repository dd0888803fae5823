"""The digit models: data split, shipped weights, windows, and the Top-1 that the demo shows."""

import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import intflash
from intflash.digits import ARCHITECTURES, float_attention, load_model, load_split
from intflash.digits.swin import from_windows, shift_mask, to_windows


@pytest.fixture(scope="module")
def held_out():
    return load_split()[1]


def method_attention(method, q_factor=1.0, **options):
    def attend(q, k, v, *, bias=None, keep=None):
        return intflash.attention(q * q_factor, k, v, keep, bias=bias, method=method, **options)

    return attend


def top1(model, data, attention=float_attention):
    with torch.inference_mode():
        return (model(data.images, attention).argmax(1) == data.labels).float().mean().item() * 100


def test_split_is_every_third_image():
    train, held_out = load_split()
    assert (len(train), len(held_out)) == (1198, 599)
    assert held_out.images.min() == 0 and held_out.images.max() == 1
    assert held_out.labels[:5].tolist() == [2, 5, 8, 1, 4]


def test_windows_round_trip():
    x = torch.arange(2 * 14 * 14 * 3).reshape(2, 14, 14, 3)
    windows = to_windows(x)
    assert windows.shape == (8, 49, 3)
    assert torch.equal(windows[1], x[0, :7, 7:].reshape(49, 3))
    assert torch.equal(from_windows(windows, 14), x)


def test_shift_mask_keeps_old_neighbours():
    keep = shift_mask(14)
    assert keep.shape == (4, 1, 49, 49) and keep.diagonal(dim1=2, dim2=3).all()
    assert keep[0].all()  # the first window holds no wrapped tokens
    assert keep[3].sum() == 16**2 + 2 * 12**2 + 9**2  # 4x4, 4x3, 3x4 and 3x3 tokens


def test_swin_without_its_mask_differs(held_out):
    data, model = held_out.take(8), load_model("swin")

    def unmasked(q, k, v, *, bias=None, keep=None):
        return float_attention(q, k, v, bias=bias)

    with torch.inference_mode():
        assert (model(data.images) - model(data.images, unmasked)).abs().max() > 0.01


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_small_and_good(name, held_out):
    from importlib import resources

    weights = resources.files("intflash.digits") / "weights" / f"{name}.safetensors"
    assert len(weights.read_bytes()) < 1_000_000
    assert top1(load_model(name), held_out) >= 98.0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_intflash_keeps_top1(name, held_out):
    model = load_model(name)
    assert abs(top1(model, held_out) - top1(model, held_out, method_attention("intflash"))) <= 0.4


def test_scaled_queries_break_qflash_only(held_out):
    """With queries 64 times larger, exp_M * x of the qflash authors' program overflows int32, and Top-1 collapses."""
    data, model = held_out.take(300), load_model("vit")

    def scaled_float(q, k, v, *, bias=None, keep=None):
        return float_attention(64 * q, k, v)

    expected = top1(model, data, scaled_float)
    assert expected > 80
    assert abs(top1(model, data, method_attention("intflash", 64.0)) - expected) <= 2
    assert top1(model, data, method_attention("qflash", 64.0)) < expected - 40


def test_training_script_is_repeatable(tmp_path, monkeypatch):
    script = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "train_digits.py"))
    train = script["train"]
    monkeypatch.setitem(train.__globals__, "load_split", lambda: tuple(part.take(60) for part in load_split()))
    first, second = (train("vit", 1, 30, 1e-3, 0, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first == second
    ARCHITECTURES["vit"]().load_state_dict(load(first))


def test_unknown_model():
    with pytest.raises(intflash.InputError, match="'vit', 'swin'"):
        load_model("resnet")
