"""`intflash` and `intflash_p8` over some of the keys, for ranks that hold some each: Tmax, then acc and l below the
maximum of all keys. T is exact in float64, and so are the sums (see intflash.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.backends.portable.intflash import NO_SCORE, STEP, Output, Scores, lookup, p_table
from intflash.backends.portable.operands import weighted_sum
from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, tiles
from intflash.numerics.exp import P8_MAX, P16_MAX
from intflash.problem import Problem, Result

BITS = {"intflash": 16, "intflash_p8": 8}


def maxima(problem: Problem) -> Tensor:
    """Tmax of each row, int64 ``[B, Hq, Nq, 1]``; -2^61 without keys."""
    tiling, scores = Tiling.on(problem.device), Scores(problem, plain=False)
    out = torch.full((*problem.q.shape[:3], 1), NO_SCORE, dtype=torch.float64, device=problem.device)
    for tile in tiles(problem, tiling):
        rows = out[tile.batches, tile.heads, tile.rows]
        for keys in tiling.key_steps(problem.k.shape[2]):
            score = scores.step(tile, keys, absent_keys(problem, tile, keys))
            torch.maximum(rows, score.amax(dim=-1, keepdim=True), out=rows)
    return out.to(torch.int64)


def sums(problem: Problem, t_max: Tensor) -> Tensor:
    """acc and l (last) of each row, int64 ``[B, Hq, Nq, Dv + 1]``."""
    tiling, scores = Tiling.on(problem.device), Scores(problem, plain=False)
    table = p_table(BITS[problem.method], torch.float64, problem.device)
    v, top = problem.v.data.double(), t_max.double()
    out = torch.zeros((*problem.q.shape[:3], v.shape[3] + 1), dtype=torch.float64, device=problem.device)
    for tile in tiles(problem, tiling):
        where = (tile.batches, tile.heads, tile.rows)
        for keys in tiling.key_steps(problem.k.shape[2]):
            absent = absent_keys(problem, tile, keys)
            depth = top[where].sub(scores.step(tile, keys, absent)).div_(STEP)
            p = lookup(table, depth, absent)
            out[where][..., -1:] += p.sum(dim=-1, keepdim=True)
            out[where][..., :-1] += weighted_sum(tile, p, v, keys, problem.group)
    return out.to(torch.int64)


def finish(problem: Problem, t_max: Tensor, total: Tensor) -> Result:
    """The result of the maxima and sums of all keys."""
    output = Output(problem, P16_MAX if BITS[problem.method] == 16 else P8_MAX)
    b, h, nq, _ = problem.q.shape
    tile = Tile(slice(0, b), slice(0, h), slice(0, h // problem.group), slice(0, nq))
    output.write(tile, total[..., :-1].double(), total[..., -1:].double(), t_max.double())
    return output.result()
