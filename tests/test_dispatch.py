"""Tensors whose value is not their memory, and torch's modes and transforms: served through the custom op, never
misread.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.attention.bias
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
            intflash.attention(x, x, x, backend="cpu", out_dtype=torch.float32)


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
    for options in (
        {},
        dict(backend="torch"),
        dict(backend="reference"),
        dict(out_dtype=torch.int8, out_scale="bound"),
    ):
        found, expected = (intflash.attention(X, X, X, recipe=r, **options) for r in (fine, tensor))
        if options.get("out_dtype"):
            found, expected = found.data, expected.data
        assert torch.equal(found, expected)
    codes = torch.ones(2, 3, 150, 16, dtype=torch.int8)
    x = QTensor(codes, 0.5, granularity, 64 if granularity == "block" else None)
    assert torch.equal(x.dequantize(), codes * 0.5)


@pytest.mark.parametrize("scale", [np.float32(-0.03), np.float32("nan"), "x", [0.1], 1e39, 1e-50, 2.0**-127])
def test_invalid_scales(scale):
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


def test_a_recipe_is_not_ignored():
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


@pytest.mark.parametrize("queries, keys", [(20, 20), (12, 20), (20, 12)])
@pytest.mark.parametrize("variant, align", [("causal_upper_left", "top_left"), ("causal_lower_right", "bottom_right")])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_torchs_causal_bias_becomes_is_causal(variant, align, queries, keys):
    q, k = X[:, :, :queries], X[:, :, :keys]
    mask = getattr(torch.nn.attention.bias, variant)(queries, keys)
    for options in ({}, dict(bias=torch.randn(queries, keys)), dict(method="fp32"), dict(backend="torch")):
        expected = intflash.attention(q, k, k, is_causal=True, causal_align=align, **options)
        assert torch.equal(intflash.attention(q, k, k, mask, **options), expected)
    assert torch.equal(intflash.sdpa(q, k, k, mask), intflash.attention(q, k, k, None, True, causal_align=align))
    assert intflash.which_backend(q, k, k, mask) == intflash.which_backend(q, k, k, None, True, causal_align=align)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
    rows = exact.isfinite().all(-1)  # torch gives NaN where a query has no key
    assert torch.allclose(intflash.attention(q, k, k, mask, method="fp32")[rows], exact[rows], atol=1e-5)


def test_causal_biases_that_do_not_fit():
    square = torch.nn.attention.bias.causal_upper_left(20, 20)
    for message, k, options in (
        (r"CausalBias of \[20, 20\] queries and keys, the call has \[20, 12\]", X[:, :, :12], {}),
        ("give one of them", X, dict(is_causal=True)),
        ("packed sequences", X, dict(cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32))),
    ):
        with pytest.raises(intflash.InputError, match=message):
            intflash.attention(X, k, k, square, **options)


def test_a_causal_bias_is_not_read_as_a_bias():
    """torch's CausalBias has memory that holds no mask, so it must not be read as a bias."""
    mask = torch.nn.attention.bias.causal_upper_left(20, 20)
    for options in ({}, dict(method="fp32"), dict(check_finite=False), dict(backend="torch")):
        for function in (intflash.attention, intflash.which_backend):
            with pytest.raises(intflash.InputError, match="bias is a CausalBias, .* as attn_mask"):
                function(X, X, X, bias=mask, **options)


class Doubled(torch.Tensor):
    """A tensor that stands for twice what its memory holds."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def value(x):
            return x.as_subclass(torch.Tensor) * 2 if isinstance(x, Doubled) else x

        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(value, args), **{name: value(x) for name, x in (kwargs or {}).items()})


def test_tensor_subclasses_handle_the_call():
    assert torch.equal(intflash.attention(X.as_subclass(Doubled), X, X), intflash.attention(X * 2, X, X))
    mask = torch.randn(20, 20)
    found = intflash.attention(X, X, X, mask.as_subclass(Doubled), method="fp32")
    assert torch.equal(found, intflash.attention(X, X, X, mask * 2, method="fp32"))


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.jacfwd], ids=["jvp", "jacfwd"])
@pytest.mark.parametrize("name", ["q", "attn_mask", "bias", "q_scale"])
def test_forward_derivatives_are_refused(transform, name):
    x = {"q": X[:1, :1, :3, :4], "q_scale": torch.tensor(0.03)}.get(name, torch.randn(20, 20))

    def attend(x):
        if name == "q":
            return intflash.attention(x, x, x)
        if name == "q_scale":
            return intflash.attention(X, X, X, recipe=Recipe(q_scale=x))
        return intflash.attention(X, X, X, **{name: x})

    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        transform(attend, (x,), (torch.ones_like(x),)) if transform is torch.func.jvp else transform(attend)(x)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "hessian"])
def test_reverse_derivatives_by_transforms_are_refused(transform):
    """The refusal is that of a backward pass, and not torch's error about autograd.Function."""
    x = X[:, :1, :3, :4]

    def loss(x):
        return intflash.attention(x, x, x).sum()

    attempts = {
        "grad": lambda: torch.func.grad(loss)(x),
        "vjp": lambda: torch.func.vjp(loss, x)[1](torch.ones(())),
        "jacrev": lambda: torch.func.jacrev(loss)(x),
        "hessian": lambda: torch.func.hessian(loss)(x),
    }
    with pytest.raises(RuntimeError, match="IntFlash is for inference"):
        attempts[transform]()


def test_transforms_of_other_tensors_take_attention_as_a_constant():
    x, attended = X[:1, :1], intflash.attention(X, X, X)[:1, :1]
    found = torch.func.grad(lambda x: (x * intflash.attention(X, X, X)[:1, :1]).sum())(x)
    assert torch.equal(found, attended)
