// The integer steps of intflash and intflash_p8 (docs/numerics.md): depth -> p, and the output epilogue.
// Integer instructions only: mul, mulhu and selects; no divide, whose library form for 64 bits would branch per thread.
#pragma once
#include "kernel_args.h"
#include "simt.h"

#ifndef P_BITS
#define P_BITS 16       // 16: intflash; 8: intflash_p8
#endif
#ifndef OUT_BITS
#define OUT_BITS 8      // 8, 16: codes; 64: the raw accumulator and row_stats_t, for float output and log-sum-exp
#endif
#ifndef WIDE
#define WIDE 0          // 1: depth_shift is 12 or 13, more than a pre-shifted query may carry
#endif
#ifndef LONG
#define LONG 0          // 1: sums of p * V may pass 32 bits: intflash with more than FLUSH_KEYS keys
#endif
#ifndef OUT_WIDE
#define OUT_WIDE 0      // 1: some column's s_V / s_O is 2^22 or more, its shift below 33
#endif

static constexpr uint32_t DEAD_DEPTH = 7373;    // Q.9 octaves: 3687 after rounding to Q.8, where t turns negative: p = 0
static constexpr uint32_t FLUSH_KEYS = 256;     // 65193 * 127 * 256 < 2^31: so many keys fit an int32 sum

static inline uint32_t mulhu(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

// The call's constants, read once: a store to local memory could alias the arguments and force a reload.
struct Depth {
  uint32_t multiplier;
  uint32_t shift;

  explicit Depth(const kernel_args_t* arg) : multiplier(arg->depth_multiplier), shift(arg->depth_shift) {}

  // How far a query (or a score) is shifted before the maximum is taken; the depth then needs no shift per score.
  // |s| <= 64 * 127^2 < 2^20, so a shift by up to 11 stays inside int32 and the difference inside uint32.
  uint32_t query_shift() const { return WIDE ? 0 : shift; }

  // Depth below the maximum in Q.9 octaves, floored: (Tmax - T) >> 23. `s` and `s_max` carry query_shift.
  uint32_t of(int32_t s_max, int32_t s) const {
    uint32_t d = static_cast<uint32_t>(s_max) - static_cast<uint32_t>(s);
#if WIDE
    // At least 4 octaves per score unit: four units are already past DEAD_DEPTH, and d << shift must not wrap.
    d = static_cast<uint32_t>(select(d > 3, 4, static_cast<int32_t>(d))) << shift;
#endif
    return mulhu(d, multiplier);
  }
};

static inline int32_t shift_left(int32_t x, uint32_t shift) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) << shift);
}

// p16 = ((m << hi) + 2^15) >> 16 or p8 = ((m << hi) + 2^23) >> 24, with m = u*u + 132608.
// x = (depth + 1) >> 1 is the depth rounded to Q.8 and t = 3686 - x = 256 hi + f: so hi = 14 - ((x + 153) >> 8) and
// u = 256 + f = 511 - ((x + 153) & 255). The added 1 * 256 or 9 * 256 is the constant part of the right shift by
// 15 - hi or 23 - hi; the last bit of the shift rounds.
static inline uint32_t p_of_depth(uint32_t depth) {
  constexpr uint32_t OFFSET = 153 + (P_BITS == 16 ? 1 : 9) * 256;
  const uint32_t y = (depth + 1 + 2 * OFFSET) >> 1;
  const uint32_t u = (y & 255) ^ 511;
  const uint32_t m = u * u + 132608;                 // < 2^19
  const uint32_t p = ((m >> ((y >> 8) & 31)) + 1) >> 1;
  return keep_if(depth < DEAD_DEPTH, p);
}

static inline uint32_t clz32(uint32_t x) {
  uint32_t zeros = 0;
  for (uint32_t step = 16; step > 0; step >>= 1) {
    const uint32_t shift = keep_if(x < (1u << (32 - step)), step);
    x <<= shift;
    zeros += shift;
  }
  return zeros;
}

static inline int32_t mulh(int32_t a, int32_t b) {
  return static_cast<int32_t>((static_cast<int64_t>(a) * b) >> 32);
}

// floor(2^55 / divisor), 2^31 <= divisor < 2^32, exact: a 32-bit division, one Newton step, one correction each way.
static inline uint32_t reciprocal55(uint32_t divisor) {
  const uint32_t estimate = 0xffffffffu / (divisor >> 16);             // 2^48 / divisor, -1 .. +4; at most 2^17
  const int64_t error = (1ll << 48) - static_cast<int64_t>(static_cast<uint64_t>(estimate) * divisor);    // < 2^35
  // 2^7 * error / divisor = error * (2^48 / divisor) / 2^41; its floor and the estimate leave r off by one at most
  uint32_t r = (estimate << 7) + static_cast<uint32_t>(mulh(static_cast<int32_t>(error >> 4), static_cast<int32_t>(estimate)) >> 5);
  int64_t rest = (1ll << 55) - static_cast<int64_t>(static_cast<uint64_t>(r) * divisor);
  const uint32_t below = mask_of(rest < 0);
  r += below;
  rest += below & divisor;
  return r + (rest >= static_cast<int64_t>(divisor));
}

// The row's part of the output scale: R = floor(2^55 / (l << lz)).
struct RowScale {
  uint32_t reciprocal;
  uint32_t leading_zeros;
};

static inline RowScale row_scale(uint32_t l) {
  const uint32_t lz = clz32(l);
  return {reciprocal55(l << lz), lz};
}

#if OUT_WIDE
// x >> shift for 0 <= shift < 63: the compiler's own form of a variable 64-bit shift branches on shift >= 32.
static inline int64_t shift_right64(int64_t x, uint32_t shift) {
  const int32_t hi = static_cast<int32_t>(x >> 32);
  const uint32_t lo = static_cast<uint32_t>(x);
  const uint32_t s = shift & 31;
  const int32_t near_hi = hi >> s;
  const uint32_t near_lo = (lo >> s) | ((static_cast<uint32_t>(hi) << 1) << (31 - s));
  const bool far = shift > 31;
  const uint32_t out_lo = static_cast<uint32_t>(select(far, near_hi, static_cast<int32_t>(near_lo)));
  const int32_t out_hi = select(far, hi >> 31, near_hi);
  return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(out_hi)) << 32) | out_lo);
}
#endif

// x << shift for 0 <= shift < 32.
static inline int64_t shift_left64(int64_t x, uint32_t shift) {
  const uint32_t lo = static_cast<uint32_t>(x);
  const uint32_t hi = (static_cast<uint32_t>(x >> 32) << shift) | ((lo >> 1) >> (31 - shift));
  return static_cast<int64_t>((static_cast<uint64_t>(hi) << 32) | (lo << shift));
}

// clamp((acc * RR + 2^(sh-1)) >> sh), sh = 55 - lz - e. Taking lz into acc, which |acc| <= 127 l allows, leaves a shift by
// 55 - e of a product below 2^63, and past 33 only the product's high word counts.
static inline int32_t scaled_output(int64_t acc, RowScale row, output_multiplier_t column, int32_t q_max) {
  const uint32_t rr = static_cast<uint32_t>((static_cast<uint64_t>(row.reciprocal) * column.multiplier + (1u << 23)) >> 24);
  const uint32_t shift = 55 - static_cast<uint32_t>(column.exponent);
  const int64_t x = shift_left64(acc, row.leading_zeros);
#if OUT_WIDE
  const int64_t wide = (shift_right64(x * static_cast<int64_t>(rr), shift - 1) + 1) >> 1;
  const int32_t hi = static_cast<int32_t>(wide >> 32);
  const int32_t lo = static_cast<int32_t>(wide);
  const int32_t rounded = select(hi == (lo >> 31), lo, (hi >> 31) ^ 0x7fffffff);
#else
  const uint32_t hi = static_cast<uint32_t>(x >> 32) * rr + mulhu(static_cast<uint32_t>(x), rr);
  const int32_t rounded = ((static_cast<int32_t>(hi) >> (shift - 33)) + 1) >> 1;
#endif
  return imax(imin(rounded, q_max), -q_max);
}

// Writes `count` columns of one row from `column` on, four int8 codes a word; acc[i * STRIDE] counts V's codes in
// column + i, not yet divided by l. A loop with its sums in memory: unrolled, its code would not pay its way into the cache.
template <uint32_t HEAD, uint32_t STRIDE, typename Acc>
static inline void store_columns(const kernel_args_t* arg, uint32_t row, uint32_t column, uint32_t count, const Acc* acc,
                                 uint32_t l) {
#if OUT_BITS == 64
  int64_t* out = pointer<int64_t>(arg->o_addr) + row * HEAD + column;
  for (uint32_t c = 0; c < count; ++c) out[c] = acc[c * STRIDE];
#else
  const output_multiplier_t* columns = pointer<const output_multiplier_t>(arg->multiplier_addr) + column;
  uint32_t* out = pointer<uint32_t>(arg->o_addr) + (row * HEAD + column) * OUT_BITS / 32;
  const RowScale scale = row_scale(l);
  const int32_t q_max = arg->q_max;
#pragma GCC unroll 1
  for (uint32_t c = 0; c < count; c += 32 / OUT_BITS) {
    uint32_t word = 0;
#pragma GCC unroll 1
    for (uint32_t i = 0; i < 32; i += OUT_BITS) {
      const int32_t code = scaled_output(*acc, scale, *columns, q_max);
      word |= (static_cast<uint32_t>(code) & ((1u << OUT_BITS) - 1)) << i;
      acc += STRIDE;
      ++columns;
    }
    *out++ = word;
  }
#endif
}

static inline void store_stats(const kernel_args_t* arg, uint32_t row, uint32_t l, int32_t s_max) {
#if OUT_BITS == 64
  pointer<row_stats_t>(arg->stats_addr)[row] = {l, s_max >> Depth(arg).query_shift()};
#else
  (void)arg, (void)row, (void)l, (void)s_max;
#endif
}
