"""I-FlashAttention (Oh et al., CASES 2025): QFlash's pipeline with divisions instead of multiplications and shifts."""

from __future__ import annotations

from torch import Tensor

from intflash.methods import qflash
from intflash.methods.base import Method
from intflash.numerics.fixed_point import floor_div, trunc_div, wrap_int8, wrap_int32


def divide_quotient(x: Tensor, c: qflash.PipelineConstants) -> Tensor:
    """Returns the octaves below 1 for x <= 0: floor(x / -rs)."""
    return floor_div(-x, c.rs)


def requantize_by_division(y: Tensor, c: qflash.PipelineConstants) -> Tensor:
    """Returns the exponential in units of 1 / 127, int8: round(127 y / rs)."""
    return wrap_int8(floor_div(127 * y + (c.rs >> 1), c.rs))


def release_by_division(x: Tensor, alpha: Tensor, c: qflash.PipelineConstants) -> Tensor:
    """Returns x * alpha / rs truncated towards zero, in int64 (Algorithm 2, line 5)."""
    return wrap_int32(trunc_div(x * alpha, c.rs))


PIPELINE = qflash.Pipeline(divide_quotient, requantize_by_division, release_by_division)

METHODS = (
    Method(
        name="iflash",
        summary="integer-only online softmax with divisions, signed 7-bit P",
        source="I-FlashAttention, Algorithms 1 and 2, fused",
        reference=lambda problem: qflash.run(problem, PIPELINE),
        integer_only=True,
        recipe=qflash.RECIPE,
        granularities=qflash.GRANULARITIES,
        writes_v_scale=True,
        check=qflash.check_bounds,
    ),
)
