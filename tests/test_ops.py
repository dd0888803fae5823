"""The custom op: torch.library's own checks, and whole graphs under torch.compile."""

import pytest
import torch

import intflash
from intflash import QTensor, Recipe, plans
from intflash.ops import _attention
from oracle import randn


def flat(q, k, v, **changes):
    names = [a.name for a in _attention._opoverload._schema.arguments]
    arguments = dict.fromkeys(names) | dict(
        q=q, k=k, v=v, number_scales=[0.0] * 3, block_sizes=[16] * 3, bits=[8] * 3, quantized=False, is_causal=False,
        enable_gqa=False, smooth_k=False, rotate=False, dynamic_out=False, return_lse=False, method="intflash",
        causal_align="top_left", granularities="tensor,tensor,tensor", rule="exact",
    )  # fmt: skip
    return tuple((arguments | changes).values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"return_lse": True, "is_causal": True},
        {"out_dtype": torch.int8, "granularities": "token,block,channel"},
        {"out_dtype": torch.int16, "dynamic_out": True},
        {"method": "intflash_online", "number_scales": [0.03, 0.03, 0.03]},
        {"smooth_k": True, "rotate": True, "return_lse": True},
    ],
    ids=lambda c: "-".join(map(str, c)) or "plain",
)
def test_opcheck(changes):
    torch.library.opcheck(_attention, flat(*randn(1, 2, 20, 16), **changes))


def test_opcheck_quantized():
    q, k, v = (intflash.quantize(x, "head") for x in randn(1, 2, 20, 16))
    torch.library.opcheck(
        _attention,
        flat(q.data, k.data, v.data, q_scale=q.scale, k_scale=k.scale, v_scale=v.scale, quantized=True,
             granularities="head,head,head", block_sizes=[0] * 3, out_dtype=torch.int8),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", [None, Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)], ids=["dynamic", "static"])
def test_compiles_to_one_graph(recipe):
    def layer(q, k, v, mask):
        out, lse = intflash.attention(q * 2, k, v, mask, recipe=recipe, return_lse=True)
        return out + 1, lse

    arguments = (*randn(2, 2, 20, 16), torch.rand(2, 1, 20, 20) > 0.2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)
    for got, expected in zip(compiled, layer(*arguments), strict=True):
        assert torch.equal(got, expected)


def test_compiles_quantized_tensors_in_and_out():
    def layer(q, k, v):
        q, k, v = (intflash.quantize(x) for x in (q, k, v))
        return intflash.attention(q, k, v, out_dtype=torch.int16, out_scale=0.02).dequantize()

    arguments = randn(1, 2, 20, 16)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments), layer(*arguments))


def test_sdpa_under_compile_and_a_dynamic_shape():
    compiled = torch.compile(intflash.sdpa, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (7, 20, 33):
        q, k, v = randn(1, 2, n, 16)
        assert torch.equal(compiled(q, k, v), intflash.sdpa(q, k, v))


def test_compiled_calls_refuse_what_eager_ones_do():
    def layer(q, k, v):
        return intflash.attention(q, k, v, out_dtype=torch.int8, out_scale="auto").data

    for call in (layer, torch.compile(layer, backend="aot_eager")):
        with pytest.raises(Exception, match="or 'dynamic', got 'auto'"):
            call(*randn(1, 2, 8, 16))


def test_op_does_not_alias_a_given_out_scale():
    q, k, v = randn(1, 2, 8, 16)
    scale = torch.full((1, 1, 1, 1), 0.05)
    out = torch.ops.intflash.attention(*flat(q, k, v, out_scale=scale, out_dtype=torch.int8))
    assert torch.equal(out[1], scale) and out[1].data_ptr() != scale.data_ptr()
    assert isinstance(intflash.attention(q, k, v, out_dtype=torch.int8, out_scale=scale), QTensor)


def test_compiled_code_takes_tensors_that_want_gradients_and_refuses_the_backward_pass():
    q, k, v = randn(1, 2, 20, 16)
    compiled = torch.compile(lambda *x: intflash.attention(*x) * 2, fullgraph=True, backend="aot_eager")
    out = compiled(q.clone().requires_grad_(), k, v)
    assert torch.equal(out, intflash.attention(q, k, v) * 2)
    with pytest.raises(RuntimeError, match="for inference and has no gradients"):
        out.sum().backward()


@pytest.mark.parametrize("method", ["lite", "fp32"])
def test_integer_output_of_a_float_v_compiles(method):
    inputs = randn(1, 2, 20, 16)

    def call(*x):
        return intflash.attention(*x, method=method, out_dtype=torch.int8).dequantize()

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs))


def test_traced_code_computes():
    q, k, v = randn(1, 2, 20, 16)
    traced = torch.jit.trace(lambda *x: intflash.attention(*x), (q, k, v), check_trace=False)
    assert torch.equal(traced(k, v, q), intflash.attention(k, v, q))


def test_the_op_gives_every_argument_that_a_signature_asks_for(monkeypatch):
    seen = []

    def signed(call, arguments):
        seen.append(plans.signature(arguments))
        return call(**arguments)

    monkeypatch.setattr(plans, "run", signed)
    inputs = randn(1, 2, 20, 16)
    intflash.attention(*inputs)
    torch.compile(lambda *x: intflash.attention(*x), fullgraph=True, backend="aot_eager")(*inputs)
    assert len(seen) == 2 and [len(tensors) for _, tensors in seen] == [3, 3]
