// The exponential of docs/numerics.md, section 2, and the constants of a call.
#pragma once
#include "base.cuh"

constexpr i64 K0 = (14ll << 32) + (102ll << 24) + (1ll << 23) - 1;
constexpr u32 QUADRATIC_OFFSET = 132608;

// p32 as m << hi of t = T + B in 2^-32 octave; B = K0 - Tmax.
struct Power {
    u32 m;
    i32 hi;
};

DEVICE Power power(i64 t) {
    u32 u = ((u32)t >> 24) + 256;
    return {u * u + QUADRATIC_OFFSET, (i32)(t >> 32)};
}
DEVICE Power exponential(i32 s, i32 C, i64 B) { return power(multiply_add(s, C, B)); }

// x << by; 0 for by < 0: PTX's shl clamps.
DEVICE u32 shift_left(u32 x, i32 by) {
    u32 r;
    asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(by));
    return r;
}

DEVICE u32 add_bytes(u32 word, u32 sum) {
    asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0x01010101));
    return sum;
}

// Four p8 of a row, in the bytes of a word. Two are rounded in one addition: below 2^7 of their upper halves nothing
// decides, and 255 is the largest p8, so nothing is carried out of a half.
DEVICE u32 four_p8(const Power (&x)[4]) {
    u32 a = permute(shift_left(x[0].m, x[0].hi), shift_left(x[1].m, x[1].hi), 0x7632) + 0x00800080;
    u32 b = permute(shift_left(x[2].m, x[2].hi), shift_left(x[3].m, x[3].hi), 0x7632) + 0x00800080;
    return permute(a, b, 0x7531);
}
DEVICE u32 four_p8(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B) {
    return four_p8({exponential(s0, C, B), exponential(s1, C, B), exponential(s2, C, B), exponential(s3, C, B)});
}

DEVICE u32 rounded_p32(const Power& x) { return x.m * shift_left(1, x.hi) + (1 << 15); }

// Four p16 of a row: their high bytes and their low bytes.
DEVICE void four_p16(const Power (&x)[4], u32& high, u32& low) {
    u32 a = permute(rounded_p32(x[0]), rounded_p32(x[1]), 0x6273);
    u32 b = permute(rounded_p32(x[2]), rounded_p32(x[3]), 0x6273);
    high = permute(a, b, 0x5410);
    low = permute(a, b, 0x7632);
}
DEVICE void four_p16(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B, u32& high, u32& low) {
    four_p16({exponential(s0, C, B), exponential(s1, C, B), exponential(s2, C, B), exponential(s3, C, B)}, high, low);
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
