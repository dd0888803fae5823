// Computes the absolute maximum and the int8 codes of rows of floats: docs/numerics.md section 1.
#pragma once
#include <cmath>

#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

struct Float32 {
  using Type = float;
  using Bits = uint32_t;
  static constexpr FloatType kType = FloatType::kFloat32;
  static inline float value(float x) { return x; }
};
struct Float16 {
  using Type = uint16_t;
  using Bits = uint16_t;
  static constexpr FloatType kType = FloatType::kFloat16;
  static inline float value(uint16_t x) { return from_float16(x); }
};
struct BFloat16 {
  using Type = uint16_t;
  using Bits = uint16_t;
  static constexpr FloatType kType = FloatType::kBFloat16;
  static inline float value(uint16_t x) { return from_bfloat16(x); }
};

// The distance of software prefetches, about 512 values: past the end of a page or in later rows, where the hardware
// prefetcher does not reach.
[[maybe_unused]] inline int64_t prefetch_distance(const Rows& shape) {
  const int64_t columns = shape.runs * shape.columns;
  return shape.rows > 1 ? (511 + columns) / columns * shape.row_step : 512;
}

template <class V, class F>
float absolute_maximum_of(const void* data, const Rows& shape) {
  using Bits = typename F::Bits;
  const auto* x = static_cast<const typename F::Type*>(data);
  Bits bits = 0;  // the bits of non-negative floats are ordered as integers, with NaN above all
  if constexpr (V::kRowOperations) {
    bits = Bits(V::largest_magnitude(x, shape, prefetch_distance(shape)));
  } else {
    const int64_t columns = shape.runs * shape.columns;
    for (int64_t r = 0; r < shape.rows; ++r, x += shape.row_step)
      for (int64_t i = 0; i < columns; ++i) {
        Bits u;
        std::memcpy(&u, x + i, sizeof(u));
        u &= Bits(~Bits(0)) >> 1;
        bits = u > bits ? u : bits;
      }
  }
  typename F::Type largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  return F::value(largest);
}

template <class V>
float absolute_maximum(const void* x, FloatType type, const Rows& shape) {
  switch (type) {
    case FloatType::kFloat16: return absolute_maximum_of<V, Float16>(x, shape);
    case FloatType::kBFloat16: return absolute_maximum_of<V, BFloat16>(x, shape);
    default: return absolute_maximum_of<V, Float32>(x, shape);
  }
}

// Returns the exact product x * inverse rounded once, half to even, and clamped to [-limit, limit]. A NaN gives limit, or
// -limit where its sign bit is set.
inline int8_t code(float x, float inverse, int32_t limit) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: the low bits of the sum are the integer
  constexpr int32_t magic_bits = 0x4B400000;
  const float y = __builtin_fmaf(x, inverse, magic);
  int32_t bits;  // ordered as y is, where y is not negative; a negative y has negative bits
  std::memcpy(&bits, &y, 4);
  return int8_t(smaller(larger(bits, magic_bits - limit), magic_bits + limit) - magic_bits);
#else
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52; the product of two floats is exact
  double y = double(x) * double(inverse);
  if (y != y) return int8_t(std::signbit(x) ? -limit : limit);
  y = y < -limit ? -limit : y;
  y = y > limit ? limit : y;
  return int8_t(int32_t((y + magic) - magic));
#endif
}

template <class V, class F>
void quantize_of(const void* data, const Rows& shape, float inverse, int qmax, int8_t* codes) {
  const auto* x = static_cast<const typename F::Type*>(data);
  if constexpr (V::kRowOperations) {
    V::template quantize<F::kType>(x, shape, inverse, qmax, codes, prefetch_distance(shape));
  } else {
    const Rows s = shape;  // a local copy, because the codes are bytes, which may alias everything else
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t run = 0; run < s.runs; ++run) {
        const auto* from = x + r * s.row_step + run * s.columns;
        int8_t* to = codes + r * s.columns + run * s.run_step;
        if constexpr (V::kFloat16 && F::kType == FloatType::kFloat16) {
          for (int64_t first = 0; first < s.columns; first += 64) {
            const int64_t count = smaller<int64_t>(64, s.columns - first);
            float wide[64];
            V::widen_float16(from + first, count, wide);
            for (int64_t i = 0; i < count; ++i) to[first + i] = code(wide[i], inverse, qmax);
          }
        } else {
          for (int64_t i = 0; i < s.columns; ++i) to[i] = code(F::value(from[i]), inverse, qmax);
        }
      }
  }
}

template <class V>
void quantize(const void* x, FloatType type, const Rows& shape, float inverse, int qmax, int8_t* codes) {
  switch (type) {
    case FloatType::kFloat16: return quantize_of<V, Float16>(x, shape, inverse, qmax, codes);
    case FloatType::kBFloat16: return quantize_of<V, BFloat16>(x, shape, inverse, qmax, codes);
    default: return quantize_of<V, Float32>(x, shape, inverse, qmax, codes);
  }
}

}  // namespace
}  // namespace intflash
