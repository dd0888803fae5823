// What the remainder rows of short and of long rows share: at most 8 rows of a head, for which a tile of 64 rows would
// take as long as for 64 rows. The four warps of a warpgroup compute them by mma.sync, from K and V^T in shared memory.
// Heads of short rows that are split compute all of their rows so.
#pragma once
#include "mma.cuh"
#include "sm90/wgmma_layout.cuh"

DEVICE void sync_warpgroup(u32 barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

// Returns the address from which a lane loads matrices of 16 rows of K, of which the first begins at k.
template <int K_WIDTH>
DEVICE u32 key_matrices(u32 lane, u32 k) {
  return k + swizzled<K_WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Computes scores with 16 keys: for lane (g, q) those of rows g and g + 8 with keys 4q to 4q + 3. q: the rows' codes,
// left operands of D_STEPS products; matrices: see `key_matrices`; offset: bytes from there to the keys, a multiple of
// 16 rows.
template <int D_STEPS>
DEVICE void scores_of_16_keys(const u32 (&q)[D_STEPS][4], u32 matrices, u32 offset, i32 (&s)[2][4]) {
  i32 even[4] = {}, odd[4] = {};
#pragma unroll
  for (int i = 0; i < D_STEPS; ++i) {
    u32 w[4];
    load_matrices((matrices ^ 32 * i) + offset, w);
    const OperandA rows = {q[i][0], q[i][1], q[i][2], q[i][3]};
    mma_s8_s8(even, rows, {w[0], w[1]});
    mma_s8_s8(odd, rows, {w[2], w[3]});
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = (i % 4 < 2 ? even : odd)[i / 4 * 2 + i % 2];
}
// The same of row g alone.
template <int D_STEPS>
DEVICE void scores_of_16_keys(const u32 (&q)[D_STEPS][4], u32 matrices, u32 offset, i32 (&s)[4]) {
  i32 both[2][4];
  scores_of_16_keys(q, matrices, offset, both);
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = both[0][i];
}
