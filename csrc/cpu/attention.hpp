// The attention kernel, written once over a vector layer V (isa/*.hpp) and compiled per instruction set.
//
// A unit of work is V::kUnitRows query rows of one head. K and V are packed once per head and thread
// into panels of kLanes columns whose depth runs in steps of 32 bits, so that QK^T and PV are the same
// product: out[r][c] = sum over steps of dot(a[r][step], panel[step][c]). A row's scores stay in the
// scratch for both passes while they fit; else the second pass computes them again.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/buffers.hpp"
#include "cpu/epilogue.hpp"
#include "cpu/exp2.hpp"
#include "cpu/qflash.hpp"
#include "cpu/bias_mask.hpp"
#include "cpu/long_rows.hpp"
#include "cpu/pack.hpp"
#include "cpu/row_blocks.hpp"
#include "cpu/product.hpp"

namespace intflash {
namespace {

template <bool P16>
constexpr int64_t kLongRow = P16 ? 1024 : 257;  // keys from which LongRows gains
constexpr int64_t kLongStages = 2048;     // keys from which 8 chunks of P16 a stage gain: sums are loaded less often, ends cost more
constexpr int kFewRows = 8;               // of a unit, for whole tiles of vectors are made of them

template <class V>
class Attention : Buffers<V>, Place<V::kMaxRows, V::kMatrixUnit> {
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  using B = Buffers<V>;
  using P = Place<V::kMaxRows, V::kMatrixUnit>;
  using B::kRows, B::kLanes, B::kBlock, B::kKeyPad;
  using B::keys_, B::values_, B::queries_, B::scores_, B::acc_, B::acc_low_, B::column_sums_, B::stage_, B::p_, B::p_low_;
  using B::score_ld_, B::p_ld_, B::value_pad_, B::chunk_, B::stage_keys_, B::qk_steps_;
  using P::call_, P::b_, P::h_, P::hk_, P::q0_, P::k0_, P::nk_, P::row0_, P::rows_, P::key_end_, P::masked_;
  using P::enter_block, P::causal_keys, P::mask_row, P::mark_absent, P::first_row;

 public:
  static int unit_rows(const Call&) { return kRows; }

  static void run(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
    Attention a(call, call_id, scratch);
    V::begin(call.head_dim);
    for (int64_t first, last; units.next(first, last);)
      a.walk(first, last, [&](int64_t head, int64_t block) {
        a.enter_head(head);
        a.enter_rows(block);
        a.rows();
      });
    V::end();
  }

 private:
  const uint64_t call_id_;
  Scratch& scratch_;
  // Of the rows at hand.
  bool wide_, short_;
  int32_t query_offset_[kRows];  // starts each score: undoes V's unsigned keys
  Exponent exponent_[kRows];
  RowScale scale_[kRows];
  int row_step_;  // 0: the rows share the first exponent and scale
  Depth depth_;
  LastExponent last_;  // its unit is the method's
  Epilogue<V> epilogue_;
  int64_t level_[kRows];  // wide rows: Tmax; intflash_online: the reference octave in T
  int32_t top_[kRows];    // narrow rows: maximum of S
  uint32_t l_[kRows];

  Attention(const Call& call, uint64_t call_id, Scratch& scratch)
      : B(call, scratch), P(call), call_id_(call_id), scratch_(scratch), epilogue_(call) {
    if (call.method == Method::kOnline) last_.unit = kTableSteps;
  }

  void enter_head(int64_t head) {
    if (scratch_.call_id == call_id_ && scratch_.packed_head == head) return;
    scratch_.call_id = call_id_;
    scratch_.packed_head = head;
    const int64_t pad = round_up(nk_, kKeyPad);
    Pack<V>::keys(call_.k.at(b_, hk_, k0_), call_.k.stride[2], call_.k.stride[3], nk_, call_.head_dim, qk_steps_, keys_);
    const bool natural = call_.method >= Method::kQFlash;
    Pack<V>::values(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, pad, call_.value_dim, natural,
                    values_);
    if (natural || (V::kWideP && call_.method == Method::kP16))
      column_sums(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, call_.value_dim, value_pad_,
                  column_sums_);
  }

  void enter_rows(int64_t block) {
    enter_block(block);
    wide_ = call_.bias.data || call_.k_scale.stride[2], short_ = false;
    Pack<V>::queries(call_.q.at(b_, h_, q0_ + row0_), call_.q.stride[2], call_.q.stride[3], rows_, call_.head_dim,
                     qk_steps_, queries_, query_offset_);
    V::stay_awake();
    depth_ = wide_ ? Depth::kGiven : Depth::kNarrow;
    row_step_ = call_.q_scale.stride[2] ? 1 : 0;
    for (int r = 0; r < (row_step_ ? rows_ : 1); ++r) {
      exponent_[r] = exponent_at(r, 0);
      scale_[r] = call_.method == Method::kOnline ? row_scale<true>(exponent_[r]) : row_scale(exponent_[r]);
      if (scale_[r].shift && !wide_) depth_ = Depth::kShifted;
    }
    for (int r = 0; r < rows_; ++r) level_[r] = kNever, top_[r] = kAbsent, l_[r] = 0;
  }

  Exponent exponent_at(int r, int64_t key) {
    const float q = *call_.q_scale.at(b_, h_, (q0_ + row0_ + r) / call_.q_block);
    const float k = *call_.k_scale.at(b_, hk_, (k0_ + key) / call_.k_block);
    return last_.of(q, k, call_.sm_scale);
  }

  // Scores of keys [key, key + n) with absent ones marked, padded with kAbsent to a block's end; raises
  // top_ by them (narrow rows).
  void score_chunk(int64_t key, int64_t n) {
    const int panels = int((n + kLanes - 1) / kLanes);
    // Masks come after the product: then its maxima are of no use.
    typename V::I32 max[kRows];
    const bool plain = !masked_ && !wide_ && call_.method < Method::kQFlash;
    const int whole = plain ? int(n / kLanes) : 0;
    for (int r = 0; r < rows_; ++r) max[r] = V::set1(kAbsent);
    Product<V>::scores(queries_, keys_ + key * qk_steps_ * V::kGroup, qk_steps_, panels, rows_, query_offset_, scores_, score_ld_,
                       max, whole);
    const int64_t pad = round_up(n, kKeyPad);
    for (int r = 0; r < rows_; ++r) {
      int32_t* s = scores_ + r * score_ld_;
      const int64_t present = causal_keys(r, key, n);
      for (int64_t j = present / kLanes * kLanes; j < pad; j += kLanes) V::store(s + j, V::first(V::load(s + j), larger<int64_t>(0, present - j)));
      if (call_.keep.data) mark_absent(call_.keep, call_.keep_batch, r, key, present, s, uint8_t(0));
      if (call_.bias.data) mark_absent(call_.bias, call_.bias_batch, r, key, present, s, kAbsent);
    }
    V::stay_awake();
    if (!wide_ && call_.method < Method::kQFlash) raise_tops(max, int64_t(whole) * kLanes, n);
  }

  int64_t exponent_of(int r, int32_t score) const {
    const Exponent e = exponent_[r * row_step_];
    return score * (int64_t(1) << e.k) * e.c;
  }

  // T of every key of a chunk's row, given to f(j, T), by the 64-bit formula; for a bias or per-block K scales.
  template <bool Online, class F>
  void for_each_exponent(int r, int64_t key, int64_t n, const int32_t* s, F f) {
    const int32_t* bias = call_.bias.data ? mask_row(call_.bias, call_.bias_batch, r, key) : nullptr;
    const int64_t step = call_.bias.stride[3], bias_step = (Online ? kTableSteps : kOctaves).bias_step();
    for (int64_t j = 0; j < n;) {
      int64_t end = n;
      Exponent e = exponent_[r * row_step_];
      if (call_.k_scale.stride[2]) {
        e = exponent_at(r, key + j);
        end = smaller(n, ((k0_ + key + j) / call_.k_block + 1) * call_.k_block - k0_ - key);
      }
      const int64_t c = e.c, unit = int64_t(1) << e.k;
      if (!bias)
        for (; j < end; ++j) f(j, wrapping_multiply(s[j] * unit, c));  // wraps for absent keys only
      else
        for (; j < end; ++j) f(j, wrapping_add(wrapping_multiply(s[j] * unit, c), bias[j * step] * bias_step));
    }
  }

  // Raises top_ by `max` and the chunk's scores [from, n).
  void raise_tops(typename V::I32* max, int64_t from, int64_t n) {
    for (int r = 0; r < rows_; ++r) {
      const int32_t* s = scores_ + r * score_ld_;
      for (int64_t j = from; j < n; j += kLanes) max[r] = V::max(max[r], V::load(s + j));
    }
    int32_t top[kRows];
    for (int r = 0; r < rows_; r += 16) V::reduce_max(max + r, top + r);
    for (int r = 0; r < rows_; ++r) top_[r] = larger(top_[r], top[r]);
  }

  // Maximum of T over the chunk's keys (wide rows); kNever without keys.
  template <bool Online>
  int64_t wide_max(int r, int64_t key, int64_t n) {
    const int32_t* s = scores_ + r * score_ld_;
    int64_t m = kNever;
    for_each_exponent<Online>(r, key, n, s, [&](int64_t j, int64_t t) { m = larger(m, s[j] == kAbsent ? kNever : t); });
    return m;
  }

  // Biased rows by 32-bit levels, where all of their keys [0, n) are here and those hold T: the rows' level_.
  __attribute__((noinline)) bool short_levels(int64_t n) {
    bool fit = call_.bias.data && !call_.k_scale.stride[2];
    for (int r = 0; fit && r < rows_; ++r)
      fit = has_24_fraction_bits(exponent_[r * row_step_]) && short_row(r, 0).level(scores_ + r * score_ld_, n, level_[r]);
    for (int r = 0; !fit && r < rows_; ++r) level_[r] = kNever;
    return fit;
  }
  ShortRow short_row(int r, int64_t key) const {
    return {mask_row(call_.bias, call_.bias_batch, r, key), call_.bias.stride[3], exponent_[r * row_step_].c >> 8};
  }

  int64_t narrow_max(int r) const { return top_[r] == kAbsent ? kNever : exponent_of(r, top_[r]); }

  // Overwrites scores [at, at + n) of a wide row, of the chunk at `key`, with their depths below level_.
  template <bool Online>
  __attribute__((noinline)) void depths_in_place(int r, int64_t key, int64_t at, int64_t n) {
    int32_t* s = scores_ + r * score_ld_ + at;
    const int64_t level = level_[r] + (Online ? kStepOffset : 0);
    if (!Online && short_)
      short_row(r, at).depths(s, n, level);
    else
      for_each_exponent<Online>(r, key + at, n, s, [&](int64_t j, int64_t t) {
        const int64_t x = smaller<int64_t>(int64_t(uint64_t(level) - uint64_t(t)) >> (32 - kDepthBits<Online>), 65535);
        s[j] = s[j] == kAbsent ? 65535 : int32_t(x);
      });
    for (int64_t j = n; j < round_up(n, kBlock); ++j) s[j] = 65535;
  }

  // P of scores [at, at + n) of the chunk at `key`, their sum, and acc (+)= P V. P (its high digits) takes the
  // place of the scores it was made from, which are in L1: a block's P is never longer than the scores read.
  template <bool P16, bool Online>
  void accumulate(int64_t key, int64_t at, int64_t n, bool fresh) {
    typename V::I32 sums[kRows];
    uint64_t base[kRows];
    for (int r = 0; r < rows_; ++r) {
      sums[r] = V::set1(0);
      if (Online && !wide_) base[r] = scaled_base(top_[r] == kAbsent ? 0 : level_[r] - exponent_of(r, top_[r]));
      if (wide_) depths_in_place<Online>(r, key, at, n);
    }
    V::stay_awake();
    const RowLevels levels = {scale_, row_step_, top_, base};
    PCode* p = reinterpret_cast<PCode*>(scores_ + at);
    const int64_t p_ld = score_ld_ * int64_t(sizeof(int32_t) / sizeof(PCode));
    Exp2<V>::template rows<P16, Online>(depth_, masked_, scores_ + at, score_ld_, n, levels, rows_, p, p_ld, p_low_, p_ld_, sums);
    uint32_t l[kRows];
    for (int r = 0; r < rows_; r += 16) V::reduce_add(sums + r, l + r);
    for (int r = 0; r < rows_; ++r) l_[r] += l[r];
    const int64_t pad = round_up(nk_, kKeyPad);
    const Code* v = values_ + (key + at) * kLanes;
    if constexpr (P16 && V::kWideP) {
      for (int r = 0; r < rows_; ++r) l_[r] += uint32_t(round_up(n, kBlock)) << 15;
      const int64_t summed = key + at + n == nk_ ? n : round_up(n, kBlock);  // absent keys too, where V has them
      Product<V>::values(p, p_ld, v, pad * kLanes, summed, int(value_pad_ / kLanes), rows_, stage_, value_pad_, false);
      return add_stage(key + at, n, fresh);
    }
    Product<V>::values(p, p_ld, v, pad * kLanes, n, int(value_pad_ / kLanes), rows_, acc_, value_pad_, !fresh);
    if (P16) Product<V>::values(p_low_, p_ld_, v, pad * kLanes, n, int(value_pad_ / kLanes), rows_, acc_low_, value_pad_, !fresh);
  }

  // acc (+)= the P V of keys [key, key + n) from that of p - 32768.
  void add_stage(int64_t key, int64_t n, bool fresh) {
    int32_t whole[kMaxValueDim + kLanes];  // 32768 times V's column sums
    for (int64_t d = 0; d < value_pad_; ++d) whole[d] = 0;
    for (int64_t tile = key / kFlashTile; tile * kFlashTile < smaller(nk_, key + round_up(n, kBlock)); ++tile)
      for (int64_t d = 0; d < value_pad_; ++d) whole[d] += column_sums_[tile * value_pad_ + d] * 32768;
    for (int r = 0; r < rows_; ++r)
      for (int64_t d = 0; d < value_pad_; ++d) {
        const int64_t i = r * value_pad_ + d;
        const int32_t sum = wrapping_add(stage_[i], whole[d]);
        acc_[i] = (fresh ? 0 : acc_[i]) + (sum >> 8);
        acc_low_[i] = (fresh ? 0 : acc_low_[i]) + (sum & 255);
      }
  }

  void rows() {
    switch (call_.method) {
      case Method::kP16: exact<true>(); break;
      case Method::kP8: exact<false>(); break;
      case Method::kOnline: online(); break;
      case Method::kQFlash: flash<false>(); break;
      case Method::kIFlash: flash<true>(); break;
    }
  }

  template <bool P16>
  void exact() {
    if constexpr (V::kMatrixUnit)
      if (are_long<P16>()) return long_rows<P16>();
    const bool resident = key_end_ <= chunk_;
    for (int64_t key = 0; key < key_end_; key += chunk_) {
      const int64_t n = smaller(chunk_, key_end_ - key);
      score_chunk(key, n);
      short_ = wide_ && resident && short_levels(n);
      for (int r = 0; wide_ && !short_ && r < rows_; ++r) level_[r] = larger(level_[r], wide_max<false>(r, key, n));
    }
    for (int64_t key = 0; key < key_end_; key += chunk_) {
      const int64_t n = smaller(chunk_, key_end_ - key);
      if (!resident) score_chunk(key, n);
      for (int64_t at = 0; at < n; at += stage_keys_)
        accumulate<P16, false>(key, at, smaller(stage_keys_, n - at), key + at == 0);
    }
    finish<P16>();
  }

  // Rows that leave the scratch for scores to others.
  template <bool P16>
  bool are_long() const {
    using Long = LongRows<V, P16, P16 ? 8 : 1>;
    constexpr int most = Long::kMaxChannels;
    static_assert(Long::kBytes <= 4 * kRows * kLongRow<P16>, "what it needs fits where scores would be");
    return !masked_ && !wide_ && !row_step_ && key_end_ == nk_ && nk_ >= kLongRow<P16> && rows_ > kFewRows &&
           call_.head_dim <= most && call_.value_dim <= most;
  }

  template <bool P16>
  void long_rows() {
    if constexpr (!P16)
      long_rows<P16, 1>();
    else if (nk_ < kLongStages)
      long_rows<P16, 4>();
    else
      long_rows<P16, 8>();
  }
  template <bool P16, int Stage>
  void long_rows() {
    LongRows<V, P16, Stage>::run({queries_, keys_, values_, round_up(nk_, kKeyPad) * kLanes, nk_, rows_, int(value_pad_ / kLanes), scale_[0], depth_,
                           reinterpret_cast<char*>(scores_), top_, acc_, acc_low_, l_, value_pad_});
    finish<P16>();
  }

  void online() {
    constexpr int64_t octave = kTableSteps.octave();
    clear(acc_, rows_ * value_pad_);
    for (int64_t key = 0; key < key_end_; key += kGranule) {
      const int64_t n = smaller<int64_t>(kGranule, key_end_ - key);
      for (int r = 0; r < rows_; ++r) top_[r] = kAbsent;
      score_chunk(key, n);
      for (int r = 0; r < rows_; ++r) {
        const int64_t m = wide_ ? wide_max<true>(r, key, n) : narrow_max(r);
        const int64_t before = level_[r];
        if (m <= before) continue;  // without keys too
        level_[r] = (m / octave + (m % octave > 0)) * octave;
        if (before == kNever) continue;
        const int64_t rise = smaller<int64_t>((level_[r] - before) / octave, 31);
        l_[r] >>= rise;
        for (int64_t d = 0; d < value_pad_; ++d) acc_[r * value_pad_ + d] >>= rise;
      }
      accumulate<false, true>(key, 0, n, false);
    }
    finish<false>();
  }

  // qflash and iflash: docs/numerics.md section 3; registers of 32 bits wrap.
  template <bool Divide>
  void flash() {
    const FlashStep<Divide> step(call_, b_, h_, hk_);
    clear(acc_, rows_ * value_pad_);
    int32_t m[kRows], l[kRows];
    for (int r = 0; r < rows_; ++r) m[r] = kFlashMasked, l[r] = 1;
    for (int64_t key = 0; key < nk_; key += kStageKeys) {
      const int64_t n = smaller(kStageKeys, nk_ - key);
      score_chunk(key, n);
      for (int64_t at = 0; at < n; at += kFlashTile) {
        for (int r = 0; r < rows_; ++r) {
          int32_t* s = scores_ + r * score_ld_ + at;
          const int32_t* bias = call_.bias.data ? mask_row(call_.bias, call_.bias_batch, r, key + at) : nullptr;
          step.scores(s, bias, call_.bias.stride[3], smaller<int64_t>(kFlashTile, n - at));
          step.probabilities(s, m[r], l[r], acc_ + r * value_pad_, value_pad_, p_ + r * p_ld_);
        }
        Product<V>::natural_values(p_, p_ld_, values_ + (key + at) * kLanes, round_up(nk_, kKeyPad) * kLanes, kFlashTile,
                                   int(value_pad_ / kLanes), rows_, acc_low_, value_pad_);
        const int32_t* sums = column_sums_ + (key + at) / kFlashTile * value_pad_;
        for (int r = 0; r < rows_; ++r)
          for (int64_t d = 0; d < value_pad_; ++d)  // p was stored as p + 128
            acc_[r * value_pad_ + d] = wrapping_add(acc_[r * value_pad_ + d], acc_low_[r * value_pad_ + d] - 128 * sums[d]);
      }
    }
    epilogue_.enter_head(b_, h_, hk_);
    for (int r = 0; r < rows_; ++r) {
      const int64_t row = first_row() + r;
      step.divide(acc_ + r * value_pad_, l[r], call_.value_dim);
      epilogue_.codes_row(acc_ + r * value_pad_, call_.out.offset(b_, h_, q0_ + row0_ + r));
      if (call_.t_max) call_.t_max[row] = m[r], call_.l_sum[row] = l[r];
    }
  }

  static void clear(int32_t* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = 0;
  }

  template <bool P16>
  void finish() {
    const int64_t first = first_row();
    V::stay_awake();
    if (key_end_ == 0) clear(acc_, rows_ * value_pad_);
    if (key_end_ == 0 && P16) clear(acc_low_, rows_ * value_pad_);
    epilogue_.enter_head(b_, h_, hk_);
    epilogue_.template rows<P16>(acc_, acc_low_, value_pad_, l_, rows_, call_.out.offset(b_, h_, q0_ + row0_));
    V::stay_awake();
    for (int r = 0; call_.t_max && r < rows_; ++r) {
      call_.t_max[first + r] = t_max(r);
      call_.l_sum[first + r] = l_[r];
    }
  }

  // In 2^-32 octave.
  int64_t t_max(int r) const {
    if (call_.method == Method::kOnline) return level_[r] == kNever ? kNever : level_[r] / kTableSteps.sixteenths * 16;
    return wide_ ? level_[r] : narrow_max(r);
  }
};

}  // namespace
}  // namespace intflash
