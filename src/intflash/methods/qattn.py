"""QAttn (Kluska et al., CVPR Workshops 2024): int8 Q K^T per tensor, float32 softmax, bfloat16 P V."""

from __future__ import annotations

from intflash.methods import arrays, floats
from intflash.methods.base import Method
from intflash.problem import Problem, Result
from intflash.quant import Recipe


def _reference(problem: Problem) -> Result:
    p, m = floats.exponentials(floats.dequantized_scores(problem, arrays.scores(problem)))
    _, v = arrays.key_codes(problem)  # 8-bit codes are exact in bfloat16
    acc = (p.bfloat16().float() @ v.float()) * arrays.value_scale(problem)
    return floats.finish(problem, acc, p.sum(-1, keepdim=True), m)


METHODS = (
    Method(
        name="qattn",
        summary="int8 Q, K, V; float32 softmax; bfloat16 P V",
        source="QAttn, CVPR Workshops 2024",
        reference=_reference,
        integer_only=False,
        recipe=Recipe("tensor", "tensor", "tensor", rule="divide"),
        granularities={
            "q": ("tensor", "head", "token", "block"),
            "k": ("tensor", "head", "token", "block"),
            "v": ("tensor", "head", "channel"),
        },
    ),
)
