"""Whole tensors cut into shards, and put together again."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.distributed.groups import Ranks, Where, ranks_of
from intflash.distributed.shards import Shards
from intflash.errors import InputError


def shard(x: Tensor, dim: int = -2, *, group: Where = None, layout: str = "contiguous") -> Tensor:
    """This rank's tokens of a tensor that every rank has.

    Args:
        x: any tensor; not changed.
        dim: the axis of tokens; -2 of Q, K, V and of the rows of a mask.
        group, layout: as for `attention`. "contiguous" cuts as `torch.tensor_split`; "zigzag" cuts twice as many pieces
            and gives rank r the pieces r and 2 * ranks - 1 - r.

    Returns:
        A new tensor, or a view of `x` where the tokens lie together.

    Raises:
        InputError: fewer tokens than pieces, or an unknown layout.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from intflash.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard(torch.zeros(1, 4, 64, 32), layout="zigzag").shape
        torch.Size([1, 4, 64, 32])
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    parts = [
        x.narrow(dim, s.start, s.stop - s.start) for s in _shards(x.shape[dim], ranks, layout).segments(ranks.rank)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    x: Tensor, dim: int = -2, *, length: int | None = None, group: Where = None, layout: str = "contiguous"
) -> Tensor:
    """The whole tensor, on every rank, of which each rank has a shard.

    Args:
        x: this rank's shard; all ranks have the same shape but for the tokens, and the same dtype.
        dim, group, layout: as for `shard`.
        length: tokens in all; default: ranks times the shard's.

    Raises:
        InputError: the shard has not as many tokens as `length` says.
        DistributedError: a rank ended, or the ranks' shapes differ.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from intflash.distributed import shard, unshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.randn(2, 10, 3)
        >>> torch.equal(unshard(shard(x, 1), 1, length=10), x)
        True
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    shards = _shards(x.shape[dim] * ranks.size if length is None else length, ranks, layout)
    n = shards.size(ranks.rank)
    if x.shape[dim] != n:
        raise InputError(f"rank {ranks.rank} must hold {n} of {shards.tokens} tokens ({layout}), got {x.shape[dim]}")
    rows = x.movedim(dim, 0)
    part = rows.new_empty((shards.longest, *rows.shape[1:]))
    part[:n] = rows
    parts = ranks.gather(part.flatten(1))[:, None, None]  # [ranks, 1, 1, longest, rest]
    whole = shards.collect(parts, part.new_empty((1, 1, shards.tokens, parts.shape[4])))
    return whole.view(shards.tokens, *rows.shape[1:]).movedim(0, dim)


def positions(length: int, *, group: Where = None, layout: str = "contiguous") -> Tensor:
    """The positions in the sequence of this rank's tokens, for rotary embeddings and masks.

    Args:
        length: tokens of the whole sequence.
        group, layout: as for `shard`.

    Returns:
        int64 ``[n]``, on the CPU.

    Example:
        >>> import torch.distributed as dist
        >>> from intflash.distributed import positions
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> positions(5).tolist()
        [0, 1, 2, 3, 4]
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    return _shards(length, ranks, layout).positions(ranks.rank)


def _shards(tokens: int, ranks: Ranks, layout: str) -> Shards:
    return Shards(tokens, ranks.size, layout)
