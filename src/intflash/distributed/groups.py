"""The ranks of a call and the collectives between them, each counted and named in the error of its failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from intflash.errors import DistributedError, InputError

Where = ProcessGroup | DeviceMesh | None

_GRACE_S = 5.0  # that ranks have to say that they too saw a collective fail
_failed: dict[str, str] = {}  # group name -> why no further call on the group is safe

# torch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What this process has sent while it was counted.

    Attributes:
        sent: collective -> bytes this rank sends in it: R - 1 times its part in an all-gather, (R - 1) / R of its
            buffer in an all-to-all, 2 (R - 1) / R of it in an all-reduce, as ring algorithms do.
        calls: collective -> how often.
    """

    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes of all collectives."""
        return sum(self.sent.values())

    def add(self, what: str, sent: float) -> None:
        """One collective more."""
        self.sent[what] = self.sent.get(what, 0) + sent
        self.calls[what] = self.calls.get(what, 0) + 1


_counting: list[Traffic] = []


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Count the bytes that this process sends in calls of `intflash.distributed`.

    Yields:
        A `Traffic`, which grows while the context lasts.

    Example:
        >>> from intflash.distributed import counting
        >>> with counting() as traffic:
        ...     pass  # calls of intflash.distributed.attention
        >>> traffic.total
        0
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


@dataclass(frozen=True)
class Group:
    """One process group; without a `pg` that of one rank, in which nothing is sent."""

    pg: ProcessGroup | None
    size: int
    rank: int

    @property
    def name(self) -> str:
        return "" if self.pg is None else self.pg.group_name

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, ``[size, *part.shape]``."""
        if self.size == 1:
            return part[None]
        out = part.new_empty((self.size, *part.shape))
        with self._collective("all_gather", part.nbytes * (self.size - 1)):
            _all_gather(_bytes(out), _bytes(part), group=self.pg)
        return out

    def exchange(self, parts: Tensor) -> Tensor:
        """Row i of `parts` goes to rank i; row i of the result came from rank i."""
        if self.size == 1:
            return parts
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        with self._collective("all_to_all", parts.nbytes * (self.size - 1) / self.size):
            dist.all_to_all_single(_bytes(out), _bytes(parts), group=self.pg)
        return out

    def reduce(self, x: Tensor, op: Any) -> Tensor:
        """`dist.ReduceOp.MAX` or `SUM` over the ranks, in place."""
        if self.size > 1:
            with self._collective("all_reduce", 2 * x.nbytes * (self.size - 1) / self.size):
                dist.all_reduce(x, op=op, group=self.pg)
        return x

    def describe(self, thing: Any) -> list[Any]:
        """A small object of each rank; for errors only, since it waits."""
        found: list[Any] = [thing] * self.size
        if self.size > 1:
            with self._collective("all_gather_object", 0):
                dist.all_gather_object(found, thing, group=self.pg)
        return found

    def check_usable(self) -> None:
        """Refuse a group in which an earlier call failed: its ranks may be at different collectives."""
        if self.name in _failed:
            raise DistributedError(
                f"an earlier call on this process group failed, make a new one: {_failed[self.name]}"
            )

    def give_up(self, why: str) -> None:
        """No further call on this group is safe."""
        _failed[self.name] = why

    @contextlib.contextmanager
    def _collective(self, what: str, sent: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # as torch's own DistError is
            silent = _silent_ranks(self)
            who = f"ranks {silent} have ended or do not answer" if silent else "every rank saw it fail"
            why = f"{what} failed on rank {dist.get_rank()} in a group of {self.size}: {who}: {error}"
            self.give_up(why)
            raise DistributedError(why) from error
        for traffic in _counting:
            traffic.add(what, sent)


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, or of a contiguous copy, as bytes, which every backend of torch moves."""
    return x.reshape(-1).view(torch.uint8)


def _silent_ranks(group: Group) -> list[int]:
    """The global ranks of a group that have not said within a few seconds that a collective failed on them too."""
    ranks = dist.get_process_group_ranks(group.pg)
    keys = {rank: f"intflash/failed/{group.name}/{rank}" for rank in ranks}
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(keys[dist.get_rank()], "1")
        end = time.monotonic() + _GRACE_S
        while (silent := [rank for rank in ranks if not store.check([keys[rank]])]) and time.monotonic() < end:
            time.sleep(0.05)
        return silent
    except (RuntimeError, ValueError):  # the store is gone with the process that held it: rank 0, without torchrun
        return [0] if dist.get_rank() != 0 else []


@dataclass(frozen=True)
class Ranks:
    """All ranks that hold a sequence: a grid, the sequence in row-major order.

    Attributes:
        across: the ranks of this column, among which K and V are gathered.
        along: the ranks of this row, among which heads are exchanged (Ulysses).
    """

    across: Group
    along: Group

    @property
    def size(self) -> int:
        return self.across.size * self.along.size

    @property
    def rank(self) -> int:
        return self.across.rank * self.along.size + self.along.rank

    @property
    def row(self) -> range:
        """The ranks of this one's row."""
        first = self.across.rank * self.along.size
        return range(first, first + self.along.size)

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for group in (self.along, self.across) if group.size > 1)

    def reduce(self, x: Tensor, op: Any) -> Tensor:
        """`dist.ReduceOp.MAX` or `SUM` over all ranks, in place."""
        for group in self.groups:
            group.reduce(x, op)
        return x

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks in their order, ``[size, *part.shape]``."""
        return self.across.gather(self.along.gather(part)).flatten(0, 1)

    def describe(self, thing: Any) -> list[Any]:
        """A small object of each rank, in their order; for errors only, since it waits."""
        return [x for row in self.across.describe(self.along.describe(thing)) for x in row]


ALONE = Group(None, 1, 0)


def ranks_of(group: Where) -> Ranks:
    """The ranks of a process group, of a mesh, or with None of all processes, as one column; a mesh of two axes is a
    grid.

    Raises:
        InputError: torch.distributed is not initialized, or this process is not in the group.
    """
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialized: call init_process_group in processes of torchrun first")
    if isinstance(group, DeviceMesh):
        if group.ndim == 2:
            return Ranks(_of(group.get_group(0)), _of(group.get_group(1)))
        if group.ndim != 1:
            raise InputError(f"group must be a mesh of one or two axes, got one of {group.ndim}")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise InputError(f"group must be a ProcessGroup or DeviceMesh that this process is in, got {group!r}")
    return Ranks(_of(group), ALONE)


def _of(pg: ProcessGroup) -> Group:
    return Group(pg, dist.get_world_size(pg), dist.get_rank(pg))
