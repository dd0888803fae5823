// The softmax of intflash_bfp where a warp holds whole rows of scores (whole_rows.cu). P takes half of the registers of
// the scores that it is made of, so that it stays there, and P V is computed for 16 channels at a time when they are
// stored. A row's largest octaves are known then.
#pragma once
#include "sm80/block_float_softmax.cuh"

struct WholeBlockFloat : BlockSoftmax {
  static constexpr int CHUNKS_AT_ONCE = 3;  // by measurement on an H200: code of many chunks is fetched slowly
  static constexpr int COUNT = (NK + BLOCK - 1) / BLOCK, LAST = COUNT - 1;
  // Bits that 32-bit sums of `COUNT` blocks keep below the unit of A_g, which is below 2^22.
  static constexpr i32 ROOM = 7;
  static_assert(COUNT <= 3);
  BlockWeights p[COUNT];
  TileOperands tile{0, 0};
  bool narrow;  // whether these sums are exact for all rows of the warp

  DEVICE static constexpr int keys_of(int block) { return block < LAST ? BLOCK : NK - LAST * BLOCK; }
  DEVICE static constexpr int computed(int block) { return (keys_of(block) + 15) / 16 * 16; }

  DEVICE i32 depth(int block, int h) const { return top[VALUE][h] - p[block].e[h]; }

  // Makes P of a row's scores.
  DEVICE void take(const Scores& s, const RowMasks& masks, const TileOperands& of) {
    tile = of;
    u32 other_l[COUNT][2];  // of keys without a value
    i32 other_e[COUNT][2];
    take_block<0>(s, masks, other_l, other_e);
    if constexpr (COUNT > 1) take_block<1>(s, masks, other_l, other_e);
    if constexpr (COUNT > 2) take_block<2>(s, masks, other_l, other_e);
    narrow = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[VALUE][h] = top[OTHER][h] = NO_EXPONENT;
#pragma unroll
      for (int block = 0; block < COUNT; ++block)
        top[VALUE][h] = max(top[VALUE][h], p[block].e[h]), top[OTHER][h] = max(top[OTHER][h], other_e[block][h]);
#pragma unroll
      for (int block = 0; block < COUNT; ++block) {
        l[h] += merged((i32)p[block].l[h], fraction, row_top(h) - p[block].e[h]);
        l[h] += merged((i32)other_l[block][h], fraction, row_top(h) - other_e[block][h]);
        narrow &= depth(block, h) <= ROOM || p[block].e[h] == NO_EXPONENT;
      }
    }
    narrow = __all_sync(~0u, narrow);
  }
  template <int AT>
  DEVICE void take_block(const Scores& s, const RowMasks& masks, u32 (&other_l)[COUNT][2], i32 (&other_e)[COUNT][2]) {
    constexpr int NOW = computed(AT), WHOLE = keys_of(AT);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      other_l[AT][h] = 0, other_e[AT][h] = NO_EXPONENT;
      if constexpr (NOW % 32) p[AT].word[NOW / 32][0][2 + h] = p[AT].word[NOW / 32][1][2 + h] = 0;
    }
    const BlockScores& of_block = (const BlockScores&)s[0][AT * (BLOCK / 8)];
    both_weights<NOW, WHOLE>(of_block, masks, AT * BLOCK, NK, p[AT], [&](Kind kind, const BlockWeights& p) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (kind == OTHER) other_l[AT][h] = p.l[h], other_e[AT][h] = p.e[h];
    });
  }

  DEVICE void add(i32& to, i32 sum, int block, int h) const { to += sum * group_unit(ROOM, depth(block, h)); }
  DEVICE void add(i64& to, i32 sum, int block, int h) const {
    to += merged(sum << ACC_SHIFT, fraction, depth(block, h));
  }
  // The output is made of 2^8 times A_g: of a 32-bit sum, which counts 2^ROOM times, it takes twice.
  DEVICE static Accumulator result(i32 sum) { return {sum >> ROOM, (sum & 127) << 1}; }
  DEVICE static Accumulator result(i64 sum) { return rounded(sum, 0); }
  template <class Sum>
  DEVICE void results_as(int chunk, Accumulator (&x)[2][4]) const {
    Sum acc[2][4] = {};
    add_block<0>(chunk, acc);
    if constexpr (COUNT > 1) add_block<1>(chunk, acc);
    if constexpr (COUNT > 2) add_block<2>(chunk, acc);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j / 4][j % 4] = result(acc[j % 2][j / 2]);
  }
  template <int AT, class Sum>
  DEVICE void add_block(int chunk, Sum (&acc)[2][4]) const {
    i32 sums[2][DIGITS][4] = {};
    multiply<computed(AT)>(p[AT], tile, AT * (BLOCK / 32), chunk, sums);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      add(acc[i / 4][i % 4], block_acc({sums[i / 4][0][i % 4], sums[i / 4][1][i % 4]}), AT, i % 4 / 2);
  }
  DEVICE void results(int, int chunk, Accumulator (&x)[2][4]) const {
    if (narrow)
      results_as<i32>(chunk, x);
    else
      results_as<i64>(chunk, x);
  }
};
