"""Attention of one sequence over many GPUs and machines: context parallelism with the bits of one process."""

from intflash.distributed.attention import attention
from intflash.distributed.context import ContextParallel, context_parallel
from intflash.distributed.groups import Traffic, counting
from intflash.distributed.sequence import positions, shard, unshard
from intflash.distributed.traffic import bytes_sent
from intflash.errors import DistributedError

__all__ = [
    "ContextParallel",
    "DistributedError",
    "Traffic",
    "attention",
    "bytes_sent",
    "context_parallel",
    "counting",
    "positions",
    "shard",
    "unshard",
]
