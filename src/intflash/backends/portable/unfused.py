"""`ivit`, `ibert` and `fqvit`: integer softmax over whole rows (docs/numerics.md, section 3).

The exponential of ivit and fqvit only depends on int8 codes, so that a table of 255 depths, made in each call, replaces
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from intflash.backends.portable.operands import exact_dtype, value_scale, weighted_sum
from intflash.backends.portable.scores import IntegerScores
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, tiles
from intflash.errors import InputError
from intflash.numerics.exp import output_multiplier
from intflash.problem import Problem, Result
from intflash.quant.quantizers import divided

NO_SCORE = -(1 << 40)  # below every score
MIN_UNIT = 2.0**-30  # the least unit: with a smaller one the exponentials exceed int64
INT16_MAX, INT32_MAX = (1 << 15) - 1, (1 << 31) - 1
IVIT_OCTAVES = 15
IBERT_OCTAVES = 30
IBERT_BITS = 40  # bits kept of an exponential
FQVIT_LEVELS = 15

# depths, absent keys -> P and its normalizer l
Softmax = Callable[[Tile, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _Rows:
    """Softmax and P V over whole rows, with the output by one fixed-point multiplication."""

    def __init__(self, problem: Problem, tiling: Tiling | None) -> None:
        self.problem = problem
        self.keys = slice(0, problem.k.shape[2])
        tiling = tiling or Tiling.on(problem.device)
        self.tiling = Tiling(elements=tiling.elements, keys=max(1, self.keys.stop))
        self.scores = IntegerScores(problem)

    def tiles(self):
        """Yields tiles with their int64 scores and absent keys."""
        for tile in tiles(self.problem, self.tiling):
            score = self.scores.step(tile, self.keys).to(torch.int64)
            yield tile, score, absent_keys(self.problem, tile, self.keys)

    def absolute_maximum(self) -> Tensor:
        """Returns the absolute maximum of the scores of all present keys, at least 1. It takes its own pass, because
        the codes of every tile depend on it.
        """
        highest = torch.ones((), dtype=torch.int64, device=self.problem.device)
        for _, score, absent in self.tiles():
            if absent is not None:
                score.masked_fill_(absent, 0)
            if score.numel():
                highest = torch.maximum(highest, score.abs().amax())
        return highest

    def attend(
        self, codes: Callable[[Tensor], Tensor], softmax: Softmax, p_max: int, p_bits: int, one: Tensor, unit: Tensor
    ) -> Result:
        """Computes P by `softmax` from the depth >= 0 of the scores' `codes` below the row's maximum. P <= p_max, in
        Q.p_bits.

        `one` is the exponential of depth 0 and `unit` the value of a code, both for log-sum-exp.
        """
        problem = self.problem
        dtype = exact_dtype(p_max * 127 * self.keys.stop)
        v, s_v = problem.v.data.to(dtype), value_scale(problem)
        b, h, nq, _ = problem.q.shape
        out = torch.empty(b, h, nq, v.shape[3], dtype=problem.out_dtype, device=problem.device)
        lse = torch.empty(b, h, nq, dtype=torch.float32, device=problem.device) if problem.return_lse else None
        integer = not problem.out_dtype.is_floating_point
        if integer:
            multiplier, exponent = output_multiplier(s_v, problem.out_scale)
            shift, qmax = 24 + p_bits - exponent, torch.iinfo(problem.out_dtype).max
        for tile, score, absent in self.tiles():
            score = codes(score)
            if absent is not None:
                score = score.masked_fill(absent, NO_SCORE)
            m = score.amax(dim=-1, keepdim=True) if self.keys.stop else tile.full(1, NO_SCORE, torch.int64, out.device)
            depth = m - score
            if absent is not None:
                depth.masked_fill_(absent, 0)
            p, l = softmax(tile, depth, absent)
            acc = weighted_sum(tile, p.to(dtype), v, self.keys, problem.group)
            where = (tile.batches, tile.heads, tile.rows)
            if integer:
                by = tile.of(shift)
                scaled = acc.to(torch.int64) * tile.of(multiplier) + (torch.ones_like(by) << (by - 1))
                out[where] = (scaled >> by).clamp_(-qmax, qmax).to(out.dtype)
            else:
                out[where] = (acc.float() * (tile.of(s_v) / 2**p_bits)).to(out.dtype)
            if lse is not None:
                logs = torch.log(l.double()) - torch.log(tile.of(one).double())
                lse[where] = (m * tile.of(unit) + logs).float()[..., 0]
        return Result(out, problem.out_scale if integer else None, lse)


def _by_codes(amax: Tensor) -> Callable[[Tensor], Tensor]:
    """Converts scores to int8 codes, 127 * score / amax rounded half up."""
    return lambda score: (254 * score + amax) // (2 * amax)


def _served_unit(unit: Tensor, problem: Problem) -> Tensor:
    """Returns the unit of the exponential. In an unchecked call it is raised to 2^-30.

    Raises:
        InputError: it is below that and values may be read.
    """
    if problem.check_finite and bool((unit < MIN_UNIT).any()):
        raise InputError(f"{problem.method} needs a score unit of at least 2^-30, got {unit.min():.3g}")
    return unit.clamp_min(MIN_UNIT)


def _lookup(table: Tensor, depth: Tensor, absent: Tensor | None) -> Tensor:
    found = table.index_select(0, depth.view(-1)).view(depth.shape)
    return found if absent is None else found.masked_fill_(absent, 0)


def ivit(problem: Problem, tiling: Tiling | None = None) -> Result:
    rows = _Rows(problem, tiling)
    amax = rows.absolute_maximum()
    unit = _served_unit(divided(rows.scores.unit * amax, 127), problem)
    one = torch.round(1 / unit).clamp_min(1).to(torch.int64)
    x = -torch.arange(255, device=problem.device)  # int8 codes are at most 254 apart
    x = (x + (x >> 1) - (x >> 4)).maximum(-IVIT_OCTAVES * one.view(1))  # log2(e) as 1.0111 in binary
    octaves = -x // one.view(1)
    remainder = x + octaves * one.view(1)
    table = (remainder + 2 * one.view(1)) * (1 << (IVIT_OCTAVES - octaves)) // 2

    def softmax(tile: Tile, depth: Tensor, absent: Tensor | None) -> tuple[Tensor, Tensor]:
        p = _lookup(table, depth, absent)
        l = p.sum(dim=-1, keepdim=True)
        p *= INT32_MAX // l.clamp(1, INT32_MAX)
        return (p >> 24).clamp_max_(127), l

    return rows.attend(_by_codes(amax), softmax, 127, 7, one << IVIT_OCTAVES, unit)


class _Polynomial:
    """I-BERT's exponential 0.3585 (x + 1.353)^2 + 0.344 within an octave of ln 2, in integers of a score unit."""

    def __init__(self, unit: Tensor) -> None:
        self.ln2 = torch.ceil(math.log(2.0) / unit).to(torch.int64)
        self.b = torch.floor(1.353 / unit).to(torch.int64)
        self.c = torch.floor(0.344 / (0.3585 * unit**2)).clamp_min(1).to(torch.int64)
        whole = self.b * self.b + self.c
        bits = torch.frexp(whole.double()).exponent.to(torch.int64)
        self.spare = (bits - IBERT_BITS).clamp_min(0)
        self.one = whole >> self.spare

    def exp(self, depth: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns exp(-depth * unit). `at` slices a constant for a tile."""
        ln2 = at(self.ln2)
        depth = torch.minimum(depth, IBERT_OCTAVES * ln2)
        octaves = depth // ln2
        root = octaves * ln2 - depth + at(self.b)
        return (root * root + at(self.c)) >> (octaves + at(self.spare))


def ibert(problem: Problem, tiling: Tiling | None = None) -> Result:
    rows = _Rows(problem, tiling)
    unit = _served_unit(rows.scores.unit, problem)
    polynomial = _Polynomial(unit)

    def softmax(tile: Tile, depth: Tensor, absent: Tensor | None) -> tuple[Tensor, Tensor]:
        one = tile.of(polynomial.one)
        p = (2 * INT16_MAX * polynomial.exp(depth, tile.of) + one) // (2 * one)  # to 16 bits, half up
        if absent is not None:
            p.masked_fill_(absent, 0)
        l = p.sum(dim=-1, keepdim=True)
        p *= (1 << 32) // l.clamp_min(1)
        return p >> 24, l

    one = torch.full_like(unit, INT16_MAX)
    return rows.attend(lambda score: score, softmax, 256, 8, one, unit)


def fqvit(problem: Problem, tiling: Tiling | None = None) -> Result:
    rows = _Rows(problem, tiling)
    amax = rows.absolute_maximum()
    unit = _served_unit(divided(rows.scores.unit * amax, 127), problem)
    polynomial = _Polynomial(unit)
    table = polynomial.exp(torch.arange(255, device=problem.device), lambda x: x.view(1))

    def softmax(tile: Tile, depth: Tensor, absent: Tensor | None) -> tuple[Tensor, Tensor]:
        exp = _lookup(table, depth, absent)
        l = exp.sum(dim=-1, keepdim=True)
        divisor = exp.clamp_min(1)
        inverse = ((2 * l + divisor) // (2 * divisor)).clamp_min(1)  # 1 / P, half up
        level = torch.frexp(inverse.double()).exponent.to(torch.int64) - 1
        level += 2 * inverse >= 3 << level  # to the next power from one and a half times its own on
        p = 1 << (FQVIT_LEVELS - level).clamp_min(0)
        return p.masked_fill_((exp == 0) | (level > FQVIT_LEVELS), 0), l

    return rows.attend(_by_codes(amax), softmax, 1 << FQVIT_LEVELS, FQVIT_LEVELS, polynomial.one, unit)
