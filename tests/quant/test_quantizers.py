"""Quantizers: one rounding, the papers' rule, every granularity, smoothing and rotation."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import intflash
from intflash import InputError, QTensor, Recipe, quantize
from intflash.quant import hadamard_rotate, key_mean

X = torch.randn(1, 2, 8, 4)
CODES = torch.ones(1, 3, 2, 2, dtype=torch.int8)
FLOATS = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_exact_rule_rounds_the_exact_product_once(values):
    x = torch.tensor(values).reshape(1, 1, 1, -1)
    got = quantize(x)
    amax = x.abs().max()
    if amax < 2.0**-100:
        assert got.scale.item() == 1.0 and not got.data.any()
        return
    s = amax / 127
    inv = Fraction((1.0 / s).item())
    expected = [max(-127, min(127, round(Fraction(v) * inv))) for v in x.flatten().tolist()]
    assert got.scale.item() == s.item()
    assert got.data.flatten().tolist() == expected


def test_exact_rule_differs_from_two_roundings_at_a_near_tie():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(1, 1, 4096, 64, generator=g) * 8 - 4
    inv = 1.0 / (x.abs().max() / 127)
    assert (torch.round(x * inv) != quantize(x).data).sum() < 10  # rare, and this is why the rule names its rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_inputs_are_exact_floats(dtype):
    x = torch.randn(2, 3, 5, 8).to(dtype)
    before = x.clone()
    assert torch.equal(quantize(x).data, quantize(x.float()).data)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "granularity, shape",
    [("tensor", (1, 1, 1, 1)), ("head", (2, 3, 1, 1)), ("token", (2, 3, 10, 1)), ("block", (2, 3, 3, 1)),
     ("channel", (2, 3, 1, 6))],
)  # fmt: skip
def test_granularities(granularity, shape):
    x = torch.randn(2, 3, 10, 6)
    q = quantize(x, granularity, block_size=4)
    assert q.scale.shape == shape and q.granularity == granularity
    assert q.data.abs().amax() == 127
    assert ((q.dequantize() - x).abs() <= q.token_scale() / 2 * 1.0001).all()


def test_four_bits_are_held_in_int8():
    q = quantize(torch.randn(1, 2, 8, 4), bits=4)
    assert q.data.abs().max() == 7 and q.data.dtype == torch.int8 and q.bits == 4


def test_static_scales_saturate():
    assert quantize(torch.tensor([[[[10.0, -10.0, 0.1]]]]), scale=0.01).data.flatten().tolist() == [127, -127, 10]


def test_paper_rule_divides():
    x = torch.randn(1, 1, 50, 16)
    q = quantize(x, rule="divide")
    assert torch.equal(q.data.float(), torch.round(x / (x.abs().max() / 127)))


@pytest.mark.parametrize("head_dim, size", [(64, 64), (80, 16), (96, 32), (2, 2)])
def test_rotation_keeps_products(head_dim, size):
    q, k = torch.randn(2, 1, 2, 5, head_dim, dtype=torch.float32)
    rotated = hadamard_rotate(q) @ hadamard_rotate(k).mT
    assert torch.allclose(rotated, q @ k.mT, atol=1e-4)
    one = torch.zeros(1, 1, 1, head_dim)
    one[..., 0] = 1
    assert torch.allclose(hadamard_rotate(one)[..., :size].abs(), torch.full((1, 1, 1, size), size**-0.5))


def test_rotation_refuses_an_odd_head_dim():
    with pytest.raises(InputError, match="even head_dim, got 17"):
        hadamard_rotate(torch.ones(1, 1, 1, 17))


def smoothed_by_the_text(k):
    """K smoothing as docs/numerics.md defines it, in scalar steps of NumPy."""
    b, h, tokens, d = k.shape
    out = k.copy()
    for index in np.ndindex(b, h, d):
        column = (index[0], index[1], slice(None), index[2])
        x, n = list(k[column]), 1
        while n < tokens:
            n *= 2
        x += [np.float32(0)] * (n - tokens)
        while n > 1:
            n //= 2
            for j in range(n):
                x[j] = x[j] + x[j + n]
        out[column] = k[column] - x[0] / np.float32(tokens)
    return out


def rotated_by_the_text(x):
    """The Hadamard rotation as docs/numerics.md defines it."""
    d, size = x.shape[-1], 1
    while d % (2 * size) == 0:
        size *= 2
    out = x.copy()
    for run in range(0, d, size):
        step = 1
        while step < size:
            for c in range(size):
                if c & step == 0:
                    a, b = out[..., run + c].copy(), out[..., run + c + step].copy()
                    out[..., run + c], out[..., run + c + step] = a + b, a - b
            step *= 2
    return out * np.float32(1 / math.sqrt(size))


def spread(*shape, seed=0):
    """Returns float32 values of very different magnitudes, so that each order of additions has different bits."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(4 * torch.randn(shape, generator=g))


@pytest.mark.parametrize("n", [1, 2, 5, 64, 197])
def test_k_smoothing_has_the_bits_of_the_specification(n):
    k = spread(2, 2, n, 3)
    smoothed = k - key_mean(k)
    assert smoothed.numpy().tobytes() == smoothed_by_the_text(k.numpy()).tobytes()
    assert torch.allclose(key_mean(k), k.mean(2, keepdim=True), rtol=1e-4, atol=1e-4 * k.abs().max().item())


@pytest.mark.parametrize("d", [2, 6, 24, 64, 128])
def test_rotation_has_the_bits_of_the_specification(d):
    x = spread(1, 2, 5, d)
    assert hadamard_rotate(x).numpy().tobytes() == rotated_by_the_text(x.numpy()).tobytes()


def test_a_call_rotates_before_smoothing():
    q, k, v = (spread(1, 2, 9, 12, seed=i) for i in range(3))
    changed = [torch.from_numpy(x) for x in (rotated_by_the_text(q.numpy()), rotated_by_the_text(k.numpy()))]
    changed[1] = torch.from_numpy(smoothed_by_the_text(changed[1].numpy()))
    whole = intflash.attention(q, k, v, recipe=Recipe(smooth_k=True, rotate=True))
    assert torch.equal(whole, intflash.attention(*changed, v))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 197])
def test_smoothing_and_rotation_have_the_same_bits_on_a_gpu(n):
    k = spread(2, 2, n, 24)
    assert torch.equal(key_mean(k.cuda()).cpu(), key_mean(k))
    assert torch.equal(hadamard_rotate(k.cuda()).cpu(), hadamard_rotate(k))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: QTensor(torch.ones(1, 1, 2, 2), 1.0), "int8 or int16"),
        (lambda: QTensor(torch.ones(2, 2, dtype=torch.int8), 1.0), r"\[B, H, N, D\]"),
        (lambda: QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 1.0, "row"), "granularity must be one of"),
        (lambda: QTensor(CODES, torch.ones(1, 2, 1, 1), "head"), r"must have shape \[1, 3, 1, 1\], got \(1, 2, 1, 1\)"),
        (lambda: QTensor(CODES, torch.ones(3)), r"must have shape \[1, 1, 1, 1\], got \(3,\)"),
        (lambda: QTensor(CODES.repeat(2, 1, 1, 1), torch.ones(3, 3, 1, 1), "head"), r"shape \[1 or 2, 3, 1, 1\]"),
        (lambda: QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 1.0, "tensor", 4), "block_size goes with"),
        (lambda: Recipe(q="row"), "Recipe.q must be one of"),
        (lambda: quantize(X, bits=16), "4 or 8, got 16"),
        (lambda: quantize(X, rule="divde"), "rule must be one of"),
        (lambda: quantize(X, scale=0.0), "scale must be finite and > 0, got 0.0"),
        (lambda: quantize(X, scale=-1.0), "scale must be finite and > 0"),
        (lambda: quantize(X, "block", block_size=0), "at least 1, got 0"),
        (lambda: quantize(X[0], "head"), r"B, H, N, D.*got torch.float32 .2, 8, 4."),
        (lambda: quantize(X.int()), "got torch.int32"),
        (lambda: quantize([1.0]), "got list"),
        (lambda: intflash.quantize_bias(X > 0), "floating-point tensor, got torch.bool"),
        (lambda: Recipe(q="none", k="none", v="none", bits=3), "4 or 8, got 3"),
        (lambda: Recipe(bits=3), "4 or 8, got 3"),
        (lambda: Recipe(k_scale=0.0), "k_scale must be finite and > 0, got 0.0"),
        (lambda: Recipe(rule="floor"), "Recipe.rule must be one of"),
        (lambda: Recipe(block_size=0), "at least 1"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_the_smallest_nonzero_amax():
    least = torch.tensor([[[[0.0, 2.0**-100]]]])
    assert quantize(least).scale.item() == pytest.approx(2.0**-100 / 127) and quantize(least).data.max() == 127
    below = torch.nextafter(least, torch.zeros(()))
    assert quantize(below).scale.item() == 1 and not quantize(below).data.any()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_smallest_nonzero_amax_on_every_backend(backend):
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    v = v / v.abs().max() * 2.0**-100  # exactly its largest
    out = intflash.attention(q, k, v, backend=backend)
    assert torch.equal(out, intflash.attention(q, k, v, backend="reference")) and out.any()
