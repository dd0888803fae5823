// The tile step of qflash and iflash, as the published programs compute it (docs/numerics.md section 3).
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

constexpr int32_t kQFlashMasked = -(1 << 20);  // score of absent keys and of padding, and the first maximum

template <bool Divide>  // Divide: iflash, which keeps the divisions
class QFlashStep {
 public:
  QFlashStep(const Call& call, int64_t b, int64_t h, int64_t hk) {
    const double scale = double(*call.q_scale.at(b, h)) * double(*call.k_scale.at(b, hk)) * call.sm_scale;
    double sm_scale = scale * 1.4426950408889634;
    double rs = std::nearbyint(1.0 / sm_scale);
    // Unchecked calls only: the nearest scale that is served, docs/numerics.md section 3. A NaN counts as 1.
    if (!(rs >= 1.0)) sm_scale = rs = 1.0;
    if (rs > 2147483647.0) rs = 2147483647.0, sm_scale = 1.0 / rs;
    rs_ = int32_t(rs);
    exp_m_ = int32_t(std::nearbyint(-sm_scale * 65536));
    req_m_ = int32_t(std::nearbyint(sm_scale * 127 * 65536));
    rel_m_ = int32_t(std::nearbyint(1073741824.0 / rs));
  }

  // Adds the bias and sets absent keys to kQFlashMasked, in place.
  void scores(int32_t* s, const int32_t* bias, int64_t step, int64_t n) const {
    for (int64_t j = 0; j < kQFlashTile; ++j) {
      if (s[j] == kAbsent)
        s[j] = kQFlashMasked;
      else if (bias && j < n)
        s[j] = wrapping_add(s[j], bias[j * step]);
    }
  }

  // Updates the row maximum m, rescales l and acc to it, adds the tile's p to l and stores p + 128.
  template <class PCode>
  void probabilities(const int32_t* s, int32_t& m, int32_t& l, int32_t* acc, int64_t dim, PCode* p) const {
    int32_t raised = m;
    for (int j = 0; j < kQFlashTile; ++j) raised = larger(raised, s[j]);
    const int32_t alpha = exp2(int64_t(m) - raised);
    l = release(l, alpha);
    for (int64_t d = 0; d < dim; ++d) acc[d] = release(acc[d], alpha);
    for (int j = 0; j < kQFlashTile; ++j) {
      const int8_t y = requantize(exp2(int64_t(s[j]) - raised));
      l = wrapping_add(l, y);
      p[j] = PCode(y + 128);
    }
    m = raised;
  }

  void divide(int32_t* acc, int32_t l, int64_t n) const {
    for (int64_t d = 0; d < n; ++d) acc[d] = l == 0 ? 0 : int8_t(int64_t(acc[d]) / l);
  }

 private:
  int32_t rs_, exp_m_, req_m_, rel_m_;

  int32_t exp2(int64_t x) const {  // in units of 1 / rs, x <= 0
    int64_t q;
    if constexpr (Divide)
      q = -x / rs_;
    else
      q = int32_t(uint32_t(x) * uint32_t(exp_m_)) >> 16;
    const int32_t r = int32_t(uint32_t(x) + uint32_t(q) * uint32_t(rs_));
    const int shift = q < 0 || q > 31 ? 31 : int(q);  // a GPU's shift clamps its unsigned amount
    return wrapping_add(r >> 1, rs_) >> shift;
  }

  int8_t requantize(int32_t y) const {
    if constexpr (Divide) {
      const int64_t a = 127 * int64_t(y) + (rs_ >> 1);
      return int8_t(a / rs_ - (a % rs_ < 0));  // floor
    } else {
      return int8_t(wrapping_add(wrapping_multiply(y, req_m_), 1 << 15) >> 16);
    }
  }

  int32_t release(int32_t x, int32_t alpha) const {
    const int64_t product = int64_t(x) * alpha;
    if constexpr (Divide) return int32_t(product / rs_);
    const int64_t scaled = wrapping_multiply(product, int64_t(rel_m_));
    return int32_t(int64_t(uint64_t(scaled) + (uint64_t(1) << 29)) >> 30);
  }
};

}  // namespace
}  // namespace intflash
