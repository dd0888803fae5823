"""`intflash`, `intflash_p8` and `intflash_online` in tiles, from docs/numerics.md, "The score exponent".

p depends only on the depth Tmax - T, rounded half up to 1/256 octave, and is 0 from depth 3687 on, so that a small
table holds it. Without a bias and with one C per row, depth = (Smax - S) * C * 2^k, and the maximum is taken of S
itself. `intflash_online` counts the depth below its octave in steps of 1/112 octave, in a table of 1,024 entries.

float64 computes this exactly. |S| <= 256 * 127^2 < 2^22. From c = `least_coarse` on, T is a multiple of 2^8 below 2^60;
with a smaller c it is below 2^44 (a bias, a multiple of 2^8, is below 2^43). A difference of such integers is exact
below 2^53. A larger difference may be rounded, but its p is 0 in either case. T divided by an octave of 7 << 28 is
rounded, but never to a whole number: a quotient that is not whole differs from the nearest whole number by at least 2^8
/ (7 << 28) and is below 2^28; with a smaller c by at least 2^2 / (7 << 28), and is below 2^12.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from intflash.backends.portable.operands import (
    code_operands,
    exact_dtype,
    spread_heads,
    two_passes,
    value_scale,
    weighted_sum,
)
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, keys_in_sight, tiles
from intflash.numerics.exp import (
    LAST_STEP,
    OCTAVES,
    P8_MAX,
    P16_MAX,
    TABLE_STEPS,
    ScoreUnit,
    exponent_constants,
    log_sum_exp,
    output_multiplier,
)
from intflash.problem import Problem, Result
from intflash.quant.quantizers import divided

ZERO_DEPTH = 3687  # depth, in 1/256 octave, from which p is 0: one more than 14 * 256 + 102
NO_SCORE = -(2.0**61)  # below every T (|T| < 2^60) and every S: the score of an absent key for a maximum
STEP = 2.0**24  # of T: 1/256 octave, or 1/112 of `intflash_online`
GRANULE = 128  # keys per granule of `intflash_online`, by definition


def _p(depth: int, bits: int) -> int:
    """p of a depth in 1/256 octave: u^2 + 132608 in Q.16, shifted by its octaves; rounded to nearest."""
    if depth >= ZERO_DEPTH:
        return 0
    octaves, fraction = divmod(ZERO_DEPTH - 1 - depth, 256)
    p32 = ((256 + fraction) ** 2 + 132608) << octaves
    drop = 16 if bits == 16 else 24
    return (p32 + (1 << (drop - 1))) >> drop


@functools.cache
def p_table(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([_p(depth, bits) for depth in range(ZERO_DEPTH + 1)], dtype=dtype, device=device)


@functools.cache
def _step_table(device: torch.device) -> Tensor:
    """Returns p8 of each step of 1/112 octave, which is that of the 1/256 octave that contains the step."""
    depths = [256 * step // 112 for step in range(LAST_STEP + 1)]
    return torch.tensor([_p(depth, bits=8) for depth in depths], dtype=torch.float32, device=device)


def lookup(table: Tensor, depth: Tensor, absent: Tensor | None) -> Tensor:
    """Returns p of depths in the table's steps (float64, >= 0, overwritten): 0 from the last entry on, and 0 where
    absent.
    """
    last = len(table) - 1
    steps = depth.clamp_max_(last).add_(0.5).to(torch.int32)
    if absent is not None:
        steps.masked_fill_(absent, last)
    return table.index_select(0, steps.view(-1)).view(steps.shape)


class Scores:
    """Scores of tiles of keys, and the value of one unit of them.

    Scores are S itself where one C serves a row and there is no bias (`plain`), else T.
    """

    def __init__(self, problem: Problem, plain: bool, unit: ScoreUnit = OCTAVES) -> None:
        self.problem = problem
        self.unit = unit
        self.bias_step = unit.bias_step(problem.bias_fraction_bits)
        self.plain = plain and problem.bias is None and problem.k.granularity != "block"
        self.q, self.k = code_operands(problem)
        self.q_scale = problem.q.token_scale()
        self.k_scale = spread_heads(problem.k.scale, problem.group).mT  # [B|1, Hq|1, 1, key blocks|1]
        small = self.q_scale.shape[2] == 1 or self.k_scale.shape[3] == 1
        self.whole = self._factor(self.q_scale, self.k_scale) if small else None

    def _factor(self, q_scale: Tensor, k_scale: Tensor) -> Tensor:
        C, k = exponent_constants(q_scale, k_scale, self.problem.sm_scale, self.unit)
        return (C << k).double()

    def factor(self, tile: Tile, blocks: slice | None = None) -> Tensor:
        """Returns T of a score of 1: ``[b|1, h|1, rows|1, key blocks|1]``."""
        if self.whole is not None:
            return tile.of(self.whole, blocks)
        return self._factor(tile.of(self.q_scale), tile.of(self.k_scale, blocks))

    def step(self, tile: Tile, keys: slice, absent: Tensor | None) -> Tensor:
        """Scores ``[b, h, rows, keys]`` of one key step, `NO_SCORE` where absent."""
        q = tile.rows_of(self.q, self.problem.group)
        score = tile.unfold(torch.bmm(q, tile.keys_of(self.k, keys).mT))
        if not self.plain:
            score = score.double().mul_(self._factor_of_keys(tile, keys))
            if self.problem.bias is not None:
                score += tile.of(self.problem.bias, keys).double() * self.bias_step
        return score if absent is None else score.masked_fill_(absent, NO_SCORE)

    def _factor_of_keys(self, tile: Tile, keys: slice) -> Tensor:
        size = self.problem.k.block_size
        if size is None:
            return self.factor(tile)
        first, stop = keys.start // size, -(-keys.stop // size)
        factor = self.factor(tile, slice(first, stop))
        if factor.shape[3] == 1:
            return factor
        return factor[..., torch.arange(keys.start, keys.stop, device=factor.device) // size - first]


class Output:
    """Normalizes tiles into the output, and computes log-sum-exp."""

    def __init__(self, problem: Problem, p_max: int) -> None:
        b, h, nq, _ = problem.q.shape
        dv = problem.v.shape[3]
        self.p_max = p_max
        self.out = torch.empty(b, h, nq, dv, dtype=problem.out_dtype, device=problem.device)
        self.lse = torch.empty(b, h, nq, dtype=torch.float32, device=problem.device) if problem.return_lse else None
        self.v_scale = value_scale(problem)
        self.out_scale = None
        if not problem.out_dtype.is_floating_point:
            self.qmax = torch.iinfo(problem.out_dtype).max
            given = problem.out_scale
            self.out_scale = divided(self.v_scale * 127, self.qmax) if given is None else given

    def write(self, tile: Tile, acc: Tensor, l: Tensor, t_max: Tensor, gap: Tensor | None = None) -> None:
        """acc ``[b, h, rows, Dv]``, l, t_max, gap ``[b, h, rows, 1]`` hold integers; l counts 2^gap of acc's unit."""
        where = (tile.batches, tile.heads, tile.rows)
        if self.lse is not None:
            self.lse[where] = log_sum_exp(t_max, l, self.p_max)[..., 0]
        l = l.clamp_min(1)  # a row without keys has acc = 0
        if gap is None:
            gap = torch.zeros_like(t_max)
        if self.out_scale is None:
            self.out[where] = acc.float() * ((tile.of(self.v_scale) / l.float()) * torch.exp2(-gap).float())
        else:
            self.out[where] = self._integer(tile, acc.to(torch.int64), l.to(torch.int64), gap.to(torch.int64))

    def _integer(self, tile: Tile, acc: Tensor, l: Tensor, gap: Tensor) -> Tensor:
        """acc / l * s_V / s_O, rounded, ties towards plus infinity: |acc| * factor < 2^63."""
        bits = torch.frexp(l.double()).exponent.to(torch.int64)  # 2^(bits-1) <= l < 2^bits, bits <= 32
        reciprocal = (1 << 55) // (l << (32 - bits))  # of l's leading 32 bits: (2^23, 2^24]
        multiplier, exponent = output_multiplier(tile.of(self.v_scale), tile.of(self.out_scale), gap)
        factor = (reciprocal * multiplier + (1 << 23)) >> 24
        halves = acc * factor >> (22 + bits - exponent + gap).clamp_(max=63)
        return (halves + 1 >> 1).clamp_(-self.qmax, self.qmax)

    def result(self) -> Result:
        return Result(self.out, self.out_scale, self.lse)


def exact_maximum(problem: Problem, tiling: Tiling | None = None, *, bits: int) -> Result:
    """Computes `intflash` (bits = 16) and `intflash_p8` (bits = 8) in two passes over a tile's scores, which are
    kept in between.
    """
    tiling = tiling or Tiling.on(problem.device)
    p_max = P16_MAX if bits == 16 else P8_MAX
    longest = max((s.stop - s.start for s in tiling.key_steps(problem.k.shape[2])), default=0)
    # p V of a step: 255 * 127 * 512 < 2^24 is exact in float32; 65,193 * 127 * 65,536 < 2^53 in float64
    dtype = exact_dtype(p_max * 127 * longest)
    table = p_table(bits, dtype, problem.device)
    scores, output = Scores(problem, plain=True), Output(problem, p_max)
    v = problem.v.data.to(dtype)
    for tile, top, steps in two_passes(problem, tiling, scores.step, NO_SCORE):
        factor = scores.factor(tile) if scores.plain else torch.ones_like(top)
        l = tile.full(1, 0, torch.float64, top.device)
        acc = tile.full(v.shape[3], 0, torch.float64, top.device)
        for keys, absent, score in steps:
            depth = torch.sub(top, score, out=score).double().mul_(factor / STEP)
            p = lookup(table, depth, absent)
            l += p.sum(dim=-1, keepdim=True)
            acc += weighted_sum(tile, p, v, keys, problem.group)
        output.write(tile, acc, l, top.double() * factor)
    return output.result()


def online(problem: Problem, tiling: Tiling | None = None) -> Result:
    """Computes `intflash_online` in one pass over granules of 128 keys. The octave e of a row rises with its
    maximum.
    """
    tiling = replace(tiling or Tiling.on(problem.device), keys=GRANULE, steps=None)
    table = _step_table(problem.device)
    scores, output = Scores(problem, plain=False, unit=TABLE_STEPS), Output(problem, P8_MAX)
    v, octave = problem.v.data.float(), float(TABLE_STEPS.octave)
    for tile in tiles(problem, tiling):
        e = tile.full(1, NO_SCORE / octave, torch.float64, problem.device)
        l = tile.full(1, 0, torch.int32, problem.device)  # at most 255 * 65,536
        acc = tile.full(v.shape[3], 0, torch.int32, problem.device)
        for keys in tiling.key_steps(problem.k.shape[2], keys_in_sight(problem, tile)):
            absent = absent_keys(problem, tile, keys)
            score = scores.step(tile, keys, absent)
            new_octave = torch.maximum(e, torch.ceil(score.amax(dim=-1, keepdim=True) / octave))
            fall = (new_octave - e).clamp_max_(31).to(torch.int32)
            l >>= fall
            acc >>= fall  # rounds towards minus infinity
            e = new_octave
            depth = torch.sub(e * octave, score, out=score).div_(STEP)
            p = lookup(table, depth, absent)
            l += p.sum(dim=-1, keepdim=True).to(torch.int32)
            acc += weighted_sum(tile, p, v, keys, problem.group).to(torch.int32)
        output.write(tile, acc, l, e * 2.0**32)
    return output.result()
