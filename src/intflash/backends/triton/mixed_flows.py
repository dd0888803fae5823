"""From scores of a tile to exponentials against the maximum so far, for the methods with a float32 softmax.

A flow takes (m, scores s, unit) to (m', alpha, p). int32 -> float32 goes through one of four (`lite` exists in each,
bench/gpu/conversion.py measures them):

    convert   I2F, float maximum
    magic     integer addition of a magic constant, float maximum; the subtraction is folded into the softmax's FMA
    dual      half of the scores by `convert`, half by integer addition and integer maximum, interleaved
    integer   integer addition and integer maximum of all scores
"""

from __future__ import annotations

import triton
import triton.language as tl

# 2^23 + 2^22 - 1 and its bits: float(s + MAGIC) has the bits s + MAGIC_BITS for |s| < 2^22 (lite's constant)
MAGIC = tl.constexpr(12582911.0)
MAGIC_BITS = tl.constexpr(0x4B3FFFFF)


@triton.jit
def _raise(m, top):
    """(m', what to subtract, 2^(m - m')): a row without keys so far subtracts 0 and keeps p = 0."""
    higher = tl.maximum(m, top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, base, tl.exp2(m - base)


@triton.jit
def general(m, s, unit, bias, present, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """(m', alpha, p * 2^OFFSET) with any scales, bias and mask, by conversion and float maximum."""
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
    m, base, alpha = _raise(m, tl.where(top == float("-inf"), top, top * row))
    return m, alpha, tl.exp2(y * row[:, None] - (base - OFFSET)[:, None])


@triton.jit
def _magic(m, s, unit):
    """As `general` without key scale, bias and mask: s + MAGIC is a float, whose -MAGIC joins the FMA's addend."""
    row, _, _, _ = unit
    y = (s + MAGIC_BITS).to(tl.float32, bitcast=True)
    m, base, alpha = _raise(m, (tl.max(y, 1) - MAGIC) * row)
    return m, alpha, tl.exp2(y * row[:, None] - (base + MAGIC * row)[:, None])


@triton.jit
def _integer(m, s, unit):
    """As `_magic`, the maximum taken of the integers, two scores by each instruction.

    The magic constant starts the product's accumulator (the compiler moves the addition there), so that of the
    conversion only the maximum is left on the integer pipe.
    """
    row, _, _, _ = unit
    s = s + MAGIC_BITS
    m, base, alpha = _raise(m, (tl.max(s, 1).to(tl.float32, bitcast=True) - MAGIC) * row)
    y = s.to(tl.float32, bitcast=True)
    return m, alpha, tl.exp2(y * row[:, None] - (base + MAGIC * row)[:, None])


@triton.jit
def _dual(m, s, unit):
    """Even columns: I2F and float maximum. Odd columns: integer addition and integer maximum, read as a float."""
    row, _, _, _ = unit
    BM: tl.constexpr = s.shape[0]
    BN: tl.constexpr = s.shape[1]
    even, odd = tl.split(tl.reshape(s, [BM, BN // 2, 2]))
    a = even.to(tl.float32)
    b = odd + MAGIC_BITS
    top = tl.maximum(tl.max(a, 1), tl.max(b, 1).to(tl.float32, bitcast=True) - MAGIC)
    m, base, alpha = _raise(m, top * row)
    p_even = tl.exp2(a * row[:, None] - base[:, None])
    p_odd = tl.exp2(b.to(tl.float32, bitcast=True) * row[:, None] - (base + MAGIC * row)[:, None])
    return m, alpha, tl.reshape(tl.join(p_even, p_odd), [BM, BN])


@triton.jit
def raised(m, s, unit):
    """As `_integer` with a scale for each key: scores raised by `lift` are positive floats, ordered as integers.

    Rounded to half a score unit of the tile's largest key scale.
    """
    row, key, _, lift = unit
    y = (s + MAGIC_BITS).to(tl.float32, bitcast=True) * key + (lift - MAGIC * key)
    top = tl.max(y.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    m, base, alpha = _raise(m, (top - lift) * row)
    return m, alpha, tl.exp2(y * row[:, None] - (base + lift * row)[:, None])


@triton.jit
def flow(m, s, unit, bias, present, KIND: tl.constexpr, FLOW: tl.constexpr):
    """The flow where its shape allows, the general form in tiles with a key scale, a bias or absent keys."""
    if FLOW == "convert" or KIND.k == "key" or bias is not None or present is not None:
        return general(m, s, unit, bias, present, KIND, 0.0)
    elif FLOW == "magic":
        return _magic(m, s, unit)
    elif FLOW == "dual":
        return _dual(m, s, unit)
    else:
        return _integer(m, s, unit)
