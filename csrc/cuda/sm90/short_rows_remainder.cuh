// The remainder rows of a head in short rows (197 = 3 * 64 + 5). The four warps of a warpgroup share the keys for the
// scores and exponentials, and then the channels for P V. HEAD_DIM is 64 or 128.
#pragma once
#include "sm90/remainder_rows.cuh"
#include "sm90/short_rows_mainloop.cuh"

#if BIAS
typedef i64 Exponent;
#else
typedef i32 Exponent;
#endif

struct RemainderRows {
  static constexpr int SHARE = (KEY_CHUNKS + 3) / 4;  // chunks of 16 keys per warp, which takes every fourth
  static constexpr int STEPS = (KEYS + 31) / 32;
  static constexpr int BLOCKS = HEAD_DIM / 32;  // blocks of 8 channels per warp
  struct Shared {
    Exponent peak[8][4];
    // The left operand of a step as a lane loads it. Every second word belongs to rows 8 to 15, which are unused and
    // never written. The row length avoids bank conflicts.
    u32 p[DIGITS][8][STEPS | 1][4][4];
  };
  static constexpr int DIGIT = sizeof(Shared::p) / DIGITS / 4;  // in words

  const RowTile& tile;
  const u32 k_tile, v_tile, lane, warp, g, quarter;
  Shared& shared;
  Exponent peak;  // a score, or T with a bias
  u32 l;
  RowScale<OUT, Accumulator> scale;
  i32 acc[2][DIGITS][BLOCKS][4];  // separate accumulators of even and odd steps shorten the dependent chain of products

  DEVICE RemainderRows(const RowTile& tile, u32 k_tile, u32 v_tile, u8* shared)
      : tile(tile),
        k_tile(k_tile),
        v_tile(v_tile),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 % 4),
        g(lane / 4),
        quarter(lane % 4),
        shared(*(Shared*)shared) {}

  DEVICE void sync_warpgroup() const { ::sync_warpgroup(WARPGROUPS == 1 ? 1 : 1 + threadIdx.x / 128); }
  DEVICE u32 chunk(int i) const { return 4 * i + warp; }
  DEVICE bool has(int i) const { return 4 * i + 3 < KEY_CHUNKS || chunk(i) < KEY_CHUNKS; }

  // Computes row g's scores with keys 16 chunk(share) + 4 quarter + 0..3.
  DEVICE void scores(int share, i32 (&s)[4]) {
    scores_of_16_keys(tile.q, key_matrices<K_WIDTH>(lane, k_tile + warp * 16 * K_WIDTH), share * 64 * K_WIDTH, s);
  }
#if BIAS
  // The same with the bias, in 2^-32 octave.
  DEVICE void exponents(int share, i64 (&t)[4]) {
    i32 s[4], x[4];
    scores(share, s);
    tile.bias.load(share, 0, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = chunk(share) < KEY_CHUNKS - 1 || tile.present >> (8 * j) & 1;
      t[j] = multiply_add(s[j] << tile.score[0].k, tile.score[0].C, 0);
      t[j] = exists ? BiasRows::add(x[j], t[j]) : ABSENT_T;
      peak = peak > t[j] ? peak : t[j];
    }
  }
#endif

  DEVICE void run(const OutputConstants& output_constants) {
    const Score score = tile.score[0];
    Exponent s[SHARE][4];
#if BIAS
    peak = ABSENT_T;
    cp_async_wait_all();
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      if (has(i)) exponents(i, s[i]);
#else
    peak = NO_SCORE;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      if (!has(i)) continue;
      scores(i, s[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) peak = max(peak, s[i][j]);
    }
    if (score.k) {
#pragma unroll
      for (int i = 0; i < SHARE * 4; ++i) s[i / 4][i % 4] <<= score.k;
    }
#endif
    peak = quad_max(peak);
    if (quarter == 0) shared.peak[g][warp] = peak;
    sync_warpgroup();
#if BIAS
#pragma unroll
    for (int i = 0; i < 4; ++i) peak = peak > shared.peak[g][i] ? peak : shared.peak[g][i];
    const i64 B = peak == ABSENT_T ? ABSENT_T : P_K0 - peak;
#else
    const int4 peaks = *(const int4*)shared.peak[g];
    // shifted here, because a warp may have no keys
    peak = max(max(peaks.x, peaks.y), max(peaks.z, peaks.w)) << score.k;
    const i64 B = P_K0 - multiply_add(peak, score.C, 0);
#endif
    u32* to = &shared.p[0][g][warp / 2][quarter][warp % 2 * 2];
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      u32 p[DIGITS] = {};
      if (has(i))
#if BIAS
        four_of_depths({s[i][0] + B, s[i][1] + B, s[i][2] + B, s[i][3] + B}, p);
#else
        four_of(s[i][0], s[i][1], s[i][2], s[i][3], score.C, B, p);
#endif
      else if (KEY_CHUNKS % 2 == 0 || chunk(i) > KEY_CHUNKS)
        continue;  // the step of an odd last chunk has a second, empty chunk
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) {
        if (i == SHARE - 1 && chunk(i) == KEY_CHUNKS - 1) p[digit] &= tile.present;
        to[digit * DIGIT + i * 32] = p[digit];
      }
    }
    sync_warpgroup();
    values(output_constants);
  }

  DEVICE void values(const OutputConstants& output_constants) {
    const u32 first = value_address(v_tile, 8 * BLOCKS * warp + lane % 8, lane / 8 * 16);
    u32 sums[DIGITS] = {};
#pragma unroll
    for (int parity = 0; parity < 2; ++parity)
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit)
#pragma unroll
        for (int i = 0; i < BLOCKS * 4; ++i) acc[parity][digit][i / 4][i % 4] = 0;
#pragma unroll
    for (int pair = 0; pair < (STEPS + 1) / 2; ++pair) {  // pairs of steps of 32 keys
      u32 v[BLOCKS][4];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) load_matrices((first ^ pair % 2 * 64) + pair / 2 * V_BLOCK + b * 1024, v[b]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = 2 * pair + i;
        if (step >= STEPS) continue;
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) {
          const uint4 p = *(const uint4*)shared.p[digit][g][step][quarter];
          sums[digit] = add_bytes(p.z, add_bytes(p.x, sums[digit]));
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b)
            mma_u8_s8(acc[i][digit][b], {p.x, p.y, p.z, p.w}, {v[b][2 * i], v[b][2 * i + 1]});
        }
      }
    }
    l = quad_sum(combine_digits(sums));
    scale = RowScale<OUT, Accumulator>(l, output_constants);
  }

  DEVICE i32 sum(int digit, int i) const { return acc[0][digit][i / 2][i % 2] + acc[1][digit][i / 2][i % 2]; }

  // `row` is row g. Lanes of a quad store adjacent channels as in RowTile, and each warp stores its own channels.
  DEVICE void store(const Params& p, u8* out, u32 batch, u32 head, i32 row,
                    const OutputConstants& output_constants) const {
    if (row >= p.nq) return;
    Accumulator mine[2 * BLOCKS];
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
#if BITS == 8
      mine[i] = sum(0, i);
#else
      mine[i] = {sum(0, i), sum(1, i)};
#endif
    }
    store_outputs<OUT>(out + warp * 2 * BLOCKS * SIZE<OUT>, mine, scale, output_constants);
    if (STATISTICS && warp == 0 && quarter == 0) {
      const i64 at = row_index(p, batch, head, row);
#if BIAS
      p.t_max[at] = peak;
#else
      p.t_max[at] = multiply_add(peak, tile.score[0].C, 0);
#endif
      p.l[at] = l;
    }
  }
};
