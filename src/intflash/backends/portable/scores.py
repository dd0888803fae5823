"""Integer scores of the methods from other papers: S = Q K^T plus a bias rounded to the score's own unit."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.backends.portable.operands import code_operands, spread_heads
from intflash.backends.portable.tiles import Tile
from intflash.problem import Problem

BIAS_LIMIT = 2.0**30  # bias values are clamped to this, so that bias + score fits int32


class IntegerScores:
    """Biased scores of tiles of keys, as floats that hold int32 values. `unit` is the value of a score of 1."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.q, self.k = code_operands(problem)
        k_scale = spread_heads(problem.k.scale, problem.group)
        self.unit = (problem.q.scale.double() * k_scale.double()) * problem.sm_scale  # [B|1, Hq|1, 1, 1]

    def step(self, tile: Tile, keys: slice) -> Tensor:
        """``[b, h, rows, keys]``; absent keys have any value in range."""
        q = tile.rows_of(self.q, self.problem.group)
        score = tile.unfold(torch.bmm(q, tile.keys_of(self.k, keys).mT))
        if self.problem.bias_float is None:
            return score
        bias = tile.of(self.problem.bias_float, keys).double() / tile.of(self.unit)
        return score.double() + torch.round(bias).nan_to_num_().clamp_(-BIAS_LIMIT, BIAS_LIMIT)
