// Attention for every NVIDIA GPU from compute capability 8.0 on, by mma.sync and cp.async: any number of queries and
// keys, head_dim to 256, masks, bias and packed sequences.
//
// A CTA computes WARPS * ROW_TILES * 16 rows of a head. Tiles of K and V are copied to a ring of stages in shared
// memory; Q, scores, P and accumulators stay in registers.
//
// Macros:
//   METHOD            ExactP16, ExactP8, Online or TwoGroups
//   HEAD_DIM          channels of Q and K, a multiple of 8 to 256
//   VALUE_DIM         channels of V and of the output
//   SLICES            CTAs that share the channels of V, where the registers of one do not suffice
//   QUERY, OUT        the types of Q (i8, or a float type with p.q_scale) and of the output
//   KEY_MAJOR         1: V has contiguous keys
//   ROW_SCALES        1: the rows of a lane have scores of different units: Q has a scale for each token, or, of
//                     few_rows.cu, rows are of several heads
//   CAUSAL            0 none, 1 key j is present for row i if j <= i + p.causal, 2 the same with each packed sequence's
//                     number of keys less its number of queries added
//   WINDOW            1: it is present only if also j >= i + p.window_start, with the same added
//   PACKED            1: the batch of one holds p.count sequences, which p.cu_seqlens_q and p.cu_seqlens_k delimit
//   BIAS, KEEP        see sm80/masks.cuh, and BIAS_FRACTION_BITS of a bias
//   DITHER, MANY_KEYS  of TwoGroups: see sm80/two_groups_softmax.cuh
//   WARPS, ROW_TILES  warps of a CTA, and tiles of 16 rows of a warp
//   KEYS, STAGES      keys of a tile, a multiple of 32, and stages of the ring
//   CTAS_PER_SM       CTAs per multiprocessor, which bounds the registers of a thread
//   VALUES_IN_RANGE   1: no float of Q is outside its scale's range
#include "sm80/rows.cuh"

constexpr u32 TABLE_BYTES = METHOD::PASSES == 1 ? 256 * WORD_BYTES : 0;  // of the table of P, before the stages
constexpr int SMALL = 32;  // keys of the last tile that are computed, if it has no more

// The rows of a CTA, and where they and their keys are in the tensors.
struct Work {
  u32 batch, head, kv_head;
  i32 row;               // the CTA's first row
  i32 rows, keys;        // of the sequence
  i64 q_start, k_start;  // the sequence's first row and key
  i32 first_block;       // of the words of the sequence's keys: see valueless.cu
  i32 causal, start;     // offsets of a row's last and first key

  DEVICE Work(const Params& p) {
    const u32 tiles = p.tiles, of = quotient(blockIdx.x, tiles, p.share.whole_reciprocal);
    i32 tile = blockIdx.x - of * tiles;
    batch = quotient(of, p.heads, p.share.heads_reciprocal), head = of - batch * p.heads;
    kv_head = key_head(p, head);
    rows = p.nq, keys = p.nk, q_start = 0, k_start = 0, first_block = 0, causal = p.causal, start = p.window_start;
#if PACKED
    // `tiles` is a bound: CTAs beyond the last sequence's tiles find none
    rows = 0;
    for (i32 i = 0; i < p.count; ++i) {
      const i32 first = p.cu_seqlens_q[i], count = p.cu_seqlens_q[i + 1] - first,
                its_tiles = (count + CTA_ROWS - 1) / CTA_ROWS;
      if (tile < its_tiles) {
        q_start = first, rows = count, k_start = p.cu_seqlens_k[i], keys = p.cu_seqlens_k[i + 1] - (i32)k_start;
        first_block = first_block_of_sequence(i, (i32)k_start);
        break;
      }
      tile -= its_tiles;
    }
    if (CAUSAL == 2) causal += keys - rows, start += keys - rows;
#else
    if (CAUSAL) tile = tiles - 1 - tile;  // the CTAs with most keys first
#endif
    row = tile * CTA_ROWS;
  }
  // A row past the last one stands for the last one.
  DEVICE RowPlace place(i32 row) const { return {head, q_start + min(row, rows - 1)}; }
  DEVICE const u32* valueless(const Params& p) const { return valueless_words(p, batch, kv_head, first_block); }
  // The number of keys that a row sees.
  DEVICE i32 seen(i32 row) const { return CAUSAL ? max(min(keys, min(row, rows - 1) + causal + 1), 0) : keys; }
  // The first key of a row's window.
  DEVICE i32 window_start(i32 row) const { return WINDOW ? max(min(row, rows - 1) + start, 0) : 0; }
};

template <class Method>
struct Warp : WarpRows<Method, Work> {
  typedef WarpRows<Method, Work> Rows;
  using Rows::method, Rows::work;
  i32 first_seen, last_seen;    // the end of the keys that the warp's first and last row see
  i32 first_start, last_start;  // the first of these keys

  DEVICE Warp(const Params& p, const Work& work) : Rows(p, work, work.row + threadIdx.x / 32 * WARP_ROWS) {
    const i32 first = work.row + threadIdx.x / 32 * WARP_ROWS;
    first_seen = work.seen(first), last_seen = first < work.rows ? work.seen(first + WARP_ROWS - 1) : 0;
    first_start = work.window_start(first), last_start = work.window_start(first + WARP_ROWS - 1);
  }

  // Computes the tile of a step in one of its forms, and refills the ring.
  template <bool LAST_PASS, class Ring>
  DEVICE void tile(Ring& ring, i32 step, i32 first) {
    const u32 stage = ring.wait();
    if (WINDOW && first + KEYS <= first_start)
      ring.refill(step);  // no row of this warp sees the tile
    else if (first + KEYS <= first_seen && (!WINDOW || first >= last_start))
      tile_as<LAST_PASS, KEYS, false>(ring, stage, step, first);
    else if (first + SMALL < last_seen)
      tile_as<LAST_PASS, KEYS, true>(ring, stage, step, first);
    else if (first < last_seen)
      tile_as<LAST_PASS, SMALL, true>(ring, stage, step, first);
    else
      ring.refill(step);  // nor this one
  }
  template <bool LAST_PASS, int NOW, bool MASKED, class Ring>
  DEVICE void tile_as(Ring& ring, u32 stage, i32 step, i32 first) {
    const TileOperands operands(stage, stage + K_BYTES);
    Scores s;
    this->template compute_scores<NOW>(operands, s);
    ring.refill(step);
    if constexpr (LAST_PASS)
      this->template add_values<NOW, MASKED>(s, operands, first);
    else
      method.template update_row_max<NOW, MASKED>(s, this->masks, first, work.keys);
  }

  // Computes so many tiles from key `first` on.
  template <class Ring>
  DEVICE void run(i32 first, i32 tiles, Ring& ring) {
    if constexpr (Method::PASSES == 2) {
#pragma unroll 1
      for (i32 i = 0; i < tiles; ++i) tile<false>(ring, i, first + i * KEYS);
      this->finish_row_max([&](int kind, int m, int h) { return this->method.maximum(kind, m, h); });
    }
#pragma unroll 1
    for (i32 i = 0; i < tiles; ++i) {
      tile<true>(ring, (Method::PASSES - 1) * tiles + i, first + i * KEYS);
#if MANY_KEYS
      if (i % (MOST_SUMS / KEYS) == MOST_SUMS / KEYS - 1) method.widen_sums();
#endif
    }
  }
};

// Computes the rows of a CTA, whose tiles of keys the ring loads.
template <class Method, class Ring>
DEVICE void attend(const Params& p, const Work& work, u32 shared, Ring& ring, i32 start, i32 tiles) {
  Warp<Method> warp(p, work);
  warp.init(shared);
  warp.run(start, tiles, ring);
  warp.store();
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 shared = shared_address(memory);
  if constexpr (TABLE_BYTES) fill_table(shared);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Work work(p);
  if (work.row >= work.rows) return;
  const TileLoader loader(p, work.batch, work.kv_head, work.k_start, work.keys);
  const i32 start = work.window_start(work.row) / KEYS * KEYS;
  const i32 tiles = max(work.seen(work.row + CTA_ROWS - 1) - start + KEYS - 1, 0) / KEYS;
  // Step i is tile i of the first of two passes, which needs K only, or a tile of the last pass.
  const auto load = [&](i32 i, u32 to) {
    const bool last_pass = METHOD::PASSES == 1 || i >= tiles;
    const i32 first = start + (METHOD::PASSES == 2 && last_pass ? i - tiles : i) * KEYS;
    if (i >= METHOD::PASSES * tiles) return;
    loader.load_k(to, first);
    if (last_pass) loader.load_v(to + K_BYTES, first);
  };
  TileRing<K_BYTES + V_BYTES, decltype(load)> ring(shared + TABLE_BYTES, load);
  if constexpr (METHOD::FINDS_ZEROS && !BIAS && !KEEP) {  // with masks the loops of both would spill more registers
    if (!__any_sync(~0u, valueless_keys(work.valueless(p), work.keys) != 0))
      return attend<METHOD::WithoutValueless>(p, work, shared, ring, start, tiles);
  }
  attend<METHOD>(p, work, shared, ring, start, tiles);
}
