"""LiteAttention v0.4 (MoonMath): int8 Q and K with a scale per tile, float32 softmax, bfloat16 P and V."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods import arrays, floats
from intflash.methods.base import Method
from intflash.problem import Problem, Result
from intflash.quant import Recipe

MAX_HEAD_DIM = 256  # 256 * 127^2 < 2^22: the score fits the low mantissa bits of the magic constant
MAGIC = float((1 << 23) + (1 << 22) - 1)
MAGIC_BITS = int(torch.tensor(MAGIC).view(torch.int32))
SCORE_LIMIT = 1 << 22


def int_to_float(s: Tensor) -> Tensor:
    """Converts int32 to float32 without a conversion instruction: the bits of float(s + MAGIC), minus MAGIC. Exact
    for |s| < 2^22.
    """
    return (s.to(torch.int32) + MAGIC_BITS).view(torch.float32) - MAGIC


def _reference(problem: Problem) -> Result:
    S = arrays.scores(problem)
    if S.numel() and int(S.abs().max()) >= SCORE_LIMIT:
        raise InputError(f"lite needs |score| < 2^22 (codes in [-127, 127]), got {int(S.abs().max())}")
    p, m = floats.exponentials(floats.dequantized_scores(problem, int_to_float(S)))
    v = arrays.per_query_head(floats.values(problem.v, torch.bfloat16).float(), problem)
    return floats.finish(problem, p.bfloat16().float() @ v, p.sum(-1, keepdim=True), m)


def _check_bounds(problem: Problem) -> None:
    if problem.q.shape[3] > MAX_HEAD_DIM:
        raise InputError(f"lite needs head_dim at most {MAX_HEAD_DIM} (|score| < 2^22), got {problem.q.shape[3]}")


METHODS = (
    Method(
        name="lite",
        summary="int8 Q, K per tile of 128; float32 softmax; bfloat16 P and V",
        source="LiteAttention v0.4, Quantization That Matches Attention Internals",
        reference=_reference,
        integer_only=False,
        recipe=Recipe(q="block", k="block", v="none", block_size=128),
        granularities={
            "q": ("tensor", "head", "token", "block"),
            "k": ("tensor", "head", "token", "block"),
            "v": floats.ANY_GRANULARITY,
        },
        check=_check_bounds,
    ),
)
