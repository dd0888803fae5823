// LayerNorm with an integer reciprocal square root, written once over a vector layer V: docs/numerics.md, section 4.
#pragma once
#include "cpu/integer.h"
#include "cpu/lanes.hpp"

namespace intflash {
namespace {

// The table of the reciprocal square root: round_half_even(2^46 / sqrt((i + 64.5) * 2^24)).
struct ReciprocalRoots {
  uint32_t entry[192];
  ReciprocalRoots() {
    for (int i = 0; i < 192; ++i) entry[i] = uint32_t(std::nearbyint(0x1p46 / std::sqrt((i + 64.5) * 0x1p24)));
  }
};

// Returns 2^46 / sqrt(n) to 2^-27, in [2^30 - 64, 2^31); n in [2^30, 2^32).
inline int32_t reciprocal_root(uint32_t n) {
  static const ReciprocalRoots table;
  uint64_t root = table.entry[(n >> 24) - 64];
  for (int step = 0; step < 2; ++step) {
    const uint64_t u = (((root * root) >> 32) * n) >> 32;  // 2^28 at the root
    root = (root * ((uint64_t(3) << 28) - u)) >> 29;
  }
  return int32_t(smaller<uint64_t>(root, 0x7FFFFFFF));
}

template <class V>
struct LayerNorm {
  using I32 = typename V::I32;
  static constexpr int kLanes = V::kLanes;

  static void run(const LayerNormCall& call, int64_t first, int64_t last, Scratch& scratch) {
    int32_t* row = reinterpret_cast<int32_t*>(scratch.reserve(size_t(round_up(call.channels, kLanes) * 4)));
    for (int64_t c = call.channels; c < round_up(call.channels, kLanes); ++c) row[c] = 0;
    for (int64_t r = first; r < last; ++r) {
      Sums sums;
      switch (call.in) {
        case Width::kInt8: sums = load_row<int8_t>(call, r, row); break;
        case Width::kInt16: sums = load_row<int16_t>(call, r, row); break;
        case Width::kInt32: sums = load_row<int32_t>(call, r, row); break;
      }
      switch (call.width) {
        case Width::kInt8: store_row<int8_t>(call, r, row, sums); break;
        case Width::kInt16: store_row<int16_t>(call, r, row, sums); break;
        case Width::kInt32: store_row<int32_t>(call, r, row, sums); break;
      }
    }
  }

 private:
  struct Sums {
    int64_t of_x = 0, of_squares = 0;  // |sum| <= 2^37, < 2^60
  };

  template <class T>
  static Sums load_row(const LayerNormCall& call, int64_t r, int32_t* row) {
    const int64_t part = call.channels / call.parts, image = r / call.out_rows, at = r % call.out_rows;
    Sums sums;
    for (int64_t p = 0; p < call.parts; ++p, row += part) {
      const int64_t from = call.load_rows ? call.load_rows[at * call.parts + p] : at;
      const T* x = static_cast<const T*>(call.x) + (image * call.in_rows + from) * part;
      int64_t c = 0;
      if constexpr (V::kRowOperations) c = V::widen_and_sum(x, part, row, sums.of_x, sums.of_squares);
      int64_t sum = 0, squares = 0;
      for (; c < part; ++c) {
        const int32_t value = x[c];
        row[c] = value;
        sum += value;
        squares += int64_t(value) * value;
      }
      sums.of_x += sum, sums.of_squares += squares;
    }
    return sums;
  }

  template <class T>
  static void store_row(const LayerNormCall& call, int64_t r, const int32_t* row, const Sums& sums) {
    const int64_t channels = call.channels, s = sums.of_x;
    const int64_t q = s >= 0 ? s / channels : -((channels - 1 - s) / channels), rest = s - q * channels;  // floor
    const int64_t w = sums.of_squares - 2 * q * s + channels * q * q - rest * rest / channels;
    const uint64_t e = uint64_t(w + call.eps);  // in [1, 2^62)
    const int h = __builtin_clzll(e) / 2;       // (64 - L) // 2 with L the number of bits of e
    const uint32_t n = uint32_t(h >= 16 ? e << (2 * h - 32) : e >> (32 - 2 * h));
    const int f = h - 1;
    const I32 mean = V::set1(int32_t(q)), part = V::set1(int32_t((rest << f) / channels));
    const I32 root = V::set1(reciprocal_root(n));
    T* out = static_cast<T*>(call.out) + r * channels;
    const auto normalized = [&](int64_t c) __attribute__((always_inline)) {
      const I32 t = V::sub(V::shift_left(V::sub(V::load(row + c), mean), f), part);
      const I32 z = V::mul_high_signed(t, root);
      const I32 y = V::add(V::mul_high_signed(z, call.multiplier + c), V::load(call.bias + c));
      return V::shift_right_signed(y, call.shift);
    };
    int64_t c = 0;
    for (; c + 4 * kLanes <= channels; c += 4 * kLanes) {
      I32 y[4] = {normalized(c), normalized(c + kLanes), normalized(c + 2 * kLanes), normalized(c + 3 * kLanes)};
      Lanes<V>::store_clamped(out + c, y, call.limits, 4 * kLanes);
    }
    for (; c < channels; c += kLanes) {
      I32 y[1] = {normalized(c)};
      Lanes<V>::store_clamped(out + c, y, call.limits, channels - c);
    }
  }
};

}  // namespace
}  // namespace intflash
