"""What ranks send each other: int8 codes of K and V, of Q where heads are exchanged, and outputs on their way back.

A message has a row for each rank of the grid's row (`along`), which receives its heads: K ``[B, h, n, D]`` and V, whose
keys lie contiguously as 8-bit tensor cores read them, ``[B, h, Dv, n]``, with n the longest shard's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.distributed.codes import Operand
from intflash.distributed.plan import Plan
from intflash.quant import QTensor

KEY_PADDING = 16  # V's rows of keys are padded with zeros to a multiple of as many, as tensor cores read them


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


class Outgoing(NamedTuple):
    """The codes of one chunk: of the queries of this rank, or a message of them, and the message of keys and values,
    which is None where every rank has all keys."""

    chunk: slice
    queries: Tensor
    keys: Tensor | None


class Messages:
    """The messages of one call: its operands in, whole keys, this rank's queries and outputs out."""

    def __init__(self, plan: Plan, q: Operand, k: Operand, v: Operand) -> None:
        self.plan, self.q, self.k, self.v = plan, q.by_token(), k, v
        self.k_scale = k.scale
        if k.granularity == "block" and plan.k_shards is not None:
            self.k_scale = self._scales_of_blocks()

    def prepare(self, chunk: slice) -> Outgoing:
        """Write the codes of a chunk, on the current stream."""
        return Outgoing(chunk, self._queries_out(chunk), self._keys_out(chunk))

    def keys(self, outgoing: Outgoing) -> tuple[QTensor, QTensor]:
        """All keys and values of this rank's heads of a chunk."""
        plan, shards = self.plan, self.plan.k_shards
        own = share(plan, outgoing.chunk, self.k.x.shape[1])
        heads = own.heads(plan.ranks.along.rank if own.columns > 1 else 0)
        k_scale, v_scale = _of_heads(self.k_scale, heads), _of_heads(self.v.scale, heads)
        if shards is None:
            k, v = self.k.heads(heads).codes(), self.v.heads(heads).codes()
        else:
            k, v = self._gathered(own, outgoing.keys)
        return self.k.tensor(k, k_scale), self.v.tensor(v, v_scale)

    def _keys_out(self, chunk: slice) -> Tensor | None:
        if self.plan.k_shards is None:
            return None
        own, long = share(self.plan, chunk, self.k.x.shape[1]), self.plan.k_shards.longest
        (b, _, n, d), dv = self.k.x.shape, self.v.x.shape[3]
        of_k = b * own.count * long * d
        sent = self.k.x.new_empty((own.columns, of_k + b * own.count * dv * long), dtype=torch.int8)
        for column in range(own.columns):
            k = sent[column, :of_k].view(b, own.count, long, d)
            v = sent[column, of_k:].view(b, own.count, dv, long).mT
            self.k.heads(own.heads(column)).write(k[:, :, :n])
            self.v.heads(own.heads(column)).write(v[:, :, :n])
        return sent

    def _gathered(self, own: Share, sent: Tensor) -> tuple[Tensor, Tensor]:
        ranks, shards = self.plan.ranks, self.plan.k_shards
        (b, _, _, d), dv, long = self.k.x.shape, self.v.x.shape[3], shards.longest
        of_k = b * own.count * long * d
        received = ranks.across.gather(ranks.along.exchange(sent)).flatten(0, 1)  # [ranks, bytes]
        k = received[:, :of_k].view(ranks.size, b, own.count, long, d)
        v = received[:, of_k:].view(ranks.size, b, own.count, dv, long).mT
        tokens = shards.tokens
        padded = -(-tokens // KEY_PADDING) * KEY_PADDING
        values = sent.new_empty((b, own.count, dv, padded))
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

    def queries(self, outgoing: Outgoing) -> QTensor:
        """The queries of this rank's heads of a chunk: its own, or all of its row's in the order of the sequence."""
        plan, ranks, shards = self.plan, self.plan.ranks, self.plan.q_shards
        own = share(plan, outgoing.chunk, self.q.x.shape[1])
        if own.columns == 1:
            return self.q.heads(own.heads(0)).tensor(outgoing.queries)
        b, _, _, d = self.q.x.shape
        long, of_codes = shards.longest, b * own.count * shards.longest * d
        received = ranks.along.exchange(outgoing.queries)
        codes = self._of_row(received[:, :of_codes].view(own.columns, b, own.count, long, d))
        if self.q.granularity != "token":
            return self.q.tensor(codes, _of_heads(self.q.scale, own.heads(ranks.along.rank)))
        scales = received[:, of_codes:].contiguous().view(torch.float32)
        return self.q.tensor(codes, self._of_row(scales.view(own.columns, b, own.count, long, 1)))

    def _queries_out(self, chunk: slice) -> Tensor:
        """This rank's codes, or where heads are exchanged the message of all columns with the tokens' scales."""
        own = share(self.plan, chunk, self.q.x.shape[1])
        if own.columns == 1:
            return self.q.heads(own.heads(0)).codes()
        b, _, n, d = self.q.x.shape
        long = self.plan.q_shards.longest
        of_codes, by_token = b * own.count * long * d, self.q.granularity == "token"
        sent = self.q.x.new_empty((own.columns, of_codes + 4 * b * own.count * long * by_token), dtype=torch.int8)
        for column in range(own.columns):
            q = self.q.heads(own.heads(column))
            q.write(sent[column, :of_codes].view(b, own.count, long, d)[:, :, :n])
            if by_token:
                scales = sent[column, of_codes:].view(torch.float32).view(b, own.count, long, 1)
                scales[:, :, :n] = q.scale
        return sent

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
