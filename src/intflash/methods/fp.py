"""Floating-point baselines: `fp32`, `fp16`, `bf16`, and `fp8`, `fp8_head` (e4m3).

Inputs and P are rounded to the format. Products and the softmax are computed in float32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from intflash.methods import arrays, floats
from intflash.methods.base import Method
from intflash.problem import Problem, Result
from intflash.quant import QTensor, Recipe

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# P in (0, 256] keeps small values out of e4m3's subnormals (FlashAttention-3 uses the same 8 octaves)
E4M3_P_SCALE = 256.0


def _attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, round_p, p_scale: float = 1.0) -> Result:
    """Computes attention of float32 tensors that hold rounded values. `round_p` rounds p * p_scale to the format."""
    k, v = arrays.per_query_head(k, problem), arrays.per_query_head(v, problem)
    scores = floats.masked(problem, (q @ k.transpose(-1, -2)) * problem.sm_scale)
    p, m = floats.exponentials(scores)
    return floats.finish(problem, round_p(p * p_scale) @ v / p_scale, p.sum(-1, keepdim=True), m)


def _reference(problem: Problem, dtype: torch.dtype) -> Result:
    q, k, v = (floats.values(x, dtype).float() for x in (problem.q, problem.k, problem.v))
    return _attend(problem, q, k, v, lambda p: p.to(dtype).float())


def _e4m3(x: QTensor | Tensor, dims: tuple[int, ...]) -> Tensor:
    """Returns x rounded to e4m3 after scaling its maximum over `dims` to 448, as float32."""
    x = floats.values(x, torch.float32)
    scale = arrays.scale_of_maximum(x, dims, E4M3_MAX)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() * scale


def _reference_fp8(problem: Problem, dims: tuple[int, ...]) -> Result:
    q, k, v = (_e4m3(x, dims) for x in (problem.q, problem.k, problem.v))
    return _attend(problem, q, k, v, lambda p: p.to(E4M3).float(), E4M3_P_SCALE)


def _method(name: str, summary: str, reference) -> Method:
    return Method(
        name=name,
        summary=summary,
        source="baseline",
        reference=reference,
        integer_only=False,
        recipe=Recipe(q="none", k="none", v="none"),
        granularities=dict.fromkeys("qkv", floats.ANY_GRANULARITY),
    )


METHODS = (
    _method("fp32", "float32", partial(_reference, dtype=torch.float32)),
    _method("fp16", "float16 inputs and P, float32 sums", partial(_reference, dtype=torch.float16)),
    _method("bf16", "bfloat16 inputs and P, float32 sums", partial(_reference, dtype=torch.bfloat16)),
    _method("fp8", "e4m3 inputs and P, a scale per tensor", partial(_reference_fp8, dims=(0, 1, 2, 3))),
    _method("fp8_head", "e4m3 inputs and P, a scale per head", partial(_reference_fp8, dims=(2, 3))),
)
