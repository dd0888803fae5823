"""What the methods with a float softmax share: masked float32 scores, their exponentials, the output."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intflash.methods import arrays
from intflash.problem import Problem, Result
from intflash.quant import QTensor

ANY_GRANULARITY = ("none", "tensor", "head", "token", "block", "channel")


def values(x: QTensor | Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x in `dtype`: floats are cast, codes are dequantized."""
    return x.to(dtype) if isinstance(x, Tensor) else x.dequantize(dtype)


def dequantized_scores(problem: Problem, S: Tensor) -> Tensor:
    """Returns float32 scores from the integer ones, with Q's scale per row, K's per key, bias and mask applied."""
    unit = problem.q.token_scale() * arrays.key_scale_row(problem)
    return masked(problem, S.float() * unit * problem.sm_scale)


def masked(problem: Problem, scores: Tensor) -> Tensor:
    """Returns scores + bias, -inf for absent keys, float32 ``[B, Hq, Nq, Nk]``."""
    bias, absent = arrays.split_bias(problem)
    if bias is not None:
        scores = scores + bias.float()
    return torch.where(arrays.present_keys(problem, absent), scores, -math.inf)


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(score - m) and the row maximum m, ``[B, Hq, Nq, 1]``. In a row without keys p = 0 and m = 0."""
    m = arrays.row_max(scores, -math.inf)
    m = torch.where(m == -math.inf, 0.0, m)
    return torch.exp(scores - m), m


def finish(problem: Problem, acc: Tensor, l: Tensor, m: Tensor) -> Result:
    """Returns acc / l in the output's dtype, with integer output rounded half to even. Rows without keys give 0 and
    lse -inf.
    """
    out = torch.where(l > 0, acc / l, 0.0)
    lse = (m + torch.log(l))[..., 0] if problem.return_lse else None
    if problem.out_dtype.is_floating_point:
        return Result(out.to(problem.out_dtype), lse=lse)
    scale = arrays.output_scale(problem)
    qmax = torch.iinfo(problem.out_dtype).max
    return Result(torch.round(out / scale).clamp(-qmax, qmax).to(problem.out_dtype), scale, lse)
