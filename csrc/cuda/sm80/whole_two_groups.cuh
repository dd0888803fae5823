// The softmax of intflash_bfp where a warp holds whole rows of scores (whole_rows.cu). P takes half of the registers of
// the scores that it is made of, so that it stays there, and P V is computed for 16 channels at a time when they are
// stored.
#pragma once
#include "sm80/two_groups_softmax.cuh"

struct WholeTwoGroups : GroupSoftmax {
  static constexpr int DIGITS = 2;
  static constexpr int CHUNKS_AT_ONCE = 3;  // by measurement on an H200: code of many chunks is fetched slowly
  static constexpr int NOW = (NK + 15) / 16 * 16;
  static constexpr bool FINDS_ZEROS = true;
  static_assert(NK <= ROUNDED_KEYS);
  typedef AccumulatorOf<DIGITS, FEW_KEYS>::Type Accumulator;
  typedef RowSum Row;
  template <typename TO, int N>
  using OutputScales = GroupScales<TO, Accumulator, N>;
  u32 word[KEYS / 32][DIGITS][4];  // P: of a digit the left operand of a product over 32 keys
  u32 l[KINDS][2];                 // the sums of p of a kind and row
  TileOperands tile{0, 0};

  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, const u32* valueless_words, i32) {
    GroupSoftmax::init(constants, valueless_words);
  }
  // Makes P of a row's scores.
  template <class Magnitude>
  DEVICE void take(const Scores& s, const RowMasks& masks, const TileOperands& of, Magnitude magnitude) {
    tile = of;
    Peaks peak = {{{NO_PEAK, NO_PEAK}}, {{NO_PEAK, NO_PEAK}}};
    const KeyBits zeros = this->zeros(0);
    update_both_peaks<NOW, NK>(s, masks, 0, NK, zeros, peak);
    set_octaves([&](int kind, int m, int h) { return quad_max(peak[kind][m][h]); }, magnitude);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (NOW % 32) word[NOW / 32][0][2 + h] = word[NOW / 32][1][2 + h] = 0;
      l[OTHER][h] = 0;
    }
    if (__any_sync(~0u, zeros.any())) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        l[OTHER][h] = quad_sum(sum_of_others<NOW, NK>(s, 0, h, masks[0][h], 0, NK, zeros, AddedToP()));
      make_p<true>(s, masks, zeros.others());
    } else {
      make_p<false>(s, masks, zeros);
    }
  }
  template <bool SOME>
  DEVICE void make_p(const Scores& s, const RowMasks& masks, const KeyBits& chosen) {
    if (!BIAS && !SOME && fast)  // a third instance of the code would spill registers
      make_p_as<SOME, true>(s, masks, chosen);
    else
      make_p_as<SOME, false>(s, masks, chosen);
  }
  template <bool SOME, bool FAST>
  DEVICE void make_p_as(const Scores& s, const RowMasks& masks, const KeyBits& chosen) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 sums[DIGITS] = {};
#pragma unroll
      for (int group = 0; group < NOW / 16; ++group) {
        u32 digit[DIGITS];
        if (16 * group + 16 <= NK)
          words<false, SOME, FAST>(s, 0, h, group, masks[0][h], first_key(group), NK, chosen, 0, AddedToP(), digit);
        else
          words<true, SOME, FAST>(s, 0, h, group, masks[0][h], first_key(group), NK, chosen, 0, AddedToP(), digit);
#pragma unroll
        for (int i = 0; i < DIGITS; ++i) {
          sums[i] = add_bytes(digit[i], sums[i]);
          word[group / 2][i][group % 2 * 2 + h] = digit[i];
        }
      }
      l[VALUE][h] = quad_sum(combine_digits(sums));
    }
  }
  DEVICE void results(int, int chunk, Accumulator (&x)[2][4]) const {
    i32 sums[2][DIGITS][4] = {};
#pragma unroll
    for (int step = 0; step < (NOW + 31) / 32; ++step) {
      OperandB v[2];
      tile.values(step, chunk, v);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) {
          const u32(&w)[4] = word[step][digit];
          mma_u8_s8(sums[e][digit], OperandA{w[0], w[1], w[2], w[3]}, v[e]);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j / 4][j % 4] = {sums[j % 2][0][j / 2], sums[j % 2][1][j / 2]};
  }
  DEVICE Row row(int, int h) const { return row_of(0, h, l[VALUE][h], l[OTHER][h], fraction_bits(NK)); }
  DEVICE i64 t_max(int, int h) const { return level(0, h, fraction_bits(NK)); }
};
