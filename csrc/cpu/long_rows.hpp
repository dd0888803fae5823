// intflash and intflash_p8 on AMX tiles for rows of any length whose scores are not kept: the exact maxima first, then the
// scores again, 64 keys at a time in a ring that stays in L1, each chunk's P beside the tile instructions of its neighbours.
//
// Beside another hyperthread the core seems to have few spare tile registers: an instruction that writes a tile then stalls
// the vectors too where others are in flight. So they are spread, one or two to a row of P, a load well before its product.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/exp2.hpp"

namespace intflash {
namespace {

template <class V, bool P16, int kStage>  // chunks of a stage
class LongRows {
  using I32 = typename V::I32;
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  using E = Exp2<V>;
  static constexpr int kRows = 16, kPanel = 16, kChunk = 64, kTile = 1024, kScores = kRows * kChunk;
  // P8's sums of up to 64 channels stay in tiles 0 to 3. P16 has twice as many: two panels of channels at a time over the
  // P of a stage, then the other two.
  static_assert(P16 ? kStage % 4 == 0 : kStage == 1);
  static constexpr int kDigits = P16 ? 2 : 1;
  static constexpr int kPChunk = kDigits * kTile, kPStage = kStage * kPChunk;

 public:
  static constexpr int kMaxChannels = 64;  // one tile's depth of Q and K, four tiles of sums
  static constexpr int64_t kBytes = 2 * (4 * kScores + kPStage) + kTile;  // of `buffer`

  // Up to 32 rows of one head, of one scale.
  struct Unit {
    const Code *queries, *keys, *values;  // in tiles; panels of V lie `value_ld` apart
    int64_t value_ld, keys_end;
    int rows, panels;
    RowScale scale;
    Depth depth;
    char* buffer;
    // out: maxima, sums of p and P V; room for whole strips
    int32_t *top, *acc, *acc_low;
    uint32_t* l;
    int64_t acc_ld;
  };

  static void run(const Unit& unit) {
    LongRows rows(unit);
    if (rows.strips_ == 2)
      rows.template maxima<2>();
    else
      rows.template maxima<1>();
    rows.products();
  }

 private:
  const Unit& u_;
  const int chunks_, strips_, steps_;  // steps of a strip: chunks, to whole stages
  int32_t* scores_[2];
  PCode* p_[2];
  int32_t* dump_;  // for sums of channels there are not
  I32 max_[2 * kRows], sums_[kDigits][kRows];

  explicit LongRows(const Unit& unit)
      : u_(unit), chunks_(int((unit.keys_end + kChunk - 1) / kChunk)), strips_((unit.rows + kRows - 1) / kRows),
        steps_(int(round_up(chunks_, kStage))) {
    for (int i = 0; i < 2; ++i) {
      scores_[i] = reinterpret_cast<int32_t*>(unit.buffer) + i * kScores;
      p_[i] = reinterpret_cast<PCode*>(unit.buffer + 8 * kScores) + i * kPStage;
    }
    dump_ = reinterpret_cast<int32_t*>(p_[1] + kPStage);
  }

  const Code* queries(int strip) const { return u_.queries + strip * kTile; }
  const Code* keys(int chunk) const { return u_.keys + int64_t(chunk) * 4 * kTile; }

  // Marks the keys past the last in its chunk's scores.
  void mark_tail(int32_t* scores) const {
    const int64_t present = u_.keys_end % kChunk;
    for (int r = 0; r < kRows; ++r, scores += kChunk)
      for (int64_t j = present / kPanel * kPanel; j < kChunk; j += kPanel)
        V::store(scores + j, V::first(V::load(scores + j), larger<int64_t>(0, present - j)));
  }

  // Tiles: 4 and 5 queries, 6 and 7 keys, two for each strip's scores. A panel is stored while the next is multiplied, over
  // the one of the chunk before, whose rows have been looked at by then.
  template <int Strips>
  void maxima() {
    for (int r = 0; r < 2 * kRows; ++r) max_[r] = V::set1(kAbsent);
    V::stores_before_loads();
    V::template load_tile<4>(queries(0), 64);
    if (Strips == 2) V::template load_tile<5>(queries(1), 64);
    const int whole = int(u_.keys_end / kChunk);
    panels_of_scores<Strips, true>(keys(0));
    store_panel<Strips, 3>();
    raise_all<Strips>();
    for (int j = 1; j < whole; ++j) panels_of_scores<Strips, false>(keys(j));
    for (int s = 0; s < Strips; ++s) raise(s, 0);  // their last panel but four is still to be seen
    store_panel<Strips, 3>();
    raise_all<Strips>();
    if (whole < chunks_) {
      panels_of_scores<Strips, true>(keys(whole));
      store_panel<Strips, 3>();
      for (int s = 0; s < Strips; ++s) mark_tail(scores_[s]);
      raise_all<Strips>();
    }
    for (int s = 0; s < Strips; ++s) V::reduce_max(max_ + s * kRows, u_.top + s * kRows);
  }

  template <int Strips, bool First>
  void panels_of_scores(const Code* k) {
    panel_of_scores<Strips, First, 0>(k);
    panel_of_scores<Strips, First, 1>(k);
    panel_of_scores<Strips, First, 2>(k);
    panel_of_scores<Strips, First, 3>(k);
  }

  template <int Strips, bool First, int I>
  inline void panel_of_scores(const Code* k) {
    constexpr int sum = 2 * (I & 1), key = 6 + (I & 1), before = (I + 3) & 3;
    V::template load_tile<key>(k + I * kTile, 64);
    V::template expect_tile<false>(k + (I + 2) * kTile, 64);  // little but loads is between this pass's products
    V::template zero<sum>();
    if (Strips == 2) V::template zero<sum + 1>();
    if (!First) raise(0, 4 * I);
    V::template dot_signed_tile<sum, 4, key>();
    if (!First || I) V::template store_tile<2 - sum>(scores_[0] + before * kPanel, 4 * kChunk);
    if (Strips == 1) return;
    if (!First) raise(1, 4 * I);
    V::template dot_signed_tile<sum + 1, 5, key>();
    if (!First || I) V::template store_tile<3 - sum>(scores_[1] + before * kPanel, 4 * kChunk);
  }

  template <int Strips, int I>
  void store_panel() const {
    V::template store_tile<2 * (I & 1)>(scores_[0] + I * kPanel, 4 * kChunk);
    if (Strips == 2) V::template store_tile<2 * (I & 1) + 1>(scores_[1] + I * kPanel, 4 * kChunk);
  }

  template <int Strips>
  void raise_all() {
    for (int s = 0; s < Strips; ++s)
      for (int r = 0; r < kRows; r += 4) raise(s, r);
  }

  // By a chunk's scores, four rows of a strip.
  inline void raise(int strip, int row) {
    const int32_t* s = scores_[strip] + row * kChunk;
    I32* max = max_ + strip * kRows + row;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r, s += kChunk)
      max[r] = V::max(V::max(max[r], V::max(V::load(s), V::load(s + 16))), V::max(V::load(s + 32), V::load(s + 48)));
    V::stores_before_loads();  // the compiler keeps them where they stand
  }

  // Each step makes P of a chunk beside the scores of the next and P V of a chunk, or a part of it, of the stage before.
  void products() {
    for (int t = -1; t < strips_ * steps_ + kStage; ++t) {
      // What there is not yet or no more is computed from the first chunk and not used: a step has no branches.
      const Place before = t < kStage ? Place{0, larger(t, 0)} : place(t - kStage), now = place(t), next = place(t + 1);
      if (t < 0 || now.strip == strips_ || now.chunk >= chunks_) {
        edge(before, next, t);
        continue;
      }
      if (now.chunk == 0) begin_sums(now.strip);
      const bool tail = u_.keys_end < (int64_t(now.chunk) + 1) * kChunk;
      if (tail) mark_tail(scores_[t & 1]);
      if (u_.depth == Depth::kShifted)
        tail ? step<Depth::kShifted, true>(before, now, next, t) : step<Depth::kShifted, false>(before, now, next, t);
      else if (fits_short<P16>(u_.scale))
        tail ? step<Depth::kShort, true>(before, now, next, t) : step<Depth::kShort, false>(before, now, next, t);
      else
        tail ? step<Depth::kNarrow, true>(before, now, next, t) : step<Depth::kNarrow, false>(before, now, next, t);
      if (now.chunk + 1 == chunks_) end_sums(now.strip);
    }
  }

  struct Place {
    int strip, chunk;
  };
  Place place(int t) const {
    const int strip = t < 0 ? 0 : t / steps_;
    return {strip, t - strip * steps_};
  }

  void begin_sums(int strip) {
    for (int d = 0; d < kDigits; ++d)
      for (int r = 0; r < kRows; ++r) sums_[d][r] = V::set1(0);
    if (P16)
      for (int64_t i = strip * kRows * u_.acc_ld; i < (strip + 1) * kRows * u_.acc_ld; i += kPanel) V::store(u_.acc + i, V::set1(0)), V::store(u_.acc_low + i, V::set1(0));
  }

  void end_sums(int strip) {
    if (P16)
      for (int r = 0; r < kRows; ++r) sums_[0][r] = V::add(V::shift_left(sums_[0][r], 8), sums_[kDigits - 1][r]);
    V::reduce_add(sums_[0], u_.l + strip * kRows);
  }

  // Tiles: 0 to 3 sums of P V; scores: 4 queries, 5 and 6 keys, 7 sums; then 4 (and 5) P, 5 to 7 values.
  template <Depth D, bool Masked>
  __attribute__((noinline)) void step(Place before, Place now, Place next, int t) {
    const Scores scores = scores_of(next, t);
    const Values values = values_of(before, t);
    values.enter();
    const RowScale scale = u_.scale;
    const int32_t *s = scores_[t & 1], *top = u_.top + now.strip * kRows;
    PCode* p = p_of(t);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      V::stores_before_loads();
      scores.before_row(r);
      values.before_row(r);
      E::template block<P16, D, false, Masked, false>(s + r * kChunk, scale, V::set1(top[r]), 0, p + r * 64, p + kTile + r * 64, sums_[0][r],
                                                      sums_[kDigits - 1][r]);
    }
    V::stores_before_loads();
    values.before_row(kRows);
    values.leave();
  }

  // No P to make: that of chunks past the last is zero.
  void edge(Place before, Place next, int t) {
    if (t >= 0)
      for (int i = 0; i < kPChunk; i += 64) V::store(reinterpret_cast<int32_t*>(p_of(t) + i), V::set1(0));
    const Scores scores = scores_of(next, t);
    const Values values = values_of(before, larger(t, 0));
    values.enter();
    V::stores_before_loads();
#pragma GCC unroll 17
    for (int r = 0; r <= kRows; ++r) scores.before_row(r), values.before_row(r);
    values.leave();
  }

  PCode* p_of(int t) const { return p_[t / kStage & 1] + t % kStage * kPChunk; }

  struct Scores {
    const Code *q, *k;
    int32_t* out;

    // The tile instructions before row r of P.
    __attribute__((always_inline)) void before_row(int r) const {
      const int64_t line = 4 * kChunk;
      switch (r) {
        case 0: V::template load_tile<4>(q, 64), V::template load_tile<5>(k, 64); break;
        case 1: V::template load_tile<6>(k + kTile, 64); break;
        case 2: V::template zero<7>(), V::template dot_signed_tile<7, 4, 5>(); break;
        case 3: V::template load_tile<5>(k + 2 * kTile, 64); break;
        case 4: V::template store_tile<7>(out, line), V::template zero<7>(), V::template dot_signed_tile<7, 4, 6>(); break;
        case 5: V::template load_tile<6>(k + 3 * kTile, 64); break;
        case 6: V::template store_tile<7>(out + kPanel, line), V::template zero<7>(), V::template dot_signed_tile<7, 4, 5>(); break;
        case 8: V::template store_tile<7>(out + 2 * kPanel, line), V::template zero<7>(), V::template dot_signed_tile<7, 4, 6>(); break;
        case 10: V::template store_tile<7>(out + 3 * kPanel, line); break;
      }
    }
  };

  Scores scores_of(Place at, int t) const {
    const bool none = at.strip >= strips_ || at.chunk >= chunks_;
    return {u_.queries + (none ? 0 : at.strip) * kTile, u_.keys + int64_t(none ? 0 : at.chunk) * 4 * kTile, scores_[~t & 1]};
  }

  // P V of a chunk and all panels (P8), or of two chunks and two panels (P16). A panel there is not repeats the last.
  struct Values {
    const PCode* p;
    const Code* v[4];  // of the panels; or two panels of the first chunk, then of the second
    int32_t *acc[4];   // of the sums' tiles
    int64_t line;
    bool entered, left;

    void enter() const {
      if (!entered) return;
      if (!P16) {
        V::template zero<0>(), V::template zero<1>(), V::template zero<2>(), V::template zero<3>();
        return;
      }
      V::template load_tile<0>(acc[0], line), V::template load_tile<1>(acc[1], line);
      V::template load_tile<2>(acc[2], line), V::template load_tile<3>(acc[3], line);
    }
    void leave() const {
      if (!left) return;
      V::template store_tile<0>(acc[0], line), V::template store_tile<1>(acc[1], line);
      V::template store_tile<2>(acc[2], line), V::template store_tile<3>(acc[3], line);
    }

    __attribute__((always_inline)) void before_row(int r) const {
      if constexpr (P16) {
        switch (r) {
          case 9: V::template load_tile<4>(p, 64), V::template load_tile<5>(p + kTile, 64); break;
          case 10: V::template load_tile<6>(v[0], 64); break;
          case 11: V::template dot_tile<0, 4, 6>(), V::template load_tile<7>(v[1], 64); break;
          case 12: V::template dot_tile<1, 5, 6>(), V::template dot_tile<2, 4, 7>(); break;
          case 13: V::template dot_tile<3, 5, 7>(), V::template load_tile<4>(p + kPChunk, 64); break;
          case 14: V::template load_tile<5>(p + kPChunk + kTile, 64), V::template load_tile<6>(v[2], 64); break;
          case 15: V::template dot_tile<0, 4, 6>(), V::template load_tile<7>(v[3], 64); break;
          case 16: V::template dot_tile<1, 5, 6>(), V::template dot_tile<2, 4, 7>(), V::template dot_tile<3, 5, 7>(); break;
        }
      } else {
        switch (r) {
          case 7: V::template load_tile<5>(v[0], 64); break;
          case 9: V::template load_tile<4>(p, 64), V::template load_tile<6>(v[1], 64); break;
          case 10: V::template dot_tile<0, 4, 5>(); break;
          case 11: V::template load_tile<5>(v[2], 64); break;
          case 12: V::template dot_tile<1, 4, 6>(); break;
          case 13: V::template load_tile<6>(v[3], 64); break;
          case 14: V::template dot_tile<2, 4, 5>(); break;
          case 16: V::template dot_tile<3, 4, 6>(); break;
        }
      }
    }
  };

  Values values_of(Place at, int t) const {
    const int64_t line = 4 * u_.acc_ld;
    const auto value = [&](int chunk, int panel) { return u_.values + smaller(panel, u_.panels - 1) * u_.value_ld + int64_t(smaller(chunk, chunks_ - 1)) * kTile; };
    const auto sums = [&](int32_t* acc, int panel) { return acc + at.strip * kRows * u_.acc_ld + smaller(panel, u_.panels - 1) * kPanel; };
    if constexpr (P16) {
      constexpr int kPairs = kStage / 2;  // of chunks
      const int part = at.chunk % kStage, panel = part / kPairs * 2, pair = part % kPairs, chunk = at.chunk - part + 2 * pair;
      const bool first = pair == 0, last = pair == kPairs - 1;
      const PCode* p = p_[(t / kStage + 1) & 1] + 2 * pair * kPChunk;
      if (t < kStage || panel >= u_.panels)
        return {p, {value(chunk, 0), value(chunk, 0), value(chunk, 0), value(chunk, 0)}, {dump_, dump_, dump_, dump_}, 64, first, last};
      return {p, {value(chunk, panel), value(chunk, panel + 1), value(chunk + 1, panel), value(chunk + 1, panel + 1)},
              {sums(u_.acc, panel), sums(u_.acc_low, panel), sums(u_.acc, panel + 1), sums(u_.acc_low, panel + 1)}, line, first, last};
    } else {
      return {p_[~t & 1], {value(at.chunk, 0), value(at.chunk, 1), value(at.chunk, 2), value(at.chunk, 3)},
              {sums(u_.acc, 0), sums(u_.acc, 1), sums(u_.acc, 2), sums(u_.acc, 3)}, line, at.chunk == 0, at.chunk + 1 == chunks_};
    }
  }
};

}  // namespace
}  // namespace intflash
