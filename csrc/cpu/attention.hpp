// The attention kernel, written once over a vector layer V (isa/*.hpp) and compiled per instruction set.
//
// A unit of work is up to V::kMaxRows query rows of one head. K and V are packed once per head and thread into panels
// of kLanes columns, whose depth runs in steps of 32 bits. So Q K^T and P V are the same product: out[r][c] = sum over
// steps of dot(a[r][step], panel[step][c]). The first pass finds the row maxima, the second computes P and P V. The
// scores stay in the scratch between the passes where they fit, else the second pass computes them again.
#pragma once
#include <utility>

#include "cpu/arithmetic.hpp"
#include "cpu/bias_mask.hpp"
#include "cpu/block_float.hpp"
#include "cpu/block_position.hpp"
#include "cpu/epilogue.hpp"
#include "cpu/exp2.hpp"
#include "cpu/long_rows.hpp"
#include "cpu/pack.hpp"
#include "cpu/product.hpp"
#include "cpu/qflash.hpp"

namespace intflash {
namespace {

template <bool P16>
constexpr int64_t kLongRow = P16 ? 1024 : 257;  // LongRows is faster from so many keys on
constexpr int64_t kLongStages = 2048;           // P16 is faster with 8 chunks a stage from so many keys on
constexpr int kFewRows = 8;  // LongRows computes whole tiles of rows, so that fewer rows are left to this kernel

// Memory of a head and of a unit of rows in a thread's scratch.
constexpr int64_t kStageKeys = 512;      // number of keys whose P is held at a time
constexpr int64_t kWideStageKeys = 256;  // the same for P16 in one plane: 127 * 65,193 * 256 < 2^31

template <class V>
struct Buffers {
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  static constexpr int kRows = V::kMaxRows, kLanes = V::kLanes, kBlock = 4 * V::kLanes;
  static constexpr int kKeyPad = kBlock < kQFlashTile ? kQFlashTile : kBlock;

  Code *keys_, *values_, *queries_;
  int32_t *scores_, *acc_, *acc_low_, *column_sums_, *stage_, *other_scores_;
  int64_t* wide_acc_;
  uint8_t* valueless_;
  PCode *p_, *p_low_;
  int64_t score_ld_, p_ld_, value_pad_, chunk_, stage_keys_;
  int qk_steps_;

  Buffers(const Call& call, Scratch& scratch) {
    const int64_t key_pad = round_up(larger<int64_t>(call.nk, 1), kKeyPad);
    value_pad_ = round_up(call.value_dim, kLanes);
    qk_steps_ = V::depth_steps(call.head_dim);
    chunk_ = smaller(key_pad, round_up(V::kScoreBytes / (4 * kRows), kStageKeys));
    const bool block_float = call.method == Method::kBlockFloat, p16 = has_p16(call.method);
    const bool some_are_one_block = block_float && (call.nk <= kOneBlock || call.ends_q);
    if (call.method == Method::kOnline || block_float)
      chunk_ = smaller<int64_t>(key_pad, some_are_one_block ? round_up(kOneBlock, kKeyPad) : kGranule);
    if (call.method >= Method::kQFlash) chunk_ = smaller(key_pad, kStageKeys);
    score_ld_ = chunk_ + 16;  // not a multiple of 4 KiB, whose rows would share a cache set
    p_ld_ = smaller(chunk_, kStageKeys) + 64 / int64_t(sizeof(PCode));
    const bool wide_p = V::kWideP && p16;
    stage_keys_ = wide_p ? kWideStageKeys : kStageKeys;
    int64_t size[13] = {
        key_pad * qk_steps_ * V::kGroup * int64_t(sizeof(Code)),
        key_pad * value_pad_ * int64_t(sizeof(Code)),
        kRows * qk_steps_ * V::kGroup * int64_t(sizeof(Code)),
        kRows * score_ld_ * 4,
        kRows * value_pad_ * 4,
        call.method == Method::kP8 ? 0 : kRows * value_pad_ * 4,
        call.method >= Method::kQFlash || wide_p ? key_pad / kQFlashTile * value_pad_ * 4 : 0,
        call.method >= Method::kQFlash ? kRows * p_ld_ * int64_t(sizeof(PCode)) : 0,
        p16 && !wide_p ? kRows * p_ld_ * int64_t(sizeof(PCode)) : 0,
        wide_p || block_float ? kRows * value_pad_ * 4 : 0,
        block_float ? kRows * score_ld_ * 4 : 0,
        block_float ? kRows * value_pad_ * 8 : 0,
        block_float ? key_pad : 0,
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
    other_scores_ = reinterpret_cast<int32_t*>(base + size[10]);
    wide_acc_ = reinterpret_cast<int64_t*>(base + size[11]);
    valueless_ = reinterpret_cast<uint8_t*>(base + size[12]);
  }
};

template <class V>
class Attention : Buffers<V>, BlockPosition<V::kMaxRows, V::kMatrixUnit> {
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  using B = Buffers<V>;
  using P = BlockPosition<V::kMaxRows, V::kMatrixUnit>;
  using B::keys_, B::values_, B::queries_, B::scores_, B::acc_, B::acc_low_, B::column_sums_, B::stage_, B::p_,
      B::p_low_, B::other_scores_, B::wide_acc_, B::valueless_;
  using B::kRows, B::kLanes, B::kBlock, B::kKeyPad;
  using B::score_ld_, B::p_ld_, B::value_pad_, B::chunk_, B::stage_keys_, B::qk_steps_;
  using P::call_, P::b_, P::h_, P::hk_, P::q0_, P::k0_, P::nk_, P::row0_, P::rows_, P::key_begin_, P::key_end_,
      P::masked_;
  using P::enter_block, P::causal_keys, P::keys_before_window, P::mask_row, P::mark_absent, P::first_row;

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
  // State of the unit's rows. Biased rows have a bias or K scales per block, so that T is computed for each key; the
  // maximum of T of the other rows follows from that of their scores.
  bool biased_, by_levels32_;
  int32_t query_offset_[kRows];  // initial value of each score, which cancels the offset of unsigned keys
  Exponent exponent_[kRows];
  RowScale scale_[kRows];
  int row_step_;  // 0 where the rows share the first exponent and scale
  Depth depth_;
  CachedExponent cached_exponent_;  // in the method's unit
  Epilogue<V> epilogue_;
  int64_t level_[kRows];    // biased rows: the maximum of T; intflash_online, intflash_bfp: the octave in T
  int32_t row_max_[kRows];  // unbiased rows: the maximum of S
  uint32_t l_[kRows];
  bool has_octaves_ = false;  // intflash_bfp: whether block_float_ has the octaves of the unit's rows
  BlockFloatRow block_float_[kRows];
  int gap_[kRows];
  int up_[kRows];  // octaves by which the sums of a block are shifted to the unit of a row's pending ones

  Attention(const Call& call, uint64_t call_id, Scratch& scratch)
      : B(call, scratch), P(call), call_id_(call_id), scratch_(scratch), epilogue_(call) {
    if (call.method == Method::kOnline) cached_exponent_.unit = kTableSteps;
  }

  void enter_head(int64_t head) {
    if (scratch_.call_id == call_id_ && scratch_.packed_head == head) return;
    scratch_.call_id = call_id_;
    scratch_.packed_head = head;
    const int64_t pad = round_up(nk_, kKeyPad);
    Pack<V>::keys(call_.k.at(b_, hk_, k0_), call_.k.stride[2], call_.k.stride[3], nk_, call_.head_dim, qk_steps_,
                  keys_);
    V::keep_awake();
    const bool in_key_order = call_.method >= Method::kQFlash;
    Pack<V>::values(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, pad, call_.value_dim,
                    in_key_order, values_);
    V::keep_awake();
    if (call_.method == Method::kBlockFloat && !call_.all_have_values)
      find_valueless(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, call_.value_dim, valueless_);
    if (in_key_order || (V::kWideP && has_p16(call_.method)))
      column_sums(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, call_.value_dim, value_pad_,
                  column_sums_);
  }

  void enter_rows(int64_t block) {
    enter_block(block);
    biased_ = call_.bias.data || call_.k_scale.stride[2], by_levels32_ = false;
    has_octaves_ = call_.method == Method::kBlockFloat &&
                   (nk_ > kOneBlock || (!call_.all_have_values && has_valueless(valueless_, nk_)));
    Pack<V>::queries(call_.q.at(b_, h_, q0_ + row0_), call_.q.stride[2], call_.q.stride[3], rows_, call_.head_dim,
                     qk_steps_, queries_, query_offset_);
    V::keep_awake();
    depth_ = biased_ ? Depth::kGiven : Depth::k32Bit;
    row_step_ = call_.q_scale.stride[2] ? 1 : 0;
    for (int r = 0; r < (row_step_ ? rows_ : 1); ++r) {
      exponent_[r] = exponent_at(r, 0);
      scale_[r] =
          call_.method == Method::kOnline ? row_scale<Level::kTableOctave>(exponent_[r]) : row_scale(exponent_[r]);
      if (scale_[r].shift && !biased_) depth_ = Depth::kShifted;
    }
    for (int r = 0; r < rows_; ++r) level_[r] = kNever, row_max_[r] = kAbsent, l_[r] = 0;
  }

  Exponent exponent_at(int r, int64_t key) {
    const float q = *call_.q_scale.at(b_, h_, (q0_ + row0_ + r) / call_.q_block);
    const float k = *call_.k_scale.at(b_, hk_, (k0_ + key) / call_.k_block);
    return cached_exponent_.of(q, k, call_.sm_scale);
  }

  // Computes the scores of keys [key, key + n), marks absent keys and pads with kAbsent to the end of a block. Updates
  // row_max_ of unbiased rows, unless the caller finds their maxima itself.
  void score_chunk(int64_t key, int64_t n, bool finds_max = true) {
    const int panels = int((n + kLanes - 1) / kLanes);
    // Where masks follow, the maxima that the product finds are of no use.
    typename V::I32 max[kRows];
    const bool plain = !masked_ && !biased_ && call_.method < Method::kQFlash;
    const int whole = plain ? int(n / kLanes) : 0;
    for (int r = 0; r < rows_; ++r) max[r] = V::set1(kAbsent);
    Product<V>::scores(queries_, keys_ + key * qk_steps_ * V::kGroup, qk_steps_, panels, rows_, query_offset_, scores_,
                       score_ld_, max, whole);
    const int64_t pad = round_up(n, kKeyPad);
    for (int r = 0; r < rows_; ++r) {
      int32_t* s = scores_ + r * score_ld_;
      const int64_t present = causal_keys(r, key, n);
      for (int64_t j = present / kLanes * kLanes; j < pad; j += kLanes)
        V::store(s + j, V::first(V::load(s + j), larger<int64_t>(0, present - j)));
      for (int64_t j = 0, before = keys_before_window(r, key, n); j < before; ++j) s[j] = kAbsent;
      if (call_.keep.data) mark_absent(call_.keep, call_.keep_batch, r, key, present, s, uint8_t(0));
      if (call_.bias.data) mark_absent(call_.bias, call_.bias_batch, r, key, present, s, kAbsent);
    }
    V::keep_awake();
    if (finds_max && !biased_ && call_.method < Method::kQFlash) update_row_max(max, int64_t(whole) * kLanes, n);
  }

  int64_t exponent_of(int r, int32_t score) const {
    const Exponent e = exponent_[r * row_step_];
    return score * (int64_t(1) << e.k) * e.c;
  }

  // Calls f(j, T) for every key j of a row of the chunk at `key`, with T by the 64-bit formula.
  template <Level L, class F>
  void for_each_exponent(int r, int64_t key, int64_t n, const int32_t* s, F f) {
    const int32_t* bias = call_.bias.data ? mask_row(call_.bias, call_.bias_batch, r, key) : nullptr;
    constexpr ScoreUnit unit_of_t = L == Level::kTableOctave ? kTableSteps : kOctaves;
    const int bits = call_.bias_fraction_bits;
    const int64_t step = call_.bias.stride[3];
    for (int64_t j = 0; j < n;) {
      int64_t end = n;
      Exponent e = exponent_[r * row_step_];
      if (call_.k_scale.stride[2]) {
        e = exponent_at(r, key + j);
        end = smaller(n, ((k0_ + key + j) / call_.k_block + 1) * call_.k_block - k0_ - key);
      }
      const int64_t c = e.c, unit = int64_t(1) << e.k;
      if (!bias)
        for (; j < end; ++j) f(j, wrapping_multiply(s[j] * unit, c));  // only the product of an absent key wraps
      else
        for (; j < end; ++j)
          f(j, wrapping_add(wrapping_multiply(s[j] * unit, c), unit_of_t.bias(bias[j * step], bits)));
    }
  }

  // Updates row_max_ with `max` and the chunk's scores [from, n).
  void update_row_max(typename V::I32* max, int64_t from, int64_t n) {
    for (int r = 0; r < rows_; ++r) {
      const int32_t* s = scores_ + r * score_ld_;
      for (int64_t j = from; j < n; j += kLanes) max[r] = V::max(max[r], V::load(s + j));
    }
    int32_t top[kRows];
    for (int r = 0; r < rows_; r += 16) V::reduce_max(max + r, top + r);
    for (int r = 0; r < rows_; ++r) row_max_[r] = larger(row_max_[r], top[r]);
  }

  // Returns the maximum of T over scores [at, at + n) of a biased row of the chunk at `key`, kNever without keys.
  template <Level L>
  int64_t biased_max(int r, int64_t key, int64_t at, int64_t n) {
    const int32_t* s = scores_ + r * score_ld_ + at;
    int64_t m = kNever;
    for_each_exponent<L>(r, key + at, n, s, [&](int64_t j, int64_t t) { m = larger(m, s[j] == kAbsent ? kNever : t); });
    return m;
  }

  // Finds level_ of biased rows in 32 bits, where all of their keys [key, key + n) are in the chunk and 32 bits hold T.
  __attribute__((noinline)) bool levels32(int64_t key, int64_t n) {
    bool fit = call_.bias.data && !call_.k_scale.stride[2];
    for (int r = 0; fit && r < rows_; ++r)
      fit = has_24_fraction_bits(exponent_[r * row_step_]) &&
            level32_row(r, key).level(scores_ + r * score_ld_, n, level_[r]);
    for (int r = 0; !fit && r < rows_; ++r) level_[r] = kNever;
    return fit;
  }
  Level32Row level32_row(int r, int64_t key) const {
    return {mask_row(call_.bias, call_.bias_batch, r, key), call_.bias.stride[3], exponent_[r * row_step_].c >> 8,
            bias_shift(call_)};
  }

  int64_t unbiased_max(int r) const { return row_max_[r] == kAbsent ? kNever : exponent_of(r, row_max_[r]); }

  // Overwrites scores [at, at + n) of a biased row of the chunk at `key` with their depths below level_.
  template <Level L>
  __attribute__((noinline)) void depths_in_place(int r, int64_t key, int64_t at, int64_t n) {
    int32_t* s = scores_ + r * score_ld_ + at;
    const int64_t level = level_[r] + (L == Level::kTableOctave ? kStepOffset : 0);
    if (!kIsAboveMaximum<L> && by_levels32_)
      level32_row(r, key + at).depths(s, n, level);
    else
      for_each_exponent<L>(r, key + at, n, s, [&](int64_t j, int64_t t) {
        const int64_t x = smaller<int64_t>(int64_t(uint64_t(level) - uint64_t(t)) >> (32 - kDepthBits<L>), 65535);
        s[j] = s[j] == kAbsent ? 65535 : int32_t(x);
      });
    for (int64_t j = n; j < round_up(n, kBlock); ++j) s[j] = 65535;
  }

  // Computes P of scores [at, at + n) of the chunk at `key` and its sums. P (its high digits) takes the place of the
  // scores, which are in L1; it is never longer than they are.
  template <bool P16, Level L>
  void weights(int64_t key, int64_t at, int64_t n, uint32_t* l) {
    typename V::I32 sums[kRows];
    uint64_t base[kRows];
    for (int r = 0; r < rows_; ++r) {
      sums[r] = V::set1(0);
      if (kIsAboveMaximum<L> && !biased_)
        base[r] = scaled_base<L>(row_max_[r] == kAbsent ? 0 : level_[r] - exponent_of(r, row_max_[r]));
      if (biased_) depths_in_place<L>(r, key, at, n);
    }
    V::keep_awake();
    const RowLevels levels = {scale_, row_step_, row_max_, base};
    Exp2<V>::template rows<P16, L>(depth_, masked_, scores_ + at, score_ld_, n, levels, rows_, p_of(at), p_ld_of_rows(),
                                   p_low_, p_ld_, sums);
    for (int r = 0; r < rows_; r += 16) V::reduce_add(sums + r, l + r);
    if (P16 && V::kWideP)
      for (int r = 0; r < rows_; ++r) l[r] += uint32_t(round_up(n, kBlock)) << 15;
  }
  PCode* p_of(int64_t at) const { return reinterpret_cast<PCode*>(scores_ + at); }
  int64_t p_ld_of_rows() const { return score_ld_ * int64_t(sizeof(int32_t) / sizeof(PCode)); }

  // Computes P of scores [at, at + n) of the chunk at `key` and adds its sum to l_ and P V to acc_ (a `fresh` acc_ is
  // overwritten).
  template <bool P16, Level L>
  void accumulate(int64_t key, int64_t at, int64_t n, bool fresh) {
    uint32_t l[kRows];
    weights<P16, L>(key, at, n, l);
    for (int r = 0; r < rows_; ++r) l_[r] += l[r];
    products<P16>(key + at, at, n, fresh);
  }

  // Adds P V of keys [key, key + n), whose P is that of the scores from `at` on, to acc_. Floored: floor(P16 V / 2^8)
  // in the unit of each row's pending sums, to the high digits alone.
  template <bool P16, bool Floored = false>
  void products(int64_t key, int64_t at, int64_t n, bool fresh) {
    const PCode* p = p_of(at);
    const Code* v = values_ + key * kLanes;
    const int64_t p_ld = p_ld_of_rows(), v_ld = round_up(nk_, kKeyPad) * kLanes;
    const int panels = int(value_pad_ / kLanes);
    if constexpr (P16 && V::kWideP) {
      const int64_t summed = key + n == nk_ ? n : round_up(n, kBlock);  // V has these absent keys too
      Product<V>::values(p, p_ld, v, v_ld, summed, panels, rows_, stage_, value_pad_, false);
      return add_stage<Floored>(key, n, fresh);
    }
    Product<V>::values(p, p_ld, v, v_ld, n, panels, rows_, Floored ? stage_ : acc_, value_pad_, !fresh && !Floored);
    if (P16) Product<V>::values(p_low_, p_ld_, v, v_ld, n, panels, rows_, acc_low_, value_pad_, !fresh && !Floored);
    for (int r = 0; Floored && r < rows_; ++r) {
      const int64_t row = r * value_pad_;
      add_floored(stage_ + row, acc_low_ + row, value_pad_, up_[r], acc_ + row);
    }
  }

  // Adds P V of keys [key, key + n), computed from p - 32768, to acc_.
  template <bool Floored>
  void add_stage(int64_t key, int64_t n, bool fresh) {
    int32_t whole[kMaxValueDim + kLanes];  // 32768 times V's column sums
    for (int64_t d = 0; d < value_pad_; ++d) whole[d] = 0;
    for (int64_t tile = key / kQFlashTile; tile * kQFlashTile < smaller(nk_, key + round_up(n, kBlock)); ++tile)
      for (int64_t d = 0; d < value_pad_; ++d) whole[d] += column_sums_[tile * value_pad_ + d] * 32768;
    for (int r = 0; r < rows_; ++r) {
      const int factor = 1 << (Floored ? up_[r] : 0);
      for (int64_t d = 0; d < value_pad_; ++d) {
        const int64_t i = r * value_pad_ + d;
        const int32_t sum = wrapping_add(stage_[i], whole[d]);
        acc_[i] = (fresh ? 0 : acc_[i]) + (sum >> 8) * factor;
        if (!Floored) acc_low_[i] = (fresh ? 0 : acc_low_[i]) + (sum & 255);
      }
    }
  }

  void rows() {
    switch (call_.method) {
      case Method::kP16: exact<true>(); break;
      case Method::kP8: exact<false>(); break;
      case Method::kOnline: online(); break;
      case Method::kBlockFloat: has_octaves_ ? block_float() : exact<true, Level::kOneBlock>(); break;
      case Method::kQFlash: flash<false>(); break;
      case Method::kIFlash: flash<true>(); break;
    }
  }

  template <bool P16, Level L = Level::kMaximum>
  void exact() {
    if constexpr (V::kMatrixUnit && L == Level::kMaximum)
      if (are_long_rows<P16>()) return long_rows<P16>();
    const bool resident = key_end_ - key_begin_ <= chunk_;
    for (int64_t key = key_begin_; key < key_end_; key += chunk_) {
      const int64_t n = smaller(chunk_, key_end_ - key);
      score_chunk(key, n);
      by_levels32_ = biased_ && resident && levels32(key, n);
      for (int r = 0; biased_ && !by_levels32_ && r < rows_; ++r)
        level_[r] = larger(level_[r], biased_max<L>(r, key, 0, n));
    }
    for (int64_t key = key_begin_; key < key_end_; key += chunk_) {
      const int64_t n = smaller(chunk_, key_end_ - key);
      if (!resident) score_chunk(key, n);
      for (int64_t at = 0; at < n; at += stage_keys_)
        accumulate<P16, L>(key, at, smaller(stage_keys_, n - at), key + at == key_begin_);
    }
    finish<P16>();
  }

  // Whether LongRows serves these rows, in the memory of the scores.
  template <bool P16>
  bool are_long_rows() const {
    using Long = LongRows<V, P16, P16 ? 8 : 1>;
    constexpr int most = Long::kMaxChannels;
    static_assert(Long::kBytes <= 4 * kRows * kLongRow<P16>, "what it needs fits where scores would be");
    return !masked_ && !biased_ && !row_step_ && key_begin_ == 0 && key_end_ == nk_ && nk_ >= kLongRow<P16> &&
           rows_ > kFewRows && call_.head_dim <= most && call_.value_dim <= most;
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
    LongRows<V, P16, Stage>::run({queries_, keys_, values_, round_up(nk_, kKeyPad) * kLanes, nk_, rows_,
                                  int(value_pad_ / kLanes), scale_[0], depth_, reinterpret_cast<char*>(scores_),
                                  row_max_, acc_, acc_low_, l_, value_pad_});
    finish<P16>();
  }

  void online() {
    constexpr int64_t octave = kTableSteps.octave();
    clear(acc_, rows_ * value_pad_);
    for (int64_t key = key_begin_; key < key_end_; key += kGranule) {
      const int64_t n = smaller<int64_t>(kGranule, key_end_ - key);
      for (int r = 0; r < rows_; ++r) row_max_[r] = kAbsent;
      score_chunk(key, n);
      for (int r = 0; r < rows_; ++r) {
        const int64_t m = biased_ ? biased_max<Level::kTableOctave>(r, key, 0, n) : unbiased_max(r);
        const int64_t before = level_[r];
        if (m <= before) continue;  // also true of a granule without keys
        level_[r] = (m / octave + (m % octave > 0)) * octave;
        if (before == kNever) continue;
        const int64_t rise = smaller<int64_t>((level_[r] - before) / octave, 31);
        l_[r] >>= rise;
        for (int64_t d = 0; d < value_pad_; ++d) acc_[r * value_pad_ + d] >>= rise;
      }
      accumulate<false, Level::kTableOctave>(key, 0, n, false);
    }
    finish<false>();
  }

  // Computes intflash_bfp in one pass, in which a row's octaves rise. Where a row spans more octaves than its sums have
  // fraction bits, the block of rows is computed again from the octaves found, and each block of keys is merged alone.
  void block_float() {
    for (int r = 0; r < rows_; ++r) block_float_[r] = BlockFloatRow(nk_);
    if (nk_ <= kOneBlock) return one_block();
    const auto pass = [&](bool alone) {
      clear(acc_, rows_ * value_pad_);
      for (int64_t key = key_begin_; key < key_end_; key += kGranule)
        block_of_keys(key, smaller<int64_t>(kGranule, key_end_ - key), alone);
    };
    pass(false);
    bool exact = true;
    for (int r = 0; r < rows_; ++r) exact = exact && block_float_[r].is_exact();
    if (!exact) {
      for (int r = 0; r < rows_; ++r) block_float_[r].begin_again();
      pass(true);
    }
    bool gaps = false;
    for (int r = 0; r < rows_; ++r) {
      if (r % 4 == 0) V::keep_awake();
      BlockFloatRow& row = block_float_[r];
      int32_t *high = acc_ + r * value_pad_, *low = acc_low_ + r * value_pad_;
      const bool is_short = row.has_short_sums();
      if (!is_short && row.pending != kNoOctave) merge_pending(r);
      row.value_top = row.largest_of_value();
      if (is_short)
        digits_of_pending(row.pending_top - row.pending, value_pad_, high, low);
      else
        rounded_acc(wide_acc_ + r * value_pad_, value_pad_, high, low);
      l_[r] = row.rounded_l(), gap_[r] = row.gap(), gaps = gaps || gap_[r];
    }
    finish<true>(gaps ? gap_ : nullptr);
  }

  // Computes it where all keys are one block and some have no value. Depths of the others count from their maximum.
  void one_block() {
    bool some = false;
    const int64_t count = key_end_ - key_begin_;
    groups_of_keys(key_begin_, count, [&](const int* octave, bool of_value) {
      uint32_t sums[kRows] = {}, l[kRows];
      for (int64_t at = 0; of_value && at < count; at += stage_keys_) {
        const int64_t n = smaller(stage_keys_, count - at);
        weights<true, Level::kOneBlock>(key_begin_, at, n, l);
        for (int r = 0; r < rows_; ++r) sums[r] += l[r];
        products<true>(key_begin_ + at, at, n, at == 0);
      }
      if (!of_value)
        for_granules_of_others(key_begin_, count, [&](int64_t at, int64_t n) {
          weights<true, Level::kOneOctave>(key_begin_, at, n, l);
          for (int r = 0; r < rows_; ++r) sums[r] += l[r];
        });
      add_l(octave, sums);
      for (int r = 0; of_value && r < rows_; ++r) block_float_[r].value_top = octave[r];
      some = some || of_value;
    });
    if (!some) clear(acc_, rows_ * value_pad_), clear(acc_low_, rows_ * value_pad_);
    bool gaps = false;
    for (int r = 0; r < rows_; ++r)
      l_[r] = block_float_[r].rounded_l(), gap_[r] = block_float_[r].gap(), gaps = gaps || gap_[r];
    finish<true>(gaps ? gap_ : nullptr);
  }

  void merge_pending(int r) {
    int32_t* sums = acc_ + r * value_pad_;
    block_float_[r].merge(sums, wide_acc_ + r * value_pad_, value_pad_);
    clear(sums, value_pad_);
  }
  // Prepares a row's pending sums for those of a block. alone: they are never added to those of another block in 32
  // bits.
  void begin_block(int r, int octave, bool alone) {
    BlockFloatRow& row = block_float_[r];
    int rise = 0;
    up_[r] = 0;
    if (octave == kNoOctave) return;
    if (alone || !row.takes_block(octave, rise, up_[r])) {
      if (row.pending != kNoOctave) merge_pending(r);
      row.begin_pending(octave);
    } else if (rise) {
      int32_t* sums = acc_ + r * value_pad_;
      for (int64_t d = 0; d < value_pad_; ++d) sums[d] *= 1 << rise;
    }
  }

  void block_of_keys(int64_t key, int64_t n, bool alone) {
    groups_of_keys(key, n, [&](const int* octave, bool of_value) {
      for (int r = 0; of_value && r < rows_; ++r) begin_block(r, octave[r], alone);
      V::keep_awake();
      uint32_t l[kRows];
      weights<true, Level::kBlockOctave>(key, 0, n, l);
      if (of_value) products<true, true>(key, 0, n, false);
      add_l(octave, l);
    });
  }
  // Computes the scores of a block, and calls add(octaves, of_value) with those of its keys with a value, then of the
  // others, in scores_, where some row has any.
  template <class Add>
  void groups_of_keys(int64_t key, int64_t n, Add add) {
    for (int r = 0; r < rows_; ++r) row_max_[r] = kAbsent;
    const bool was_masked = masked_, split = !call_.all_have_values && has_valueless(valueless_ + key, n);
    masked_ = masked_ || split;
    score_chunk(key, n, !split);
    if (split) split_valueless(key, n);
    int octave[kRows];
    if (enter_group(key, n, true, octave)) add(octave, true);
    if (split) {
      std::swap(scores_, other_scores_);
      find_group_maxima(key, n, false);
      if (enter_group(key, n, false, octave)) add(octave, false);
      std::swap(scores_, other_scores_);
    }
    masked_ = was_masked;
  }
  void add_l(const int* octave, const uint32_t* l) {
    for (int r = 0; r < rows_; ++r)
      if (octave[r] != kNoOctave) block_float_[r].add_l(octave[r], l[r]);
  }

  // Calls f(at, count) for the granules of keys [key, key + n) that have keys without a value. Of a group of such keys
  // only these are computed.
  template <class F>
  void for_granules_of_others(int64_t key, int64_t n, F f) const {
    for (int64_t at = 0; at < n; at += kGranule) {
      const int64_t count = smaller<int64_t>(kGranule, n - at);
      if (has_valueless(valueless_ + key + at, count)) f(at, count);
    }
  }

  // Leaves the keys with a value in scores_ and moves the others to other_scores_, kAbsent in the place of each.
  void split_valueless(int64_t key, int64_t n) {
    for_granules_of_others(key, n, [&](int64_t at, int64_t count) {
      const uint8_t* valueless = valueless_ + key + at;
      for (int r = 0; r < rows_; ++r) {
        int32_t *s = scores_ + r * score_ld_ + at, *other = other_scores_ + r * score_ld_ + at;
        for (int64_t j = 0; j < count; ++j)
          other[j] = valueless[j] ? s[j] : kAbsent, s[j] = valueless[j] ? kAbsent : s[j];
        for (int64_t j = count; j < round_up(count, kKeyPad); ++j) other[j] = kAbsent;
      }
    });
    find_group_maxima(key, n, true);
  }
  void find_group_maxima(int64_t key, int64_t n, bool of_value) {
    typename V::I32 max[kRows];
    for (int r = 0; r < rows_; ++r) max[r] = V::set1(kAbsent), row_max_[r] = kAbsent;
    if (biased_) return;
    if (of_value)
      update_row_max(max, 0, n);
    else
      for_granules_of_others(key, n, [&](int64_t at, int64_t count) { update_row_max(max, at, at + count); });
  }
  int64_t biased_group_max(int r, int64_t key, int64_t n, bool of_value) {
    if (of_value) return biased_max<Level::kBlockOctave>(r, key, 0, n);
    int64_t m = kNever;
    for_granules_of_others(
        key, n, [&](int64_t at, int64_t count) { m = larger(m, biased_max<Level::kBlockOctave>(r, key, at, count)); });
    return m;
  }

  // Finds the octave of each row's largest weight in scores_ (kNoOctave without keys) and its T, level_. Returns
  // whether there are keys.
  bool enter_group(int64_t key, int64_t n, bool of_value, int* octave) {
    bool some = false;
    for (int r = 0; r < rows_; ++r) {
      const int64_t m = biased_ ? biased_group_max(r, key, n, of_value) : unbiased_max(r);
      octave[r] = m == kNever ? kNoOctave : block_float_[r].octave_of(m);
      level_[r] = m == kNever ? 0 : block_float_[r].level(octave[r]);
      some = some || m != kNever;
    }
    return some;
  }

  // Computes qflash and iflash: docs/numerics.md section 3. Integers of 32 bits wrap around.
  template <bool Divide>
  void flash() {
    const QFlashStep<Divide> step(call_, b_, h_, hk_);
    clear(acc_, rows_ * value_pad_);
    int32_t m[kRows], l[kRows];
    for (int r = 0; r < rows_; ++r) m[r] = kQFlashMasked, l[r] = 1;
    for (int64_t key = 0; key < nk_; key += kStageKeys) {
      const int64_t n = smaller(kStageKeys, nk_ - key);
      score_chunk(key, n);
      for (int64_t at = 0; at < n; at += kQFlashTile) {
        for (int r = 0; r < rows_; ++r) {
          int32_t* s = scores_ + r * score_ld_ + at;
          const int32_t* bias = call_.bias.data ? mask_row(call_.bias, call_.bias_batch, r, key + at) : nullptr;
          step.scores(s, bias, call_.bias.stride[3], smaller<int64_t>(kQFlashTile, n - at));
          step.probabilities(s, m[r], l[r], acc_ + r * value_pad_, value_pad_, p_ + r * p_ld_);
        }
        Product<V>::values_in_key_order(p_, p_ld_, values_ + (key + at) * kLanes, round_up(nk_, kKeyPad) * kLanes,
                                        kQFlashTile, int(value_pad_ / kLanes), rows_, acc_low_, value_pad_);
        const int32_t* sums = column_sums_ + (key + at) / kQFlashTile * value_pad_;
        for (int r = 0; r < rows_; ++r)
          for (int64_t d = 0; d < value_pad_; ++d)  // p was stored as p + 128
            acc_[r * value_pad_ + d] =
                wrapping_add(acc_[r * value_pad_ + d], acc_low_[r * value_pad_ + d] - 128 * sums[d]);
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

  static void add_floored(const int32_t* high, const int32_t* low, int64_t n, int up, int32_t* sum) {
    for (int64_t i = 0; i < n; ++i) sum[i] += (high[i] + (low[i] >> kAccShift)) * (1 << up);
  }

  static void clear(int32_t* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = 0;
  }

  // gaps: octaves by which a row's l counts from above its acc, or null.
  template <bool P16>
  void finish(const int* gaps = nullptr) {
    const int64_t first = first_row();
    V::keep_awake();
    const bool none = key_begin_ == key_end_;
    if (none) clear(acc_, rows_ * value_pad_);
    if (none && P16) clear(acc_low_, rows_ * value_pad_);
    epilogue_.enter_head(b_, h_, hk_);
    epilogue_.template rows<P16>(acc_, acc_low_, value_pad_, l_, rows_, call_.out.offset(b_, h_, q0_ + row0_), nullptr,
                                 gaps);
    V::keep_awake();
    for (int r = 0; call_.t_max && r < rows_; ++r) {
      call_.t_max[first + r] = t_max(r);
      call_.l_sum[first + r] = l_[r];
    }
  }

  // Returns the row's maximum of T in 2^-32 octave.
  int64_t t_max(int r) const {
    if (has_octaves_) return block_float_[r].log_sum_level();
    if (call_.method == Method::kOnline) return level_[r] == kNever ? kNever : level_[r] / kTableSteps.sixteenths * 16;
    return biased_ ? level_[r] : unbiased_max(r);
  }
};

}  // namespace
}  // namespace intflash
