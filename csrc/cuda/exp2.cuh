// The exponential of docs/numerics.md, section 2, and the constants that convert scores to exponents.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

DEVICE u32 dot_bytes(u32 word, u32 weights, u32 sum) {
  asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(weights));
  return sum;
}
DEVICE u32 add_bytes(u32 word, u32 sum) { return dot_bytes(word, 0x01010101, sum); }

// T = (S << k) C is a score in 2^-32 octave. K0 puts a row's maximum at 14 + 102/256 octaves, where p16 is 65193, and
// rounds the depth below it half up (docs/numerics.md).
constexpr i64 K0 = (14ll << 32) + (102ll << 24) + (1ll << 23) - 1;
constexpr u32 QUADRATIC_OFFSET = 132608;
#ifdef BIAS_FRACTION_BITS
constexpr i32 BIAS_UNIT = 1 << (32 - BIAS_FRACTION_BITS);  // of a bias in T
#endif
constexpr i32 MOST_SUMS = 65536;        // keys of which 32 bits hold the sums of P and of P V
constexpr i64 ABSENT_T = -(1ll << 62);  // T of an absent key, below every other; its p is 0

// The power 2^t as p32 = m << hi, for t = T + B in 2^-32 octave with B = K0 - Tmax.
struct Power {
  u32 m;
  i32 hi;
};

DEVICE Power power(i64 t) {
  u32 u = ((u32)t >> 24) + 256;
  return {u * u + QUADRATIC_OFFSET, (i32)(t >> 32)};
}
DEVICE Power exponential(i32 s, i32 C, i64 B) { return power(multiply_add(s, C, B)); }

// The power of t in 2^-24 octave modulo 2^32. `exp_32bit_limit` tells where this t equals the 64-bit one. The upper
// byte of t holds the octaves, and is at least 32 for t < 0. The fraction takes one instruction in either form; the
// form with DOT runs on the multipliers' pipe.
template <bool DOT>
DEVICE Power power(u32 t) {
  u32 u = DOT ? dot_bytes(t, 0x00010000, 256) : permute(t, 1, 0x5542);
  return {u * u + QUADRATIC_OFFSET, (i32)(t >> 24)};
}

// Returns the largest octave of a row's maximum, rounded up, for which 32 bits hold T + B. This requires that C has no
// bits below 2^-24 octave and that no key lies 238 octaves below the maximum. magnitude: the sum of |q| over the row's
// codes.
DEVICE i32 exp_32bit_limit(i32 C, i32 k, u32 magnitude) {
  const i64 below = (i64)(128 * magnitude) * (C >> 8);  // codes of a key are at most 128 in magnitude
  return k == 0 && (C & 255) == 0 ? (i32)(((238ll << 24) - below) >> 24) : NO_SCORE;
}
DEVICE i32 octave_above(i64 t) { return (i32)((t + 0xFFFFFFFFll) >> 32); }
DEVICE i32 octave_above(i32 s, i32 C) { return (i32)(multiply_add(s, C, 0xFFFFFFFFll) >> 32); }

// Adds the magnitudes of four codes to `sum`.
DEVICE u32 add_magnitudes(u32 word, u32 sum) {
  u32 signs = permute(word, word, 0xBA98) | 0x01010101;  // 1 or -1 in each byte
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(signs));
  return sum;
}

// Packs four p8 of a row into a word. One addition rounds two of them: bits below 2^7 of their upper halves do not
// matter, and the largest p8 is 255, so that nothing carries out of a half.
DEVICE u32 four_p8(const Power (&x)[4]) {
  u32 a = permute(shift_left(x[0].m, x[0].hi), shift_left(x[1].m, x[1].hi), 0x7632) + 0x00800080;
  u32 b = permute(shift_left(x[2].m, x[2].hi), shift_left(x[3].m, x[3].hi), 0x7632) + 0x00800080;
  return permute(a, b, 0x7531);
}

DEVICE u32 rounded_p32(const Power& x) { return x.m * shift_left(1, x.hi) + (1 << 15); }

// Packs four p16 of a row: their high bytes into one word and their low bytes into another.
DEVICE void four_p16(const Power (&x)[4], u32& high, u32& low) {
  u32 a = permute(rounded_p32(x[0]), rounded_p32(x[1]), 0x6273);
  u32 b = permute(rounded_p32(x[2]), rounded_p32(x[3]), 0x6273);
  high = permute(a, b, 0x5410);
  low = permute(a, b, 0x7632);
}

// Computes four p of a row from four scores, in one digit (P8) or two (P16). C and B have 64 bits in 2^-32 octave or 32
// bits in 2^-24 octave.
template <int DIGITS>
DEVICE void four_p(const Power (&x)[4], u32 (&p)[DIGITS]) {
  if constexpr (DIGITS == 1)
    p[0] = four_p8(x);
  else
    four_p16(x, p[0], p[1]);
}
template <int DIGITS>
DEVICE void four_p(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B, u32 (&p)[DIGITS]) {
  four_p({exponential(s0, C, B), exponential(s1, C, B), exponential(s2, C, B), exponential(s3, C, B)}, p);
}
// DOTS: how many of the four take their fraction on the multipliers' pipe; the values in use were measured to be
// fastest.
template <int DOTS, int DIGITS>
DEVICE void four_p(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, u32 B, u32 (&p)[DIGITS]) {
  four_p({power<(DOTS > 0)>(s0 * C + B), power<(DOTS > 2)>(s1 * C + B), power<(DOTS > 1)>(s2 * C + B),
          power<(DOTS > 3)>(s3 * C + B)},
         p);
}

// The score constants C and k of a row.
struct Score {
  i32 C, k;
};

DEVICE Score unpack_score(i64 packed) { return {(i32)packed, (i32)(packed >> 32)}; }

// The unit in which T counts; see numerics.exp.ScoreUnit.
struct Octaves {
  static constexpr i32 SIXTEENTHS = 16, LEAST_COARSE = -14, FRACTION_BITS = 32;
};
struct TableSteps {
  static constexpr i32 SIXTEENTHS = 7, LEAST_COARSE = -16, FRACTION_BITS = 30;
};

// Computes numerics.exp.exponent_constants in float64, in the same order of operations and with the same saturations.
template <class Unit = Octaves>
DEVICE Score score_constants(float q_scale, float k_scale, double sm_scale) {
  double c = ((double)q_scale * (double)k_scale) * sm_scale * 1.4426950408889634;
  c = (c < 64.0 ? c : 64.0) * (Unit::SIXTEENTHS / 16.0);
  i32 exponent = (i32)((__double_as_longlong(c) >> 52) & 2047) - 1022;
  i32 k = c < 0.5 ? 0 : exponent + 1;
  i32 zeros = exponent <= Unit::LEAST_COARSE ? 32 - Unit::FRACTION_BITS : 8;  // fraction bits that are dropped
  u32 C = (u32)__double2ll_rn(c * __longlong_as_double((i64)(32 - zeros + 1023) << 52)) << (zeros - k);
  return {(i32)min(C, 0x7FFFFF00u), k};
}
