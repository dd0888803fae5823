"""The tensor maps by which TMA loads K and V^T: `struct TensorMaps` of csrc/cuda/sm90/tma.cuh.

A map lists the dimensions of a box in the order of shared memory, so that TMA permutes the rows: K's as `score_row`
orders each 16 keys, and those of V^T as `value_row` orders the channels (csrc/cuda/sm90/wgmma_layout.cuh).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from intflash.backends import native
from intflash.backends.cuda.parameters import Params


class TensorMaps(ctypes.Structure):
    _fields_ = [
        ("k", ctypes.c_uint64 * 16), ("v", ctypes.c_uint64 * 16),
        *((name, ctypes.c_int32) for name in ("k_batch", "k_head", "v_batch", "v_head")),
        ("padding", ctypes.c_uint64 * 6),
    ]  # fmt: skip


@dataclass(frozen=True)
class TensorMap:
    """One map without its address.

    Attributes:
        sizes: of its five dimensions, innermost first.
        strides: in bytes, along all dimensions but the innermost.
        box: the size of one copy.
        swizzle: bytes per row in shared memory: 32, 64 or 128.
        batch, head: distance to the next batch and head: in rows of K, in matrices of V^T.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    batch: int
    head: int

    def encoded(self, address: int, device: torch.device) -> ctypes.Array:
        """Returns the driver's 128 bytes.

        Raises:
            RuntimeError: the driver refused the map.
        """
        words = native.module.tensor_map(device.index, address, self.sizes, self.strides, self.box, self.swizzle)
        return (ctypes.c_uint64 * 16).from_buffer_copy(words)


@functools.lru_cache(maxsize=1024)  # torch's allocator returns the same addresses again
def encoded(tensor_map: TensorMap, address: int, device: torch.device) -> ctypes.Array:
    return tensor_map.encoded(address, device)


def tensor_maps(k: Tensor, v: Tensor, groups: int, width: int) -> Callable[[Params, torch.device], TensorMaps] | None:
    """Returns a function that makes the maps of K and V from parameters that point to them, or None where TMA cannot
    load them. groups, width: see `key_map`. V is copied in boxes of 128 keys.
    """
    key, value = key_map(k, groups, width), value_map(v, 128)
    return None if key is None or value is None else functools.partial(_of_parameters, key, value)


def _of_parameters(k: TensorMap, v: TensorMap, parameters: Params, device: torch.device) -> TensorMaps:
    maps = encoded(k, parameters.k.ptr, device), encoded(v, parameters.v.ptr, device)
    return TensorMaps(*maps, k.batch, k.head, v.batch, v.head)


def key_map(k: Tensor, groups: int, width: int) -> TensorMap | None:
    """The map of K ``[B, H, N, D]``, int8, with `groups` of 16 keys per copy and `width` bytes per row; None where
    strides are irregular.

    The second coordinate is the row at which a head begins, so that heads may have any number of keys. Keys past the
    last whole group are copied as zeros.
    """
    (batches, heads, n, d), (b, h, row, channel) = k.shape, k.stride()
    b, h = (stride if size > 1 else 0 for size, stride in ((batches, b), (heads, h)))
    if channel != 1 or row % 16 or n < 16 or row == 0 or b % row or h % row:
        return None
    batch, head = b // row, h // row
    rows = (batches - 1) * batch + (heads - 1) * head + 2
    if rows >= 1 << 31:
        return None
    return TensorMap(
        (d, rows, 4, 2, n // 16), (row, 4 * row, 2 * row, 16 * row), (width, 2, 4, 2, groups), width, batch, head
    )


def value_map(v: Tensor, keys: int) -> TensorMap | None:
    """The map of V ``[B, H, N, D]``, int8 with contiguous keys, `keys` per copy; None where its strides are
    irregular.
    """
    (batches, heads, n, d), (b, h, key, channel) = v.shape, v.stride()
    b, h = (stride if size > 1 else 0 for size, stride in ((batches, b), (heads, h)))
    matrix = h or b or d * channel
    if key != 1 or channel % 16 or b % matrix or matrix % 16:
        return None
    batch, head = b // matrix, h // matrix
    matrices = (batches - 1) * batch + (heads - 1) * head + 1
    return TensorMap(
        (n, 2, 4, d // 8, matrices), (channel, d // 4 * channel, 2 * channel, matrix),
        (keys, 2, 4, d // 8, 1), 128, batch, head,
    )  # fmt: skip
