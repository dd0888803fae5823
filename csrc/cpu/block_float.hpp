// The sums of a row of intflash_bfp: docs/numerics.md section 2, "An exponent per block of keys".
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

constexpr int64_t kBlockFloatBiasStep = int64_t(1) << 20;  // 2^-12 octave in T
constexpr int kNoOctave = -(1 << 29);                      // of a group without keys, below every other
constexpr int kFar = 48;                                   // a block so many octaves below its row adds nothing
constexpr int kMaxGap = 96;
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

// The octaves and sums of a row. l and acc have `fraction` fraction bits and count from the largest octave so far: of
// all keys, and of those with a value. |acc| of a block is below 2^30.
struct BlockFloatRow {
  int fraction, top, value_top;
  int lowest, value_lowest;  // the smallest octaves that added something
  int64_t l;

  BlockFloatRow() = default;
  explicit BlockFloatRow(int64_t keys)
      : fraction(keys > 65536 ? kLeastFraction : kManyFraction), top(kNoOctave), value_top(kNoOctave) {
    begin_again();
  }
  void begin_again() { lowest = value_lowest = INT32_MAX, l = 0, rose_ = false; }

  // Whether no sum has lost a bit by rising. Without a rise every block was summed below the row's largest octave, as
  // the definition says.
  bool is_exact() const {
    return !rose_ || (top - lowest <= fraction && (value_lowest == INT32_MAX || value_top - value_lowest <= fraction));
  }

  void raise(int octave, int64_t* acc, int64_t n) {
    if (octave <= value_top) return;
    if (value_top != kNoOctave) {
      const int by = smaller(octave - value_top, 63);
      for (int64_t d = 0; d < n; ++d) acc[d] >>= by;
      rose_ = true;
    }
    value_top = octave;
  }
  void add_l(int octave, uint32_t sum) {
    if (octave > top) l >>= smaller(octave - top, 63), rose_ = rose_ || top != kNoOctave, top = octave;
    lowest = smaller(lowest, octave);
    const int depth = top - octave;
    if (depth < kFar) l += (int64_t(sum) << fraction) >> depth;
  }
  void add_acc(int octave, const int32_t* high, const int32_t* low, int64_t* acc, int64_t n) {
    value_lowest = smaller(value_lowest, octave);
    const int depth = value_top - octave, up = fraction - depth;
    if (depth >= kFar) return;
    if (up >= 0)
      for (int64_t d = 0; d < n; ++d) acc[d] += int64_t(high[d] * 256 + low[d]) * (int64_t(1) << up);
    else
      for (int64_t d = 0; d < n; ++d) acc[d] += (high[d] * 256 + low[d]) >> smaller(-up, 31);
  }

  int gap() const { return value_top == kNoOctave ? 0 : smaller(top - value_top, kMaxGap); }
  int64_t log_sum_level() const { return l ? int64_t(top - fraction) * (int64_t(1) << 32) : kNever; }

 private:
  bool rose_ = false;
};

}  // namespace
}  // namespace intflash
