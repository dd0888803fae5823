// P of intflash_online by a table in shared memory: p8 at 1,024 depths, 1/112 octave apart (docs/numerics.md, "P by a
// table"). Each lane has its own copy of the table in its own bank. Entry i is byte i / 256 of word i % 256, and
// successive words of a lane are 32 words apart.
#pragma once
#include "epilogue.cuh"
#include "exp2.cuh"

constexpr i32 NO_OCTAVE = -(1 << 30);
constexpr i32 LAST_STEP = 1023;
constexpr u32 WORD_BYTES = 32 * 4;                           // from a word of a lane to its next word
constexpr i64 OCTAVE = 7ll << 28;                            // of T, which counts in 2^-32 of 16/7 octaves
constexpr i64 TOP = ((i64)LAST_STEP << 24) + (1 << 23) - 1;  // x = T - e OCTAVE + TOP, and x >> 24 is the table entry

// Computes p8 of an entry by its definition.
DEVICE u32 table_entry(u32 i) {
  const u32 x = 3686 - 16 * (LAST_STEP - i) / 7, u = 256 + (x & 255);
  return (((u * u + QUADRATIC_OFFSET) << (x >> 8)) + (1 << 23)) >> 24;
}

// All threads of the CTA must call this.
DEVICE void fill_table(u32 table) {
  for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
    const u32 word =
        table_entry(i) | table_entry(256 + i) << 8 | table_entry(512 + i) << 16 | table_entry(768 + i) << 24;
    const u32 words[4] = {word, word, word, word};
#pragma unroll
    for (u32 j = 0; j < 8; ++j) store_shared(table + i * WORD_BYTES + (i + j) % 8 * 16, words);
  }
}

DEVICE u32 load_byte(u32 from) {
  u32 byte;
  asm("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from));
  return byte;
}

// Returns the table's byte for an entry that lies in the upper half of `entry`. lane: the address of the lane's first
// word.
DEVICE u32 lookup(u32 entry, u32 lane) { return load_byte(dot_bytes(entry, 0x01800000, lane)); }

// Returns ceil(t / OCTAVE). |t| < 2^59, because 7 c < 2^28 and |S| < 2^23.
DEVICE i32 octave_of_steps(i64 t) {
  const i32 sevenths = (i32)((t + (1 << 28) - 1) >> 28);
  return (sevenths + (sevenths > 0 ? 6 : 0)) / 7;
}

// The unit that all scores of a row share. x = T - e OCTAVE + TOP counts in 2^-16 step, or in 2^-22 step where C has
// bits below 2^-16 step.
struct TableUnit {
  static constexpr u32 STEP_OCTAVE = 112 << 16, ZEROS = 16 << 16;  // x < ZEROS gives one of the 16 entries with p = 0
  u32 unit, inverse;                                               // x of a score of 1; 2^32 / unit
  u32 octave;                                                      // score units per octave, rounded up by one or two
  u32 reach;  // TableRow::raise_32bit is exact up to S + below = reach
  i32 drop;   // fraction bits of x beyond 16

  TableUnit() = default;
  DEVICE TableUnit(const Score& score) {
    drop = score.k == 0 && score.C < 1 << 16 ? 6 : 0;
    unit = (u32)(((i64)score.C << score.k) >> (8 - drop));
    inverse = reciprocal(divisor());
    octave = __umulhi(STEP_OCTAVE, inverse) + 2;
    // Keeps x < 2^31, and base, which gains 2 units per octave, below ZEROS: reach * unit / STEP_OCTAVE * 2 * unit <
    // ZEROS / 2.
    reach = clamps() ? min(inverse >> 2, __umulhi(inverse, inverse) << 8) : 0;
  }
  // Whether a score with x < 0 may be replaced by one with 0 <= x < ZEROS, for which p is 0 as well.
  DEVICE bool clamps() const { return drop == 0 && unit <= ZEROS / 4; }
  // A smaller unit cannot raise the octave, because scores differ by at most 2^22.
  DEVICE u32 divisor() const { return max(unit, 256u); }
  // Returns floor(2^32 / d) for d >= 256.
  DEVICE static u32 reciprocal(u32 d) {
    const i32 zeros = leading_zeros(d);
    return (u32)reciprocal_2_61<false>(d << zeros) >> (29 - zeros);
  }
  DEVICE u32 top() const { return (u32)(TOP >> (8 - drop)); }
};

// Converts a row's scores to table entries: x = (S + below) * unit + base. Where S + below < 0, x < ZEROS.
struct TableRow {
  i32 below, limit;  // scores up to `limit` do not raise the octave e
  u32 base;

  DEVICE void init() { below = 0, limit = NO_SCORE, base = ~0u; }
  // Returns the octave e of a row that has keys; x of S = 0 is TOP - e OCTAVE.
  DEVICE i32 octave(const TableUnit& by) const {
    return (i32)(by.top() - base - (i64)below * by.unit >> (20 + by.drop)) / 7;
  }
  // Whether this maximum score needs `raise_64bit`.
  DEVICE bool needs_64_bits(i32 score, const TableUnit& by) const {
    // bitwise operators avoid branches
    return (score > limit) & ((u32)(score + below) > by.reach | base > by.ZEROS / 2);
  }
  // Raises the octave e so that it holds the score. Returns the number of octaves, at most 31.
  DEVICE i32 raise_64bit(i32 score, const TableUnit& by) {
    if (score <= limit) return 0;
    const i64 t = ((i64)score * by.unit) << (8 - by.drop);
    const i32 before = limit == NO_SCORE ? NO_OCTAVE : octave(by), after = max(before, octave_of_steps(t));
    const u32 x = (u32)((t - after * OCTAVE + TOP) >> (8 - by.drop)), d = by.divisor();
    u32 units = __umulhi(x, by.inverse);  // at most one too small
    units += x - units * d >= d;
    below = (i32)units - score, base = x - units * by.unit;
    limit = (i32)__umulhi(by.top() - base, by.inverse) - below;
    return min(after - before, 31);
  }
  // Raises e as `raise_64bit` does, by 32-bit products, for a rise of few octaves or none.
  DEVICE i32 raise_32bit(i32 score, const TableUnit& by) {
    const i32 over = (i32)((u32)(max(score, limit) + below) * by.unit + base - by.top());
    const i32 octaves = (max(over, 0) + by.STEP_OCTAVE - 1 >> 20) * 9363 >> 16;  // / 7, exact below 2^12
    below -= octaves * by.octave, limit += octaves * (by.octave - 2);
    base += octaves * (by.octave * by.unit - by.STEP_OCTAVE);
    return min(octaves, 31);
  }
  template <bool CLAMPS>
  DEVICE u32 entry(i32 s, const TableUnit& by) const {
    const i32 above = s + below;
    if constexpr (CLAMPS) return (u32)max(above, 0) * by.unit + base;
    return above < 0 ? 0 : ((u32)above * by.unit + base) >> by.drop;
  }
};
