"""What ranks send each other: int8 codes of K and V, of Q where heads are exchanged, and outputs on their way back.

A message has a row for each rank of the grid's row (`along`), which receives its heads: K ``[B, h, n, D]`` and V, whose
keys lie contiguously as 8-bit tensor cores read them, ``[B, h, Dv, n]``. n is the longest shard's tokens, of V rounded
up to a multiple of KEY_PADDING.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from intflash.distributed.codes import Operand
from intflash.distributed.plan import Plan
from intflash.distributed.traffic import KEY_PADDING, with_padding
from intflash.quant import QTensor


@dataclass(frozen=True)
class Share:
    """The heads of one group of heads, `of` all heads: `chunk` of the share of each rank of the grid's row."""

    chunk: slice
    of: int
    columns: int

    @property
    def count(self) -> int:
        return self.chunk.stop - self.chunk.start

    def heads(self, column: int) -> slice:
        """The heads of one rank of the row."""
        first = column * (self.of // self.columns)
        return slice(first + self.chunk.start, first + self.chunk.stop)


def share(plan: Plan, chunk: slice, heads: int) -> Share:
    """`chunk` counts key heads; of query heads each of them has a group."""
    group = heads // plan.problem.k.shape[1]
    columns = plan.ranks.along.size
    if plan.scheme not in ("ulysses", "grid"):
        columns = 1
    return Share(slice(chunk.start * group, chunk.stop * group), heads, columns)


class Messages:
    """The messages of one call: its operands in, whole keys, this rank's queries and outputs out."""

    def __init__(self, plan: Plan, q: Operand, k: Operand, v: Operand) -> None:
        """Write the codes of all heads, on the current stream."""
        self.plan, self.q, self.k, self.v = plan, q.by_token(), k, v
        self.columns = share(plan, plan.chunks[0], k.x.shape[1]).columns
        self.k_scale = k.scale
        if k.granularity == "block" and plan.k_shards is not None:
            self.k_scale = self._scales_of_blocks()
        self._queries = None
        if self.columns > 1:
            self._queries = self._queries_out()
        elif not self.q.can_stay_float:
            self._queries = self.q.codes()
        self._keys = None if plan.k_shards is None else self._keys_out()

    def keys(self, chunk: slice) -> tuple[QTensor, QTensor]:
        """All keys and values of this rank's heads of a chunk."""
        plan = self.plan
        own = share(plan, chunk, self.k.x.shape[1])
        heads = own.heads(plan.ranks.along.rank if own.columns > 1 else 0)
        k_scale, v_scale = _of_heads(self.k_scale, heads), _of_heads(self.v.scale, heads)
        if plan.k_shards is None:
            k, v = self.k.heads(heads).codes(), self.v.heads(heads).codes()
        else:
            k, v = self._gathered(own)
        return self.k.tensor(k, k_scale), self.v.tensor(v, v_scale)

    def _keys_out(self) -> Tensor:
        """Codes of a head's keys, then of its values by channels: int8 ``[Hk, B, K and V]``."""
        (b, h, n, d), dv, long = self.k.x.shape, self.v.x.shape[3], self.plan.k_shards.longest
        room = with_padding(long)
        out = self.k.x.new_empty((h, b, long * d + dv * room), dtype=torch.int8)
        k, v = out.split([long * d, dv * room], dim=2)
        self.k.write(k.unflatten(2, (long, d)).transpose(0, 1)[:, :, :n])
        self.v.write(v.unflatten(2, (dv, room)).mT.transpose(0, 1)[:, :, :n], KEY_PADDING)
        return out

    def _of_chunk(self, message: Tensor, own: Share) -> Tensor:
        """A chunk's heads of each column: ``[columns, heads, B, bytes]`` of ``[all heads, B, bytes]``."""
        return message.unflatten(0, (self.columns, -1))[:, own.chunk]

    def _gathered(self, own: Share) -> tuple[Tensor, Tensor]:
        ranks, shards = self.plan.ranks, self.plan.k_shards
        (b, _, _, d), dv, long = self.k.x.shape, self.v.x.shape[3], shards.longest
        sent = self._of_chunk(self._keys, own)
        received = ranks.across.gather(ranks.along.exchange(sent)).flatten(0, 1)  # [ranks, heads, B, bytes]
        room = with_padding(long)
        k, v = received.split([long * d, dv * room], dim=3)
        k = k.unflatten(3, (long, d)).transpose(1, 2)
        v = v.unflatten(3, (dv, room)).mT[..., :long, :].transpose(1, 2)
        tokens = shards.tokens
        values = sent.new_empty((b, own.count, dv, with_padding(tokens)))
        values[..., tokens:] = 0
        whole = shards.collect(k, sent.new_empty((b, own.count, tokens, d)))
        return whole, shards.collect(v, values[..., :tokens].mT)

    def _scales_of_blocks(self) -> Tensor:
        """K's scales of all blocks, in order."""
        shards, size = self.plan.k_shards, self.k.block_size
        most = -(-shards.longest // size)
        b, h, n, _ = self.k.scale.shape
        part = self.k.scale.new_zeros((b, h, most, 1))
        part[:, :, :n] = self.k.scale
        parts = self.plan.ranks.gather(part)
        pieces = []
        for rank in range(shards.ranks):
            first = 0
            for s in shards.segments(rank):
                blocks = -(-(s.stop - s.start) // size)
                pieces.append((s.start, parts[rank, :, :, first : first + blocks]))
                first += blocks
        return torch.cat([scale for _, scale in sorted(pieces, key=lambda piece: piece[0])], dim=2)

    def queries(self, chunk: slice) -> QTensor | Operand:
        """The queries of this rank's heads of a chunk: its own, as floats where attention can quantize them, or all of
        its row's in the order of the sequence."""
        plan, ranks = self.plan, self.plan.ranks
        own = share(plan, chunk, self.q.x.shape[1])
        if self.columns == 1:
            heads = own.heads(0)
            q = self.q.heads(heads)
            return q if self._queries is None else q.tensor(self._queries[:, heads])
        long, d = plan.q_shards.longest, self.q.x.shape[3]
        received = ranks.along.exchange(self._of_chunk(self._queries, own))  # [columns, heads, B, bytes]
        scales, codes = received.split([long * self._scale_bytes, long * d], dim=3)
        codes = self._of_row(codes.unflatten(3, (long, d)).transpose(1, 2))
        if not self._scale_bytes:
            return self.q.tensor(codes, _of_heads(self.q.scale, own.heads(ranks.along.rank)))
        scales = scales.contiguous().view(torch.float32)[..., None].transpose(1, 2)
        return self.q.tensor(codes, self._of_row(scales))

    @property
    def _scale_bytes(self) -> int:
        """Of a query's scale in its message: of the other granularities all ranks have the scales."""
        return 4 if self.q.granularity == "token" else 0

    def _queries_out(self) -> Tensor:
        """Scales of a head's queries where each has one, then codes: int8 ``[Hq, B, longest * (4|0 + D)]``."""
        (b, h, n, d), long = self.q.x.shape, self.plan.q_shards.longest
        out = self.q.x.new_empty((h, b, long * (self._scale_bytes + d)), dtype=torch.int8)
        scales, codes = out.split([long * self._scale_bytes, long * d], dim=2)
        self.q.write(codes.unflatten(2, (long, d)).transpose(0, 1)[:, :, :n])
        if self._scale_bytes:
            scale = self.q.scale.expand(b, h, n, 1).contiguous().view(torch.int8)
            scales.unflatten(2, (long, 4)).transpose(0, 1)[:, :, :n] = scale
        return out

    def _of_row(self, parts: Tensor) -> Tensor:
        shards, row = self.plan.q_shards, self.plan.ranks.row
        tokens = sum(map(shards.size, row))
        return shards.collect(parts, parts.new_empty((*parts.shape[1:3], tokens, parts.shape[4])), row)

    def back(self, x: Tensor) -> Tensor:
        """Of outputs ``[B, h, row's queries, d]`` this rank's queries, of the heads of each column:
        ``[B, columns, h, n, d]``."""
        plan, shards = self.plan, self.plan.q_shards
        if plan.scheme not in ("ulysses", "grid"):
            return x[:, None]
        b, h, _, d = x.shape
        columns, n = plan.ranks.along.size, shards.size(plan.ranks.rank)
        parts = x.new_empty((columns, b, h, shards.longest, d))
        received = plan.ranks.along.exchange(shards.spread(x, parts, plan.ranks.row))
        return received[..., :n, :].transpose(0, 1)


def _of_heads(scale: Tensor, heads: slice) -> Tensor:
    return scale if scale.shape[1] == 1 else scale[:, heads]
