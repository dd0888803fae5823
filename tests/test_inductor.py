"""What code that Inductor generates calls for the op."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import intflash
from intflash import Recipe

DIRECT, DISPATCHED = "torch.ops.intflash.attention_{}(", "torch.ops.intflash.attention.{}"


def randn(*shape):
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in "qkv"]


def attention_of(**options):
    return lambda *x: intflash.attention(*x, **options)


def generated(function, *inputs):
    """Output and code of a compiled call."""
    torch._dynamo.reset()
    with torch.no_grad():
        out, code = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    return out, "".join(code)


@pytest.mark.parametrize(
    "overload, options",
    [
        ("inference", lambda: dict(is_causal=True)),
        ("inference", lambda: dict(bias=torch.randn(20, 20))),  # served by Python
        ("inference_scaled", lambda: dict(recipe=Recipe(q_scale=0.03, k_scale=torch.tensor(0.02)), scale=0.3)),
    ],
)
def test_it_calls_the_native_function(overload, options):
    options, inputs = options(), randn(1, 2, 20, 16)
    out, code = generated(attention_of(**options), *inputs)
    assert DIRECT.format(overload) in code and DISPATCHED.format(overload) + "." not in code
    assert torch.equal(out, intflash.attention(*inputs, **options))


def test_inside_of_a_model():
    def block(x, weight):
        q, k, v = (x @ weight).view(1, 20, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return intflash.attention(q, k, v).transpose(1, 2).reshape(20, 32) * 2

    x, weight = torch.randn(20, 8), torch.randn(8, 96)
    out, code = generated(block, x, weight)
    assert DIRECT.format("inference") in code and torch.equal(out, block(x, weight))


def test_sizes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(attention_of(), dynamic=True)
    with torch.no_grad():
        for n in (20, 33, 7):
            inputs = randn(1, 2, n, 16)
            assert torch.equal(compiled(*inputs), intflash.attention(*inputs))


def test_errors_are_those_of_eager_calls():
    q, k, v = randn(1, 2, 20, 16)
    torch._dynamo.reset()
    compiled = torch.compile(attention_of())
    with torch.no_grad():
        compiled(q, k, v)
        with pytest.raises(intflash.InputError, match="k must be finite"):
            compiled(q, k * float("nan"), v)
        assert torch.equal(compiled(q, k, v), intflash.attention(q, k, v))


def test_gradients_are_refused():
    q, k, v = randn(1, 2, 20, 16)
    torch._dynamo.reset()
    out = torch.compile(attention_of())(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="for inference and has no gradients"):
        out.sum().backward()


@pytest.mark.full  # compiles C++
def test_wrapper_code_in_cpp_goes_through_the_dispatcher():
    inputs = randn(1, 2, 20, 16)
    with config.patch(cpp_wrapper=True):
        out, code = generated(attention_of(), *inputs)
    assert torch.equal(out, intflash.attention(*inputs))
    assert DIRECT.format("inference") not in code
