"""Repeated calls on a CPU: what is remembered of a signature gives what a first call gives; values are read anew."""

import math

import pytest
import torch

import intflash
from intflash import Recipe, call, repeats


@pytest.fixture(autouse=True)
def forgotten():
    repeats._known.clear()


@pytest.fixture
def prepared(monkeypatch):
    """How often a call was prepared."""
    calls = []
    real = call.prepare_call
    monkeypatch.setattr(call, "prepare_call", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    return calls


def tensors(seed, *, dtype=torch.float32, heads=(4, 4), strided=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads[0], 33, 16), (2, heads[1], 40, 16), (2, heads[1], 40, 24)]
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made] if strided else made


def codes(seed, granularity="tensor"):
    return [intflash.quantize(x, granularity) for x in tensors(seed)]


def mask(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3


def int_bias(seed, *shape):
    return intflash.quantize_bias(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


REMEMBERED = {
    "floats": lambda s: (tensors(s), {}),
    "views": lambda s: (tensors(s, strided=s % 2 == 0), {}),
    "bfloat16": lambda s: (tensors(s, dtype=torch.bfloat16), {}),
    "codes": lambda s: (codes(s), {}),
    "codes per head": lambda s: (codes(s, "head"), {}),
    "int16": lambda s: (codes(s), dict(out_dtype=torch.int16)),
    "shared heads": lambda s: (tensors(s, heads=(4, 2)), dict(enable_gqa=True)),
    "log-sum-exp": lambda s: (tensors(s), dict(return_lse=True, scale=0.2)),
    "causal": lambda s: (tensors(s), dict(is_causal=True, causal_align="bottom_right")),
    "windows": lambda s: (tensors(s), dict(attn_mask=mask(s, 2, 1, 33, 40), bias=int_bias(s, 1, 4, 33, 40))),
    "qflash": lambda s: (tensors(s), dict(method="qflash", out_dtype=torch.int8)),
    "another backend": lambda s: (tensors(s), dict(backend="reference")),
    "unlooked": lambda s: (codes(s), dict(check_finite=False)),
}
ANEW = {
    "three axes": lambda s: ([x[0] for x in tensors(s)], {}),
    "float mask": lambda s: (tensors(s), dict(attn_mask=torch.randn(33, 40))),
    "smaller mask": lambda s: (tensors(s), dict(attn_mask=mask(s, 33, 40))),
    "output's scale": lambda s: (tensors(s), dict(out_dtype=torch.int8, out_scale=0.1)),
    "softmax scale in a tensor": lambda s: (tensors(s), dict(scale=torch.tensor(0.2))),
    "smoothed": lambda s: (tensors(s), dict(recipe=Recipe(smooth_k=True))),
    "four bits": lambda s: (tensors(s), dict(recipe=Recipe(bits=4))),
}


def values(result):
    out, lse = result if isinstance(result, tuple) else (result, None)
    kept = [out.data, out.scale, out.granularity, out.bits] if isinstance(out, intflash.QTensor) else [out]
    return [*kept, lse]


def assert_same(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("kind", REMEMBERED)
def test_repeated(kind, prepared):
    calls = [REMEMBERED[kind](seed) for seed in range(3)]
    repeated = [intflash.attention(*qkv, **options) for qkv, options in calls]
    assert len(prepared) == 1
    for (qkv, options), result in zip(calls, repeated, strict=True):
        repeats._known.clear()
        assert_same(result, intflash.attention(*qkv, **options))
        if options.get("backend") is None:
            assert_same(result, intflash.attention(*qkv, **options, backend="reference"))


@pytest.mark.parametrize("kind", ANEW)
def test_prepared_each_time(kind, prepared):
    for seed in range(2):
        qkv, options = ANEW[kind](seed)
        result = intflash.attention(*qkv, **options)
        assert_same(result, intflash.attention(*qkv, **options, backend="reference"))
    assert len(prepared) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_are_looked_at_again(bad):
    q, k, v = tensors(0)
    for backend in (None, "reference"):
        intflash.attention(q, k, v, backend=backend)
        with pytest.raises(intflash.InputError, match="k must be finite"):
            intflash.attention(q, k.index_fill(2, torch.tensor([3]), bad), v, backend=backend)


def test_scales_are_looked_at_again():
    q, k, v = codes(0)
    intflash.attention(q, k, v)
    k.scale.zero_()
    with pytest.raises(intflash.InputError, match="k's scale must be finite and > 0"):
        intflash.attention(q, k, v)
    scale = torch.tensor([0.1])
    recipe = Recipe(q_scale=scale)
    intflash.attention(*tensors(0), recipe=recipe)
    scale.fill_(-1)
    with pytest.raises(intflash.InputError, match="q's scale must be finite and > 0"):
        intflash.attention(*tensors(0), recipe=recipe)


def test_a_call_that_is_wrong_stays_so():
    q, k, v = tensors(0, heads=(4, 2))
    for _ in range(3):
        with pytest.raises(intflash.InputError, match="enable_gqa"):
            intflash.attention(q, k, v)
        intflash.attention(q, k, v, enable_gqa=True)
        with pytest.raises(intflash.InputError, match="unknown method"):
            intflash.attention(q, k, v, enable_gqa=True, method="none")
        with pytest.raises(intflash.InputError, match="go together"):
            intflash.attention(q, k, v, enable_gqa=True, cu_seqlens_k=torch.tensor([0, 40]))
        with pytest.raises(intflash.InputError, match="one device|must be on"):
            intflash.attention(q, k.to("meta"), v, enable_gqa=True)


def test_recipes_are_told_apart(prepared):
    """By what they say, not by where they lie; of tensors only the values may differ."""
    qkv = tensors(0)
    for scale in (0.01, 0.02, 0.03, torch.tensor([0.01]), torch.tensor([0.02]), None):
        for granularity in ("tensor", "head"):
            recipe = Recipe(granularity, granularity, granularity, q_scale=scale if granularity == "tensor" else None)
            result = intflash.attention(*qkv, recipe=recipe)
            assert_same(result, intflash.attention(*qkv, recipe=recipe, backend="reference"))
    assert len(prepared) == 2 * (3 + 1 + 1 + 1)  # numbers, tensors, none, by heads


def test_a_remembered_call_still_has_no_gradient():
    q, k, v = tensors(0)
    intflash.attention(q, k, v)
    with pytest.raises(RuntimeError, match="no gradients"):
        intflash.attention(q.requires_grad_(), k, v).sum().backward()


def test_signatures_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(repeats, "_MOST", 3)
    x = torch.randn(1, 1, 8, 16)
    for n in range(1, 9):
        intflash.attention(x[:, :, :n], x, x)
        assert len(repeats._known) <= 3
