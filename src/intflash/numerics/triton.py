"""The integer arithmetic of `intflash.numerics` as Triton device functions of the same names.

Every function has one definition of its bits. Where plain Triton compiles to more instructions than the GPU needs, the
same arithmetic is also written as one inline-PTX block of four or two scores. Triton's interpreter runs the plain form
and a GPU the PTX form. Tests compare both with the reference.

Scores are int32; T = (S << k) * C is int64 in 2^-32 of the method's unit, an octave or 256 steps of a table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intflash.numerics import exp, groups

K0 = tl.constexpr(exp.K0)
QUADRATIC_OFFSET = tl.constexpr(exp.QUADRATIC_OFFSET)
ABSENT = tl.constexpr(exp.ABSENT)
INT32_MIN = tl.constexpr(-(1 << 31))
ROUND_BITS = tl.constexpr(0x4B400000)  # the bits of the float32 1.5 * 2^23
INT64_MIN = tl.constexpr(-(1 << 63))
# For `intflash_online`: with TABLE_K0 - e * TABLE_OCTAVE for e octaves, (T + B) >> 24 is the height 1613 - step. The
# octaves and 8 fraction bits of p are 3686 - 16 * step // 7 = 16 * height // 7 = (height * 37450) >> 14.
TABLE_K0 = tl.constexpr((1613 << 24) + (1 << 23) - 1)
TABLE_OCTAVE = tl.constexpr(exp.TABLE_STEPS.octave)
SIXTEEN_SEVENTHS = tl.constexpr(37450)  # in 2^-14, rounded up: exact for heights below 4000
NO_OCTAVE = tl.constexpr(-(1 << 30))  # below every other octave
# Added to an absent key's product |S << k| * C < 2^61, this gives a negative octave, and so p = 0.
NEVER = tl.constexpr(-(1 << 62))
UNSET = tl.constexpr(groups.UNSET)
FAR = tl.constexpr(groups.FAR)
MAX_GAP = tl.constexpr(groups.MAX_GAP)
OUTPUT_SHIFT = tl.constexpr(groups.OUTPUT_SHIFT)
MOST_E = tl.constexpr(exp.OUTPUT_EXPONENTS[1])
P_FRACTION_BITS = tl.constexpr(groups.P_FRACTION_BITS)
# Octaves added to the depth below a group's octave, so that p24 is the high word of (m << 8) * 2^(hi + 16).
GROUP_OCTAVES = tl.constexpr(-groups.LEAST_HI << 32)
# Added to p24 beside what rounds or dithers it: carries into byte 2 where byte 1 is negative, and flips byte 2's sign.
DIGITS_OF_P24 = tl.constexpr(0x808000)

PTX = tl.constexpr(not triton.knobs.runtime.interpret)


def _product_ptx(i: int, lo: str, hi: str) -> str:
    """PTX of score i's T + B. ptxas fuses the pair `mad.lo.cc` and `madc.hi`, and no other form, into one IMAD.WIDE."""
    return f"mov.b64 {{bl, bh}}, $B{i}; mad.lo.cc.s32 {lo}, $S{i}, $C{i}, bl; madc.hi.s32 {hi}, $S{i}, $C{i}, bh;\n"


def _exponent_ptx(result: str, fraction: int = 0) -> str:
    """PTX of four scores: h = hi, m the quadratic with so many fraction bits, an even number, then `result` per score.
    `shl` clamps: 2^hi is 0 when hi < 0.
    """
    unit = 1 << (fraction // 2)
    scaled = f"mad.lo.u32 u, u, {unit}, {256 * unit};" if fraction else "add.u32 u, u, 256;"
    text = ""
    for i in range(4):
        text += _product_ptx(i, "lo", "h") + (
            f"shr.u32 u, lo, 24; {scaled} mad.lo.u32 m, u, u, {exp.QUADRATIC_OFFSET << fraction}; "
            f"{result.format(i=i)}\n"
        )
    return text


def _table_ptx() -> str:
    """PTX of two scores: t as in `_EXP_P8`, from heights of 16 bits.

    The high bytes of the two heights, at most 6, are saturated together. Negative heights, those of absent keys
    included, become less than 256, and p is 0 for heights below 606.
    """
    text = _product_ptx(0, "lo", "h") + _product_ptx(1, "t1", "t0") + "cvt.pack.sat.u8.s32.b32 a, t0, h, 0;\n"
    for i, lo in enumerate(("lo", "t1")):
        text += (
            f"prmt.b32 u, a, {lo}, 0x22{i}7; mul.lo.u32 u, u, {4 * SIXTEEN_SEVENTHS.value};\n"  # octaves in byte 3
            "shr.u32 h, u, 24; shl.b32 h, 1, h; prmt.b32 u, u, 1, 0x5542;\n"  # 256 and the fraction, byte 2
            f"mad.lo.u32 m, u, u, {exp.QUADRATIC_OFFSET}; mad.lo.u32 {lo}, m, h, 0x80800000;\n"
        )
    return text


def _number_operands(text: str, outputs: int, scores: int = 4) -> str:
    for first, kind in enumerate("SCBR"):
        for i in range(scores):
            text = text.replace(f"${kind}{i}", f"${outputs + first * scores + i}")
    return text


_REGISTERS = ".reg .u32 h, lo, u, m, bl, bh, t0, t1, t2, t3, a, b;"
# Adding 2^23 rounds the top byte, and adding 2^31 flips its sign bit, so that the byte is p8 - 128 as a signed code.
_EXP_P8 = tl.constexpr(
    _number_operands(
        "{" + _REGISTERS
        + _exponent_ptx("shl.b32 h, 1, h; mad.lo.u32 t{i}, m, h, 0x80800000;")
        + "prmt.b32 a, t0, t1, 0x0073; prmt.b32 b, t2, t3, 0x0073; prmt.b32 $0, a, b, 0x5410;}",
        outputs=1,
    )
)  # fmt: skip
# Two scores and not four, because two of four would be in another row, and their bytes would be packed a second time
# for the product.
_TABLE_P8 = tl.constexpr(
    _number_operands(
        "{" + _REGISTERS + _table_ptx() + "prmt.b32 a, lo, t1, 0x0073; cvt.u16.u32 $0, a;}", outputs=1, scores=2
    )
)
# p16 in two signed digits, 256 * (high + 128) + low. Adding 2^15 rounds p16, 2^23 carries into the high digit where the
# low one is negative, and 2^31 subtracts 128 from the high digit. The xor flips the low digit's sign bit back.
_EXP_P16 = tl.constexpr(
    _number_operands(
        "{" + _REGISTERS
        + _exponent_ptx("shl.b32 h, 1, h; mad.lo.u32 t{i}, m, h, 0x80808000;")
        + "prmt.b32 a, t0, t1, 0x6273; prmt.b32 b, t2, t3, 0x6273;\n"
        + "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; xor.b32 $1, $1, 0x80808080;}",
        outputs=2,
    )
)  # fmt: skip
# p16 of a group in the same digits: bytes 1 and 2 of p24 + R, where R includes DIGITS_OF_P24. p16 is at most 65193, so
# that byte 2 overflows by its sign alone. The xor flips the low digit's sign bit back.
_GROUP_P16 = tl.constexpr(
    _number_operands(
        "{" + _REGISTERS
        + _exponent_ptx("shl.b32 h, 1, h; mul.hi.u32 t{i}, m, h; add.u32 t{i}, t{i}, $R{i};", groups.P_FRACTION_BITS)
        + "prmt.b32 a, t0, t1, 0x6251; prmt.b32 b, t2, t3, 0x6251;\n"
        + "prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, a, b, 0x5410; xor.b32 $1, $1, 0x80808080;}",
        outputs=2,
    )
)  # fmt: skip
_P8_CONSTRAINTS = tl.constexpr("=&r,r,r,r,r,r,r,r,r,l,l,l,l")
_TABLE_CONSTRAINTS = tl.constexpr("=h,r,r,r,r,l,l")
_P16_CONSTRAINTS = tl.constexpr("=&r,=&r,r,r,r,r,r,r,r,r,l,l,l,l")
_GROUP_CONSTRAINTS = tl.constexpr("=&r,=&r,r,r,r,r,r,r,r,r,l,l,l,l,r,r,r,r")


@triton.jit
def _exponent(s, C, B):
    """2^t as (m, hi): t = s * C + B in 2^-32 octave; 3.018 * 2^(16 + hi) * 2^f, hi < 0 means 0."""
    t = s.to(tl.int64) * C.to(tl.int64) + B
    u = ((t >> 24) & 255).to(tl.int32) + 256
    return u * u + QUADRATIC_OFFSET, (t >> 32).to(tl.int32)


@triton.jit
def _shifted(m, hi):
    """p32 = m << hi (hi <= 14, m < 2^18.6), 0 for hi < 0."""
    return tl.where(hi >= 0, m.to(tl.uint32) << (hi & 31).to(tl.uint32), 0)


@triton.jit
def _signed_digits(p16):
    """(high, low) as int8 with p16 = 256 * (high + 128) + low."""
    return (((p16 + 128) >> 8) - 128).to(tl.int8), (((p16 & 255) ^ 128) - 128).to(tl.int8)


@triton.jit
def exp_p8(s, C, B):
    """P8 of a tile: codes p8 - 128 (int8).

    s: int32 scores already shifted by k; C: int32 multiplier; B: int64, K0 - Tmax (bias added), each
    broadcastable to s. T + B = depth below 14.4 octaves; absent keys have B = NEVER.
    """
    if PTX:
        s, C = tl.broadcast(s, C)
        s, B = tl.broadcast(s, B)
        return tl.inline_asm_elementwise(_EXP_P8, _P8_CONSTRAINTS, [s, C, B], dtype=tl.int8, is_pure=True, pack=4)
    else:
        m, hi = _exponent(s, C, B)
        p8 = (_shifted(m, hi) + (1 << 23)) >> 24
        return (p8.to(tl.int32) - 128).to(tl.int8)


@triton.jit
def exp_p16(s, C, B):
    """P16 of a tile in signed digits (int8, int8): p16 = 256 * (high + 128) + low."""
    if PTX:
        s, C = tl.broadcast(s, C)
        s, B = tl.broadcast(s, B)
        return tl.inline_asm_elementwise(
            _EXP_P16, _P16_CONSTRAINTS, [s, C, B], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        m, hi = _exponent(s, C, B)
        return _signed_digits(((_shifted(m, hi) + (1 << 15)) >> 16).to(tl.int32))


@triton.jit
def group_p16(s, C, B, added):
    """P16 of a group of keys in signed digits as `exp_p16`: floor((p24 + added) / 2^8), p24 being p16 with 8 fraction
    bits. added: int32 in [0, 255], [1, keys]. B = K0 + GROUP_OCTAVES - (e << 32) for the group's octave e (bias added).
    """
    if PTX:
        s, C = tl.broadcast(s, C)
        s, B = tl.broadcast(s, B)
        s, added = tl.broadcast(s, added + DIGITS_OF_P24)
        return tl.inline_asm_elementwise(
            _GROUP_P16, _GROUP_CONSTRAINTS, [s, C, B, added], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        m, hi = _exponent(s, C, B)
        p40 = m.to(tl.int64) << (hi & 31).to(tl.int64)
        p24 = tl.where((hi >= 0) & (hi <= 31), p40 >> (32 - P_FRACTION_BITS), 0).to(tl.int32)
        return _signed_digits((p24 + added) >> P_FRACTION_BITS)


@triton.jit
def octave_above(t):
    """ceil(t / 2^32) as int32 for t in 2^-32 octave, |t| < 2^60 + 2^51; UNSET for NEVER."""
    return tl.maximum(((t + 0xFFFFFFFF) >> 32).to(tl.int32), UNSET)


@triton.jit
def table_p8(s, C, B):
    """P8 of a tile in the steps of `intflash_online`. As `exp_p8`, but with B = TABLE_K0 - e * TABLE_OCTAVE (bias
    added).
    """
    if PTX:
        s, C = tl.broadcast(s, C)
        s, B = tl.broadcast(s, B)
        return tl.inline_asm_elementwise(_TABLE_P8, _TABLE_CONSTRAINTS, [s, C, B], dtype=tl.int8, is_pure=True, pack=2)
    else:
        height = tl.maximum((s.to(tl.int64) * C.to(tl.int64) + B) >> 24, 0).to(tl.int32)
        x = (height * SIXTEEN_SEVENTHS) >> 14
        u = (x & 255) + 256
        p8 = (_shifted(u * u + QUADRATIC_OFFSET, x >> 8) + (1 << 23)) >> 24
        return (p8.to(tl.int32) - 128).to(tl.int8)


@triton.jit
def table_octave(t):
    """ceil(t / TABLE_OCTAVE) as int32, t in 2^-32 of the table's unit, |t| < 2^59; NO_OCTAVE for NEVER.

    x / 7 rounded down is (x * floor(2^33 / 7) + 2^29) >> 33 for every int32 x.
    """
    x = ((t + (TABLE_OCTAVE - 1)) >> 28).to(tl.int32)
    octave = ((x.to(tl.int64) * ((1 << 33) // 7) + (1 << 29)) >> 33).to(tl.int32)
    return tl.where((t >> 32).to(tl.int32) < -(1 << 28), NO_OCTAVE, octave)


@triton.jit
def clz32(x):
    """Leading zeros of a uint32 x > 0, int32."""
    x = x.to(tl.uint32)
    if PTX:
        return tl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        n = tl.zeros_like(x).to(tl.int32)
        for i in tl.static_range(5):
            small = (x >> (32 - (16 >> i))) == 0
            n = tl.where(small, n + (16 >> i), n)
            x = tl.where(small, x << (16 >> i), x)
        return n


@triton.jit
def reciprocal_2_55(d):
    """floor(2^55 / d) for d in [2^31, 2^32) (uint32), as uint32 in (2^23, 2^24]: integer Newton, exact.

    r approximates 2^62 / d (Q30 of 2^32 / d, in (1, 2]): a linear start (error 1/17), three Newton steps
    r <- r (2 - y r) with y = d / 2^32, then the remainder decides the last unit.
    """
    r = tl.full(d.shape, 3031741621, tl.uint32) - tl.umulhi(d, tl.full(d.shape, 2021161081, tl.uint32))
    for _ in tl.static_range(3):
        error = tl.full(d.shape, 1 << 31, tl.uint32) - tl.umulhi(d, r)
        r = tl.umulhi(r, error) << 2
    quotient = r >> 7
    remainder = (1 << 55) - quotient.to(tl.int64) * d.to(tl.int64)
    quotient = tl.where(remainder < 0, quotient - 1, quotient)
    quotient = tl.where(remainder >= d.to(tl.int64), quotient + 1, quotient)
    return quotient


_REQUANTIZE = tl.constexpr(
    "{.reg .u32 lo, hi, bl, bh; .reg .b64 t; mov.b64 {bl, bh}, $3; mad.lo.cc.s32 lo, $1, $2, bl; "
    "madc.hi.s32 hi, $1, $2, bh; mov.b64 t, {lo, hi}; shr.s64 t, t, $4; cvt.u32.u64 $0, t;}"
)


@triton.jit
def _scaled(acc, factor, half, sh):
    """(acc * factor + half) >> sh, low 32 bits; |acc * factor| < 2^62, factor < 2^25."""
    if PTX and acc.dtype == tl.int32:
        acc, factor = tl.broadcast(acc, factor)
        return tl.inline_asm_elementwise(
            _REQUANTIZE, "=r,r,r,l,r", [acc, factor, half, sh], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((acc.to(tl.int64) * factor.to(tl.int64) + half) >> sh.to(tl.int64)).to(tl.int32)


@triton.jit
def requantize(acc, l, Mr, e, QMAX: tl.constexpr, WIDE: tl.constexpr, gap=None):
    """Returns clamp(round(acc / l * s_V / s_O), -QMAX, QMAX) for acc [rows, channels] and l [rows]; 0 where l is 0.

    (Mr, e): s_V / s_O = Mr * 2^(e - 24), scalars or [1, channels]. R = floor(2^55 / (l << lz)). |acc| <= 127 l, so that
    |acc * RR| < 2^62 (docs/numerics.md, "The output"). A row without keys has acc = 0. WIDE: e may be above 23, where
    127 * 2^e exceeds 32 bits before the clamp. gap [rows]: octaves by which l's unit is above that of acc (int64).
    """
    l = tl.where(l == 0, 1, l).to(tl.uint32)
    lz = clz32(l)
    R = reciprocal_2_55(l << lz.to(tl.uint32))
    factor = ((R.to(tl.int64)[:, None] * Mr.to(tl.int64) + (1 << 23)) >> 24).to(tl.int32)
    if gap is not None:
        sh = 55 - lz[:, None] + gap[:, None] - tl.minimum(e, MOST_E + gap[:, None])
        before = tl.minimum(sh - 1, 63).to(tl.int64)
        out = ((acc * factor.to(tl.int64) >> before) + 1) >> 1
        return tl.minimum(tl.maximum(out, -QMAX), QMAX).to(tl.int32)
    sh = 55 - lz[:, None] - e
    half = tl.full(sh.shape, 1, tl.int64) << (sh - 1).to(tl.int64)
    if WIDE:
        out = (acc.to(tl.int64) * factor.to(tl.int64) + half) >> sh.to(tl.int64)
    else:
        out = _scaled(acc, factor, half, sh)
    return tl.minimum(tl.maximum(out, -QMAX), QMAX).to(tl.int32)


@triton.jit
def dequantize(acc, l, v_scale, gap=None):
    """float32(acc) * (s_V / float32(l)), each step rounded once; v_scale a scalar or [1, channels]. gap: see
    `requantize`.
    """
    # by way of int64, because l is a uint32, and rounded once
    l = tl.where(l == 0, 1, l).to(tl.uint32).to(tl.int64).to(tl.float32)
    if v_scale.shape == []:
        factor = tl.div_rn(tl.full(l.shape, 1.0, tl.float32) * v_scale, l)[:, None]
    else:
        shape: tl.constexpr = [l.shape[0], v_scale.shape[1]]
        factor = tl.div_rn(tl.broadcast_to(v_scale, shape), tl.broadcast_to(l[:, None], shape))
    if gap is not None:
        factor *= ((127 - gap) << 23).to(tl.float32, bitcast=True)[:, None]
    return acc.to(tl.float32) * factor


@triton.jit
def quantize(x, inv):
    """Quantizes floats: the exact product x * inv is rounded once, half to even, and clamped to +-127.

    Adding 1.5 * 2^23 (1.5 * 2^52) moves the rounded integer into the low bits of the float. The clamp comes before
    these bits are taken, so that values outside a static scale's range saturate. On a GPU the bits are clamped as
    integers, which are ordered as the floats are, because ptxas 12.8 to 13.0 converts a float to an integer where PTX
    stores the low byte of its register.
    """
    if PTX:
        y = tl.fma(x.to(tl.float32), inv, tl.full(x.shape, 12582912.0, tl.float32)).to(tl.int32, bitcast=True)
        return tl.minimum(tl.maximum(y, ROUND_BITS - 127), ROUND_BITS + 127).to(tl.int8)
    else:  # the interpreter's fma rounds twice; 24 x 24 bits are exact in float64
        y = x.to(tl.float64) * inv.to(tl.float64)
        y = tl.minimum(tl.maximum(y, -127.0), 127.0) + 6755399441055744.0
        return y.to(tl.int64, bitcast=True).to(tl.int8)
