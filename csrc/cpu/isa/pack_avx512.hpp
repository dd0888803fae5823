// Panels of K and V on 512-bit registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/isa/floats_avx512.hpp"

namespace intflash {
namespace {

struct Pack512 : Floats512 {
  using Code = int8_t;

  static __m512i broadcast(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
  }
  // 16 x 16 words transposed.
  static void transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
      t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
      t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
      t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
      r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
      r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
      r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
    }
  }

  // A panel of up to 16 key rows, missing ones repeating the last, every code ^ Flip.
  template <int Flip>
  static void pack_key_panel(const int8_t* k, int64_t row_step, int64_t step, int64_t count, int64_t dim, int steps, Code* out) {
    const auto row = [&](int i) { return k + (i < count ? i : count - 1) * row_step; };
    if (step != 1) {
      for (int s = 0; s < steps; ++s)
        for (int i = 0; i < 16; ++i)
          for (int e = 0; e < 4; ++e, ++out) *out = Code((4 * s + e < dim ? row(i)[(4 * s + e) * step] : 0) ^ Flip);
      return;
    }
    const __m512i flip = _mm512_set1_epi8(char(Flip));
    if (count == 1 && dim == 4 * steps) {
      for (int s = 0; s < steps; ++s) _mm512_storeu_si512(out + 64 * s, _mm512_xor_si512(broadcast(k + 4 * s), flip));
      return;
    }
    if (dim == 32 && steps == 8) return pack_half_rows<Flip>(row, out);
    for (int s = 0; s < steps; s += 16) {
      const __mmask64 mask = bytes(dim - 4 * s);
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi8(mask, row(i) + 4 * s);
      transpose(r);
      const int n = steps - s < 16 ? steps - s : 16;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        if (i < n) _mm512_storeu_si512(out + 64 * (s + i), Flip ? _mm512_xor_si512(r[i], flip) : r[i]);
    }
  }

  // One step of a value panel: `rows` keys (of 4) by `columns` channels (of 16), the rest zero.
  static bool pack_values(const int8_t* v, int64_t row_step, int64_t rows, int64_t columns, Code* out) {
    const __mmask16 mask = lanes(columns);
    __m128i r[4];
    for (int i = 0; i < 4; ++i) r[i] = i < rows ? _mm_maskz_loadu_epi8(mask, v + i * row_step) : _mm_setzero_si128();
    const __m128i a = _mm_unpacklo_epi8(r[0], r[1]), b = _mm_unpackhi_epi8(r[0], r[1]);
    const __m128i c = _mm_unpacklo_epi8(r[2], r[3]), d = _mm_unpackhi_epi8(r[2], r[3]);
    __m128i* o = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(o, _mm_unpacklo_epi16(a, c));
    _mm_storeu_si128(o + 1, _mm_unpackhi_epi16(a, c));
    _mm_storeu_si128(o + 2, _mm_unpacklo_epi16(b, d));
    _mm_storeu_si128(o + 3, _mm_unpackhi_epi16(b, d));
    return true;
  }
  // The same step of two whole panels, or of four, side by side.
  static inline __attribute__((always_inline)) void pack_value_pair(const int8_t* v, int64_t row_step, Code* first, Code* second) {
    const auto row = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i * row_step)); };
    const __m256i a = _mm256_unpacklo_epi8(row(0), row(1)), b = _mm256_unpackhi_epi8(row(0), row(1));
    const __m256i c = _mm256_unpacklo_epi8(row(2), row(3)), d = _mm256_unpackhi_epi8(row(2), row(3));
    const auto both = [](__m256i x, __m256i y) { return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1); };
    const __m512i low = both(_mm256_unpacklo_epi16(a, c), _mm256_unpackhi_epi16(a, c)), high = both(_mm256_unpacklo_epi16(b, d), _mm256_unpackhi_epi16(b, d));
    _mm512_storeu_si512(first, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(second, _mm512_shuffle_i32x4(low, high, 0xDD));
  }
  static inline __attribute__((always_inline)) void pack_value_quad(const int8_t* v, int64_t row_step, Code* out) {
    const auto row = [&](int i) { return _mm512_loadu_si512(v + i * row_step); };
    const __m512i a = _mm512_unpacklo_epi8(row(0), row(1)), b = _mm512_unpackhi_epi8(row(0), row(1));
    const __m512i c = _mm512_unpacklo_epi8(row(2), row(3)), d = _mm512_unpackhi_epi8(row(2), row(3));
    const __m512i w = _mm512_unpacklo_epi16(a, c), x = _mm512_unpackhi_epi16(a, c), y = _mm512_unpacklo_epi16(b, d), z = _mm512_unpackhi_epi16(b, d);
    const __m512i wx = _mm512_shuffle_i32x4(w, x, 0x44), yz = _mm512_shuffle_i32x4(y, z, 0x44);  // lanes 0 and 1 of both
    const __m512i wx2 = _mm512_shuffle_i32x4(w, x, 0xEE), yz2 = _mm512_shuffle_i32x4(y, z, 0xEE);
    _mm512_storeu_si512(out, _mm512_shuffle_i32x4(wx, yz, 0x88));
    _mm512_storeu_si512(out + 64, _mm512_shuffle_i32x4(wx, yz, 0xDD));
    _mm512_storeu_si512(out + 128, _mm512_shuffle_i32x4(wx2, yz2, 0x88));
    _mm512_storeu_si512(out + 192, _mm512_shuffle_i32x4(wx2, yz2, 0xDD));
  }

  // Rows of 32 codes, two to a register: the lanes of rows i and i + 8 are transposed side by side.
  template <int Flip, class Row>
  static void pack_half_rows(Row row, Code* out) {
    const __m512i flip = _mm512_set1_epi8(char(Flip));
    __m512i r[8], t[8];
    const auto load = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(i))); };
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(i)), load(i + 8), 1);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // r[i + w]: word w of each lane's four, rows i to i + 3; lanes: words 0-3 and 4-7, rows + 0 and + 8
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      const __m512i a = _mm512_permutex2var_epi64(r[w], low, r[w + 4]), b = _mm512_permutex2var_epi64(r[w], high, r[w + 4]);
      _mm512_storeu_si512(out + 64 * w, Flip ? _mm512_xor_si512(a, flip) : a);
      _mm512_storeu_si512(out + 64 * (w + 4), Flip ? _mm512_xor_si512(b, flip) : b);
    }
  }
};

}  // namespace
}  // namespace intflash
