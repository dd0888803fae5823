// The layout of wgmma operands in shared memory, and their descriptors.
#pragma once
#include "ptx.cuh"

// Returns the offset of a 16-byte chunk. Rows of a wgmma operand have WIDTH = 32, 64 or 128 bytes, each width with its
// own swizzle.
template <int WIDTH>
DEVICE u32 swizzled(u32 row, u32 chunk) {
  if constexpr (WIDTH == 128)
    return row * 128 + ((chunk ^ (row & 7)) << 4);
  else if constexpr (WIDTH == 64)
    return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
  else
    return row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4);
}

// Returns wgmma's descriptor of a K-major tile with rows of WIDTH swizzled bytes. Adding 2 gives the next 32 bytes of
// each row.
template <int WIDTH>
DEVICE u64 descriptor(u32 address) {
  constexpr u64 layout = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(8 * WIDTH >> 4) << 32) | (layout << 62);
}

// Returns the descriptor of a tile of 16-bit elements whose rows are the reduction dimension, in blocks of 64 columns
// of BLOCK bytes. Adding 128 gives the next 16 rows.
template <int BLOCK>
DEVICE u64 columns_descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(BLOCK >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// Of every 16 columns of Q K^T's accumulators, lane q of a quad holds columns 2q, 2q+1, 8+2q and 9+2q, while the left
// operand of P V needs keys 4q..4q+3 there. So key k of a tile is stored in row score_row(k) of K in shared memory.
DEVICE u32 score_row(u32 key) { return (key & ~15u) | ((key & 2) << 2) | ((key >> 1) & 6) | (key & 1); }

// In the same way channel d of V^T is stored in row value_row(d), so that of every 4 LANE channels of the output lane q
// of a quad holds the q-th LANE.
template <int LANE>
DEVICE u32 value_row(u32 d) {
  const u32 block = d / (4 * LANE), lane = d / LANE % 4, i = d % LANE;
  return 4 * LANE * block + 8 * (i >> 1) + 2 * lane + (i & 1);
}
