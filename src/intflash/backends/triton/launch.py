"""A kernel launch as a value. It can be run, or compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from intflash.backends.gpu.tensors import GRID_LIMIT


@dataclass(frozen=True)
class TritonLaunch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: the `triton.jit` function.
        grid: number of programs along each axis.
        arguments: all of its arguments by name, constexprs included.
        warps, stages: Triton's num_warps and num_stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 2

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


MOST_BATCHES = GRID_LIMIT  # along the third axis


def grid(batch: int, heads: int, tiles: int, batch_first: bool = False) -> tuple[tuple[int, int, int], bool]:
    """Returns the grid that `program_position` reads, and whether it is BATCH_FIRST: as asked, or where there are
    too many batches for the third axis.
    """
    batch_first = batch_first or batch > MOST_BATCHES
    return ((batch, heads, tiles) if batch_first else (tiles, heads, batch)), batch_first
