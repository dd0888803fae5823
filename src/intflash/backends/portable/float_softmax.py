"""The methods with a float softmax, in tiles: `int_flash_*`, `lite`, `qattn` and the float baselines.

Integer products are exact and the softmax is float32. Sums over keys are accumulated tile by tile, so that results
agree with the reference within float32 rounding and not bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intflash.backends.portable.operands import (
    code_operands,
    spread_heads,
    two_passes,
    value_scale,
    weighted_sum,
)
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, keys_in_sight, tiles
from intflash.problem import Problem, Result
from intflash.quant import QTensor
from intflash.quant.quantizers import TINY_AMAX, divided

E4M3_MAX = 448.0
FP8_P_SCALE = 256.0  # P times 2^8 stays above e4m3's subnormals
ONLINE_KEYS = {"int_flash_full": 64, "int_flash_half": 32}  # keys per tile, by definition

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Operands:
    """Float32 operands of a problem: exact codes with their score unit, or rounded values."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None = None  # [B|1, Hq|1, Nq|1, 1]; None for values, which need no scale
    k_scale: Tensor | None = None  # [B|1, Hq|1, 1, Nk|1]
    v_scale: Tensor | None = None  # of the output, where V is given as codes

    def step(self, tile: Tile, keys: slice, absent: Tensor | None) -> Tensor:
        """Returns float32 scores ``[b, h, rows, keys]``, -inf where absent."""
        q = tile.rows_of(self.q, self.problem.group)
        score = tile.unfold(torch.bmm(q, tile.keys_of(self.k, keys).mT)).float()
        if self.q_scale is not None:
            score *= tile.of(self.q_scale) * tile.of(self.k_scale, keys)
        score *= self.problem.sm_scale
        if self.problem.bias_float is not None:
            score += tile.of(self.problem.bias_float, keys).float()
        return score if absent is None else score.masked_fill_(absent, -math.inf)


def _values(x: QTensor | Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x.dequantize(dtype)


def _coded(problem: Problem, v: Tensor, v_scale: Tensor | None = None) -> _Operands:
    q, k = code_operands(problem)
    k_scale = spread_heads(problem.k.token_scale(), problem.group).mT
    return _Operands(problem, q, k, v, problem.q.token_scale(), k_scale, v_scale)


class _FloatOutput:
    """Divides tiles by l and stores them. Rows without keys give 0 and a log-sum-exp of -inf."""

    def __init__(self, problem: Problem, v: Tensor, v_scale: Tensor | None) -> None:
        b, h, nq, _ = problem.q.shape
        self.problem, self.v_scale = problem, v_scale
        self.out = torch.empty(b, h, nq, v.shape[3], dtype=problem.out_dtype, device=problem.device)
        self.lse = torch.empty(b, h, nq, dtype=torch.float32, device=problem.device) if problem.return_lse else None
        self.out_scale = None if problem.out_dtype.is_floating_point else problem.out_scale

    def write(self, tile: Tile, acc: Tensor, l: Tensor, m: Tensor) -> None:
        where = (tile.batches, tile.heads, tile.rows)
        if self.lse is not None:
            self.lse[where] = (m + torch.log(l))[..., 0]
        if self.v_scale is not None:
            acc = acc * tile.of(self.v_scale)
        out = (acc / l).masked_fill_(l == 0, 0.0)
        if self.out_scale is not None:
            qmax = torch.iinfo(self.out.dtype).max
            out = torch.round(out / tile.of(self.out_scale)).clamp_(-qmax, qmax)
        self.out[where] = out.to(self.out.dtype)

    def result(self) -> Result:
        return Result(self.out, self.out_scale, self.lse)


def _exact_maximum(
    x: _Operands, round_p: Callable[[Tensor], Tensor], tiling: Tiling | None, scale: float = 1
) -> Result:
    """Computes with P = round_p(exp(score - maximum) * scale). l sums the exponentials before rounding."""
    problem = x.problem
    output = _FloatOutput(problem, x.v, x.v_scale)
    for tile, top, steps in two_passes(problem, tiling or Tiling.on(problem.device), x.step, -math.inf):
        top = top.float().masked_fill_(top == -math.inf, 0.0)
        l = tile.full(1, 0, torch.float32, top.device)
        acc = tile.full(x.v.shape[3], 0, torch.float32, top.device)
        for keys, _, score in steps:
            p = score.sub_(top).exp_()
            l += p.sum(dim=-1, keepdim=True)
            acc += weighted_sum(tile, round_p(p * scale if scale != 1 else p), x.v, keys, problem.group)
        output.write(tile, acc / scale, l, top)
    return output.result()


def _online(x: _Operands, round_p: Rounding, tiling: Tiling | None) -> Result:
    """Computes with P rounded against the running maximum, in tiles of keys that are part of the method."""
    problem = x.problem
    tiling = replace(tiling or Tiling.on(problem.device), keys=ONLINE_KEYS[problem.method], steps=None)
    output = _FloatOutput(problem, x.v, x.v_scale)
    for tile in tiles(problem, tiling):
        m = tile.full(1, -math.inf, torch.float32, problem.device)
        l = tile.full(1, 0, torch.float32, problem.device)
        acc = tile.full(x.v.shape[3], 0, torch.float32, problem.device)
        for keys in tiling.key_steps(problem.k.shape[2], keys_in_sight(problem, tile)):
            score = x.step(tile, keys, absent_keys(problem, tile, keys))
            m_new = torch.maximum(m, score.amax(dim=-1, keepdim=True))
            base = m_new.masked_fill(m_new == -math.inf, 0.0)  # no key so far: p = 0, not NaN
            alpha = torch.exp(m - base)
            p = score.sub_(base).exp_()
            l = l * alpha + p.sum(dim=-1, keepdim=True)
            acc = acc * alpha + weighted_sum(tile, round_p(p), x.v, keys, problem.group)
            m = m_new
        output.write(tile, acc, l, m)
    return output.result()


def int_flash_full(problem: Problem, tiling: Tiling | None = None) -> Result:
    x = _coded(problem, _values(problem.v, torch.float32))
    return _online(x, lambda p: torch.floor(p.half() * 127 + 0.5).float() / 127, tiling)


def int_flash_half(problem: Problem, tiling: Tiling | None = None) -> Result:
    return _online(_coded(problem, _values(problem.v, torch.float16).float()), lambda p: p.half().float(), tiling)


def lite(problem: Problem, tiling: Tiling | None = None) -> Result:
    x = _coded(problem, _values(problem.v, torch.bfloat16).float())
    return _exact_maximum(x, lambda p: p.bfloat16().float(), tiling)


def qattn(problem: Problem, tiling: Tiling | None = None) -> Result:
    x = _coded(problem, problem.v.data.float(), value_scale(problem))
    return _exact_maximum(x, lambda p: p.bfloat16().float(), tiling)


def rounded(problem: Problem, tiling: Tiling | None = None, *, dtype: torch.dtype) -> Result:
    """`fp32`, `fp16`, `bf16`: inputs and P rounded to `dtype`."""
    x = _Operands(problem, *(_values(t, dtype).float() for t in (problem.q, problem.k, problem.v)))
    return _exact_maximum(x, lambda p: p.to(dtype).float(), tiling)


def fp8(problem: Problem, tiling: Tiling | None = None, *, dims: tuple[int, ...]) -> Result:
    """e4m3 inputs, with one scale for each maximum over `dims`, and e4m3 P."""
    x = _Operands(problem, *(_e4m3(t, dims) for t in (problem.q, problem.k, problem.v)))
    return _exact_maximum(x, lambda p: p.to(torch.float8_e4m3fn).float(), tiling, FP8_P_SCALE)


def _e4m3(x: QTensor | Tensor, dims: tuple[int, ...]) -> Tensor:
    x = _values(x, torch.float32)
    if x.numel() == 0:
        return x
    amax = x.abs().amax(dim=dims, keepdim=True)
    scale = torch.where(amax < TINY_AMAX, torch.ones_like(amax), divided(amax, E4M3_MAX))
    return (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
