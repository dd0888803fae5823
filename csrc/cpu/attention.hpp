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
#include "cpu/block_position.hpp"
#include "cpu/epilogue.hpp"
#include "cpu/exp2.hpp"
#include "cpu/long_rows.hpp"
#include "cpu/pack.hpp"
#include "cpu/product.hpp"
#include "cpu/qflash.hpp"
#include "cpu/two_groups.hpp"

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
    const bool block_float = call.method == Method::kTwoGroups, p16 = has_p16(call.method);
    if (call.method == Method::kOnline) chunk_ = smaller<int64_t>(key_pad, kGranule);
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
        wide_p ? kRows * value_pad_ * 4 : 0,
        block_float && !call.all_have_values ? kRows * score_ld_ * 4 : 0,
        block_float && call.nk > kDigitKeys ? kRows * value_pad_ * 8 : 0,
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
  int64_t level_[kRows];    // biased rows: the maximum of T; intflash_online: the octave in T
  int32_t row_max_[kRows];  // unbiased rows: the maximum of S
  uint32_t l_[kRows];
  // intflash_bfp. The keys without a value have maxima of their own, and then an octave in T.
  bool has_valueless_ = false, are_two_groups_ = false;
  int64_t other_level_[kRows];
  int32_t other_max_[kRows];
  TwoGroups groups_[kRows];
  int gap_[kRows];

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
    if (call_.method == Method::kTwoGroups && !call_.all_have_values)
      find_valueless(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, call_.value_dim, valueless_);
    if (in_key_order || (V::kWideP && has_p16(call_.method)))
      column_sums(call_.v.at(b_, hk_, k0_), call_.v.stride[2], call_.v.stride[3], nk_, call_.value_dim, value_pad_,
                  column_sums_);
  }

  void enter_rows(int64_t block) {
    enter_block(block);
    biased_ = call_.bias.data || call_.k_scale.stride[2], by_levels32_ = false;
    const bool block_float = call_.method == Method::kTwoGroups;
    has_valueless_ = block_float && !call_.all_have_values && has_valueless(valueless_, nk_);
    are_two_groups_ = has_valueless_ || (block_float && nk_ > kDigitKeys);
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
    const bool plain = finds_max && !masked_ && !biased_ && call_.method < Method::kQFlash;
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

  // Returns a maximum of T of row r from that of its scores, or from `level` where the row is biased.
  int64_t maximum_of(int r, int32_t score, int64_t level) const {
    return biased_ ? level : score == kAbsent ? kNever : exponent_of(r, score);
  }
  int64_t maximum(int r) const { return maximum_of(r, row_max_[r], level_[r]); }

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
    Exp2<V>::template rows<P16, L>(depth_, masked_, scores_ + at, score_ld_, key + at, n, levels, rows_, p_of(at),
                                   p_ld_of_rows(), p_low_, p_ld_, sums);
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

  // Adds P V of keys [key, key + n), whose P is that of the scores from `at` on, to acc_.
  template <bool P16>
  void products(int64_t key, int64_t at, int64_t n, bool fresh) {
    const PCode* p = p_of(at);
    const Code* v = values_ + key * kLanes;
    const int64_t p_ld = p_ld_of_rows(), v_ld = round_up(nk_, kKeyPad) * kLanes;
    const int panels = int(value_pad_ / kLanes);
    if constexpr (P16 && V::kWideP) {
      const int64_t summed = key + n == nk_ ? n : round_up(n, kBlock);  // V has these absent keys too
      Product<V>::values(p, p_ld, v, v_ld, summed, panels, rows_, stage_, value_pad_, false);
      return add_stage(key, n, fresh);
    }
    Product<V>::values(p, p_ld, v, v_ld, n, panels, rows_, acc_, value_pad_, !fresh);
    if (P16) Product<V>::values(p_low_, p_ld_, v, v_ld, n, panels, rows_, acc_low_, value_pad_, !fresh);
  }

  // Adds P V of keys [key, key + n), computed from p - 32768, to acc_.
  void add_stage(int64_t key, int64_t n, bool fresh) {
    int32_t whole[kMaxValueDim + kLanes];  // 32768 times V's column sums
    for (int64_t d = 0; d < value_pad_; ++d) whole[d] = 0;
    for (int64_t tile = key / kQFlashTile; tile * kQFlashTile < smaller(nk_, key + round_up(n, kBlock)); ++tile)
      for (int64_t d = 0; d < value_pad_; ++d) whole[d] += column_sums_[tile * value_pad_ + d] * 32768;
    for (int r = 0; r < rows_; ++r)
      for (int64_t d = 0; d < value_pad_; ++d) {
        const int64_t i = r * value_pad_ + d;
        const int32_t sum = wrapping_add(stage_[i], whole[d]);
        acc_[i] = (fresh ? 0 : acc_[i]) + (sum >> 8), acc_low_[i] = (fresh ? 0 : acc_low_[i]) + (sum & 255);
      }
  }

  void rows() {
    switch (call_.method) {
      case Method::kP16: exact<true>(); break;
      case Method::kP8: exact<false>(); break;
      case Method::kOnline: online(); break;
      case Method::kTwoGroups:
        nk_ <= kRoundedKeys ? one_or_two_groups<Level::kRounded, Level::kRoundedOctave>()
                            : one_or_two_groups<Level::kDithered, Level::kDitheredOctave>();
        break;
      case Method::kQFlash: flash<false>(); break;
      case Method::kIFlash: flash<true>(); break;
    }
  }

  template <bool P16, Level L = Level::kMaximum>
  void exact() {
    if constexpr (V::kMatrixUnit && L != Level::kRounded)
      if (are_long_rows<P16, L>()) return long_rows<P16, L>();
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
  template <bool P16, Level L>
  bool are_long_rows() const {
    using Long = LongRows<V, P16, L, P16 ? 8 : 1>;
    constexpr int most = Long::kMaxChannels;
    static_assert(Long::kBytes <= 4 * kRows * kLongRow<P16>, "what it needs fits where scores would be");
    return !masked_ && !biased_ && !row_step_ && key_begin_ == 0 && key_end_ == nk_ && nk_ >= kLongRow<P16> &&
           rows_ > kFewRows && call_.head_dim <= most && call_.value_dim <= most;
  }

  template <bool P16, Level L>
  void long_rows() {
    if constexpr (!P16)
      long_rows<P16, L, 1>();
    else if (nk_ < kLongStages)
      long_rows<P16, L, 4>();
    else
      long_rows<P16, L, 8>();
  }
  template <bool P16, Level L, int Stage>
  void long_rows() {
    LongRows<V, P16, L, Stage>::run({queries_, keys_, values_, round_up(nk_, kKeyPad) * kLanes, nk_, rows_,
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
        const int64_t m = maximum_of(r, row_max_[r], biased_ ? biased_max<Level::kTableOctave>(r, key, 0, n) : 0);
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

  template <Level L, Level Others>
  void one_or_two_groups() {
    are_two_groups_ ? two_groups<L, Others>() : exact<true, L>();
  }

  // Computes intflash_bfp where some keys have no value, or 32 bits do not hold the sums.
  template <Level L, Level Others>
  void two_groups() {
    const bool resident = key_end_ - key_begin_ <= chunk_, split = has_valueless_, was_masked = masked_;
    for (int r = 0; r < rows_; ++r) other_max_[r] = kAbsent, other_level_[r] = kNever;
    for (int64_t key = key_begin_; key < key_end_; key += chunk_) {
      const int64_t n = smaller(chunk_, key_end_ - key);
      score_groups(key, n, split);
      if (biased_ || split) update_group_maxima(key, n, split);
    }
    for (int r = 0; r < rows_; ++r) {
      const int64_t most = maximum(r), other = split ? maximum_of(r, other_max_[r], other_level_[r]) : kNever;
      groups_[r] = TwoGroups(most, other, nk_);
      other_level_[r] = groups_[r].other_level();
    }
    for (int64_t key = key_begin_; key < key_end_; key += chunk_) {
      const int64_t n = smaller(chunk_, key_end_ - key);
      if (!resident) score_groups(key, n, split);
      for (int64_t at = 0; at < n; at += stage_keys_) {
        const int64_t count = smaller(stage_keys_, n - at), before = key + at - key_begin_;
        const bool fresh = before % kDigitKeys == 0;
        if (fresh && before) merge_digits(before == kDigitKeys);
        uint32_t l[kRows];
        masked_ = was_masked || (split && has_valueless(valueless_ + key + at, count));
        weights<true, L>(key, at, count, l);
        for (int r = 0; r < rows_; ++r) groups_[r].l += l[r];
        products<true>(key + at, at, count, fresh);
      }
      if (split) sums_of_others<Others>(key, n);
    }
    bool gaps = false;
    for (int r = 0; r < rows_; ++r) l_[r] = groups_[r].rounded_l(), gap_[r] = groups_[r].gap(), gaps = gaps || gap_[r];
    if (nk_ > kDigitKeys && key_begin_ < key_end_) {
      merge_digits(key_end_ - key_begin_ <= kDigitKeys);
      rounded_digits(wide_acc_, rows_ * value_pad_, kManyShift, acc_, acc_low_);
    }
    finish<true>(gaps ? gap_ : nullptr);
  }

  // Computes scores of keys [key, key + n). Where some keys have no value, moves those of such keys to other_scores_.
  void score_groups(int64_t key, int64_t n, bool split) {
    score_chunk(key, n, !split);
    if (!split) return;
    for_runs_of_others(key, n, [&](int64_t at, int64_t count) {
      const uint8_t* valueless = valueless_ + key + at;
      for (int r = 0; r < rows_; ++r) {
        int32_t *s = scores_ + r * score_ld_ + at, *other = other_scores_ + r * score_ld_ + at;
        for (int64_t j = 0; j < count; ++j)
          other[j] = valueless[j] ? s[j] : kAbsent, s[j] = valueless[j] ? kAbsent : s[j];
        for (int64_t j = count; j < round_up(count, kBlock); ++j) other[j] = kAbsent;
      }
      V::keep_awake();
    });
  }

  void update_group_maxima(int64_t key, int64_t n, bool split) {
    update_maxima(key, 0, n);
    if (!split) return;
    swap_groups();
    for_runs_of_others(key, n, [&](int64_t at, int64_t count) { update_maxima(key, at, count); });
    swap_groups();
  }
  // Updates the maxima of the rows with scores [at, at + n) of the chunk at `key`.
  void update_maxima(int64_t key, int64_t at, int64_t n) {
    if (biased_) {
      for (int r = 0; r < rows_; ++r) level_[r] = larger(level_[r], biased_max<Level::kMaximum>(r, key, at, n));
      return;
    }
    typename V::I32 max[kRows];
    for (int r = 0; r < rows_; ++r) max[r] = V::set1(kAbsent);
    update_row_max(max, at, at + n);
  }
  // Puts the keys without a value in the place of the others.
  void swap_groups() {
    std::swap(scores_, other_scores_);
    std::swap(row_max_, other_max_);
    std::swap(level_, other_level_);
  }
  template <Level L>
  void sums_of_others(int64_t key, int64_t n) {
    swap_groups();
    masked_ = true;
    for_runs_of_others(key, n, [&](int64_t at, int64_t count) {
      uint32_t l[kRows];
      weights<true, L>(key, at, count, l);
      for (int r = 0; r < rows_; ++r) groups_[r].other_l += l[r];
    });
    swap_groups();
  }

  // Adds the digits of P V, of at most kDigitKeys keys, to 64-bit sums.
  void merge_digits(bool first) {
    for (int64_t i = 0; i < rows_ * value_pad_; ++i)
      wide_acc_[i] = (first ? 0 : wide_acc_[i]) + int64_t(acc_[i]) * 256 + acc_low_[i];
  }

  // Calls f(at, count) for the runs of blocks of kBlock keys that have keys without a value, of a stage at most. Only
  // these have scores in other_scores_.
  template <class F>
  void for_runs_of_others(int64_t key, int64_t n, F f) const {
    const auto has_others = [&](int64_t at) {
      return at < n && has_valueless(valueless_ + key + at, smaller<int64_t>(kBlock, n - at));
    };
    for (int64_t at = 0; at < n; at += kBlock) {
      const int64_t begin = at;
      while (at - begin < stage_keys_ && has_others(at)) at += kBlock;
      if (at == begin) continue;
      f(begin, smaller(at, n) - begin);
      at -= kBlock;
    }
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
    if (are_two_groups_) return groups_[r].log_sum_level();
    if (call_.method == Method::kOnline) return level_[r] == kNever ? kNever : level_[r] / kTableSteps.sixteenths * 16;
    return maximum(r);
  }
};

}  // namespace
}  // namespace intflash
