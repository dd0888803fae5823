// From integer sums to the output: docs/numerics.md section 3, "Integer output" and "Float output".
#pragma once
#include "arith.hpp"

namespace intflash {
namespace {

constexpr int kMaxValueDim = 256;

template <class V>
class Epilogue {
 public:
  explicit Epilogue(const Call& call) : call_(call) {}

  void enter_head(int64_t b, int64_t h, int64_t hk) {
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

  // Output rows [index, index + rows) from acc = 256 * high + low (P16) or high (P8), and the sums of p.
  template <bool P16>
  void rows(const int32_t* high, const int32_t* low, int64_t ld, const uint32_t* l, int rows, int64_t index) const {
    const auto each = [&](auto* out, auto write) {
      for (int r = 0; r < rows; ++r, high += ld, low += ld) write(high, low, l[r], out + (index + r) * call_.value_dim);
    };
    switch (call_.out_type) {
      case OutType::kInt8:
        return each(static_cast<int8_t*>(call_.out), [&](auto... a) { integer_row<P16, 127>(a...); });
      case OutType::kInt16:
        return each(static_cast<int16_t*>(call_.out), [&](auto... a) { integer_row<P16, 32767>(a...); });
      case OutType::kFloat16:
        return each(static_cast<uint16_t*>(call_.out), [&](auto... a) { float_row<P16>(a..., to_float16); });
      case OutType::kBFloat16:
        return each(static_cast<uint16_t*>(call_.out), [&](auto... a) { float_row<P16>(a..., to_bfloat16); });
      case OutType::kFloat32:
        return each(static_cast<float*>(call_.out), [&](auto... a) { float_row<P16>(a..., [](float x) { return x; }); });
    }
  }

  // Output row `index` from int8 codes of V's own scale (qflash, iflash).
  void codes_row(const int32_t* codes, int64_t index) const {
    const int64_t n = call_.value_dim;
    switch (call_.out_type) {
      case OutType::kInt8: return copy_codes(codes, static_cast<int8_t*>(call_.out) + index * n, [](int32_t c) { return int8_t(c); });
      case OutType::kInt16: return copy_codes(codes, static_cast<int16_t*>(call_.out) + index * n, [](int32_t c) { return int16_t(c); });
      case OutType::kFloat16: return copy_codes(codes, static_cast<uint16_t*>(call_.out) + index * n, [&](int32_t c) { return to_float16(float(c) * v_scale_[0]); });
      case OutType::kBFloat16: return copy_codes(codes, static_cast<uint16_t*>(call_.out) + index * n, [&](int32_t c) { return to_bfloat16(float(c) * v_scale_[0]); });
      case OutType::kFloat32: return copy_codes(codes, static_cast<float*>(call_.out) + index * n, [&](int32_t c) { return float(c) * v_scale_[0]; });
    }
  }

 private:
  template <class Out, class Convert>
  void copy_codes(const int32_t* codes, Out* out, Convert convert) const {
    for (int64_t d = 0; d < call_.value_dim; ++d) out[d] = convert(codes[d]);
  }

  const Call& call_;
  int64_t known_ = 0;
  bool per_channel_ = false;
  float v_scale_[kMaxValueDim], out_scale_[kMaxValueDim];
  OutputMultiplier multiplier_[kMaxValueDim];

  template <bool P16>
  static inline int64_t sum(const int32_t* high, const int32_t* low, int64_t d) {
    return P16 ? int64_t(high[d]) * 256 + low[d] : high[d];
  }

  template <bool P16, int Limit, class Out>
  void integer_row(const int32_t* high, const int32_t* low, uint32_t l, Out* out) const {
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
    const int64_t f = factor(multiplier_[0]);
    const int shift = 55 - lz - multiplier_[0].e;
    if (per_channel_)
      for (int64_t d = 0; d < n; ++d) one(d, factor(multiplier_[d]), 55 - lz - multiplier_[d].e);
    else if (multiplier_[0].e > 15)
      for (int64_t d = 0; d < n; ++d) one(d, f, shift);
    else {  // |acc| <= 127 l, so that acc << left < 2^(16 + e) and the quotient fits 32 bits
      const int left = larger(0, 32 - shift);
      int64_t d = 0;
      if constexpr (V::kFastPack && Limit == 127)
        for (; d + 32 <= n; d += 32)
          V::store_pair(out + d, V::template rescale<P16>(high + d, low + d, int32_t(f), left, shift + left),
                        V::template rescale<P16>(high + d + 16, low + d + 16, int32_t(f), left, shift + left));
      for (; d < n; d += V::kLanes)
        V::store_clamped(out + d, V::template rescale<P16>(high + d, low + d, int32_t(f), left, shift + left), Limit, n - d);
    }
  }

  template <bool P16, class Out, class Convert>
  void float_row(const int32_t* high, const int32_t* low, uint32_t l, Out* out, Convert convert) const {
    const int64_t n = call_.value_dim;
    if (l == 0) {
      for (int64_t d = 0; d < n; ++d) out[d] = 0;
    } else if (per_channel_) {
      for (int64_t d = 0; d < n; ++d) out[d] = convert(float(sum<P16>(high, low, d)) * (v_scale_[d] / float(l)));
    } else {
      const float scale = v_scale_[0] / float(l);
      for (int64_t d = 0; d < n; ++d) out[d] = convert(float(sum<P16>(high, low, d)) * scale);
    }
  }
};

}  // namespace
}  // namespace intflash
