"""FQ-ViT (Lin et al., IJCAI 2022): unfused, int8 scores, log2-quantized P of 4 bits, P V by shifts."""

from __future__ import annotations

import torch

from intflash.methods import arrays, integers
from intflash.methods.base import Method
from intflash.methods.ibert import i_exp
from intflash.numerics.fixed_point import bit_length, floor_div
from intflash.problem import Problem, Result
from intflash.quant import Recipe

LEVELS = 15  # P is 2^0 ... 2^-15, or 0 below


def _reference(problem: Problem) -> Result:
    scores, scale, present = integers.int8_scores(problem)
    x, m = integers.depth(scores, present)
    scale = integers.served_unit(problem, scale)
    exp, one = i_exp(x, scale)
    exp = torch.where(present, exp, 0)
    l = exp.sum(-1, keepdim=True)
    divisor = exp.clamp(min=1)
    inverse = floor_div(2 * l + divisor, 2 * divisor).clamp(min=1)  # 1 / P to the nearest integer
    log2 = bit_length(inverse) - 1
    log2 = log2 + (2 * inverse >= 3 << log2)  # rounds up from 1.5 * 2^log2 on
    alive = (exp > 0) & (log2 <= LEVELS)
    p = torch.where(alive, 1 << (LEVELS - log2).clamp(min=0), 0)
    _, v = arrays.key_codes(problem)
    acc = arrays.matmul(p, v, "PV")  # the sum of V << (15 - log2)
    return integers.fixed_point_output(problem, acc, LEVELS, integers.log_sum_exp(m, l, one, scale))


METHODS = (
    Method(
        name="fqvit",
        summary="unfused integer-only, int8 scores, 4-bit log2 P",
        source="FQ-ViT, Log-Int-Softmax",
        reference=_reference,
        integer_only=True,
        recipe=Recipe("tensor", "tensor", "tensor", rule="divide"),
        granularities={"q": ("tensor",), "k": ("tensor",), "v": ("tensor", "head", "channel")},
    ),
)
