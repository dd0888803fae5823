// The softmax of intflash_bfp in the mainloop of long rows, whose tiles are the method's blocks of keys. One pass over
// the keys; rows whose octaves span too much are computed again by `sum_again`. Further macro: ROW_SCALES (see
// integer_softmax.cuh).
#pragma once
#include "block_float.cuh"
#include "mma.cuh"
#include "sm90/long_rows_mainloop.cuh"

// Channels of one product of P V: a block's sums have few registers beside the row's, which take two each.
constexpr int PV_CHANNELS = HEAD_DIM % 32 ? 16 : HEAD_DIM > 64 ? 32 : HEAD_DIM;
constexpr int PV_STEPS = HEAD_DIM / PV_CHANNELS;

DEVICE u32 load_word(const u8* from) { return *(const volatile u32*)from; }
DEVICE u32 load_word_if(bool there, const u8* from) { return there ? load_word(from) : 0; }

// P of a block: 256 high + low, each the left operand of four products over 32 keys.
struct BlockP {
  u32 digit[2][4][4];
};

// What has no registers, in shared memory: SCRATCH_BYTES for each warpgroup, in which a thread reads its own words
// only.
struct Scratch {
  u32 base;  // of this thread's 64-bit words

  Scratch() = default;
  DEVICE Scratch(const SharedLayout& shared)
      : base(shared.scratch + (threadIdx.x / GROUP - 1) * SCRATCH_BYTES + threadIdx.x % GROUP * 8) {}
  DEVICE i64 load(int i) const {
    i64 x;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(base + i * GROUP * 8) : "memory");
    return x;
  }
  DEVICE void store(int i, i64 x) const {
    const u32 w[2] = {(u32)x, (u32)(x >> 32)};
    store_shared(base + i * GROUP * 8, w);
  }
};
// The octaves and l of the groups without a value of two rows, l of those with one; a word for `shift_acc`.
constexpr int SUM_WORDS = 7;

// A row pair's sums of P V, of which the last ones are in shared memory.
struct BlockAccumulators {
  static constexpr int COUNT = HEAD_DIM / 2, OWN = COUNT - (SCRATCH_BYTES / (GROUP * 8) - SUM_WORDS);
  i64 own[OWN];
  Scratch scratch;

  DEVICE i64 get(int i) const { return i < OWN ? own[i < OWN ? i : 0] : scratch.load(SUM_WORDS + i - OWN); }
  DEVICE void set(int i, i64 x) {
    if (i < OWN)
      own[i < OWN ? i : 0] = x;
    else
      scratch.store(SUM_WORDS + i - OWN, x);
  }
};

struct BlockFloat {
  typedef BlockP P;
  typedef Scores BlockScores[2];
  static constexpr int PASSES = 1, BUFFERS = 2, UNROLL = 1;
  static constexpr bool RESCALES = false, WHOLE_TILES = false, BLOCKS = true;
  static constexpr i32 HEADROOM = 4;
  i32 C[2], shift[2];
  bool fast_exp;
  i32 fraction;
  u32 valueless;      // index of the word of this thread's keys in the first block
  GroupSum value[2];  // without l, which is in `scratch` like all of the groups without a value
  i32 lowest[2];      // octave of any group
  i32 unit[2];        // of the last block's sums in acc
  i32 acc_shift;      // from acc to 2^24 in the row's unit: one pass adds no bits below A_g's
  Scratch scratch;
  BlockAccumulators acc;

  DEVICE GroupSum other(int h) const {
    const i32 top = (i32)scratch.load(h);
    return {top, top, scratch.load(2 + h)};
  }
  DEVICE void set_other(int h, const GroupSum& sum) { scratch.store(h, sum.top), scratch.store(2 + h, sum.l); }
  DEVICE GroupSum value_sum(int h) const { return {value[h].top, value[h].base, scratch.load(4 + h)}; }
  DEVICE void clear_acc() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) acc.set(i, 0);
  }

  DEVICE void init(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!ROW_SCALES && h == 1) {
        C[1] = C[0], shift[1] = shift[0];
        continue;
      }
      const i64 row = head_offset(p.score, at.batch, at.head) + min(at.row + 8 * h, p.nq - 1) * p.score.n;
      Score score = unpack_score(((const i64*)p.score.ptr)[row]);
      // uniform for the compiler
      if (!ROW_SCALES) score = {__shfl_sync(~0u, score.C, 0), __shfl_sync(~0u, score.k, 0)};
      C[h] = score.C, shift[h] = score.k;
    }
    const u32 magnitudes = row_magnitudes(shared, threadIdx.x);
    fast_exp = __all_sync(
        ~0u, fits_32_bits({C[0], shift[0]}, magnitudes & 0xFFFF) & fits_32_bits({C[1], shift[1]}, magnitudes >> 16));
    fraction = fraction_bits(p.nk), acc_shift = ACC_SHIFT;
    acc.scratch = scratch = Scratch(shared);
    valueless = (u32)head_offset(p.valueless, at.batch, at.kv_head) + threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      value[h] = {NO_EXPONENT, NO_EXPONENT, 0}, set_other(h, value[h]), scratch.store(4 + h, 0),
      lowest[h] = -NO_EXPONENT;
    clear_acc();
  }

  // Returns the mask of this thread's keys of block j that have no value.
  DEVICE u32 zeros(const Params& p, i32 j) const { return ((const u32*)p.valueless.ptr)[valueless + 4 * j]; }

  // Returns the mask of this thread's keys of a block that a row sees.
  DEVICE static u32 visible_keys(const VisibleKeys (&visible)[2], int h) {
    u32 mask = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if KEY_MASK
#pragma unroll
      for (int i = 0; i < 4; ++i) mask |= bits_of_bytes(visible[half].mask_word(i)) << (16 * half + 4 * i);
#else
      const i32 keys = max(visible[half].keys[h], 0), count = min(keys / 16 * 4 + min(keys % 16, 4), 16);
      mask |= ((1u << count) - 1) << 16 * half;
#endif
    }
    return mask;
  }
  // The scores of 32 keys are 16 of a thread's; this is the bit of one in a mask of a row's keys.
  DEVICE static constexpr u32 bit_of_score(int part, int i) {
    return 1u << (8 * part + i / 8 * 4 + i / 4 % 2 * 2 + i % 2);
  }
  template <bool MASKED>
  DEVICE static void update_peaks(const i32 (&s)[16], int part, const u32 (&keys)[2], i32 (&peak)[2]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int h = i / 2 % 2;
      peak[h] = max(peak[h], !MASKED || keys[h] & bit_of_score(part, i) ? s[i] : NO_SCORE);
    }
  }
  // Returns the octaves of the quad's maxima.
  DEVICE void octaves(const i32 (&peak)[2], i32 (&e)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32 score = quad_max(peak[h]);
      e[h] = score == NO_SCORE ? NO_EXPONENT : octave_above(score << shift[h], C[h]);
    }
  }
  // Computes P of 32 keys and adds it to the digits' sums.
  template <bool MASKED, bool FAST>
  DEVICE void weights(const i32 (&s)[16], int part, const u32 (&keys)[2], const i32 (&e)[2], P& p,
                      u32 (&sums)[2][2]) const {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int h = word % 2;
      u32 four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 8 * (word / 2) + 2 * h + j / 2 * 4 + j % 2;
        if constexpr (FAST)
          four[j] = block_p24((u32)s[at] * (u32)(-(C[h] >> 8)) + block_offset(e[h]));
        else
          four[j] = block_p24(multiply_add(s[at] << shift[h], C[h], BLOCK_K0 - ((i64)e[h] << 32)));
      }
      u32 &high = p.digit[0][part][word], &low = p.digit[1][part][word];
      u32 digit[2];
      pack_block_p(four, digit);
      high = digit[0], low = digit[1];
      if constexpr (MASKED) {
        const u32 bytes = bytes_of_bits(keys[h] >> (8 * part + word / 2 * 4));
        high &= bytes, low &= bytes;
      }
      sums[h][0] = add_bytes(high, sums[h][0]), sums[h][1] = add_bytes(low, sums[h][1]);
    }
  }
  // Computes a group's octaves, P and sums, of this thread's keys.
  template <bool MASKED, bool FAST>
  DEVICE void group(const BlockScores& s, const u32 (&keys)[2], i32 (&e)[2], P& p, u32 (&sums)[2]) const {
    i32 peak[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
    for (int part = 0; part < 4; ++part) update_peaks<MASKED>(scores_of(s, part), part, keys, peak);
    octaves(peak, e);
    u32 digits[2][2] = {};
#pragma unroll
    for (int part = 0; part < 4; ++part) weights<MASKED, FAST>(scores_of(s, part), part, keys, e, p, digits);
#pragma unroll
    for (int h = 0; h < 2; ++h) sums[h] = (digits[h][0] << 8) + digits[h][1];
  }
  typedef i32 PartScores[16];
  DEVICE static const PartScores& scores_of(const BlockScores& s, int part) {
    return (const PartScores&)s[part / 2][part % 2 * 16];
  }
  // Adds a group's sum to its kind's, and makes its unit in them. Returns by how many octaves the kind rises.
  DEVICE i32 add(GroupSum& to, int h, i32 e, u32 sum, i32 headroom) {
    const i32 by = to.raise(e, headroom);
    lowest[h] = min(lowest[h], e == NO_EXPONENT ? -NO_EXPONENT : e);
    unit[h] = group_unit(fraction, to.base - e);
    to.l = multiply_add((i32)sum, unit[h], to.l);
    return by;
  }
  DEVICE void add_values_group(const i32 (&e)[2], const u32 (&sums)[2]) {
    i32 by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      value[h].l = scratch.load(4 + h);
      by[h] = add(value[h], h, e[h], sums[h], HEADROOM);
      scratch.store(4 + h, value[h].l);
    }
    if (__any_sync(~0u, by[0] | by[1])) shift_acc(by);
  }
  // Goes through memory, because of shifted words ptxas would make pairs of registers by copies, in every block.
  DEVICE void shift_acc(const i32 (&by)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) {
      scratch.store(SUM_WORDS - 1, acc.get(i) >> by[i / 2 % 2]);
      acc.set(i, scratch.load(SUM_WORDS - 1));
    }
  }
  // Computes P of a block's keys with a value, and all sums but those with V. The scores are available.
  DEVICE void block(const BlockScores& s, bool partial, const VisibleKeys (&visible)[2], u32 zeros, P& p) {
    u32 keys[2] = {~0u, ~0u};
    if (fast_exp && !partial && !__any_sync(~0u, zeros != 0)) {
      i32 e[2];
      u32 sums[2];
      group<false, true>(s, keys, e, p, sums);
      return add_values_group(e, sums);
    }
    if (partial) keys[0] = visible_keys(visible, 0), keys[1] = visible_keys(visible, 1);
    i32 e[2];
    u32 sums[2];
    if (__any_sync(~0u, zeros != 0)) {
      const u32 without[2] = {keys[0] & zeros, keys[1] & zeros};
      group<true, false>(s, without, e, p, sums);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        GroupSum other = this->other(h);
        add(other, h, e[h], sums[h], 0);
        set_other(h, other);
      }
      keys[0] &= ~zeros, keys[1] &= ~zeros;
    }
    if (fast_exp)
      group<true, true>(s, keys, e, p, sums);
    else
      group<true, false>(s, keys, e, p, sums);
    add_values_group(e, sums);
  }

  typedef i32 BlockSums[2][PV_CHANNELS / 2];
  template <bool OVER>
  DEVICE void issue_pv(const P& p, u64 v, BlockSums& sums) const {
    wgmma_order();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u64 keys = v + i / 2 * V_HALF + i % 2 * 2;
#pragma unroll
      for (int digit = 0; digit < 2; ++digit)
        if (i == 0 && OVER)
          wgmma_u8_over(sums[digit], p.digit[digit][i], keys);
        else if (i == 0)
          wgmma_u8_new(sums[digit], p.digit[digit][i], keys);
        else
          wgmma_u8(sums[digit], p.digit[digit][i], keys);
    }
    wgmma_commit();
  }
  DEVICE void merge(const BlockSums& sums, int step) {
#pragma unroll
    for (int i = 0; i < PV_CHANNELS / 2; ++i) {
      const int to = step * PV_CHANNELS / 2 + i;
      i64 x = multiply_add(block_acc({sums[0][i], sums[1][i]}), unit[i / 2 % 2], acc.get(to));
      keep_in_register(x);  // before the next product is issued, which needs the registers of `sums`
      acc.set(to, x);
    }
  }
  // Adds P V of a block. `then` runs once the products have finished.
  template <class Then>
  DEVICE void add_values(const P& p, u64 v, const Then& then) {
    BlockSums sums;
#pragma unroll
    for (int step = 0; step < PV_STEPS; ++step) {
      if (step == 0)
        issue_pv<false>(p, v, sums);
      else
        issue_pv<true>(p, v + step * (PV_CHANNELS * 128 >> 4), sums);
      wgmma_wait<0>(sums[0]);
      wgmma_hold(sums[1]);
      if (step == PV_STEPS - 1) then();
      merge(sums, step);
    }
  }

  // The i-th accumulator of row h.
  DEVICE static constexpr int place(int h, int i) { return 4 * (i / 2) + 2 * h + i % 2; }

  // Whether a shift of some row of the warp dropped bits.
  DEVICE bool is_inexact() const {
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) far |= max(value[h].base, other(h).top) - lowest[h] > fraction;
    return __any_sync(~0u, far);
  }

  static constexpr int PART = CHANNELS == 32 ? 16 : CHANNELS;  // channels whose outputs are computed at once
  DEVICE void store(const Params& p, const ThreadRows& at) const {
    const OutputConstants constants = load_output_constants<OUT>(p, at.batch, at.head, at.kv_head);
    const RowSum rows[2] = {RowSum(value_sum(0), other(0)), RowSum(value_sum(1), other(1))};
    const BlockScales<OUT, 2> scales(rows, constants);
    const i32 below[2] = {value[0].base - value[0].top + acc_shift, value[1].base - value[1].top + acc_shift};
#pragma unroll
    for (int first = 0; first < CHANNELS; first += PART) {
      P16Accumulator mine[2][PART];
#pragma unroll
      for (int i = 0; i < 2 * PART; ++i)
        mine[i / PART][i % PART] = rounded(acc.get(place(i / PART, first + i % PART)), below[i / PART]);
      u32 words[2][PART * SIZE<OUT> / 4];
      scales.outputs(mine, words);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i32 row = at.row + 8 * h;
        const i64 to = head_offset(p.out, at.batch, at.head) + row * p.out.n + threadIdx.x % 4 * CHANNELS + first;
        if (row >= at.end) continue;
        if (first + PART == CHANNELS)
          store_last_channels((u8*)element<OUT>(p.out.ptr, to), words[h]);
        else
          store_words((u8*)element<OUT>(p.out.ptr, to), words[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32 row = at.row + 8 * h;
      if (p.l && threadIdx.x % 4 == 0 && row < at.end) {
        const i64 to = ((i64)at.batch * p.heads + at.head) * p.nq + row;
        p.t_max[to] = rows[h].level(fraction);
        p.l[to] = rows[h].l;
      }
    }
  }

  // Sums a warp's 16 rows again, block by block and floored as the definition says, from their largest octaves. It
  // reads K and V in global memory, because the ring has gone on, and uses the products of a warp, because other warps
  // of the warpgroup may have nothing to do. Lane 0 of a quad ends with all of l.
  // of_half: returns the visible keys of a half of the block that begins at a key.
  template <class VisibleOf>
  DEVICE void sum_again(const Params& p, const ThreadRows& at, const SharedLayout& shared, i32 tiles, i32 whole,
                        const VisibleOf& of_half) {
    const u32 lane = threadIdx.x % 32, quarter = lane % 4, g = lane / 4;
    const u32 row = threadIdx.x % GROUP / 32 * 16 + g, query = shared.query_rows(threadIdx.x / GROUP - 1);
    const u8* k = p.k.ptr + head_offset(p.k, at.batch, at.kv_head);
    const u8* v = p.v.ptr + head_offset(p.v, at.batch, at.kv_head);
    i32 top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = max(value[h].top, other(h).top);
    acc_shift = 0;
    clear_acc();
    i64 l[2] = {0, 0};
#pragma unroll 1
    for (i32 j = 0; j < tiles; ++j) {
      u32 keys[2][2];  // with a value, and without
      const u32 zeros = this->zeros(p, j);
      const VisibleKeys halves[2] = {of_half(0, j * TILE), of_half(1, j * TILE)};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 seen_keys = j >= whole ? visible_keys(halves, h) : ~0u;
        keys[0][h] = seen_keys & ~zeros, keys[1][h] = seen_keys & zeros;
      }
      // The scores of 32 keys at a time, twice: there are no registers for all.
      const auto scores = [&](int part, i32(&s)[16]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 8 keys, of which the lanes of column g load one
          const i32 key = j * TILE + part * 32 + i / 2 * 16 + 4 * (g / 2) + i % 2 * 2 + g % 2;
          const u8* from = k + min(key, p.nk - 1) * p.k.n + 4 * quarter;
          i32 sums[4] = {};
#pragma unroll
          for (int step = 0; step < D_STEPS; ++step) {
            OperandA q;
#pragma unroll
            for (int w = 0; w < 4; ++w)
              q.word[w] = load_shared(query + swizzled<K_WIDTH>(row + w % 2 * 8, 2 * step + w / 2) + 4 * quarter);
            mma_s8_s8(sums, q,
                      {load_word(from + 32 * step), load_word_if(2 * step + 1 < D_CHUNKS, from + 32 * step + 16)});
          }
#pragma unroll
          for (int w = 0; w < 4; ++w) s[4 * i + w] = sums[w];
        }
      };
      i32 peak[2][2] = {{NO_SCORE, NO_SCORE}, {NO_SCORE, NO_SCORE}}, e[2][2];
      u32 digits[2][2][2] = {};
      P codes;
#pragma unroll 1
      for (int part = 0; part < 4; ++part) {
        i32 s[16];
        scores(part, s);
        update_peaks<true>(s, part, keys[0], peak[0]), update_peaks<true>(s, part, keys[1], peak[1]);
      }
      octaves(peak[0], e[0]), octaves(peak[1], e[1]);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        i32 s[16];
        scores(part, s);
        weights<true, false>(s, part, keys[1], e[1], codes, digits[1]),
            weights<true, false>(s, part, keys[0], e[0], codes, digits[0]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int kind = i / 2, h = i % 2;
        const u32 sum = quad_sum((digits[kind][h][0] << 8) + digits[kind][h][1]);
        l[h] += merged((i32)sum, fraction, top[h] - e[kind][h]);
      }
#pragma unroll
      for (int b = 0; b < HEAD_DIM / 8; ++b) {
        const u8* channel = v + channel_of_row<HEAD_DIM>(8 * b + g) * p.v.d;
        i32 sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i32 key = j * TILE + 32 * i + 4 * quarter;
          const OperandB values = {load_word_if(key < p.nk, channel + key),
                                   load_word_if(key + 16 < p.nk, channel + key + 16)};
#pragma unroll
          for (int digit = 0; digit < 2; ++digit)
            mma_u8_s8(sums[digit],
                      {codes.digit[digit][i][0], codes.digit[digit][i][1], codes.digit[digit][i][2],
                       codes.digit[digit][i][3]},
                      values);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
          acc.set(4 * b + i, acc.get(4 * b + i) +
                                 merged(block_sum({sums[0][i], sums[1][i]}), fraction, value[i / 2].top - e[0][i / 2]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // the one that RowSum does not shift
      const bool of_value = value[h].top == top[h];
      value[h].base = value[h].top;
      scratch.store(4 + h, of_value && quarter == 0 ? l[h] : 0);
      set_other(h, {other(h).top, 0, of_value || quarter != 0 ? 0 : l[h]});
    }
  }
};
