// The vector layer on 256-bit registers: AVX2 (int16 codes and vpmaddwd, since vpmaddubsw saturates; in linear layers
// vpmaddubsw, with weights that cannot) and AVX-VNNI (int8 codes, K unsigned). generic.hpp says what each operation
// means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/integer.h"

namespace intflash {
namespace {

struct Vec256 {
  static constexpr int kLanes = 8;
  static constexpr int kMaxRows = 16, kScoreBytes = 1 << 20, kStoreBlock = 2;
  static constexpr bool kMatrixUnit = false, kFastPack = true, kRowOperations = false, kFloat16 = true;
  static constexpr bool kSplitsWeights = false, kDithersPlanes = false;
  using I32 = __m256i;
  using U16 = __m256i;
  using Codes = __m256i;

  static void begin(int64_t) {}
  static void end() {}
  static void keep_awake() {}

  static I32 load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(int32_t* p, I32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static I32 set1(int32_t v) { return _mm256_set1_epi32(v); }
  static I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
  static I32 sub(I32 a, I32 b) { return _mm256_sub_epi32(a, b); }
  static I32 max(I32 a, I32 b) { return _mm256_max_epi32(a, b); }
  static I32 min_u(I32 a, I32 b) { return _mm256_min_epu32(a, b); }
  static I32 shift_left(I32 a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
  static I32 first(I32 x, int64_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int n = count < 8 ? int(count) : 8;
    return _mm256_blendv_epi8(set1(INT32_MIN), x, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
  }
  static void reduce_max(const I32* x, int32_t* out) {
    for (int r = 0; r < 16; ++r) {
      __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x[r]), _mm256_extracti128_si256(x[r], 1));
      m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
      out[r] = _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
    }
  }
  static void reduce_add(const I32* x, uint32_t* out) {
    for (int r = 0; r < 16; ++r) {
      __m128i m = _mm_add_epi32(_mm256_castsi256_si128(x[r]), _mm256_extracti128_si256(x[r], 1));
      m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4E));
      out[r] = uint32_t(_mm_cvtsi128_si32(_mm_add_epi32(m, _mm_shuffle_epi32(m, 0xB1))));
    }
  }
  static I32 high_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }
  static I32 mul_high(I32 a, I32 c) {
    return high_halves(_mm256_mul_epu32(a, c), _mm256_mul_epu32(_mm256_srli_epi64(a, 32), c));
  }
  static I32 mul_high(I32 a, I32 c, uint64_t base) {
    const __m256i b = _mm256_set1_epi64x(int64_t(base));
    return high_halves(_mm256_add_epi64(_mm256_mul_epu32(a, c), b),
                       _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), c), b));
  }
  static I32 saturate_absent(I32 x, I32 s) {
    const __m256i absent = _mm256_cmpeq_epi32(s, _mm256_set1_epi32(INT32_MIN));
    return _mm256_blendv_epi8(x, _mm256_set1_epi32(65535), absent);
  }

  static U16 pack(I32 a, I32 b) { return _mm256_packus_epi32(a, b); }
  static U16 set16(uint16_t v) { return _mm256_set1_epi16(int16_t(v)); }
  static U16 zero16() { return _mm256_setzero_si256(); }
  static U16 high_byte(U16 a) { return _mm256_srli_epi16(a, 8); }
  static U16 and16(U16 a, uint16_t b) { return _mm256_and_si256(a, _mm256_set1_epi16(int16_t(b))); }
  template <int Shift>
  static U16 mantissa(U16 z) {
    const __m256i f = _mm256_andnot_si256(_mm256_slli_epi16(z, Shift), _mm256_set1_epi16(int16_t(255 << Shift)));
    return _mm256_or_si256(f, _mm256_set1_epi16(int16_t(256 << Shift)));
  }
  static U16 add16(U16 a, uint16_t b) { return _mm256_add_epi16(a, _mm256_set1_epi16(int16_t(b))); }
  static U16 mul_round(U16 a, U16 b) { return _mm256_mulhrs_epi16(a, b); }
  static U16 power(U16 z) {  // 2^(9 - s) by its two bytes; past s = 9 saturation makes the index 128 or more, for which
                             // a shuffle gives 0
    const __m256i copies =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15));
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, -128, 64, 32, 16, 8, 4, 2, 1));
    const __m256i s = _mm256_shuffle_epi8(z, copies);
    return _mm256_shuffle_epi8(table, _mm256_adds_epu8(s, _mm256_set1_epi16(126 << 8 | 118)));
  }
  static U16 mul_high16(U16 a, U16 b) { return _mm256_mulhi_epu16(a, b); }
  static U16 mul_high16(U16 a, U16 b, uint32_t base) {  // a product's high half is at most 65534: the carry fits
    const __m256i low = _mm256_xor_si256(_mm256_mullo_epi16(a, b), set16(0x8000));
    const __m256i carried =
        _mm256_sub_epi16(mul_high16(a, b), _mm256_cmpgt_epi16(low, set16(uint16_t(~base) ^ 0x8000)));
    return _mm256_adds_epu16(carried, set16(uint16_t(base >> 16)));
  }
  static U16 average(U16 a, uint16_t b) { return _mm256_avg_epu16(a, _mm256_set1_epi16(int16_t(b))); }
  static U16 shift_right(U16 a, U16 n) {  // by 32-bit shifts of both halves; amounts above 31 give 0
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    const __m256i even = _mm256_srlv_epi32(_mm256_and_si256(a, low), _mm256_and_si256(n, low));
    const __m256i odd = _mm256_srlv_epi32(a, _mm256_srli_epi32(n, 16));
    return _mm256_blend_epi16(even, odd, 0xAA);
  }
  static U16 dither16(U16 z, const uint32_t* r) {  // even and odd lanes apart, whose u is 8 u with zeros beside it
    const __m256i shifted = _mm256_slli_epi16(z, 3), offset = set1(132608 << 6);
    const auto square = [&](int left) {
      const __m256i u = _mm256_or_si256(_mm256_andnot_si256(shifted, set1(255 << left)), set1(256 << left));
      return add(_mm256_madd_epi16(u, u), offset);
    };
    const __m256i high_bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, -1, -1, -1, 5, -1, -1, -1, 9, -1, -1, -1, 13, -1, -1, -1));  // of even lanes
    const __m256i even = _mm256_srlv_epi32(square(3), _mm256_shuffle_epi8(z, high_bytes)),
                  odd = _mm256_srlv_epi32(square(19), _mm256_srli_epi32(z, 24));
    const auto dithers = reinterpret_cast<const __m256i*>(r);
    return _mm256_blend_epi16(_mm256_srli_epi32(add(even, _mm256_load_si256(dithers)), 8),
                              _mm256_slli_epi32(add(odd, _mm256_load_si256(dithers + 1)), 8), 0xAA);
  }
  static constexpr int dither_key(int i) {  // the even lanes' keys, then the odd ones'
    const int lane = 2 * (i % 4) + i / 8;
    return lane / 4 * 8 + i % 8 / 4 * 4 + lane % 4;
  }
  template <bool EndsAt15>
  static U16 round16(U16 w, U16 s) {
    const __m256i h = average(w, 33151), n = _mm256_sub_epi16(s, _mm256_set1_epi16(2)), near = average(w, 33152);
    __m256i far = average(shift_right(h, n), 0);
    if constexpr (EndsAt15) far = _mm256_and_si256(far, _mm256_cmpgt_epi16(_mm256_set1_epi16(15), s));
    const __m256i first = _mm256_and_si256(h, _mm256_cmpeq_epi16(s, _mm256_setzero_si256()));
    return _mm256_add_epi16(_mm256_blendv_epi8(far, near, _mm256_srai_epi16(n, 15)), first);
  }

  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, int32_t factor, int left, int shift) {
    const __m256i f = set1(factor), half = _mm256_set1_epi64x(int64_t(1) << (shift - 1));
    const __m256i h = shift_left(load(high), left);
    __m256i even = _mm256_mul_epi32(h, f), odd = _mm256_mul_epi32(_mm256_srli_epi64(h, 32), f);
    if constexpr (P16) {
      const __m256i l = shift_left(load(low), left);
      even = _mm256_add_epi64(_mm256_slli_epi64(even, 8), _mm256_mul_epi32(l, f));
      odd = _mm256_add_epi64(_mm256_slli_epi64(odd, 8), _mm256_mul_epi32(_mm256_srli_epi64(l, 32), f));
    }
    const __m256i top = high_halves(_mm256_add_epi64(even, half), _mm256_add_epi64(odd, half));
    return _mm256_sra_epi32(top, _mm_cvtsi32_si128(shift - 32));
  }
  static void store_float16(uint16_t* out, I32 x, float scale, int64_t count) {
    const __m128i y = _mm256_cvtps_ph(scaled(x, scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if (count >= 8) return _mm_storeu_si128(reinterpret_cast<__m128i*>(out), y);
    std::memcpy(out, &y, size_t(count) * 2);
  }
  // Converts the first `count` float16 values to float32.
  static void widen_float16(const uint16_t* x, int64_t count, float* out) {
    for (; count >= 8; count -= 8, x += 8, out += 8)
      _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
    for (; count > 0; --count) *out++ = _cvtsh_ss(*x++);
  }
  static __m256 scaled(I32 x, float scale) { return _mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(scale)); }
  static void store_scaled(float* out, I32 x, float scale, int64_t count) {
    const __m256 y = scaled(x, scale);
    if (count >= 8) return _mm256_storeu_ps(out, y);
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, y);
    for (int i = 0; i < count; ++i) out[i] = lanes[i];
  }
  template <class Out>
  static void store_clamped(Out* out, I32 x, int limit, int64_t count) {
    const __m256i clamped = _mm256_max_epi32(_mm256_min_epi32(x, set1(limit)), set1(-limit));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(clamped), _mm256_extracti128_si256(clamped, 1));
    if (count >= 8) {
      if constexpr (sizeof(Out) == 1)
        return _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
      else
        return _mm_storeu_si128(reinterpret_cast<__m128i*>(out), words);
    }
    alignas(16) int16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), words);
    for (int i = 0; i < 8 && i < count; ++i) out[i] = Out(lanes[i]);
  }

  static I32 min(I32 a, I32 b) { return _mm256_min_epi32(a, b); }
  static I32 mul_high_signed(I32 a, I32 c) {
    return high_halves(_mm256_mul_epi32(a, c), _mm256_mul_epi32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(c, 32)));
  }
  static I32 mul_high_signed(I32 a, const int32_t* c) {
    return high_halves(_mm256_mul_epi32(a, load(c)), _mm256_mul_epi32(_mm256_srli_epi64(a, 32), load(c + 1)));
  }
  static I32 shift_right_signed(I32 a, int n) { return _mm256_sra_epi32(a, _mm_cvtsi32_si128(n)); }
  static I32 load_widened(const int16_t* p) {
    return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I32 load_widened(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static __m128i words(I32 x) { return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
  static void store_saturated(int8_t* out, I32 x) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words(x), words(x)));
  }
  static void store_saturated(int16_t* out, I32 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), words(x)); }
  // Store 16 values, clamped.
  static void store_block(int8_t* out, const I32* x, int low, int high) {
    const __m256i w = clamped_words(x, low, high);
    const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
  }
  static void store_block(int16_t* out, const I32* x, int low, int high) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), clamped_words(x, low, high));
  }
  static __m256i clamped_words(const I32* x, int low, int high) {
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x[0], x[1]), 0xD8);
    return _mm256_min_epi16(_mm256_max_epi16(w, set16(uint16_t(low))), set16(uint16_t(high)));
  }

  static Codes load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Codes broadcast(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
  }
};

// Loads 16 codes of each of eight rows; rows past `count` repeat the first.
inline void load_rows(const int8_t* x, int64_t row_step, int64_t count, __m128i r[8]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + (i < count ? i : 0) * row_step));
}
inline __m128i load_half(const int8_t* x) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)); }

struct Avx2 : Vec256 {
  static constexpr int kGroup = 2, kRows = 6, kCols = 2;
  static constexpr bool kOwnLinear = false;
  static constexpr bool kSplitsWeights = true;
  static constexpr int kWeightGroup = 4, kXOffset = 128;
  using XCode = uint8_t;
  static Codes load_weights(const int8_t* p) { return load_codes(p); }
  static void dot_wx(I32& acc, Codes w, Codes x) {  // sums of two products are below 255 * 128 < 2^15
    const __m256i pairs = _mm256_maddubs_epi16(x, w);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  // Writes `rows` rows of `count` codes by columns of kColumnRows int16, zero past the last row.
  static constexpr int kColumnRows = 32;
  static void write_columns(const XCode* x, int64_t x_ld, int rows, int64_t count, int16_t* out) {
    for (int first = 0; first < kColumnRows; first += 8)
      for (int64_t k = 0; k < count; k += 8) {
        __m128i r[8], t[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
          r[i] = first + i < rows ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x + (first + i) * x_ld + k))
                                  : _mm_setzero_si128();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) t[i] = _mm_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2)
          r[i] = _mm_unpacklo_epi16(t[i], t[i + 1]), r[i + 1] = _mm_unpackhi_epi16(t[i], t[i + 1]);
        const __m128i columns[4] = {_mm_unpacklo_epi32(r[0], r[2]), _mm_unpackhi_epi32(r[0], r[2]),
                                    _mm_unpacklo_epi32(r[1], r[3]), _mm_unpackhi_epi32(r[1], r[3])};
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const __m128i column = i % 2 ? _mm_srli_si128(columns[i / 2], 8) : columns[i / 2];
          _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (k + i) * kColumnRows + first), _mm_cvtepu8_epi16(column));
        }
      }
  }
  // Adds to out[r][c] the products of eight channels' remaining weights, whose pairs begin at begin[0], begin[1], ...,
  // with `columns`. Reads and writes kColumnRows rows.
  static void add_remainders(const int16_t* columns, const WeightPair* pairs, const size_t* begin, int32_t* out,
                             int64_t out_ld) {
    if (begin[0] == begin[8]) return;
    __m256i sums[4][8] = {};  // of rows 16 (v / 2) + 4 (v % 2) + {0 to 3, 8 to 11}, as unpacking orders them
    for (int c = 0; c < 8; ++c)
      for (size_t i = begin[c]; i < begin[c + 1]; ++i) {
        int32_t word;
        std::memcpy(&word, pairs[i].weight, 4);
        const __m256i weights = _mm256_set1_epi32(word);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256i a = load_codes(columns + int64_t(pairs[i].k[0]) * kColumnRows + 16 * half),
                        b = load_codes(columns + int64_t(pairs[i].k[1]) * kColumnRows + 16 * half);
          __m256i &low = sums[2 * half][c], &high = sums[2 * half + 1][c];
          low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), weights));
          high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), weights));
        }
      }
    for (int v = 0; v < 4; ++v) {
      transpose(sums[v]);
      int32_t* const first = out + (16 * (v / 2) + 4 * (v % 2)) * out_ld;
      for (int i = 0; i < 8; ++i) {
        int32_t* const row = first + (i < 4 ? i : i + 4) * out_ld;
        store(row, add(load(row), sums[v][i]));
      }
    }
  }
  // Transposes eight rows of eight values.
  static void transpose(__m256i (&x)[8]) {
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
      t[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]), x[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      x[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]), x[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
      t[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) x[i] = t[i];
  }
  static constexpr bool kUnsignedKeys = false, kWideP = true;
  using Code = int16_t;
  using PCode = int16_t;
  static void copy_codes(const int8_t* x, int64_t n, int64_t padded, Code* out) {
    for (int64_t d = 0; d < n; ++d) out[d] = x[d];
    for (int64_t d = n; d < padded; ++d) out[d] = 0;
  }
  static int depth_steps(int64_t head_dim) { return int((head_dim + 1) / 2); }

  // Packs panels of eight keys, 16 codes at a time: pairs of codes are transposed, then widened.
  static bool pack_keys(const int8_t* k, int64_t row_step, int64_t count, int64_t dim, int steps, Code* out) {
    if (dim % 16 || 2 * steps != dim) return false;
    for (int s = 0; s < steps; s += 8, out += 128) {
      __m128i r[8], t[8];
      load_rows(k + 2 * s, row_step, count, r);
#pragma GCC unroll 4
      for (int i = 0; i < 8; i += 2)
        t[i] = _mm_unpacklo_epi16(r[i], r[i + 1]), t[i + 1] = _mm_unpackhi_epi16(r[i], r[i + 1]);
#pragma GCC unroll 2
      for (int i = 0; i < 8; i += 4) {
        r[i] = _mm_unpacklo_epi32(t[i], t[i + 2]), r[i + 1] = _mm_unpackhi_epi32(t[i], t[i + 2]);
        r[i + 2] = _mm_unpacklo_epi32(t[i + 1], t[i + 3]), r[i + 3] = _mm_unpackhi_epi32(t[i + 1], t[i + 3]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        widen(_mm_unpacklo_epi64(r[i], r[i + 4]), out + 32 * i);
        widen(_mm_unpackhi_epi64(r[i], r[i + 4]), out + 32 * i + 16);
      }
    }
    return true;
  }
  static bool pack_values(const int8_t* v, int64_t row_step, int64_t rows, int64_t columns, Code* out) {
    if (rows < 2 || columns < 8) return false;
    widen(_mm_unpacklo_epi8(load_half(v), load_half(v + row_step)), out);
    return true;
  }
  static void widen(__m128i codes, Code* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_cvtepi8_epi16(codes));
  }

  // Stores p - 32768 and returns `sum` plus these.
  static I32 store_p16(PCode* p, U16 a, U16 b, I32 sum) {
    const __m256i flip = _mm256_set1_epi16(int16_t(0x8000)), one = _mm256_set1_epi16(1);
    a = _mm256_xor_si256(a, flip), b = _mm256_xor_si256(b, flip);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, b);
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one)));
  }
  static I32 store_p(PCode* p, U16 a, U16 b, I32 sum) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1)));
  }
  // two vectors are packed into one: 4 keys of the first, then 4 of the second, in each 128-bit lane
  static constexpr int key_at(int at) {
    const int half = at / 16, lane = at / 8 % 2, vector = at / 4 % 2;
    return half * 16 + vector * 8 + lane * 4 + at % 4;
  }
  static I32 dot_qk(I32 acc, Codes k, Codes q) { return _mm256_add_epi32(acc, _mm256_madd_epi16(k, q)); }
  static I32 dot_pv(I32 acc, Codes v, Codes p) { return _mm256_add_epi32(acc, _mm256_madd_epi16(v, p)); }
};

#ifdef __AVXVNNI__
struct AvxVnni : Vec256 {
  static constexpr int kGroup = 4, kRows = 6, kCols = 2;
  static constexpr bool kOwnLinear = false;
  static constexpr int kWeightGroup = 4, kXOffset = 128;
  using XCode = uint8_t;
  static Codes load_weights(const int8_t* p) { return load_codes(p); }
  static void dot_wx(I32& acc, Codes w, Codes x) { acc = _mm256_dpbusd_avx_epi32(acc, x, w); }
  static constexpr bool kUnsignedKeys = true, kWideP = false;
  using Code = int8_t;
  using PCode = uint8_t;
  static void copy_codes(const int8_t* x, int64_t n, int64_t padded, Code* out) {
    for (int64_t d = 0; d < n; ++d) out[d] = x[d];
    for (int64_t d = n; d < padded; ++d) out[d] = 0;
  }
  static int depth_steps(int64_t head_dim) { return int((head_dim + 3) / 4); }

  static int32_t code_sum(const Code* x, int64_t n) {
    int32_t sum = 0;
    for (int64_t d = 0; d < n; ++d) sum += x[d];
    return sum;
  }
  static bool pack_keys(const int8_t* k, int64_t row_step, int64_t count, int64_t dim, int steps, Code* out) {
    if (dim % 16 || 4 * steps != dim) return false;
    const __m256i flip = _mm256_set1_epi8(char(0x80));
    for (int s = 0; s < steps; s += 4, out += 128) {
      __m128i half[8];
      __m256i r[4], t[4];
      load_rows(k + 4 * s, row_step, count, half);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) r[i] = _mm256_xor_si256(flip, _mm256_set_m128i(half[i + 4], half[i]));
      t[0] = _mm256_unpacklo_epi32(r[0], r[1]), t[1] = _mm256_unpackhi_epi32(r[0], r[1]);
      t[2] = _mm256_unpacklo_epi32(r[2], r[3]), t[3] = _mm256_unpackhi_epi32(r[2], r[3]);
      __m256i* o = reinterpret_cast<__m256i*>(out);
      _mm256_storeu_si256(o, _mm256_unpacklo_epi64(t[0], t[2]));
      _mm256_storeu_si256(o + 1, _mm256_unpackhi_epi64(t[0], t[2]));
      _mm256_storeu_si256(o + 2, _mm256_unpacklo_epi64(t[1], t[3]));
      _mm256_storeu_si256(o + 3, _mm256_unpackhi_epi64(t[1], t[3]));
    }
    return true;
  }
  static bool pack_values(const int8_t* v, int64_t row_step, int64_t rows, int64_t columns, Code* out) {
    if (rows < 4 || columns < 8) return false;
    const __m128i a = _mm_unpacklo_epi8(load_half(v), load_half(v + row_step));
    const __m128i b = _mm_unpacklo_epi8(load_half(v + 2 * row_step), load_half(v + 3 * row_step));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + 1, _mm_unpackhi_epi16(a, b));
    return true;
  }

  static I32 store_p(PCode* p, U16 a, U16 b, I32 sum) {
    const __m256i bytes = _mm256_packus_epi16(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
    return _mm256_dpbusd_avx_epi32(sum, bytes, _mm256_set1_epi8(1));
  }
  // four vectors are packed into one: 4 keys of each in each 128-bit lane
  static constexpr int key_at(int at) { return at / 4 % 4 * 8 + at / 16 * 4 + at % 4; }
  static I32 dot_qk(I32 acc, Codes k, Codes q) { return _mm256_dpbusd_avx_epi32(acc, k, q); }
  static I32 dot_pv(I32 acc, Codes v, Codes p) { return _mm256_dpbusd_avx_epi32(acc, p, v); }
};
#endif

}  // namespace
}  // namespace intflash
