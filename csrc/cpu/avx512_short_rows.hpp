// intflash, intflash_p8 and intflash_bfp on AVX-512 VNNI for short rows: up to 256 keys. It serves the calls that
// amx_short_rows.hpp serves on tiles.
//
// A row block goes through one phase after the other: scores, row maxima, P, P V, output. Its scores and P stay in L1,
// and the sums of a product of up to 7 rows by 4 panels in registers. P16's two digits share the sums of P V, since 127
// * 65,321 * 256 < 2^31.
#pragma once
#include <type_traits>

#include "cpu/arithmetic.hpp"
#include "cpu/bias_mask_avx512.hpp"
#include "cpu/epilogue.hpp"
#include "cpu/isa/avx512.hpp"
#include "cpu/short_rows.hpp"

namespace intflash {
namespace {

template <bool P16, Level L = Level::kMaximum>
class Avx512ShortRows {
  using V = Avx512Vnni;
  using RowBlock = RowBlockOf<64, 256 + 64, 64, 64 * (256 + 64)>;  // the rows of P are spread over all cache sets
  using Rows = ShortRowSoftmax<V, P16, L, RowBlock>;
  static constexpr int kRows = RowBlock::kRows, kPanel = RowBlock::kPanel, kChunk = RowBlock::kChunk;
  // Sizes of a tile of sums in registers. Scores have few panels, because on Zen 5 many stores at once hold up the
  // products.
  static constexpr int kTileRows = 7, kScorePanels = 2, kValuePanels = 4;
  static constexpr int kScores = 4096;  // of a row block: 16 KiB
  static constexpr int64_t kMaxDim = 256, kScoreLd = RowBlock::kScoreLd;
  static_assert(127 * 255 * kShortRowKeys <= 1 << 24);  // sums of P8 fit the 24 bits of the fast epilogue

 public:
  static bool takes(const Call& call) { return are_short_rows(call) && call.head_dim <= kMaxDim; }
  // The rows of a block: blocks of equal size, of whole tiles.
  static int unit_rows(const Call& call) {
    const int64_t tile = tile_rows(call), rows = kScores / round_up(larger<int64_t>(call.nk, 1), kPanel);
    const int64_t most = larger(tile, smaller<int64_t>(rows, kRows) / tile * tile);
    return int(larger<int64_t>(1, ceil_div(call.nq, ceil_div(larger<int64_t>(call.nq, 1), most))));
  }

  static void run(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
    Avx512ShortRows s(call, call_id, scratch);
    for (int64_t first, last; units.next(first, last);) {
      s.enter(first / s.blocks_, int(first % s.blocks_));
      for (int64_t unit = first; unit < last; ++unit) s.run_block();
    }
  }

 private:
  const Call& call_;
  const uint64_t call_id_;
  Scratch& scratch_;
  const int block_rows_, blocks_, chunks_, key_panels_, key_steps_, value_panels_;
  const int64_t acc_ld_, levels_ld_;
  const bool biased_, whole_scores_;
  int value_steps_ = 0;
  int8_t *keys_, *values_, *query_copies_;
  int64_t* levels_;
  int32_t *scores_, *acc_;
  uint8_t* p_;
  RowBlock block_;
  int64_t b_, h_;
  int index_;      // of the next row block in its head
  bool tile_out_;  // P V is written from registers to the output
  Epilogue<V> epilogue_;
  typename Epilogue<V>::Prepared prepared_[kRows / 16];
  __m512i last_chunk_ones_;
  CachedExponent cached_exponent_;
  int16_t p_at_[kShortRowKeys / 4],
      key_at_[kShortRowKeys / 4];  // the position in a row of P and the first key of each step of P V

  static int tile_rows(const Call& call) {
    return call.value_dim > 3 * kPanel ? kTileRows - 1 : kTileRows;
  }  // one row less beside four panels of V

  Avx512ShortRows(const Call& call, uint64_t call_id, Scratch& scratch)
      : call_(call),
        call_id_(call_id),
        scratch_(scratch),
        block_rows_(unit_rows(call)),
        blocks_(ceil_div(call.nq, block_rows_)),
        chunks_(ceil_div(call.nk, kChunk)),
        key_panels_(ceil_div(call.nk, kPanel)),
        key_steps_(ceil_div(call.head_dim, 4)),
        value_panels_(ceil_div(call.value_dim, kPanel)),
        acc_ld_(value_panels_ * kPanel),
        levels_ld_(chunks_ * kChunk + 8),
        biased_(call.bias.data || call.keep.data),
        whole_scores_(biased_ || call.t_max),
        epilogue_(call) {
    const int64_t key_bytes = int64_t(key_panels_) * key_steps_ * 64, value_bytes = int64_t(chunks_) * kChunk * acc_ld_;
    const int64_t score_bytes = block_rows_ * kScoreLd * 4, p_bytes = (P16 ? 2 : 1) * RowBlock::kPlane,
                  acc_bytes = block_rows_ * acc_ld_ * 4;
    const int64_t query_bytes = block_rows_ * kMaxDim, level_bytes = biased_ ? block_rows_ * levels_ld_ * 8 : 0;
    char* at = scratch.reserve(
        size_t(key_bytes + value_bytes + score_bytes + p_bytes + acc_bytes + query_bytes + level_bytes));
    const auto take = [&](auto*& p, int64_t bytes) {
      p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at), at += bytes;
    };
    take(scores_, score_bytes), take(p_, p_bytes), take(acc_, acc_bytes), take(query_copies_, query_bytes);
    take(keys_, key_bytes), take(values_, value_bytes), take(levels_, level_bytes);
    block_.first = 0, block_.scores = scores_, block_.p = p_, block_.levels = levels_, block_.levels_ld = levels_ld_;
    last_chunk_ones_ = Rows::last_chunk_ones(call.nk - (chunks_ - 1) * kChunk);
    for (int at = 0; at < chunks_ * kChunk; at += 4) {
      const int key = at / kChunk * kChunk + V::key_at(at % kChunk);
      if (key < call.nk) p_at_[value_steps_] = int16_t(at), key_at_[value_steps_++] = int16_t(key);
    }
  }

  void enter(int64_t head, int index) { b_ = head / call_.heads_q, h_ = head % call_.heads_q, index_ = index; }

  void run_block() {
    if (index_ == blocks_) enter(b_ * call_.heads_q + h_ + 1, 0);
    RowBlock& s = block_;
    s.b = b_, s.h = h_, s.hk = h_ / (call_.heads_q / call_.heads_k);
    s.row0 = index_ * call_.nq / blocks_;
    s.rows = int((index_ + 1) * call_.nq / blocks_ - s.row0);
    ++index_;
    enter_head(s);
    Rows::choose_scales(call_, s, cached_exponent_);
    scores(s);
    if (biased_) BiasedMaxima<V, RowBlock, 0>(call_, s).find();
    for (int j = 0; j < chunks_; ++j) {
      const int64_t keys = smaller<int64_t>(kChunk, call_.nk - int64_t(j) * kChunk);
      Rows::chunk(s, j, ceil_div(keys, kPanel), keys < kChunk ? last_chunk_ones_ : _mm512_set1_epi8(1), [] {});
    }
    prepare_epilogue(s);
    values(s);
    finish(s);
  }

  // Packs K and V of a head unless they are packed already.
  void enter_head(const RowBlock& s) {
    const int64_t id = s.b * call_.heads_k + s.hk, n = call_.nk;
    if (scratch_.call_id == call_id_ && scratch_.packed_head == id) return;
    scratch_.call_id = call_id_, scratch_.packed_head = id;
    const View<int8_t>& k = call_.k;
    for (int64_t c = 0; c < n; c += kPanel)
      V::pack_key_panel<0x80>(k.at(s.b, s.hk, c), k.stride[2], k.stride[3], smaller<int64_t>(kPanel, n - c),
                              call_.head_dim, key_steps_, keys_ + c * key_steps_ * 4);
    const int8_t* v = call_.v.at(s.b, s.hk);
    const int64_t row_step = call_.v.stride[2];
    const bool pairs = call_.v.stride[3] == 1 && call_.value_dim == 2 * kPanel;
    int8_t* out = values_;
    for (int i = 0; i < value_steps_; ++i, out += 4 * acc_ld_) {
      const int64_t key = key_at_[i];
      if (pairs && n - key >= 4)
        V::pack_value_pair(v + key * row_step, row_step, out, out + 64);
      else
        pack_values(v + key * row_step, n - key, out);
    }
  }
  // Packs one step of P V of all panels.
  void pack_values(const int8_t* v, int64_t keys, int8_t* out) const {
    const int64_t row_step = call_.v.stride[2], step = call_.v.stride[3], n = call_.value_dim;
    int64_t c = 0;
    if (step == 1 && keys >= 4) {
      for (; c + 4 * kPanel <= n; c += 4 * kPanel) V::pack_value_quad(v + c, row_step, out + 4 * c);
      for (; c + 2 * kPanel <= n; c += 2 * kPanel) V::pack_value_pair(v + c, row_step, out + 4 * c, out + 4 * c + 64);
    }
    for (; c < n; c += kPanel) Rows::pack_value_group(v + c * step, row_step, step, keys, n - c, out + 4 * c);
  }

  struct Queries {
    const int8_t* rows;
    int64_t ld;
  };
  // Returns Q's rows in place, or copied where they are strided or no whole number of steps.
  Queries queries(const RowBlock& s) const {
    const int8_t* q = call_.q.at(s.b, s.h, s.row0);
    const int64_t row_step = call_.q.stride[2], step = call_.q.stride[3], n = call_.head_dim;
    if (step == 1 && n % 4 == 0) return {q, row_step};
    for (int r = 0; r < s.rows; ++r)
      for (int64_t d = 0; d < 4 * key_steps_; ++d)
        query_copies_[r * kMaxDim + d] = d < n ? q[r * row_step + d * step] : 0;
    return {query_copies_, kMaxDim};
  }

  template <int N>
  using Count = std::integral_constant<int, N>;
  // Calls f(n) with n, from 1 to Most, as a constant.
  template <int Most, class F>
  static inline __attribute__((always_inline)) void with_count(int n, F f) {
    if constexpr (Most > 1) {
      if (n < Most) return with_count<Most - 1>(n, f);
    }
    f(Count<Most>{});
  }
  // Divides n into even parts of at most Most, which have one or two sizes, and calls f(first, count, parts) for each
  // size.
  template <int Most, class F>
  static inline __attribute__((always_inline)) void in_parts(int n, F f) {
    const int parts = (n + Most - 1) / Most, size = n / parts, longer = n % parts;
    if (longer) with_count<Most>(size + 1, [&](auto count) { f(0, count, longer); });
    with_count<Most>(size, [&](auto count) { f(longer * (size + 1), count, parts - longer); });
  }

  void scores(RowBlock& s) const {
    __m512i max[kRows];
    const Queries q = queries(s);
    in_parts<kTileRows>(s.rows, [&](int r, auto rows, int tiles) {
      in_parts<kScorePanels>(key_panels_, [&](int c, auto panels, int parts) {
        score_tiles<rows, panels>(tiles, parts, q.rows + r * q.ld, q.ld, keys_ + int64_t(c) * key_steps_ * 64,
                                  key_steps_, s.scores + r * kScoreLd + c * kPanel, max + r, c == 0);
      });
    });
    for (int r = 0; r < s.rows; r += 16) V::reduce_max(max + r, smaller(16, s.rows - r), s.top + r);
    for (int r = 0; whole_scores_ && r < s.rows;
         ++r) {  // cancels the offset of unsigned keys, which cancels by itself in differences from the row maximum
      const int32_t offset = -128 * V::code_sum(q.rows + r * q.ld, 4 * key_steps_);
      s.top[r] += offset;
      for (int32_t *x = s.scores + r * kScoreLd, *end = x + key_panels_ * kPanel; x < end; x += kPanel)
        V::store(x, V::add(V::load(x), V::set1(offset)));
    }
  }

  // Stores a tile of sums; `in_register` keeps the compiler from moving them first.
  template <int R, int C>
  static inline void store(__m512i (&acc)[R][C], int32_t* out, int64_t ld) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) _mm512_store_si512(out + r * ld + c * kPanel, acc[r][c] = V::in_register(acc[r][c]));
  }

  template <int R, int C>
  static __attribute__((noinline)) void score_tiles(int tiles, int parts, const int8_t* q, int64_t q_ld,
                                                    const int8_t* k, int steps, int32_t* out, __m512i* max,
                                                    bool first) {
    for (int t = 0; t < tiles; ++t, q += R * q_ld, out += R * kScoreLd, max += R) {
      __m512i best[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) best[r] = first ? V::set1(INT32_MIN) : max[r];
      for (int c = 0; c < parts; ++c)
        score_tile<R, C>(q, q_ld, k + int64_t(c) * C * steps * 64, steps, out + c * C * kPanel, best);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) max[r] = best[r];
    }
  }
  template <int R, int C>
  static inline __attribute__((always_inline)) void score_tile(const int8_t* q, int64_t q_ld, const int8_t* k,
                                                               int steps, int32_t* out, __m512i (&best)[R]) {
    __m512i acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = V::zero16();
    const int64_t panel = int64_t(steps) * 64;
    for (int s = 0; s < steps; ++s, q += 4, k += 64) {
      __m512i column[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) column[c] = _mm512_load_si512(k + c * panel);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i x = V::broadcast(q + r * q_ld);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) V::dot_in_place(acc[r][c], column[c], x);
      }
    }
    store(acc, out, kScoreLd);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) best[r] = V::max(best[r], acc[r][c]);
  }

  // Computes the output's factors from the sums of p ahead of P V, because a division takes long.
  void prepare_epilogue(RowBlock& s) {
    epilogue_.enter_head(s.b, s.h, s.hk);
    tile_out_ = true;
    for (int r = 0; r < s.rows; r += 16) {
      const int rows = smaller(16, s.rows - r);
      V::reduce_add(s.sums + r, rows, s.l + r);
      epilogue_.template prepare<P16>(s.l + r, rows, prepared_[r / 16]);
      tile_out_ = tile_out_ && epilogue_.takes_tile(prepared_[r / 16], value_panels_);
    }
  }

  void values(const RowBlock& s) const {
    const int64_t at = call_.out.offset(s.b, s.h, s.row0);
    const auto tiles = [&](int r, auto rows, int tiles) {
      in_parts<kValuePanels>(value_panels_, [&](int c, auto panels, int parts) {
        for (int i = 0; i < parts; ++i, c += panels)
          value_tiles<rows, panels>(tiles, s.p + r * RowBlock::kPRow, values_ + c * 64, acc_ + r * acc_ld_ + c * kPanel,
                                    r, at + r * call_.out.row_step);
      });
    };
    if (tile_rows(call_) < kTileRows)
      in_parts<kTileRows - 1>(s.rows, tiles);
    else
      in_parts<kTileRows>(s.rows, tiles);
  }
  template <int R, int C>
  __attribute__((noinline)) void value_tiles(int tiles, const uint8_t* p, const int8_t* v, int32_t* out, int row,
                                             int64_t at) const {
    for (int t = 0; t < tiles; ++t)
      value_tile<R, C>(p + t * R * RowBlock::kPRow, v, out + t * R * acc_ld_, row + t * R,
                       at + t * R * call_.out.row_step);
  }
  template <int R, int C>
  inline __attribute__((always_inline)) void value_tile(const uint8_t* p, const int8_t* v, int32_t* out, int row,
                                                        int64_t at) const {
    __m512i acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = V::zero16();
    for (int digit = 0;; ++digit, p += RowBlock::kPlane) {
      const int8_t* column_at = v;
      for (int i = 0; i < value_steps_; ++i, column_at += 4 * acc_ld_) {
        const uint8_t* x_at = p + p_at_[i];
        __m512i column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) column[c] = _mm512_load_si512(column_at + c * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i x = V::broadcast(x_at + r * RowBlock::kPRow);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) V::dot_in_place(acc[r][c], x, column[c]);
        }
      }
      if (!P16 || digit == 1) break;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_slli_epi32(acc[r][c], 8);
    }
    if constexpr (C == 2 || C == 4)
      if (tile_out_) return epilogue_.template int8_tile<!P16, R, C>(acc, prepared_, row, at);
    store(acc, out, acc_ld_);
  }

  void finish(const RowBlock& s) {
    for (int r = 0; !tile_out_ && r < s.rows; r += 16) {
      const int32_t* acc = acc_ + r * acc_ld_;
      epilogue_.template rows<false>(acc, acc, acc_ld_, s.l + r, smaller(16, s.rows - r),
                                     call_.out.offset(s.b, s.h, s.row0 + r), &prepared_[r / 16]);
    }
    Rows::keep_sums(call_, s, cached_exponent_);
  }
};

}  // namespace
}  // namespace intflash
