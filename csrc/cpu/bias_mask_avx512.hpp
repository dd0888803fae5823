// Biases and masks of short rows: T of docs/numerics.md and depths below its maximum. T is held in 32-bit lanes where
// they suffice. In 64-bit lanes a row of T has, for every 16 keys, eight values of the even keys and then eight of the
// odd ones. A mask alone only marks the scores of absent keys.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/exp2.hpp"
#include "cpu/isa/avx512.hpp"

namespace intflash {
namespace {

// The multipliers of T in 64-bit lanes. Where S * (c << 9) and the product stay below 2^54 the lanes hold T * 2^9, so
// that a difference of two has its depth in the high half; else they hold T, and the difference is shifted.
struct BiasedScale {
  int32_t c = 0, bias_unit = 0;
  int k = 0, down = 0;  // T = t >> down
  uint32_t c24 = 0;     // c in 2^-24 octave
  int bias_shift = 4;   // from a bias to 2^-24 octave
};

inline bool fits_scaled(Exponent e) { return e.k == 0 && e.c < (1u << 22); }
inline BiasedScale biased_scale(Exponent e, bool scaled, int bias_shift) {
  if (scaled) return {int32_t(e.c << 9), 1 << (bias_shift + 17), 0, 9, e.c >> 8, bias_shift};
  return {int32_t(e.c), 1 << (bias_shift + 8), e.k, 0, e.c >> 8, bias_shift};
}

// The bias and the mask of a row; null where it has none.
struct RowBias {
  const int32_t* bias;
  const uint8_t* keep;
};

// Reads the bias and mask of 16 keys, of those `present`, from contiguous memory.
template <bool HasBias, bool HasKeep>
struct ContiguousReader {
  __mmask16 kept(const RowBias& row, int64_t j, __mmask16 present) const {
    if (!HasKeep) return present;
    const __m128i bytes = _mm_maskz_loadu_epi8(present, row.keep + j);
    return _mm_test_epi8_mask(bytes, bytes);
  }
  // Returns the bias, kAbsent where a key takes no part.
  __m512i bias(const RowBias& row, int64_t j, __mmask16 present) const {
    const __m512i absent = _mm512_set1_epi32(kAbsent);
    const __mmask16 mask = kept(row, j, present);
    return HasBias ? _mm512_mask_loadu_epi32(absent, mask, row.bias + j)
                   : _mm512_mask_mov_epi32(absent, mask, _mm512_setzero_si512());
  }
};
struct StridedReader {
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

  // Writes T of keys [0, n) of a row of scores, kNever for absent keys and up to a multiple of 16 keys. Returns the
  // maxima of the lanes.
  template <class Reader>
  static I64 row(const int32_t* s, int64_t n, const Reader& reader, const RowBias& add, const BiasedScale& scale,
                 int64_t* t) {
    const __m512i c = _mm512_set1_epi32(scale.c), unit = _mm512_set1_epi32(scale.bias_unit),
                  absent = _mm512_set1_epi32(kAbsent);
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

  // The largest magnitudes of scores and biases in each lane.
  struct Magnitudes {
    __m512i score = _mm512_setzero_si512(), bias = _mm512_setzero_si512();
    bool fit(uint32_t c24, int bias_shift) const {
      return levels_fit_32_bits(_mm512_reduce_max_epi32(score), _mm512_reduce_max_epi32(bias), c24, bias_shift);
    }
  };
  // Does the same in 32-bit lanes, in 2^-24 octave, and updates `most`.
  template <class Reader>
  static __m512i level32_row(const int32_t* s, int64_t n, const Reader& reader, const RowBias& add,
                             const BiasedScale& scale, int32_t* t, Magnitudes& most) {
    const __m128i bias_shift = _mm_cvtsi32_si128(scale.bias_shift);
    const __m512i c = _mm512_set1_epi32(int32_t(scale.c24)), absent = _mm512_set1_epi32(kAbsent),
                  never = _mm512_set1_epi32(kAbsentLevel32);
    __m512i max = never;
    for (int64_t j = 0; j < n; j += 16) {
      const __m512i b = reader.bias(add, j, Vec512::lanes(n - j)), x = Vec512::load(s + j);
      most.score = Vec512::max(most.score, _mm512_abs_epi32(x));
      most.bias = Vec512::max(most.bias, _mm512_abs_epi32(b));  // that of kAbsent stays negative
      const __m512i sum = _mm512_add_epi32(_mm512_mullo_epi32(x, c), _mm512_sll_epi32(b, bias_shift));
      const __m512i level = _mm512_mask_mov_epi32(sum, _mm512_cmpeq_epi32_mask(b, absent), never);
      Vec512::store(t + j, level);
      max = Vec512::max(max, level);
    }
    return max;
  }
  static __m512i depth32(const int32_t* t, __m512i top) {
    return _mm512_srli_epi32(_mm512_sub_epi32(top, Vec512::load(t)), 15);
  }

  // The score of a masked key: below every score, and its depth below their maximum fits a signed register.
  static constexpr int32_t kMarked = kAbsent / 2;
  // Marks absent keys of [0, n) and the keys from n up to a multiple of 16. Returns the maxima of the lanes.
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
  // Whether a marked key's depth, 2^30 - 2^22 or more, gives a p of 0.
  static bool marks_are_dead(const RowScale& scale) { return scale.shift || scale.c >= 1u << 18; }

  // Returns the depths of 16 keys below a maximum, octaves in Q.9. Depths past 65535 stay above it as signed words too.
  template <bool Scaled>
  static __m512i depth(const int64_t* t, I64 top) {
    return Vec512::high_halves(scaled_depth<Scaled>(t, top), scaled_depth<Scaled>(t + 8, top));
  }

  // Writes the maximum of the lanes of row r to out[r], for eight rows.
  static void reduce_max(const I64* x, int64_t* out) {
    __m512i a[4], b[2];
    for (int i = 0; i < 4; ++i)
      a[i] = _mm512_max_epi64(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                              _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 2; ++i)
      b[i] = _mm512_max_epi64(_mm512_shuffle_i64x2(a[2 * i], a[2 * i + 1], 0x88),
                              _mm512_shuffle_i64x2(a[2 * i], a[2 * i + 1], 0xDD));
    _mm512_storeu_si512(
        out, _mm512_max_epi64(_mm512_shuffle_i64x2(b[0], b[1], 0x88), _mm512_shuffle_i64x2(b[0], b[1], 0xDD)));
  }

 private:
  template <bool Scaled>
  static __m512i scaled_depth(const int64_t* t, I64 top) {
    const __m512i d = _mm512_sub_epi64(top, _mm512_loadu_si512(t));
    if (Scaled) return d;
    return _mm512_slli_epi64(_mm512_min_epu64(d, _mm512_set1_epi64(int64_t(1) << 40)), 9);  // 256 octaves
  }
};

// Finds the row maxima of a block with a bias or a mask: of its scores, or of T. DeadTile is a tile whose sums are not
// used.
template <class V, class RowBlock, int DeadTile>
struct BiasedMaxima {
  const Call& call;
  RowBlock& s;

  BiasedMaxima(const Call& call, RowBlock& s) : call(call), s(s) {}

  __attribute__((noinline)) void find() const {
    if (s.on_levels32() && !levels32_maxima()) s.from = s.wider_from;
    if (s.on_levels32()) return;
    if (s.on_levels()) return level_maxima();
    marked_maxima();
  }

  // Calls f(r, reader, bias and mask of row r) for the block's rows.
  template <class F>
  void for_each_row(F f) const {
    const int64_t bias_step = call.bias.stride[3], keep_step = call.keep.stride[3];
    const bool bias = call.bias.data, keep = call.keep.data;
    if ((bias && bias_step != 1) || (keep && keep_step != 1))
      return for_each_row(StridedReader{bias_step, keep_step}, f);
    if (!keep) return for_each_row(ContiguousReader<true, false>(), f);
    if (!bias) return for_each_row(ContiguousReader<false, true>(), f);
    for_each_row(ContiguousReader<true, true>(), f);
  }
  template <class Reader, class F>
  void for_each_row(const Reader& reader, F f) const {
    RowBias add = {nullptr, nullptr};
    if (call.bias.data) add.bias = call.bias.at(s.b % call.bias_batch, s.h, s.row0 + s.first);
    if (call.keep.data) add.keep = call.keep.at(s.b % call.keep_batch, s.h, s.row0 + s.first);
    for (int r = s.first; r < s.rows; ++r, add.bias += call.bias.stride[2], add.keep += call.keep.stride[2]) {
      f(r, reader, add);
      if (r % 4 == 3) V::template keep_awake<DeadTile>();
    }
  }

  // Returns false where 32 bits do not hold T.
  bool levels32_maxima() const {
    __m512i max[RowBlock::kRows];
    Biased::Magnitudes most;
    uint32_t largest = 0;
    for (int r = 0; r < RowBlock::kRows; ++r) max[r] = V::zero16();
    for_each_row([&](int r, const auto& reader, const RowBias& add) {
      const BiasedScale& scale = s.biased_scale[r * s.scale_step];
      max[r] = Biased::level32_row(s.scores + r * RowBlock::kScoreLd, call.nk, reader, add, scale, s.levels32(r), most);
      largest = larger(largest, scale.c24);
    });
    if (!most.fit(largest, s.biased_scale[0].bias_shift)) return false;
    for (int r = 0; r < s.rows; r += 16) V::reduce_max(max + r, s.top + r);
    for (int r = s.first; r < s.rows; ++r)
      if (s.top[r] == kAbsentLevel32) s.top[r] = 0;  // without keys: any level far above
    return true;
  }

  void level_maxima() const {
    __m512i max[RowBlock::kRows];
    for (int r = 0; r < RowBlock::kRows; ++r) max[r] = V::zero16();
    for_each_row([&](int r, const auto& reader, const RowBias& add) {
      max[r] = Biased::row(s.scores + r * RowBlock::kScoreLd, call.nk, reader, add, s.biased_scale[r * s.scale_step],
                           s.levels + r * s.levels_ld);
    });
    for (int r = 0; r < s.rows; r += 8) Biased::reduce_max(max + r, s.level + r);
    for (int r = s.first; r < s.rows; ++r)
      if (s.level[r] == kNever) s.level[r] = 0;  // without keys: any level far above
  }

  void marked_maxima() const {
    __m512i max[RowBlock::kRows];
    for (int r = 0; r < RowBlock::kRows; ++r) max[r] = V::zero16();
    for_each_row([&](int r, const auto& reader, const RowBias& add) {
      max[r] = Biased::mark(s.scores + r * RowBlock::kScoreLd, call.nk, reader, add);
    });
    for (int r = 0; r < s.rows; r += 16) V::reduce_max(max + r, s.top + r);
    for (int r = s.first; r < s.rows; ++r)
      if (s.top[r] == Biased::kMarked) s.top[r] = 0;  // without keys: any level far above the marks
  }
};

}  // namespace
}  // namespace intflash
