// The epilogue: converts accumulators to the output, acc / l * s_V / s_O in integers or acc * (s_V / l) in float32.
// A kernel loads OutputConstants, computes a RowScale for each row from its row sum (`row_scales`), and packs its
// accumulators with `output_words` or `store_outputs`.
#pragma once
#include "params.cuh"
#include "quantize.cuh"

// Returns 64 floor(2^55 / d) for d in [2^31, 2^32). A linear estimate and three Newton steps end at most 5 below 2^61 /
// d and never above it; the remainder then decides the last unit. The term added in the lowest word saves clearing that
// word. SMALL: the lowest 8 bits of d are 0, so that 32 bits hold the remainder.
template <bool SMALL>
DEVICE i32 reciprocal_2_61(u32 d) {
  i32 r = 1515870810 - (i32)__umulhi(d, 1010580540u);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 product = __umulhi(d, r);
    r = (i32)(multiply_add(r, -8 * (i32)(product + 2), ((i64)r << 32) + product) >> 32);
  }
  const u32 whole = r & ~63;
  const bool more = SMALL ? 0u - whole * (d >> 8) >= d >> 2 : (1ull << 61) - (u64)whole * d >= (u64)d << 6;
  return more ? whole + 64 : whole;
}

// Returns the number of leading zeros of x, and -1 for x = 0.
DEVICE i32 leading_zeros(u32 x) {
  i32 zeros;
  asm("bfind.shiftamt.u32 %0, %1;" : "=r"(zeros) : "r"(x));  // clz would take two instructions
  return zeros;
}

template <int QMAX>
DEVICE i32 clamped(i64 x) {
  x = x < -QMAX ? -QMAX : x;
  return (i32)(x > QMAX ? QMAX : x);
}
template <int QMAX>
DEVICE i32 clamped(i32 x) {
  return max(min(x, QMAX), -QMAX);
}

// The two accumulators of P16, acc = 256 high + low. P8 has one i32.
struct P16Accumulator {
  i32 high, low;
};

// The same where neither sum is above 2^24 in magnitude, so that float32 holds both: always of at most 512 keys,
// because 255 * 128 * 512 < 2^24.
struct SmallP16Accumulator : P16Accumulator {};

// The accumulator of a P of one digit or two. SMALL: of small sums, see above.
template <int DIGITS, bool SMALL = false>
struct AccumulatorOf {
  typedef i32 Type;
};
template <>
struct AccumulatorOf<2, false> {
  typedef P16Accumulator Type;
};
template <>
struct AccumulatorOf<2, true> {
  typedef SmallP16Accumulator Type;
};

// 256 high + low of the sums of P's digits.
template <int DIGITS>
DEVICE u32 combine_digits(const u32 (&sums)[DIGITS]) {
  return DIGITS == 1 ? sums[0] : (sums[0] << 8) + sums[DIGITS - 1];
}

// How a row's accumulators become integer output: out = clamp((acc * factor + half) >> shift), half = 2^(shift - 1).
struct Normalizer {
  i32 factor, shift;
};

// Whether s_V / s_O < 2^23, where 127 * 2^e fits in 32 bits before the clamp.
DEVICE bool fits_32_bits(i64 packed_output) { return (i32)(packed_output >> 32) <= 23; }

// Whether s_V / s_O < 16. `normalizer` then makes `shift` so large that the output depends on a product's high word
// alone.
DEVICE bool high_word_suffices(i64 packed_output) { return (i32)(packed_output >> 32) <= 4; }

// l: the row sum, below 2^24 for P8. A row without keys has l = 0 and acc = 0, so that its output is 0 with any factor.
template <typename ACC>
DEVICE Normalizer normalizer(u32 l, i64 packed_output) {
  constexpr bool P8 = sizeof(ACC) == 4;
  const i32 lz = leading_zeros(l), e = (i32)(packed_output >> 32), shift = 55 - lz - e;
  const i32 least = high_word_suffices(packed_output) ? (P8 ? 33 : 40) : 0;
  const i32 R = reciprocal_2_61<P8>(shift_left(l, lz)), Mr = (i32)packed_output;  // R counts in 1 / 64
  const i32 factor = (i32)(multiply_add(R, 4 * Mr, 1ll << 31) >> 32);
  return {factor << max(least - shift, 0), max(shift, least)};
}

DEVICE i64 half_of(const Normalizer& n) { return 1ll << (n.shift - 1); }
DEVICE i64 scaled(i32 acc, const Normalizer& n) { return multiply_add(acc, n.factor, half_of(n)) >> n.shift; }
// Computes floor((256 high + low) / 2^shift) through floor(low / 2^8), which has the same bits and needs 32-bit
// products only.
DEVICE i64 scaled(P16Accumulator acc, const Normalizer& n) {
  return multiply_add(acc.high, n.factor, multiply_add(acc.low, n.factor, half_of(n)) >> 8) >> (n.shift - 8);
}
// The same from the high words of the products, where `high_word_suffices`.
DEVICE i64 half_in_high_word(const Normalizer& n) { return (i64)(1 << (n.shift - 33)) << 32; }
DEVICE i32 scaled_by_high_word(i32 acc, const Normalizer& n) {
  return (i32)(multiply_add(acc, n.factor, half_in_high_word(n)) >> 32) >> (n.shift - 32);
}
DEVICE i32 scaled_by_high_word(P16Accumulator acc, const Normalizer& n) {
  i64 low = multiply_add(acc.low, n.factor, half_in_high_word(n)) >> 8;
  return (i32)(multiply_add(acc.high, n.factor, low) >> 32) >> (n.shift - 40);
}

DEVICE float row_factor(u32 l, float v_scale) { return __fdiv_rn(v_scale, __uint2float_rn(l ? l : 1)); }
DEVICE float as_float(i32 acc) { return __int2float_rn(acc); }
// 2^24 times the upper bits and the lower 24, each exact in float32, so that their sum is rounded once. GPUs convert 64
// bits at a lower rate. |high| + |low| / 256 < 2^31.
DEVICE float as_float(P16Accumulator acc) {
  const i32 upper = (acc.high + (acc.low >> 8)) >> 16;
  const u32 lower = (((u32)acc.high << 8) + acc.low) & 0xFFFFFF;
  return __fmaf_rn(__int2float_rn(upper), 16777216.0f, __uint2float_rn(lower));
}
DEVICE float as_float(SmallP16Accumulator acc) {
  return __fmaf_rn(__int2float_rn(acc.high), 256.0f, __int2float_rn(acc.low));
}

DEVICE u32 pack_pair(float a, float b, half_t) {
  u32 w;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
  return w;
}
DEVICE u32 pack_pair(float a, float b, bfloat_t) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
  return w;
}

template <int WORDS>
DEVICE void store_words(u8* to, const u32 (&w)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) ((uint4*)to)[i / 4] = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
  } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) ((uint2*)to)[i / 2] = make_uint2(w[i], w[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) ((u32*)to)[i] = w[i];
  }
}

template <typename T>
struct IsInteger {
  static constexpr bool value = false;
};
template <>
struct IsInteger<i8> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<i16> {
  static constexpr bool value = true;
};

// The output constants of a head. A CTA reads them once.
struct OutputConstants {
  i64 packed;
  float v_scale;
};

template <typename TO>
DEVICE OutputConstants load_output_constants(const Params& p, u32 batch, u32 head, u32 kv_head) {
  OutputConstants s{0, 0.0f};
  if constexpr (IsInteger<TO>::value)
    s.packed = ((const i64*)p.output.ptr)[head_offset(p.output, batch, head)];
  else
    s.v_scale = ((const float*)p.v_scale.ptr)[head_offset(p.v_scale, batch, kv_head)];
  return s;
}

// The factor of a row's outputs.
template <typename TO, typename ACC>
struct RowScale {
  Normalizer n;
  float factor;

  RowScale() = default;
  DEVICE RowScale(u32 l, const OutputConstants& s) {
    if constexpr (IsInteger<TO>::value)
      n = normalizer<ACC>(l, s.packed);
    else
      factor = row_factor(l, s.v_scale);
  }
};

// The lanes of a quad need the scales of the same two rows. Each lane computes the scale of one of them, and the quad
// exchanges them. Returns whether this lane computes the second.
DEVICE bool computes_second_row() { return threadIdx.x & 1; }

// l: the sum of the row whose scale this lane computes. N is 2, or 1 where a lane has one row only.
template <typename TO, typename ACC, int N>
DEVICE void row_scales(u32 l, const OutputConstants& s, RowScale<TO, ACC> (&rows)[N]) {
  rows[0] = RowScale<TO, ACC>(l, s);
  if constexpr (N > 1) {
    const RowScale<TO, ACC> own = rows[0];
#pragma unroll
    for (int h = 0; h < N; ++h) {
      if constexpr (IsInteger<TO>::value)
        rows[h].n = {__shfl_sync(~0u, own.n.factor, h, N), __shfl_sync(~0u, own.n.shift, h, N)};
      else
        rows[h].factor = __shfl_sync(~0u, own.factor, h, N);
    }
  }
}

// Packs COUNT adjacent outputs of each of N rows into words.
template <typename TO, typename ACC, int COUNT>
struct OutputPacker {
  static constexpr int WORDS = COUNT * sizeof(TO) / 4;

  static DEVICE void floats(const ACC (&acc)[COUNT], float factor, u32 (&w)[WORDS]) {
    if constexpr (sizeof(TO) == 4) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) w[i] = __float_as_uint(as_float(acc[i]) * factor);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i += 2)
        w[i / 2] = pack_pair(as_float(acc[i]) * factor, as_float(acc[i + 1]) * factor, TO{});
    }
  }
  enum Form { HIGH_WORD, NARROW, FULL };  // the form in which a product is shifted and clamped
  template <int N>
  static DEVICE void integers(const ACC (&acc)[N][COUNT], const RowScale<TO, ACC> (&rows)[N], i64 packed_output,
                              u32 (&w)[N][WORDS]) {
    if (sizeof(TO) == 1 && high_word_suffices(packed_output))
      integers_as<HIGH_WORD>(acc, rows, w);
    else if (fits_32_bits(packed_output))
      integers_as<NARROW>(acc, rows, w);
    else
      integers_as<FULL>(acc, rows, w);
  }
  template <Form FORM, int N>
  static DEVICE void integers_as(const ACC (&acc)[N][COUNT], const RowScale<TO, ACC> (&rows)[N], u32 (&w)[N][WORDS]) {
    constexpr int QMAX = sizeof(TO) == 1 ? 127 : 32767;
    i32 o[N][COUNT], lowest = 0;
#pragma unroll
    for (int i = 0; i < N * COUNT; ++i) {
      const Normalizer& n = rows[i / COUNT].n;
      const ACC& x = acc[i / COUNT][i % COUNT];
      i32& out = o[i / COUNT][i % COUNT];
      if constexpr (FORM == HIGH_WORD)
        lowest = min(lowest, out = scaled_by_high_word(x, n));  // the pack saturates from above
      else if constexpr (FORM == NARROW)
        out = clamped<QMAX>((i32)scaled(x, n));
      else
        out = clamped<QMAX>(scaled(x, n));
    }
    if (FORM == HIGH_WORD && lowest < -QMAX) {  // rare, and the test takes half the instructions of clamping
#pragma unroll
      for (int i = 0; i < N * COUNT; ++i) o[i / COUNT][i % COUNT] = max(o[i / COUNT][i % COUNT], -QMAX);
    }
#pragma unroll
    for (int r = 0; r < N; ++r) pack(o[r], w[r]);
  }
  static DEVICE void pack(const i32 (&o)[COUNT], u32 (&w)[WORDS]) {
    if constexpr (sizeof(TO) == 1) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) w[i / 4] = pack_bytes(o[i], o[i + 1], o[i + 2], o[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i += 2) w[i / 2] = permute(o[i], o[i + 1], 0x5410);
    }
  }
};

template <typename TO, typename ACC, int N, int COUNT, int WORDS>
DEVICE void output_words(const ACC (&acc)[N][COUNT], const RowScale<TO, ACC> (&rows)[N], const OutputConstants& s,
                         u32 (&w)[N][WORDS]) {
  if constexpr (IsInteger<TO>::value) {
    OutputPacker<TO, ACC, COUNT>::integers(acc, rows, s.packed, w);
  } else {
#pragma unroll
    for (int r = 0; r < N; ++r) OutputPacker<TO, ACC, COUNT>::floats(acc[r], rows[r].factor, w[r]);
  }
}

template <typename TO, typename ACC, int COUNT>
DEVICE void store_outputs(u8* to, const ACC (&acc)[COUNT], const RowScale<TO, ACC>& row, const OutputConstants& s) {
  u32 w[1][COUNT * sizeof(TO) / 4];
  output_words<TO>((const ACC(&)[1][COUNT])acc, (const RowScale<TO, ACC>(&)[1])row, s, w);
  store_words(to, w[0]);
}
