// The softmax of a warp's rows: scores to P and row sums, and the accumulators of P V.
//
// A method has PASSES over the keys, and two forms of P, of which `fast` tells whether the faster one is exact.
// `update_row_max` sees the scores of a tile in the first pass of two; `begin_tile` and `p_words` make P of a tile's
// scores in the last pass. NOW is the number of keys of the tile that are computed, MASKED whether a row may not see
// all of them.
//
// Macros: ROW_SCALES, BIAS, BIAS_FRACTION_BITS, KEEP; see any_rows.cu. LANE_ROWS: rows g + 8 h of a tile of 16 that a
// lane has: 2, the default, or 1 where a tile has at most 8 rows. Then the second half of P's operand holds the low
// digits, so that both digits take one product. FEW_KEYS: 1: at most 512 keys; 0 (the default).
#pragma once
#include "epilogue.cuh"
#include "exp2.cuh"
#include "exp2_table.cuh"
#include "sm80/masks.cuh"
#include "sm80/tiles.cuh"

#ifndef LANE_ROWS
#define LANE_ROWS 2
#endif
#ifndef FEW_KEYS
#define FEW_KEYS 0
#endif

template <int COUNT>
using ScoresOf = i32[ROW_TILES][COUNT / 8][4];
typedef ScoresOf<KEYS> Scores;
// Of row g + 8 h of each row tile of a lane.
template <typename T>
using OfRows = T[ROW_TILES][LANE_ROWS];
typedef OfRows<RowMask> RowMasks;

// Score i of a word of keys: accumulator element i % 2 of one of two tiles.
template <class S>
DEVICE i32 score_of(const S& s, int m, int h, int group, int i) {
  return s[m][2 * group + i / 2][2 * h + i % 2];
}
DEVICE i32 first_key(int group) { return 16 * group + threadIdx.x % 4 * 4; }

// A row whose keys are done, and the scales of N rows' outputs, of which a lane computes one (`row_scales`).
struct PlainRow {
  u32 l;
};
template <typename TO, typename ACC, int N>
struct PlainScales {
  OutputConstants constants;
  RowScale<TO, ACC> scales[N];

  DEVICE PlainScales(const PlainRow (&rows)[N], const OutputConstants& constants) : constants(constants) {
    row_scales(N > 1 && computes_second_row() ? rows[N - 1].l : rows[0].l, constants, scales);
  }
  template <int COUNT>
  DEVICE void outputs(const ACC (&acc)[N][COUNT], u32 (&w)[N][COUNT * sizeof(TO) / 4]) const {
    output_words<TO>(acc, scales, constants, w);
  }
};

// P in one digit (P8) or two (P16: 256 high + low), each with its own accumulators.
template <int DIGITS_>
struct PDigits {
  static constexpr int DIGITS = DIGITS_, CHUNKS_AT_ONCE = V_CHUNKS;  // how far `store` unrolls
  static constexpr int KINDS = 1;                                    // of keys whose maxima are found apart
  static constexpr bool FINDS_ZEROS = false;                         // whether keys without a value differ from others
  typedef typename AccumulatorOf<DIGITS, FEW_KEYS>::Type Accumulator;
  typedef PlainRow Row;
  template <typename TO, int N>
  using OutputScales = PlainScales<TO, Accumulator, N>;
  static constexpr int OPERANDS = LANE_ROWS == 1 ? 1 : DIGITS;  // left operands of P V
  i32 acc[OPERANDS][ROW_TILES][V_CHUNKS][2]
         [4];  // element 2 h + i of chunk c and parity e is channel 16 c + 4 q + 2 i + e
  OfRows<u32> sums[DIGITS];
  Score scores[ROW_SCALES ? LANE_ROWS * ROW_TILES : 1];

  DEVICE bool has_zeros() const { return false; }
  DEVICE const Score& score(int m, int h) const { return scores[ROW_SCALES ? LANE_ROWS * m + h : 0]; }
  // The operand, and its half, of a digit of a row's P.
  DEVICE static int operand_of(int digit) { return LANE_ROWS == 1 ? 0 : digit; }
  DEVICE static int half_of(int digit, int h) { return LANE_ROWS == 1 ? digit : h; }
  // The accumulator of a digit of a row, for channel 16 chunk + 4 q + j.
  DEVICE i32 accumulator(int digit, int m, int h, int chunk, int j) const {
    return acc[operand_of(digit)][m][chunk][j % 2][2 * half_of(digit, h) + j / 2];
  }
  // score_of(m, h): the constants of a row.
  template <class ScoreOf>
  DEVICE void init(ScoreOf constants) {
#pragma unroll
    for (int i = 0; i < (ROW_SCALES ? LANE_ROWS * ROW_TILES : 1); ++i)
      scores[i] = constants(i / LANE_ROWS, i % LANE_ROWS);
#pragma unroll
    for (int i = 0; i < OPERANDS * ROW_TILES * V_CHUNKS * 8; ++i) (&acc[0][0][0][0][0])[i] = 0;
#pragma unroll
    for (int i = 0; i < DIGITS * ROW_TILES * LANE_ROWS; ++i) (&sums[0][0][0])[i] = 0;
  }
  DEVICE void add_sums(int m, int h, const u32 (&word)[DIGITS]) {
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) sums[digit][m][h] = add_bytes(word[digit], sums[digit][m][h]);
  }
  DEVICE Row row(int m, int h) const {
    return {quad_sum(DIGITS == 1 ? sums[0][m][h] : (sums[0][m][h] << 8) + sums[DIGITS - 1][m][h])};
  }
  // The accumulators of four adjacent channels of a lane's two rows.
  DEVICE void results(int m, int chunk, Accumulator (&x)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int h = i / 4, j = i % 4;
      if constexpr (DIGITS == 1)
        x[h][j] = accumulator(0, m, h, chunk, j);
      else
        x[h][j] = {accumulator(0, m, h, chunk, j), accumulator(1, m, h, chunk, j)};
    }
  }
};

// What a row's maximum is found of.
#if BIAS
typedef i64 Peak;  // T
constexpr Peak NO_PEAK = ABSENT_T;
#else
typedef i32 Peak;  // a score
constexpr Peak NO_PEAK = NO_SCORE;
#endif

// Computes T + B of a word of keys, and makes those absent that the bias does.
template <class S>
DEVICE void exponents(const Score& unit, const S& s, int m, int h, int group, const RowMask& mask, i32 key, i32 keys,
                      i64 B, i64 (&t)[4], u32& present) {
#if BIAS
  i32 bias[4];
  mask.bias.read(key, keys, bias);
#endif
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    t[i] = B;
#if BIAS
    t[i] = multiply_add(bias[i], BIAS_UNIT, B);
    if (bias[i] == NO_SCORE) present &= ~(0xFFu << (8 * i));
#endif
    t[i] = multiply_add(score_of(s, m, h, group, i) << unit.k, unit.C, t[i]);
  }
}
// The same in the unit of a row's maximum.
template <class S>
DEVICE void peaks(const Score& unit, const S& s, int m, int h, int group, const RowMask& mask, i32 key, i32 keys,
                  Peak (&x)[4], u32& present) {
#if BIAS
  exponents(unit, s, m, h, group, mask, key, keys, 0, x, present);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = score_of(s, m, h, group, i);
#endif
}

// intflash and intflash_p8: P below the exact row maximum, which a first pass finds.
template <int DIGITS>
struct ExactMaximum : PDigits<DIGITS> {
  typedef ExactMaximum WithoutValueless;  // the method where all keys have a value: here the same
  static constexpr int PASSES = 2;
  static constexpr int DOTS = DIGITS == 2 ? 0 : 2;  // see four_p
  OfRows<Peak> peak;
  OfRows<i64> B;
  bool fast;  // whether the 32-bit form of the exponential is exact for all rows of the warp

  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, u32) {
    PDigits<DIGITS>::init(constants);
#pragma unroll
    for (int i = 0; i < LANE_ROWS * ROW_TILES; ++i) peak[i / LANE_ROWS][i % LANE_ROWS] = NO_PEAK;
  }

  template <int NOW, bool MASKED>
  DEVICE void update_row_max(const Scores& s, const RowMasks& masks, i32 first, i32 keys) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < LANE_ROWS; ++h)
#pragma unroll
        for (int group = 0; group < NOW / 16; ++group) {
          const i32 key = first + first_key(group);
          u32 present = MASKED || KEEP ? masks[m][h].template present<MASKED>(key, keys) : ~0u;
          Peak x[4];
          peaks(this->score(m, h), s, m, h, group, masks[m][h], key, keys, x, present);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Peak seen = !(MASKED || KEEP || BIAS) || present & 1u << (8 * i) ? x[i] : NO_PEAK;
            peak[m][h] = peak[m][h] > seen ? peak[m][h] : seen;
          }
        }
  }

  // The maximum of a row's keys of a kind that this warp has seen.
  DEVICE i64 maximum(int, int m, int h) const { return quad_max(peak[m][h]); }
  // maximum(kind, m, h): that of all keys. magnitude(m, h): the sum of the magnitudes of a row's codes.
  template <class Maximum, class Magnitude>
  DEVICE void finish_row_max(Maximum maximum, Magnitude magnitude) {
    bool fast = !BIAS;
#pragma unroll
    for (int i = 0; i < LANE_ROWS * ROW_TILES; ++i) {
      const int m = i / LANE_ROWS, h = i % LANE_ROWS;
      const Score& unit = this->score(m, h);
      const Peak most = (Peak)maximum(0, m, h);
#if BIAS
      B[m][h] = most == NO_PEAK ? NO_PEAK : K0 - most;  // p is 0 without keys
#else
      const i64 top = multiply_add(most << unit.k, unit.C, 0);
      fast &= octave_above(top) <= exp_32bit_limit(unit.C, unit.k, magnitude(m, h));
      B[m][h] = K0 - top;
#endif
    }
    this->fast = __all_sync(~0u, fast);
  }

  template <int NOW, bool MASKED>
  DEVICE void begin_tile(const Scores&, const RowMasks&, i32, i32) {}

  // Makes the words of P of a group of keys. FAST: with the 32-bit form of the exponential.
  template <bool MASKED, bool FAST>
  DEVICE void p_words(const Scores& s, int m, int h, int group, const RowMask& mask, i32 first, i32 keys,
                      u32 (&word)[DIGITS]) {
    const i32 key = first + first_key(group);
    const Score& unit = this->score(m, h);
    u32 present = MASKED || KEEP ? mask.template present<MASKED>(key, keys) : ~0u;
    if constexpr (FAST) {
      four_p<DOTS>(score_of(s, m, h, group, 0), score_of(s, m, h, group, 1), score_of(s, m, h, group, 2),
                   score_of(s, m, h, group, 3), unit.C >> 8, (u32)(B[m][h] >> 8), word);
    } else {
      i64 t[4];
      exponents(unit, s, m, h, group, mask, key, keys, B[m][h], t, present);
      four_p({power(t[0]), power(t[1]), power(t[2]), power(t[3])}, word);
    }
    if (MASKED || KEEP || BIAS) {
#pragma unroll
      for (u32& x : word) x &= present;
    }
    this->add_sums(m, h, word);
  }
  DEVICE i64 t_max(int m, int h) const { return K0 - B[m][h]; }
};

typedef ExactMaximum<1> ExactP8;
typedef ExactMaximum<2> ExactP16;

// intflash_online: one pass over granules of 128 keys, which are the tiles. A row's sums are shifted when a granule
// raises its octave. P comes from the table (exp2_table.cuh).
struct Online : PDigits<1> {
  typedef Online WithoutValueless;
  static constexpr int PASSES = 1;
  TableUnit units[ROW_SCALES ? LANE_ROWS * ROW_TILES : 1];
  OfRows<TableRow> rows;
  u32 lane;   // address of this lane's first word of the table
  bool fast;  // whether scores below the table may be replaced by its lowest entries

  DEVICE const TableUnit& unit(int m, int h) const { return units[ROW_SCALES ? LANE_ROWS * m + h : 0]; }
  template <class ScoreOf>
  DEVICE void init(ScoreOf constants, u32 table) {
    PDigits::init(constants);
    lane = table + threadIdx.x % 32 * 4;
    fast = true;
#pragma unroll
    for (int i = 0; i < (ROW_SCALES ? LANE_ROWS * ROW_TILES : 1); ++i) {
      units[i] = TableUnit(scores[i]);
      fast &= units[i].clamps();
    }
    fast = __all_sync(~0u, fast);
#pragma unroll
    for (int i = 0; i < LANE_ROWS * ROW_TILES; ++i) rows[i / LANE_ROWS][i % LANE_ROWS].init();
  }

  template <int NOW, bool MASKED>
  DEVICE void begin_tile(const Scores& s, const RowMasks& masks, i32 first, i32 keys) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < LANE_ROWS; ++h) {
        i32 peak = NO_SCORE;
#pragma unroll
        for (int group = 0; group < NOW / 16; ++group) {
          const u32 present =
              MASKED || KEEP ? masks[m][h].template present<MASKED>(first + first_key(group), keys) : ~0u;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const i32 x = score_of(s, m, h, group, i);
            peak = max(peak, !(MASKED || KEEP) || present & 1u << (8 * i) ? x : NO_SCORE);
          }
        }
        if (__any_sync(~0u, peak > rows[m][h].limit)) raise(m, h, peak);
      }
  }
  // Raises the octaves of the rows that need it, and shifts their sums.
  DEVICE void raise(int m, int h, i32 peak) {
    TableRow& row = rows[m][h];
    const bool needs_64_bits = __any_sync(~0u, row.needs_64_bits(peak, unit(m, h)));
    const i32 score = quad_max(peak);
    const u32 l = quad_sum(sums[0][m][h]);
    i32 by = 0;
    if (needs_64_bits)
      by = row.raise_64bit(score, unit(m, h));
    else if (row.limit != NO_SCORE)  // else the row has no keys yet
      by = row.raise_32bit(score, unit(m, h));
    // the shift rounds, so it applies to the quad's sum and not to its parts
    sums[0][m][h] = threadIdx.x % 4 ? 0 : l >> by;
#pragma unroll
    for (int i = 0; i < 4 * V_CHUNKS; ++i) acc[0][m][i / 4][i / 2 % 2][2 * h + i % 2] >>= by;
  }

  template <bool MASKED, bool FAST>
  DEVICE void p_words(const Scores& s, int m, int h, int group, const RowMask& mask, i32 first, i32 keys,
                      u32 (&word)[1]) {
    u32 p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = lookup(rows[m][h].entry<FAST>(score_of(s, m, h, group, i), unit(m, h)), lane);
    word[0] = pack_unsigned_bytes(p[0], p[1], p[2], p[3]);
    if (MASKED || KEEP) word[0] &= mask.template present<MASKED>(first + first_key(group), keys);
    add_sums(m, h, word);
  }
  DEVICE i64 t_max(int m, int h) const { return (i64)rows[m][h].octave(unit(m, h)) << 32; }
};
