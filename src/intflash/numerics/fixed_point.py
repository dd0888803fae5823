"""Fixed-point primitives on integer arrays (NumPy or torch, int64 unless said otherwise).

Names state the rounding. Right shifts of negative numbers are arithmetic (floor).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)


def rounding_rshift(x: Array, shift: int | Array) -> Array:
    """floor(x / 2^shift + 1/2): round to nearest, ties towards plus infinity; shift >= 1."""
    return (x + (1 << (shift - 1) if isinstance(shift, int) else _one_like(shift) << (shift - 1))) >> shift


def trunc_div(a: Array, b: Array) -> Array:
    """a / b truncated towards zero, b > 0."""
    if isinstance(a, torch.Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return np.sign(a) * (np.abs(a) // b)


def floor_div(a: Array, b: Array) -> Array:
    """floor(a / b), b > 0."""
    if isinstance(a, torch.Tensor):
        return torch.div(a, b, rounding_mode="floor")
    return a // b


def saturate(x: Array, bits: int) -> Array:
    """Clamp to the symmetric signed range: [-(2^(bits-1) - 1), 2^(bits-1) - 1]."""
    limit = (1 << (bits - 1)) - 1
    return x.clip(-limit, limit)


def wrap_int32(x: Array) -> Array:
    """The value an int32 register would hold: reduced modulo 2^32 into [-2^31, 2^31)."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def wrap_int8(x: Array) -> Array:
    """The value an int8 cast keeps: reduced modulo 2^8 into [-128, 128)."""
    return ((x + 128) & 0xFF) - 128


def bit_length(x: Array) -> Array:
    """Number of bits of x >= 0 (0 for 0), exact for x < 2^53."""
    if isinstance(x, torch.Tensor):
        return torch.frexp(x.double())[1].to(torch.int64)
    return np.frexp(x.astype(np.float64))[1].astype(np.int64)


def clz32(x: Array) -> Array:
    """Leading zeros of a uint32 held in int64; 32 for 0."""
    return 32 - bit_length(x)


def _one_like(x: Array) -> Array:
    return torch.ones_like(x) if isinstance(x, torch.Tensor) else np.ones_like(x)
