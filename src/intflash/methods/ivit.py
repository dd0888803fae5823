"""I-ViT (Li and Gu, ICCV 2023): unfused, int8 scores, Shiftmax, int8 P.

1 / s_score is only a few units and becomes an integer, so that its rounding decides the accuracy. Rounded to nearest it
gives 23 to 28 dB on A2 and A7 (QFlash's table: 25.8 and 25.2). The authors' program rounds up by floor(-1 / s), which
gives 17 dB wherever 1 / s lies just above an integer. This file rounds to nearest.
"""

from __future__ import annotations

import torch

from intflash.methods import arrays, integers
from intflash.methods.base import Method
from intflash.numerics.fixed_point import floor_div
from intflash.problem import Problem, Result
from intflash.quant import Recipe

FRACTION_BITS = 15  # n of ShiftExp: also the octaves after which p is 0
INT32_MAX = (1 << 31) - 1


def _reference(problem: Problem) -> Result:
    scores, scale, present = integers.int8_scores(problem)
    scale = integers.served_unit(problem, scale)  # keeps p below 2^45
    x, m = integers.depth(scores, present)
    x = x + (x >> 1) - (x >> 4)  # times 1.4375, about log2(e)
    one = torch.round(1 / scale).clamp(min=1).to(torch.int64)
    x = torch.maximum(x, -FRACTION_BITS * one)
    q = floor_div(-x, one)
    r = x + q * one  # in (-one, 0]
    p = torch.where(present, ((r + 2 * one) << (FRACTION_BITS - q)) >> 1, 0)  # (r / 2 + one) * 2^(15 - q)
    l = p.sum(-1, keepdim=True)
    factor = floor_div(torch.full_like(l, INT32_MAX), l.clamp(1, INT32_MAX))
    p8 = arrays.within((p * factor >> 24).clamp(max=127), 8, "P")
    _, v = arrays.key_codes(problem)
    lse = integers.log_sum_exp(m, l, one << FRACTION_BITS, scale)
    return integers.fixed_point_output(problem, arrays.matmul(p8, v, "PV"), 7, lse)


METHODS = (
    Method(
        name="ivit",
        summary="unfused integer-only, int8 scores, Shiftmax, int8 P",
        source="I-ViT, Algorithm 1 (Shiftmax)",
        reference=_reference,
        integer_only=True,
        recipe=Recipe("tensor", "tensor", "tensor", rule="divide"),
        granularities={"q": ("tensor",), "k": ("tensor",), "v": ("tensor", "head", "channel")},
    ),
)
