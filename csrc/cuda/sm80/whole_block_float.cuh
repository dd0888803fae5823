// The softmax of intflash_bfp where a warp holds whole rows of scores (whole_rows.cu), whose keys are one block. P
// takes half of the registers of the scores that it is made of, so that it stays there, and P V is computed for 16
// channels at a time when they are stored.
#pragma once
#include "sm80/block_float_softmax.cuh"

struct WholeBlockFloat : BlockSoftmax {
  static constexpr int CHUNKS_AT_ONCE = 3;  // by measurement on an H200: code of many chunks is fetched slowly
  static constexpr int NOW = (NK + 15) / 16 * 16;
  static_assert(NK <= ONE_BLOCK_KEYS);
  BlockWeights p;
  TileOperands tile{0, 0};

  // Makes P of a row's scores.
  DEVICE void take(const Scores& s, const RowMasks& masks, const TileOperands& of) {
    tile = of;
    Peak peak[2][2] = {{NO_PEAK, NO_PEAK}, {NO_PEAK, NO_PEAK}};
    update_both_peaks<NOW, NK>(s, masks, 0, NK, peak);
    set_origin(peak);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if constexpr (NOW % 32) p.word[NOW / 32][0][2 + h] = p.word[NOW / 32][1][2 + h] = 0;
    both_weights<NOW, NK>(s, masks, 0, NK, p, [&](Kind, const BlockWeights& p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) l[h] += merged((i32)p.l[h], fraction, row_top(h) - p.e[h]);
    });
  }
  DEVICE void results(int, int chunk, Accumulator (&x)[2][4]) const {
    i32 sums[2][DIGITS][4] = {};
    multiply<NOW>(p, tile, chunk, sums);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j / 4][j % 4] = {sums[j % 2][0][j / 2], sums[j % 2][1][j / 2]};
  }
};
