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

#if HEAD_AMAX_IN_KERNEL
// Returns the largest magnitude of this CTA's part of a head's tokens: of all of them, or of as many as each CTA of the
// cluster takes.
template <int AT_ONCE>
DEVICE u32 largest_of_part(const Tokens& x, i32 count) {
  const i32 each = (count + CLUSTER - 1) / CLUSTER, first = CLUSTER > 1 ? min((i32)blockIdx.z * each, count - 1) : 0;
  return largest_magnitude<IN, HEAD_DIM, THREADS, AT_ONCE>(x.at(first, 0), x.stride, min(each, count - first),
                                                           threadIdx.x);
}

// Computes the scales of the head from its own maxima. The warps of the CTA, or of all CTAs of the cluster, exchange
// their maxima in shared memory that is not in use yet.
DEVICE void find_scales(const Params& p, const Tokens& q, const Tokens& k, const Tokens& v, u32* exchange,
                        Scales<IN, HEAD_AMAX_IN_KERNEL>& scales) {
  constexpr int WARPS = THREADS / 32, ROUNDS = (KEYS * HEAD_DIM * SIZE<IN> / 16 + THREADS - 1) / THREADS;
  constexpr int AT_ONCE = ROUNDS < 13 ? ROUNDS : 13;
  u32 all[3] = {largest_of_part<AT_ONCE>(q, p.nq), largest_of_part<AT_ONCE>(k, p.nk),
                largest_of_part<AT_ONCE>(v, p.nk)};
  maxima_of_cluster<CLUSTER, WARPS>(all, exchange);
  scales.q = scale_of_magnitude<IN>(all[0]);
  scales.k = scale_of_magnitude<IN>(all[1]);
  scales.v = scale_of_magnitude<IN>(all[2]);
}
#endif

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
  u32 batch = HEADS_FIRST ? blockIdx.y : blockIdx.x, head = HEADS_FIRST ? blockIdx.x : blockIdx.y;
  if (REVERSE_HEADS) {  // the previous kernel has left the last heads in L2
    batch = (HEADS_FIRST ? gridDim.y : gridDim.x) - 1 - batch;
    head = p.heads - 1 - head;
  }
  const u32 kv_head = key_head(p, head);
  const i32 warp = threadIdx.x / 32 % 4, row_of_warp = threadIdx.x % 32 / 4, row_of_thread = warp * 16 + row_of_warp;
  const i32 warpgroup =
      WARPGROUPS == 1 ? 0 : threadIdx.x / 128;  // a constant tells the compiler that all lanes have the same rows
  i32 row = ((ALL_ROWS ? 0 : blockIdx.z * p.tiles) + warpgroup) * 64;
  const i32 stop = ALL_ROWS ? p.nq : min((i32)(blockIdx.z + 1) * p.tiles * 64, p.nq);
  const i32 whole = REMAINDER_ROWS ? min(stop, p.nq & ~63) : stop;  // rows below this one belong to whole tiles
  const i32 first = row + (row < whole ? row_of_thread : row_of_warp);

#if TMA
  const TmaHeadLoader<THREADS> loader(p, maps, k_tile, v_tile, v_tile + V_BYTES, batch, kv_head);
#else
  HeadLoader<THREADS> loader(p, k_tile, v_tile, batch, kv_head, threadIdx.x);
#endif
  QueryRows query(p, batch, head);
  HeadConstants constants(p, batch, head, kv_head);
  wait_for_previous_kernel(constants.addresses() | loader.addresses() | (u64)query.tokens.base);
#if HEAD_AMAX_IN_KERNEL
  find_scales(p, query.tokens, loader.keys.tokens, loader.values.tokens, (u32*)shared, constants.scales);
#endif
  if (SIZE<IN> > 1) constants.load();  // quantization needs them
  loader.begin_keys();
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
  loader.begin_values(p, batch, kv_head);
#if BIAS
  BiasRows::prefetch(p, batch, head, ALL_ROWS ? 0 : blockIdx.z * p.tiles * 64, stop);
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
