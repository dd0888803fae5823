"""The driver's tensor maps, by which TMA loads boxes of a tensor."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from intflash.backends import native


class TensorMap(NamedTuple):
    """A map of bytes with five dimensions.

    Attributes:
        sizes: of its dimensions, innermost first.
        strides: in bytes, along all dimensions but the innermost.
        box: the size of one copy.
        swizzle: bytes per row in shared memory: 32, 64 or 128.
        address: of the first byte.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    address: int


@functools.lru_cache(maxsize=1024)  # torch's allocator returns the same addresses again
def encoded(tensor_map: TensorMap, device: torch.device) -> bytes:
    """Returns the driver's 128 bytes.

    Raises:
        RuntimeError: the driver refused the map.
    """
    return native.module.tensor_map(device.index, tensor_map.address, *tensor_map[:4])
