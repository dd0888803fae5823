"""`qflash` and `iflash`: the papers' integer online softmax over tiles of 32 keys (docs/numerics.md, section 3).

Registers are int32 and wrap. qflash runs on int32 tensors, whose products and sums wrap in the same way. iflash
divides, which is exact in int64. Every key takes part; masked and padding keys have the score -2^20.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from intflash.backends.portable.operands import value_scale, weighted_sum
from intflash.backends.portable.scores import IntegerScores
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, tiles
from intflash.errors import InputError
from intflash.numerics.exp import LOG2_E
from intflash.problem import Problem, Result

TILE = 32  # keys, by definition
MASKED = -(1 << 20)  # score of a masked or padding key, and the initial maximum of a row


class _ShiftSteps:
    """The steps of `qflash`, by multiplication and shift, on int32 tensors."""

    dtype = torch.int32

    def __init__(self, unit: Tensor) -> None:
        octave = unit * LOG2_E
        rs = torch.round(1 / octave)
        self.rs = rs.to(self.dtype)
        self.exp_m = torch.round(octave * -(2.0**16)).to(self.dtype)
        self.req_m = torch.round(octave * 127 * 2.0**16).to(self.dtype)
        self.rel_m = torch.round(2.0**30 / rs).to(torch.int64)

    def of(self, tile: Tile) -> _ShiftSteps:
        """Returns the constants of a tile's heads."""
        part = object.__new__(type(self))
        part.__dict__ = {name: tile.of(x) for name, x in self.__dict__.items()}
        return part

    def quotient(self, x: Tensor) -> Tensor:
        return (x * self.exp_m) >> 16

    def exp2(self, x: Tensor) -> Tensor:
        """Returns 2^(x octave) in units of 1 / rs (ShiftExp2)."""
        q = self.quotient(x)
        r = x + q * self.rs
        y = (r >> 1) + self.rs
        return y >> torch.where((q < 0) | (q > 31), 31, q)  # a GPU's shift clamps its unsigned amount

    def requantize(self, y: Tensor) -> Tensor:
        return ((y * self.req_m + (1 << 15)) >> 16).to(torch.int8)

    def release(self, x: Tensor, alpha: Tensor) -> Tensor:
        return ((x.to(torch.int64) * alpha * self.rel_m + (1 << 29)) >> 30).to(torch.int32)


class _DivisionSteps(_ShiftSteps):
    """The steps of `iflash`, with divisions, on int64 tensors."""

    dtype = torch.int64

    def quotient(self, x: Tensor) -> Tensor:
        return -x // self.rs

    def requantize(self, y: Tensor) -> Tensor:
        return ((127 * y + (self.rs >> 1)) // self.rs).to(torch.int8)

    def release(self, x: Tensor, alpha: Tensor) -> Tensor:
        return torch.div(x.to(torch.int64) * alpha, self.rs, rounding_mode="trunc").to(torch.int32)


def _served_unit(unit: Tensor, problem: Problem) -> Tensor:
    """Returns the score unit, float64. Where round(1 / octaves) leaves [1, 2^31), it is the unit of octaves = 1 or 1 /
    (2^31 - 1), whichever is nearer.

    Raises:
        InputError: it leaves that range and values may be read.
    """
    octaves = unit * LOG2_E
    rs = torch.round(1 / octaves)
    coarse, fine = ~(rs >= 1), rs >= 2.0**31  # a NaN counts as coarse
    if problem.check_finite and bool((coarse | fine).any()):
        raise InputError(
            f"{problem.method} needs round(1 / (s_Q * s_K * scale * log2(e))) in [1, 2^31), "
            f"got s_Q * s_K * scale * log2(e) from {octaves.min():.3g} to {octaves.max():.3g}"
        )
    return unit.masked_fill(coarse, 1 / LOG2_E).masked_fill(fine, 1 / ((2**31 - 1) * LOG2_E))


def qflash(problem: Problem, tiling: Tiling | None = None) -> Result:
    return _run(problem, _ShiftSteps, tiling)


def iflash(problem: Problem, tiling: Tiling | None = None) -> Result:
    return _run(problem, _DivisionSteps, tiling)


def _run(problem: Problem, steps: type[_ShiftSteps], tiling: Tiling | None) -> Result:
    tiling = replace(tiling or Tiling.on(problem.device), keys=TILE, steps=None)
    scores = IntegerScores(problem)
    scores.unit = _served_unit(scores.unit, problem)
    constants = steps(scores.unit)
    v = problem.v.data.float()  # |p| <= 128, so 32 products stay below 2^24
    b, h, nq, _ = problem.q.shape
    codes = torch.empty(b, h, nq, v.shape[3], dtype=torch.int8, device=problem.device)
    lse = torch.empty(b, h, nq, dtype=torch.float32, device=problem.device) if problem.return_lse else None
    for tile in tiles(problem, tiling):
        c = constants.of(tile)
        m = tile.full(1, MASKED, c.dtype, problem.device)
        l = tile.full(1, 1, torch.int32, problem.device)
        acc = tile.full(v.shape[3], 0, torch.int32, problem.device)
        for keys in tiling.key_steps(problem.k.shape[2]):
            s = scores.step(tile, keys).to(c.dtype)
            absent = absent_keys(problem, tile, keys)
            if absent is not None:
                s.masked_fill_(absent, MASKED)
            m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
            alpha = c.exp2(m - m_new)
            p = c.requantize(c.exp2(s - m_new))
            padding = TILE - (keys.stop - keys.start)
            pad = padding * c.requantize(c.exp2(MASKED - m_new)).to(torch.int32) if padding else 0
            l = c.release(l, alpha) + p.sum(dim=-1, keepdim=True, dtype=torch.int32) + pad
            acc = c.release(acc, alpha) + weighted_sum(tile, p.float(), v, keys, problem.group).to(torch.int32)
            m = m_new
        where = (tile.batches, tile.heads, tile.rows)
        codes[where] = torch.div(acc, l.masked_fill(l == 0, 1), rounding_mode="trunc").masked_fill_(l == 0, 0)
        if lse is not None:
            one = c.requantize(c.rs).double()
            lse[where] = (m * tile.of(scores.unit) + torch.log(l.double()) - torch.log(one)).float()[..., 0]
    s_v = value_scale(problem)
    if problem.out_dtype.is_floating_point:
        return Result((codes.float() * s_v).to(problem.out_dtype), lse=lse)
    return Result(codes.to(problem.out_dtype), s_v, lse)
