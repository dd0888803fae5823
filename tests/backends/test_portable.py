"""The portable backend against the reference: the same bits for integer methods, a tolerance for float ones."""

import ast
import dataclasses
import pathlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from portable_problems import problems

import intflash
from intflash.backends import portable
from intflash.backends.portable.operands import exact_dtype
from intflash.backends.portable.tiles import Tiling
from intflash.backends.reference import BACKEND as REFERENCE
from intflash.errors import InputError
from intflash.methods import METHODS
from intflash.numerics.exp import ABSENT, OCTAVES, TABLE_STEPS
from intflash.problem import Problem
from intflash.quant import QTensor
from oracle import sqnr

TORCH = portable.BACKEND
INTFLASH = [m.name for m in METHODS.values() if m.integer_bias]
OTHER_INTEGER = [m.name for m in METHODS.values() if m.integer_only and not m.integer_bias]
FLOAT = [m.name for m in METHODS.values() if not m.integer_only]
MANY = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def run(backend, problem):
    """Returns the result, or the class of the error."""
    try:
        return backend.run(problem)
    except InputError:
        return InputError


def assert_same(problem):
    """The results are equal, or both backends refuse."""
    expected, got = run(REFERENCE, problem), run(TORCH, problem)
    if InputError in (expected, got):
        assert got is expected
        return
    assert got.out.dtype == problem.out_dtype and torch.equal(got.out, expected.out)
    if expected.out_scale is not None:
        assert torch.equal(got.out_scale, expected.out_scale)
    if expected.lse is not None:
        assert torch.allclose(got.lse, expected.lse, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_serves_every_method():
    assert TORCH.unavailable() is None
    x = QTensor(torch.zeros(1, 1, 1, 1, dtype=torch.int8), 1.0)
    for method in METHODS:
        assert TORCH.unsupported(Problem(method, x, x, x, 1.0)) is None
    reason = TORCH.unsupported(Problem("another", x, x, x, 1.0))
    assert "no kernel of this method; it has those of intflash" in reason


@pytest.mark.parametrize("method", INTFLASH)
@MANY
@given(data=st.data())
def test_intflash_methods_bit_for_bit(method, data):
    assert_same(data.draw(problems(method)))


@pytest.mark.parametrize("method", OTHER_INTEGER)
@settings(MANY, max_examples=25)
@given(data=st.data())
def test_other_integer_methods_bit_for_bit(method, data):
    assert_same(data.draw(problems(method)))


@pytest.mark.parametrize("method", INTFLASH)
@pytest.mark.parametrize("shape", [(1, 2, 1024, 64), (1, 1, 1500, 17)], ids=str)
def test_several_key_steps(method, shape):
    g = torch.Generator().manual_seed(3)
    x = [QTensor(torch.randint(-127, 128, shape, generator=g, dtype=torch.int8), 0.02) for _ in range(3)]
    for options in (dict(out_dtype=torch.int16), dict(causal=5), dict(bias=bias_row(shape[2], g))):
        assert_same(Problem(method, *x, 0.125, return_lse=True, **options))


def bias_row(n, g):
    bias = torch.randint(-(1 << 24), 1 << 24, (1, 1, 1, n), generator=g, dtype=torch.int32)
    bias[..., ::7] = ABSENT
    return bias


@pytest.mark.parametrize("method", INTFLASH)
def test_every_depth(method):
    """Two keys whose distance is each step of p, with a bias one unit below, at and above the rounding point."""
    unit, steps = (TABLE_STEPS, 1030) if method == "intflash_online" else (OCTAVES, 3700)
    step = torch.arange(steps)[:, None] << 24
    of_one = unit.bias_step(20)
    half = -(-(step + (1 << 23)) // of_one)
    below = torch.cat((step // of_one, half - 1, half, half + 1), dim=1)
    bias = torch.stack((torch.zeros(below.numel()), -below.flatten()), dim=-1).to(torch.int32)[:, None, None]
    n = bias.shape[0]
    q, k = (QTensor(torch.zeros(n, 1, tokens, 1, dtype=torch.int8), 1.0) for tokens in (1, 2))
    v = QTensor(torch.tensor([0, 127], dtype=torch.int8).reshape(1, 1, 2, 1).expand(n, 1, 2, 1), 1.0)
    assert_same(Problem(method, q, k, v, 1.0, bias=bias, return_lse=True))


@pytest.mark.parametrize("method", INTFLASH)
@pytest.mark.parametrize("sm_scale", [2.0**-40, 2.0**-22, 0.3465, 0.3467, 44.0, 1e30])
@pytest.mark.parametrize("biased", [False, True])
def test_largest_products(method, sm_scale, biased):
    """|S| up to 256 * 127^2 times C up to 2^31, with the largest biases: the limit of float64."""
    g = torch.Generator().manual_seed(4)
    q, k = (
        torch.full((1, 1, n, 256), 127, dtype=torch.int8) - (torch.rand(1, 1, n, 256, generator=g) < 0.01).char()
        for n in (3, 40)
    )
    k[:, :, ::3] *= -1
    v = torch.randint(-127, 128, (1, 1, 40, 8), generator=g, dtype=torch.int8)
    bias = torch.tensor([2**31 - 1, -(2**31) + 1, 1, -1], dtype=torch.int32).repeat(10) if biased else None
    bias = bias.reshape(1, 1, 1, 40) if biased else None
    assert_same(
        Problem(method, QTensor(q, 1.0), QTensor(k, 1.0), QTensor(v, 1.0), sm_scale, bias=bias, return_lse=True)
    )


@pytest.mark.parametrize("method", FLOAT)
@pytest.mark.parametrize("options", [{}, {"causal": 3}, {"keep": True}, {"bias_float": True}], ids=str)
@pytest.mark.parametrize("keys", [512, 40])
def test_float_methods_within_rounding(method, options, keys):
    """Sums over keys in another order differ by float32 rounding, and by a unit of P's format where that changes a
    rounding.
    """
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, h, n, 64, generator=g) for h, n in ((4, 60), (2, 130), (2, 130)))
    if "keep" in options:
        keep = torch.rand(2, 1, 60, 130, generator=g) > 0.4
        keep[:, :, 7] = False
        options = {"keep": keep}
    if "bias_float" in options:
        options = {"bias_float": torch.randn(1, 4, 60, 130, generator=g)}
    problem = Problem(method, q, k, v, 0.125, METHODS[method].recipe, return_lse=True, **options)
    expected = REFERENCE.run(problem)
    kernel = portable._KERNELS[method]
    got = kernel(problem.quantized(), Tiling(elements=3000, keys=keys))
    assert sqnr(expected.out, got.out) > (60 if method.startswith("fp8") else 75)
    assert torch.allclose(got.lse, expected.lse, rtol=1e-5, atol=1e-5)
    integer = replace(problem, out_dtype=torch.int16)
    a, b = REFERENCE.run(integer), TORCH.run(integer)
    assert torch.equal(a.out_scale, b.out_scale) and (a.out.int() - b.out.int()).abs().max() <= 40


def test_float_inputs():
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 3, 49, 32, generator=g) for _ in range(3))
    for method in INTFLASH + OTHER_INTEGER:
        assert_same(Problem(method, q, k, v, 0.2, METHODS[method].recipe))


def test_through_the_api():
    q = torch.randn(1, 2, 33, 16)
    a, b = (intflash.attention(q, q, q, backend=name) for name in ("torch", "reference"))
    assert torch.equal(a, b)


def test_float_types_hold_products_exactly():
    assert exact_dtype((1 << 24) - 1) == torch.float32 and exact_dtype(1 << 24) == torch.float64
    torch.set_float32_matmul_precision("medium")  # TF32 or bfloat16 for float32
    try:
        assert exact_dtype(1) == torch.float64
    finally:
        torch.set_float32_matmul_precision("highest")


def on_cuda(x):
    """Moves a tensor, QTensor or Problem to the GPU."""
    if isinstance(x, QTensor):
        return replace(x, data=x.data.cuda(), scale=x.scale.cuda())
    if isinstance(x, Problem):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        return replace(x, **{n: on_cuda(v) for n, v in fields.items() if isinstance(v, torch.Tensor | QTensor)})
    return x.cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", INTFLASH + OTHER_INTEGER)
@settings(MANY, max_examples=25)
@given(data=st.data())
def test_cuda_equals_the_reference_on_the_cpu(method, data):
    problem = data.draw(problems(method))
    expected, got = run(REFERENCE, problem), run(TORCH, on_cuda(problem))
    if InputError in (expected, got):
        assert got is expected
        return
    assert torch.equal(got.out.cpu(), expected.out)


def test_is_independent_of_the_reference():
    """The two are written independently, so that one misreading cannot pass in both."""
    for path in pathlib.Path(portable.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("intflash"):
                assert node.module.split(".")[1] in ("backends", "errors", "numerics", "problem", "quant"), path
                assert node.module != "intflash.numerics.fixed_point", path
