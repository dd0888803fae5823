"""Constants of `intflash_bfp`, whose P has an exponent per block of keys (docs/numerics.md)."""

from __future__ import annotations

BLOCK = 128  # keys from a sequence's start on that share an exponent: semantics, not tuning
ONE_BLOCK = 768  # a sequence of at most so many keys is one block, whose sums are exact
UNSET = -(1 << 29)  # the octave of a group without keys, below every other: |T| < 2^60 + 2^51
FAR = 48  # a block so many octaves below its row's largest, or more, adds nothing
MAX_GAP = 96  # octaves between keys with a value and keys without: more count as so many
BIAS_FRACTION_BITS = 12  # Q19.12: 524,288 octaves
LEAST_HI = -16  # octaves of the exponential from which p16 is computed; it is 0 below -3

ACC_SHIFT = 8  # bits dropped of the acc of one of many blocks: 32 bits hold the sums of 512 blocks of one octave

# Bounds: 255 * 128 * 128 < 2^22 (acc of a block, in units of 2^8), 2^30 * 2^24 * 2^9 = 2^30 * 2^20 * 2^13 = 2^63 (acc
# of a row); of a sequence that is one block, 65,193 * 768 < 2^26 (l) and 2^26 * 128 = 2^33 (acc).
MAX_KEYS = 1 << 20
_MANY_KEYS = 1 << 16


OUTPUT_SHIFT = 24  # from a row's sums to those that the output is made of: l below 2^32


def block_keys(keys: int) -> int:
    """Keys of a block, of a sequence of so many keys.

    >>> block_keys(197), block_keys(4096)
    (197, 128)
    """
    return max(keys, 1) if keys <= ONE_BLOCK else BLOCK


def dropped_bits(keys: int) -> int:
    """Bits of a block's acc that are dropped, of a sequence of so many keys."""
    return 0 if keys <= ONE_BLOCK else ACC_SHIFT


def rounds(keys: int) -> bool:
    """Whether p16 is rounded, of a sequence of so many keys; of many blocks it is floored."""
    return keys <= ONE_BLOCK


def fraction_bits(keys: int) -> int:
    """Fraction bits of a row's sums, of a sequence of so many keys: octaves to which blocks are merged exactly."""
    return 24 if keys <= _MANY_KEYS else 20


def has_same_sums(keys: int, others: int) -> bool:
    """Whether a row has the same sums in sequences of so many keys, where it sees none that one of them lacks."""
    return (dropped_bits(keys), fraction_bits(keys)) == (dropped_bits(others), fraction_bits(others))
