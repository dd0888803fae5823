// The maxima of a strip with a bias or a mask: of its scores, or of T.
#pragma once
#include "cpu/bias_mask_avx512.hpp"
#include "cpu/short_rows.hpp"

namespace intflash {
namespace {

// DeadTile: one whose sums nobody needs.
template <class V, class Strip, int DeadTile>
struct BiasedTops {
  const Call& call;
  Strip& s;

  BiasedTops(const Call& call, Strip& s) : call(call), s(s) {}

  __attribute__((noinline)) void find() const {
    if (s.on_short_levels() && !short_tops()) s.from = s.from_long;
    if (s.on_short_levels()) return;
    if (s.on_levels()) return level_tops();
    marked_tops();
  }

  // f(r, how to read, what row r adds to its scores) for the strip's rows.
  template <class F>
  void for_each_row(F f) const {
    const int64_t bias_step = call.bias.stride[3], keep_step = call.keep.stride[3];
    const bool bias = call.bias.data, keep = call.keep.data;
    if ((bias && bias_step != 1) || (keep && keep_step != 1)) return for_each_row(Apart{bias_step, keep_step}, f);
    if (!keep) return for_each_row(Neighbours<true, false>(), f);
    if (!bias) return for_each_row(Neighbours<false, true>(), f);
    for_each_row(Neighbours<true, true>(), f);
  }
  template <class Reader, class F>
  void for_each_row(const Reader& reader, F f) const {
    RowBias add = {nullptr, nullptr};
    if (call.bias.data) add.bias = call.bias.at(s.b % call.bias_batch, s.h, s.row0 + s.first);
    if (call.keep.data) add.keep = call.keep.at(s.b % call.keep_batch, s.h, s.row0 + s.first);
    for (int r = s.first; r < s.rows; ++r, add.bias += call.bias.stride[2], add.keep += call.keep.stride[2]) {
      f(r, reader, add);
      if (r % 4 == 3) V::template stay_awake<DeadTile>();
    }
  }

  // False where 32 bits do not hold T.
  bool short_tops() const {
    __m512i max[Strip::kRows];
    Biased::Magnitudes most;
    uint32_t largest = 0;
    for (int r = 0; r < Strip::kRows; ++r) max[r] = V::zero16();
    for_each_row([&](int r, const auto& reader, const RowBias& add) {
      const uint32_t c = s.biased_scale[r * s.scale_step].c24;
      max[r] = Biased::short_row(s.scores + r * Strip::kScoreLd, call.nk, reader, add, c, s.short_levels(r), most);
      largest = larger(largest, c);
    });
    if (!most.fit(largest)) return false;
    for (int r = 0; r < s.rows; r += 16) V::reduce_max(max + r, s.top + r);
    for (int r = s.first; r < s.rows; ++r)
      if (s.top[r] == kShortNever) s.top[r] = 0;  // without keys: any level far above
    return true;
  }

  void level_tops() const {
    __m512i max[Strip::kRows];
    for (int r = 0; r < Strip::kRows; ++r) max[r] = V::zero16();
    for_each_row([&](int r, const auto& reader, const RowBias& add) {
      max[r] = Biased::row(s.scores + r * Strip::kScoreLd, call.nk, reader, add, s.biased_scale[r * s.scale_step], s.levels + r * s.levels_ld);
    });
    for (int r = 0; r < s.rows; r += 8) Biased::reduce_max(max + r, s.level + r);
    for (int r = s.first; r < s.rows; ++r)
      if (s.level[r] == kNever) s.level[r] = 0;  // without keys: any level far above
  }

  void marked_tops() const {
    __m512i max[Strip::kRows];
    for (int r = 0; r < Strip::kRows; ++r) max[r] = V::zero16();
    for_each_row([&](int r, const auto& reader, const RowBias& add) { max[r] = Biased::mark(s.scores + r * Strip::kScoreLd, call.nk, reader, add); });
    for (int r = 0; r < s.rows; r += 16) V::reduce_max(max + r, s.top + r);
    for (int r = s.first; r < s.rows; ++r)
      if (s.top[r] == Biased::kMarked) s.top[r] = 0;  // without keys: any level far above the marks
  }
};

}  // namespace
}  // namespace intflash
