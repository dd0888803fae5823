// Scalar arithmetic of the kernels: constants of a call, rounding of the output, conversion of floats. Everything has
// internal linkage, because the same text is compiled for several instruction sets.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/call.h"

namespace intflash {
namespace {

constexpr int64_t kNever = -(int64_t(1) << 62);  // below every T: the maximum of a row without keys

template <class T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}
inline int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline int32_t wrapping_add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
inline int64_t wrapping_add(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
inline int32_t wrapping_multiply(int32_t a, int32_t b) { return int32_t(uint32_t(a) * uint32_t(b)); }
inline int64_t wrapping_multiply(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }

// The unit of a method's T, which counts 2^-32 of it, and how many fraction bits a score's multiplier keeps.
struct ScoreUnit {
  int sixteenths;       // number of units in 16 octaves
  double least_coarse;  // multipliers from here on keep 24 fraction bits
  int fraction_bits;    // smaller multipliers keep so many
  constexpr int64_t octave() const { return int64_t(sixteenths) << 28; }
  // A bias in octaves of so many fraction bits, in units of T.
  int64_t bias(int32_t code, int fraction_bits) const {
    return int64_t(code) * sixteenths * (int64_t(1) << (28 - fraction_bits));
  }
};
constexpr ScoreUnit kOctaves = {16, 0x1p-14, 32};
constexpr ScoreUnit kTableSteps = {7, 0x1p-16, 30};  // intflash_online: 256 steps of 1/112 octave

// T = (S << k) * c in 2^-32 of the method's unit, docs/numerics.md section 2; 0 <= c < 2^31, 0 <= k <= 8.
struct Exponent {
  uint32_t c = 0;
  int k = 0;
};

inline Exponent exponent_constants(float q_scale, float k_scale, double sm_scale, const ScoreUnit& unit) {
  double octaves = ((double(q_scale) * double(k_scale)) * sm_scale) * 1.4426950408889634;
  if (octaves > 64.0) octaves = 64.0;
  const double units = octaves * (unit.sixteenths / 16.0);
  Exponent e;
  if (units >= 0.5) std::frexp(units, &e.k), ++e.k;
  const int zeros = units < unit.least_coarse ? 32 - unit.fraction_bits : 8;  // fraction bits that are dropped
  const uint32_t c = uint32_t(std::nearbyint(std::ldexp(units, 32 - zeros))) << (zeros - e.k);  // half to even
  e.c = c > 0x7FFFFF00u ? 0x7FFFFF00u : c;
  return e;
}

// The constants of the last pair of scales, computed anew for another pair.
struct CachedExponent {
  ScoreUnit unit = kOctaves;
  float q_scale = 0, k_scale = 0;
  Exponent exponent;
  Exponent of(float q, float k, double sm_scale) {
    if (q != q_scale || k != k_scale) exponent = exponent_constants(q, k, sm_scale, unit), q_scale = q, k_scale = k;
    return exponent;
  }
};

// T with a bias in 32 bits, units of 2^-24 octave, where c has no bits below that and scores and biases are small
// enough. bias_shift: from the bias's unit to that one. An absent key has INT32_MIN. All other keys stay 16 octaves
// above that, so that its p is 0.
constexpr int32_t kAbsentLevel32 = INT32_MIN;
inline int bias_shift(const Call& call) { return 24 - call.bias_fraction_bits; }
inline bool has_24_fraction_bits(Exponent e) { return e.k == 0 && e.c % 256 == 0; }
inline bool levels_fit_32_bits(int32_t score, int32_t bias, uint32_t c24, int bias_shift) {
  return int64_t(score) * c24 + int64_t(bias) * (1 << bias_shift) <= (int64_t(1) << 31) - (int64_t(1) << 28);
}
inline int32_t level32(int32_t score, int32_t bias, uint32_t c24, int bias_shift) {
  return int32_t(uint32_t(score) * c24 + (uint32_t(bias) << bias_shift));
}

// s_V / s_O = mr * 2^(e - 24), 2^23 <= mr <= 2^24, or mr = 0 where outputs are less than half a step of s_O
struct OutputMultiplier {
  int64_t mr;
  int e;
};

// e saturates at [-7, 29 + gap].
inline OutputMultiplier output_multiplier(float v_scale, float out_scale, int gap = 0) {
  OutputMultiplier m;
  const double f = std::frexp(std::min(double(v_scale) / double(out_scale), 0x1p128), &m.e);
  m.mr = m.e < -7 ? 0 : int64_t(std::nearbyint(f * 16777216.0));
  m.e = m.e < -7 ? -7 : m.e > 29 + gap ? 29 + gap : m.e;
  return m;
}

inline uint16_t to_bfloat16(float x) {  // round half to even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
  return uint16_t(x != x ? 0x7FC0 : rounded);
}

inline uint16_t to_float16(float x) {  // round half to even, subnormals and overflow included
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7FFFFFFF;
  float tiny;  // below 2^-14: the float adder rounds at 2^-24
  std::memcpy(&tiny, &a, 4);
  tiny += 0.5f;
  uint32_t tiny_bits;
  std::memcpy(&tiny_bits, &tiny, 4);
  const uint32_t normal = (a - 0x38000000 + 0xFFF + ((a >> 13) & 1)) >> 13;
  const uint32_t large = a > 0x7F800000 ? 0x7E00 : 0x7C00;
  return uint16_t(sign | (a >= 0x47800000 ? large : a < 0x38800000 ? tiny_bits - 0x3F000000 : normal));
}

inline float from_float16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  const float subnormal = float(int32_t(magnitude)) * 5.9604644775390625e-8f;  // 2^-24
  uint32_t u;
  std::memcpy(&u, &subnormal, 4);
  const uint32_t normal = (magnitude << 13) + (magnitude < 0x7C00 ? 0x38000000 : 0x70000000);
  u = (magnitude < 0x0400 ? u : normal) | sign;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float from_bfloat16(uint16_t b) {
  const uint32_t u = uint32_t(b) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

}  // namespace
}  // namespace intflash
