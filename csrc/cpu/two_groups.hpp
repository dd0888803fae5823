// The two groups of a row's keys in intflash_bfp, those with and those without a value: docs/numerics.md section 2.
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

constexpr int kNoOctave = -(1 << 29);  // of a group without keys
constexpr int kFar = 48;               // a group so many octaves below its row adds nothing
constexpr int kMaxGap = 96;
// 32 bits hold the digits of P V of so many keys, as 255 * 128 * 65,536 < 2^31, and their sum of p, as 65,193 * 65,536
// < 2^32. The sums of longer sequences have kManyShift fewer fraction bits.
constexpr int64_t kDigitKeys = 65536;
constexpr int kOutputShift = 24;  // from a row's sums to those that its output is made of
constexpr int kManyShift = 4;

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
  if (call.method != Method::kTwoGroups || call.nk > kShortRowKeys) return false;
  uint8_t valueless[kShortRowKeys];
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads_k; ++h) {
      find_valueless(call.v.at(b, h), call.v.stride[2], call.v.stride[3], call.nk, call.value_dim, valueless);
      if (has_valueless(valueless, call.nk)) return false;
    }
  return true;
}

// The octaves and sums of p of a row's keys with and without a value. Octaves count from the maximum of T over the keys
// with a value, or over all where none has one; the row's sums from the largest octave, with `fraction` bits below it.
struct TwoGroups {
  int64_t origin = 0;
  int octave = kNoOctave, other_octave = kNoOctave, fraction = kOutputShift;
  uint64_t l = 0, other_l = 0;  // below 65,193 * 2^20 < 2^36

  TwoGroups() = default;
  // Takes the maxima of T, kNever without keys, and the number of the sequence's keys.
  TwoGroups(int64_t maximum, int64_t other_maximum, int64_t keys) {
    if (keys > kDigitKeys) fraction -= kManyShift;
    if (maximum != kNever) octave = 0;
    origin = octave == 0 ? maximum : other_maximum == kNever ? 0 : other_maximum;
    if (other_maximum != kNever) other_octave = int((other_maximum - origin + 0xFFFFFFFF) >> 32);
  }

  int top() const { return larger(octave, other_octave); }
  // Returns T of an octave.
  int64_t level(int octave) const { return origin + octave * (int64_t(1) << 32); }
  int64_t other_level() const { return other_octave == kNoOctave ? 0 : level(other_octave); }

  uint32_t rounded_l() const {
    return uint32_t((merged(l, octave) + merged(other_l, other_octave) + (1 << (kOutputShift - 1))) >> kOutputShift);
  }
  // Octaves by which the row's l counts from above its acc.
  int gap() const { return octave == kNoOctave ? 0 : smaller(top() - octave, kMaxGap); }
  int64_t log_sum_level() const { return l + other_l ? level(top() + kOutputShift - fraction) : kNever; }

 private:
  uint64_t merged(uint64_t sum, int octave) const {
    const int depth = top() - octave;
    return depth < kFar ? (sum << fraction) >> depth : 0;
  }
};

// Writes the digits of acc / 2^shift, rounded half up.
inline void rounded_digits(const int64_t* acc, int64_t n, int shift, int32_t* high, int32_t* low) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t x = (acc[i] + (int64_t(1) << (shift - 1))) >> shift;
    high[i] = int32_t(x >> 8), low[i] = int32_t(x & 255);
  }
}

}  // namespace
}  // namespace intflash
