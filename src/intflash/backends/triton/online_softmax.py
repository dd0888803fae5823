"""Online-softmax updates of the methods with a float32 softmax: from a tile's scores to exponentials against the
running maximum.

An update takes (m, scores s, unit) and returns (m', alpha, p). It converts int32 scores to float32 in one of these
ways, which benchmarks/conversion.py measures:

    convert   I2F, float maximum
    magic     integer addition of a magic constant, float maximum; the softmax's FMA also subtracts the constant
    dual      half of the scores by `convert`, half by integer addition and integer maximum, interleaved
    integer   integer addition and integer maximum for all scores
    biased    as `integer`, also where K has a scale for each key; the scores are then rounded
"""

from __future__ import annotations

import triton
import triton.language as tl

# 2^23 + 2^22 - 1 and its bits: float(s + MAGIC) has the bits s + MAGIC_BITS for |s| < 2^22. The constant is lite's.
MAGIC = tl.constexpr(12582911.0)
MAGIC_BITS = tl.constexpr(0x4B3FFFFF)


@triton.jit
def _raise_max(m, top):
    """Returns (m', the value to subtract, 2^(m - m')). A row without keys so far subtracts 0 and keeps p = 0."""
    higher = tl.maximum(m, top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, base, tl.exp2(m - base)


@triton.jit
def general(m, s, unit, bias, present, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Returns (m', alpha, p * 2^OFFSET) with any scales, bias and mask, by conversion and float maximum."""
    row, key, _, _ = unit
    y = s.to(tl.float32)
    if KIND.k == "key":
        y *= key
    if bias is not None:
        y = y * row[:, None] + bias
        row = tl.full(row.shape, 1.0, tl.float32)
    if present is not None:
        y = tl.where(present, y, float("-inf"))
    top = tl.max(y, 1)
    m, base, alpha = _raise_max(m, tl.where(top == float("-inf"), top, top * row))
    return m, alpha, tl.exp2(y * row[:, None] - (base - OFFSET)[:, None])


@triton.jit
def _magic(m, s, unit):
    """As `general`, without key scale, bias and mask. s + MAGIC is a float, and -MAGIC becomes part of the FMA's
    addend.
    """
    row, _, _, _ = unit
    y = (s + MAGIC_BITS).to(tl.float32, bitcast=True)
    m, base, alpha = _raise_max(m, (tl.max(y, 1) - MAGIC) * row)
    return m, alpha, tl.exp2(y * row[:, None] - (base + MAGIC * row)[:, None])


@triton.jit
def _integer(m, s, unit):
    """As `_magic`, but with the maximum of the integers, two scores per instruction.

    The magic constant initializes the product's accumulator (the compiler moves the addition there), so that the
    integer pipe computes only the maximum.
    """
    row, _, _, _ = unit
    s = s + MAGIC_BITS
    m, base, alpha = _raise_max(m, (tl.max(s, 1).to(tl.float32, bitcast=True) - MAGIC) * row)
    y = s.to(tl.float32, bitcast=True)
    return m, alpha, tl.exp2(y * row[:, None] - (base + MAGIC * row)[:, None])


@triton.jit
def _dual(m, s, unit):
    """Even columns use I2F and a float maximum. Odd columns use an integer addition and an integer maximum, read as
    a float.
    """
    row, _, _, _ = unit
    BM: tl.constexpr = s.shape[0]
    BN: tl.constexpr = s.shape[1]
    even, odd = tl.split(tl.reshape(s, [BM, BN // 2, 2]))
    a = even.to(tl.float32)
    b = odd + MAGIC_BITS
    top = tl.maximum(tl.max(a, 1), tl.max(b, 1).to(tl.float32, bitcast=True) - MAGIC)
    m, base, alpha = _raise_max(m, top * row)
    p_even = tl.exp2(a * row[:, None] - base[:, None])
    p_odd = tl.exp2(b.to(tl.float32, bitcast=True) * row[:, None] - (base + MAGIC * row)[:, None])
    return m, alpha, tl.reshape(tl.join(p_even, p_odd), [BM, BN])


@triton.jit
def _biased(m, s, unit):
    """As `_integer` with a scale for each key. Scores plus the tile's `score_bound` are positive floats, which are
    ordered as their bits are.

    The sums are rounded to half a score unit of the tile's largest key scale.
    """
    row, key, _, score_bound = unit
    y = (s + MAGIC_BITS).to(tl.float32, bitcast=True) * key + (score_bound - MAGIC * key)
    top = tl.max(y.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    m, base, alpha = _raise_max(m, (top - score_bound) * row)
    return m, alpha, tl.exp2(y * row[:, None] - (base + score_bound * row)[:, None])


@triton.jit
def online_softmax(m, s, unit, bias, present, KIND: tl.constexpr):
    """Applies the update of KIND.conversion, and `general` in tiles with key scales, a bias or absent keys, which the
    other updates do not take.
    """
    if KIND.conversion == "convert" or bias is not None or present is not None:
        return general(m, s, unit, bias, present, KIND, 0.0)
    elif KIND.k == "key":
        if KIND.conversion == "biased":
            return _biased(m, s, unit)
        else:
            return general(m, s, unit, bias, present, KIND, 0.0)
    elif KIND.conversion == "magic":
        return _magic(m, s, unit)
    elif KIND.conversion == "dual":
        return _dual(m, s, unit)
    else:
        return _integer(m, s, unit)
