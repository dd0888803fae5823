// Computes the output from integer sums: docs/numerics.md section 2, "The output".
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

constexpr int kMaxValueDim = 256;

template <class V>
class Epilogue {
 public:
  explicit Epilogue(const Call& call) : call_(call) {}

  void enter_head(int64_t b, int64_t h, int64_t hk) {
    out_ = call_.out.get();
    const bool per_channel = call_.v_scale.stride[3] || call_.out_scale.stride[3];
    const int64_t channels = per_channel ? call_.value_dim : 1;
    const bool integer = call_.out_scale.data;
    for (int64_t d = 0; d < channels; ++d) {
      const float v = *call_.v_scale.at(b, hk, 0, d);
      const float o = integer ? *call_.out_scale.at(b, h, 0, d) : 0.0f;
      if (known_ > d && v_scale_[d] == v && out_scale_[d] == o) continue;
      v_scale_[d] = v, out_scale_[d] = o;
      if (integer) multiplier_[d] = output_multiplier(v, o);
    }
    known_ = larger(known_, channels);
    per_channel_ = per_channel;
  }

  // The factors of up to 16 rows of integer output, for a caller that has the sums of p well before acc.
  struct Prepared {
    typename V::Factors factors;
    bool fits = false;
  };
  template <bool P16>
  void prepare(const uint32_t* l, int rows, Prepared& out) const {
    out.fits = call_.out_scale.data && block_factors<P16>(l, rows, out.factors);
  }

  // Writes `rows` output rows from the offset `at` on, from acc = 256 * high + low (P16) or high (P8) and the sums of
  // p. gaps: octaves by which a row's l counts from above its acc, or null where none does.
  template <bool P16>
  void rows(const int32_t* high, const int32_t* low, int64_t ld, const uint32_t* l, int rows, int64_t at,
            const Prepared* ahead = nullptr, const int* gaps = nullptr) const {
    if (gaps) return rows_with_gaps<P16>(high, low, ld, l, rows, at, gaps);
    const int64_t out_ld = call_.out.row_step;
    const auto each = [&](auto* out, auto write) {
      for (int r = 0; r < rows; ++r, high += ld, low += ld) write(high, low, l[r], out + at + r * out_ld);
    };
    const auto integers = [&](auto* out, auto limit) {
      constexpr int kLimit = decltype(limit)::value;
      out += at;
      for (int r = 0; r < rows;) {
        const int block = smaller(rows - r, 16);
        if (!block_of_rows<P16, kLimit>(high, low, ld, l + r, block, out, ahead))
          for (int i = 0; i < block; ++i)
            integer_row<P16, kLimit>(high + i * ld, low + i * ld, l[r + i], out + i * out_ld);
        r += block, high += block * ld, low += block * ld, out += block * out_ld;
      }
    };
    switch (call_.out_type) {
      case OutType::kInt8: return integers(static_cast<int8_t*>(out_), Limit<127>{});
      case OutType::kInt16: return integers(static_cast<int16_t*>(out_), Limit<32767>{});
      case OutType::kFloat16:
        return each(static_cast<uint16_t*>(out_), [&](auto... a) { float_row<P16, FloatType::kFloat16>(a...); });
      case OutType::kBFloat16:
        return each(static_cast<uint16_t*>(out_), [&](auto... a) { float_row<P16, FloatType::kBFloat16>(a...); });
      case OutType::kFloat32:
        return each(static_cast<float*>(out_), [&](auto... a) { float_row<P16, FloatType::kFloat32>(a...); });
    }
  }

  // Whether int8_tile can write these rows of so many panels.
  bool takes_tile(const Prepared& ahead, int panels) const {
    return ahead.fits && call_.out_type == OutType::kInt8 && call_.value_dim == panels * V::kLanes &&
           (panels == 2 || panels == 4);
  }

  // Writes R rows from sums in registers. Row r has factor (row + r) % 16 of ahead[(row + r) / 16]. Short: sums of 24
  // bits.
  template <bool Short, int R, int C>
  inline __attribute__((always_inline)) void int8_tile(const typename V::I32 (&acc)[R][C], const Prepared* ahead,
                                                       int row, int64_t at) const {
    const int64_t out_ld = call_.out.row_step;
    int8_t* out = static_cast<int8_t*>(out_) + at;
    const auto value = [&](int r, int c) {
      const unsigned i = unsigned(row + r);
      const typename V::Factors& factors = ahead[i / 16].factors;
      if constexpr (Short)
        return V::rescaled_24_bits(acc[r][c], factors, int(i % 16));
      else
        return V::rescaled(acc[r][c], V::odd_lanes(acc[r][c]), factors, int(i % 16));
    };
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, out += out_ld) {
      if constexpr (C == 4) V::store_quad(out, value(r, 0), value(r, 1), value(r, 2), value(r, 3));
      if constexpr (C == 2) V::store_pair(out, value(r, 0), value(r, 1));
    }
  }

  // Writes the output row at an offset from int8 codes of V's own scale (qflash, iflash).
  void codes_row(const int32_t* codes, int64_t at) const {
    switch (call_.out_type) {
      case OutType::kInt8:
        return copy_codes(codes, static_cast<int8_t*>(out_) + at, [](int32_t c) { return int8_t(c); });
      case OutType::kInt16:
        return copy_codes(codes, static_cast<int16_t*>(out_) + at, [](int32_t c) { return int16_t(c); });
      case OutType::kFloat16:
        return copy_codes(codes, static_cast<uint16_t*>(out_) + at,
                          [&](int32_t c) { return to_float16(float(c) * v_scale_[0]); });
      case OutType::kBFloat16:
        return copy_codes(codes, static_cast<uint16_t*>(out_) + at,
                          [&](int32_t c) { return to_bfloat16(float(c) * v_scale_[0]); });
      case OutType::kFloat32:
        return copy_codes(codes, static_cast<float*>(out_) + at, [&](int32_t c) { return float(c) * v_scale_[0]; });
    }
  }

 private:
  // Writes a row with a gap as rows without one are. Returns false where it cannot: channels have scales of their own,
  // or a product and half of 2^shift may not fit 64 bits: 127 * 65,193 * 65,536 * 2^24 + 2^56 < 2^63.
  template <bool P16>
  bool row_with_gap(const int32_t* high, const int32_t* low, uint32_t l, int64_t at, int gap) const {
    if (per_channel_) return false;
    const auto integers = [&](auto* out, auto limit) {
      const int e = multiplier_[0].e;
      if (e > 15 || (l && 55 - __builtin_clz(l) - e + gap > 57)) return false;
      integer_row<P16, decltype(limit)::value>(high, low, l, out + at, gap);
      return true;
    };
    switch (call_.out_type) {
      case OutType::kInt8: return integers(static_cast<int8_t*>(out_), Limit<127>{});
      case OutType::kInt16: return integers(static_cast<int16_t*>(out_), Limit<32767>{});
      case OutType::kFloat16:
        float_row<P16, FloatType::kFloat16>(high, low, l, static_cast<uint16_t*>(out_) + at, gap);
        break;
      case OutType::kBFloat16:
        float_row<P16, FloatType::kBFloat16>(high, low, l, static_cast<uint16_t*>(out_) + at, gap);
        break;
      case OutType::kFloat32:
        float_row<P16, FloatType::kFloat32>(high, low, l, static_cast<float*>(out_) + at, gap);
        break;
    }
    return true;
  }

  // Writes rows that may have gaps.
  template <bool P16>
  void rows_with_gaps(const int32_t* high, const int32_t* low, int64_t ld, const uint32_t* l, int rows, int64_t at,
                      const int* gaps) const {
    for (int r = 0; r < rows; ++r, high += ld, low += ld, at += call_.out.row_step) {
      if (row_with_gap<P16>(high, low, l[r], at, gaps[r])) continue;
      for (int64_t d = 0; d < call_.value_dim; ++d) {
        const float v_scale = v_scale_[per_channel_ ? d : 0];
        const int64_t acc = sum<P16>(high, low, d);
        const auto real = [&] {
          return l[r] ? float(acc) * (v_scale / float(l[r]) * std::ldexp(1.0f, -gaps[r])) : 0.0f;
        };
        const auto code = [&](int limit) {
          if (l[r] == 0) return 0;
          const OutputMultiplier m = output_multiplier(v_scale, out_scale_[per_channel_ ? d : 0], gaps[r]);
          const int lz = __builtin_clz(l[r]);
          const int64_t reciprocal = int64_t((uint64_t(1) << 55) / (uint64_t(l[r]) << lz));
          const int64_t product = acc * ((reciprocal * m.mr + (1 << 23)) >> 24);
          const int64_t rounded = ((product >> smaller(54 - lz - m.e + gaps[r], 63)) + 1) >> 1;
          return int(rounded < -limit ? -limit : rounded > limit ? limit : rounded);
        };
        switch (call_.out_type) {
          case OutType::kInt8: static_cast<int8_t*>(out_)[at + d] = int8_t(code(127)); break;
          case OutType::kInt16: static_cast<int16_t*>(out_)[at + d] = int16_t(code(32767)); break;
          case OutType::kFloat16: static_cast<uint16_t*>(out_)[at + d] = to_float16(real()); break;
          case OutType::kBFloat16: static_cast<uint16_t*>(out_)[at + d] = to_bfloat16(real()); break;
          case OutType::kFloat32: static_cast<float*>(out_)[at + d] = real(); break;
        }
      }
    }
  }

  template <class Out, class Convert>
  void copy_codes(const int32_t* codes, Out* out, Convert convert) const {
    for (int64_t d = 0; d < call_.value_dim; ++d) out[d] = convert(codes[d]);
  }

  const Call& call_;
  void* out_ = nullptr;
  int64_t known_ = 0;
  bool per_channel_ = false;
  float v_scale_[kMaxValueDim], out_scale_[kMaxValueDim];
  OutputMultiplier multiplier_[kMaxValueDim];

  template <int N>
  struct Limit {
    static constexpr int value = N;
  };

  template <bool P16, class Factors>
  inline bool block_factors(const uint32_t* l, int rows, Factors& out) const {
    return !per_channel_ && multiplier_[0].e <= 15 &&
           V::template factors<P16>(l, rows, multiplier_[0].mr, multiplier_[0].e, out);
  }

  // Writes up to 16 rows of one scale at once; returns false where the vector layer cannot.
  template <bool P16, int Limit, class Out>
  inline bool block_of_rows(const int32_t* high, const int32_t* low, int64_t ld, const uint32_t* l, int rows, Out* out,
                            const Prepared* ahead) const {
    if constexpr (V::kRowOperations) {
      typename V::Factors own;
      if (!(ahead ? ahead->fits : block_factors<P16>(l, rows, own))) return false;
      const typename V::Factors& factors = ahead ? ahead->factors : own;
      if (!P16 && factors.sums_fit_24_bits)
        write_rows<Limit>(out, rows, [&](int row, int64_t d) {
          return V::rescaled_24_bits(V::load(high + row * ld + d), factors, row);
        });
      else
        write_rows<Limit>(out, rows, [&](int row, int64_t d) {
          return V::template rescale<P16>(high + row * ld + d, low + row * ld + d, factors, row);
        });
      return true;
    } else {
      return false;
    }
  }

  template <int Limit, class Out, class F>
  inline void write_rows(Out* out, int rows, F value) const {
    const int64_t n = call_.value_dim, out_ld = call_.out.row_step;
    int r = 0;
    if constexpr (Limit == 127) {
      for (; n == 32 && out_ld == 32 && r + 2 <= rows; r += 2, out += 64)
        V::store_quad(out, value(r, 0), value(r, 16), value(r + 1, 0), value(r + 1, 16));
      for (; n == 64 && r < rows; ++r, out += out_ld)
        V::store_quad(out, value(r, 0), value(r, 16), value(r, 32), value(r, 48));
    }
    for (; r < rows; ++r, out += out_ld) store_row<Limit>(out, [&](int64_t d) { return value(r, d); });
  }

  template <bool P16>
  static inline int64_t sum(const int32_t* high, const int32_t* low, int64_t d) {
    return P16 ? int64_t(high[d]) * 256 + low[d] : high[d];
  }

  template <bool P16, int Limit, class Out>
  inline void integer_row(const int32_t* high, const int32_t* low, uint32_t l, Out* out, int gap = 0) const {
    const int64_t n = call_.value_dim;
    if (l == 0) {
      for (int64_t d = 0; d < n; ++d) out[d] = 0;
      return;
    }
    const int lz = __builtin_clz(l);
    const int64_t reciprocal = int64_t((uint64_t(1) << 55) / (uint64_t(l) << lz));  // (2^23, 2^24]
    const auto factor = [&](const OutputMultiplier& m) { return (reciprocal * m.mr + (1 << 23)) >> 24; };
    const auto one = [&](int64_t d, int64_t f, int shift) {
      const int64_t rounded = (sum<P16>(high, low, d) * f + (int64_t(1) << (shift - 1))) >> shift;
      out[d] = Out(rounded < -Limit ? -Limit : rounded > Limit ? Limit : rounded);
    };
    const int64_t f = factor(multiplier_[0]);  // at most 2^24
    const int shift = 55 - lz - multiplier_[0].e + gap;
    if (per_channel_)
      for (int64_t d = 0; d < n; ++d) one(d, factor(multiplier_[d]), 55 - lz - multiplier_[d].e);
    else if (multiplier_[0].e > 15)
      for (int64_t d = 0; d < n; ++d) one(d, f, shift);
    else {  // |acc| <= 127 l 2^gap, so that acc << left < 2^(16 + e) and the quotient fits 32 bits
      const int left = larger(0, 32 - shift);
      store_row<Limit>(
          out, [&](int64_t d) { return V::template rescale<P16>(high + d, low + d, int32_t(f), left, shift + left); });
    }
  }

  // Where l is below this, acc fits an int32, because it is at most 127 l.
  template <bool P16>
  static constexpr uint32_t fits32() {
    return P16 ? 1u << 24 : 0xFFFFFFFFu;
  }
  template <bool P16>
  static inline typename V::I32 sum32(const int32_t* high, const int32_t* low) {
    return P16 ? V::add(V::shift_left(V::load(high), 8), V::load(low)) : V::load(high);
  }

  template <int Limit, class Out, class F>
  inline void store_row(Out* out, F value) const {
    const int64_t n = call_.value_dim;
    int64_t d = 0;
    if constexpr (V::kRowOperations && Limit == 127)
      for (; d + 32 <= n; d += 32) V::store_pair(out + d, value(d), value(d + 16));
    for (; d < n; d += V::kLanes) V::store_clamped(out + d, value(d), Limit, n - d);
  }

  template <bool P16, FloatType F, class Out>
  void float_row(const int32_t* high, const int32_t* low, uint32_t l, Out* out, int gap = 0) const {
    const auto convert = [](float x) {
      if constexpr (F == FloatType::kFloat16)
        return to_float16(x);
      else if constexpr (F == FloatType::kBFloat16)
        return to_bfloat16(x);
      else
        return x;
    };
    const int64_t n = call_.value_dim;
    if (l == 0) {
      for (int64_t d = 0; d < n; ++d) out[d] = 0;
    } else if (per_channel_) {
      for (int64_t d = 0; d < n; ++d) out[d] = convert(float(sum<P16>(high, low, d)) * (v_scale_[d] / float(l)));
    } else {
      float scale = v_scale_[0] / float(l);
      if (gap) scale *= std::ldexp(1.0f, -gap);
      // The compiler vectorizes the conversion to bfloat16 itself.
      if constexpr (F == FloatType::kFloat32 || (F == FloatType::kFloat16 && V::kFloat16))
        if (gap == 0 && l < fits32<P16>()) {
          for (int64_t d = 0; d < n; d += V::kLanes) {
            const auto acc = sum32<P16>(high + d, low + d);
            if constexpr (F == FloatType::kFloat32)
              V::store_scaled(out + d, acc, scale, n - d);
            else
              V::store_float16(out + d, acc, scale, n - d);
          }
          return;
        }
      for (int64_t d = 0; d < n; ++d) out[d] = convert(float(sum<P16>(high, low, d)) * scale);
    }
  }
};

}  // namespace
}  // namespace intflash
