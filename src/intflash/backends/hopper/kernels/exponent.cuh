// The exponential of docs/numerics.md, section 2, and the constants of a call.
#pragma once
#include "base.cuh"

constexpr i64 K0 = (14ll << 32) + (102ll << 24) + (1ll << 23) - 1;
constexpr u32 QUADRATIC_OFFSET = 132608;

// One IMAD.WIDE: of the spellings tried, this pair alone is fused into it (C++ widens first, mad.wide adds apart).
DEVICE i64 multiply_add(i32 a, i32 b, i64 c) {
    i64 d;
    asm("{.reg .u32 l, h; mov.b64 {l, h}, %3; mad.lo.cc.s32 l, %1, %2, l; madc.hi.s32 h, %1, %2, h; mov.b64 %0, {l, h};}"
        : "=l"(d) : "r"(a), "r"(b), "l"(c));
    return d;
}

// p32 plus `half`: t = s * C + B in 2^-32 octave; B = K0 - Tmax.
DEVICE u32 exponential(i32 s, i32 C, i64 B, u32 half) {
    i64 t = multiply_add(s, C, B);
    u32 u = ((u32)t >> 24) + 256;
    u32 power;  // 2^hi; shl clamps: 0 for hi < 0
    asm("shl.b32 %0, 1, %1;" : "=r"(power) : "r"((i32)(t >> 32)));
    return (u * u + QUADRATIC_OFFSET) * power + half;
}

DEVICE u32 add_bytes(u32 word, u32 sum) {
    asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0x01010101));
    return sum;
}

// Four p8 of a row, in the bytes of a word.
DEVICE u32 four_p8(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B) {
    constexpr u32 half = 1 << 23;
    u32 a = permute(exponential(s0, C, B, half), exponential(s1, C, B, half), 0x0073);
    u32 b = permute(exponential(s2, C, B, half), exponential(s3, C, B, half), 0x0073);
    return permute(a, b, 0x5410);
}

// Four p16 of a row: their high bytes and their low bytes.
DEVICE void four_p16(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B, u32& high, u32& low) {
    constexpr u32 half = 1 << 15;
    u32 a = permute(exponential(s0, C, B, half), exponential(s1, C, B, half), 0x6273);
    u32 b = permute(exponential(s2, C, B, half), exponential(s3, C, B, half), 0x6273);
    high = permute(a, b, 0x5410);
    low = permute(a, b, 0x7632);
}

// C and k of a row.
struct Score {
    i32 C, k;
};

DEVICE Score unpack_score(i64 packed) { return {(i32)packed, (i32)(packed >> 32)}; }

// numerics.exp.exponent_constants: float64, in its order, with its saturations.
DEVICE Score score_constants(float q_scale, float k_scale, double sm_scale) {
    double c = ((double)q_scale * (double)k_scale) * sm_scale * 1.4426950408889634;
    c = c < 64.0 ? c : 64.0;
    i32 exponent = (i32)((__double_as_longlong(c) >> 52) & 2047) - 1022;
    i32 k = c < 0.5 ? 0 : exponent + 1;
    i64 C = __double2ll_rn(c * __longlong_as_double((i64)(32 - k + 1023) << 52));
    return {(i32)(C < 2147483647 ? C : 2147483647), k};
}
