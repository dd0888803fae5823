"""Computes the launch constants on the device, where scales may be known only there.

One small launch computes `numerics.exp.exponent_constants` and `output_multiplier` in float64, with the same order of
operations and the same saturations. A pair of 32-bit constants is packed in one int64 (high << 32 | low).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu.constants import (
    Constants,
    Shape,
    constant_buffers,
    float_bits,
    most_output_exponent,
    score_unit,
)
from intflash.backends.gpu.tensors import View, view
from intflash.backends.triton.launch import TritonLaunch
from intflash.numerics import exp
from intflash.problem import Problem

LOG2_E = tl.constexpr(exp.LOG2_E)
MAX_OCTAVES = tl.constexpr(exp.MAX_OCTAVES_PER_UNIT)
C_MAX = tl.constexpr(exp.C_MAX)
FEW_FRACTION_BITS = tl.constexpr(exp.FEW_FRACTION_BITS)
LEAST_E = tl.constexpr(exp.OUTPUT_EXPONENTS[0])
MAX_RATIO = tl.constexpr(exp.MAX_RATIO)
_BLOCK = 128


class KernelConstants(NamedTuple):
    """`Constants` as Triton kernels take them. `end`: see `Masks`."""

    score: View | None
    output: View | None
    v_scale: View | None
    valueless: View | None = None
    end: None = None


@triton.jit
def _round(x):
    """Rounds a float64 in [0, 2^32) half to even, to int64."""
    return (x + 6755399441055744.0).to(tl.int64, bitcast=True) & 0xFFFFFFFF  # 1.5 * 2^52


@triton.jit
def _exponent(x):
    """Returns the exponent of frexp of a positive float64."""
    return ((x.to(tl.int64, bitcast=True) >> 52) & 2047) - 1022


@triton.jit
def _power_of_two(e):
    return ((e + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def pack_score(q_scale, k_scale, sm_scale, UNIT: tl.constexpr):
    """Returns k << 32 | C of `exponent_constants`, from float32 scales and the float64 softmax scale."""
    c = ((q_scale.to(tl.float64) * k_scale.to(tl.float64)) * sm_scale) * LOG2_E
    c = tl.minimum(c, MAX_OCTAVES) * (UNIT.sixteenths / 16)
    k = tl.where(c < 0.5, 0, _exponent(c) + 1)
    zeros = tl.where(c < UNIT.least_coarse, 32 - UNIT.fraction_bits, 32 - FEW_FRACTION_BITS).to(tl.int64)
    C = tl.minimum(_round(c * _power_of_two(32 - zeros)) << (zeros - k), C_MAX)
    return (k << 32) | C


@triton.jit
def pack_output(v_scale, out_scale, MOST_E: tl.constexpr):
    """Returns e << 32 | Mr of `output_multiplier`."""
    rho = v_scale.to(tl.float64) / out_scale.to(tl.float64)
    rho = tl.where(rho > MAX_RATIO, MAX_RATIO, rho)
    e = _exponent(rho)
    Mr = tl.where(e < LEAST_E, 0, _round(rho * _power_of_two(24 - e)))
    return (tl.minimum(tl.maximum(e, LEAST_E), MOST_E) << 32) | Mr


@triton.jit
def default_out_scale(v_scale, QMAX: tl.constexpr):
    """Returns s_V * 127 / QMAX in float32, each step rounded once."""
    return tl.div_rn(v_scale * 127.0, tl.full(v_scale.shape, QMAX, tl.float32))


@triton.jit
def _unravel(i, shape):
    d = i % shape.d
    i = i // shape.d
    n = i % shape.n
    i = i // shape.n
    return i // shape.h, i % shape.h, n, d


@triton.jit
def _at(x, b, h, n, d):
    return x.ptr + b * x.b + h * x.h + n * x.n + d * x.d


@triton.jit
def _constants_kernel(
    q_scale: View, k_scale: View, v_scale: View, given: View, score, output, out_scale, score_shape: Shape,
    output_shape: Shape, score_count, output_count, sm_bits,
    UNIT: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr, MOST_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one constant per thread. sm_bits: the bits of the float64 softmax scale. given: the caller's output
    scale or None.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sm_scale = sm_bits.to(tl.int64).to(tl.float64, bitcast=True)
    b, h, n, d = _unravel(i, score_shape)
    inside = i < score_count
    s_q = tl.load(_at(q_scale, b, h, n, 0), mask=inside, other=1.0)
    s_k = tl.load(_at(k_scale, b, h // GROUP, d, 0), mask=inside, other=1.0)
    tl.store(score + i, pack_score(s_q, s_k, sm_scale, UNIT), mask=inside)
    if QMAX != 0:
        b, h, n, d = _unravel(i, output_shape)
        inside = i < output_count
        s_v = tl.load(_at(v_scale, b, h // GROUP, 0, d), mask=inside, other=1.0)
        if given.ptr is not None:
            s_o = tl.load(_at(given, b, h, 0, d), mask=inside, other=1.0)
        else:
            s_o = default_out_scale(s_v, QMAX)
            tl.store(out_scale + i, s_o, mask=inside)
        tl.store(output + i, pack_output(s_v, s_o, MOST_E), mask=inside)


def constants_launch(
    problem: Problem, scales: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[TritonLaunch, Constants, Tensor | None]:
    """Returns the launch that fills a problem's constants, the constants, and the output's scale; see
    `constant_buffers`.
    """
    x = constant_buffers(problem, scales)
    score_count, output_count = x.counts
    arguments = dict(
        q_scale=view(x.q_scale), k_scale=view(x.k_scale), v_scale=view(x.v_scale),
        given=View(None, 0, 0, 0, 0) if x.given is None else view(x.given),
        score=x.score, output=x.output, out_scale=x.out_scale, score_shape=x.score_shape, output_shape=x.output_shape,
        score_count=score_count, output_count=output_count, sm_bits=float_bits(problem.sm_scale),
        UNIT=score_unit(problem.method), GROUP=problem.group, QMAX=x.qmax,
        MOST_E=most_output_exponent(problem.method), BLOCK=_BLOCK,
    )  # fmt: skip
    programs = triton.cdiv(max(score_count, output_count), _BLOCK)
    return TritonLaunch(_constants_kernel, (programs,), arguments), x.constants, x.out_scale
