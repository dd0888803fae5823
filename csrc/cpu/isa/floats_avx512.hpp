// Absolute maxima and codes of floats on 512-bit registers: quantize.hpp says what they are.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "cpu/call.h"

namespace intflash {
namespace {

struct Floats512 {
  // Masks of the first `count` lanes or bytes.
  static __mmask16 lanes(int64_t count) { return count >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << count) - 1); }
  static __mmask64 bytes(int64_t count) { return count >= 64 ? ~__mmask64(0) : count <= 0 ? 0 : (__mmask64(1) << count) - 1; }

  // 16 values, or those of a mask, as float32.
  template <FloatType F>
  static __m512 widened(const float* x) { return _mm512_loadu_ps(x); }
  template <FloatType F>
  static __m512 widened(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
  template <FloatType F>
  static __m512 widened(const uint16_t* x) { return widened<F>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  template <FloatType F>
  static __m512 widened(const uint16_t* x, __mmask16 mask) { return widened<F>(_mm256_maskz_loadu_epi16(mask, x)); }
  template <FloatType F>
  static __m512 widened(__m256i x) {
    if constexpr (F == FloatType::kFloat16) return _mm512_cvtph_ps(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  template <class T>
  static void prefetch(const T* x) { _mm_prefetch(reinterpret_cast<const char*>(x), _MM_HINT_T0); }

  // Bits of the largest |x|: of floats of either size ordered as integers, NaN above all.
  template <class T>
  static uint32_t largest_magnitude(const T* x, const Rows& shape, int64_t ahead) {
    constexpr bool kWide = sizeof(T) == 4;
    constexpr int kValues = 64 / sizeof(T);
    const __m512i magnitude = _mm512_set1_epi32(kWide ? 0x7FFFFFFF : 0x7FFF7FFF);
    const auto larger_of = [](__m512i a, __m512i b) { return kWide ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b); };
    const int64_t n = shape.runs * shape.columns;
    __m512i m[4] = {};
    for (int64_t r = 0; r < shape.rows; ++r, x += shape.row_step) {
      int64_t i = 0;
      for (; i + 4 * kValues <= n; i += 4 * kValues)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const T* at = x + i + kValues * j;
          prefetch(at + ahead);
          m[j] = larger_of(m[j], _mm512_and_si512(_mm512_loadu_si512(at), magnitude));
        }
      for (; i < n; i += kValues) {
        prefetch(x + i + ahead);
        const __m512i rest = _mm512_maskz_loadu_epi8(bytes((n - i) * int64_t(sizeof(T))), x + i);
        m[0] = larger_of(m[0], _mm512_and_si512(rest, magnitude));
      }
    }
    const __m512i all = larger_of(larger_of(m[0], m[1]), larger_of(m[2], m[3]));
    return kWide ? _mm512_reduce_max_epu32(all) : _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_srli_epi32(all, 16), _mm512_and_si512(all, _mm512_set1_epi32(0xFFFF))));
  }

  // quantize.hpp's code(), of vectors.
  template <FloatType F>
  struct Encoder {
    __m512 inverse, magic = _mm512_set1_ps(12582912.0f);
    __m512i zero = _mm512_set1_epi32(0x4B400000), low, high;
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t ahead;
    Encoder(float inverse, int limit, int64_t ahead)
        : inverse(_mm512_set1_ps(inverse)), low(_mm512_set1_epi32(0x4B400000 - limit)), high(_mm512_set1_epi32(0x4B400000 + limit)), ahead(ahead) {}
    __m512i code(__m512 v) const {
      const __m512i bits = _mm512_castps_si512(_mm512_fmadd_ps(v, inverse, magic));
      return _mm512_sub_epi32(_mm512_min_epi32(_mm512_max_epi32(bits, low), high), zero);
    }
    template <class T>
    __m512i thirty_two(const T* x) const {  // as int16, quarters of both sixteens in turn
      prefetch(x + ahead);
      if (sizeof(T) == 4) prefetch(x + 16 + ahead);
      return _mm512_packs_epi32(code(widened<F>(x)), code(widened<F>(x + 16)));
    }
    template <class T>
    __m512i codes(const T* x) const { return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(thirty_two(x), thirty_two(x + 32))); }
    template <class T>
    __m256i half_codes(const T* x) const {
      const __m512i words = thirty_two(x);
      return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, words)));
    }
  };
  template <FloatType F, class T>
  static void quantize(const T* data, Rows shape, float inverse, int limit, int8_t* codes, int64_t ahead) {
    const Encoder<F> encoder(inverse, limit, ahead);
    const int64_t n = shape.columns;
    for (int64_t r = 0; r < shape.rows; ++r, data += shape.row_step, codes += n) {
      const T* x = data;
      int8_t* out = codes;
      int64_t run = 0;
      for (; n == 32 && run + 2 <= shape.runs; run += 2, x += 64, out += 2 * shape.run_step) {
        const __m512i pair = encoder.codes(x);
        store_half(out, _mm512_castsi512_si256(pair)), store_half(out + shape.run_step, _mm512_extracti64x4_epi64(pair, 1));
      }
      for (; run < shape.runs; ++run, x += n, out += shape.run_step) {
        int64_t i = 0;
        for (; i + 64 <= n; i += 64) _mm512_storeu_si512(out + i, encoder.codes(x + i));
        for (; i + 32 <= n; i += 32) store_half(out + i, encoder.half_codes(x + i));
        for (; i < n; i += 16) {
          prefetch(x + i + ahead);
          _mm_mask_storeu_epi8(out + i, lanes(n - i), _mm512_cvtepi32_epi8(encoder.code(widened<F>(x + i, lanes(n - i)))));
        }
      }
    }
  }
  static void store_half(int8_t* to, __m256i codes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes); }
};

}  // namespace
}  // namespace intflash
