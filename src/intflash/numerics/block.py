"""Constants of `intflash_bfp`, whose P has an exponent per block of keys (docs/numerics.md)."""

from __future__ import annotations

BLOCK = 128  # keys from a sequence's start on that share an exponent: semantics, not tuning
UNSET = -(1 << 29)  # the octave of a group without keys, below every other: |T| < 2^60 + 2^51
FAR = 48  # a block so many octaves below its row's largest, or more, adds nothing
MAX_GAP = 96  # octaves between keys with a value and keys without: more count as so many
BIAS_FRACTION_BITS = 12  # Q19.12: 524,288 octaves
LEAST_HI = -16  # octaves of the exponential from which p16 is computed; it is 0 below -2

ACC_SHIFT = 8  # bits of a block's P16 V that are dropped: 32 bits hold the sums of 512 blocks of one octave

# Bounds: 255 * 128 * 128 < 2^22 (acc of a block, in units of 2^8), 2^30 * 2^24 * 2^9 = 2^30 * 2^20 * 2^13 = 2^63 (acc
# of a row).
MAX_KEYS = 1 << 20
_MANY_KEYS = 1 << 16


OUTPUT_SHIFT = 24  # from a row's sums to those that the output is made of: l below 2^32


def fraction_bits(keys: int) -> int:
    """Fraction bits of a row's sums, of a sequence of so many keys: octaves to which blocks are merged exactly."""
    return 24 if keys <= _MANY_KEYS else 20
