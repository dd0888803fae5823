// Heads of intflash_bfp in which some keys have no value, in short rows. They are rare: this path shares little with
// the main loop, so that it costs that one nothing.
#pragma once
#include "sm90/short_rows_mainloop.cuh"

// Returns bytes of ones for those of the keys from `first` on, four of which have their codes in a word, that exist and
// have no other code than 0.
DEVICE u32 without_value(u32 codes, i32 first, i32 nk) {
  return __vcmpeq4(codes, 0) & ~shift_left(~0u, 8 * max(nk - first, 0));
}

// Whether some key has zeros in 8 of V's channels, for which a warp takes few cycles. All warps find the same.
DEVICE bool may_lack_values(u32 v_tile, i32 nk) {
  static_assert(KEY_CHUNKS <= 16 && HEAD_DIM >= 8);
  const u32 lane = threadIdx.x % 32, chunk = min(lane % 16, KEY_CHUNKS - 1);
  u32 codes[4] = {}, some = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 w[4];
    load_shared(value_address(v_tile, lane / 16 * 4 + i, 16 * chunk), w);
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] |= w[j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    some |= without_value(codes[j] | __shfl_xor_sync(~0u, codes[j], 16), (i32)(16 * chunk + 4 * j), nk);
  return __any_sync(~0u, some);
}

// Finds the keys without a value among the codes of V^T in shared memory, and returns whether there are any. Stores the
// codes of all channels of a key, combined by OR, in a byte for each key from `to` on. All threads of the CTA must call
// it together.
DEVICE bool find_valueless(u32 v_tile, i32 nk, u32 to) {
  constexpr u32 WARPS = 4 * WARPGROUPS;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, found = to + KEYS;  // found: a word for each warp
  u32 some = 0;
#pragma unroll 1
  for (u32 chunk = warp; chunk < KEY_CHUNKS; chunk += WARPS) {
    u32 codes[4] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM; i += 32) {
      u32 w[4];
      load_shared(value_address(v_tile, min(i + lane, HEAD_DIM - 1), 16 * chunk), w);
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] |= w[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      codes[j] = __reduce_or_sync(~0u, codes[j]);
      some |= without_value(codes[j], (i32)(16 * chunk + 4 * j), nk);
    }
    if (lane == 0) store_shared(to + 16 * chunk, codes);
  }
  if (lane == 0) store_shared(found + 4 * warp, some);
  __syncthreads();
  return __any_sync(~0u, load_shared(found + lane % WARPS * 4));
}

// A tile of 64 rows of such a head.
struct SplitTile {
  RowTile& tile;
  const u32 value_codes;  // address of what `find_valueless` stores
  SplitRow rows[2];
  POperands<FIRST> pa = {};
  POperands<REST> pb = {};

  DEVICE SplitTile(RowTile& tile, u32 value_codes) : tile(tile), value_codes(value_codes) {}
  // The bytes of the thread's four keys of 16 that exist, and of those without a value.
  DEVICE u32 present(int group) const { return group < KEY_CHUNKS - 1 ? ~0u : tile.present; }
  DEVICE u32 zeros(int group) const {
    return __vcmpeq4(load_shared(value_codes + 16 * group + threadIdx.x % 4 * 4), 0) & present(group);
  }
  // T of these keys.
  DEVICE void exponents(int group, int h, i64 (&t)[4]) const {
    const i32* x = group < FIRST / 16 ? &tile.a[8 * group + 2 * h] : &tile.b[8 * (group - FIRST / 16) + 2 * h];
#if BIAS
    i32 of[4];
    tile.bias.load(group, h, of);
#endif
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = j / 2 * 4 + j % 2;
#if BIAS
      t[j] = tile.wide_t(x[i], 2 * h + i, of);
#else
      t[j] = multiply_add(x[i] << tile.score[h].k, tile.score[h].C, 0);
#endif
    }
  }

  DEVICE void scores() {
    if constexpr (FIRST > 0) tile.issue_scores(tile.a, 0);
    tile.issue_scores(tile.b, FIRST);
    if constexpr (FIRST > 0) wgmma_wait<1>(tile.a);
    wgmma_wait(tile.b);
  }
  DEVICE void maxima(int h) {
    i64 value = ABSENT_T, other = ABSENT_T;
#pragma unroll
    for (int group = 0; group < KEY_CHUNKS; ++group) {
      const u32 zeros = this->zeros(group), values = present(group) & ~zeros;
      i64 t[4];
      exponents(group, h, t);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 byte = 255u << (8 * j);
        value = values & byte && t[j] > value ? t[j] : value;
        other = zeros & byte && t[j] > other ? t[j] : other;
      }
    }
    rows[h] = SplitRow::of_maxima(quad_max(value), quad_max(other));
  }
  DEVICE void weights(int h) {
    const i64 B = BLOCK_K0 - rows[h].origin, of_others = B - ((i64)rows[h].other << 32);
    u32 l = 0;
    tile.sums[h][0] = tile.sums[h][1] = 0;
#pragma unroll
    for (int group = 0; group < KEY_CHUNKS; ++group) {
      const u32 zeros = this->zeros(group), values = present(group) & ~zeros;
      i64 t[4];
      exponents(group, h, t);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (zeros >> (8 * j) & 1) l += block_p16(t[j] + of_others);
      u32 four[2];
      four_of_depths({t[0] + B, t[1] + B, t[2] + B, t[3] + B}, four);
#pragma unroll
      for (int digit = 0; digit < 2; ++digit) {
        const int word = group % 2 * 2 + h;
        u32& to = group < FIRST / 16 ? pa.step[group / 2][digit][word] : pb.step[group / 2 - FIRST / 32][digit][word];
        to = four[digit] & values;
        tile.sums[h][digit] = add_bytes(to, tile.sums[h][digit]);
      }
    }
    rows[h].other_l = quad_sum(rows[h].other == NO_EXPONENT ? 0 : l);
  }
  // Computes the tile, whose Q is in `tile.q`. row, out: this thread's first row and its output.
  DEVICE void run(const Params& p, u8* out, u32 batch, u32 head, i32 row, const OutputConstants& constants) {
    scores();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maxima(h);
      __syncwarp();  // ptxas would interleave the rows, for which there are no registers
      weights(h);
      __syncwarp();
    }
    if constexpr (FIRST > 0) tile.issue_pv(pa, 0);
    tile.issue_pv(pb, FIRST);
    wgmma_wait(tile.acc[0]), wgmma_wait(tile.acc[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowSum sum = rows[h].sum(quad_sum(combine_digits(tile.sums[h])), fraction_bits(KEYS));
      const GapScale<OUT> scale(sum.l, sum.gap, constants);
      P16Accumulator mine[CHANNELS];
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) {
        const int from = i / 2 * 4 + 2 * h + i % 2;
        mine[i] = {tile.acc[0][from], tile.acc[1][from]};
      }
      u32 words[CHANNELS * SIZE<OUT> / 4];
      scale.outputs(mine, words);
      if (row + 8 * h >= p.nq) continue;
      store_words((u8*)multiply_add(8 * h, (i32)p.out.n * SIZE<OUT>, (i64)out), words);
      if (STATISTICS && threadIdx.x % 4 == 0) {
        const i64 at = ((i64)batch * p.heads + head) * p.nq + row + 8 * h;
        p.t_max[at] = rows[h].origin + sum.level(fraction_bits(KEYS));
        p.l[at] = sum.l;
      }
    }
  }
};
