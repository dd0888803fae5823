"""Constants of `intflash_bfp`, whose keys with and without a value have an exponent each (docs/numerics.md)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ROUNDED_KEYS = 768  # p16 of a sequence of at most so many keys is rounded, that of more is dithered
DITHER_KEYS = 2048  # the dither repeats after so many keys
UNSET = -(1 << 29)  # the octave of a group without keys, below every other: |T| < 2^60 + 2^51
FAR = 48  # a group so many octaves below its row's largest, or more, adds nothing
MAX_GAP = 96  # octaves between keys with a value and keys without: more count as so many
BIAS_FRACTION_BITS = 12  # Q19.12: 524,288 octaves
LEAST_HI = -16  # octaves of the exponential from which p16 is computed; it is 0 below
P_FRACTION_BITS = 8  # of p16 before it is rounded or dithered

# Bounds: 65,193 * 2^20 < 2^36 (l of a group), 2^36 * 2^7 * 2^20 = 2^63 (acc of a row, with its fraction bits).
MAX_KEYS = 1 << 20
_MANY_KEYS = 1 << 16


OUTPUT_SHIFT = 24  # from a row's sums to those that the output is made of: l below 2^32


def dither(key: int) -> int:
    """What is added to p16 of a key before it is floored, in 2^-8: bits 0 to 3 of its number in reverse order, then
    bits 7 to 10 in reverse order.

    >>> [dither(key) for key in (0, 1, 2, 3, 15, 16, 128, 256, 2047)]
    [0, 128, 64, 192, 240, 0, 8, 4, 255]
    """
    return int(f"{key % 16:04b}"[::-1] + f"{key // 128 % 16:04b}"[::-1], 2)


@functools.cache
def _dithers() -> list[int]:
    return [dither(key) for key in range(DITHER_KEYS)]


def additions(keys: int) -> Tensor:
    """What is added to p16 of each key of a sequence of so many keys, in 2^-8, before it is floored: int64, in CPU
    memory.
    """
    if keys <= ROUNDED_KEYS:
        return torch.full((keys,), 1 << (P_FRACTION_BITS - 1), device="cpu")
    return torch.tensor(_dithers(), device="cpu").repeat(-(-keys // DITHER_KEYS))[:keys]


def fraction_bits(keys: int) -> int:
    """Fraction bits of a row's sums, of a sequence of so many keys."""
    return 24 if keys <= _MANY_KEYS else 20


def has_same_sums(keys: int, others: int) -> bool:
    """Whether a row has the same sums in sequences of so many keys, where it sees none that one of them lacks."""
    return (keys > ROUNDED_KEYS, fraction_bits(keys)) == (others > ROUNDED_KEYS, fraction_bits(others))
