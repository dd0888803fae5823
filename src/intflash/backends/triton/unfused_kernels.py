"""The kernels of `ivit`, `ibert` and `fqvit`: one per operator, with scores and P in memory, as those papers compute.

    _scores_kernel      Q K^T (+ bias) int32, and its absolute maximum over present keys
    _requantize_kernel  int32 scores to int8 codes by that maximum (ivit, fqvit)
    _softmax_kernel     a row at a time: P as int8 (ivit), uint8 (ibert) or int16 powers of two (fqvit)
    _values_kernel      P V in int32, the output by one fixed-point multiplication

The score of an absent key is INT32_MIN, its code -128. Quotients by constants of a call use an integer reciprocal and a
correction by the remainder. The division per row is the GPU's own, which computes through floats.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from intflash.backends.gpu.tensors import View
from intflash.backends.triton.device_functions import Masks, Position, bias_tile, head_base, load_rows, present_keys
from intflash.numerics.triton import INT32_MIN, clz32, reciprocal_2_55

INT32_MAX = tl.constexpr((1 << 31) - 1)
NO_SCORE = tl.constexpr(-(1 << 40))
ABSENT_CODE = tl.constexpr(-128)
IVIT_OCTAVES = tl.constexpr(15)
IBERT_OCTAVES = tl.constexpr(30)
IBERT_BITS = tl.constexpr(40)
INT16_MAX = tl.constexpr(32767)
LEVELS = tl.constexpr(15)
MIN_UNIT = tl.constexpr(2.0**-30)  # the least unit of an exponential: with a smaller one they exceed int64


class UnfusedScales(NamedTuple):
    """float32 Views of the scales, and the bits of the float64 softmax scale."""

    q: object
    k: object
    v: object
    out: object
    sm_bits: object
    end: None = None  # see `Masks`


# --- integer quotients


@triton.jit
def _bit_length(x):
    """Returns the number of bits of an int64 0 <= x < 2^63."""
    high = (x >> 32).to(tl.uint32)
    low = x.to(tl.uint32)
    top = tl.where(high != 0, high, low)
    bits = 32 - tl.where(top != 0, clz32(tl.where(top != 0, top, 1)), 32)
    return tl.where(high != 0, 32 + bits, bits)


@triton.jit
def _shift(x, by):
    """Returns x << by, or x >> -by for negative by; int64."""
    return tl.where(by >= 0, x << tl.maximum(by, 0).to(tl.int64), x >> tl.maximum(-by, 0).to(tl.int64))


@triton.jit
def _reciprocal(divisor):
    """Returns (2^55 / divisor normalized to 32 bits, the shift that normalizes it) for an int64 divisor >= 1."""
    by = 32 - _bit_length(divisor)
    return reciprocal_2_55(_shift(divisor, by).to(tl.uint32)).to(tl.int64), by


@triton.jit
def _quotient(x, divisor, reciprocal, by):
    """Returns floor(x / divisor) for int64 x >= 0 with a quotient below 2^16: a 24-bit estimate within 1, corrected
    by the remainder.
    """
    q = ((_shift(x, by) >> 16) * reciprocal) >> 39
    rest = x - q * divisor
    return tl.where(rest < 0, q - 1, tl.where(rest >= divisor, q + 1, q))


# --- constants of a call, in float64


@triton.jit
def _unit(scales: UnfusedScales, b, h, GROUP: tl.constexpr):
    """Returns s_Q * s_K * scale of a head, float64."""
    q, k = scales.q, scales.k
    s_q = tl.load(q.ptr + b * q.b + h * q.h).to(tl.float64)
    s_k = tl.load(k.ptr + b * k.b + (h // GROUP) * k.h).to(tl.float64)
    return (s_q * s_k) * scales.sm_bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _floor(x):
    """Rounds a float64 in [0, 2^62) down to int64."""
    return x.to(tl.int64)


@triton.jit
def _ceil(x):
    floor = x.to(tl.int64)
    return tl.where(floor.to(tl.float64) < x, floor + 1, floor)


@triton.jit
def _round(x):
    """Rounds a float64 in [0, 2^62) half to even."""
    floor = x.to(tl.int64)
    rest = x - floor.to(tl.float64)
    return floor + tl.where((rest > 0.5) | ((rest == 0.5) & (floor % 2 == 1)), 1, 0)


# --- operators


@triton.jit
def _scores_kernel(
    q: View, k: View, s: View, amax, masks: Masks, bias_units, nq, nk,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEY_TILES: tl.constexpr,
    CAUSAL: tl.constexpr, CONSTS: tl.constexpr,
):  # fmt: skip
    """Computes int32 scores of a tile. masks.bias: int32 in score units, with ABSENT. amax: int32, raised to the
    largest |S|.
    """
    batch, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    zero = head * 0
    row, first = (tile // KEY_TILES) * BM, (tile % KEY_TILES) * BN
    pos = Position(batch, head, row, zero, zero + nq, zero, zero + nk)
    rows, keys = row + tl.arange(0, BM), first + tl.arange(0, BN)
    q_tile = load_rows(q, head_base(q, batch, head, zero), rows, nq, D, BD, True)
    k_tile = load_rows(k, head_base(k, batch, head // CONSTS.group, zero), keys, nk, D, BD, True)
    score = tl.dot(q_tile, tl.trans(k_tile), out_dtype=tl.int32)
    bias = bias_tile(masks, pos, rows, keys, True)
    if bias is not None:
        score += bias
    present = present_keys(masks, pos, rows, keys, bias, masks.causal, True, CAUSAL)
    inside = present & (rows < nq)[:, None]
    if amax is not None:
        largest = tl.max(tl.max(tl.where(inside, tl.abs(score), 0), 1), 0)
        tl.atomic_max(amax, largest, sem="relaxed")
    ptrs = head_base(s, batch, head, zero) + rows[:, None] * s.n + keys[None, :]
    score = tl.where(present, score, INT32_MIN)
    tl.store(ptrs, score, mask=(rows < nq)[:, None] & (keys < nk)[None, :])


@triton.jit
def _requantize_kernel(s, codes, amax, count, BLOCK: tl.constexpr):
    """Computes 127 S / amax rounded half up, as int8, and -128 for absent keys."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(s + i, mask=i < count, other=0)
    divisor = 2 * tl.load(amax).to(tl.int64)
    divisor = tl.full([1], 1, tl.int64) * divisor
    reciprocal, by = _reciprocal(divisor)
    present = score != INT32_MIN
    x = 254 * tl.where(present, score, 0).to(tl.int64) + divisor // 2 + 127 * divisor
    code = _quotient(x, divisor, reciprocal, by) - 127
    tl.store(codes + i, tl.where(present, code, ABSENT_CODE).to(tl.int8), mask=i < count)


@triton.jit
def _polynomial(depth, unit):
    """Returns I-BERT's exp(-depth * unit) in at most 40 bits, and its value at 0. The polynomial is 0.3585 (x +
    1.353)^2 + 0.344 within an octave of ln 2.
    """
    ln2 = _ceil(0.6931471805599453 / unit)
    b = _floor(1.353 / unit)
    c = tl.maximum(_floor(0.344 / (0.3585 * (unit * unit))), 1)
    whole = b * b + c
    spare = tl.maximum(_bit_length(whole) - IBERT_BITS, 0).to(tl.int64)
    depth = tl.minimum(depth, IBERT_OCTAVES * ln2)
    reciprocal, by = _reciprocal(ln2)
    octaves = _quotient(depth, ln2, reciprocal, by)
    root = octaves * ln2 - depth + b
    return (root * root + c) >> (octaves + spare), whole >> spare


@triton.jit
def _ivit_p(depth, present, unit):
    """Computes Shiftmax to 7 bits. Returns (P, l, one)."""
    x = -depth
    x = x + (x >> 1) - (x >> 4)  # times 1.4375, which is about log2(e)
    one = tl.maximum(_round(1.0 / unit), 1)
    x = tl.maximum(x, -IVIT_OCTAVES * one)
    divisor = tl.minimum(one, INT32_MAX)  # depths are below 366, so a larger unit gives 0 as well
    reciprocal, by = _reciprocal(divisor)
    octaves = _quotient(-x, divisor, reciprocal, by)
    rest = x + octaves * one
    p = tl.where(present, ((rest + 2 * one) << (-octaves + IVIT_OCTAVES)) >> 1, 0)
    l = tl.sum(p, 1)
    factor = tl.full(l.shape, INT32_MAX, tl.int64) // tl.minimum(tl.maximum(l, 1), INT32_MAX)
    return tl.minimum((p * factor[:, None]) >> 24, 127), l, one << IVIT_OCTAVES


@triton.jit
def _ibert_p(depth, present, unit):
    """Computes i-exp to 16 bits and P to 8 bits. Returns (P, l, one)."""
    exp, one = _polynomial(depth, unit)
    reciprocal, by = _reciprocal(2 * one)
    p16 = tl.where(present, _quotient(2 * INT16_MAX * exp + one, 2 * one, reciprocal, by), 0)
    l = tl.sum(p16, 1)
    factor = tl.full(l.shape, 1 << 32, tl.int64) // tl.maximum(l, 1)
    return (p16 * factor[:, None]) >> 24, l, tl.full(one.shape, INT16_MAX, tl.int64)


@triton.jit
def _fqvit_p(depth, present, unit):
    """Rounds P to the nearest power of two, 2^(15 - level), by comparing 2 l with exp * (2 threshold - 1). Returns
    (P, l, one).
    """
    exp, one = _polynomial(depth, unit)
    exp = tl.where(present, exp, 0)
    l = tl.sum(exp, 1)
    twice = 2 * l[:, None]
    divisor = tl.maximum(exp, 1)
    level = tl.zeros(exp.shape, tl.int64)
    for i in tl.static_range(4):
        higher = level + (8 >> i)
        # 1 / P rounds to level k from 3 * 2^(k - 2) on, and to level 1 from 2 on
        threshold = tl.where(higher == 1, 3, (tl.full(exp.shape, 3, tl.int64) << (higher - 1)) - 1)
        level = tl.where(twice >= divisor * threshold, higher, level)
    dead = (exp == 0) | (twice >= divisor * 98303)  # level 16 begins at 3 * 2^14
    return tl.where(dead, 0, tl.full(exp.shape, 1, tl.int64) << (-level + LEVELS)), l, one


@triton.jit
def _softmax_kernel(
    s, p, amax, scales: UnfusedScales, top, normalizer, first_value, nq, nk, stride,
    METHOD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes ROWS rows of P, `stride` elements per row. top, normalizer, first_value: int64 [B, H, Nq] for
    log-sum-exp, or None.
    """
    batch, head = tl.program_id(0), tl.program_id(1)
    rows, keys = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BK)
    first_row = (batch.to(tl.int64) * tl.num_programs(1) + head) * nq
    at = (first_row + rows)[:, None] * stride + keys[None, :]
    inside = (rows < nq)[:, None] & (keys < nk)[None, :]
    none: tl.constexpr = INT32_MIN if METHOD == "ibert" else ABSENT_CODE
    score = tl.load(s + at, mask=inside, other=none).to(tl.int64)
    present = score != none
    m = tl.max(tl.where(present, score, NO_SCORE), 1)
    depth = tl.where(present, m[:, None] - score, 0)
    unit = tl.full([1, 1], 1.0, tl.float64) * _unit(scales, batch, head, GROUP)
    if METHOD != "ibert":
        unit = unit * tl.load(amax).to(tl.float64) / 127.0
    unit = tl.maximum(unit, MIN_UNIT)  # only unchecked calls get here with less; others are refused
    if METHOD == "ivit":
        weights, l, one = _ivit_p(depth, present, unit)
    elif METHOD == "ibert":
        weights, l, one = _ibert_p(depth, present, unit)
    else:
        weights, l, one = _fqvit_p(depth, present, unit)
    tl.store(p + at, weights.to(p.dtype.element_ty), mask=inside)
    if top is not None:
        tl.store(top + first_row + rows, m, mask=rows < nq)
        tl.store(normalizer + first_row + rows, l, mask=rows < nq)
        tl.store(first_value + first_row + rows, tl.max(tl.broadcast_to(one, [ROWS, 1]), 1), mask=rows < nq)


@triton.jit
def _values_kernel(
    p: View, v: View, out: View, scales: UnfusedScales, output, nq, nk,
    DIGITS: tl.constexpr, FRACTION: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes P V of BM rows. With two DIGITS, -P (up to 2^15) is 256 * high + low, both signed bytes."""
    batch, head = tl.program_id(0), tl.program_id(1)
    zero = head * 0
    rows, channels = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BDV)
    p_base, v_base = head_base(p, batch, head, zero), head_base(v, batch, head // GROUP, zero)
    acc = tl.zeros([BM, BDV], tl.int32)
    low_acc = tl.zeros([BM, BDV], tl.int32)
    for first in tl.range(0, nk, BN):
        keys = first + tl.arange(0, BN)
        inside = (rows < nq)[:, None] & (keys < nk)[None, :]
        weights = tl.load(p_base + rows[:, None] * p.n + keys[None, :], mask=inside, other=0)
        v_tile = load_rows(v, v_base, keys, nk, DV, BDV, True)
        if DIGITS == 1:
            acc = tl.dot(weights, v_tile, acc, out_dtype=tl.int32)
        else:
            negative = -weights.to(tl.int32)
            acc = tl.dot(((negative + 128) >> 8).to(tl.int8), v_tile, acc, out_dtype=tl.int32)
            low = (((negative & 255) ^ 128) - 128).to(tl.int8)
            low_acc = tl.dot(low, v_tile, low_acc, out_dtype=tl.int32)
    total = acc.to(tl.int64)
    if DIGITS == 2:
        total = -((total << 8) + low_acc.to(tl.int64))
    seen = channels[None, :] < DV
    if output is not None:  # int64 pairs: the multiplier, and 24 + FRACTION - exponent
        x = output
        at = x.ptr + batch.to(tl.int64) * x.b + head.to(tl.int64) * x.h + channels[None, :] * x.d
        packed = tl.load(at, mask=seen, other=1)
        shift = packed >> 32
        half = tl.full(shift.shape, 1, tl.int64) << (shift - 1)
        QMAX: tl.constexpr = 127 if out.ptr.dtype.element_ty == tl.int8 else 32767
        o = tl.minimum(tl.maximum((total * (packed & 0xFFFFFFFF) + half) >> shift, -QMAX), QMAX)
    else:
        x = scales.v
        base = x.ptr + batch.to(tl.int64) * x.b + (head // GROUP).to(tl.int64) * x.h
        s_v = tl.load(base + channels[None, :] * x.d, mask=seen, other=0.0)
        o = total.to(tl.float32) * (s_v * (1.0 / (1 << FRACTION)))
    ptrs = head_base(out, batch, head, zero) + rows[:, None] * out.n + channels[None, :] * out.d
    tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=(rows < nq)[:, None] & seen)
