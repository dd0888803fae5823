"""Attention of one sequence over many GPUs and machines: context parallelism with the bits of one process."""

from intflash.distributed.attention import attention
from intflash.distributed.groups import Traffic, counting
from intflash.distributed.sequence import positions, shard, unshard
from intflash.distributed.traffic import bytes_sent
from intflash.errors import DistributedError

__all__ = ["DistributedError", "Traffic", "attention", "bytes_sent", "counting", "positions", "shard", "unshard"]
