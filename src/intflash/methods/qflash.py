"""QFlash (Oh et al. 2026, arXiv 2604.25306): integer online softmax with shifts, as the authors' program computes it.

int32 registers wrap around, and rescaling uses int64. Absent keys and the padding of the last tile have the score
-2^20, as in the authors' program, and not minus infinity. So with a tiny score scale they contribute to l, and a row
without keys averages its masked ones. docs/numerics.md, section 3, lists where the method breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods import arrays, integers
from intflash.methods.base import Method
from intflash.numerics.exp import LOG2_E
from intflash.numerics.fixed_point import rounding_rshift, trunc_div, wrap_int8, wrap_int32
from intflash.problem import Problem, Result
from intflash.quant import Recipe

TILE = 32  # keys per tile: the rescaling rounds, so the tile is part of the result
MASKED = -(1 << 20)  # score of an absent key, and the initial maximum
RS_MAX = (1 << 31) - 1
# 133,144: the bound of head_dim and of the number of keys for which int8 products sum in int32
MAX_PRODUCT_TERMS = (1 << 31) // 127**2


class PipelineConstants(NamedTuple):
    """The constants of a call, computed from the float32 scales in float64: int64 tensors ``[B|1, Hq|1, 1, 1]``."""

    sm_scale: Tensor  # octaves per score unit, float64
    rs: Tensor  # the value of 1 in the exponential's fixed point: round(1 / sm_scale)
    exp_m: Tensor  # round(-sm_scale * 2^16)
    req_m: Tensor  # round(127 * sm_scale * 2^16)
    rel_m: Tensor  # round(2^30 / rs)


def served_unit(problem: Problem) -> Tensor:
    """Returns the score unit. In an unchecked call it is the nearest one whose rs is in [1, 2^31), and for a NaN that
    of rs = 1.

    Raises:
        InputError: rs leaves this range and values may be read.
    """
    unit = integers.score_unit(problem)
    sm_scale = unit * LOG2_E
    rs = torch.round(1 / sm_scale)
    coarse, fine = ~(rs >= 1), rs > RS_MAX
    if problem.check_finite and bool((coarse | fine).any()):
        raise InputError(
            f"{problem.method} needs round(1 / (s_Q * s_K * scale * log2(e))) in [1, 2^31), "
            f"got s_Q * s_K * scale * log2(e) from {sm_scale.min():.3g} to {sm_scale.max():.3g}"
        )
    return unit.masked_fill(coarse, 1 / LOG2_E).masked_fill(fine, 1 / (RS_MAX * LOG2_E))


def constants(problem: Problem) -> PipelineConstants:
    """Returns the constants of the authors' program, from `served_unit`."""
    sm_scale = served_unit(problem) * LOG2_E
    rs = torch.round(1 / sm_scale)
    integer = (rs, *map(torch.round, (-sm_scale * 65536, sm_scale * 127 * 65536, 2.0**30 / rs)))
    return PipelineConstants(sm_scale, *(x.to(torch.int64) for x in integer))


def shift_quotient(x: Tensor, c: PipelineConstants) -> Tensor:
    """Returns the octaves below 1, about -x * sm_scale, by multiplication and shift (Eq. 16)."""
    return wrap_int32(x * c.exp_m) >> 16


def shift_exp2(
    x: Tensor, c: PipelineConstants, quotient: Callable[[Tensor, PipelineConstants], Tensor] = shift_quotient
) -> Tensor:
    """Returns 2^(x * sm_scale) in units of 1 / rs for x <= 0 (Algorithm 2), in wrapping int32."""
    q = quotient(x, c)
    r = wrap_int32(x + wrap_int32(q * c.rs))
    shift = torch.where((q < 0) | (q > 31), 31, q)  # a GPU's shift clamps its unsigned amount
    return wrap_int32((r >> 1) + c.rs) >> shift


def requantize_by_shift(y: Tensor, c: PipelineConstants) -> Tensor:
    """Returns the exponential in units of 1 / 127, int8."""
    return wrap_int8(wrap_int32(wrap_int32(y * c.req_m) + (1 << 15)) >> 16)


def release_by_shift(x: Tensor, alpha: Tensor, c: PipelineConstants) -> Tensor:
    """Returns x * alpha / rs in int64 (ScaleRelease, Eq. 14)."""
    return wrap_int32(rounding_rshift(x * alpha * c.rel_m, 30))


@dataclass(frozen=True)
class Pipeline:
    """The steps in which the methods of the QFlash family differ."""

    quotient: Callable[[Tensor, PipelineConstants], Tensor] = shift_quotient
    requantize: Callable[[Tensor, PipelineConstants], Tensor] = requantize_by_shift
    release: Callable[[Tensor, Tensor, PipelineConstants], Tensor] = release_by_shift
    m_start: int = MASKED
    l_start: int = 1
    tile: int = TILE


PIPELINE = Pipeline()


def accumulate(problem: Problem, pipeline: Pipeline) -> tuple[Tensor, Tensor, Tensor]:
    """Computes Algorithm 1 over tiles of keys: acc ``[B, Hq, Nq, Dv]``, l and m ``[B, Hq, Nq, 1]``."""
    c = constants(problem)
    S, present = integers.biased_scores(problem, served_unit(problem))
    _, v = arrays.key_codes(problem)
    pad = -S.shape[3] % pipeline.tile
    S = torch.nn.functional.pad(torch.where(present, S, MASKED), (0, pad), value=MASKED)
    v = torch.nn.functional.pad(v, (0, 0, 0, pad))

    m = S.new_full((*S.shape[:3], 1), pipeline.m_start)
    l = torch.full_like(m, pipeline.l_start)
    acc = S.new_zeros((*S.shape[:3], v.shape[3]))
    for start in range(0, S.shape[3], pipeline.tile):
        s = S[..., start : start + pipeline.tile]
        raised = torch.maximum(m, s.amax(dim=-1, keepdim=True))
        alpha = shift_exp2(m - raised, c, pipeline.quotient)
        p = pipeline.requantize(shift_exp2(s - raised, c, pipeline.quotient), c)
        pv = arrays.matmul(p, v[:, :, start : start + pipeline.tile], "PV")
        l = wrap_int32(pipeline.release(l, alpha, c) + p.sum(-1, keepdim=True))
        acc = wrap_int32(pipeline.release(acc, alpha, c) + pv)
        m = raised
    return acc, l, m


def run(problem: Problem, pipeline: Pipeline = PIPELINE) -> Result:
    """Computes a problem: accumulates, then truncates acc / l to int8 codes of scale s_V."""
    acc, l, m = accumulate(problem, pipeline)
    c = constants(problem)
    lse = integers.log_sum_exp(m, l, pipeline.requantize(c.rs, c), c.sm_scale / LOG2_E)
    return finish(problem, acc, l, lse)


def finish(problem: Problem, acc: Tensor, l: Tensor, lse: Tensor) -> Result:
    """Returns acc / l truncated to int8 codes of scale s_V. int16 output holds the same codes, float output their
    values.
    """
    quotient = trunc_div(acc, torch.where(l == 0, 1, l))
    codes = wrap_int8(torch.where(l == 0, 0, quotient))
    s_v = arrays.value_scale(problem)
    lse = lse if problem.return_lse else None
    if problem.out_dtype.is_floating_point:
        return Result((codes.float() * s_v).to(problem.out_dtype), lse=lse)
    return Result(codes.to(problem.out_dtype), s_v, lse)


def check_bounds(problem: Problem) -> None:
    """Checks the bounds of the int32 products."""
    for what, size in (("head_dim", problem.q.shape[3]), ("number of keys", problem.k.shape[2])):
        if size > MAX_PRODUCT_TERMS:
            raise InputError(
                f"{problem.method} needs a {what} of at most {MAX_PRODUCT_TERMS} (127^2 * {what} < 2^31), got {size}"
            )


GRANULARITIES = dict.fromkeys("qkv", ("tensor", "head"))
RECIPE = Recipe("tensor", "tensor", "tensor", rule="divide")

METHODS = (
    Method(
        name="qflash",
        summary="integer-only online softmax with shifts, signed 7-bit P",
        source="QFlash, Algorithms 1 and 2, as its published program",
        reference=run,
        integer_only=True,
        recipe=RECIPE,
        granularities=GRANULARITIES,
        writes_v_scale=True,
        check=check_bounds,
    ),
)
