// The softmax of intflash_bfp, of one tile of 16 rows.
//
// Macros: see softmax.cuh.
#pragma once
#include "block_float.cuh"
#include "sm80/softmax.cuh"

constexpr int BLOCK = 128;  // keys of a block of the method

typedef ScoresOf<BLOCK> BlockScores;

// P of a group of a block's keys, its sums over the quad, and the octaves that they count from.
struct BlockWeights {
  u32 word[BLOCK / 32][2][4];  // of a digit: the left operand of a product over 32 keys
  u32 l[2];
  i32 e[2];
};

// The octaves and P of blocks. NOW is the number of a block's keys that are computed; all rows see the first WHOLE of
// them. SOME: of keys that `chosen` has bits for.
struct BlockSoftmax {
  static constexpr int DIGITS = 2, BIAS_UNIT = 1 << 20;
  static constexpr bool BLOCKS = true;
  typedef P16Accumulator Accumulator;
  typedef RowSum Row;
  template <typename TO, int N>
  using OutputScales = BlockScales<TO, N>;
  enum Kind { VALUE, OTHER };  // keys with a value, and keys without
  i32 top[2][2];               // the largest octaves of a kind and row
  i64 l[2];                    // in the unit of the row's octave
  Score scores[ROW_SCALES ? 2 : 1];
  const u32* valueless;  // word of this lane's keys in the first block
  i32 fraction;
  bool fast;  // whether 32 bits hold the exponents of all rows of the warp

  DEVICE const Score& score(int, int h) const { return scores[ROW_SCALES ? h : 0]; }
  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, const u32* valueless_words, i32 keys) {
    static_assert(ROW_TILES == 1);
#pragma unroll
    for (int h = 0; h < (ROW_SCALES ? 2 : 1); ++h) scores[h] = constants(0, h);
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = 0;
    valueless = valueless_words + threadIdx.x % 4;
    fraction = fraction_bits(keys);
  }
  // magnitude(m, h): the sum of the magnitudes of a row's codes.
  template <class Magnitude>
  DEVICE void choose_form(Magnitude magnitude) {
    bool fast = !BIAS;
#pragma unroll
    for (int h = 0; h < 2; ++h) fast &= fits_32_bits(score(0, h), magnitude(0, h));
    this->fast = __all_sync(~0u, fast);
  }

  // Returns bits of this lane's keys from `first` on, four for each group of 16, set for those without a value.
  DEVICE u32 zeros(i32 first) const { return valueless[first / BLOCK * 4] >> first % BLOCK / 4; }
  // ptxas would read the masks of several groups at once and keep them from one pass over a block's keys to the next,
  // for which there are no registers. It moves no load across a barrier.
  DEVICE static void forget_masks() {
    if constexpr (BIAS || KEEP) __syncwarp();
  }
  // Returns the bytes of the keys of a group that a row sees, those of `chosen` where SOME.
  template <bool MASKED, bool SOME>
  DEVICE static u32 present(const RowMask& mask, int group, i32 key, i32 keys, u32 chosen) {
    u32 bytes = MASKED || KEEP ? mask.template present<MASKED>(key, keys) : ~0u;
    if constexpr (SOME) bytes &= bytes_of_bits(chosen >> 4 * group);
    return bytes;
  }
  template <bool MASKED, bool SOME>
  DEVICE void update_peak(const BlockScores& s, int h, int group, const RowMask& mask, i32 key, i32 keys, u32 chosen,
                          Peak& peak) const {
    forget_masks();
    u32 seen = present<MASKED, SOME>(mask, group, key, keys, chosen);
    Peak x[4];
    peaks<BIAS_UNIT>(score(0, h), s, 0, h, group, mask, key, keys, x, seen);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Peak one = !(MASKED || SOME || KEEP || BIAS) || seen & 1u << (8 * i) ? x[i] : NO_PEAK;
      peak = peak > one ? peak : one;
    }
  }
  template <int NOW, int WHOLE, bool SOME>
  DEVICE void update_peaks(const BlockScores& s, const RowMasks& masks, i32 first, i32 keys, u32 chosen,
                           Peak (&peak)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int group = 0; group < NOW / 16; ++group) {
        const i32 key = first + first_key(group);
        if (16 * group + 16 <= WHOLE)
          update_peak<false, SOME>(s, h, group, masks[0][h], key, keys, chosen, peak[h]);
        else
          update_peak<true, SOME>(s, h, group, masks[0][h], key, keys, chosen, peak[h]);
      }
  }
  // Returns the octave of the quad's maximum.
  DEVICE i32 octave(Peak peak, int h) const {
    const Peak most = quad_max(peak);
    const Score& unit = score(0, h);
#if BIAS
    return most == NO_PEAK ? NO_EXPONENT : octave_above(most);
#else
    return most == NO_PEAK ? NO_EXPONENT : octave_above(most << unit.k, unit.C);
#endif
  }
  DEVICE i32 row_top(int h) const { return max(top[VALUE][h], top[OTHER][h]); }

  // Computes a word of each digit of P.
  template <bool MASKED, bool SOME, bool FAST>
  DEVICE void words(const BlockScores& s, int h, int group, const RowMask& mask, i32 key, i32 keys, u32 chosen, i32 e,
                    u32 (&digit)[DIGITS]) const {
    forget_masks();
    u32 seen = present<MASKED, SOME>(mask, group, key, keys, chosen);
    const Score& unit = score(0, h);
    u32 four[4];
    if constexpr (FAST) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        four[i] = block_p16((u32)score_of(s, 0, h, group, i) * (u32)(-(unit.C >> 8)) + block_offset(e));
    } else {
      i64 t[4];
      exponents<BIAS_UNIT>(unit, s, 0, h, group, mask, key, keys, BLOCK_K0 - ((i64)e << 32), t, seen);
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = block_p16(t[i]);
    }
    pack_block_p(four, digit);
    if (MASKED || SOME || KEEP || BIAS)
      for (u32& x : digit) x &= seen;
  }
  template <int NOW, int WHOLE, bool SOME, bool FAST>
  DEVICE void weights(const BlockScores& s, const RowMasks& masks, i32 first, i32 keys, u32 chosen,
                      BlockWeights& p) const {
    Peak peak[2] = {NO_PEAK, NO_PEAK};
    update_peaks<NOW, WHOLE, SOME>(s, masks, first, keys, chosen, peak);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p.e[h] = octave(peak[h], h);
      u32 sums[DIGITS] = {};
#pragma unroll
      for (int group = 0; group < NOW / 16; ++group) {
        const i32 key = first + first_key(group);
        u32 digit[DIGITS];
        if (16 * group + 16 <= WHOLE)
          words<false, SOME, FAST>(s, h, group, masks[0][h], key, keys, chosen, p.e[h], digit);
        else
          words<true, SOME, FAST>(s, h, group, masks[0][h], key, keys, chosen, p.e[h], digit);
#pragma unroll
        for (int i = 0; i < DIGITS; ++i) {
          sums[i] = add_bytes(digit[i], sums[i]);
          p.word[group / 2][i][group % 2 * 2 + h] = digit[i];
        }
      }
      p.l[h] = quad_sum(row_sum(sums));
    }
  }
  template <int NOW, int WHOLE, bool SOME>
  DEVICE void weights(const BlockScores& s, const RowMasks& masks, i32 first, i32 keys, u32 chosen,
                      BlockWeights& p) const {
    if (!BIAS && fast)
      weights<NOW, WHOLE, SOME, true>(s, masks, first, keys, chosen, p);
    else
      weights<NOW, WHOLE, SOME, false>(s, masks, first, keys, chosen, p);
  }
  // Calls add(kind, p) with P of both kinds of a block's keys, of those with a value last.
  template <int NOW, int WHOLE, class Add>
  DEVICE void both_weights(const BlockScores& s, const RowMasks& masks, i32 first, i32 keys, BlockWeights& p,
                           Add add) const {
    const u32 zeros = this->zeros(first);
    if (__any_sync(~0u, zeros != 0)) {
      weights<NOW, WHOLE, true>(s, masks, first, keys, zeros, p);
      add(OTHER, p);
      weights<NOW, WHOLE, true>(s, masks, first, keys, ~zeros, p);
    } else {
      weights<NOW, WHOLE, false>(s, masks, first, keys, 0, p);
    }
    add(VALUE, p);
  }

  // Adds the products of a block's P with 16 channels of V. first: the step of 32 keys of the tile at which the block
  // begins.
  template <int NOW>
  DEVICE static void multiply(const BlockWeights& p, const TileOperands& tile, int first, int chunk,
                              i32 (&sums)[2][DIGITS][4]) {
#pragma unroll
    for (int step = 0; step < (NOW + 31) / 32; ++step) {
      OperandB v[2];
      tile.values(first + step, chunk, v);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) {
          const u32(&w)[4] = p.word[step][digit];
          mma_u8_s8(sums[e][digit], OperandA{w[0], w[1], w[2], w[3]}, v[e]);
        }
    }
  }
  DEVICE Row row(int, int h) const { return {top[VALUE][h], top[OTHER][h], l[h]}; }
  DEVICE i64 t_max(int, int h) const { return row(0, h).level(fraction); }
};

// The softmax of rows of any length, whose tiles of keys are the blocks. The first pass finds a row's largest octaves,
// so that the second merges each block as the definition says, whatever the octaves span.
struct BlockFloat : BlockSoftmax {
  static constexpr int PASSES = 2, CHUNKS_AT_ONCE = V_CHUNKS;
  Peak peak[2][2];             // of a kind and row
  i64 acc[WARP_CHUNKS][2][4];  // as PDigits::acc, in the unit of the row's octave of keys with a value

  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, const u32* valueless_words, i32 keys) {
    static_assert(KEYS == BLOCK);
    BlockSoftmax::init(constants, valueless_words, keys);
#pragma unroll
    for (int h = 0; h < 2; ++h) peak[VALUE][h] = peak[OTHER][h] = NO_PEAK;
#pragma unroll
    for (int i = 0; i < WARP_CHUNKS * 8; ++i) (&acc[0][0][0])[i] = 0;
  }
  template <int NOW, bool MASKED>
  DEVICE void update_row_max(const Scores& s, const RowMasks& masks, i32 first, i32 keys) {
    constexpr int WHOLE = MASKED ? 0 : NOW;
    const u32 zeros = this->zeros(first);
    if (__any_sync(~0u, zeros != 0)) {
      update_peaks<NOW, WHOLE, true>(s, masks, first, keys, zeros, peak[OTHER]);
      update_peaks<NOW, WHOLE, true>(s, masks, first, keys, ~zeros, peak[VALUE]);
    } else {
      update_peaks<NOW, WHOLE, false>(s, masks, first, keys, 0, peak[VALUE]);
    }
  }
  // The octaves of both kinds of keys.
  DEVICE i64 maximum(int, int h) const { return (i64)octave(peak[VALUE][h], h) << 32 | (u32)octave(peak[OTHER][h], h); }
  DEVICE static i64 larger(i64 a, i64 b) {
    return (i64)max((i32)(a >> 32), (i32)(b >> 32)) << 32 | (u32)max((i32)a, (i32)b);
  }
  template <class Maximum, class Magnitude>
  DEVICE void finish_row_max(Maximum maximum, Magnitude magnitude) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 most = maximum(0, h);
      top[VALUE][h] = (i32)(most >> 32), top[OTHER][h] = (i32)most;
    }
    choose_form(magnitude);
  }

  // Makes P of a block's scores, and adds P V to the accumulators.
  template <int NOW, bool MASKED>
  DEVICE void add_values(const Scores& s, const TileOperands& tile, const RowMasks& masks, i32 first, i32 keys) {
    BlockWeights p;
    both_weights<NOW, MASKED ? 0 : NOW>(s, masks, first, keys, p, [&](Kind, const BlockWeights& p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) l[h] += merged((i32)p.l[h], fraction, row_top(h) - p.e[h]);
    });
    i32 depth[2], unit[2];
    bool floors = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      depth[h] = top[VALUE][h] - p.e[h];
      unit[h] = group_unit(fraction, depth[h]);
      floors |= p.e[h] != NO_EXPONENT && depth[h] > fraction;
    }
    floors = __any_sync(~0u, floors);
#pragma unroll
    for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
      if (WARP_CHUNKS < V_CHUNKS && warp_chunk() + chunk >= V_CHUNKS) break;
      i32 sums[2][DIGITS][4] = {};
      multiply<NOW>(p, tile, 0, warp_chunk() + chunk, sums);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i32 sum = block_sum({sums[e][0][i], sums[e][1][i]});
          i64& to = acc[chunk][e][i];
          to = floors ? to + merged(sum, fraction, depth[i / 2]) : multiply_add(sum, unit[i / 2], to);
        }
    }
  }

  // The accumulator of channel j of four adjacent ones.
  DEVICE i64 sum(int h, int chunk, int j) const { return acc[chunk][j % 2][2 * h + j / 2]; }
  DEVICE void results(int, int chunk, Accumulator (&x)[2][4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j / 4][j % 4] = rounded(sum(j / 4, chunk, j % 4), 0);
  }
};
