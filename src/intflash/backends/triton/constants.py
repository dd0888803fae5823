"""The constants of a call, computed on the device from scales that may be known only there.

`numerics.exp.exponent_constants` and `output_multiplier` in one small launch: float64, the same order of
operations, the same saturations. A pair of 32-bit constants is packed in one int64 (high << 32 | low).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.triton.launch import Launch, apart, view
from intflash.backends.triton.tiles import View
from intflash.numerics import exp
from intflash.problem import Problem

LOG2_E = tl.constexpr(exp.LOG2_E)
MAX_OCTAVES = tl.constexpr(exp.MAX_OCTAVES_PER_UNIT)
C_MAX = tl.constexpr(exp.C_MAX)
FEW_FRACTION_BITS = tl.constexpr(exp.FEW_FRACTION_BITS)
LEAST_E = tl.constexpr(exp.OUTPUT_EXPONENTS[0])
MOST_E = tl.constexpr(exp.OUTPUT_EXPONENTS[1])
_BLOCK = 128


class Constants(NamedTuple):
    """What the attention kernels read: packed score and output constants, or s_V for float output."""

    score: View | None  # int64 [B|1, Hq|1, Nq|1, key blocks|1]: k << 32 | C; None: the kernel has the scales
    output: View | None  # int64 [B|1, Hq|1, 1, Dv|1]: e << 32 | Mr; None for float output
    v_scale: View | None  # float32 [B|1, Hk|1, 1, Dv|1]; None for integer output


def for_loops(constants: Constants) -> Constants:
    """With s_V as a Triton kernel can read it inside a loop."""
    v_scale = constants.v_scale
    return constants if v_scale is None else constants._replace(v_scale=view(apart(v_scale.ptr)))


class Shape(NamedTuple):
    b: int
    h: int
    n: int
    d: int


@triton.jit
def _round(x):
    """A float64 in [0, 2^32) rounded half to even, as int64."""
    return (x + 6755399441055744.0).to(tl.int64, bitcast=True) & 0xFFFFFFFF  # 1.5 * 2^52


@triton.jit
def _exponent(x):
    """frexp's exponent of a positive float64."""
    return ((x.to(tl.int64, bitcast=True) >> 52) & 2047) - 1022


@triton.jit
def _power_of_two(e):
    return ((e + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def pack_score(q_scale, k_scale, sm_scale, UNIT: tl.constexpr):
    """k << 32 | C of `exponent_constants`; float32 scales, float64 sm_scale."""
    c = ((q_scale.to(tl.float64) * k_scale.to(tl.float64)) * sm_scale) * LOG2_E
    c = tl.minimum(c, MAX_OCTAVES) * (UNIT.sixteenths / 16)
    k = tl.where(c < 0.5, 0, _exponent(c) + 1)
    zeros = tl.where(c < UNIT.least_coarse, 32 - UNIT.fraction_bits, 32 - FEW_FRACTION_BITS).to(tl.int64)
    C = tl.minimum(_round(c * _power_of_two(32 - zeros)) << (zeros - k), C_MAX)
    return (k << 32) | C


@triton.jit
def pack_output(v_scale, out_scale):
    """e << 32 | Mr of `output_multiplier`."""
    rho = v_scale.to(tl.float64) / out_scale.to(tl.float64)
    e = _exponent(rho)
    Mr = _round(rho * _power_of_two(24 - e))
    return (tl.minimum(tl.maximum(e, LEAST_E), MOST_E) << 32) | Mr


@triton.jit
def default_out_scale(v_scale, QMAX: tl.constexpr):
    """s_V * 127 / QMAX in float32, each step rounded once."""
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
    UNIT: tl.constexpr, GROUP: tl.constexpr, QMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One thread per constant. sm_bits: the bits of the float64 softmax scale. given: out scale or None."""
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
        tl.store(output + i, pack_output(s_v, s_o), mask=inside)


def score_unit(method: str) -> exp.ScoreUnit:
    """What a method's T counts."""
    return exp.TABLE_STEPS if method == "intflash_online" else exp.OCTAVES


def _broadcast(*shapes: tuple[int, ...]) -> Shape:
    return Shape(*torch.broadcast_shapes(*shapes))


def constants_launch(
    problem: Problem, scales: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Launch, Constants, Tensor | None]:
    """The launch that fills a problem's constants, the constants, and the output's scale.

    `scales`: of Q (its block axis spread over tokens), K and V where the problem's tensors are floats.
    """
    device, qmax = problem.q.device, output_limit(problem.out_dtype)
    heads, group = problem.q.shape[1], problem.group
    if scales is None:
        scales = problem.q.token_scale(), problem.k.scale, problem.v.scale
    q_scale, k_scale, v_scale = scales
    per_head = [s[:1] + (heads if s[1] > 1 else 1,) + s[2:] for s in (k_scale.shape, v_scale.shape)]
    score_shape = _broadcast(q_scale.shape, (*per_head[0][:2], 1, per_head[0][2]))
    score = torch.empty(score_shape, dtype=torch.int64, device=device)
    output = out_scale = None
    output_shape = Shape(1, 1, 1, 1)
    if qmax:
        out_scale = problem.out_scale
        output_shape = _broadcast(per_head[1], (1, 1, 1, 1) if out_scale is None else out_scale.shape)
        output = torch.empty(output_shape, dtype=torch.int64, device=device)
        if out_scale is None:
            out_scale = torch.empty(output_shape, dtype=torch.float32, device=device)
    arguments = dict(
        q_scale=view(q_scale), k_scale=view(k_scale), v_scale=view(v_scale),
        given=View(None, 0, 0, 0, 0) if problem.out_scale is None or not qmax else view(problem.out_scale),
        score=score, output=output, out_scale=out_scale, score_shape=score_shape, output_shape=output_shape,
        score_count=score.numel(), output_count=0 if output is None else output.numel(),
        sm_bits=float_bits(problem.sm_scale),
        UNIT=score_unit(problem.method), GROUP=group, QMAX=qmax, BLOCK=_BLOCK,
    )  # fmt: skip
    count = max(arguments["score_count"], arguments["output_count"])
    launch = Launch(_constants_kernel, (triton.cdiv(count, _BLOCK),), arguments)
    constants = Constants(view(score), None if output is None else view(output), None if qmax else view(v_scale))
    return launch, constants, out_scale


def float_bits(x: float) -> int:
    """The bits of a float64: what a kernel gets, since Triton would round a float argument to float32."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


def output_limit(dtype: torch.dtype) -> int:
    """The largest code of an integer output; 0 for a float one."""
    return {torch.int8: 127, torch.int16: 32767}.get(dtype, 0)
