// Branch-free float32 helpers: a library expf branches per thread.
#pragma once
#include "simt.h"

static inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
// By mask arithmetic even under Zicond: a ternary between bits of floats becomes a float select, which is a branch.
static inline uint32_t select_bits(bool c, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & mask_of(c)); }
static inline float fselect(bool c, float a, float b) { return float_of(select_bits(c, bits_of(a), bits_of(b))); }
static inline float fmax2(float a, float b) { return __builtin_fmaxf(a, b); }   // fmax.s

static constexpr float LOWEST = -3.0e38f;      // a score that no key has yet; exp2 of it is below 2^-125, times a sum of 0

// 2^x for x <= 0, flat below -125; Taylor series to the 6th degree on [-1/2, 1/2], relative error 2e-7.
static inline float exp2_nonpositive(float x) {
  const float clamped = fmax2(x, -125.0f);
  const int32_t k = static_cast<int32_t>(clamped - 0.5f);   // truncation: nearest integer for x <= 0
  const float r = clamped - static_cast<float>(k);
  float y = 1.5403530e-4f;
  y = y * r + 1.3333558e-3f;
  y = y * r + 9.6181291e-3f;
  y = y * r + 5.5504109e-2f;
  y = y * r + 2.4022651e-1f;
  y = y * r + 6.9314718e-1f;
  y = y * r + 1.0f;
  return y * float_of(static_cast<uint32_t>(k + 127) << 23);
}

// float -> half bits for 0 <= x <= 1, round to nearest even, subnormals kept: x + 0.5 has an ulp of 2^-24.
static inline uint16_t half_of_unit(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t normal = (u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
  const uint32_t subnormal = bits_of(x + 0.5f) - bits_of(0.5f);
  return static_cast<uint16_t>(select_bits(x < 6.103515625e-5f, subnormal, normal));
}
