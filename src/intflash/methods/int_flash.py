"""INT-FlashAttention (Chen et al. 2024, arXiv 2409.16997): integer matrix products, float32 online softmax.

The paper defines `l` as the sum of the quantized P (line 12). The authors' program sums the exact P, which is 1 dB
better and agrees with their numbers, so this file does too. P is rounded against the running maximum, so that the
number of keys per tile is part of the result: 64 (full) and 32 (half) reproduce the outputs of the authors' program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from intflash.methods import arrays, floats
from intflash.methods.base import Method
from intflash.problem import Problem, Result
from intflash.quant import Recipe

R = 127  # scale of the quantized P (Algorithm 1; the text of 3.2 says 256, which int8 cannot hold)
TILE_FULL = 64
TILE_HALF = 32


def quantized_p(p: Tensor) -> Tensor:
    """Returns P as int8 codes / 127, computed from float16 P times 127 in float16, rounded half up. The values are
    float32.
    """
    return torch.floor(p.half() * R + 0.5).float() / R


def half_p(p: Tensor) -> Tensor:
    return p.half().float()


def online(
    problem: Problem, round_p: Callable[[Tensor], Tensor], v: Tensor, tile: int, *, sum_rounded: bool = False
) -> Result:
    """Computes Algorithm 1 over tiles of keys. v holds float32 values ``[B, Hk, Nk, Dv]``; l sums the exact or the
    rounded P.

    In the full method the authors' program multiplies int8 codes and scales the int32 sum, while this function scales V
    first. The two differ by float32 rounding only, and this form serves every granularity of V.
    """
    scores = floats.dequantized_scores(problem, arrays.scores(problem))
    v = arrays.per_query_head(v, problem)
    m = scores.new_full((*scores.shape[:3], 1), -math.inf)
    l = torch.zeros_like(m)
    acc = scores.new_zeros((*scores.shape[:3], v.shape[3]))
    for start in range(0, scores.shape[3], tile):
        s = scores[..., start : start + tile]
        raised = torch.maximum(m, arrays.row_max(s, -math.inf))
        reference = torch.where(raised == -math.inf, 0.0, raised)  # no key so far: p = 0, not NaN
        alpha, p = torch.exp(m - reference), torch.exp(s - reference)
        rounded = round_p(p)
        l = l * alpha + (rounded if sum_rounded else p).sum(-1, keepdim=True)
        acc = acc * alpha + rounded @ v[:, :, start : start + tile]
        m = raised
    return floats.finish(problem, acc, l, m)


def _reference_full(problem: Problem) -> Result:
    return online(problem, quantized_p, floats.values(problem.v, torch.float32), TILE_FULL)


def _reference_half(problem: Problem) -> Result:
    return online(problem, half_p, floats.values(problem.v, torch.float16).float(), TILE_HALF)


_method = partial(
    Method,
    source="INT-FlashAttention, Algorithm 1",
    integer_only=False,
    granularities={
        "q": ("tensor", "head", "token", "block"),
        "k": ("tensor", "head", "token", "block"),
        "v": floats.ANY_GRANULARITY,
    },
)

METHODS = (
    _method(
        name="int_flash_full",
        summary="int8 Q, K per token, V per head and P; float32 softmax",
        reference=_reference_full,
        recipe=Recipe(q="token", k="token", v="head", rule="divide"),
    ),
    _method(
        name="int_flash_half",
        summary="int8 Q, K per token; float16 P and V; float32 softmax",
        reference=_reference_half,
        recipe=Recipe(q="token", k="token", v="none", rule="divide"),
    ),
)
