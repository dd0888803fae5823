// The sums of a row of intflash_bfp: docs/numerics.md section 2, "An exponent per block of keys".
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

constexpr int kNoOctave = -(1 << 29);  // of a group without keys, below every other
constexpr int kFar = 48;               // a block so many octaves below its row adds nothing
constexpr int kMaxGap = 96;
constexpr int kAccShift = 8;  // the unit of a block's P V is 2^8 of P16
// Blocks of one octave whose sums of P V fit 32 bits, as 127 / 256 * 65,535 * 128 * 512 < 2^31. A block kMostRise
// octaves above counts as so many.
constexpr int kMostBlocks = 512, kMostRise = 9;
constexpr int kOutputShift = 24;                        // from a row's sums to those that its output is made of
constexpr int kLeastFraction = 20, kManyFraction = 24;  // fraction bits of the sums of more and of up to 2^16 keys

// Writes for every key whether all codes of its value are 0.
inline void find_valueless(const int8_t* v, int64_t key_step, int64_t step, int64_t n, int64_t dim, uint8_t* out) {
  for (int64_t j = 0; j < n; ++j, v += key_step) {
    int8_t some = 0;
    if (step == 1)
      for (int64_t d = 0; d < dim; ++d) some |= v[d];
    else
      for (int64_t d = 0; d < dim; ++d) some |= v[d * step];
    out[j] = some == 0;
  }
}
inline bool has_valueless(const uint8_t* valueless, int64_t n) {
  uint8_t some = 0;
  for (int64_t j = 0; j < n; ++j) some |= valueless[j];
  return some;
}

// Whether it is known that every key of the call has a value: asked of calls of short rows, which then have faster
// kernels. Longer calls look at each head when its thread packs it.
inline bool all_have_values(const Call& call) {
  if (call.method != Method::kBlockFloat || call.nk > kShortRowKeys) return false;
  uint8_t valueless[kShortRowKeys];
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads_k; ++h) {
      find_valueless(call.v.at(b, h), call.v.stride[2], call.v.stride[3], call.nk, call.value_dim, valueless);
      if (has_valueless(valueless, call.nk)) return false;
    }
  return true;
}

// The octaves and sums of a row. Blocks share sums in 32 bits, in the unit of the lowest octave of theirs (`pending`),
// until these could overflow: `blocks` blocks of that octave would have sums as large. l and the wide acc count from
// the largest octave so far, of all keys and of those with a value, with `fraction` fraction bits.
struct BlockFloatRow {
  int fraction, top, value_top, pending, pending_top, blocks, lowest, value_lowest;
  bool has_wide;
  int64_t l;
  int64_t origin = 0;  // the T from which octaves count; kNever where it is the first maximum

  BlockFloatRow() = default;
  explicit BlockFloatRow(int64_t keys)
      : fraction(keys > 65536 ? kLeastFraction : kManyFraction),
        top(kNoOctave),
        value_top(kNoOctave),
        origin(keys <= kOneBlock ? kNever : 0) {
    begin();
  }
  void begin() { pending = pending_top = kNoOctave, lowest = value_lowest = INT32_MAX, has_wide = false, l = 0; }

  // Whether every shift was exact. Where one was not, the row is summed again from the octaves found, block by block.
  bool is_exact() const {
    return lowest == INT32_MAX ||
           (top - lowest <= fraction && (value_lowest == INT32_MAX || largest_of_value() - value_lowest <= fraction));
  }
  int largest_of_value() const { return larger(value_top, pending_top); }
  void begin_again() { value_top = largest_of_value(), begin(); }

  void add_l(int octave, uint32_t sum) {
    if (octave > top) l = octave - top < kFar ? l >> (octave - top) : 0, top = octave;
    lowest = smaller(lowest, octave);
    const int depth = top - octave;
    if (depth < kFar) l += (int64_t(sum) << fraction) >> depth;
  }

  // Begins pending sums with a block.
  void begin_pending(int octave) {
    pending = pending_top = octave, blocks = 1;
    value_lowest = smaller(value_lowest, octave);
  }
  // Whether 32 bits hold the pending sums and a block's. Then rise and up are the octaves by which the pending sums,
  // and those of the block, are shifted to the lower unit of both.
  bool takes_block(int octave, int& rise, int& up) {
    if (pending == kNoOctave || larger(pending - octave, octave - pending) > kMostRise) return false;
    const int lower = smaller(pending, octave), sum = (blocks << (pending - lower)) + (1 << (octave - lower));
    if (sum > kMostBlocks) return false;
    rise = pending - lower, up = octave - lower, blocks = sum;
    pending = lower, pending_top = larger(pending_top, octave);
    value_lowest = smaller(value_lowest, octave);
    return true;
  }

  // Whether the pending sums are all that there are, and in units of the output's sums need no rounding. Without keys
  // they are 0.
  bool has_short_sums() const {
    if (has_wide || pending == kNoOctave) return !has_wide;
    return value_top <= pending_top && pending_top - pending <= kAccShift && fraction == kOutputShift;
  }

  // Adds the pending sums to the wide ones.
  void merge(const int32_t* sums, int64_t* acc, int64_t n) {
    if (pending_top > value_top) {
      if (has_wide) {
        const int by = smaller(pending_top - value_top, 63);
        for (int64_t d = 0; d < n; ++d) acc[d] >>= by;
      }
      value_top = pending_top;
    }
    const int depth = value_top - pending, up = fraction - depth;
    if (!has_wide)
      for (int64_t d = 0; d < n; ++d) acc[d] = 0;
    has_wide = true;
    if (depth >= kFar) return;
    if (up >= 0)
      for (int64_t d = 0; d < n; ++d) acc[d] += int64_t(uint64_t(int64_t(sums[d])) << (up + kAccShift));
    else  // of a block alone, whose sums fit 32 bits; others are summed again
      for (int64_t d = 0; d < n; ++d) acc[d] += int32_t(uint32_t(sums[d]) << kAccShift) >> smaller(-up, 31);
  }

  int gap() const { return value_top == kNoOctave ? 0 : smaller(top - value_top, kMaxGap); }
  uint32_t rounded_l() const { return uint32_t((l + (1 << (kOutputShift - 1))) >> kOutputShift); }
  // Returns the octave of a group's maximum of T, rounded up.
  int octave_of(int64_t maximum) {
    if (origin == kNever) origin = maximum;
    return int((maximum - origin + 0xFFFFFFFF) >> 32);
  }
  int64_t level(int octave) const { return origin + octave * (int64_t(1) << 32); }
  int64_t log_sum_level() const { return l ? level(top + kOutputShift - fraction) : kNever; }
};

// Replaces pending sums, whose unit is `below` octaves below the row's, by the digits of the output's sums.
inline void digits_of_pending(int below, int64_t n, int32_t* high, int32_t* low) {
  for (int64_t d = 0; d < n; ++d) {
    const int32_t sum = high[d];
    high[d] = sum >> below, low[d] = int32_t(uint32_t(sum) << (kAccShift - below)) & 255;
  }
}

// Writes the digits of acc / 2^kOutputShift, rounded half up.
inline void rounded_acc(const int64_t* acc, int64_t n, int32_t* high, int32_t* low) {
  for (int64_t d = 0; d < n; ++d) {
    const int64_t x = (acc[d] + (1 << (kOutputShift - 1))) >> kOutputShift;
    high[d] = int32_t(x >> 8), low[d] = int32_t(x & 255);
  }
}

}  // namespace
}  // namespace intflash
