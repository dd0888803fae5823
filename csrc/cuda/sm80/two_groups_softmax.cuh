// The softmax of intflash_bfp.
//
// Macros: see softmax.cuh, and of any_rows.cu
//   DITHER     0: P is rounded; 1: it is dithered; 2: that of packed sequences that are long enough is
//   MANY_KEYS  1: there may be more keys than 32 bits hold the sums of
//   WARP_KEYS  keys of a tile that a warp takes; all by default
#pragma once
#include "sm80/softmax.cuh"
#include "two_groups.cuh"

#ifndef DITHER
#define DITHER 0
#endif
#ifndef MANY_KEYS
#define MANY_KEYS 0
#endif
#ifndef WARP_KEYS
#define WARP_KEYS KEYS
#endif

constexpr int BIT_WORDS = (WARP_KEYS + WORD_KEYS - 1) / WORD_KEYS;

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

// What is added to P of a lane's keys of a tile.
struct AddedToP {
  u32 dither_of_first;
  bool rounds;  // with DITHER 2

  AddedToP() = default;
  // keys: of the sequence; first: the lane's first key of the tile.
  DEVICE AddedToP(i32 keys, i32 first)
      : dither_of_first(DITHER ? dither(first) : 0), rounds(DITHER == 2 && keys <= ROUNDED_KEYS) {}
  // To the i-th of the four keys of a group.
  DEVICE u32 of(int i) const {
    const u32 dithered = Dither{dither_of_first}.of(i);
    return !DITHER || (DITHER == 2 && rounds) ? Rounding().of(i) : dithered;
  }
};

// The maxima of a row's keys with a value and of those without, and P. NOW is the number of keys of a tile that are
// computed; all rows see the first WHOLE of them. SOME: of keys that `chosen` has bits for.
struct GroupSoftmax {
  static constexpr int KINDS = 2;
  enum Kind { VALUE, OTHER };  // keys with a value, and keys without
  typedef OfRows<Peak> Peaks[KINDS];
  OfRows<i64> origin;  // the T from which a row's octaves count
  OfRows<i32> other;   // the octave of the keys without a value
  bool fast;           // whether 32 bits hold the exponents of all rows of the warp
  Score scores[ROW_SCALES ? ROW_TILES * LANE_ROWS : 1];
  const u32* valueless;  // word of this lane's keys in the first WORD_KEYS

  DEVICE const Score& score(int m, int h) const { return scores[ROW_SCALES ? LANE_ROWS * m + h : 0]; }
  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, const u32* valueless_words) {
#pragma unroll
    for (int i = 0; i < (ROW_SCALES ? ROW_TILES * LANE_ROWS : 1); ++i)
      scores[i] = constants(i / LANE_ROWS, i % LANE_ROWS);
    valueless = valueless_words + threadIdx.x % 4;
  }

  // Returns bits for those of a tile's keys from `first` on that have no value.
  DEVICE KeyBits zeros(i32 first) const {
    KeyBits x;
#pragma unroll
    for (int i = 0; i < BIT_WORDS; ++i) x.word[i] = valueless[(first / WORD_KEYS + i) * 4];
    if constexpr (BIT_WORDS == 1) x.word[0] = x.word[0] >> first % WORD_KEYS / 4 & ((1ull << WARP_KEYS / 4) - 1);
    return x;
  }
  // ptxas would read the masks of several groups at once and keep them from one pass over a tile's keys to the next,
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
  DEVICE void update_peak(const Scores& s, int m, int h, int group, const RowMask& mask, i32 key, i32 keys,
                          const KeyBits& chosen, Peak& peak) const {
    forget_masks();
    u32 seen = present<MASKED, SOME>(mask, group, key, keys, chosen);
    Peak x[4];
    peaks(score(m, h), s, m, h, group, mask, key, keys, x, seen);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Peak one = !(MASKED || SOME || KEEP || BIAS) || seen & 1u << (8 * i) ? x[i] : NO_PEAK;
      peak = peak > one ? peak : one;
    }
  }
  template <int NOW, int WHOLE, bool SOME>
  DEVICE void update_peaks(const Scores& s, const RowMasks& masks, i32 first, i32 keys, const KeyBits& chosen,
                           OfRows<Peak>& peak) const {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < LANE_ROWS; ++h)
#pragma unroll
        for (int group = 0; group < NOW / 16; ++group) {
          const i32 key = first + first_key(group);
          if (16 * group + 16 <= WHOLE)
            update_peak<false, SOME>(s, m, h, group, masks[m][h], key, keys, chosen, peak[m][h]);
          else
            update_peak<true, SOME>(s, m, h, group, masks[m][h], key, keys, chosen, peak[m][h]);
        }
  }
  // Updates the maxima of both kinds of a tile's keys.
  template <int NOW, int WHOLE>
  DEVICE void update_both_peaks(const Scores& s, const RowMasks& masks, i32 first, i32 keys, const KeyBits& zeros,
                                Peaks& peak) const {
    if (__any_sync(~0u, zeros.any())) {
      update_peaks<NOW, WHOLE, true>(s, masks, first, keys, zeros, peak[OTHER]);
      update_peaks<NOW, WHOLE, true>(s, masks, first, keys, zeros.others(), peak[VALUE]);
    } else {
      update_peaks<NOW, WHOLE, false>(s, masks, first, keys, zeros, peak[VALUE]);
    }
  }
  // Returns T of a maximum.
  DEVICE i64 exponent_of(Peak peak, int m, int h) const {
#if BIAS
    return peak;
#else
    return multiply_add(peak << score(m, h).k, score(m, h).C, 0);
#endif
  }
  // maximum(kind, m, h): that of all of a row's keys of a kind; magnitude(m, h): the sum of the magnitudes of its
  // codes.
  template <class Maximum, class Magnitude>
  DEVICE void set_octaves(Maximum maximum, Magnitude magnitude) {
    bool fast = !BIAS;
#pragma unroll
    for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
      const int m = i / LANE_ROWS, h = i % LANE_ROWS;
      const Peak value = maximum(VALUE, m, h), others = maximum(OTHER, m, h);
      const Peak first = value == NO_PEAK ? others : value;
      origin[m][h] = first == NO_PEAK ? 0 : exponent_of(first, m, h);
      other[m][h] = others == NO_PEAK ? NO_EXPONENT : octave_above(exponent_of(others, m, h) - origin[m][h]);
      const Score& unit = score(m, h);
      if (!BIAS) fast &= octave_above(origin[m][h]) <= exp_32bit_limit(unit.C, unit.k, magnitude(m, h));
    }
    this->fast = __all_sync(~0u, fast);
  }

  // Computes a word of each digit of P below octave e. FAST: with the 32-bit form of the exponential, of keys with a
  // value.
  template <bool MASKED, bool SOME, bool FAST>
  DEVICE void words(const Scores& s, int m, int h, int group, const RowMask& mask, i32 key, i32 keys,
                    const KeyBits& chosen, i32 e, const AddedToP& added, u32 (&digit)[2]) const {
    forget_masks();
    u32 seen = present<MASKED, SOME>(mask, group, key, keys, chosen);
    const Score& unit = score(m, h);
    u32 four[4];
    if constexpr (FAST) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        four[i] = group_p24((u32)score_of(s, m, h, group, i) * (u32)(-(unit.C >> 8)) + group_offset(origin[m][h]));
    } else {
      i64 t[4];
      exponents(unit, s, m, h, group, mask, key, keys, GROUP_K0 - origin[m][h] - ((i64)e << 32), t, seen);
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = group_p24(t[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] += added.of(i);
    pack_p24(four, digit);
    if (MASKED || SOME || KEEP || BIAS)
      for (u32& x : digit) x &= seen;
  }
  // Returns this lane's sum of p of a tile's keys without a value.
  template <int NOW, int WHOLE>
  DEVICE u32 sum_of_others(const Scores& s, int m, int h, const RowMask& mask, i32 first, i32 keys,
                           const KeyBits& zeros, const AddedToP& added) const {
    u32 sums[2] = {};
#pragma unroll
    for (int group = 0; group < NOW / 16; ++group) {
      const i32 key = first + first_key(group);
      u32 digit[2];
      if (16 * group + 16 <= WHOLE)
        words<false, true, false>(s, m, h, group, mask, key, keys, zeros, other[m][h], added, digit);
      else
        words<true, true, false>(s, m, h, group, mask, key, keys, zeros, other[m][h], added, digit);
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] = add_bytes(digit[i], sums[i]);
    }
    return combine_digits(sums);
  }
  // The level in T of a row's l.
  DEVICE i64 level(int m, int h, i32 fraction) const {
    return origin[m][h] + ((i64)(max(0, other[m][h]) + OUTPUT_SHIFT - fraction) << 32);
  }
  // value_l, other_l: the sums of p of a row's keys of both kinds.
  DEVICE RowSum row_of(int m, int h, u64 value_l, u64 other_l, i32 fraction) const {
    return SplitRow{origin[m][h], 0, other[m][h]}.sum(value_l, other_l, fraction);
  }
};

// The softmax of rows of any length: two passes over the keys, as ExactP16 has them. HAS_VALUELESS: some keys
// may have no value, which `valueless` tells; else all are taken for keys with one.
template <bool HAS_VALUELESS>
struct TwoGroupsOf : PDigits<2>, GroupSoftmax {
  typedef TwoGroupsOf<false> WithoutValueless;
  static constexpr int PASSES = 2, KINDS = GroupSoftmax::KINDS;
  static constexpr bool FINDS_ZEROS = true;
  typedef RowSum Row;
  template <typename TO, int N>
  using OutputScales = GroupScales<TO, Accumulator, N>;
  using GroupSoftmax::score;
  Peaks peak;
  OfRows<u32> other_l;  // the sums of p of this lane's keys without a value
  KeyBits of_value;     // the keys of the tile that have a value
  bool some_zeros;      // whether the warp has others
  AddedToP added;
  i32 fraction;
#if MANY_KEYS
  static_assert(ROW_TILES == 1);
  i64 wide_acc[V_CHUNKS][2][4];
  u64 wide_l[2][2];  // of a kind and row
#endif

  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, const u32* valueless_words, i32 keys) {
    PDigits<2>::init(constants);
    GroupSoftmax::init(constants, valueless_words);
    fraction = fraction_bits(keys);
#pragma unroll
    for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
      const int m = i / LANE_ROWS, h = i % LANE_ROWS;
      peak[VALUE][m][h] = peak[OTHER][m][h] = NO_PEAK, other_l[m][h] = 0;
    }
#if MANY_KEYS
#pragma unroll
    for (int i = 0; i < V_CHUNKS * 8; ++i) (&wide_acc[0][0][0])[i] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) wide_l[i / 2][i % 2] = 0;
#endif
  }
  template <int NOW, bool MASKED>
  DEVICE void update_row_max(const Scores& s, const RowMasks& masks, i32 first, i32 keys) {
    if constexpr (HAS_VALUELESS)
      update_row_max<NOW, MASKED>(s, masks, first, keys, zeros(first));
    else
      update_peaks<NOW, MASKED ? 0 : NOW, false>(s, masks, first, keys, {}, peak[VALUE]);
  }
  template <int NOW, bool MASKED>
  DEVICE void update_row_max(const Scores& s, const RowMasks& masks, i32 first, i32 keys, const KeyBits& zeros) {
    update_both_peaks<NOW, MASKED ? 0 : NOW>(s, masks, first, keys, zeros, peak);
  }
  DEVICE i64 maximum(int kind, int m, int h) const { return quad_max(peak[kind][m][h]); }
  template <class Maximum, class Magnitude>
  DEVICE void finish_row_max(Maximum maximum, Magnitude magnitude) {
    set_octaves([&](int kind, int m, int h) { return (Peak)maximum(kind, m, h); }, magnitude);
  }

  template <int NOW, bool MASKED>
  DEVICE void begin_tile(const Scores& s, const RowMasks& masks, i32 first, i32 keys) {
    added = AddedToP(keys, first + first_key(0));
    if constexpr (!HAS_VALUELESS) return;
    const KeyBits zeros = this->zeros(first);
    some_zeros = __any_sync(~0u, zeros.any());
    of_value = zeros.others();
    if (some_zeros) {
#pragma unroll
      for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
        const int m = i / LANE_ROWS, h = i % LANE_ROWS;
        other_l[m][h] += sum_of_others<NOW, MASKED ? 0 : NOW>(s, m, h, masks[m][h], first, keys, zeros, added);
      }
    }
  }
  DEVICE bool has_zeros() const { return HAS_VALUELESS && some_zeros; }
  template <bool MASKED, bool FAST>
  DEVICE void p_words(const Scores& s, int m, int h, int group, const RowMask& mask, i32 first, i32 keys,
                      u32 (&word)[2]) {
    words<MASKED, MASKED && HAS_VALUELESS, FAST>(s, m, h, group, mask, first + first_key(group), keys, of_value, 0,
                                                 added, word);
    add_sums(m, h, word);
  }

#if MANY_KEYS
  // Adds the sums to those of 64 bits, before more keys could overflow 32.
  DEVICE void widen_sums() {
#pragma unroll
    for (int i = 0; i < V_CHUNKS * 8; ++i) {
      i32 &high = (&acc[0][0][0][0][0])[i], &low = (&acc[1][0][0][0][0])[i];
      (&wide_acc[0][0][0])[i] += ((i64)high << 8) + low;
      high = low = 0;
    }
#pragma unroll
    for (int h = 0; h < LANE_ROWS; ++h) {
      wide_l[VALUE][h] += ((u64)sums[0][0][h] << 8) + sums[1][0][h], wide_l[OTHER][h] += other_l[0][h];
      sums[0][0][h] = sums[1][0][h] = other_l[0][h] = 0;
    }
  }
#endif
  // The sum of p of this lane's keys of a kind.
  DEVICE u64 sum(Kind kind, int m, int h) const {
    const u64 narrow = kind == OTHER ? other_l[m][h] : ((u64)sums[0][m][h] << 8) + sums[1][m][h];
#if MANY_KEYS
    return narrow + wide_l[kind][h];
#else
    return narrow;
#endif
  }
  DEVICE Row row(int m, int h) const {
    return row_of(m, h, quad_sum(sum(VALUE, m, h)), quad_sum(sum(OTHER, m, h)), fraction);
  }
#if MANY_KEYS
  DEVICE void results(int m, int chunk, Accumulator (&x)[2][4]) const {
    PDigits::results(m, chunk, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      Accumulator& sum = x[j / 4][j % 4];
      sum = rounded(wide_acc[chunk][j % 2][j / 2] + ((i64)sum.high << 8) + sum.low, fraction);
    }
  }
#endif
  DEVICE i64 t_max(int m, int h) const { return level(m, h, fraction); }
};
typedef TwoGroupsOf<true> TwoGroups;
