"""How the tokens of a sequence lie on ranks: which positions each holds, and back to the order of the sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from intflash.errors import InputError

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Shards:
    """`tokens` on `ranks`, cut as `torch.tensor_split` cuts: the first pieces are one longer where it is uneven.

    "contiguous": rank r holds piece r of `ranks`. "zigzag": rank r holds pieces r and 2 * ranks - 1 - r of 2 * ranks,
    so that under a causal mask every rank sees as many keys as the others.
    """

    tokens: int
    ranks: int
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(f"layout must be one of {LAYOUTS}, got {self.layout!r}")
        if self.tokens < self.pieces:
            raise InputError(
                f"{self.layout} shards on {self.ranks} ranks need at least {self.pieces} tokens, got {self.tokens}"
            )

    @property
    def pieces(self) -> int:
        return self.ranks * (2 if self.layout == "zigzag" else 1)

    @property
    def even(self) -> bool:
        """Whether all pieces have one length."""
        return self.tokens % self.pieces == 0

    def _piece(self, i: int) -> slice:
        each, longer = divmod(self.tokens, self.pieces)
        return slice(i * each + min(i, longer), (i + 1) * each + min(i + 1, longer))

    def segments(self, rank: int) -> list[slice]:
        """The positions of a rank, in the order in which it holds them."""
        if self.layout == "contiguous":
            return [self._piece(rank)]
        return [self._piece(rank), self._piece(self.pieces - 1 - rank)]

    def size(self, rank: int) -> int:
        return sum(s.stop - s.start for s in self.segments(rank))

    @cached_property
    def longest(self) -> int:
        """Tokens of the rank that holds most: what a message between ranks has room for."""
        return max(map(self.size, range(self.ranks)))

    def union(self, ranks: range) -> list[slice]:
        """The positions of several ranks in order, neighbours joined."""
        joined: list[slice] = []
        for s in self._sorted(ranks):
            if joined and joined[-1].stop == s.start:
                joined[-1] = slice(joined[-1].start, s.stop)
            else:
                joined.append(s)
        return joined

    def collect(self, parts: Tensor, out: Tensor, ranks: range | None = None) -> Tensor:
        """`out` ``[a, b, n, d]`` filled in the order of the sequence with what ranks hold.

        Args:
            parts: ``[len(ranks), a, b, longest, d]``, each rank's tokens in its own order.
            ranks: by default all of them.
        """
        if ranks is None and self.even:
            pieces = out.unflatten(2, (self.pieces, -1))
            each = parts.unflatten(3, (-1, pieces.shape[3])).permute(3, 1, 2, 0, 4, 5)  # [1|2, a, b, ranks, n, d]
            _copy(pieces[:, :, : self.ranks], each[0])
            if self.layout == "zigzag":  # the second pieces lie in falling order
                _copy(pieces[:, :, self.ranks :], each[1], flipped=2)
            return out
        for place, there, here in self._moves(range(self.ranks) if ranks is None else ranks):
            _copy(out[:, :, here], parts[place][:, :, there])
        return out

    def spread(self, x: Tensor, parts: Tensor, ranks: range) -> Tensor:
        """The inverse of `collect`: `parts` filled with what each of some ranks holds of ``[a, b, n, d]``."""
        for place, there, here in self._moves(ranks):
            parts[place][:, :, there] = x[:, :, here]
        return parts

    def _moves(self, ranks: range) -> Iterable[tuple[int, slice, slice]]:
        """(index in `ranks`, tokens in that rank's shard, the same tokens in the union of the ranks)."""
        starts, end = {}, 0
        for s in self._sorted(ranks):
            starts[s.start] = end
            end += s.stop - s.start
        for place, rank in enumerate(ranks):
            there = 0
            for s in self.segments(rank):
                length, here = s.stop - s.start, starts[s.start]
                yield place, slice(there, there + length), slice(here, here + length)
                there += length

    def _sorted(self, ranks: range) -> list[slice]:
        return sorted((s for rank in ranks for s in self.segments(rank)), key=lambda s: s.start)

    def positions(self, rank: int) -> Tensor:
        """The positions of a rank in the sequence, int64 ``[size]``."""
        return torch.cat([torch.arange(s.start, s.stop) for s in self.segments(rank)])


def _copy(out: Tensor, x: Tensor, flipped: int | None = None) -> None:
    """Copies ``[..., n, d]``, an axis `flipped`, by the longest words of which both tensors' rows consist: torch copies
    strided tensors element by element, bytes as slowly as words."""
    if out.stride(-1) != 1:
        out, x = out.mT, x.mT
    for dtype in (torch.int64, torch.int32, torch.int16):
        if dtype.itemsize > out.itemsize and all(_consists_of(t, dtype.itemsize // t.itemsize) for t in (out, x)):
            out, x = out.view(dtype), x.view(dtype)
            break
    out.copy_(x if flipped is None else x.flip(flipped))


def _consists_of(x: Tensor, count: int) -> bool:
    """Whether words of `count` elements tile the rows of x, each at a multiple of its length."""
    multiples = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(m % count == 0 for m in multiples)
