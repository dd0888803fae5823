"""Tensors that are more than memory, and torch's modes and transforms: served through the custom op, never misread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import intflash
from intflash import QTensor, Recipe

X = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) > 0.5


def wrapped(x: torch.Tensor) -> TwoTensor:
    return TwoTensor(x, x.clone())


@pytest.mark.parametrize("name", ["q", "attn_mask", "bias", "out_scale", "q_scale"])
def test_wrapped_tensors(name):
    bias, integers = torch.randn(3, 20, 20), dict(out_dtype=torch.int8)
    options, given = {
        "q": ({}, X),
        "attn_mask": ({}, KEEP),
        "bias": ({}, bias),
        "out_scale": (integers, torch.tensor(0.02)),
        "q_scale": ({}, torch.tensor(0.03)),
    }[name]

    def call(x: torch.Tensor):
        if name == "q":
            return intflash.attention(x, x, x)
        if name == "q_scale":
            return intflash.attention(X, X, X, recipe=Recipe(q_scale=x))
        return intflash.attention(X, X, X, **options, **{name: x})

    found, expected = call(wrapped(given)), call(given)
    if name == "out_scale":
        found, expected = found.data, expected.data
    assert torch.equal(found.a, expected) and torch.equal(found.b, expected)


def test_fake_tensors():
    mode = FakeTensorMode()
    q = mode.from_tensor(X)
    assert intflash.attention(q, q, q).shape == X.shape
    with mode:
        assert intflash.sdpa(q, q, q).shape == X.shape


def test_transforms_and_lazy_signs():
    expected = intflash.attention(X, X, X)
    assert torch.equal(torch.func.functionalize(lambda x: intflash.attention(x, x, x))(X), expected)
    assert torch.equal(make_fx(lambda q, k, v: intflash.sdpa(q, k, v))(X, X, X)(X, X, X), expected)
    assert torch.equal(intflash.attention(torch._neg_view(X), X, X), intflash.attention(-X, X, X))


def test_tensors_without_memory_are_refused():
    codes = intflash.quantize(X)
    codes.data.untyped_storage().resize_(0)
    for x in (codes, torch._efficientzerotensor(X.shape)):
        with pytest.raises(ValueError, match="no memory of its own"):
            intflash.attention(x, x, x, backend="cpu")


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return intflash.sdpa(q, k, v)


def test_symbolic_sizes():
    sizes = {0: Dim("batch"), 2: Dim("tokens", min=2, max=60_000)}
    exported = torch.export.export(Attention(), (X, X + 1, X + 2), dynamic_shapes=(sizes,) * 3).module()
    other = torch.randn(5, 3, 33, 16)
    assert torch.equal(exported(other, other, other), intflash.sdpa(other, other, other))
    traced = torch.jit.trace(Attention(), (X, X, X))
    assert torch.equal(traced(other, other, other), intflash.sdpa(other, other, other))


@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "block"])
def test_a_number_is_a_scale_of_any_granularity(granularity):
    tensor, fine = Recipe(q_scale=0.03), Recipe(q=granularity, q_scale=np.float32(0.03))
    for options in ({}, dict(backend="torch"), dict(backend="reference"), dict(out_dtype=torch.int8)):
        found, expected = (intflash.attention(X, X, X, recipe=r, **options) for r in (fine, tensor))
        if options.get("out_dtype"):
            found, expected = found.data, expected.data
        assert torch.equal(found, expected)
    codes = torch.ones(2, 3, 150, 16, dtype=torch.int8)
    x = QTensor(codes, 0.5, granularity, 64 if granularity == "block" else None)
    assert torch.equal(x.dequantize(), codes * 0.5)


@pytest.mark.parametrize("scale", [np.float32(-0.03), np.float32("nan"), "x", [0.1], 1e39, 1e-50, 2.0**-127])
def test_numbers_that_are_no_scale(scale):
    with pytest.raises(intflash.InputError, match="q_scale must be"):
        Recipe(q_scale=scale)
    with pytest.raises(intflash.InputError, match="out_scale must be"):
        intflash.attention(X, X, X, out_dtype=torch.int8, out_scale=scale)


def test_a_static_scale_without_a_finite_reciprocal():
    with pytest.raises(intflash.InputError, match="v's scale must be .* \\(as normal float32\\)"):
        intflash.attention(X, X, X, recipe=Recipe(v_scale=torch.tensor(2.0**-127)))
    codes = intflash.quantize(X)
    tiny = QTensor(codes.data, torch.tensor(2.0**-127))  # nothing is divided by the scale of codes
    assert intflash.attention(codes, codes, tiny, out_dtype=torch.float32).isfinite().all()


def test_a_recipe_is_not_dropped():
    codes = intflash.quantize(X)
    with pytest.raises(intflash.InputError, match="quantized already"):
        intflash.attention(codes, codes, codes, recipe=Recipe(q="token"))


def test_wrong_types_are_named():
    codes = X.to(torch.int8)
    for message, call in (
        ("as QTensor\\(codes, scale\\)", lambda: intflash.attention(codes, codes, codes)),
        ("number or a tensor, got NoneType", lambda: QTensor(codes, None)),
        ("int8 or int16 tensor, got str", lambda: QTensor("codes", 1.0)),
        ("integer of at least 1, got 0", lambda: QTensor(codes, 0.1, "block", 0)),
        ("integer of at least 1, got 1.5", lambda: Recipe(block_size=1.5)),
        ("scale must be finite", lambda: intflash.attention(X, X, X, scale=10**400)),
    ):
        with pytest.raises(intflash.InputError, match=message):
            call()
    with pytest.raises(TypeError, match="k came by position and by name"):
        intflash.which_backend(X, X, X, k=X)
