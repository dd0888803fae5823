// The kernel of short rows: a whole row of scores stays in registers. A CTA of WARPGROUPS warpgroups loads K and V of a
// head together, and then computes the head's row tiles. CTAS_PER_SM CTAs share a multiprocessor. The other macros:
// short_rows_mainloop.cuh.
#include "sm90/cluster.cuh"
#include "sm90/short_rows_mainloop.cuh"
#if REMAINDER_ROWS
#include "sm90/short_rows_remainder.cuh"
#endif
#if TWO_GROUPS
#include "sm90/short_rows_split.cuh"
#endif

#ifndef CLUSTER
#define CLUSTER 1
#endif

constexpr int THREADS = 128 * WARPGROUPS;
constexpr bool PREFETCH_Q =
    SIZE<IN> < 4;  // whether Q of the next tile is loaded during this one, where registers suffice

// Rows `row` and row + 8 of a thread, as the left operand of Q K^T.
struct QueryRows {
  const Tokens tokens;
  const u8* from[2];
  i32 remainder_step;  // row distance from a thread's row of the last whole tile to its row of the remainder rows
  In::Raw<1> raw[D_STEPS][4];

  DEVICE QueryRows(const Params& p, u32 batch, u32 head) : tokens(p.q, batch, head) {
    if (!PREFETCH_Q || !REMAINDER_ROWS) return;  // nothing calls `advance`
    const i32 warp = threadIdx.x / 32 % 4, row_of_warp = threadIdx.x % 32 / 4;
    remainder_step = min(0, (p.nq & 63) - 1 - row_of_warp) + 64 * WARPGROUPS - 16 * warp;
    keep_in_register(remainder_step);
  }
  DEVICE void begin_load(i32 row, i32 last) {
    from[0] = tokens.at(min(row, last), threadIdx.x % 4 * 4);
    from[1] = tokens.at(min(row + 8, last), threadIdx.x % 4 * 4);
    load();
  }
  // Advances to the next tile's rows. With remainder rows all tiles are whole; a thread's second remainder row is not
  // used.
  DEVICE void advance(bool remainder) {
    from[0] = (const u8*)multiply_add(remainder ? remainder_step : 64 * WARPGROUPS, tokens.stride, (i64)from[0]);
    from[1] = (const u8*)multiply_add(remainder ? 0 : 8, tokens.stride, (i64)from[0]);
  }
  DEVICE void load() {
#pragma unroll
    for (int i = 0; i < 2 * D_CHUNKS; ++i)
      load_words(from[i % 2] + i / 2 * 16 * SIZE<IN>, raw[i / 4][i % 4 / 2 * 2 + i % 2].word);
  }
  DEVICE void codes(float inverse, u32 (&w)[D_STEPS][4]) {
#pragma unroll
    for (auto& step : raw) clamp_far_values(step, inverse);
#pragma unroll
    for (int i = 0; i < D_STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 word[1] = {0};
        if (2 * i + j / 2 < D_CHUNKS) In::codes(raw[i][j], inverse, word);
        w[i][j] = word[0];
      }
  }
};

#if TMA
typedef TmaHeadLoader<THREADS> Loader;
#else
typedef HeadLoader<THREADS> Loader;
#endif

#if HEAD_AMAX_IN_KERNEL
// Registers of a thread that hold K and V during the search for the scales, and loads of 16 bytes that fit into the
// others, of which addresses and the like take about 56.
constexpr int HELD =
    (Loader::HOLDS_KEYS ? Loader::Keys::RAW_REGISTERS : 0) + (Loader::HOLDS_VALUES ? Loader::Values::RAW_REGISTERS : 0);
constexpr int FREE_LOADS = (registers_per_thread(THREADS * CTAS_PER_SM) - HELD - 56) / 4;
// A thread's loads of all keys of K or V, and about as many queries.
constexpr int LOADS = (KEYS * HEAD_DIM * SIZE<IN> / 16 + THREADS - 1) / THREADS, MOST_AT_ONCE = LOADS < 13 ? LOADS : 13;

// Returns the thread's part of the largest magnitude of tokens.
template <int AT_ONCE>
DEVICE u32 largest_of_tokens(const Tokens& x, i32 first, i32 count) {
  return largest_magnitude<IN, HEAD_DIM, THREADS, AT_ONCE>(x.at(first, 0), x.stride, count, threadIdx.x);
}

// The search for the largest magnitude of this CTA's queries, whose loads are in flight together with those of K and V.
// Where registers do not hold them, they go to the shared memory that the codes of K and V take later.
struct QuerySearch {
  static constexpr bool IN_REGISTERS = CLUSTER > 1 || FREE_LOADS >= MOST_AT_ONCE;
  static constexpr int AT_ONCE = CLUSTER > 1 ? 6 : MOST_AT_ONCE;  // 6: the fastest with many queries
  static constexpr i32 CHUNKS = HEAD_DIM * SIZE<IN> / 16;         // of a query
  static constexpr i32 SLOTS = (K_BYTES + V_BYTES) / 16, COPIES = (SLOTS + THREADS - 1) / THREADS;
  const Tokens tokens;
  const u32 memory;
  i32 first, count;  // the CTAs of a cluster share the queries

  DEVICE QuerySearch(const Tokens& tokens, i32 queries, u32 memory) : tokens(tokens), memory(memory) {
    const i32 each = (queries + CLUSTER - 1) / CLUSTER;
    first = CLUSTER > 1 ? min((i32)blockIdx.z * each, queries - 1) : 0, count = min(each, queries - first);
  }
  DEVICE void begin() const {
    if (!IN_REGISTERS) copy(0);
  }
  DEVICE void copy(i32 first_chunk) const {
    static_assert(IN_REGISTERS || CLUSTER == 1);  // all queries
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const i32 slot = threadIdx.x + i * THREADS, chunk = first_chunk + slot;
      if (slot < SLOTS && chunk < count * CHUNKS)
        cp_async_16(memory + slot * 16, tokens.at(chunk / CHUNKS, chunk % CHUNKS * (16 / SIZE<IN>)));
    }
  }
  // Returns the thread's part. A thread searches what it has copied itself.
  DEVICE u32 largest() const {
    if constexpr (IN_REGISTERS) return largest_of_tokens<AT_ONCE>(tokens, first, count);
    u32 most = 0;
#pragma unroll 1
    for (i32 first_chunk = 0; first_chunk < count * CHUNKS; first_chunk += SLOTS) {
      if (first_chunk > 0) copy(first_chunk);
      cp_async_wait_all();
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const i32 slot = threadIdx.x + i * THREADS;
        if (slot >= SLOTS || first_chunk + slot >= count * CHUNKS) continue;
        u32 w[4];
        load_shared(memory + slot * 16, w);
        most = max_magnitudes(most, w, IN{});
      }
    }
    __syncthreads();  // the exchange of maxima and the codes overwrite this memory
    return max_of_pair(most, IN{});
  }
};

// Computes the scales of the head from its own maxima. The warps of the CTA, or of all CTAs of the cluster, exchange
// their maxima in shared memory that is not in use yet.
DEVICE void find_scales(const QuerySearch& queries, const Loader& loader, i32 keys, u32* exchange,
                        Scales<IN, HEAD_AMAX_IN_KERNEL>& scales) {
  u32 all[3] = {queries.largest(), 0, 0};
  all[1] = Loader::HOLDS_KEYS ? loader.keys.largest() : largest_of_tokens<MOST_AT_ONCE>(loader.keys.tokens, 0, keys);
  all[2] =
      Loader::HOLDS_VALUES ? loader.values.largest() : largest_of_tokens<MOST_AT_ONCE>(loader.values.tokens, 0, keys);
  maxima_of_cluster<CLUSTER, THREADS / 32>(all, exchange);
  scales.q = scale_of_magnitude<IN>(all[0]);
  scales.k = scale_of_magnitude<IN>(all[1]);
  scales.v = scale_of_magnitude<IN>(all[2]);
}
#endif

// The head of a CTA.
struct HeadOfCta {
  u32 batch, head;

  // x, y: of the grid; where DIVIDED is 2, x is the number of the head among those of all batches.
  DEVICE HeadOfCta(const Params& p, u32 x, u32 y) {
    if constexpr (DIVIDED == 2) {
      if (REVERSE_HEADS) x = p.count - 1 - x;  // the previous kernel has left the last heads in L2
      batch = quotient(x, p.heads, p.share.heads_reciprocal), head = x - batch * p.heads;
    } else {
      batch = HEADS_FIRST ? y : x, head = HEADS_FIRST ? x : y;
      if (REVERSE_HEADS) batch = (HEADS_FIRST ? gridDim.y : gridDim.x) - 1 - batch, head = p.heads - 1 - head;
    }
  }
};

// The rows of a CTA's head that it takes, [row, stop), and the head's place in the grid.
struct RowsOfCta {
  u32 x = blockIdx.x;
  i32 row = 0, stop;

  DEVICE RowsOfCta(const Params& p) : stop(p.nq) {
    if constexpr (DIVIDED > 0) {
      u32 part = blockIdx.z, parts = gridDim.z;
      if constexpr (DIVIDED == 2) {
        // CTAs of whole heads, then those of the first parts of all others, then those of their next parts
        const bool is_whole = x < (u32)p.share.whole;
        part = is_whole ? 0 : quotient(x - p.share.whole, p.share.rest, p.share.rest_reciprocal);
        parts = is_whole ? 1 : p.share.pieces;
        x -= part * p.share.rest;
      }
      row = part * p.tiles * 64;
      if (part + 1 < parts) stop = row + p.tiles * 64;
    }
  }
};

// Whether a CTA fetches the next head to L2 while it computes, so that the search for that head's scales waits less.
// Not with three CTAs on a multiprocessor or static scales, where it costs more than it saves.
constexpr bool PREFETCHES_HEADS = HEAD_AMAX_IN_KERNEL && DIVIDED != 1 && WARPGROUPS == 1 && CTAS_PER_SM <= 2;

DEVICE void prefetch_tokens(const Tokens& x, i32 count) {
  constexpr i32 LINES = (HEAD_DIM * SIZE<IN> + 127) / 128;
  for (i32 i = threadIdx.x; i < count * LINES; i += THREADS)
    prefetch_line(x.at(i / LINES, i % LINES * (128 / SIZE<IN>)));
}

// Fetches the head of the CTA that will probably run where this one does.
DEVICE void prefetch_next_head(const Params& p) {
  u32 x = blockIdx.x + p.heads_at_once, y = 0;
  if constexpr (DIVIDED == 2) {
    if (x >= (u32)p.count) return;
  } else {
    y = blockIdx.y + x / gridDim.x, x %= gridDim.x;
    if (y >= gridDim.y) return;
  }
  const HeadOfCta next(p, x, y);
  const u32 kv_head = key_head(p, next.head);
  prefetch_tokens(Tokens(p.k, next.batch, kv_head), p.nk);
  prefetch_tokens(Tokens(p.v, next.batch, kv_head), p.nk);
  prefetch_tokens(Tokens(p.q, next.batch, next.head), p.nq);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(1, 1, CLUSTER)
#endif
    __launch_bounds__(THREADS, CTAS_PER_SM)
#if TMA
        attention(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
#else
    attention(const __grid_constant__ Params p) {
#endif
  extern __shared__ __align__(1024) u8 shared[];
  const u32 k_tile = shared_address(shared), v_tile = k_tile + K_BYTES;
  const RowsOfCta rows(p);
  const HeadOfCta own(p, rows.x, blockIdx.y);
  const u32 batch = own.batch, head = own.head;
  const u32 kv_head = key_head(p, head);
  const i32 warp = threadIdx.x / 32 % 4, row_of_warp = threadIdx.x % 32 / 4, row_of_thread = warp * 16 + row_of_warp;
  const i32 warpgroup =
      WARPGROUPS == 1 ? 0 : threadIdx.x / 128;  // a constant tells the compiler that all lanes have the same rows
  i32 row = rows.row + warpgroup * 64;
  const i32 stop = rows.stop;
  const i32 whole = REMAINDER_ROWS ? min(stop, p.nq & ~63) : stop;  // rows below this one belong to whole tiles
  const i32 first = row + (row < whole ? row_of_thread : row_of_warp);

#if TMA
  const Loader loader(p, maps, k_tile, v_tile, v_tile + V_BYTES, batch, kv_head);
#else
  Loader loader(p, k_tile, v_tile, batch, kv_head, threadIdx.x);
#endif
  QueryRows query(p, batch, head);
  HeadConstants constants(p, batch, head, kv_head);
  wait_for_previous_kernel(constants.addresses() | loader.addresses() | (u64)query.tokens.base);
#if HEAD_AMAX_IN_KERNEL
  const QuerySearch search(query.tokens, p.nq, k_tile);
  search.begin();
  if (Loader::HOLDS_KEYS) loader.begin_keys();
  if (Loader::HOLDS_VALUES) loader.begin_values(p, batch, kv_head);
  find_scales(search, loader, p.nk, (u32*)shared, constants.scales);
#endif
  zero_channels<THREADS>(k_tile, threadIdx.x);  // after the exchange of maxima, which uses the same shared memory
  if (SIZE<IN> > 1) constants.load();           // quantization needs them
  if (!Loader::HOLDS_KEYS) loader.begin_keys();
  if (PREFETCH_Q) query.begin_load(first, p.nq - 1);
#if BIAS
  const BiasRows bias(v_tile + V_BYTES + BARRIER_BYTES + VALUE_CODES_BYTES);
  const auto begin_bias = [&](i32 row) {  // row: the first of a tile
    if (!REMAINDER_ROWS || row < whole)
      bias.begin_load(p, batch, head, row + row_of_thread);
    else
      bias.begin_load_of_remainder(p, batch, head, row + row_of_warp);
  };
  begin_bias(row);
#endif
  if (!Loader::HOLDS_VALUES) loader.begin_values(p, batch, kv_head);
#if BIAS
  BiasRows::prefetch(p, batch, head, rows.row, stop);
#endif
  if (SIZE<IN> == 1) constants.load();
  RowTile tile;
#if BIAS
  tile.bias = bias;
#endif
  tile.score[0] = tile.score[1] = constants.of_scores(p);
  constants.scales.divide();
  loader.finish(constants.scales.k_inverse, constants.scales.v_inverse);
  __syncthreads();
  loader.wait();
  if (!ROW_SCALES) tile.set_limits();
  let_next_kernel_start();
  if (PREFETCHES_HEADS) prefetch_next_head(p);
  tile.prepare(k_tile, v_tile, p.nk);
  if (PREFETCH_Q) query.codes(constants.scales.q_inverse, tile.q);
  const i32 out_stride = (i32)p.out.n * SIZE<OUT>;
  const i64 out_head = (i64)(p.out.ptr + (head_offset(p.out, batch, head) + threadIdx.x % 4 * CHANNELS) * SIZE<OUT>);
  u8* out = (u8*)multiply_add(first, out_stride, out_head);
  const auto begin_rows = [&](i32 row) {
    if (!PREFETCH_Q) {
      query.begin_load(row, p.nq - 1);
      query.codes(constants.scales.q_inverse, tile.q);
    }
    if constexpr (ROW_SCALES) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i64 at = head_offset(p.score, batch, head) + min(row + 8 * h, p.nq - 1) * p.score.n;
        tile.score[h] = unpack_score(((const i64*)p.score.ptr)[at]);
      }
      tile.set_limits();
    }
  };
#if TWO_GROUPS
  const u32 value_codes = v_tile + V_BYTES + BARRIER_BYTES;
  if (may_lack_values(v_tile, p.nk) && find_valueless(v_tile, p.nk, value_codes)) {
    bool has_query = row < whole;  // of the first tile: without it the compiler would load that later for all heads
    for (; row < stop; row += 64 * WARPGROUPS) {
      const i32 r = row + row_of_thread;
      if (PREFETCH_Q && !has_query) {
        query.begin_load(r, p.nq - 1);
        query.codes(constants.scales.q_inverse, tile.q);
      }
      has_query = false;
      begin_rows(r);
#if BIAS
      cp_async_wait_all();
      bias.begin_load(p, batch, head, r);
      cp_async_wait_all();
#endif
      u8* const to = (u8*)multiply_add(r, out_stride, out_head);
      SplitRows(tile, k_tile, v_tile, value_codes).run(p, to, batch, head, r, constants.output_constants);
    }
    return;
  }
  constants.output_constants = without_gap(constants.output_constants);
#endif
  if (PREFETCH_Q && REMAINDER_ROWS) query.advance(row + 64 * WARPGROUPS >= whole);
  for (; row < whole; row += 64 * WARPGROUPS) {
    const i32 r = row + row_of_thread, next = row + 64 * WARPGROUPS;
    begin_rows(r);
    tile.active = row + (REMAINDER_ROWS ? 0 : warp * 16) < p.nq;  // with remainder rows true for all warps
    tile.scores();
    if (PREFETCH_Q && next < stop) {
      if (REMAINDER_ROWS)
        query.load();
      else
        query.begin_load(next + row_of_thread, p.nq - 1);
    }
    tile.exponentials_and_products();
#if BIAS
    if (next < stop) begin_bias(next);
#endif
    // Runs while the products run, as does what follows. Copying int8 codes without a test takes fewer instructions.
    if (PREFETCH_Q && (SIZE<IN> == 1 || next < stop)) query.codes(constants.scales.q_inverse, tile.q);
    if (PREFETCH_Q && REMAINDER_ROWS) query.advance(next + 64 * WARPGROUPS >= whole);
    tile.store(p, out, batch, head, r, constants.output_constants);
    out = (u8*)multiply_add(64 * WARPGROUPS, out_stride, (i64)out);
  }
#if REMAINDER_ROWS
  if (row < stop) {
    begin_rows(row + row_of_warp);
    RemainderRows remainder(tile, k_tile, v_tile,
                            shared + K_BYTES + V_BYTES + BARRIER_BYTES + VALUE_CODES_BYTES + BIAS_BYTES);
    remainder.run(constants.output_constants);
    out = (u8*)multiply_add(first < whole ? -16 * warp : 0, out_stride, (i64)out);
    remainder.store(p, out, batch, head, row + row_of_warp, constants.output_constants);
  }
#endif
}
