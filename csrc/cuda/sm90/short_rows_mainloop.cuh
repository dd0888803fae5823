// The mainloop of short rows, of at most 336 keys: products, exponentials and epilogue of a tile of 64 rows.
//
// K and V^T of a head are in shared memory (short_rows_load.cuh). The scores of a row stay in registers, so that one
// pass over K gives the exact maximum and nothing is rescaled.
//
// Macros:
//   KEYS                 the number of keys, padded to 16
//   FIRST                how many of them are the first part of a row, a multiple of 32; 0 where a row is not split
//   HEAD_DIM             a multiple of 16
//   BITS                 of p, 8 or 16
//   TWO_GROUPS          1: intflash_bfp, with BITS 16; 0 (the default)
//   IN, OUT              the types of Q, K, V and of the output
//   EXP_32BIT            1: T + B is computed in 32 bits where it fits
//   KEY_MAJOR            1: V has contiguous keys
//   ROW_SCALES           1: Q has a scale for each token
//   HEAD_AMAX_IN_KERNEL  1: the kernel computes the scales of floats from each head's own maxima
//   VALUES_IN_RANGE      1: no float is outside its scale's range (quantize.cuh)
//   TMA                  1: TMA loads K and V
//   REMAINDER_ROWS       1: the last rows of a head have a code path of their own (short_rows_remainder.cuh)
//   STATISTICS           1: the caller wants p.t_max and p.l
//   HEADS_FIRST          1: heads are the grid's first axis, as they usually are in memory; 0: batches are
//   REVERSE_HEADS        1: CTAs take the last heads first
//   DIVIDED              which heads are divided among several CTAs, each of which takes `tiles` row tiles, and the
//                        last one all that remain: 0 none, 1 all, 2 those from `share.whole` on, into `share.pieces`
//                        parts
//   BIAS                 int32 p.bias, NO_SCORE for an absent key: 0 none (the default), 1 with contiguous keys, 4 with
//                        contiguous keys that are read four at a time; with EXP_32BIT. BIAS_FRACTION_BITS: of an octave
//   CLUSTER              with HEAD_AMAX_IN_KERNEL, the CTAs of a head, which are a cluster and share the search of its
//                        queries for their scale; 1: each searches alone (the default)
#pragma once
#include "sm90/short_rows_load.cuh"
#include "sm90/wgmma.cuh"
#include "two_groups.cuh"

#ifndef BIAS
#define BIAS 0
#endif
#ifndef TWO_GROUPS
#define TWO_GROUPS 0
#endif
#if BIAS
#include "sm90/short_rows_bias.cuh"
static_assert(EXP_32BIT);
constexpr int BIAS_BYTES = WARPGROUPS * 64 * KEYS * 4;  // of a row tile of each warpgroup
#else
constexpr int BIAS_BYTES = 0;
#endif
constexpr int VALUE_CODES_BYTES = TWO_GROUPS * (KEYS + 16 * WARPGROUPS);  // see short_rows_split.cuh

constexpr int DIGITS = BITS / 8;
typedef AccumulatorOf<DIGITS, true>::Type Accumulator;

// The row's keys are split in two parts (one where there are few). The second part's scores are computed during the
// maximum of the first, and P V of the first during the exponentials of the second.
constexpr int REST = KEYS - FIRST;

// How scores become p, four of a row at a time: a word of each digit. P_K0 is added to T - Tmax, and PEAK_OFFSET to the
// maximum in 2^-24 octave, which gives `minus_B` of a row.
#if TWO_GROUPS
constexpr i64 P_K0 = GROUP_K0;
constexpr u32 PEAK_OFFSET = group_offset(0);
DEVICE void four_of(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B, u32 (&p)[DIGITS]) {
  four_group_p(s0, s1, s2, s3, C, B, Rounding(), p);
}
DEVICE void four_of_32_bits(i32 s0, i32 s1, i32 s2, i32 s3, u32 C, u32 minus_B, u32 (&p)[DIGITS]) {
  four_group_p(s0, s1, s2, s3, C, minus_B, Rounding(), p);
}
DEVICE void four_of_depths(const i64 (&t)[4], u32 (&p)[DIGITS]) { four_group_p(t, Rounding(), p); }
#else
constexpr i64 P_K0 = K0;
constexpr u32 PEAK_OFFSET = 0u - (u32)(K0 >> 8);
DEVICE void four_of(i32 s0, i32 s1, i32 s2, i32 s3, i32 C, i64 B, u32 (&p)[DIGITS]) { four_p(s0, s1, s2, s3, C, B, p); }
DEVICE void four_of_32_bits(i32 s0, i32 s1, i32 s2, i32 s3, u32 C, u32 minus_B, u32 (&p)[DIGITS]) {
  four_p<4 / DIGITS>(s0, s1, s2, s3, (i32)C, 0u - minus_B, p);
}
DEVICE void four_of_depths(const i64 (&t)[4], u32 (&p)[DIGITS]) {
  four_p({power(t[0]), power(t[1]), power(t[2]), power(t[3])}, p);
}
#endif

// The left operands of P V: steps of 32 keys, one operand for each digit.
template <int KEY_COUNT>
struct POperands {
  u32 step[KEY_COUNT ? (KEY_COUNT + 31) / 32 : 1][DIGITS][4];
};

// A tile of 64 rows. A thread has two of them, h = 0 and 1.
struct RowTile {
  u32 q[D_STEPS][4];  // the rows' codes, left operand of Q K^T
  Score score[2];
  i32 limit[2];                               // exp_32bit_limit for the largest possible codes
  bool rarely_exceeded;                       // whether few maxima of the warp's rows exceed `limit`
  i32 peak[2];                                // of S
  i32 a[FIRST ? FIRST / 2 : 1], b[REST / 2];  // scores of the first and the second part of the keys
  // For the 32-bit exponential, which has no k: -B, because a subtraction costs as much as an addition; of intflash_bfp
  // the offset of `four_group_p`.
  u32 minus_B[2];
  u32 sums[2][DIGITS];
  i32 acc[DIGITS][HEAD_DIM / 2];
  u64 k_operand, v_operand;
  u32 sum_selector;  // permute selector for the row sum whose scale this lane computes
  u32 present;       // mask of the bytes of the thread's last four keys that exist
  bool active;       // whether the warp has rows; in the last tile of a head it may have none
  bool fits;         // whether 32 bits hold every T + B of the warp: exp2.cuh, exp_32bit_limit
#if BIAS
  BiasRows bias;
  i64 t_max[2];
  bool has_t;  // whether `a` and `b` hold T of 32 bits in place of the scores
#endif

  // Constant true where remainder rows have their own code path, because all tiles are then whole. P16 without
  // EXP_32BIT would spill, because no branch would separate the exponentials of the two parts.
  DEVICE bool has_rows() const { return (REMAINDER_ROWS && (EXP_32BIT || BITS == 8)) || active; }
  DEVICE void prepare(u32 k_tile, u32 v_tile, i32 nk) {
    k_operand = descriptor<K_WIDTH>(k_tile), v_operand = descriptor<128>(v_tile);
    sum_selector = computes_second_row() ? 0x4432 : 0x4410;
    keep_in_register(sum_selector);
    present = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (KEYS - 16 + 4 * (i32)(threadIdx.x % 4) + i < nk) present |= 0xFFu << (8 * i);
    keep_in_register(present);
  }

  template <int COUNT>
  DEVICE void issue_scores(i32 (&s)[COUNT], int first) {
    wgmma_order();
#pragma unroll
    for (int i = 0; i < D_STEPS; ++i) {
      const u64 k = k_operand + (first * K_WIDTH >> 4) + 2 * i;
      if (i == 0)
        wgmma_s8_new(s, q[i], k);
      else
        wgmma_s8(s, q[i], k);
    }
    wgmma_commit();
  }

  // Updates the rows' maxima of S, in two independent chains each. Absent keys are copies of the last key and do not
  // change them.
  template <bool BEGINS, int COUNT>
  DEVICE void maximum(const i32 (&s)[COUNT]) {
    if (BEGINS) peak[0] = peak[1] = NO_SCORE;
    i32 other[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      i32& to = i < COUNT / 2 ? peak[i / 2 % 2] : other[i / 2 % 2];
      to = max(to, s[i]);
    }
    asm("" : "+r"(other[0]), "+r"(other[1]));
    peak[0] = max(peak[0], other[0]), peak[1] = max(peak[1], other[1]);
  }

  DEVICE void set_limits() {
    constexpr i32 RARE_OCTAVES = 48;  // octaves that a maximum rarely reaches
    if (!EXP_32BIT) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) limit[h] = exp_32bit_limit(score[h].C, score[h].k, 128 * HEAD_DIM);
    if (!ROW_SCALES) keep_in_register(limit[0]), limit[1] = limit[0];
    rarely_exceeded = __all_sync(~0u, min(limit[0], limit[1]) >= RARE_OCTAVES);
  }
  // Returns the limit for both rows. Where many maxima could exceed the general limit, it is computed from the rows'
  // own codes.
  DEVICE i32 exp_32bit_limits() const {
    if (rarely_exceeded) return min(limit[0], limit[1]);
    i32 own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 sum = 0;
#pragma unroll
      for (int i = 0; i < D_STEPS; ++i) sum = add_magnitudes(q[i][h], add_magnitudes(q[i][2 + h], sum));
      own[h] = exp_32bit_limit(score[h].C, score[h].k, quad_sum(sum));
    }
    return min(own[0], own[1]);
  }
  DEVICE i32 highest_octave() const {
    if (ROW_SCALES) return max(octave_above(peak[0], score[0].C), octave_above(peak[1], score[1].C));
    return octave_above(max(peak[0], peak[1]), score[0].C);
  }
  // Returns Tmax in 2^-32 octave.
  DEVICE i64 top(int h) const {
#if BIAS
    return t_max[h];
#else
    return multiply_add(peak[h] << score[h].k, score[h].C, 0);
#endif
  }

#if BIAS
  // Whether the scores of the warp's rows, and a bias within BiasRows::REACH, keep T within 112 octaves of 0, so that
  // no key is 238 octaves below the maximum.
  DEVICE bool scores_fit() const {
    bool fit = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 sum = 0;
#pragma unroll
      for (int i = 0; i < D_STEPS; ++i) sum = add_magnitudes(q[i][h], add_magnitudes(q[i][2 + h], sum));
      const i64 most = (i64)(128 * quad_sum(sum)) * (score[h].C >> 8);
      fit &= score[h].k == 0 && (score[h].C & 255) == 0 && most <= 80ll << 24;
    }
    return __all_sync(~0u, fit);
  }

  // Replaces scores by T in 2^-24 octave, and updates the rows' maxima of T and the reach of their biases.
  template <bool LAST, int COUNT>
  DEVICE void add_bias(i32 (&s)[COUNT], int first, u32& reach) {
#pragma unroll
    for (int group = 0; group < COUNT / 8; ++group)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        i32 x[4];
        bias.load(first + group, h, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          i32& t = s[8 * group + j / 2 * 4 + 2 * h + j % 2];
          reach |= (u32)x[j] + BiasRows::REACH;
          t = (i32)((u32)t * (u32)(score[h].C >> 8) + ((u32)x[j] << BiasRows::SHIFT));
          if (LAST && group == COUNT / 8 - 1) t = present >> (8 * j) & 1 ? t : NO_SCORE;
          peak[h] = max(peak[h], t);
        }
      }
  }

  // Returns T in 2^-32 octave of score i of keys from 16 `first` on.
  DEVICE i64 wide_t(i32 s, int i, const i32 (&x)[4]) const {
    const int h = i / 2 % 2;
    const i32 b = x[i / 4 % 2 * 2 + i % 2];
    const i64 t = has_t ? multiply_add((i32)((u32)s - ((u32)b << BiasRows::SHIFT)), 256, 0)
                        : multiply_add(s << score[h].k, score[h].C, 0);
    return BiasRows::add(b, t);
  }
  template <bool LAST, int COUNT>
  DEVICE void wide_maximum(const i32 (&s)[COUNT], int first) {
#pragma unroll
    for (int group = 0; group < COUNT / 8; ++group)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        i32 x[4];
        bias.load(first + group, h, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * group + j / 2 * 4 + 2 * h + j % 2;
          i64 t = wide_t(s[i], i, x);
          if (LAST && group == COUNT / 8 - 1) t = present >> (8 * j) & 1 ? t : ABSENT_T;
          t_max[h] = t_max[h] > t ? t_max[h] : t;
        }
      }
  }

  // Computes p of the four scores x[0], x[1], x[4] and x[5] of a row. Without keys they are 0.
  DEVICE void wide_p(int group, int h, const i32* x, u32 (&p)[DIGITS]) const {
    i32 of[4];
    bias.load(group, h, of);
    const i64 B = t_max[h] == ABSENT_T ? ABSENT_T : P_K0 - t_max[h];
    const auto depth = [&](int i) { return wide_t(x[i], 2 * h + i, of) + B; };
    four_of_depths({depth(0), depth(1), depth(4), depth(5)}, p);
  }

  // Computes T and the rows' maxima. Q is not needed afterwards.
  DEVICE void scores_and_bias() {
    if constexpr (FIRST > 0) issue_scores(a, 0);
    issue_scores(b, FIRST);
    has_t = scores_fit();
    cp_async_wait_all();
    u32 reach = 0;
    peak[0] = peak[1] = NO_SCORE;
    if constexpr (FIRST > 0) {
      wgmma_wait<1>(a);
      if (has_rows() && has_t) add_bias<false>(a, 0, reach);
    }
    wgmma_wait(b);
    if (!has_rows()) return;
    if (has_t) add_bias<true>(b, FIRST / 16, reach);
    fits = has_t && __all_sync(~0u, reach < 2 * BiasRows::REACH);
    if (fits) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        peak[h] = quad_max(peak[h]);
        minus_B[h] = (u32)peak[h] + PEAK_OFFSET;
        t_max[h] = multiply_add(peak[h], 256, 0);
      }
      return;
    }
    t_max[0] = t_max[1] = ABSENT_T;
    if constexpr (FIRST > 0) wide_maximum<false>(a, 0);
    wide_maximum<true>(b, FIRST / 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) t_max[h] = quad_max(t_max[h]);
  }
#endif

  template <bool LAST, int COUNT, int KEY_COUNT>
  DEVICE void exponentials(i32 (&s)[COUNT], POperands<KEY_COUNT>& p) {
    if (EXP_32BIT && fits)
      exponentials<LAST, true>(s, p);
    else
      exponentials<LAST, false>(s, p);
  }
  template <bool LAST, bool IN_32BIT, int COUNT, int KEY_COUNT>
  DEVICE void exponentials(i32 (&s)[COUNT], POperands<KEY_COUNT>& p) {
    if (!BIAS && !IN_32BIT && score[0].k | score[1].k) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) s[i] <<= score[i / 2 % 2].k;
    }
#pragma unroll
    for (int group = 0; group < KEY_COUNT / 16; ++group)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32(&to)[DIGITS][4] = p.step[group / 2];
        const int j = group % 2 * 2 + h;
        const i32* x = &s[8 * group + 2 * h];
        u32 four[DIGITS];
        const i32 C = score[h].C;
        if constexpr (IN_32BIT)
          four_of_32_bits(x[0], x[1], x[4], x[5], BIAS ? 1 : C >> 8, minus_B[h], four);
        else
#if BIAS
          wide_p((LAST ? FIRST / 16 : 0) + group, h, x, four);
#else
          four_of(x[0], x[1], x[4], x[5], C, P_K0 - top(h), four);
#endif
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) {
          to[digit][j] = four[digit];
          if (LAST && group == KEY_COUNT / 16 - 1) to[digit][j] &= present;
          sums[h][digit] = add_bytes(to[digit][j], sums[h][digit]);
        }
      }
  }

  template <int KEY_COUNT>
  DEVICE void issue_pv(POperands<KEY_COUNT>& p, int first) {
    wgmma_order();
#pragma unroll
    for (int i = 0; i < (KEY_COUNT + 31) / 32; ++i)
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) {
        const int step = first / 32 + i;
        const u64 v = v_operand + step / 4 * (V_BLOCK >> 4) + step % 4 * 2;
        if (step == 0)
          wgmma_u8_new(acc[digit], p.step[i][digit], v);
        else
          wgmma_u8(acc[digit], p.step[i][digit], v);
      }
    wgmma_commit();
  }

  // Computes the scores and the rows' maxima. Q is not needed afterwards.
  DEVICE void scores() {
#if BIAS
    return scores_and_bias();
#endif
    asm volatile("" : "=r"(peak[0]), "=r"(peak[1]));  // any value: only active warps read them
    i32 own;
    if constexpr (FIRST > 0) {
      issue_scores(a, 0);
      issue_scores(b, FIRST);
      if (EXP_32BIT) own = exp_32bit_limits();  // while the products run
      wgmma_wait<1>(a);
      if (active) maximum<true>(a);  // the branch keeps this before the wait for the second part's products
    } else {
      issue_scores(b, 0);
      if (EXP_32BIT) own = exp_32bit_limits();
    }
    wgmma_wait(b);
    if (has_rows()) {
      maximum<FIRST == 0>(b);
      fits = EXP_32BIT && __all_sync(~0u, highest_octave() <= own);  // each lane tests its own keys
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        peak[h] = quad_max(peak[h]);
        minus_B[h] = (u32)peak[h] * (score[h].C >> 8) + PEAK_OFFSET;
      }
    }
  }

  // Computes the exponentials and issues P V. The last product is still in flight on return.
  DEVICE void exponentials_and_products() {
    POperands<FIRST> pa = {};
    POperands<REST> pb = {};
#pragma unroll
    for (int i = 0; i < 2 * DIGITS; ++i) sums[i / DIGITS][i % DIGITS] = 0;
    if constexpr (FIRST > 0) {
      if (has_rows()) exponentials<false>(a, pa);
      issue_pv(pa, 0);
    }
    if (has_rows()) exponentials<true>(b, pb);
    issue_pv(pb, FIRST);
  }

  // Returns the row sum whose scale this lane computes; `l` receives the quad's sums of both rows.
  DEVICE u32 row_sums(u32 (&l)[2]) const {
    if constexpr (DIGITS == 1 && KEYS * 255 < 1 << 16) {  // both fit in a word
      const u32 both = quad_sum((sums[1][0] << 16) + sums[0][0]);
      l[0] = both & 0xFFFF, l[1] = both >> 16;
      return permute(both, 0, sum_selector);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) l[h] = quad_sum(combine_digits(sums[h]));
      return computes_second_row() ? l[1] : l[0];
    }
  }

  // Stores the output of both rows; `row` is the thread's first. Everything that does not depend on the last products
  // is computed while they run.
  DEVICE void store(const Params& p, u8* out, u32 batch, u32 head, i32 row, const OutputConstants& output_constants) {
    u32 l[2];
    RowScale<OUT, Accumulator> scales[2];
    i64 to[2];
    if (has_rows()) {
      row_scales(row_sums(l), output_constants, scales);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to[h] = h ? multiply_add(8, (i32)p.out.n * SIZE<OUT>, to[0]) : (i64)out;
        asm volatile("" : "+l"(to[h]));  // keeps the computation before the wait
      }
    }
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) wgmma_wait(acc[digit]);
    if (!has_rows()) return;
    Accumulator mine[2][CHANNELS];
#pragma unroll
    for (int i = 0; i < 2 * CHANNELS; ++i) {
      Accumulator& to = mine[i / 2 % 2][i / 4 * 2 + i % 2];
#if BITS == 8
      to = acc[0][i];
#else
      to = {acc[0][i], acc[1][i]};
#endif
    }
    u32 words[2][CHANNELS * SIZE<OUT> / 4];
    output_words<OUT>(mine, scales, output_constants, words);
    const auto has = [&](int h) {
      return REMAINDER_ROWS || row + 8 * h < p.nq;
    };  // with remainder rows all tiles are whole
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (has(h)) store_words((u8*)to[h], words[h]);
    if (STATISTICS && threadIdx.x % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i64 at = row_index(p, batch, head, row + 8 * h);
        if (!has(h)) continue;
        p.t_max[at] = top(h);
        p.l[at] = l[h];
      }
    }
  }
};
