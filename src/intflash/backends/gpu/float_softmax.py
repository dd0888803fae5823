"""Turns a problem of a method with float softmax into one launch: operands, row statistics, the output's scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from intflash.backends.gpu.tensors import Statistics, contiguous_keys
from intflash.problem import Problem, Result
from intflash.quant import QTensor
from intflash.quant.quantizers import TINY_AMAX, divided

# codes of V are dequantized to this type before the launch
_V_DTYPE = {"int_flash_half": torch.float16, "lite": torch.bfloat16}
_FLOAT_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FP8_DIMS = {"fp8": (0, 1, 2, 3), "fp8_head": (2, 3)}  # axes over which Q, K and V share one scale
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Operand:
    """Codes or floats with their scale, float32 4-D, or None for a scale of 1."""

    data: Tensor
    scale: Tensor | None = None
    granularity: str = "none"
    block_size: int = 1


def run(problem: Problem, launch: Callable[..., Any]) -> Result:
    """Computes a problem. launch(problem, operands, out, statistics) returns the attention launch."""
    problem = problem.quantized()
    batch, heads, nq, _ = problem.q.shape
    out = torch.empty(batch, heads, nq, problem.v.shape[3], dtype=problem.out_dtype, device=problem.device)
    statistics = Statistics(None, None)
    if problem.return_lse:
        statistics = Statistics(*(torch.empty(batch, heads, nq, device=problem.device) for _ in range(2)))
    if not problem.out_dtype.is_floating_point and problem.out_scale is None:
        problem = replace(problem, out_scale=_default_out_scale(problem))
    launch(problem, operands(problem), out, statistics).run()
    lse = None
    if problem.return_lse:
        lse = (statistics.t_max + torch.log2(statistics.l)) * math.log(2.0)
    return Result(out, None if problem.out_dtype.is_floating_point else problem.out_scale, lse)


def operands(problem: Problem) -> tuple[Operand, Operand, Operand]:
    """Returns Q, K and V of a quantized problem as the kernel reads them. One-byte V has contiguous keys."""
    method = problem.method
    if method in FP8_DIMS:
        q, k, v = (_e4m3(_values(x, torch.float32), FP8_DIMS[method]) for x in (problem.q, problem.k, problem.v))
        return q, k, replace(v, data=contiguous_keys(v.data))
    if method in _FLOAT_DTYPE:
        return tuple(Operand(_values(x, _FLOAT_DTYPE[method])) for x in (problem.q, problem.k, problem.v))
    q = Operand(problem.q.data, problem.q.token_scale(), problem.q.granularity)
    k = Operand(problem.k.data, problem.k.scale, problem.k.granularity, problem.k.block_size or 1)
    if method in _V_DTYPE:
        return q, k, Operand(_values(problem.v, _V_DTYPE[method]))
    v = Operand(problem.v.data, problem.v.scale, problem.v.granularity, problem.v.block_size or 1)
    return q, k, v if method == "qattn" else replace(v, data=contiguous_keys(v.data))


def _values(x: QTensor | Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x.dequantize(dtype)


def _e4m3(x: Tensor, dims: tuple[int, ...]) -> Operand:
    """Returns x as e4m3 codes, with its maximum over `dims` scaled to e4m3's largest value."""
    amax = x.abs().amax(dim=dims, keepdim=True)
    scale = torch.where(amax < TINY_AMAX, torch.ones_like(amax), divided(amax, _E4M3_MAX))
    codes = (x / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.int8)
    return Operand(codes, scale, "tensor" if len(dims) == 4 else "head")


def _default_out_scale(problem: Problem) -> Tensor:
    """Returns the scale at which max|V|, which no output exceeds, is the largest code."""
    qmax = torch.iinfo(problem.out_dtype).max
    if isinstance(problem.v, Tensor):
        amax = problem.v.float().abs().amax().reshape(1, 1, 1, 1)
        return torch.where(amax < TINY_AMAX, torch.ones_like(amax), divided(amax, qmax))
    scale = problem.v.scale
    if problem.v.granularity in ("token", "block"):
        scale = scale.amax(dim=2, keepdim=True)
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(problem.group, dim=1)
    return divided(scale * ((1 << (problem.v.bits - 1)) - 1), qmax)
