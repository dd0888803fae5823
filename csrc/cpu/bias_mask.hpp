// T of a biased row in 32 bits (arithmetic.hpp), in loops that compilers vectorize.
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

struct Level32Row {
  const int32_t* bias;
  int64_t step;
  uint32_t c24;
  int bias_shift;

  // Finds the maximum of T over keys [0, n), kNever without keys. Returns false where 32 bits do not hold T.
  bool level(const int32_t* s, int64_t n, int64_t& level) const {
    int32_t top = kAbsentLevel32, score = 0, most = 0;
    each(n, [&](int64_t j, int32_t b) {
      const int32_t present = -(s[j] != kAbsent), x = s[j] & present,
                    y = b & present;  // without branches, which gcc does not vectorize
      score = larger(score, x < 0 ? -x : x), most = larger(most, y < 0 ? -y : y);
      top = larger(top, (level32(x, y, c24, bias_shift) & present) | (kAbsentLevel32 & ~present));
    });
    if (!levels_fit_32_bits(score, most, c24, bias_shift)) return false;
    level = top == kAbsentLevel32 ? kNever : int64_t(top) * 256;
    return true;
  }

  // Overwrites scores with their depths below `level`, octaves in Q.9.
  void depths(int32_t* s, int64_t n, int64_t level) const {
    const uint32_t top = uint32_t(level >> 8);
    each(n, [&](int64_t j, int32_t b) {
      const uint32_t depth = (top - uint32_t(level32(s[j], b, c24, bias_shift))) >> 15;
      s[j] = int32_t(s[j] == kAbsent ? 65535 : smaller<uint32_t>(depth, 65535));
    });
  }

 private:
  template <class F>
  inline __attribute__((always_inline)) void each(int64_t n, F f) const {
    if (step == 1)
      for (int64_t j = 0; j < n; ++j) f(j, bias[j]);
    else
      for (int64_t j = 0; j < n; ++j) f(j, bias[j * step]);
  }
};

}  // namespace
}  // namespace intflash
