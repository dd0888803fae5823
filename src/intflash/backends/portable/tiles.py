"""How the portable backend splits a problem: tiles of rows, steps of keys, and the operands of each.

A tile never holds more than `Tiling.resident` scores (but at least one row of one key head's group). Masks, biases and
scales stay in their broadcast shapes; only their slices for a tile are read. Floating-point tensors hold exact integers
here: a float32 sum is exact below 2^24, a float64 sum below 2^53.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intflash.numerics.exp import ABSENT, makes_absent
from intflash.problem import Problem


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and steps. They do not change a bit where a method uses the exact maximum.

    Attributes:
        elements: maximum number of scores in one step. They are read about ten times and should fit a core's cache.
        resident: maximum number of scores kept between two passes over the keys.
        keys: keys of one step.
        steps: the steps themselves as (start, stop), in any order, every key once; None: in order.
    """

    elements: int = 1 << 18
    resident: int = 1 << 21
    keys: int = 512
    steps: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def on(cls, device: torch.device, **changes: Any) -> Tiling:
        """Returns the sizes for a device: long launches for a GPU, cache-sized steps for a CPU."""
        sizes = {} if device.type == "cpu" else {"elements": 1 << 24, "resident": 1 << 26}
        return cls(**(sizes | changes))

    def key_steps(self, nk: int, seen: slice | None = None) -> list[slice]:
        """The steps over nk keys, without those that have none of the keys `seen`."""
        cuts = self.steps or tuple((a, min(a + self.keys, nk)) for a in range(0, nk, self.keys))
        return [slice(a, b) for a, b in cuts if seen is None or (a < seen.stop and b > seen.start)]


@dataclass(frozen=True)
class Tile:
    """Some rows of some heads of some batches. `heads` are query heads, `key_heads` the key heads that they read."""

    batches: slice
    heads: slice
    key_heads: slice
    rows: slice

    def of(self, x: Tensor, keys: slice | None = None) -> Tensor:
        """Slices a broadcast ``[B'|1, Hq|1, Nq|1, Nk|1]`` tensor for this tile. B' divides B, and batch b reads b %
        B'.
        """
        if x.shape[0] > 1:
            start = self.batches.start % x.shape[0]
            x = x[start : start + self.batches.stop - self.batches.start]
        if x.shape[1] > 1:
            x = x[:, self.heads]
        if x.shape[2] > 1:
            x = x[:, :, self.rows]
        return x[..., keys] if keys is not None and x.shape[3] > 1 else x

    def rows_of(self, q: Tensor, group: int) -> Tensor:
        """Slices a query ``[B, Hq, Nq, D]`` for this tile, folded for its key heads: ``[b * hk, group * rows, D]``."""
        q = q[self.batches, self.heads, self.rows]
        b, h, r, d = q.shape
        return q.reshape(b * h // group, group * r, d)

    def keys_of(self, x: Tensor, keys: slice) -> Tensor:
        """Slices keys of K or V for this tile's key heads: ``[b * hk, keys, D]``."""
        return x[self.batches, self.key_heads, keys].flatten(0, 1)

    def full(self, columns: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns ``[b, h, rows, columns]`` of one value, to initialize a tile's sums."""
        shape = (s.stop - s.start for s in (self.batches, self.heads, self.rows))
        return torch.full((*shape, columns), value, dtype=dtype, device=device)

    def unfold(self, x: Tensor) -> Tensor:
        """Views ``[b * hk, group * rows, N]`` as ``[b, h, rows, N]``."""
        return x.reshape(*(s.stop - s.start for s in (self.batches, self.heads, self.rows)), x.shape[-1])


def tiles(problem: Problem, tiling: Tiling, passes: int = 1) -> Iterator[Tile]:
    """Yields the tiles of a method that computes its scores once, and may keep them for a second pass."""
    batch, heads, nq, _ = problem.q.shape
    group, nk = problem.group, problem.k.shape[2]
    elements, keys = tiling.elements, min(tiling.keys, nk)
    rows = max(1, min(nq, elements // max(1, group * keys)))
    if passes == 2:
        rows = max(1, min(rows, tiling.resident // max(1, group * nk)))
    key_heads = min(heads // group, max(1, elements // max(1, group * nq * keys))) if rows >= nq else 1
    batches = max(1, elements // max(1, heads * nq * keys)) if key_heads * group == heads else 1
    periods = [m.shape[0] for m in (problem.bias, problem.bias_float, problem.keep) if m is not None]
    b = 0
    while b < batch:
        take = min(batches, batch - b, *(p - b % p for p in periods if p > 1), batch)  # stays in one period
        for h in range(0, heads // group, key_heads):
            stop = min(h + key_heads, heads // group)
            for r in range(0, nq, rows):
                yield Tile(
                    slice(b, b + take), slice(h * group, stop * group), slice(h, stop), slice(r, min(r + rows, nq))
                )
        b += take


def absent_keys(problem: Problem, tile: Tile, keys: slice) -> Tensor | None:
    """Returns which keys are absent, broadcastable to ``[b, h, rows, keys]``; None where none are."""
    absent = None
    if problem.causal is not None and keys.stop - 1 > tile.rows.start + problem.causal:
        device = problem.device
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)[:, None]
        absent = (torch.arange(keys.start, keys.stop, device=device) > rows + problem.causal)[None, None]
    if problem.window_start is not None and keys.start < tile.rows.stop - 1 + problem.window_start:
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=problem.device)[:, None]
        columns = torch.arange(keys.start, keys.stop, device=problem.device)
        before = (columns < rows + problem.window_start)[None, None]
        absent = before if absent is None else absent | before
    if problem.keep is not None:
        masked = ~tile.of(problem.keep, keys)
        absent = masked if absent is None else absent | masked
    if problem.bias is not None:
        masked = tile.of(problem.bias, keys) == ABSENT
        absent = masked if absent is None else absent | masked
    if problem.bias_float is not None:
        bias = tile.of(problem.bias_float, keys)
        masked = makes_absent(bias)
        absent = masked if absent is None else absent | masked
    return absent


def keys_in_sight(problem: Problem, tile: Tile) -> slice | None:
    """Returns the keys that some row of the tile may see under a causal mask and in a window; None without them."""
    if problem.causal is None:
        return None
    first = 0 if problem.window_start is None else max(0, tile.rows.start + problem.window_start)
    return slice(first, max(0, tile.rows.stop + problem.causal))
