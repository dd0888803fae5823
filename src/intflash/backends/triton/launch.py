"""A kernel launch as a value: it can be run, or compiled for a GPU that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intflash import tape
from intflash.backends.triton.tiles import View
from intflash.problem import Problem
from intflash.quant import QTensor


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: the `triton.jit` function.
        grid: programs along each axis.
        arguments: all of its arguments by name, constexprs included.
        warps, stages: Triton's num_warps and num_stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 2

    def run(self) -> None:
        compiled = self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)
        tape.note(lambda: self._again(compiled))

    def _again(self, compiled: Any) -> tuple[list[Tensor], tape.Again]:
        """Past what finds the compiled kernel by types and alignments, which a plan's addresses share."""
        arguments = [self.arguments[name] for name in self.kernel.arg_names]
        launch, stream = compiled[(*self.grid, 1, 1)[:3]], torch.cuda.current_stream().cuda_stream
        fill = tape.nest(arguments)
        return list(tape.leaves(arguments)), lambda addresses: launch(*fill(iter(addresses)), stream=stream)


GRID_LIMIT = 65535  # programs along the second and third axis of a grid
MOST_BATCHES = GRID_LIMIT  # that lie along the third


def grid(batch: int, heads: int, tiles: int, batch_first: bool = False) -> tuple[tuple[int, int, int], bool]:
    """The grid that `tiles.find_place` reads, and whether it is BATCH_FIRST: asked for, or as there are so many."""
    batch_first = batch_first or batch > MOST_BATCHES
    return ((batch, heads, tiles) if batch_first else (tiles, heads, batch)), batch_first


def limits(problem: Problem) -> str | None:
    """Why no kernel takes so many heads, or rows so far apart, or None."""
    heads = problem.q.shape[1]
    if heads > GRID_LIMIT:
        return f"takes at most {GRID_LIMIT} heads, got {heads}: independent ones may lie along the batch axis"
    for name in ("q", "k", "v", "bias", "bias_float", "keep"):
        x = getattr(problem, name)
        x = x.data if isinstance(x, QTensor) else x
        if x is not None and x.shape[2] * abs(x.stride(2)) >= 1 << 31:
            return f"rows of {name} must lie within 2^31 elements, got shape {list(x.shape)} and strides {x.stride()}"
    return None


def view(x: Tensor) -> View:
    """A 4-D tensor with stride 0 along axes of length 1, so that any index reads its one element."""
    strides = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return View(x, *strides)


def data_view(x: Tensor) -> View:
    """A 4-D tensor of codes or values with its own strides (kept for axes of length 1: they tell alignment)."""
    return View(x, *x.stride())


def readable(x: Tensor, tokens: int) -> bool:
    """Whether `tokens` tokens of every head of x lie inside its storage: rows past N may then be read (and are
    ignored) without a bound on each element. True for K-major values with padded rows.
    """
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if n)
    last += max(tokens - x.shape[2], 0) * x.stride(2)
    return last < x.untyped_storage().nbytes() // x.element_size()


def apart(x: Tensor) -> Tensor:
    """Constants of batches, heads or channels as kernels read them inside a loop: channels contiguous, no other stride
    of 1. Triton 3.6 loses such a stride inside a View that a loop closes over.
    """
    x = x.contiguous()
    return x.repeat(1, 1, 1, 2)[..., :1] if x.shape[3] == 1 and x.numel() > 1 else x


def key_major(v: Tensor, keys: int) -> bool:
    """Whether 16-byte copies can take `keys` keys of V (one byte an element) as they lie."""
    others = (v.stride(axis) for axis in (0, 1, 3) if v.shape[axis] > 1)
    return v.stride(2) == 1 and v.data_ptr() % 16 == 0 and not any(s % 16 for s in others) and readable(v, keys)


def contiguous_keys(v: Tensor, multiple: int = 16) -> Tensor:
    """V ``[B, H, N, D]`` of bytes as 8-bit tensor cores read it, its keys contiguous: as it lies, or a copy whose rows
    are padded with zeros to a multiple of keys.
    """
    b, h, n, d = v.shape
    padded = -(-n // multiple) * multiple
    if key_major(v, padded):
        return v
    rows = v.new_empty if padded == n else v.new_zeros
    return rows(b, h, d, padded)[..., :n].copy_(v.mT).mT
