// intflash, intflash_p8 and intflash_bfp on AMX tiles for long rows, whose scores are not kept. A first pass finds the
// exact row maxima. The second computes the scores again, a chunk of 64 keys at a time in a ring that stays in L1, with
// each chunk's P beside the tile instructions of the chunks before and after it.
//
// Beside another hyperthread an instruction that writes a tile stalls the vectors too while other tile instructions are
// in flight. They are therefore spread, one or two to a row of P, with each load well ahead of its product.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/exp2.hpp"

namespace intflash {
namespace {

template <class V, bool P16, Level L, int kStage>  // kStage: number of chunks in a stage
class LongRows {
  using I32 = typename V::I32;
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  using E = Exp2<V>;
  static constexpr int kRows = 16, kPanel = 16, kChunk = 64, kTile = 1024, kScores = kRows * kChunk;
  // P8's sums of up to 64 channels stay in tiles 0 to 3. P16 has twice as many sums: two panels of channels go over the
  // P of a stage, then the other two.
  static_assert(P16 ? kStage % 4 == 0 : kStage == 1);
  static constexpr int kDigits = P16 ? 2 : 1;
  static constexpr int kPChunk = kDigits * kTile, kPStage = kStage * kPChunk;

 public:
  static constexpr int kMaxChannels = 64;  // Q and K are one tile deep, and there are four tiles of sums
  static constexpr int64_t kBytes = 2 * (4 * kScores + kPStage) + kTile;  // size of `buffer`

  // Up to 32 rows of one head that share one scale.
  struct Unit {
    const Code *queries, *keys, *values;  // packed in tiles; panels of V lie `value_ld` apart
    int64_t value_ld, keys_end;
    int rows, panels;
    RowScale scale;
    Depth depth;
    char* buffer;
    // outputs: maxima, sums of p and P V, with room for whole tiles of rows
    int32_t *top, *acc, *acc_low;
    uint32_t* l;
    int64_t acc_ld;
  };

  static void run(const Unit& unit) {
    LongRows rows(unit);
    if (rows.row_tiles_ == 2)
      rows.template maxima<2>();
    else
      rows.template maxima<1>();
    rows.products();
  }

 private:
  const Unit& u_;
  const int chunks_, row_tiles_, steps_;  // steps of a tile of rows: its chunks, rounded up to whole stages
  int32_t* scores_[2];
  PCode* p_[2];
  int32_t* discarded_;  // takes the sums of channels past the last
  I32 max_[2 * kRows], sums_[kDigits][kRows];

  explicit LongRows(const Unit& unit)
      : u_(unit),
        chunks_(int((unit.keys_end + kChunk - 1) / kChunk)),
        row_tiles_((unit.rows + kRows - 1) / kRows),
        steps_(int(round_up(chunks_, kStage))) {
    for (int i = 0; i < 2; ++i) {
      scores_[i] = reinterpret_cast<int32_t*>(unit.buffer) + i * kScores;
      p_[i] = reinterpret_cast<PCode*>(unit.buffer + 8 * kScores) + i * kPStage;
    }
    discarded_ = reinterpret_cast<int32_t*>(p_[1] + kPStage);
  }

  const Code* queries(int row_tile) const { return u_.queries + row_tile * kTile; }
  const Code* keys(int chunk) const { return u_.keys + int64_t(chunk) * 4 * kTile; }

  // Marks the scores of keys past the last one in its chunk.
  void mark_past_end(int32_t* scores) const {
    const int64_t present = u_.keys_end % kChunk;
    for (int r = 0; r < kRows; ++r, scores += kChunk)
      for (int64_t j = present / kPanel * kPanel; j < kChunk; j += kPanel)
        V::store(scores + j, V::first(V::load(scores + j), larger<int64_t>(0, present - j)));
  }

  // Finds the row maxima. Tiles 4 and 5 hold queries, 6 and 7 keys, two more the scores of each tile of rows. A panel
  // is stored while the next is multiplied, over the panel of the previous chunk, which the maxima include by then.
  template <int RowTiles>
  void maxima() {
    for (int r = 0; r < 2 * kRows; ++r) max_[r] = V::set1(kAbsent);
    V::compiler_barrier();
    V::template load_tile<4>(queries(0), 64);
    if (RowTiles == 2) V::template load_tile<5>(queries(1), 64);
    const int whole = int(u_.keys_end / kChunk);
    panels_of_scores<RowTiles, true>(keys(0));
    store_panel<RowTiles, 3>();
    update_all_max<RowTiles>();
    for (int j = 1; j < whole; ++j) panels_of_scores<RowTiles, false>(keys(j));
    for (int s = 0; s < RowTiles; ++s) update_max(s, 0);  // the maxima do not include this panel yet
    store_panel<RowTiles, 3>();
    update_all_max<RowTiles>();
    if (whole < chunks_) {
      panels_of_scores<RowTiles, true>(keys(whole));
      store_panel<RowTiles, 3>();
      for (int s = 0; s < RowTiles; ++s) mark_past_end(scores_[s]);
      update_all_max<RowTiles>();
    }
    for (int s = 0; s < RowTiles; ++s) V::reduce_max(max_ + s * kRows, u_.top + s * kRows);
  }

  template <int RowTiles, bool First>
  void panels_of_scores(const Code* k) {
    panel_of_scores<RowTiles, First, 0>(k);
    panel_of_scores<RowTiles, First, 1>(k);
    panel_of_scores<RowTiles, First, 2>(k);
    panel_of_scores<RowTiles, First, 3>(k);
  }

  template <int RowTiles, bool First, int I>
  inline void panel_of_scores(const Code* k) {
    constexpr int sum = 2 * (I & 1), key = 6 + (I & 1), before = (I + 3) & 3;
    V::template load_tile<key>(k + I * kTile, 64);
    V::template prefetch_tile<false>(k + (I + 2) * kTile, 64);  // this pass has little but loads between its products
    V::template zero<sum>();
    if (RowTiles == 2) V::template zero<sum + 1>();
    if (!First) update_max(0, 4 * I);
    V::template dot_signed_tile<sum, 4, key>();
    if (!First || I) V::template store_tile<2 - sum>(scores_[0] + before * kPanel, 4 * kChunk);
    if (RowTiles == 1) return;
    if (!First) update_max(1, 4 * I);
    V::template dot_signed_tile<sum + 1, 5, key>();
    if (!First || I) V::template store_tile<3 - sum>(scores_[1] + before * kPanel, 4 * kChunk);
  }

  template <int RowTiles, int I>
  void store_panel() const {
    V::template store_tile<2 * (I & 1)>(scores_[0] + I * kPanel, 4 * kChunk);
    if (RowTiles == 2) V::template store_tile<2 * (I & 1) + 1>(scores_[1] + I * kPanel, 4 * kChunk);
  }

  template <int RowTiles>
  void update_all_max() {
    for (int s = 0; s < RowTiles; ++s)
      for (int r = 0; r < kRows; r += 4) update_max(s, r);
  }

  // Updates the maxima of four rows of a tile by a chunk's scores.
  inline void update_max(int row_tile, int row) {
    const int32_t* s = scores_[row_tile] + row * kChunk;
    I32* max = max_ + row_tile * kRows + row;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r, s += kChunk)
      max[r] = V::max(V::max(max[r], V::max(V::load(s), V::load(s + 16))), V::max(V::load(s + 32), V::load(s + 48)));
    V::compiler_barrier();  // keeps the loads where they stand
  }

  // Each step computes P of a chunk, the scores of the next one and P V of a chunk, or a part of it, of the previous
  // stage.
  void products() {
    for (int t = -1; t < row_tiles_ * steps_ + kStage; ++t) {
      // A step has no branches: where a chunk does not exist, the first one is computed and not used.
      const ChunkPosition before = t < kStage ? ChunkPosition{0, larger(t, 0)} : position(t - kStage),
                          now = position(t), next = position(t + 1);
      if (t < 0 || now.row_tile == row_tiles_ || now.chunk >= chunks_) {
        step_without_p(before, next, t);
        continue;
      }
      if (now.chunk == 0) begin_sums(now.row_tile);
      const bool tail = u_.keys_end < (int64_t(now.chunk) + 1) * kChunk;
      if (tail) mark_past_end(scores_[t & 1]);
      if (u_.depth == Depth::kShifted)
        tail ? step<Depth::kShifted, true>(before, now, next, t) : step<Depth::kShifted, false>(before, now, next, t);
      else if (fits_16_bits<P16, L>(u_.scale))
        tail ? step<Depth::k16Bit, true>(before, now, next, t) : step<Depth::k16Bit, false>(before, now, next, t);
      else
        tail ? step<Depth::k32Bit, true>(before, now, next, t) : step<Depth::k32Bit, false>(before, now, next, t);
      if (now.chunk + 1 == chunks_) end_sums(now.row_tile);
    }
  }

  struct ChunkPosition {
    int row_tile, chunk;
  };
  ChunkPosition position(int t) const {
    const int row_tile = t < 0 ? 0 : t / steps_;
    return {row_tile, t - row_tile * steps_};
  }

  void begin_sums(int row_tile) {
    for (int d = 0; d < kDigits; ++d)
      for (int r = 0; r < kRows; ++r) sums_[d][r] = V::set1(0);
    if (P16)
      for (int64_t i = row_tile * kRows * u_.acc_ld; i < (row_tile + 1) * kRows * u_.acc_ld; i += kPanel)
        V::store(u_.acc + i, V::set1(0)), V::store(u_.acc_low + i, V::set1(0));
  }

  void end_sums(int row_tile) {
    if (P16)
      for (int r = 0; r < kRows; ++r) sums_[0][r] = V::add(V::shift_left(sums_[0][r], 8), sums_[kDigits - 1][r]);
    V::reduce_add(sums_[0], u_.l + row_tile * kRows);
  }

  // Tiles 0 to 3 hold the sums of P V. For the scores, tile 4 holds queries, 5 and 6 keys, 7 sums; after that 4 (and 5)
  // hold P, 5 to 7 values.
  template <Depth D, bool Masked>
  __attribute__((noinline)) void step(ChunkPosition before, ChunkPosition now, ChunkPosition next, int t) {
    const Scores scores = scores_of(next, t);
    const Values values = values_of(before, t);
    values.enter();
    const RowScale scale = u_.scale;
    const int32_t *s = scores_[t & 1], *top = u_.top + now.row_tile * kRows;
    PCode* p = p_of(t);
    const int64_t key = int64_t(now.chunk) * kChunk;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      V::compiler_barrier();
      scores.before_row(r);
      values.before_row(r);
      E::template block<P16, D, L, Masked, false>(s + r * kChunk, scale, V::set1(top[r]), 0, key, p + r * 64,
                                                  p + kTile + r * 64, sums_[0][r], sums_[kDigits - 1][r]);
    }
    V::compiler_barrier();
    values.before_row(kRows);
    values.leave();
  }

  // A step without P. P of chunks past the last one is zero.
  void step_without_p(ChunkPosition before, ChunkPosition next, int t) {
    if (t >= 0)
      for (int i = 0; i < kPChunk; i += 64) V::store(reinterpret_cast<int32_t*>(p_of(t) + i), V::set1(0));
    const Scores scores = scores_of(next, t);
    const Values values = values_of(before, larger(t, 0));
    values.enter();
    V::compiler_barrier();
#pragma GCC unroll 17
    for (int r = 0; r <= kRows; ++r) scores.before_row(r), values.before_row(r);
    values.leave();
  }

  PCode* p_of(int t) const { return p_[t / kStage & 1] + t % kStage * kPChunk; }

  struct Scores {
    const Code *q, *k;
    int32_t* out;

    // Issues the tile instructions ahead of row r of P.
    __attribute__((always_inline)) void before_row(int r) const {
      const int64_t line = 4 * kChunk;
      switch (r) {
        case 0: V::template load_tile<4>(q, 64), V::template load_tile<5>(k, 64); break;
        case 1: V::template load_tile<6>(k + kTile, 64); break;
        case 2: V::template zero<7>(), V::template dot_signed_tile<7, 4, 5>(); break;
        case 3: V::template load_tile<5>(k + 2 * kTile, 64); break;
        case 4:
          V::template store_tile<7>(out, line), V::template zero<7>(), V::template dot_signed_tile<7, 4, 6>();
          break;
        case 5: V::template load_tile<6>(k + 3 * kTile, 64); break;
        case 6:
          V::template store_tile<7>(out + kPanel, line), V::template zero<7>(), V::template dot_signed_tile<7, 4, 5>();
          break;
        case 8:
          V::template store_tile<7>(out + 2 * kPanel, line), V::template zero<7>(),
              V::template dot_signed_tile<7, 4, 6>();
          break;
        case 10: V::template store_tile<7>(out + 3 * kPanel, line); break;
      }
    }
  };

  Scores scores_of(ChunkPosition at, int t) const {
    const bool none = at.row_tile >= row_tiles_ || at.chunk >= chunks_;
    return {u_.queries + (none ? 0 : at.row_tile) * kTile, u_.keys + int64_t(none ? 0 : at.chunk) * 4 * kTile,
            scores_[~t & 1]};
  }

  // P V of a chunk and all panels (P8), or of two chunks and two panels (P16). Panels past the last one repeat it.
  struct Values {
    const PCode* p;
    const Code* v[4];  // P8: the panels; P16: two panels of the first chunk, then of the second
    int32_t* acc[4];   // where tiles 0 to 3 are stored
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
          case 16:
            V::template dot_tile<1, 5, 6>(), V::template dot_tile<2, 4, 7>(), V::template dot_tile<3, 5, 7>();
            break;
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

  Values values_of(ChunkPosition at, int t) const {
    const int64_t line = 4 * u_.acc_ld;
    const auto value = [&](int chunk, int panel) {
      return u_.values + smaller(panel, u_.panels - 1) * u_.value_ld + int64_t(smaller(chunk, chunks_ - 1)) * kTile;
    };
    const auto sums = [&](int32_t* acc, int panel) {
      return acc + at.row_tile * kRows * u_.acc_ld + smaller(panel, u_.panels - 1) * kPanel;
    };
    if constexpr (P16) {
      constexpr int kPairs = kStage / 2;  // pairs of chunks in a stage
      const int part = at.chunk % kStage, panel = part / kPairs * 2, pair = part % kPairs,
                chunk = at.chunk - part + 2 * pair;
      const bool first = pair == 0, last = pair == kPairs - 1;
      const PCode* p = p_[(t / kStage + 1) & 1] + 2 * pair * kPChunk;
      if (t < kStage || panel >= u_.panels)
        return {p,
                {value(chunk, 0), value(chunk, 0), value(chunk, 0), value(chunk, 0)},
                {discarded_, discarded_, discarded_, discarded_},
                64,
                first,
                last};
      return {p,
              {value(chunk, panel), value(chunk, panel + 1), value(chunk + 1, panel), value(chunk + 1, panel + 1)},
              {sums(u_.acc, panel), sums(u_.acc_low, panel), sums(u_.acc, panel + 1), sums(u_.acc_low, panel + 1)},
              line,
              first,
              last};
    } else {
      return {p_[~t & 1],
              {value(at.chunk, 0), value(at.chunk, 1), value(at.chunk, 2), value(at.chunk, 3)},
              {sums(u_.acc, 0), sums(u_.acc, 1), sums(u_.acc, 2), sums(u_.acc, 3)},
              line,
              at.chunk == 0,
              at.chunk + 1 == chunks_};
    }
  }
};

}  // namespace
}  // namespace intflash
