"""`intflash_bfp` in tiles, from docs/numerics.md, "An exponent per block of keys".

p depends only on the depth below its block's octave, rounded half up to 1/256 octave, and is 0 from depth 4351 on: one
small table. T is exact in float64 as portable/intflash.py says; a bias is a multiple of 2^12 below 2^51, which changes
nothing of it. A block's sums are below 2^33 and so exact in float64; they are merged in int64.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from intflash.backends.portable.intflash import NO_SCORE, Output, Scores, lookup
from intflash.backends.portable.operands import spread_heads, weighted_sum
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, keys_in_sight, tiles
from intflash.numerics.block import (
    FAR,
    MAX_GAP,
    ONE_BLOCK,
    OUTPUT_SHIFT,
    block_keys,
    dropped_bits,
    fraction_bits,
    rounds,
)
from intflash.numerics.exp import P16_MAX
from intflash.problem import Problem, Result

OCTAVE = 2.0**32
STEP = 2.0**24  # of T: 1/256 octave
DEAD = 4351  # depth, in 1/256 octave, from which p16 is 0
UNSET = NO_SCORE / OCTAVE  # the octave of a group without keys


@functools.cache
def _table(device: torch.device, rounded: bool) -> Tensor:
    """p16 of each depth in 1/256 octave: u^2 + 132608 in Q.16, shifted by its octaves, rounded or floored."""
    values, half = [], 1 << 35 if rounded else 0
    for depth in range(DEAD + 1):
        octaves, fraction = divmod(3686 - depth, 256)
        m = (256 + fraction) ** 2 + 132608
        values.append(((m << (octaves + 20)) + half) >> 36)
    return torch.tensor(values, dtype=torch.float64, device=device)


def _valueless(problem: Problem) -> Tensor | None:
    """Keys whose V codes are all 0, bool ``[B, Hq, 1, Nk]``; None where there are none."""
    zero = (problem.v.data == 0).all(-1)[:, :, None]
    return spread_heads(zero, problem.group) if bool(zero.any()) else None


def _octave(score: Tensor) -> Tensor:
    return torch.ceil(score.amax(dim=-1, keepdim=True) / OCTAVE)


def block_float(problem: Problem, tiling: Tiling | None = None) -> Result:
    """Scores of a tile's blocks first, which give the rows' octaves, then their sums."""
    nk = problem.k.shape[2]
    tiling = replace(tiling or Tiling.on(problem.device), keys=block_keys(nk), steps=None)
    scores = Scores(problem, plain=False)
    output = Output(problem, P16_MAX)
    table = _table(problem.device, rounds(nk))
    valueless, v = _valueless(problem), problem.v.data.double()
    for tile in tiles(problem, tiling, passes=2):
        blocks = []  # (keys, scores of keys with a value, scores of the others)
        origin = tile.full(1, 0.0, torch.float64, problem.device)
        for keys in tiling.key_steps(nk, keys_in_sight(problem, tile)):
            score = scores.step(tile, keys, absent_keys(problem, tile, keys))
            zero = None if valueless is None else tile.of(valueless, keys)
            others = None
            if zero is not None and bool(zero.any()):
                score, others = score.masked_fill(zero, NO_SCORE), score.masked_fill(~zero, NO_SCORE)
            if nk <= ONE_BLOCK:
                origin, score, others = _from_maximum(score, others)
            blocks.append((keys, score, others))
        unset = tile.full(1, UNSET, torch.float64, problem.device)
        value_top = functools.reduce(torch.maximum, (_octave(score) for _, score, _ in blocks), unset)
        top = functools.reduce(torch.maximum, (_octave(x) for *_, x in blocks if x is not None), value_top)
        sums = _Sums(tile, top, value_top, v.shape[3], nk)
        while blocks:
            keys, score, others = blocks.pop()
            e, p = _weights(score, table)
            sums.add_l(e, p)
            sums.add_acc(e, weighted_sum(tile, p, v, keys, problem.group))
            if others is not None:
                sums.add_l(*_weights(others, table))
        acc, l, level, gap = sums.rounded()
        output.write(tile, acc, l, level + origin, gap)
    return output.result()


def _from_maximum(score: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The T from which the octaves of one block count, and its scores counted from it."""
    origin = score.amax(dim=-1, keepdim=True)
    if others is not None:
        origin = torch.where(origin == NO_SCORE, others.amax(dim=-1, keepdim=True), origin)
    origin = origin.masked_fill(origin == NO_SCORE, 0)
    score, others = (None if x is None else torch.where(x == NO_SCORE, x, x - origin) for x in (score, others))
    return origin, score, others


def _weights(score: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """A block's octave, and p of its keys."""
    e = _octave(score)
    return e, lookup(table, (e * OCTAVE - score).div_(STEP), score == NO_SCORE)


class _Sums:
    """l and acc of a tile in int64, below the rows' octaves."""

    def __init__(self, tile: Tile, top: Tensor, value_top: Tensor, channels: int, keys: int) -> None:
        self.top, self.value_top, self.fraction = top, value_top, fraction_bits(keys)
        self.acc_unit = 1 << dropped_bits(keys)
        self.l = tile.full(1, 0, torch.int64, top.device)
        self.acc = tile.full(channels, 0, torch.int64, top.device)

    def add_l(self, e: Tensor, p: Tensor) -> None:
        self.l += self._merged(p.sum(dim=-1, keepdim=True), self.top - e)

    def add_acc(self, e: Tensor, acc: Tensor) -> None:
        self.acc += self._merged(torch.floor(acc / self.acc_unit) * self.acc_unit, self.value_top - e)

    def _merged(self, x: Tensor, depth: Tensor) -> Tensor:
        by = self.fraction - depth.clamp(0, FAR)  # octaves, exact: x is below 2^33
        return torch.floor(x * torch.exp2(by)).masked_fill_(depth >= FAR, 0).to(torch.int64)

    def rounded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """acc, l, the level of l's unit in T, and the octaves from acc's unit to it."""
        acc, l = ((x + (1 << (OUTPUT_SHIFT - 1))) >> OUTPUT_SHIFT for x in (self.acc, self.l))
        gap = (self.top - self.value_top).clamp_max(MAX_GAP).masked_fill_(self.value_top == UNSET, 0)
        return acc, l, (self.top + (OUTPUT_SHIFT - self.fraction)) * OCTAVE, gap
