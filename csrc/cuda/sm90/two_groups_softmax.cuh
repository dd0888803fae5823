// The softmax of intflash_bfp in the mainloop of long rows. Where all keys of a head have a value, P is relative to the
// row's maximum: the loops are those of intflash. Heads some of whose keys have no value are computed by loops of their
// own (`split_pass`).
#pragma once
#include "sm90/integer_softmax.cuh"
#include "two_groups.cuh"

// What is added to P of a thread's keys of a half tile, of which `first` is the first.
DEVICE auto added_to_p(i32 first) {
  if constexpr (TWO_GROUPS == 2)
    return Dither{dither(first)};
  else
    return Rounding();
}

// How the scores of a row become P.
struct ValueP16 {
  typedef decltype(added_to_p(0)) Added;
  static constexpr i64 OFFSET = GROUP_K0;

  // 32 bits suffice where `exp_32bit_limit` says so for intflash: see `four_group_p`.
  template <bool EXP_32BIT>
  DEVICE static void four(i32 a, i32 b, i32 c, i32 d, i32 C, i64 B, Added added, u32 (&digits)[2]) {
    if constexpr (EXP_32BIT)
      four_group_p(a, b, c, d, (u32)C >> 8, group_offset(OFFSET - B), added, digits);
    else
      four_group_p(a, b, c, d, C, B, added, digits);
  }
  DEVICE static Added added(i32 first) { return added_to_p(first); }
  DEVICE static OutputConstants output_constants(const OutputConstants& s) { return without_gap(s); }
};

// The sum of p of a row's keys with a value, and of P V of a channel, for the rows' outputs.
template <class Sums>
DEVICE u64 value_l(const Sums& sums, int h) {
#if MANY_KEYS
  return quad_sum(sums.wide_sums[h] + ((u64)sums.sums[0][h] << 8) + sums.sums[1][h]);
#else
  return sums.l(h);
#endif
}
template <class Sums>
DEVICE P16Accumulator value_sum(const Sums& sums, int h, int channel, i32 fraction) {
  const P16Accumulator narrow = sums.result(h, channel);
#if MANY_KEYS
  const i64 wide = sums.wide_acc[channel / 2 * 4 + 2 * h + channel % 2];
  return rounded(wide + ((i64)narrow.high << 8) + narrow.low, fraction);
#else
  return narrow;
#endif
}
// Stores a thread's two rows. other_l: the sums of p of their keys without a value.
template <class Sums>
DEVICE void store_groups(const Sums& sums, const Params& p, const ThreadRows& at, const SplitRow (&rows)[2],
                         const u64 (&other_l)[2]) {
  const OutputConstants constants = load_output_constants<OUT>(p, at.batch, at.head, at.kv_head);
  const i32 fraction = fraction_bits(p.nk);
  const u64 l[2] = {value_l(sums, 0), value_l(sums, 1)};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    P16Accumulator mine[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) mine[i] = value_sum(sums, h, i, fraction);
    u32 words[Sums::OUTPUT_WORDS];
    const RowSum sum = rows[h].sum(l[h], other_l[h], fraction);
    GapScale<OUT>(sum.l, sum.gap, constants).outputs(mine, words);
    sums.store_row(p, at, h, words, rows[h].origin + sum.level(fraction), sum.l);
  }
}

// Heads some of whose keys have no value. Each row has two groups of keys, whose P count from octaves of their own.
struct SplitGroups : PDigits<2> {
  static constexpr int PASSES = 2, BUFFERS = 1;
  i32 other_peak[2];  // the maxima of the scores of keys without a value; `peak` has those of the others
  SplitRow rows[2];   // with the sums of p that this thread holds

  DEVICE void init(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
    PDigits::init(p, at, shared);
    other_peak[0] = other_peak[1] = NO_SCORE;
  }
  // Calls f(i, of_values, of_others) for each word of P of half a tile, with bytes of ones for its visible keys that
  // have a value, and for those that have none.
  template <class F>
  DEVICE static void for_each_word(const VisibleKeys& visible, const ValuelessKeys& valueless, int half, const F& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int sixteen = 4 * half + sixteen_of_word(i);
      const u32 seen = visible_bytes(visible, i / 4, i % 4);
      const u32 none =
          FLOAT_KV ? load_shared(valueless.keys + 16 * sixteen) : bytes_of_bits(valueless.keys >> 4 * sixteen);
      f(i, seen & ~none, seen & none);
    }
  }
  DEVICE void update_row_max(const Scores& s, const VisibleKeys& visible, const ValuelessKeys& valueless, int half) {
    for_each_word(visible, valueless, half, [&](int i, u32 of_values, u32 of_others) {
      const i32* x = scores_of_word(s, i);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const i32 score = x[k / 2 * 4 + k % 2];
        peak[i % 2] = max(peak[i % 2], of_values >> 8 * k & 1 ? score : NO_SCORE);
        other_peak[i % 2] = max(other_peak[i % 2], of_others >> 8 * k & 1 ? score : NO_SCORE);
      }
    });
  }
  DEVICE void finish_first_pass(const SharedLayout&) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto largest_t = [&](i32 score) { return score == NO_SCORE ? ABSENT_T : exponent(h, score); };
      rows[h] = SplitRow::of_maxima(largest_t(quad_max(peak[h])), largest_t(quad_max(other_peak[h])));
    }
  }
  // Makes P of the keys with a value, and adds P of those without.
  // first: this thread's first key of the half tile.
  DEVICE void exponentials(const Scores& s, const VisibleKeys& visible, const ValuelessKeys& valueless, int half,
                           i32 first, P& p) {
    const auto added = added_to_p(first);
    for_each_word(visible, valueless, half, [&](int i, u32 of_values, u32 of_others) {
      const i32* x = scores_of_word(s, i);
      const int h = i % 2;
      const i32 a = x[0] << shift[h], b = x[1] << shift[h], c = x[4] << shift[h], d = x[5] << shift[h];
      const i64 B = GROUP_K0 - rows[h].origin;
      u32 four[2];
      four_group_p(a, b, c, d, C[h], B - ((i64)rows[h].other << 32), added, four);
      rows[h].other_l += combine_digits<2>({add_bytes(four[0] & of_others, 0), add_bytes(four[1] & of_others, 0)});
      four_group_p(a, b, c, d, C[h], B, added, four);
      p.digit[0].word[i / 4][i % 4] = four[0] & of_values, p.digit[1].word[i / 4][i % 4] = four[1] & of_values;
    });
    add_row_sums(p);
  }
#if MANY_KEYS
  u64 wide_other_l[2] = {0, 0};

  DEVICE void widen_sums() {
    PDigits::widen_sums();
#pragma unroll
    for (int h = 0; h < 2; ++h) wide_other_l[h] += rows[h].other_l, rows[h].other_l = 0;
  }
#endif
  DEVICE u64 other_l(int h) const {
#if MANY_KEYS
    return quad_sum(wide_other_l[h] + rows[h].other_l);
#else
    return quad_sum(rows[h].other_l);
#endif
  }
  DEVICE void store(const Params& p, const ThreadRows& at) const {
    store_groups(*this, p, at, rows, {other_l(0), other_l(1)});
  }
};
template <>
constexpr bool IS_SPLIT<SplitGroups> = true;

// Heads all of whose keys have a value.
struct TwoGroups : ExactMaximum<2, ValueP16> {
  typedef ExactMaximum<2, ValueP16> Exact;
  typedef SplitGroups Split;

#if MANY_KEYS
  DEVICE void store(const Params& p, const ThreadRows& at) const {
    const SplitRow rows[2] = {{PForm::OFFSET - B[0], 0, NO_EXPONENT}, { PForm::OFFSET - B[1], 0, NO_EXPONENT }};
    store_groups(*this, p, at, rows, {0, 0});
  }
#endif
};
