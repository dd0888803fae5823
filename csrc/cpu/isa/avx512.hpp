// The vector layer on 512-bit registers with AVX-512 VNNI; generic.hpp says what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/call.h"

namespace intflash {
namespace {

// Quantization of floats, as quantize.hpp defines it.
struct Quantize512 {
  // Return masks of the first `count` lanes or bytes.
  static __mmask16 lanes(int64_t count) { return count >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << count) - 1); }
  static __mmask64 bytes(int64_t count) {
    return count >= 64 ? ~__mmask64(0) : count <= 0 ? 0 : (__mmask64(1) << count) - 1;
  }

  // Return 16 values, or those of a mask, as float32.
  template <FloatType F>
  static __m512 widened(const float* x) {
    return _mm512_loadu_ps(x);
  }
  template <FloatType F>
  static __m512 widened(const float* x, __mmask16 mask) {
    return _mm512_maskz_loadu_ps(mask, x);
  }
  template <FloatType F>
  static __m512 widened(const uint16_t* x) {
    return widened<F>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  template <FloatType F>
  static __m512 widened(const uint16_t* x, __mmask16 mask) {
    return widened<F>(_mm256_maskz_loadu_epi16(mask, x));
  }
  template <FloatType F>
  static __m512 widened(__m256i x) {
    if constexpr (F == FloatType::kFloat16) return _mm512_cvtph_ps(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  template <class T>
  static void prefetch(const T* x) {
    _mm_prefetch(reinterpret_cast<const char*>(x), _MM_HINT_T0);
  }

  // Returns the bits of the largest |x|. Bits of |x| are ordered as integers, with NaN above all.
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
    return kWide ? _mm512_reduce_max_epu32(all)
                 : _mm512_reduce_max_epu32(
                       _mm512_max_epu32(_mm512_srli_epi32(all, 16), _mm512_and_si512(all, _mm512_set1_epi32(0xFFFF))));
  }

  // quantize.hpp's code() for vectors.
  template <FloatType F>
  struct Encoder {
    __m512 inverse, magic = _mm512_set1_ps(12582912.0f);
    __m512i zero = _mm512_set1_epi32(0x4B400000), low, high;
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t ahead;
    Encoder(float inverse, int limit, int64_t ahead)
        : inverse(_mm512_set1_ps(inverse)),
          low(_mm512_set1_epi32(0x4B400000 - limit)),
          high(_mm512_set1_epi32(0x4B400000 + limit)),
          ahead(ahead) {}
    __m512i code(__m512 v) const {
      const __m512i bits = _mm512_castps_si512(_mm512_fmadd_ps(v, inverse, magic));
      return _mm512_sub_epi32(_mm512_min_epi32(_mm512_max_epi32(bits, low), high), zero);
    }
    template <class T>
    __m512i words_of_32(const T* x) const {  // 32 codes as int16: quarters of the first 16 and of the second 16 in turn
      prefetch(x + ahead);
      if (sizeof(T) == 4) prefetch(x + 16 + ahead);
      return _mm512_packs_epi32(code(widened<F>(x)), code(widened<F>(x + 16)));
    }
    template <class T>
    __m512i codes(const T* x) const {
      return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words_of_32(x), words_of_32(x + 32)));
    }
    template <class T>
    __m256i half_codes(const T* x) const {
      const __m512i words = words_of_32(x);
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
        store_half(out, _mm512_castsi512_si256(pair)),
            store_half(out + shape.run_step, _mm512_extracti64x4_epi64(pair, 1));
      }
      for (; run < shape.runs; ++run, x += n, out += shape.run_step) {
        int64_t i = 0;
        for (; i + 64 <= n; i += 64) _mm512_storeu_si512(out + i, encoder.codes(x + i));
        for (; i + 32 <= n; i += 32) store_half(out + i, encoder.half_codes(x + i));
        for (; i < n; i += 16) {
          prefetch(x + i + ahead);
          _mm_mask_storeu_epi8(out + i, lanes(n - i),
                               _mm512_cvtepi32_epi8(encoder.code(widened<F>(x + i, lanes(n - i)))));
        }
      }
    }
  }
  static void store_half(int8_t* to, __m256i codes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes); }
};

// Packing of K and V into panels.
struct Pack512 : Quantize512 {
  using Code = int8_t;

  static __m512i broadcast(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
  }
  // Transposes 16 x 16 words.
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

  // Packs a panel of up to 16 keys, of which missing ones repeat the last, with every code ^ Flip.
  template <int Flip>
  static void pack_key_panel(const int8_t* k, int64_t row_step, int64_t step, int64_t count, int64_t dim, int steps,
                             Code* out) {
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

  // Packs one step of a value panel: `rows` keys (of 4) by `columns` channels (of 16); the rest is zero.
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
  // Pack the same step of two, or of four, whole panels side by side.
  static inline __attribute__((always_inline)) void pack_value_pair(const int8_t* v, int64_t row_step, Code* first,
                                                                    Code* second) {
    const auto row = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i * row_step)); };
    const __m256i a = _mm256_unpacklo_epi8(row(0), row(1)), b = _mm256_unpackhi_epi8(row(0), row(1));
    const __m256i c = _mm256_unpacklo_epi8(row(2), row(3)), d = _mm256_unpackhi_epi8(row(2), row(3));
    const auto both = [](__m256i x, __m256i y) { return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1); };
    const __m512i low = both(_mm256_unpacklo_epi16(a, c), _mm256_unpackhi_epi16(a, c)),
                  high = both(_mm256_unpacklo_epi16(b, d), _mm256_unpackhi_epi16(b, d));
    _mm512_storeu_si512(first, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(second, _mm512_shuffle_i32x4(low, high, 0xDD));
  }
  static inline __attribute__((always_inline)) void pack_value_quad(const int8_t* v, int64_t row_step, Code* out) {
    const auto row = [&](int i) { return _mm512_loadu_si512(v + i * row_step); };
    const __m512i a = _mm512_unpacklo_epi8(row(0), row(1)), b = _mm512_unpackhi_epi8(row(0), row(1));
    const __m512i c = _mm512_unpacklo_epi8(row(2), row(3)), d = _mm512_unpackhi_epi8(row(2), row(3));
    const __m512i w = _mm512_unpacklo_epi16(a, c), x = _mm512_unpackhi_epi16(a, c), y = _mm512_unpacklo_epi16(b, d),
                  z = _mm512_unpackhi_epi16(b, d);
    const __m512i wx = _mm512_shuffle_i32x4(w, x, 0x44),
                  yz = _mm512_shuffle_i32x4(y, z, 0x44);  // lanes 0 and 1 of both
    const __m512i wx2 = _mm512_shuffle_i32x4(w, x, 0xEE), yz2 = _mm512_shuffle_i32x4(y, z, 0xEE);
    _mm512_storeu_si512(out, _mm512_shuffle_i32x4(wx, yz, 0x88));
    _mm512_storeu_si512(out + 64, _mm512_shuffle_i32x4(wx, yz, 0xDD));
    _mm512_storeu_si512(out + 128, _mm512_shuffle_i32x4(wx2, yz2, 0x88));
    _mm512_storeu_si512(out + 192, _mm512_shuffle_i32x4(wx2, yz2, 0xDD));
  }

  // Packs rows of 32 codes, two to a register: the lanes of rows i and i + 8 are transposed side by side.
  template <int Flip, class Row>
  static void pack_half_rows(Row row, Code* out) {
    const __m512i flip = _mm512_set1_epi8(char(Flip));
    __m512i r[8], t[8];
    const auto load = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(i))); };
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(i)), load(i + 8), 1);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8;
         i += 4) {  // r[i + w]: word w of each lane's four, rows i to i + 3; lanes: words 0-3 and 4-7, rows + 0 and + 8
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      const __m512i a = _mm512_permutex2var_epi64(r[w], low, r[w + 4]),
                    b = _mm512_permutex2var_epi64(r[w], high, r[w + 4]);
      _mm512_storeu_si512(out + 64 * w, Flip ? _mm512_xor_si512(a, flip) : a);
      _mm512_storeu_si512(out + 64 * (w + 4), Flip ? _mm512_xor_si512(b, flip) : b);
    }
  }
};

// The lanes, the products and the output.
struct Vec512 : Pack512 {
  static constexpr int kLanes = 16, kGroup = 4, kRows = 6, kCols = 4, kStoreBlock = 4;
  static constexpr bool kFastPack = true, kRowOperations = true, kFloat16 = true, kWideP = false, kDithersPlanes = true;
  using I32 = __m512i;
  using U16 = __m512i;
  using Codes = __m512i;
  using Code = int8_t;
  using PCode = uint8_t;

  static I32 load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, I32 a) { _mm512_storeu_si512(p, a); }
  static I32 set1(int32_t v) { return _mm512_set1_epi32(v); }
  // Returns x as a value that the compiler cannot recompute or find elsewhere, so that it stays in its register.
  static I32 in_register(I32 x) {
    asm("" : "+v"(x));
    return x;
  }
  // A barrier for the compiler only: gcc's tile loads do not say that they read memory.
  static void compiler_barrier() { asm volatile("" : : : "memory"); }
  static I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
  static I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
  static I32 max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
  static I32 min_u(I32 a, I32 b) { return _mm512_min_epu32(a, b); }
  static I32 shift_left(I32 a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
  static I32 first(I32 x, int64_t count) { return _mm512_mask_mov_epi32(set1(INT32_MIN), lanes(count), x); }
  // Returns a vector with the maximum or the sum of row r's lanes in lane r, for 16 rows.
  template <class Combine>
  static I32 reduce_rows(const I32* x, Combine combine) {
    I32 a[8], b[4], c[2];
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i)
      a[i] = combine(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i)
      b[i] = combine(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 16
    for (int i = 0; i < 2; ++i)
      c[i] = combine(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x88),
                     _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xDD));
    return combine(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xDD));
  }
  static void reduce_max(const I32* x, int32_t* out) {
    store(out, reduce_rows(x, [](I32 a, I32 b) { return _mm512_max_epi32(a, b); }));
  }
  static void reduce_add(const I32* x, uint32_t* out) {
    _mm512_storeu_si512(out, reduce_rows(x, [](I32 a, I32 b) { return _mm512_add_epi32(a, b); }));
  }
  // The same for `rows` rows; a window of 49 queries leaves one row at its end.
  static void reduce_max(const I32* x, int rows, int32_t* out) {
    rows == 1 ? void(*out = _mm512_reduce_max_epi32(*x)) : reduce_max(x, out);
  }
  static void reduce_add(const I32* x, int rows, uint32_t* out) {
    rows == 1 ? void(*out = uint32_t(_mm512_reduce_add_epi32(*x))) : reduce_add(x, out);
  }
  static I32 high_halves(__m512i even, __m512i odd) {
    return _mm512_mask_shuffle_epi32(odd, 0x5555, even,
                                     _MM_PERM_DDBB);  // even lanes take the high half of their product
  }
  static __m512i odd_lanes(I32 a) { return _mm512_srli_epi64(a, 32); }
  static I32 mul_high(I32 a, I32 c) { return high_halves(_mm512_mul_epu32(a, c), _mm512_mul_epu32(odd_lanes(a), c)); }
  static I32 mul_high(I32 a, I32 c, uint64_t base) {
    const __m512i b = _mm512_set1_epi64(int64_t(base));
    return high_halves(_mm512_add_epi64(_mm512_mul_epu32(a, c), b),
                       _mm512_add_epi64(_mm512_mul_epu32(odd_lanes(a), c), b));
  }
  static I32 saturate_absent(I32 x, I32 s) {
    const __mmask16 absent = _mm512_cmpeq_epi32_mask(s, _mm512_set1_epi32(INT32_MIN));
    return _mm512_mask_mov_epi32(x, absent, _mm512_set1_epi32(65535));
  }

  static U16 pack(I32 a, I32 b) { return _mm512_packus_epi32(a, b); }
  static U16 set16(uint16_t v) { return _mm512_set1_epi16(int16_t(v)); }
  static U16 zero16() { return _mm512_setzero_si512(); }
  static U16 high_byte(U16 a) {  // by a shuffle, because the port of the shifts is busy
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15, -1));
    return _mm512_shuffle_epi8(a, order);
  }
  static U16 and16(U16 a, uint16_t b) { return _mm512_and_si512(a, _mm512_set1_epi16(int16_t(b))); }
  template <int Shift>
  static U16 mantissa(U16 z) {
    return mantissa_of<Shift>(_mm512_slli_epi16(z, Shift));
  }
  static U16 shift6_plan() { return zero16(); }
  static U16 shift6(U16 z, U16) { return _mm512_slli_epi16(z, 6); }
  template <int Shift>
  static U16 mantissa_of(U16 shifted) {  // (~shifted & (255 << Shift)) | 256 << Shift
    return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(int16_t(255 << Shift)),
                                     _mm512_set1_epi16(int16_t(256 << Shift)), 0xAE);
  }
  static U16 add16(U16 a, uint16_t b) { return _mm512_add_epi16(a, _mm512_set1_epi16(int16_t(b))); }
  static U16 mul_round(U16 a, U16 b) { return _mm512_mulhrs_epi16(a, b); }
  static U16 power(U16 z) { return _mm512_srlv_epi16(_mm512_set1_epi16(512), high_byte(z)); }
  static U16 mul_high16(U16 a, U16 b) { return _mm512_mulhi_epu16(a, b); }
  static U16 mul_high16(U16 a, U16 b, uint32_t base) {  // a product's high half is at most 65534: the carry fits
    const __mmask32 carry = _mm512_cmpgt_epu16_mask(_mm512_mullo_epi16(a, b), set16(uint16_t(~base)));
    const __m512i high = mul_high16(a, b), carried = _mm512_mask_sub_epi16(high, carry, high, set16(65535));
    return _mm512_adds_epu16(carried, set16(uint16_t(base >> 16)));
  }
  static U16 average(U16 a, uint16_t b) { return _mm512_avg_epu16(a, _mm512_set1_epi16(int16_t(b))); }
  // p16 with 8 fraction bits, dithered, of even and of odd lanes.
  struct Dithered {
    I32 even, odd;
  };
  static Dithered dithered(U16 z, const uint32_t* r) {
    const __m512i shifted = _mm512_slli_epi16(z, 3), offset = set1(132608 << 6);
    const auto square = [&](int left) {  // of 8 u, with zeros beside it
      const __m512i u = _mm512_ternarylogic_epi32(shifted, set1(255 << left), set1(256 << left), 0xAE);
      return _mm512_dpwssd_epi32(offset, u, u);
    };
    const __m512i high_bytes = _mm512_broadcast_i32x4(
        _mm_setr_epi8(1, -1, -1, -1, 5, -1, -1, -1, 9, -1, -1, -1, 13, -1, -1, -1));  // of even lanes
    return {add(_mm512_srlv_epi32(square(3), _mm512_shuffle_epi8(z, high_bytes)), _mm512_load_si512(r)),
            add(_mm512_srlv_epi32(square(19), _mm512_srli_epi32(z, 24)), _mm512_load_si512(r + 16))};
  }
  // Returns the low digits of eight keys, then their high digits, in each 128 bits.
  static __m512i digits(Dithered p) {
    const __m512i even =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, -1, 5, -1, 9, -1, 13, -1, 2, -1, 6, -1, 10, -1, 14, -1));
    const __m512i odd =
        _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 1, -1, 5, -1, 9, -1, 13, -1, 2, -1, 6, -1, 10, -1, 14));
    return _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(p.even, even), 0xAAAAAAAAAAAAAAAA, p.odd, odd);
  }
  template <bool Half>
  static void store_dithered(PCode* high, PCode* low, U16 z0, U16 z1, const uint32_t* r, I32& sum, I32& sum_low) {
    const __m512i a = digits(dithered(z0, r)), b = Half ? zero16() : digits(dithered(z1, r + 32));
    const __m512i h = _mm512_unpackhi_epi64(a, b), l = _mm512_unpacklo_epi64(a, b);
    _mm512_storeu_si512(high, h), _mm512_storeu_si512(low, l);
    sum = _mm512_dpbusd_epi32(sum, h, _mm512_set1_epi8(1));
    sum_low = _mm512_dpbusd_epi32(sum_low, l, _mm512_set1_epi8(1));
  }
  static constexpr int dither_key(int i) {  // the even lanes' keys, then the odd ones'
    const int lane = 2 * (i % 4) + i / 16;
    return lane / 4 * 16 + i % 16 / 4 * 4 + lane % 4;
  }
  // (w + 33152 + 2^(s-1)) >> s: for s > 0 the sum and its first shift are an average
  template <bool EndsAt15>
  static U16 round16(U16 w, U16 s) {
    if constexpr (!EndsAt15) return round16_to_the_end(w, s);
    const __m512i n = _mm512_sub_epi16(s, _mm512_set1_epi16(1)), half = _mm512_sllv_epi16(_mm512_set1_epi16(1), n);
    const __m512i average = _mm512_avg_epu16(w, _mm512_add_epi16(half, _mm512_set1_epi16(int16_t(33151))));
    const __m512i far = _mm512_maskz_srlv_epi16(_mm512_cmplt_epu16_mask(s, _mm512_set1_epi16(15)), average, n);
    return _mm512_mask_add_epi16(far, _mm512_testn_epi16_mask(s, s), w, _mm512_set1_epi16(int16_t(33152)));
  }
  // The same for any s: 16 bits hold h, and for s > 1 the last shift of h >> (s - 2) and the rounding are an average.
  static U16 round16_to_the_end(U16 w, U16 s) {
    const __m512i h = average(w, 33151), one = _mm512_set1_epi16(1), n = _mm512_sub_epi16(s, _mm512_set1_epi16(2));
    const __m512i far = _mm512_avg_epu16(_mm512_srlv_epi16(h, n), _mm512_setzero_si512());
    const __m512i near = _mm512_mask_mov_epi16(far, _mm512_cmple_epu16_mask(s, one), average(w, 33152));
    return _mm512_mask_add_epi16(near, _mm512_testn_epi16_mask(s, s), near, h);
  }
  static I32 store_p(PCode* p, U16 a, U16 b, I32 sum) {
    const __m512i bytes = _mm512_packus_epi16(a, b);
    _mm512_storeu_si512(p, bytes);
    return _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi8(1));
  }
  // Does the same for bytes. `ones` has 0 for bytes that do not count; the sum is of bytes << left.
  static I32 store_bytes(PCode* p, Codes bytes, I32 sum, Codes ones, int left) {
    _mm512_storeu_si512(p, bytes);
    if (left == 0) return _mm512_dpbusd_epi32(sum, bytes, ones);
    return _mm512_add_epi32(sum, _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, ones), 8));
  }
  // four vectors are packed into one: 4 keys of each in each 128-bit lane
  static constexpr int key_at(int at) { return at / 4 % 4 * 16 + at / 16 * 4 + at % 4; }

  static constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  // The constants of the output's rounding, for 16 rows: floor(sum * scale + 1/2) where the sums fit 24 bits, else
  // (sum * factor + half) >> shift on the high half of the product.
  struct Factors {
    alignas(64) float scale[16];
    alignas(64) int32_t factor[16], half[16], shift[16];
    bool sums_fit_24_bits;  // of P V
  };
  // Computes the constants of up to 16 rows, which are 0 where l is 0. Returns false where a row's factor needs more
  // than 32 bits, or l is 2^24 or more. Quotient and product have 24 bits as integers, so that floats rounded down are
  // exact.
  template <bool P16>
  static bool factors(const uint32_t* l, int rows, int64_t mr, int e, Factors& out) {
    const __m512i given = _mm512_maskz_loadu_epi32(lanes(rows), l), lz = _mm512_lzcnt_epi32(given);
    const __mmask16 some = _mm512_test_epi32_mask(given, given);
    const __m512i shift = sub(set1(55 - e), lz);
    const __mmask16 wide = _mm512_cmplt_epi32_mask(shift, set1(27)) | _mm512_cmplt_epi32_mask(lz, set1(8));
    if (wide & some) return false;
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(sub(set1(55 + 127), lz), 23));  // 2^(55 - lz)
    const __m512 reciprocal =
        _mm512_div_round_ps(power, _mm512_cvtepi32_ps(given), kDown);  // floor(power / l), in (2^23, 2^24]
    const __m512 product =
        _mm512_fmadd_round_ps(reciprocal, _mm512_set1_ps(float(mr) / (1 << 24)), _mm512_set1_ps(0.5f), kDown);
    const __m512 factor = _mm512_roundscale_ps(product, kDown);
    out.sums_fit_24_bits =
        !P16 && _mm512_cmpgt_epu32_mask(given, set1((1 << 24) / 127)) == 0;  // sums are at most 127 l
    if (out.sums_fit_24_bits) {
      _mm512_store_ps(out.scale, _mm512_maskz_scalef_ps(some, factor, _mm512_cvtepi32_ps(sub(lz, set1(55 - e)))));
      return true;
    }
    const __m512i left = _mm512_max_epi32(_mm512_setzero_si512(), sub(set1(33), shift)),
                  end = sub(add(shift, left), set1(32));
    _mm512_store_si512(out.factor, _mm512_maskz_sllv_epi32(some, _mm512_cvtps_epi32(factor), left));
    _mm512_store_si512(out.half, _mm512_sllv_epi32(set1(1), sub(end, set1(1))));
    _mm512_store_si512(out.shift, end);
    return true;
  }
  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, const Factors& all, int row) {
    const __m512i x = P16 ? add(shift_left(load(high), 8), load(low)) : load(high);
    const __m512i odd =
        P16 ? odd_lanes(x)
            : _mm512_castps_si512(_mm512_movehdup_ps(_mm512_loadu_ps(high)));  // a shuffle that the load unit does
    return rescaled(x, odd, all, row);
  }
  static I32 rescaled(I32 x, I32 odd, const Factors& all, int row) {
    const __m512i f = set1(all.factor[row]);
    const __m512i top = high_halves(_mm512_mul_epi32(x, f), _mm512_mul_epi32(odd, f));
    return _mm512_srav_epi32(add(top, set1(all.half[row])), set1(all.shift[row]));
  }
  // This is exact: both factors have 24 bits, and the sum is rounded once, down as its floor is.
  static I32 rescaled_24_bits(I32 x, const Factors& all, int row) {
    return _mm512_cvt_roundps_epi32(
        _mm512_fmadd_round_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(all.scale[row]), _mm512_set1_ps(0.5f), kDown),
        kDown);
  }
  // Stores 64 int8 codes. The saturating packs clamp to 127, the maximum to -127.
  static void store_quad(int8_t* out, I32 a, I32 b, I32 c, I32 d) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, _mm512_max_epi8(codes, _mm512_set1_epi8(-127))));
  }
  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, int32_t factor, int left, int shift) {
    const __m512i f = set1(factor), half = _mm512_set1_epi64(int64_t(1) << (shift - 1));
    const __m512i h = shift_left(load(high), left);
    __m512i even = _mm512_mul_epi32(h, f), odd = _mm512_mul_epi32(odd_lanes(h), f);
    if constexpr (P16) {
      const __m512i l = shift_left(load(low), left);
      even = _mm512_add_epi64(_mm512_slli_epi64(even, 8), _mm512_mul_epi32(l, f));
      odd = _mm512_add_epi64(_mm512_slli_epi64(odd, 8), _mm512_mul_epi32(odd_lanes(l), f));
    }
    const __m512i top = high_halves(_mm512_add_epi64(even, half), _mm512_add_epi64(odd, half));
    return _mm512_sra_epi32(top, _mm_cvtsi32_si128(shift - 32));
  }
  static void store_scaled(float* out, I32 x, float scale, int64_t count) {
    _mm512_mask_storeu_ps(out, lanes(count), scaled(x, scale));
  }
  static __m512 scaled(I32 x, float scale) { return _mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(scale)); }
  static void store_float16(uint16_t* out, I32 x, float scale, int64_t count) {
    _mm256_mask_storeu_epi16(out, lanes(count),
                             _mm512_cvtps_ph(scaled(x, scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static I32 clamp(I32 x, int limit) { return _mm512_max_epi32(_mm512_min_epi32(x, set1(limit)), set1(-limit)); }
  static void store_clamped(int8_t* out, I32 x, int limit, int64_t count) {
    const __m128i codes = _mm512_cvtepi32_epi8(clamp(x, limit));
    if (count >= 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
    else
      _mm_mask_storeu_epi8(out, lanes(count), codes);
  }
  // Stores 32 int8 codes in the same way.
  static void store_pair(int8_t* out, I32 a, I32 b) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
    const __m512i words = _mm512_packs_epi32(a, b);
    const __m512i codes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_max_epi8(_mm512_castsi512_si256(codes), _mm256_set1_epi8(-127)));
  }
  static void store_clamped(int16_t* out, I32 x, int limit, int64_t count) {
    _mm256_mask_storeu_epi16(out, lanes(count), _mm512_cvtepi32_epi16(clamp(x, limit)));
  }
  static int32_t code_sum(const Code* x, int64_t n) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < n; d += 64)
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(bytes(n - d), x + d));
    return _mm512_reduce_add_epi32(sum);
  }
  // Copies rows of n codes, zeros up to `padded`. Rows of 64 and 32 codes, the usual ones, are whole and half
  // registers.
  static void copy_rows(const int8_t* x, int64_t row_step, int rows, int64_t n, int64_t padded, Code* out) {
    if (n == 64 && padded == 64)
      for (int r = 0; r < rows; ++r) _mm512_storeu_si512(out + 64 * r, _mm512_loadu_si512(x + r * row_step));
    else if (n == 32 && padded == 64)
      for (int r = 0; r < rows; ++r)
        _mm512_storeu_si512(out + 64 * r, _mm512_zextsi256_si512(
                                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + r * row_step))));
    else
      for (int r = 0; r < rows; ++r) copy_codes(x + r * row_step, n, padded, out + r * padded);
  }
  static void copy_codes(const int8_t* x, int64_t n, int64_t padded, Code* out) {
    for (int64_t d = 0; d < padded; d += 64) {
      const __m512i codes = _mm512_maskz_loadu_epi8(bytes(n - d), x + d);
      if (padded - d >= 64)
        _mm512_storeu_si512(out + d, codes);
      else if (padded - d == 32)  // a masked store cannot be forwarded to a load
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), _mm512_castsi512_si256(codes));
      else
        _mm512_mask_storeu_epi8(out + d, bytes(padded - d), codes);
    }
  }

  static Codes load_codes(const void* p) { return _mm512_loadu_si512(p); }
  static I32 dot_qk(I32 acc, Codes k, Codes q) { return _mm512_dpbusd_epi32(acc, k, q); }
  // In assembly, so that the sum stays in its register; gcc copies and spills the many sums of a tile.
  static void dot_in_place(I32& acc, Codes u, Codes s) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s)); }
  static I32 dot_pv(I32 acc, Codes v, Codes p) { return _mm512_dpbusd_epi32(acc, p, v); }

  static constexpr int kWeightGroup = 4;
  static Codes load_weights(const int8_t* p) { return load_codes(p); }
  static void dot_wx(I32& acc, Codes w, Codes x) { acc = _mm512_dpbusd_epi32(acc, x, w); }
  static I32 min(I32 a, I32 b) { return _mm512_min_epi32(a, b); }
  static I32 mul_high_signed(I32 a, I32 c) {
    return high_halves(_mm512_mul_epi32(a, c), _mm512_mul_epi32(odd_lanes(a), odd_lanes(c)));
  }
  static I32 mul_high_signed(I32 a, const int32_t* c) {
    return high_halves(_mm512_mul_epi32(a, load(c)), _mm512_mul_epi32(odd_lanes(a), load(c + 1)));
  }
  static I32 shift_right_signed(I32 a, int n) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(n)); }
  static I32 load_widened(const int16_t* p) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I32 load_widened(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_saturated(int8_t* out, I32 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(x));
  }
  static void store_saturated(int16_t* out, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtsepi32_epi16(x));
  }
  // Store 64 values, clamped.
  static void store_block(int8_t* out, const I32* x, int low, int high) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    const __m512i clamped =
        _mm512_min_epi8(_mm512_max_epi8(codes, _mm512_set1_epi8(char(low))), _mm512_set1_epi8(char(high)));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, clamped));
  }
  static void store_block(int16_t* out, const I32* x, int low, int high) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const __m512i words = _mm512_packs_epi32(x[i], x[i + 1]);
      const __m512i clamped =
          _mm512_min_epi16(_mm512_max_epi16(words, _mm512_set1_epi16(int16_t(low))), _mm512_set1_epi16(int16_t(high)));
      _mm512_storeu_si512(out + 16 * i, _mm512_permutexvar_epi64(order, clamped));
    }
  }

  // Widens the values of whole vectors to `out`, adds them and their squares to the sums, and returns how many they
  // are, at most 2^14.
  template <class T>
  static int64_t widen_and_sum(const T* x, int64_t n, int32_t* out, int64_t& sum, int64_t& squares) {
    __m512i sums[2] = {}, square_sums[2] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      const __m512i v = widened_or_same(x + i), odd = odd_lanes(v);
      store(out + i, v);
      if constexpr (sizeof(T) == 4) {
        sums[0] = _mm512_add_epi64(sums[0], _mm512_cvtepi32_epi64(_mm512_castsi512_si256(v)));
        sums[1] = _mm512_add_epi64(sums[1], _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(v, 1)));
      } else {
        sums[0] = _mm512_add_epi32(sums[0], v);  // 2^10 values of 2^15
      }
      square_sums[0] = _mm512_add_epi64(square_sums[0], _mm512_mul_epi32(v, v));
      square_sums[1] = _mm512_add_epi64(square_sums[1], _mm512_mul_epi32(odd, odd));
    }
    sum += sizeof(T) == 4 ? _mm512_reduce_add_epi64(_mm512_add_epi64(sums[0], sums[1]))
                          : int64_t(_mm512_reduce_add_epi32(sums[0]));
    squares += _mm512_reduce_add_epi64(_mm512_add_epi64(square_sums[0], square_sums[1]));
    return i;
  }
  template <class T>
  static I32 widened_or_same(const T* x) {
    if constexpr (sizeof(T) == 4)
      return load(x);
    else
      return load_widened(x);
  }

  // out[i] = middle[index[i]] of tables of 8 or 10 bits by byte permutations. Returns false where there are none on
  // this processor, or the table is larger.
  static bool look_up(const int8_t* middle, int bits, const int16_t* index, int64_t count, int8_t* out) {
    static const bool has_permutations = __builtin_cpu_supports("avx512vbmi");
    if (!has_permutations || bits > 10) return false;
    bits == 8 ? look_up_permuted<1>(middle - 128, index, count, out)
              : look_up_permuted<4>(middle - 512, index, count, out);
    return true;
  }
  // For a table of Parts * 256 entries. Each pair of registers holds 128 of them.
  template <int Parts>
  __attribute__((target("avx512vbmi"))) static void look_up_permuted(const int8_t* table, const int16_t* index,
                                                                     int64_t count, int8_t* out) {
    __m512i entries[4 * Parts];
#pragma GCC unroll 16
    for (int i = 0; i < 4 * Parts; ++i) entries[i] = _mm512_loadu_si512(table + 64 * i);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bias = _mm512_set1_epi16(128 * Parts);
    for (int64_t i = 0; i < count; i += 64) {
      const __mmask32 first = count - i >= 32 ? ~0u : (1u << (count - i)) - 1;
      const __mmask32 second = count - i >= 64 ? ~0u : count - i <= 32 ? 0 : (1u << (count - i - 32)) - 1;
      const __m512i a = _mm512_add_epi16(_mm512_maskz_loadu_epi16(first, index + i), bias);
      const __m512i b = _mm512_add_epi16(_mm512_maskz_loadu_epi16(second, index + i + 32), bias);
      const __m512i low_bits = _mm512_set1_epi16(127);
      const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, low_bits), _mm512_and_si512(b, low_bits));
      const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7));
      const __mmask64 bit0 = _mm512_test_epi8_mask(high, _mm512_set1_epi8(1));
      __m512i found[2 * Parts];
#pragma GCC unroll 8
      for (int p = 0; p < 2 * Parts; ++p) found[p] = _mm512_permutex2var_epi8(entries[2 * p], low, entries[2 * p + 1]);
#pragma GCC unroll 8
      for (int p = 0; p < Parts; ++p) found[p] = _mm512_mask_mov_epi8(found[2 * p], bit0, found[2 * p + 1]);
      if constexpr (Parts == 4) {
        const __mmask64 bit1 = _mm512_test_epi8_mask(high, _mm512_set1_epi8(2)),
                        bit2 = _mm512_test_epi8_mask(high, _mm512_set1_epi8(4));
        found[0] = _mm512_mask_mov_epi8(_mm512_mask_mov_epi8(found[0], bit1, found[1]), bit2,
                                        _mm512_mask_mov_epi8(found[2], bit1, found[3]));
      }
      _mm512_mask_storeu_epi8(out + i, bytes(count - i), _mm512_permutexvar_epi64(order, found[0]));
    }
  }
};

struct Avx512Vnni : Vec512 {
  static constexpr int kMaxRows = 16, kScoreBytes = 1 << 20;
  static constexpr bool kOwnLinear = false, kSplitsWeights = false;
  static constexpr int kXOffset = 128;
  using XCode = uint8_t;
  static constexpr bool kUnsignedKeys = true, kMatrixUnit = false;
  static void begin(int64_t) {}
  static void end() {}
  template <int = 0>
  static void keep_awake() {}
  static int depth_steps(int64_t head_dim) { return int((head_dim + 3) / 4); }
  static bool pack_keys(const int8_t* k, int64_t row_step, int64_t count, int64_t dim, int steps, Code* out) {
    pack_key_panel<0x80>(k, row_step, 1, count, dim, steps, out);
    return true;
  }
};

}  // namespace
}  // namespace intflash
