"""`intflash_bfp` in tiles, from docs/numerics.md, "Keys without a value, and dither".

p24, p16 with 8 fraction bits, depends only on the depth below its group's octave, rounded half up to 1/256 octave, and
is 0 from depth 6399 on: one small table. T is exact in float64 as portable/intflash.py says; a bias is a multiple of
2^12 below 2^51, which changes nothing of it. A group's sums are below 2^44 and so exact in float64; they are merged in
int64.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from intflash.backends.portable.intflash import NO_SCORE, Output, Scores, lookup
from intflash.backends.portable.operands import spread_heads, weighted_sum
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, keys_in_sight, tiles
from intflash.numerics.exp import P16_MAX
from intflash.numerics.groups import FAR, MAX_GAP, OUTPUT_SHIFT, P_FRACTION_BITS, UNSET, additions, fraction_bits
from intflash.problem import Problem, Result

OCTAVE = 2.0**32
STEP = 2.0**24  # of T: 1/256 octave
DEAD = 6399  # depth, in 1/256 octave, from which p24 is 0


@functools.cache
def _table(device: torch.device) -> Tensor:
    """p24 of each depth in 1/256 octave: u^2 + 132608 in Q.16, shifted by its octaves and floored."""
    values = []
    for depth in range(DEAD + 1):
        octaves, fraction = divmod(3686 - depth, 256)
        values.append((((256 + fraction) ** 2 + 132608) << (octaves + 16)) >> 24 if octaves >= -11 else 0)
    return torch.tensor(values, dtype=torch.float64, device=device)


def _valueless(problem: Problem) -> Tensor | None:
    """Keys whose V codes are all 0, bool ``[B, Hq, 1, Nk]``; None where there are none."""
    zero = (problem.v.data == 0).all(-1)[:, :, None]
    return spread_heads(zero, problem.group) if bool(zero.any()) else None


def two_groups(problem: Problem, tiling: Tiling | None = None) -> Result:
    """Scores of a tile first, which give the rows' maxima, then their sums."""
    nk = problem.k.shape[2]
    tiling = tiling or Tiling.on(problem.device)
    scores, output = Scores(problem, plain=False), Output(problem, P16_MAX)
    added = additions(nk).to(problem.device, torch.float64)
    valueless, v = _valueless(problem), problem.v.data.double()
    for tile in tiles(problem, tiling, passes=2):
        steps = []  # (keys, scores of keys with a value, scores of the others)
        lowest = tile.full(1, NO_SCORE, torch.float64, problem.device)
        top_of_value, top_of_others = lowest, lowest
        for keys in tiling.key_steps(nk, keys_in_sight(problem, tile)):
            score = scores.step(tile, keys, absent_keys(problem, tile, keys))
            top_of_value, score, others, top_of_others = _split(
                tile, keys, score, valueless, top_of_value, top_of_others
            )
            steps.append((keys, score, others))
        origin = torch.where(top_of_value == NO_SCORE, top_of_others, top_of_value)
        origin = origin.masked_fill(origin == NO_SCORE, 0)
        rows = _Rows(tile, origin, top_of_value, top_of_others, v.shape[3], nk)
        while steps:
            keys, score, others = steps.pop()
            p = rows.weights(score, rows.value_top, added[keys])
            rows.l_of_value += p.sum(dim=-1, keepdim=True).to(torch.int64)
            rows.acc += weighted_sum(tile, p, v, keys, problem.group).to(torch.int64)
            if others is not None:
                rows.l_of_others += rows.weights(others, rows.other_top, added[keys]).sum(-1, True).to(torch.int64)
        acc, l, level, gap = rows.rounded()
        output.write(tile, acc, l, level, gap)
    return output.result()


def _split(tile: Tile, keys: slice, score: Tensor, valueless: Tensor | None, top: Tensor, top_of_others: Tensor):
    """Scores of a step's keys with a value, `NO_SCORE` for others, and the reverse where there are some; the rows'
    maxima of both so far."""
    zero = None if valueless is None else tile.of(valueless, keys)
    others = None
    if zero is not None and bool(zero.any()):
        score, others = score.masked_fill(zero, NO_SCORE), score.masked_fill(~zero, NO_SCORE)
        top_of_others = torch.maximum(top_of_others, others.amax(dim=-1, keepdim=True))
    return torch.maximum(top, score.amax(dim=-1, keepdim=True)), score, others, top_of_others


class _Rows:
    """The octaves and sums of a tile's rows."""

    def __init__(self, tile: Tile, origin: Tensor, of_value: Tensor, of_others: Tensor, channels: int, keys: int):
        self.origin, self.fraction = origin, fraction_bits(keys)
        self.value_top, self.other_top = (
            torch.where(top == NO_SCORE, UNSET, torch.ceil((top - origin) / OCTAVE)) for top in (of_value, of_others)
        )
        self.l_of_value = tile.full(1, 0, torch.int64, origin.device)
        self.l_of_others = tile.full(1, 0, torch.int64, origin.device)
        self.acc = tile.full(channels, 0, torch.int64, origin.device)

    def weights(self, score: Tensor, octave: Tensor, added: Tensor) -> Tensor:
        """p16 of keys below the octave of their group."""
        absent = score == NO_SCORE
        depth = (octave * OCTAVE + self.origin).sub(score).div_(STEP)
        return torch.floor((lookup(_table(score.device), depth, absent) + added) / (1 << P_FRACTION_BITS))

    def rounded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """acc, l, the level of l's unit in T, and the octaves from acc's unit to it."""
        top = torch.maximum(self.value_top, self.other_top)
        l = self._merged(self.l_of_value, top - self.value_top) + self._merged(self.l_of_others, top - self.other_top)
        acc, l = ((x + (1 << (OUTPUT_SHIFT - 1))) >> OUTPUT_SHIFT for x in (self.acc << self.fraction, l))
        gap = (top - self.value_top).clamp_max(MAX_GAP).masked_fill_(self.value_top == UNSET, 0)
        return acc, l, self.origin + (top + (OUTPUT_SHIFT - self.fraction)) * OCTAVE, gap

    def _merged(self, sums: Tensor, depth: Tensor) -> Tensor:
        depth = depth.clamp(0, FAR).to(torch.int64)
        return torch.where(depth < FAR, (sums << self.fraction) >> depth, 0)
