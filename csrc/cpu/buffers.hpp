// What a thread keeps of a head and a unit of rows while attention.hpp works on them, laid out in its scratch.
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

constexpr int64_t kStageKeys = 512;      // keys whose P is held at a time
constexpr int64_t kWideStageKeys = 256;  // 127 * 65,193 * 256 < 2^31

template <class V>
struct Buffers {
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  static constexpr int kRows = V::kMaxRows, kLanes = V::kLanes, kBlock = 4 * V::kLanes;
  static constexpr int kKeyPad = kBlock < kFlashTile ? kFlashTile : kBlock;

  Code *keys_, *values_, *queries_;
  int32_t *scores_, *acc_, *acc_low_, *column_sums_, *stage_;
  PCode *p_, *p_low_;
  int64_t score_ld_, p_ld_, value_pad_, chunk_, stage_keys_;
  int qk_steps_;

  Buffers(const Call& call, Scratch& scratch) {
    const int64_t key_pad = round_up(larger<int64_t>(call.nk, 1), kKeyPad);
    value_pad_ = round_up(call.value_dim, kLanes);
    qk_steps_ = V::depth_steps(call.head_dim);
    chunk_ = smaller(key_pad, round_up(V::kScoreBytes / (4 * kRows), kStageKeys));
    if (call.method == Method::kOnline) chunk_ = smaller<int64_t>(key_pad, kGranule);
    if (call.method >= Method::kQFlash) chunk_ = smaller(key_pad, kStageKeys);
    score_ld_ = chunk_ + 16;  // not a multiple of 4 KiB, whose rows would share a cache set
    p_ld_ = smaller(chunk_, kStageKeys) + 64 / int64_t(sizeof(PCode));
    const bool wide_p = V::kWideP && call.method == Method::kP16;
    stage_keys_ = wide_p ? kWideStageKeys : kStageKeys;
    int64_t size[10] = {
        key_pad * qk_steps_ * V::kGroup * int64_t(sizeof(Code)),
        key_pad * value_pad_ * int64_t(sizeof(Code)),
        kRows * qk_steps_ * V::kGroup * int64_t(sizeof(Code)),
        kRows * score_ld_ * 4,
        kRows * value_pad_ * 4,
        call.method == Method::kP8 ? 0 : kRows * value_pad_ * 4,
        call.method >= Method::kQFlash || wide_p ? key_pad / kFlashTile * value_pad_ * 4 : 0,
        call.method >= Method::kQFlash ? kRows * p_ld_ * int64_t(sizeof(PCode)) : 0,
        call.method == Method::kP16 && !wide_p ? kRows * p_ld_ * int64_t(sizeof(PCode)) : 0,
        wide_p ? kRows * value_pad_ * 4 : 0,
    };
    int64_t total = 0;
    for (int64_t& bytes : size) {
      const int64_t at = total;
      total += round_up(bytes, 64) + 64;
      bytes = at;
    }
    char* base = scratch.reserve(size_t(total));
    keys_ = reinterpret_cast<Code*>(base + size[0]);
    values_ = reinterpret_cast<Code*>(base + size[1]);
    queries_ = reinterpret_cast<Code*>(base + size[2]);
    scores_ = reinterpret_cast<int32_t*>(base + size[3]);
    acc_ = reinterpret_cast<int32_t*>(base + size[4]);
    acc_low_ = reinterpret_cast<int32_t*>(base + size[5]);
    column_sums_ = reinterpret_cast<int32_t*>(base + size[6]);
    p_ = reinterpret_cast<PCode*>(base + size[7]);
    p_low_ = reinterpret_cast<PCode*>(base + size[8]);
    stage_ = reinterpret_cast<int32_t*>(base + size[9]);
  }
};

}  // namespace
}  // namespace intflash
