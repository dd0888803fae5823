"""Scales that a published method cannot compute with: refused where values are read, defined where not.

`qflash` and `iflash` divide by round(1 / octaves per score unit); the exponentials of `ivit`, `ibert` and `fqvit` need
a unit of at least 2^-30.
"""

from __future__ import annotations

import pytest
import torch

import intflash
from intflash.backends.cpu import BACKEND as CPU
from intflash.backends.portable import BACKEND as TORCH
from intflash.backends.reference import BACKEND as REFERENCE
from intflash.methods import get_method
from intflash.numerics.exp import LOG2_E
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

METHODS = ("qflash", "iflash")
UNFUSED = ("ivit", "ibert", "fqvit")
BACKENDS = {
    x.name: pytest.param(x, marks=pytest.mark.skipif(x.unavailable() is not None, reason=f"no backend {x.name}"))
    for x in (CPU, TORCH, REFERENCE)
}
OUTSIDE = (2.01, 1e6, float("inf"), 2.0**-32, 0.0, -0.5, float("nan"))  # octaves per score unit


def problem(
    method: str, octaves: float, bias: bool = False, sm_scale: float = 1.0, lse: bool = True, **more
) -> Problem:
    """octaves: per score unit, set by Q's scale, times `sm_scale`."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-127, 128, (1, 2, n, 16), generator=g, dtype=torch.int8) for n in (9, 40, 40))
    scale = torch.full((1, 1, 1, 1), octaves / LOG2_E)
    q, k, v = QTensor.unchecked(q, scale, "tensor", 8), QTensor(k, 1.0), QTensor(v, 0.01)
    bias = torch.randn(1, 2, 9, 40, generator=g) if bias else None
    return Problem(method, q, k, v, sm_scale, bias_float=bias, out_dtype=torch.int8, return_lse=lse, **more)


@pytest.mark.parametrize("octaves", OUTSIDE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_checked_calls_refuse_scales_outside_the_range(backend, method, octaves):
    with pytest.raises(intflash.InputError, match=r"round\(1 / "):
        backend.run(problem(method, octaves, lse=False, check_finite=True))


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("octaves", OUTSIDE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_unchecked_calls_use_the_nearest_supported_scale(backend, method, octaves, bias):
    """The nearest are those of 1 and 1 / (2^31 - 1) octaves per score unit, as the reference computes them in a
    checked call.
    """
    lse = backend is not CPU
    nearest = 1 / (2**31 - 1) if 0 <= octaves < 1 else 1.0
    served = problem(method, LOG2_E, bias, sm_scale=nearest / LOG2_E, check_finite=True)
    want = get_method(method).reference(served)
    found = backend.run(problem(method, octaves, bias, lse=lse))
    assert torch.equal(want.out, found.out)
    if lse:
        assert torch.allclose(want.lse, found.lse, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_bad_scale_changes_its_own_head_only(backend, method):
    """Heads of 0.01, 4 and 2^-40 octaves. Only the last two use the nearest supported scale."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-127, 128, (1, 3, n, 16), generator=g, dtype=torch.int8) for n in (9, 40, 40))

    def run(backend, octaves):
        scale = torch.tensor(octaves, dtype=torch.float64) / LOG2_E
        tensors = QTensor(q, scale.float(), "head"), QTensor(k, 1.0), QTensor(v, 0.01)
        return backend.run(Problem(method, *tensors, 1.0, out_dtype=torch.int8)).out

    found = run(backend, [0.01, 4.0, 2.0**-40])
    assert torch.equal(found[:, :2], run(REFERENCE, [0.01, 1.0, 0.01])[:, :2])
    assert torch.equal(found, run(REFERENCE, [0.01, 4.0, 2.0**-40]))


@pytest.mark.parametrize("method", UNFUSED)
def test_exponentials_of_tiny_units(method):
    """A checked call refuses them. In an unchecked call the exponential uses a unit of 2^-30: all keys have equal
    weights, except for ivit, whose sum of p saturates there.
    """
    for backend in (TORCH, REFERENCE):
        with pytest.raises(intflash.InputError, match="needs a score unit of at least 2\\^-30"):
            backend.run(problem(method, 1e-20, check_finite=True))
    reference, found = (x.run(problem(method, 1e-20)) for x in (REFERENCE, TORCH))
    assert torch.equal(found.out, reference.out) and torch.equal(found.out_scale, reference.out_scale)
    assert torch.allclose(found.lse, reference.lse, rtol=1e-6) and found.lse.isfinite().all()
    if method == "ivit":
        return
    mean = problem(method, 1.0).v.dequantize().mean(2, keepdim=True)
    assert (found.out.float() * found.out_scale - mean).abs().max() < 0.15


@pytest.mark.parametrize("backend", ("cpu", "torch", "reference"))
@pytest.mark.parametrize("method", METHODS)
def test_errors_show_the_value(method, backend):
    """Floats whose scales are computed in the call, static scales, and codes; also in a repeated call."""
    x = torch.randn(1, 2, 9, 16) * 1e4
    static = Recipe(rule="divide", q_scale=100.0, k_scale=100.0, v_scale=1.0)
    codes = QTensor(torch.ones(1, 2, 9, 16, dtype=torch.int8), 100.0)
    for tensors, recipe, out_scale in (
        ((x, x, x), None, None),
        ((x, x, x), static, None),
        ((codes,) * 3, None, "bound"),
    ):
        for _ in range(4):
            with pytest.raises(intflash.InputError, match=r"round\(1 / "):
                intflash.attention(*tensors, method=method, recipe=recipe, backend=backend, out_scale=out_scale)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_triton_on_a_gpu(method):
    """As the torch backend computes on a CPU in unchecked calls, and as it refuses in checked ones."""
    for octaves in OUTSIDE:
        p = problem(method, octaves)
        there = [QTensor.unchecked(x.data.cuda(), x.scale.cuda(), "tensor", 8) for x in (p.q, p.k, p.v)]
        options = dict(method=method, backend="triton", scale=1.0, out_dtype=torch.int8, out_scale="bound")
        for _ in range(4):
            out = intflash.attention(*there, **options)
            assert torch.equal(out.data.cpu(), TORCH.run(p).out), octaves
            with pytest.raises(intflash.InputError, match="must be|round"):
                intflash.attention(*there, **options, check_finite=True)
