// The softmax of intflash_bfp, of one tile of 16 rows.
//
// Macros: see softmax.cuh; ONE_BLOCK, see attention.cu.
#pragma once
#include "block_float.cuh"
#include "sm80/softmax.cuh"

#ifndef ONE_BLOCK
#define ONE_BLOCK 0
#endif

constexpr int BLOCK = 128;           // keys of a block of a sequence that has several
constexpr i32 ONE_BLOCK_KEYS = 768;  // a sequence of at most so many keys is one block
constexpr int BIT_WORDS = (KEYS + BLOCK - 1) / BLOCK;

// P of a group of a tile's keys, its sums over the quad, and the octaves that they count from.
struct BlockWeights {
  u32 word[KEYS / 32][2][4];  // of a digit: the left operand of a product over 32 keys
  u32 l[2];
  i32 e[2];
};

// A bit for each of a lane's keys of a tile, four for each group of 16.
struct KeyBits {
  u32 word[BIT_WORDS];

  DEVICE u32 of_group(int group) const { return word[group / 8] >> 4 * (group % 8); }
  DEVICE bool any() const {
    u32 all = 0;
#pragma unroll
    for (u32 x : word) all |= x;
    return all != 0;
  }
  DEVICE KeyBits others() const {
    KeyBits x;
#pragma unroll
    for (int i = 0; i < BIT_WORDS; ++i) x.word[i] = ~word[i];
    return x;
  }
};

// The octaves and P of a tile's keys, which are a block or, of a sequence that is one block, a part of it. NOW is the
// number of keys that are computed; all rows see the first WHOLE of them. SOME: of keys that `chosen` has bits for.
struct BlockSoftmax {
  static constexpr int DIGITS = 2;
  static constexpr bool BLOCKS = true;
  typedef P16Accumulator Accumulator;
  typedef RowSum Row;
  template <typename TO, int N>
  using OutputScales = BlockScales<TO, N>;
  enum Kind { VALUE, OTHER };  // keys with a value, and keys without
  i64 origin[2];               // the T from which a row's octaves count
  i32 top[2][2];               // the largest octaves of a kind and row
  i64 l[2];                    // in the unit of the row's octave
  Score scores[ROW_SCALES ? 2 : 1];
  const u32* valueless;  // word of this lane's keys in the first block
  i32 fraction;
  bool fast;      // whether 32 bits hold the exponents of all rows of the warp
  bool is_short;  // whether the sequence has at most ONE_BLOCK_KEYS

  // Whether a row's keys are one block, so that the octaves of its tiles are `top`.
  DEVICE bool is_one_block() const { return ONE_BLOCK == 2 ? is_short : ONE_BLOCK; }
  DEVICE const Score& score(int, int h) const { return scores[ROW_SCALES ? h : 0]; }
  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, const u32* valueless_words, i32 keys) {
    static_assert(ROW_TILES == 1);
#pragma unroll
    for (int h = 0; h < (ROW_SCALES ? 2 : 1); ++h) scores[h] = constants(0, h);
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = origin[h] = 0;
    valueless = valueless_words + threadIdx.x % 4;
    fraction = fraction_bits(keys), is_short = keys <= ONE_BLOCK_KEYS;
  }
  // magnitude(m, h): the sum of the magnitudes of a row's codes.
  template <class Magnitude>
  DEVICE void choose_form(Magnitude magnitude) {
    bool fast = !BIAS;
#pragma unroll
    for (int h = 0; h < 2; ++h) fast &= fits_32_bits(score(0, h), magnitude(0, h));
    this->fast = __all_sync(~0u, fast);
  }

  // Returns bits for those of the keys from `first` on, which is a multiple of BLOCK, that have no value.
  DEVICE KeyBits zeros(i32 first) const {
    KeyBits x;
#pragma unroll
    for (int i = 0; i < BIT_WORDS; ++i) x.word[i] = valueless[(first / BLOCK + i) * 4];
    return x;
  }
  // ptxas would read the masks of several groups at once and keep them from one pass over a block's keys to the next,
  // for which there are no registers. It moves no load across a barrier.
  DEVICE static void forget_masks() {
    if constexpr (BIAS || KEEP) __syncwarp();
  }
  // Returns the bytes of the keys of a group that a row sees, those of `chosen` where SOME.
  template <bool MASKED, bool SOME>
  DEVICE static u32 present(const RowMask& mask, int group, i32 key, i32 keys, const KeyBits& chosen) {
    u32 bytes = MASKED || KEEP ? mask.template present<MASKED>(key, keys) : ~0u;
    if constexpr (SOME) bytes &= bytes_of_bits(chosen.of_group(group));
    return bytes;
  }
  template <bool MASKED, bool SOME>
  DEVICE void update_peak(const Scores& s, int h, int group, const RowMask& mask, i32 key, i32 keys,
                          const KeyBits& chosen, Peak& peak) const {
    forget_masks();
    u32 seen = present<MASKED, SOME>(mask, group, key, keys, chosen);
    Peak x[4];
    peaks(score(0, h), s, 0, h, group, mask, key, keys, x, seen);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Peak one = !(MASKED || SOME || KEEP || BIAS) || seen & 1u << (8 * i) ? x[i] : NO_PEAK;
      peak = peak > one ? peak : one;
    }
  }
  template <int NOW, int WHOLE, bool SOME>
  DEVICE void update_peaks(const Scores& s, const RowMasks& masks, i32 first, i32 keys, const KeyBits& chosen,
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
  // Updates the maxima of both kinds of a tile's keys.
  template <int NOW, int WHOLE>
  DEVICE void update_both_peaks(const Scores& s, const RowMasks& masks, i32 first, i32 keys, Peak (&peak)[2][2]) const {
    const KeyBits zeros = this->zeros(first);
    if (__any_sync(~0u, zeros.any())) {
      update_peaks<NOW, WHOLE, true>(s, masks, first, keys, zeros, peak[OTHER]);
      update_peaks<NOW, WHOLE, true>(s, masks, first, keys, zeros.others(), peak[VALUE]);
    } else {
      update_peaks<NOW, WHOLE, false>(s, masks, first, keys, zeros, peak[VALUE]);
    }
  }
  // Sets the octaves of one block from the maxima of its keys. They count from that of the keys with a value.
  DEVICE void set_origin(const Peak (&peak)[2][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Peak value = quad_max(peak[VALUE][h]), other = quad_max(peak[OTHER][h]);
      const Peak most = value == NO_PEAK ? other : value;
      origin[h] = most == NO_PEAK ? 0 : exponent_of(most, h);
      top[VALUE][h] = value == NO_PEAK ? NO_EXPONENT : 0;
      top[OTHER][h] = other == NO_PEAK ? NO_EXPONENT : octave_above(exponent_of(other, h) - origin[h]);
    }
  }
  // Returns T of a maximum.
  DEVICE i64 exponent_of(Peak peak, int h) const {
#if BIAS
    return peak;
#else
    return multiply_add(peak << score(0, h).k, score(0, h).C, 0);
#endif
  }
  // Returns the octave of the quad's maximum, of keys of many blocks.
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
  DEVICE void words(const Scores& s, int h, int group, const RowMask& mask, i32 key, i32 keys, const KeyBits& chosen,
                    i32 e, u32 (&digit)[DIGITS]) const {
    forget_masks();
    u32 seen = present<MASKED, SOME>(mask, group, key, keys, chosen);
    const Score& unit = score(0, h);
    u32 four[4];
    if constexpr (FAST) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        four[i] = block_p24((u32)score_of(s, 0, h, group, i) * (u32)(-(unit.C >> 8)) + block_offset(e, origin[h]));
    } else {
      i64 t[4];
      exponents(unit, s, 0, h, group, mask, key, keys, BLOCK_K0 - origin[h] - ((i64)e << 32), t, seen);
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = block_p24(t[i]);
    }
    for (u32& x : four) x += is_one_block() ? HALF_P : 0;  // of many blocks p is floored
    pack_block_p(four, digit);
    if (MASKED || SOME || KEEP || BIAS)
      for (u32& x : digit) x &= seen;
  }
  template <int NOW, int WHOLE, bool SOME, bool FAST>
  DEVICE void weights(const Scores& s, const RowMasks& masks, i32 first, i32 keys, const KeyBits& chosen, Kind kind,
                      BlockWeights& p) const {
    Peak peak[2] = {NO_PEAK, NO_PEAK};
    if (!is_one_block()) update_peaks<NOW, WHOLE, SOME>(s, masks, first, keys, chosen, peak);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p.e[h] = is_one_block() ? top[kind][h] : octave(peak[h], h);
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
  DEVICE void weights(const Scores& s, const RowMasks& masks, i32 first, i32 keys, const KeyBits& chosen, Kind kind,
                      BlockWeights& p) const {
    if (!BIAS && fast)
      weights<NOW, WHOLE, SOME, true>(s, masks, first, keys, chosen, kind, p);
    else
      weights<NOW, WHOLE, SOME, false>(s, masks, first, keys, chosen, kind, p);
  }
  // Calls add(kind, p) with P of both kinds of a tile's keys, of those with a value last.
  template <int NOW, int WHOLE, class Add>
  DEVICE void both_weights(const Scores& s, const RowMasks& masks, i32 first, i32 keys, BlockWeights& p,
                           Add add) const {
    const KeyBits zeros = this->zeros(first);
    if (__any_sync(~0u, zeros.any())) {
      weights<NOW, WHOLE, true>(s, masks, first, keys, zeros, OTHER, p);
      add(OTHER, p);
      weights<NOW, WHOLE, true>(s, masks, first, keys, zeros.others(), VALUE, p);
    } else {
      weights<NOW, WHOLE, false>(s, masks, first, keys, zeros, VALUE, p);
    }
    add(VALUE, p);
  }

  // Adds the products of a tile's P with 16 channels of V.
  template <int NOW>
  DEVICE static void multiply(const BlockWeights& p, const TileOperands& tile, int chunk, i32 (&sums)[2][DIGITS][4]) {
#pragma unroll
    for (int step = 0; step < (NOW + 31) / 32; ++step) {
      OperandB v[2];
      tile.values(step, chunk, v);
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
  DEVICE i64 t_max(int, int h) const { return origin[h] + row(0, h).level(fraction); }
};

// The softmax of rows of any length, whose tiles of keys are the blocks, or parts of one. The first pass finds a row's
// largest octaves, so that the second merges each block as the definition says, whatever the octaves span.
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
    update_both_peaks<NOW, MASKED ? 0 : NOW>(s, masks, first, keys, peak);
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
    if (is_one_block()) set_origin(peak);
    choose_form(magnitude);
  }

  // Makes P of a tile's scores, and adds P V to the accumulators.
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
    const i32 kept = is_one_block() ? -1 : -1 << ACC_SHIFT;  // bits of the low digits
#pragma unroll
    for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
      if (WARP_CHUNKS < V_CHUNKS && warp_chunk() + chunk >= V_CHUNKS) break;
      i32 sums[2][DIGITS][4] = {};
      multiply<NOW>(p, tile, warp_chunk() + chunk, sums);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i32 sum = (sums[e][0][i] << 8) + (sums[e][1][i] & kept);
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
