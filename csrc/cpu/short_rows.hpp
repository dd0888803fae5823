// A row block of short rows, which is some query rows of one head with all its keys, and P of its rows.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/bias_mask_avx512.hpp"
#include "cpu/exp2.hpp"

namespace intflash {
namespace {

// Whether a call has short rows: at most 256 keys, an exact method or keys that all have a value, no causal limit,
// packed sequences or K scales per block.
inline bool are_short_rows(const Call& call) {
  const bool served = call.method == Method::kP16 || call.method == Method::kP8 ||
                      (call.method == Method::kTwoGroups && call.all_have_values);
  return served && call.nk <= kShortRowKeys && !call.causal && !call.ends_q && !call.k_scale.stride[2];
}

// PRow and PChunk are the bytes from row to row of P and from chunk to chunk, Plane those of one digit.
template <int Rows, int PRow, int PChunk, int Plane>
struct RowBlockOf {
  static constexpr int kRows = Rows, kPanel = 16, kChunk = 64, kMaxChunks = kShortRowKeys / kChunk, kPRow = PRow,
                       kPChunk = PChunk;
  static constexpr int64_t kScoreLd = kMaxChunks * kChunk + 16,
                           kPlane = Plane;  // the rows of scores are spread over all cache sets

  // What the depths are computed from: scores with differences of 16 or 32 bits, or shifted; or T in 32 or 64 bits.
  enum class From { kScores16, kScores, kShiftedScores, kLevels32, kLevels, kShiftedLevels };
  int64_t b, h, hk;
  const int8_t *keys, *values;
  int64_t row0;     // first row of the block's tiles
  int first, rows;  // the block owns rows [first, rows) of its tiles; the previous block has the rows ahead of them
  int scale_step;   // 0 where all rows share one scale
  From from;
  RowScale scale[kRows];
  BiasedScale biased_scale[kRows];
  From wider_from;       // `from` of a biased block where 32 bits do not hold T
  int32_t top[kRows];    // row maxima of S, or of T in 32 bits
  int64_t level[kRows];  // row maxima of T in 64 bits, as BiasedScale holds it
  int32_t* scores;
  int64_t* levels;  // T of a biased block
  int64_t levels_ld;
  uint8_t* p;
  __m512i sums[kRows];
  uint32_t l[kRows];

  int32_t* levels32(int r) const {
    return reinterpret_cast<int32_t*>(levels + r * levels_ld);
  }  // T of row r in 32 bits
  bool on_levels32() const { return from == From::kLevels32; }
  bool on_levels() const { return from == From::kLevels || from == From::kShiftedLevels; }
  // Returns the maximum of T in row r, whose exponent is e.
  int64_t t_max(int r, Exponent e) const {
    if (on_levels32()) return int64_t(top[r]) * 256;
    return on_levels() ? level[r] >> biased_scale[r * scale_step].down : top[r] * (int64_t(1) << e.k) * e.c;
  }
};

// The operations of P with their constants in registers. gcc would compute some of these anew for each row, on the port
// of the shuffles.
template <class V>
struct RowOps : V {
  using typename V::U16;
  const U16 depth_half = V::in_register(_mm512_set1_epi16(2 * 153));
  const U16 high_bytes =
      V::in_register(_mm512_broadcast_i32x4(_mm_setr_epi8(1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15, -1)));
  const U16 byte_order =
      V::in_register(_mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
  const U16 plan = V::in_register(V::shift6_plan()), mask = V::in_register(_mm512_set1_epi16(255 << 6)),
            one = V::in_register(_mm512_set1_epi16(256 << 6));
  const U16 square = V::in_register(_mm512_set1_epi16(8288)), powers = V::in_register(_mm512_set1_epi16(512));

  U16 low_then_high(U16 a) const { return _mm512_shuffle_epi8(a, byte_order); }  // bytes, in each 128 bits
  U16 high_byte(U16 a) const { return _mm512_shuffle_epi8(a, high_bytes); }
  U16 average(U16 a, uint16_t b) const { return b == 2 * 153 ? _mm512_avg_epu16(a, depth_half) : V::average(a, b); }
  template <int Shift>
  U16 mantissa(U16 z) const {
    if constexpr (Shift != 6)
      return V::template mantissa<Shift>(z);
    else
      return _mm512_ternarylogic_epi32(V::shift6(z, plan), mask, one, 0xAE);
  }
  U16 add16(U16 a, uint16_t) const { return _mm512_add_epi16(a, square); }
  U16 power(U16 z) const { return _mm512_srlv_epi16(powers, high_byte(z)); }
};

template <class V, bool P16, Level L, class RowBlock>
class ShortRowSoftmax {
  using From = typename RowBlock::From;

 public:
  static Exponent exponent(const Call& call, const RowBlock& s, int r, CachedExponent& last) {
    return last.of(*call.q_scale.at(s.b, s.h, (s.row0 + r) / call.q_block), *call.k_scale.at(s.b, s.hk), call.sm_scale);
  }

  // Chooses how the depths of a block's rows are computed.
  static void choose_scales(const Call& call, RowBlock& s, CachedExponent& last) {
    s.scale_step = call.q_scale.stride[2] ? 1 : 0;
    const int scales = s.scale_step ? s.rows : 1;
    bool all_16_bits = true, aligned = true, scaled = true, dead = true, levels32 = true;
    for (int r = 0; r < scales; ++r) {
      const Exponent e = exponent(call, s, r, last);
      s.scale[r] = row_scale(e);
      all_16_bits = all_16_bits && fits_16_bits<P16, L>(s.scale[r]), aligned = aligned && s.scale[r].shift == 0;
      scaled = scaled && fits_scaled(e), dead = dead && Biased::marks_are_dead(s.scale[r]);
      levels32 = levels32 && has_24_fraction_bits(e);
    }
    if (!call.bias.data && (!call.keep.data || dead)) {
      s.from = all_16_bits ? From::kScores16 : aligned ? From::kScores : From::kShiftedScores;
    } else {
      s.wider_from = scaled ? From::kLevels : From::kShiftedLevels;
      s.from = levels32 ? From::kLevels32 : s.wider_from;
      for (int r = 0; r < scales; ++r)
        s.biased_scale[r] = biased_scale(exponent(call, s, r, last), scaled, bias_shift(call));
    }
  }

  // Stores what log-sum-exp needs, where the call asks for it.
  static void keep_sums(const Call& call, const RowBlock& s, CachedExponent& last) {
    const int64_t index = (s.b * call.heads_q + s.h) * call.nq + s.row0;
    for (int r = s.first; call.t_max && r < s.rows; ++r) {
      call.t_max[index + r] = s.l[r] ? s.t_max(r, exponent(call, s, r, last)) : kNever;
      call.l_sum[index + r] = s.l[r];
    }
  }

  // Returns 1 for the keys of the last chunk that exist and 0 for the others, in the order in which P is stored.
  static __m512i last_chunk_ones(int64_t keys) {
    alignas(64) int8_t ones[64];
    for (int i = 0; i < 64; ++i) ones[i] = V::key_at(i) < keys;
    return _mm512_load_si512(ones);
  }

  // Packs up to 4 keys by 16 channels of a value panel; the rest is zero.
  static void pack_value_group(const int8_t* v, int64_t row_step, int64_t step, int64_t keys, int64_t channels,
                               int8_t* out) {
    if (keys <= 0) return _mm512_storeu_si512(out, _mm512_setzero_si512());
    if (step == 1) return void(V::pack_values(v, row_step, keys, channels, out));
    for (int lane = 0; lane < 16; ++lane)
      for (int e = 0; e < 4; ++e) out[lane * 4 + e] = e < keys && lane < channels ? v[e * row_step + lane * step] : 0;
  }

  // Computes P of chunk j of a block's rows, in a tile for each digit, and adds its sum to the row sums. Calls
  // between() after every row. The chunk has `vectors` times 16 keys; `ones` has 0 for bytes of P that do not count.
  template <class Between>
  static void chunk(RowBlock& s, int j, int vectors, __m512i ones, Between between) {
    switch (s.from) {
      case From::kScores16: return chunk_from<From::kScores16>(s, j, vectors, ones, between);
      case From::kScores: return chunk_from<From::kScores>(s, j, vectors, ones, between);
      case From::kShiftedScores: return chunk_from<From::kShiftedScores>(s, j, vectors, ones, between);
      case From::kLevels32: return chunk_from<From::kLevels32>(s, j, vectors, ones, between);
      case From::kLevels: return chunk_from<From::kLevels>(s, j, vectors, ones, between);
      case From::kShiftedLevels: return chunk_from<From::kShiftedLevels>(s, j, vectors, ones, between);
    }
  }

 private:
  template <From F, class Between>
  static void chunk_from(RowBlock& s, int j, int vectors, __m512i ones, Between between) {
    switch (vectors) {
      case 1: return rows<F, 1>(s, j, ones, between);
      case 2: return rows<F, 2>(s, j, ones, between);
      case 3: return rows<F, 3>(s, j, ones, between);
      default: return rows<F, 4>(s, j, ones, between);
    }
  }

  struct Scale {
    __m512i c, limit;
    int shift;
  };
  template <From F>
  static inline Scale load_scale(const RowScale& r) {
    if constexpr (F == From::kScores16)
      return {V::set16(uint16_t(r.c >> 16)), V::zero16(), 0};
    else
      return {V::set1(int32_t(r.c)), V::set1(int32_t(r.limit)), r.shift};
  }

  template <From F, int Vectors, class Between>
  static void rows(RowBlock& s, int j, __m512i ones, Between between) {
    const RowOps<V> o;
    // Packs two vectors given by `of`; the second may be past the last one.
    const auto pair = [](int i, auto of) { return V::pack(of(i), i + 1 < Vectors ? of(i + 1) : V::zero16()); };
    Scale scale = load_scale<F>(s.scale[0]);
    // Local copies, because the compiler takes tile instructions to change all memory.
    const int32_t *scores = s.scores + j * RowBlock::kChunk, *row_maxima = s.top;
    const int64_t *levels = s.levels + j * RowBlock::kChunk, *level_maxima = s.level, levels_ld = s.levels_ld;
    const int32_t* levels32 = s.levels32(0) + j * RowBlock::kChunk;
    const RowScale* scales = s.scale_step ? s.scale : nullptr;
    uint8_t* p = s.p + j * RowBlock::kPChunk;
    __m512i* sums = s.sums;
    const bool first = j == 0;
    for (int r = s.first, end = s.rows; r < end; ++r) {
      if constexpr (!P16 && V::kMatrixUnit)
        __builtin_prefetch(p + (r + 4) * RowBlock::kPRow, 1);  // L1 does not keep it from block to block
      __m512i sum = first ? V::zero16() : sums[r];
      if constexpr (F == From::kLevels32) {
        const int32_t* t = levels32 + r * 2 * levels_ld;
        const __m512i top = V::set1(row_maxima[r]);
        const auto depth = [&](int i) { return Biased::depth32(t + i * RowBlock::kPanel, top); };
        block<Vectors>(o, [&](int i) { return pair(i, depth); }, ones, p + r * RowBlock::kPRow, sum);
      } else if constexpr (F == From::kLevels || F == From::kShiftedLevels) {
        V::compiler_barrier();  // without it gcc 12 drops the row as if it had no effect
        const int64_t* t = levels + r * levels_ld;
        const __m512i level = _mm512_set1_epi64(level_maxima[r]);
        const auto depth = [&](int i) { return Biased::depth<F == From::kLevels>(t + i * RowBlock::kPanel, level); };
        block<Vectors>(o, [&](int i) { return pair(i, depth); }, ones, p + r * RowBlock::kPRow, sum);
      } else {
        if (scales) scale = load_scale<F>(scales[r]);
        const int32_t* x = scores + r * RowBlock::kScoreLd;
        const __m512i top = V::set1(row_maxima[r]);
        const auto below = [&](int i) { return Exp2<V>::template below<false>(x + i * RowBlock::kPanel, top); };
        const auto shifted = [&](int i) {
          return F == From::kScores ? below(i) : V::shift_left(V::min_u(below(i), scale.limit), scale.shift);
        };
        const auto depth = [&](int i) { return V::mul_high(shifted(i), scale.c); };
        const auto depths = [&](int i) {
          if constexpr (F == From::kScores16)
            return V::mul_high16(pair(i, below), scale.c);
          else
            return pair(i, depth);
        };
        block<Vectors>(o, depths, ones, p + r * RowBlock::kPRow, sum);
      }
      sums[r] = sum;
      between();
    }
  }

  // Computes P of up to 64 depths, which `depths` gives in two registers, and adds its sum to the row's.
  template <int Vectors, class Depths>
  static inline __attribute__((always_inline)) void block(const RowOps<V>& o, Depths depths, __m512i ones, uint8_t* p,
                                                          __m512i& sums) {
    using E = Exp2<V>;
    const __m512i low = depths(0), high = Vectors > 2 ? depths(2) : V::zero16();
    if constexpr (P16) {
      const __m512i a = E::template p16<L>(low, o), b = Vectors > 2 ? E::template p16<L>(high, o) : V::zero16();
      const __m512i x = o.low_then_high(a), y = o.low_then_high(b);
      sums = V::store_bytes(p, _mm512_unpackhi_epi64(x, y), sums, ones, 8);
      sums = V::store_bytes(p + RowBlock::kPlane, _mm512_unpacklo_epi64(x, y), sums, ones, 0);
    } else {
      sums = V::store_bytes(p, _mm512_packus_epi16(E::p8(low, o), Vectors > 2 ? E::p8(high, o) : V::zero16()), sums,
                            ones, 0);
    }
  }
};

}  // namespace
}  // namespace intflash
