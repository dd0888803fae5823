// intflash, intflash_p8 and intflash_bfp on AMX tiles for short rows: up to 256 keys, whose scores stay in L1. Calls
// with causal limits, packed sequences or scales per block of keys are not served here.
//
// The kernel is a software pipeline over blocks of 16 query rows. While the vector unit computes P of one block, the
// tile unit computes the scores of the next block and P V of the previous one. The tile instructions are spread between
// the rows of P, because they overlap with vector instructions only within one reorder window, and no two that depend
// on one another are adjacent.
#pragma once
#include <type_traits>

#include "cpu/arithmetic.hpp"
#include "cpu/bias_mask_avx512.hpp"
#include "cpu/epilogue.hpp"
#include "cpu/isa/amx.hpp"
#include "cpu/short_rows.hpp"

namespace intflash {
namespace {

template <bool P16, Level L = Level::kMaximum>
class AmxShortRows {
  using V = Amx;
  using RowBlock = RowBlockOf<16, 64, 1024, 4 * 1024>;  // P in tiles
  using Rows = ShortRowSoftmax<V, P16, L, RowBlock>;
  static constexpr int kRows = RowBlock::kRows, kPanel = RowBlock::kPanel, kChunk = RowBlock::kChunk,
                       kMaxChunks = RowBlock::kMaxChunks, kTile = RowBlock::kPChunk;
  static constexpr int kParts = 16;  // parts of the tile work beside one chunk, four to a panel of S
  // Tiles 0 to 3 hold the sums of P V, 4 (and 5 for two digits) P, 6 K or V, 7 S. Q has tile 5 where P has one digit,
  // and else shares tile 4.
  static constexpr int kScoreTile = 7, kQueryTile = P16 ? 4 : 5;
  static constexpr bool kKeepsQueries = !P16;
  static constexpr int kDigits = P16 ? 2 : 1, kPassPanels = 4 / kDigits;  // there are four accumulator tiles
  static constexpr int64_t kScoreLd = RowBlock::kScoreLd, kPlane = RowBlock::kPlane;

  // The position of P V within a row block, which proceeds by one panel of channels at a time.
  struct ProductPosition {
    int pass = 0, chunk = 0, panel = 0;
  };
  // The tile work beside the rows of a block.
  struct Tiles {
    const RowBlock* before;  // the block whose P V is computed, or null
    const int8_t* keys;      // K of the next panel of scores
    int32_t* scores;
    int panels = 0;  // panels of scores in this chunk
    int due = 0;     // work of P V that is due, in quarters of a panel
    ProductPosition position = {};
  };

 public:
  static void run(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
    AmxShortRows s(call, units, call_id, scratch);
    V::begin_rows(s.tile_rows_);
    s.pipeline();
    V::end();
  }

 private:
  const Call& call_;
  const uint64_t call_id_;
  Scratch& scratch_;
  const int tile_rows_, blocks_, slots_, chunks_, key_steps_, depths_, panels_;
  const int64_t acc_ld_, levels_ld_;
  int8_t *keys_[3], *values_[3], *queries_;
  int64_t* levels_;
  int32_t *acc_, *scores_[2];
  uint8_t* p_[2];
  RowBlock block_[3];
  Epilogue<V> epilogue_;
  typename Epilogue<V>::Prepared prepared_;
  __m512i last_chunk_ones_;
  CachedExponent cached_exponent_;
  int64_t b_, h_, hk_, left_ = 0;  // of the next row block
  int block_index_, opened_ = 0;
  const Units& units_;  // the last member, because it slows the tile work down ahead of what that reads

  AmxShortRows(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch)
      : call_(call),
        call_id_(call_id),
        scratch_(scratch),
        tile_rows_(ceil_div(call.nq, ceil_div(call.nq, kRows))),
        blocks_(ceil_div(call.nq, kRows)),
        slots_(blocks_ > 1 && units.whole_heads ? 2 : 3),
        chunks_(ceil_div(call.nk, kChunk)),
        key_steps_(ceil_div(call.head_dim, 4)),
        depths_(ceil_div(call.head_dim, 64)),
        panels_(ceil_div(call.value_dim, kPanel)),
        acc_ld_(panels_ * kPanel),
        levels_ld_(chunks_ * kChunk + 8),
        epilogue_(call),
        units_(units) {
    const int64_t key_bytes =
        round_up(call.nk, kPanel) * key_steps_ * 4 + kTile;  // a tile's load may reach past the last panel
    const int64_t value_bytes = int64_t(chunks_) * panels_ * kTile, acc_bytes = kDigits * kRows * acc_ld_ * 4;
    const int64_t score_bytes = kRows * kScoreLd * 4, p_bytes = kDigits * kPlane,
                  query_bytes = int64_t(depths_) * kTile;
    const int64_t level_bytes = call.bias.data || call.keep.data ? kRows * levels_ld_ * 8 : 0;
    const int64_t total =
        slots_ * (key_bytes + value_bytes) + acc_bytes + 2 * (score_bytes + p_bytes) + query_bytes + level_bytes;
    char* at = scratch.reserve(size_t(total));
    const auto take = [&](auto*& p, int64_t bytes) {
      p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at), at += bytes;
    };
    for (int i = 0; i < 2; ++i) take(scores_[i], score_bytes), take(p_[i], p_bytes);
    take(acc_, acc_bytes), take(queries_, query_bytes), take(levels_, level_bytes);
    for (int i = 0; i < slots_; ++i) take(keys_[i], key_bytes), take(values_[i], value_bytes);
    last_chunk_ones_ = Rows::last_chunk_ones(call.nk - (chunks_ - 1) * kChunk);
  }

  int chunk_keys(int chunk) const { return int(smaller<int64_t>(kChunk, call_.nk - int64_t(chunk) * kChunk)); }

  void pipeline() {
    if (!next_range()) return;
    RowBlock *before = nullptr, *now = nullptr, *next = open();
    step(before, now, next);
    while (now || next) {
      before = now, now = next, next = left_ || next_range() ? open() : nullptr;
      step(before, now, next);
    }
  }

  __attribute__((noinline)) bool next_range() {
    int64_t first, last;
    if (!units_.next(first, last)) return false;
    enter(first / blocks_, int(first % blocks_));
    left_ = last - first;
    return true;
  }

  // Makes this row block of a query head the next one.
  void enter(int64_t head, int block) {
    b_ = head / call_.heads_q, h_ = head % call_.heads_q, hk_ = h_ / (call_.heads_q / call_.heads_k);
    block_index_ = block;
  }

  // Computes P of `now` beside S of `next` and P V of `before`. Each may be null.
  void step(RowBlock* before, RowBlock* now, const RowBlock* next) {
    if (now) row_maxima(*now);
    keep_awake();
    if (before) prepare_epilogue(*before);
    keep_awake();
    V::compiler_barrier();  // the queries were copied long ago, since a tile's load waits until their stores have
                            // reached memory
    if (kKeepsQueries && depths_ == 1) V::load_tile<kQueryTile>(queries_, 64);
    Tiles tiles{before, next ? next->keys : nullptr, next ? next->scores : nullptr};
    for (int j = 0; j < chunks_; ++j) {
      tiles.panels = next ? ceil_div(chunk_keys(j), kPanel) : 0;
      if (now)
        probabilities(*now, j, tiles);
      else
        for (int part = 0; part < kParts; ++part) tile_work(tiles, part);
    }
    keep_awake();
    if (before) finish(*before);
    keep_awake();
  }

  // Issues one part of a chunk's tile work. Q is zero past head_dim, so that the values in K's tile there do not count.
  inline __attribute__((always_inline)) void tile_work(Tiles& t, int part) {
    const bool scores = part / 4 < t.panels;
    switch (part % 4) {
      case 0:
        if (!scores) return;
        V::zero<kScoreTile>();
        load_depth(t.keys, 0);
        if (!P16 && chunks_ > 1)
          V::prefetch_tile<true>(t.scores + kPanel,
                                 4 * kScoreLd);  // the scores of two blocks, P, K and V do not fit L1
        return;
      case 1:
        if (!scores) return;
        V::dot_signed_tile<kScoreTile, kQueryTile, 6>();
        for (int d = 1; d < depths_; ++d) load_depth(t.keys, d), V::dot_signed_tile<kScoreTile, kQueryTile, 6>();
        return;
      case 2:
        if (t.before)
          for (t.due += panels_; t.due >= 4; t.due -= 4) product(*t.before, t.position);
        return;
      default:
        if (!scores) return;
        V::store_tile<kScoreTile>(t.scores, 4 * kScoreLd);
        t.keys += key_steps_ * 64, t.scores += kPanel;
    }
  }

  inline __attribute__((always_inline)) void load_depth(const int8_t* keys, int d) const {
    if (!kKeepsQueries || depths_ > 1) V::load_tile<kQueryTile>(queries_ + 64 * d, 64 * depths_);
    V::load_tile<6>(keys + d * kTile, 64);
  }

  // Needed for P16 only: with P8 the next tile product comes soon enough.
  static void keep_awake() {
    if constexpr (P16) V::keep_awake<kScoreTile>();
  }

  RowBlock* open() {
    RowBlock& s = block_[opened_ % 3];
    s.scores = scores_[opened_ & 1], s.p = p_[opened_ & 1], s.levels = levels_, s.levels_ld = levels_ld_;
    ++opened_;
    const int64_t start = int64_t(block_index_) * tile_rows_;
    s.row0 = smaller<int64_t>(start, call_.nq - tile_rows_);
    s.first = int(start - s.row0), s.rows = tile_rows_;
    s.b = b_, s.h = h_, s.hk = hk_;
    if (++block_index_ == blocks_) enter(b_ * call_.heads_q + h_ + 1, 0);
    --left_;
    enter_head(s);
    keep_awake();
    copy_queries(call_.q.at(s.b, s.h, s.row0));
    Rows::choose_scales(call_, s, cached_exponent_);
    return &s;
  }

  void copy_queries(const int8_t* q) const {
    const int64_t row_step = call_.q.stride[2], step = call_.q.stride[3], width = 64 * depths_;
    if (step == 1) return V::copy_rows(q, row_step, tile_rows_, call_.head_dim, width, queries_);
    for (int r = 0; r < tile_rows_; ++r)
      for (int64_t d = 0; d < width; ++d) queries_[r * width + d] = d < call_.head_dim ? q[r * row_step + d * step] : 0;
  }

  // Packs K and V of a head unless they are packed already. The row blocks in flight keep theirs: these are of two
  // heads, or of three where a head is one block.
  void enter_head(RowBlock& s) {
    const int64_t id = s.b * call_.heads_k + s.hk;
    if (scratch_.call_id != call_id_ || scratch_.packed_head != id) {
      scratch_.call_id = call_id_, scratch_.packed_head = id;
      scratch_.slot = (scratch_.slot + 1) % slots_;
      pack(s, keys_[scratch_.slot], values_[scratch_.slot]);
    }
    s.keys = keys_[scratch_.slot], s.values = values_[scratch_.slot];
  }

  void pack(const RowBlock& s, int8_t* keys, int8_t* values) const {
    const int64_t n = call_.nk;
    const int8_t* k = call_.k.at(s.b, s.hk);
    for (int64_t key = 0; key < n; key += kPanel, keys += int64_t(key_steps_) * 64)
      V::pack_key_panel<0>(k + key * call_.k.stride[2], call_.k.stride[2], call_.k.stride[3],
                           smaller<int64_t>(kPanel, n - key), call_.head_dim, key_steps_, keys);
    const int8_t* v = call_.v.at(s.b, s.hk);
    const int64_t row_step = call_.v.stride[2], step = call_.v.stride[3];
    for (int64_t chunk = 0; chunk < n; chunk += kChunk, values += panels_ * kTile) {
      int64_t c = 0;
      if (step == 1)
        for (; c + 2 * kPanel <= call_.value_dim; c += 2 * kPanel)
          pack_pair(v + chunk * row_step + c, row_step, n - chunk, values + c * kChunk);
      for (; c < call_.value_dim; c += kPanel)
        pack_panel(v + chunk * row_step + c * step, row_step, step, n - chunk, c, values + c * kChunk);
    }
  }

  // Packs a chunk of two whole panels of V.
  static void pack_pair(const int8_t* v, int64_t row_step, int64_t keys, int8_t* out) {
    for (int at = 0; at < kChunk; at += 4, out += 64) {
      const int key = V::key_at(at);
      if (key + 4 <= keys) {
        V::pack_value_pair(v + key * row_step, row_step, out, out + kTile);
      } else {
        Rows::pack_value_group(v + key * row_step, row_step, 1, keys - key, kPanel, out);
        Rows::pack_value_group(v + key * row_step + kPanel, row_step, 1, keys - key, kPanel, out + kTile);
      }
    }
  }
  void pack_panel(const int8_t* v, int64_t row_step, int64_t step, int64_t keys, int64_t c, int8_t* out) const {
    for (int at = 0; at < kChunk; at += 4, out += 64) {
      const int key = V::key_at(at);
      Rows::pack_value_group(v + key * row_step, row_step, step, keys - key, call_.value_dim - c, out);
    }
  }

  // Finds the row maxima of a block.
  void row_maxima(RowBlock& s) const {
    if (call_.bias.data || call_.keep.data) return BiasedMaxima<V, RowBlock, kScoreTile>(call_, s).find();
    // Columns past the last key repeat that key. Rows past the last one are read and not used.
    __m512i max[kRows];
    const int panels = ceil_div(call_.nk, kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) max[r] = V::load(s.scores + r * kScoreLd);
    for (int p = 1; p < panels; ++p)
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) max[r] = V::max(max[r], V::load(s.scores + r * kScoreLd + p * kPanel));
    V::reduce_max(max, s.top);
  }

  // Computes P of a chunk, with the tile work between its rows.
  void probabilities(RowBlock& s, int j, Tiles& tiles) {
    const int keys = chunk_keys(j);
    const __m512i ones = keys < kChunk ? last_chunk_ones_ : _mm512_set1_epi8(1);
    Rows::chunk(s, j, ceil_div(keys, kPanel), ones, TileWork{*this, tiles, s.rows - s.first});
  }
  struct TileWork {
    AmxShortRows& kernel;
    Tiles& tiles;
    int rows, due = 0, part = 0;
    inline __attribute__((always_inline)) void operator()() {
      for (due += kParts; due >= rows; due -= rows, ++part) kernel.tile_work(tiles, part);
    }
  };

  // Computes the next panel of P V, in passes over as many panels as there are accumulators. Panel i and digit d have
  // tile i * kDigits + d.
  void product(const RowBlock& s, ProductPosition& at) const {
    const int panel = at.pass * kPassPanels, count = smaller(kPassPanels, panels_ - panel);
    int32_t* acc = acc_ + panel * kPanel;
    const uint8_t* p = s.p + at.chunk * kTile;
    const int8_t* v = s.values + (int64_t(at.chunk) * panels_ + panel) * kTile;
    V::compiler_barrier();
    if (!kKeepsQueries || at.panel == 0) V::load_tile<4>(p, 64);
    if (P16 && at.panel == 0) V::load_tile<5>(p + kPlane, 64);
    const bool enter = at.chunk == 0, leave = at.chunk + 1 == chunks_;
    if constexpr (P16) {
      if (at.panel == 0)
        panel_product<0>(v, acc, enter, leave);
      else
        panel_product<1>(v, acc, enter, leave);
    } else {
      switch (at.panel) {
        case 0: panel_product<0>(v, acc, enter, leave); break;
        case 1: panel_product<1>(v, acc, enter, leave); break;
        case 2: panel_product<2>(v, acc, enter, leave); break;
        default: panel_product<3>(v, acc, enter, leave); break;
      }
    }
    if (++at.panel < count) return;
    at.panel = 0;
    if (++at.chunk == chunks_) at.chunk = 0, ++at.pass;
  }

  template <int I>
  void panel_product(const int8_t* v, int32_t* acc, bool enter, bool leave) const {
    const int64_t line = 4 * acc_ld_;
    int32_t* low = acc + kRows * acc_ld_;
    if (enter) {
      V::zero<I * kDigits>();
      if (P16) V::zero<I * kDigits + kDigits - 1>();
    }
    V::load_tile<6>(v + I * kTile, 64);
    V::dot_tile<I * kDigits, 4, 6>();
    if (P16) V::dot_tile<I * kDigits + kDigits - 1, 5, 6>();
    if (leave) {
      V::store_tile<I * kDigits>(acc + I * kPanel, line);
      if (P16) V::store_tile<I * kDigits + kDigits - 1>(low + I * kPanel, line);
    }
  }

  // Computes the output's factors from the sums of p long before P V is there, because a division takes long.
  void prepare_epilogue(RowBlock& s) {
    V::reduce_add(s.sums, s.l);
    epilogue_.enter_head(s.b, s.h, s.hk);
    epilogue_.template prepare<P16>(s.l + s.first, s.rows - s.first, prepared_);
  }

  void finish(const RowBlock& s) {
    const uint32_t* l = s.l;
    const int64_t row = s.row0 + s.first;
    const int32_t* acc = acc_ + s.first * acc_ld_;
    epilogue_.template rows<P16>(acc, acc + kRows * acc_ld_, acc_ld_, l + s.first, s.rows - s.first,
                                 call_.out.offset(s.b, s.h, row), &prepared_);
    Rows::keep_sums(call_, s, cached_exponent_);
  }
};

}  // namespace
}  // namespace intflash
