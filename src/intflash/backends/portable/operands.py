"""What the portable kernels share for the operands of a tile: exact products, scales, and two-pass loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from intflash.backends.portable.tiles import Tile, Tiling, absent_keys, keys_in_sight, tiles
from intflash.problem import Problem
from intflash.quant.quantizers import TINY_AMAX, divided

CODE_MAX = 128  # largest magnitude of int8 codes

Step = tuple[slice, Tensor | None, Tensor]  # keys, the mask of absent keys, their scores


def exact_dtype(bound: int) -> torch.dtype:
    """Returns the narrowest float type whose products are exact up to `bound`."""
    whole = torch.get_float32_matmul_precision() == "highest"  # TF32 and bfloat16 must not replace float32
    return torch.float32 if bound < 1 << 24 and whole else torch.float64


def code_operands(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns the codes of Q and K in a float type in which Q K^T is exact."""
    dtype = exact_dtype(problem.q.shape[3] * CODE_MAX**2)
    return problem.q.data.to(dtype), problem.k.data.to(dtype)


def weighted_sum(tile: Tile, p: Tensor, v: Tensor, keys: slice, group: int) -> Tensor:
    """Returns P V of one step, ``[b, h, rows, Dv]``. p is ``[b, h, rows, keys]``, contiguous."""
    b, h, r, n = p.shape
    return tile.unfold(torch.bmm(p.view(b * h // group, group * r, n), tile.keys_of(v, keys)))


def spread_heads(x: Tensor, group: int) -> Tensor:
    """Repeats a scale per key head for the query heads. A broadcast head axis stays as it is."""
    return x if x.shape[1] == 1 else x.repeat_interleave(group, dim=1)


def value_scale(problem: Problem) -> Tensor:
    """V's scale on the output's axes, ``[B|1, Hq|1, 1, Dv|1]``."""
    return spread_heads(problem.v.scale, problem.group)


def default_out_scale(problem: Problem) -> Tensor:
    """Returns the scale of integer output at which max|V|, which no output exceeds, is the largest code."""
    qmax = torch.iinfo(problem.out_dtype).max
    if isinstance(problem.v, Tensor):
        amax = problem.v.float().abs().amax().reshape(1, 1, 1, 1)
        return torch.where(amax < TINY_AMAX, torch.ones_like(amax), divided(amax, qmax))
    scale = value_scale(problem)
    if problem.v.granularity in ("token", "block"):
        scale = scale.amax(dim=2, keepdim=True)
    return divided(scale * (2 ** (problem.v.bits - 1) - 1), qmax)


def two_passes(
    problem: Problem, tiling: Tiling, score: Callable[[Tile, slice, Tensor | None], Tensor], lowest: float
) -> Iterator[tuple[Tile, Tensor, Iterator[Step]]]:
    """Yields each tile with its rows' exact maximum ``[b, h, rows, 1]`` and its steps, whose scores are kept from the
    first pass.

    `score` returns a step's scores ``[b, h, rows, keys]``, with `lowest` for absent keys. `lowest` is also the maximum
    of rows without keys.
    """
    nk = problem.k.shape[2]
    for tile in tiles(problem, tiling, passes=2):
        steps: list[Step] = []
        top = None
        for keys in tiling.key_steps(nk, keys_in_sight(problem, tile)):
            absent = absent_keys(problem, tile, keys)
            steps.append((keys, absent, score(tile, keys, absent)))
            highest = steps[-1][2].amax(dim=-1, keepdim=True)
            top = highest if top is None else torch.maximum(top, highest)
        if top is None:
            top = tile.full(1, lowest, torch.float64, problem.device)
        yield tile, top, _drain(steps)


def _drain(steps: list[Step]) -> Iterator[Step]:
    """Yields the steps one by one, so that each can be freed after its use."""
    while steps:
        yield steps.pop()
