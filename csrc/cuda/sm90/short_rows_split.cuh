// Heads of intflash_bfp in which some keys have no value, in short rows. They are rare: this path is apart from the
// main loop and small, so that it costs that one little.
#pragma once
#include "sm90/remainder_rows.cuh"
#include "sm90/short_rows_mainloop.cuh"

// Returns bytes of ones for those of the keys from `first` on, four of which have their codes in a word, that exist and
// have no other code than 0.
DEVICE u32 without_value(u32 codes, i32 first, i32 nk) {
  return __vcmpeq4(codes, 0) & ~shift_left(~0u, 8 * max(nk - first, 0));
}

// Whether some key has zeros in 8 of V's channels, for which a warp takes few cycles. All warps find the same.
DEVICE bool may_lack_values(u32 v_tile, i32 nk) {
  static_assert(HEAD_DIM >= 8);
  const u32 lane = threadIdx.x % 32;
  u32 some = 0;
#pragma unroll
  for (u32 first = 0; first < KEY_CHUNKS; first += 16) {
    const u32 chunk = min(first + lane % 16, KEY_CHUNKS - 1);
    u32 codes[4] = {};
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
  }
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

// The 16 rows of a warp in a tile of 64 rows of such a head, by mma.sync. Scores are computed twice, for the maxima and
// for P.
struct SplitRows {
  static constexpr int TILES = HEAD_DIM / 8;  // of 8 channels
  const RowTile& tile;
  const u32 value_codes;  // address of what `find_valueless` stores
  const u32 keys, values, quarter;
  SplitRow rows[2];
  i32 acc[2][TILES][4] = {};

  DEVICE SplitRows(const RowTile& tile, u32 k_tile, u32 v_tile, u32 value_codes)
      : tile(tile),
        value_codes(value_codes),
        keys(key_matrices<K_WIDTH>(threadIdx.x % 32, k_tile)),
        values(value_address(v_tile, threadIdx.x % 8, threadIdx.x % 32 / 8 * 16)),
        quarter(threadIdx.x % 4) {}

  // T of the lane's four keys of 16, and the bytes of those with a value and of those without.
  struct FourKeys {
    i64 t[2][4];
    u32 with_value, without;
  };
  DEVICE FourKeys four_keys(int group) const {
    FourKeys x;
    i32 s[2][4];
    scores_of_16_keys(tile.q, keys, group * 16 * K_WIDTH, s);
    const u32 present = group < KEY_CHUNKS - 1 ? ~0u : tile.present;
    x.without = __vcmpeq4(load_shared(value_codes + 16 * group + 4 * quarter), 0) & present;
    x.with_value = present & ~x.without;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#if BIAS
      i32 bias[4];
      tile.bias.load(group, h, bias);
#endif
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x.t[h][j] = multiply_add(s[h][j] << tile.score[h].k, tile.score[h].C, 0);
#if BIAS
        x.t[h][j] = BiasRows::add(bias[j], x.t[h][j]);
#endif
      }
    }
    return x;
  }
  DEVICE void find_maxima() {
    i64 value[2] = {ABSENT_T, ABSENT_T}, other[2] = {ABSENT_T, ABSENT_T};
#pragma unroll 1
    for (int group = 0; group < KEY_CHUNKS; ++group) {
      const FourKeys x = four_keys(group);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int h = i / 4, j = i % 4;
        if (x.with_value >> (8 * j) & 1) value[h] = value[h] > x.t[h][j] ? value[h] : x.t[h][j];
        if (x.without >> (8 * j) & 1) other[h] = other[h] > x.t[h][j] ? other[h] : x.t[h][j];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = SplitRow::of_maxima(quad_max(value[h]), quad_max(other[h]));
  }
  // Computes P and P V, and the sums of p of the keys with a value.
  DEVICE void multiply(u32 (&value_l)[2]) {
    u32 sums[2][2] = {}, others[2] = {};
#pragma unroll 1
    for (int pair = 0; pair < (KEYS + 63) / 64; ++pair) {  // pairs of steps of 32 keys
      u32 p[2][2][4] = {};                                 // of a step and a digit: the left operand of a product
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = 4 * pair + i;
        if (group >= KEY_CHUNKS) break;
        const FourKeys x = four_keys(group);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const i64 B = GROUP_K0 - rows[h].origin;
          u32 four[2];
          four_group_p(x.t[h], B, Rounding(), four);
#pragma unroll
          for (int digit = 0; digit < 2; ++digit) {
            u32& word = p[i / 2][digit][i % 2 * 2 + h];
            word = four[digit] & x.with_value;
            sums[h][digit] = add_bytes(word, sums[h][digit]);
          }
          const i64 of_others = B - ((i64)rows[h].other << 32);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (x.without >> (8 * j) & 1) others[h] += (group_p24(x.t[h][j] + of_others) + Rounding().of(j)) >> 8;
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        u32 v[4];
        load_matrices((values ^ pair % 2 * 64) + pair / 2 * V_BLOCK + t * 1024, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32(&w)[4] = p[i / 2][i % 2];
          mma_u8_s8(acc[i % 2][t], OperandA{w[0], w[1], w[2], w[3]}, OperandB{v[i / 2 * 2], v[i / 2 * 2 + 1]});
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      value_l[h] = quad_sum(combine_digits(sums[h]));
      rows[h].other_l = quad_sum(others[h]);
    }
  }
  // row, out: this lane's first row and its output.
  DEVICE void run(const Params& p, u8* out, u32 batch, u32 head, i32 row, const OutputConstants& constants) {
    u32 value_l[2];
    find_maxima();
    multiply(value_l);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowSum sum = rows[h].sum(value_l[h], fraction_bits(KEYS));
      const GapScale<OUT> scale(sum.l, sum.gap, constants);
      P16Accumulator mine[CHANNELS];
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) mine[i] = {acc[0][i / 2][2 * h + i % 2], acc[1][i / 2][2 * h + i % 2]};
      u32 words[CHANNELS * SIZE<OUT> / 4];
      scale.outputs(mine, words);
      if (row + 8 * h >= p.nq) continue;
      store_words((u8*)multiply_add(8 * h, (i32)p.out.n * SIZE<OUT>, (i64)out), words);
      if (STATISTICS && quarter == 0) {
        const i64 at = row_index(p, batch, head, row + 8 * h);
        p.t_max[at] = rows[h].origin + sum.level(fraction_bits(KEYS));
        p.l[at] = sum.l;
      }
    }
  }
};
