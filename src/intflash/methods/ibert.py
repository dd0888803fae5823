"""I-BERT (Kim et al., ICML 2021): unfused, i-exp by a second-order polynomial, 8-bit P."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intflash.methods import arrays, integers
from intflash.methods.base import Method
from intflash.numerics.fixed_point import bit_length, floor_div
from intflash.problem import Problem, Result
from intflash.quant import Recipe

A, B, C = 0.3585, 1.353, 0.344  # exp(x) ~ A (x + B)^2 + C on (-ln 2, 0]
MAX_OCTAVES = 30
EXP_BITS = 40  # so that sums over 65,536 keys stay far inside int64
INT16_MAX = 32767


def i_exp(x: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(x * unit) for integers x <= 0 by I-EXP, in at most 40 bits, and its value at x = 0 (Algorithms 1, 2).

    ln 2 is rounded up to units, as the paper's program does, so that it is at least 1. C is also at least one unit:
    where a unit exceeds the whole polynomial, the largest key gets all the weight. With units from 2^-30 on, (B /
    unit)^2 + C / (A unit^2) stays below 2^62.
    """
    ln2 = torch.ceil(math.log(2.0) / unit).to(torch.int64)
    b = torch.floor(B / unit).to(torch.int64)
    c = torch.floor(C / (A * unit**2)).clamp(min=1).to(torch.int64)
    x = torch.maximum(x, -MAX_OCTAVES * ln2)
    octaves = floor_div(-x, ln2)
    polynomial = (x + octaves * ln2 + b) ** 2 + c
    spare = (bit_length(b**2 + c) - EXP_BITS).clamp(min=0)
    return polynomial >> (octaves + spare), (b**2 + c) >> spare


def _reference(problem: Problem) -> Result:
    S, present = integers.biased_scores(problem)
    x, m = integers.depth(S, present)
    unit = integers.served_unit(problem, integers.score_unit(problem))
    exp, one = i_exp(x, unit)
    p16 = torch.where(present, floor_div(2 * INT16_MAX * exp + one, 2 * one), 0)  # requantized to 16 bits, half up
    l = arrays.within(p16, 16, "exponential").sum(-1, keepdim=True)
    factor = floor_div(torch.full_like(l, 1 << 32), l.clamp(min=1))
    p8 = arrays.within(p16 * factor >> 24, 8, "P", signed=False)  # units of 1 / 256
    _, v = arrays.key_codes(problem)
    lse = integers.log_sum_exp(m, l, torch.full_like(l, INT16_MAX), unit)
    return integers.fixed_point_output(problem, arrays.matmul(p8, v, "PV"), 8, lse)


METHODS = (
    Method(
        name="ibert",
        summary="unfused integer-only, int32 scores, polynomial exponential, 8-bit P",
        source="I-BERT, Algorithms 1 and 2 (i-exp, i-softmax)",
        reference=_reference,
        integer_only=True,
        recipe=Recipe("tensor", "tensor", "tensor", rule="divide"),
        granularities={"q": ("tensor", "head"), "k": ("tensor", "head"), "v": ("tensor", "head", "channel")},
    ),
)
