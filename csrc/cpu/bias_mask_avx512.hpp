// Rows of scores with a mask, whose absent keys are marked, or with a bias: T of docs/numerics.md, and depths below its
// maximum. In 32-bit lanes where those hold it; else in 64-bit lanes: a row of T then has, for every 16 keys, eight values
// of the even keys and eight of the odd ones.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/exp2.hpp"
#include "cpu/isa/avx512.hpp"

namespace intflash {
namespace {

// T * 2^9, so that the difference of two has its depth in the high half, where that fits: S * (c << 9) and the product
// are then below 2^54. Else T itself, whose difference is shifted.
struct BiasedScale {
  int32_t c = 0, bias_unit = 0;
  int k = 0, down = 0;  // T = t >> down
  uint32_t c24 = 0;     // c in 2^-24 octave
};

inline bool fits_scaled(Exponent e) { return e.k == 0 && e.c < (1u << 22); }
inline BiasedScale biased_scale(Exponent e, bool scaled) {
  if (scaled) return {int32_t(e.c << 9), 1 << 21, 0, 9, e.c >> 8};
  return {int32_t(e.c), 1 << 12, e.k, 0, e.c >> 8};
}

// What a row adds to its scores; null where it has none.
struct RowBias {
  const int32_t* bias;
  const uint8_t* keep;
};

// Reads it, 16 keys at a time, of those `present`. Neighbours in memory, or else strides apart.
template <bool HasBias, bool HasKeep>
struct Neighbours {
  __mmask16 kept(const RowBias& row, int64_t j, __mmask16 present) const {
    if (!HasKeep) return present;
    const __m128i bytes = _mm_maskz_loadu_epi8(present, row.keep + j);
    return _mm_test_epi8_mask(bytes, bytes);
  }
  // kAbsent where a key takes no part.
  __m512i bias(const RowBias& row, int64_t j, __mmask16 present) const {
    const __m512i absent = _mm512_set1_epi32(kAbsent);
    const __mmask16 mask = kept(row, j, present);
    return HasBias ? _mm512_mask_loadu_epi32(absent, mask, row.bias + j) : _mm512_mask_mov_epi32(absent, mask, _mm512_setzero_si512());
  }
};
struct Apart {
  int64_t bias_step, keep_step;
  __attribute__((noinline)) __mmask16 kept(const RowBias& row, int64_t j, __mmask16 present) const {
    unsigned mask = 0;
    for (int i = 0; present >> i; ++i) mask |= unsigned(!row.keep || row.keep[(j + i) * keep_step]) << i;
    return __mmask16(mask);
  }
  __attribute__((noinline)) __m512i bias(const RowBias& row, int64_t j, __mmask16 present) const {
    alignas(64) int32_t lane[16] = {};
    for (int i = 0; row.bias && present >> i; ++i) lane[i] = row.bias[(j + i) * bias_step];
    return _mm512_mask_mov_epi32(_mm512_set1_epi32(kAbsent), kept(row, j, present), _mm512_load_si512(lane));
  }
};

struct Biased {
  using I64 = __m512i;

  // T of keys [0, n) of a row of scores, kNever for absent keys and from n to the end of its 16; the lanes' maxima.
  template <class Reader>
  static I64 row(const int32_t* s, int64_t n, const Reader& reader, const RowBias& add, const BiasedScale& scale, int64_t* t) {
    const __m512i c = _mm512_set1_epi32(scale.c), unit = _mm512_set1_epi32(scale.bias_unit), absent = _mm512_set1_epi32(kAbsent);
    const __m512i never = _mm512_set1_epi64(kNever), absent_bias = _mm512_mul_epi32(absent, unit);
    __m512i max = never;
    for (int64_t j = 0; j < n; j += 16, t += 16) {
      const __m512i b = reader.bias(add, j, Vec512::lanes(n - j));
      const __m512i x = Vec512::shift_left(Vec512::load(s + j), scale.k);
      const __m512i even_bias = _mm512_mul_epi32(b, unit), odd_bias = _mm512_mul_epi32(Vec512::odd_lanes(b), unit);
      __m512i even = _mm512_add_epi64(_mm512_mul_epi32(x, c), even_bias);
      __m512i odd = _mm512_add_epi64(_mm512_mul_epi32(Vec512::odd_lanes(x), c), odd_bias);
      if (_mm512_cmpeq_epi32_mask(b, absent)) {
        even = _mm512_mask_mov_epi64(even, _mm512_cmpeq_epi64_mask(even_bias, absent_bias), never);
        odd = _mm512_mask_mov_epi64(odd, _mm512_cmpeq_epi64_mask(odd_bias, absent_bias), never);
      }
      _mm512_storeu_si512(t, even);
      _mm512_storeu_si512(t + 8, odd);
      max = _mm512_max_epi64(max, _mm512_max_epi64(even, odd));
    }
    return max;
  }

  // The largest magnitudes of scores and biases, by lanes.
  struct Magnitudes {
    __m512i score = _mm512_setzero_si512(), bias = _mm512_setzero_si512();
    bool fit(uint32_t c24) const { return levels_stay_short(_mm512_reduce_max_epi32(score), _mm512_reduce_max_epi32(bias), c24); }
  };
  // The same in 32-bit lanes, c in 2^-24 octave; `most` is raised.
  template <class Reader>
  static __m512i short_row(const int32_t* s, int64_t n, const Reader& reader, const RowBias& add, uint32_t c24, int32_t* t, Magnitudes& most) {
    const __m512i c = _mm512_set1_epi32(int32_t(c24)), absent = _mm512_set1_epi32(kAbsent), never = _mm512_set1_epi32(kShortNever);
    __m512i max = never;
    for (int64_t j = 0; j < n; j += 16) {
      const __m512i b = reader.bias(add, j, Vec512::lanes(n - j)), x = Vec512::load(s + j);
      most.score = Vec512::max(most.score, _mm512_abs_epi32(x));
      most.bias = Vec512::max(most.bias, _mm512_abs_epi32(b));  // an absent one's stays negative
      const __m512i sum = _mm512_add_epi32(_mm512_mullo_epi32(x, c), _mm512_slli_epi32(b, 4));
      const __m512i level = _mm512_mask_mov_epi32(sum, _mm512_cmpeq_epi32_mask(b, absent), never);
      Vec512::store(t + j, level);
      max = Vec512::max(max, level);
    }
    return max;
  }
  static __m512i short_depth(const int32_t* t, __m512i top) { return _mm512_srli_epi32(_mm512_sub_epi32(top, Vec512::load(t)), 15); }

  // Below every score, and its depth below their maximum fits a signed register.
  static constexpr int32_t kMarked = kAbsent / 2;
  // Marks the absent ones of keys [0, n) and what follows them in their 16; the lanes' maxima.
  template <class Reader>
  static __m512i mark(int32_t* s, int64_t n, const Reader& reader, const RowBias& add) {
    const __m512i absent = _mm512_set1_epi32(kMarked);
    __m512i max = absent;
    for (int64_t j = 0; j < n; j += 16) {
      const __m512i x = _mm512_mask_mov_epi32(absent, reader.kept(add, j, Vec512::lanes(n - j)), Vec512::load(s + j));
      Vec512::store(s + j, x);
      max = Vec512::max(max, x);
    }
    return max;
  }
  // Whether that depth, 2^30 - 2^22 or more, gives a p of 0.
  static bool marks_are_dead(const RowScale& scale) { return scale.shift || scale.c >= 1u << 18; }

  // Depths of 16 keys, octaves in Q.9, below a maximum; those past 65535 are at least that as unsigned or signed words.
  template <bool Scaled>
  static __m512i depth(const int64_t* t, I64 top) {
    return Vec512::high_halves(scaled_depth<Scaled>(t, top), scaled_depth<Scaled>(t + 8, top));
  }

  // Maxima of eight rows' lanes, row r in out[r].
  static void reduce_max(const I64* x, int64_t* out) {
    __m512i a[4], b[2];
    for (int i = 0; i < 4; ++i)
      a[i] = _mm512_max_epi64(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 2; ++i)
      b[i] = _mm512_max_epi64(_mm512_shuffle_i64x2(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_i64x2(a[2 * i], a[2 * i + 1], 0xDD));
    _mm512_storeu_si512(out, _mm512_max_epi64(_mm512_shuffle_i64x2(b[0], b[1], 0x88), _mm512_shuffle_i64x2(b[0], b[1], 0xDD)));
  }

 private:
  template <bool Scaled>
  static __m512i scaled_depth(const int64_t* t, I64 top) {
    const __m512i d = _mm512_sub_epi64(top, _mm512_loadu_si512(t));
    if (Scaled) return d;
    return _mm512_slli_epi64(_mm512_min_epu64(d, _mm512_set1_epi64(int64_t(1) << 40)), 9);  // 256 octaves
  }
};

}  // namespace
}  // namespace intflash
