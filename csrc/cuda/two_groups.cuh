// P of intflash_bfp (docs/numerics.md, "Keys without a value, and dither"): the keys of a row with a value and those
// without have an octave each, and the sums of the first count from their largest T.
//
// Nothing here depends on the product that a kernel uses. A lane holds keys 4q .. 4q + 3 of every 16, where q is its
// place in the quad. Bit i of a mask of keys stands for the i-th of them.
#pragma once
#include "epilogue.cuh"
#include "exp2.cuh"

constexpr i32 NO_EXPONENT = -(1 << 29);  // of a group without keys
constexpr i32 FAR = 48;                  // a group so many octaves below its row adds nothing
constexpr i32 MAX_GAP = 96;
constexpr i32 OUTPUT_SHIFT = 24;  // from a row's sums to those that its output is made of
constexpr i32 MOST_E = 29;        // of the output constants, which constants.cu saturates at MOST_E + MAX_GAP
// Added to T - (e << 32). With 16 octaves more than K0 the shift from m to p16 is 32 - hi, from 2 on.
constexpr i64 GROUP_K0 = K0 + (16ll << 32);

// Bits below the largest octave that a row's sums keep.
DEVICE i32 fraction_bits(i32 keys) { return keys > MOST_SUMS ? 20 : 24; }

// The exponent that 32 bits hold is -1 - (T - origin + GROUP_K0), in 2^-24 octave, less 223 octaves: its upper byte
// is the shift from m to p16, at least 2, and 511 less the next one is u. Two instructions fewer than from the 64-bit
// form.
DEVICE constexpr u32 group_offset(i64 origin) { return ~(u32)((GROUP_K0 - origin) >> 8) - (223u << 24); }
// p16 with 8 fraction bits: below 2^24. Its whole bytes are floored.
DEVICE u32 group_p24(u32 t) {
  const u32 u = dot_bytes(t, 0x00100000, (u32)(-511 * 16));  // 16 u, negated
  return shift_right(u * u + (QUADRATIC_OFFSET << 8), t >> 24);
}
// The same of T - (e << 32) + GROUP_K0.
DEVICE u32 group_p24(i64 t) {
  const u32 u = ((u32)t >> 20 & 0xFF0) | 0x1000;  // 16 u
  return shift_right(u * u + (QUADRATIC_OFFSET << 8), 32 - (i32)(t >> 32));
}
// The same of NEGATED - t, whose upper word is the shift: one instruction fewer.
constexpr u64 NEGATED = (33ull << 32) - 1;
DEVICE u32 group_p24_of_negated(u64 t) {
  const u32 u = dot_bytes((u32)t, 0x10000000, (u32)(-511 * 16));  // 16 u, negated
  return shift_right(u * u + (QUADRATIC_OFFSET << 8), (u32)(t >> 32));
}

// Returns a part of a sequence's keys without a value: some lane's is not 0 where there are any. words: those of its
// first block (`key_of_bit`).
constexpr int WORD_KEYS = 128;  // keys of the four words of a block
DEVICE u32 valueless_keys(const u32* words, i32 keys) {
  const i32 count = (keys + WORD_KEYS - 1) / WORD_KEYS * 4;
  u32 some = 0;
#pragma unroll 4
  for (i32 i = threadIdx.x % 32; i < count; i += 32) some |= words[i];
  return some;
}

// Returns bytes of ones where the lowest four bits are set.
DEVICE u32 bytes_of_bits(u32 bits) { return ((bits & 15) * 0x00204081 & 0x01010101) * 255; }

// Returns the inverse: a bit for each byte that is 1 and not 0.
DEVICE u32 bits_of_bytes(u32 bytes) { return bytes * 0x10204080 >> 28; }

// Packs four p16 of a row, which have 8 fraction bits: their high bytes into one word and their low bytes into another.
DEVICE void pack_p24(const u32 (&p)[4], u32 (&digit)[2]) {
  const u32 a = permute(p[0], p[1], 0x6251), b = permute(p[2], p[3], 0x6251);
  digit[0] = permute(a, b, 0x7632);
  digit[1] = permute(a, b, 0x5410);
}

// What is added to p24 of four adjacent keys before it is floored. Of at most ROUNDED_KEYS keys it is one half.
constexpr i32 ROUNDED_KEYS = 768;
struct Rounding {
  DEVICE u32 of(int) const { return 128; }
};
// The dither of a key: bits 0 to 3 of its number in reverse order, then bits 7 to 10. So it is the same for a lane's
// keys of each 16 of 128.
DEVICE u32 dither(i32 key) { return (__brev(key) >> 24 & 0xF0) | __brev(key >> 7) >> 28; }
// Of more keys it is their dither. first: that of the first of the four, whose number is a multiple of 4.
struct Dither {
  u32 first;

  DEVICE u32 of(int i) const { return first + (i % 2 * 128 + i / 2 * 64); }
};

// Computes four p16 of a row from T - Tmax + GROUP_K0.
template <class Added>
DEVICE void four_group_p(const i64 (&t)[4], Added added, u32 (&digit)[2]) {
  pack_p24({group_p24(t[0]) + added.of(0), group_p24(t[1]) + added.of(1), group_p24(t[2]) + added.of(2),
            group_p24(t[3]) + added.of(3)},
           digit);
}
// The same from T, with B = GROUP_K0 - Tmax.
template <class Added>
DEVICE void four_group_p(const i64 (&t)[4], i64 B, Added added, u32 (&digit)[2]) {
  const auto p24 = [&](int i) { return group_p24_of_negated(NEGATED - B - t[i]) + added.of(i); };
  pack_p24({p24(0), p24(1), p24(2), p24(3)}, digit);
}
// The same from scores, with C in 2^-32 octave.
template <class Added>
DEVICE void four_group_p(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B, Added added, u32 (&digit)[2]) {
  const auto p24 = [&](i32 s) { return group_p24_of_negated(multiply_add(s, -C, NEGATED - B)); };
  pack_p24({p24(s0) + added.of(0), p24(s1) + added.of(1), p24(s2) + added.of(2), p24(s3) + added.of(3)}, digit);
}
// The same in 32 bits: C in 2^-24 octave and offset = maximum * C + group_offset(0). No score is above the maximum and
// none 238 octaves below it, so that the shift of `group_p24` is from 2 to 240.
template <class Added>
DEVICE void four_group_p(i32 s0, i32 s1, i32 s2, i32 s3, u32 C, u32 offset, Added added, u32 (&digit)[2]) {
  const u32 D = 0u - C;
  pack_p24({group_p24(s0 * D + offset) + added.of(0), group_p24(s1 * D + offset) + added.of(1),
            group_p24(s2 * D + offset) + added.of(2), group_p24(s3 * D + offset) + added.of(3)},
           digit);
}

// Returns floor(sum * 2^fraction / 2^depth) of the sum of a group `depth` octaves below its row.
DEVICE i64 merged(u64 sum, i32 fraction, i32 depth) { return depth < FAR ? (i64)((sum << fraction) >> depth) : 0; }

// A row's sums when all keys are done.
struct RowSum {
  i32 top, gap;  // E; E - Ev, at most MAX_GAP
  u32 l;         // rounded to 2^-24

  // The octaves of the keys with a value and of those without, and l in the unit of the larger one.
  DEVICE RowSum(i32 value, i32 other, i64 sum)
      : top(max(value, other)),
        gap(value == NO_EXPONENT ? 0 : min(top - value, MAX_GAP)),
        l((u32)((sum + (1 << (OUTPUT_SHIFT - 1))) >> OUTPUT_SHIFT)) {}
  // The level of l in T.
  DEVICE i64 level(i32 fraction) const { return (i64)(top + OUTPUT_SHIFT - fraction) << 32; }
};

// The groups of a row some of whose keys have no value.
struct SplitRow {
  i64 origin;        // the T from which octaves count
  i32 value, other;  // the octaves of the keys with a value and of those without
  u32 other_l;       // the sum of p of the keys without, where 32 bits hold it

  // value_t, other_t: the largest T of both kinds of keys, ABSENT_T where there are none.
  DEVICE static SplitRow of_maxima(i64 value_t, i64 other_t) {
    const i64 first = value_t == ABSENT_T ? other_t : value_t;
    SplitRow row{first == ABSENT_T ? 0 : first, value_t == ABSENT_T ? NO_EXPONENT : 0, NO_EXPONENT, 0};
    if (other_t != ABSENT_T) row.other = octave_above(other_t - row.origin);
    return row;
  }
  // value_l: the sum of p of the keys with a value.
  DEVICE RowSum sum(u64 value_l, i32 fraction) const { return sum(value_l, other_l, fraction); }
  DEVICE RowSum sum(u64 value_l, u64 other_l, i32 fraction) const {
    const i32 top = max(value, other);
    return RowSum(value, other, merged(value_l, fraction, top - value) + merged(other_l, fraction, top - other));
  }
};

// The sums that a row's outputs are made of, from those with `fraction_bits`: rounded to 2^-24.
DEVICE P16Accumulator rounded(i64 acc, i32 fraction) {
  const i64 x = (acc << fraction) + (1 << (OUTPUT_SHIFT - 1));
  return {(i32)(x >> 32), (i32)((u32)x >> OUTPUT_SHIFT)};
}

// The output constants of rows whose gap is 0.
DEVICE OutputConstants without_gap(const OutputConstants& s) {
  return {(i64)min((i32)(s.packed >> 32), MOST_E) << 32 | (u32)s.packed, s.v_scale};
}

// The factor of a row's outputs where keys without a value are above those with one.
template <typename TO>
struct GapScale {
  i32 factor, shift;
  float scale;

  DEVICE GapScale(u32 l, i32 gap, const OutputConstants& s) {
    if constexpr (IsInteger<TO>::value) {
      const i32 e = min((i32)(s.packed >> 32), MOST_E + gap);
      const Normalizer n = normalizer<P16Accumulator>(l, (i64)29 << 32 | (u32)s.packed);
      factor = n.factor, shift = min(n.shift + 29 - e + gap, 64);
    } else {
      scale = __fmul_rn(row_factor(l, s.v_scale), __int_as_float((127 - gap) << 23));
    }
  }
  template <typename ACC, int COUNT>
  DEVICE void outputs(const ACC (&acc)[COUNT], u32 (&w)[COUNT * sizeof(TO) / 4]) const {
    typedef OutputPacker<TO, ACC, COUNT> Packer;
    if constexpr (IsInteger<TO>::value) {
      i32 o[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const i64 x = (((i64)acc[i].high << 8) + acc[i].low) * factor;
        o[i] = clamped<sizeof(TO) == 1 ? 127 : 32767>(((x >> (shift - 1)) + 1) >> 1);
      }
      Packer::pack(o, w);
    } else {
      Packer::floats(acc, scale, w);
    }
  }
};

// The scales of N rows' outputs, of which a lane computes the factor of one (`row_scales`): the plain form, unless some
// row of the warp has a gap.
template <typename TO, typename ACC, int N>
struct GroupScales {
  OutputConstants constants, plain;
  u32 l[N];
  i32 gap[N];
  bool has_gaps;
  RowScale<TO, ACC> scales[N];

  DEVICE GroupScales(const RowSum (&rows)[N], const OutputConstants& constants)
      : constants(constants), plain(without_gap(constants)) {
    bool gaps = false;
#pragma unroll
    for (int i = 0; i < N; ++i) l[i] = rows[i].l, gap[i] = rows[i].gap, gaps |= rows[i].gap != 0;
    has_gaps = N > 1 ? __any_sync(~0u, gaps) : gaps;
    row_scales(N > 1 && computes_second_row() ? l[N - 1] : l[0], plain, scales);
  }
  template <int COUNT>
  DEVICE void outputs(const ACC (&acc)[N][COUNT], u32 (&w)[N][COUNT * sizeof(TO) / 4]) const {
    if (has_gaps) {
#pragma unroll
      for (int i = 0; i < N; ++i) GapScale<TO>(l[i], gap[i], constants).outputs(acc[i], w[i]);
    } else {
      output_words<TO>(acc, scales, plain, w);
    }
  }
};
