"""Tensors as GPU kernels address them: views with strides, readable padding, limits of grids and indices."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from intflash.problem import Problem
from intflash.quant import QTensor

GRID_LIMIT = 65535  # CTAs along the second and third axis of a grid


class View(NamedTuple):
    """A 4-D tensor: pointer and strides of batch, head, token and channel (or of a mask's four axes)."""

    ptr: object
    b: object
    h: object
    n: object
    d: object


class Statistics(NamedTuple):
    """The tensors that receive every row's Tmax (int64) and l (int32) where log-sum-exp is returned; None otherwise."""

    t_max: object
    l: object


def view(x: Tensor) -> View:
    """Describes a 4-D tensor with stride 0 along axes of length 1, so that any index reads its one element."""
    strides = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return View(x, *strides)


def data_view(x: Tensor) -> View:
    """Describes a 4-D tensor of codes or values with its own strides, which tell alignment even along axes of length
    1.
    """
    return View(x, *x.stride())


def limits(problem: Problem) -> str | None:
    """Returns why no kernel serves this many heads or rows this far apart, or None."""
    heads = problem.q.shape[1]
    if heads > GRID_LIMIT:
        return f"takes at most {GRID_LIMIT} heads, got {heads}: move independent heads to the batch axis"
    for name in ("q", "k", "v", "bias", "bias_float", "keep"):
        x = getattr(problem, name)
        x = x.data if isinstance(x, QTensor) else x
        if x is not None and x.shape[2] * abs(x.stride(2)) >= 1 << 31:
            return f"rows of {name} must lie within 2^31 elements, got shape {list(x.shape)} and strides {x.stride()}"
    return None


def readable(x: Tensor, tokens: int) -> bool:
    """Whether `tokens` tokens of every head of x lie inside its storage. Kernels may then read rows past N, and ignore
    them, without a bounds check for each element. True for K-major values with padded rows.
    """
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if n)
    last += max(tokens - x.shape[2], 0) * x.stride(2)
    return last < x.untyped_storage().nbytes() // x.element_size()


def key_major(v: Tensor, keys: int) -> bool:
    """Whether 16-byte copies can load `keys` keys of V (one byte per element) in its present layout."""
    others = (v.stride(axis) for axis in (0, 1, 3) if v.shape[axis] > 1)
    return v.stride(2) == 1 and v.data_ptr() % 16 == 0 and not any(s % 16 for s in others) and readable(v, keys)


def contiguous_keys(v: Tensor, multiple: int = 16) -> Tensor:
    """Returns V ``[B, H, N, D]`` of bytes with contiguous keys, as 8-bit tensor cores read it: V itself, or a copy
    whose rows are padded with zeros to a multiple of keys.
    """
    b, h, n, d = v.shape
    padded = -(-n // multiple) * multiple
    if key_major(v, padded):
        return v
    rows = v.new_empty if padded == n else v.new_zeros
    return rows(b, h, d, padded)[..., :n].copy_(v.mT).mT


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory from data_ptr on, in any order of axes."""
    axes = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    filled = 1
    for stride, size in axes:
        if stride != filled:
            return False
        filled *= size
    return True
