// The shared memory of long rows, a ring buffer of tiles of 128 keys, and its producers: a warpgroup by cp.async, or
// one thread by TMA. Macros: see long_rows_mainloop.cuh.
#pragma once
#include "params.cuh"
#include "quantize.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma_layout.cuh"

constexpr int GROUP = 128;  // threads per warpgroup
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int CTA_ROWS = 64 * CONSUMERS;
constexpr int TILE = 128, HALF = 64;  // keys per tile and per half tile
#ifndef TENSOR_DIM
#define TENSOR_DIM HEAD_DIM
#endif
#ifndef HEAD_AMAX_IN_KERNEL
#define HEAD_AMAX_IN_KERNEL 0
#endif
#ifndef TWO_GROUPS
#define TWO_GROUPS 0
#endif
#ifndef MANY_KEYS
#define MANY_KEYS 0
#endif
#ifndef REMAINDER_KEY_TILES
#define REMAINDER_KEY_TILES 0
#endif
constexpr int D_CHUNKS = HEAD_DIM / 16, D_STEPS = (HEAD_DIM + 31) / 32;
constexpr int LANE_CHANNELS = lane_channels(HEAD_DIM);
constexpr int K_WIDTH = HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : 128;  // bytes per row of K in shared memory
// int8 V is stored as V^T, one row of 128 keys per channel. 16-bit float V keeps its layout, in blocks of 64 channels.
constexpr bool FLOAT_VALUES = SIZE<VALUE> == 2;
constexpr int V_BLOCK = TILE * 128, V_BLOCKS = (HEAD_DIM + 63) / 64;
constexpr int K_BYTES = TILE * K_WIDTH, V_BYTES = FLOAT_VALUES ? V_BLOCKS * V_BLOCK : TILE * HEAD_DIM;
constexpr int V_HALF = (FLOAT_VALUES ? HALF * 128 : HALF) >> 4;  // offset from a descriptor to that of the next 64 keys
constexpr int STAGE_BYTES = (K_BYTES + V_BYTES + 1023) / 1024 * 1024;
constexpr int SCALE_BYTES = KEY_SCALES == 2 ? 4 * TILE : KEY_SCALES == 1 ? 16 : 0;  // per tile
// of intflash_bfp per tile, where its floats are quantized: a byte for each key, of ones where it has no value
constexpr int VALUELESS_BYTES = TWO_GROUPS && FLOAT_KV ? TILE : 0;
constexpr int CODES_BYTES = P_SHARED ? CTA_ROWS * TILE : 0;  // P, where it does not stay in registers
// floats that wait to be quantized (long_rows_quantize.cuh)
constexpr int STAGING_SLOTS = FLOAT_KV ? 2 : 0, STAGING_SLOT_BYTES = 16 * 1024;
constexpr int WARPS = THREADS / 32;
constexpr int TABLE_BYTES = P_TABLE ? 32 * 1024 : 0;  // see exp2_table.cuh
constexpr int COPIES_IN_FLIGHT = 2;

typedef RingPosition<STAGES> Stage;

struct SharedLayout {
  u32 table, tiles, query, codes, floats, scales, valueless, full, empty, maxima;
  DEVICE SharedLayout(u32 base)
      : table(base),
        tiles(base + TABLE_BYTES),
        query(tiles + STAGES * STAGE_BYTES),
        codes(query + CTA_ROWS * K_WIDTH),
        floats(codes + CODES_BYTES),
        scales(floats + STAGING_SLOTS * STAGING_SLOT_BYTES),
        valueless(scales + STAGES * SCALE_BYTES),
        full(valueless + STAGES * VALUELESS_BYTES),
        empty(full + 8 * STAGES),
        maxima(empty + 8 * STAGES) {}
  DEVICE u32 k_tile(u32 stage) const { return tiles + stage * STAGE_BYTES; }
  DEVICE u32 query_rows(u32 group) const { return query + group * 64 * K_WIDTH; }
  DEVICE u32 v_tile(u32 stage) const { return k_tile(stage) + K_BYTES; }
  DEVICE u32 k_scales(u32 stage) const { return scales + stage * SCALE_BYTES; }
  DEVICE u32 valueless_keys(u32 stage) const { return valueless + stage * VALUELESS_BYTES; }
  DEVICE void wait_full(const Stage& s) const { barrier_wait(full + 8 * s.stage, s.parity); }
  DEVICE void wait_empty(const Stage& s) const { barrier_wait(empty + 8 * s.stage, s.parity ^ 1); }
  DEVICE bool is_empty(const Stage& s) const { return barrier_test(empty + 8 * s.stage, s.parity ^ 1); }
  // Signals that the tile which was issued `ago` tiles before the one for stage `s` is complete.
  DEVICE void signal_full(const Stage& s, u32 ago) const {
    fence_async_proxy();
    barrier_arrive(full + 8 * ((s.stage + STAGES - ago) % STAGES));
  }
  DEVICE void signal_all_full(const Stage& s, u32& in_flight) const {
    cp_async_wait<0>();
    for (; in_flight; --in_flight) signal_full(s, in_flight);
  }
  DEVICE void release(u32 stage) const { barrier_arrive_if(empty + 8 * stage, threadIdx.x % 32 == 0); }
};

// A head of Q, of a batch, and its head of K and V.
struct Head {
  u32 batch, head, kv_head;
};

// The inverse functions of score_row, within 16 keys, and of value_row.
DEVICE u32 key_of_row(u32 row) { return (row & ~15u) | ((row & 6) << 1) | ((row & 8) >> 2) | (row & 1); }
DEVICE u32 channel_of_row(u32 row) {
  const u32 first = row / (4 * LANE_CHANNELS) * (4 * LANE_CHANNELS);
  return first + row / 2 % 4 * LANE_CHANNELS + (row - first) / 8 * 2 + row % 2;
}

// The part of a K tile that a thread copies: one 16-byte chunk of each of several rows. From row to row the
// shared-memory address advances by a constant and the global address by a multiple of the stride.
struct KeyTileLoader {
  static constexpr u32 WIDE = K_WIDTH / 16, AT_ONCE = GROUP / WIDE;
  const u8* from;
  i64 step;  // bytes between the rows that a thread copies
  u32 to;
  i32 visible;  // number of keys from this thread's first one on

  // Products with 8-bit P need the keys in the order of score_row.
  DEVICE KeyTileLoader(const Params& p, const SharedLayout& shared, const u8* base) {
    const u32 thread = threadIdx.x % GROUP, row = thread / WIDE, chunk = thread % WIDE;
    const u32 key = FLOAT_VALUES ? row : key_of_row(row);
    from = base + key * p.k.n + chunk * 16;
    step = AT_ONCE * p.k.n;
    to = shared.k_tile(0) + swizzled<K_WIDTH>(row, chunk);
    visible = chunk < D_CHUNKS ? p.nk - key : 0;
  }
  DEVICE void load(u32 stage, i32 first) {
    const u8* at = from;
#pragma unroll
    for (u32 i = 0; i < TILE; i += AT_ONCE) {
      cp_async_16_or_zeros(to + stage * STAGE_BYTES + i * K_WIDTH, at, first + (i32)i < visible);
      at += step;
    }
    from = at;
  }
};

template <bool>
struct ValueTileLoader {  // int8 V, as V^T
  static constexpr u32 AT_ONCE = GROUP / 8;
  const u8* from;
  i64 stride;
  u32 to;
  i32 visible;

  DEVICE ValueTileLoader(const Params& p, const SharedLayout& shared, const u8* base) {
    const u32 thread = threadIdx.x % GROUP, keys = thread % 8 * 16;
    from = base + channel_of_row(thread / 8) * p.v.d + keys;
    stride = p.v.d;
    to = shared.v_tile(0) + swizzled<128>(thread / 8, thread % 8);
    visible = p.nk - keys;
  }
  DEVICE void load(u32 stage, i32 first) const {
    const u8* at = from + first;
#pragma unroll
    for (u32 i = 0; i < HEAD_DIM; i += AT_ONCE) {
      cp_async_16_or_zeros(to + stage * STAGE_BYTES + i * 128, at, first < visible);
      at += (i32)(channel_of_row(i + AT_ONCE) - channel_of_row(i)) * stride;
    }
  }
};

template <>
struct ValueTileLoader<true> {
  static constexpr u32 AT_ONCE = GROUP / 8;  // keys per round
  const u8* from;
  i64 step;
  u32 to;
  i32 visible;

  DEVICE ValueTileLoader(const Params& p, const SharedLayout& shared, const u8* base) {
    const u32 thread = threadIdx.x % GROUP, key = thread / 8, chunk = thread % 8;
    from = base + key * p.v.n * SIZE<VALUE> + chunk * 16;
    step = AT_ONCE * p.v.n * SIZE<VALUE>;
    to = shared.v_tile(0) + swizzled<128>(key, chunk);
    visible = p.nk - key;
  }
  // The last block may have fewer channels; nothing is read past them.
  DEVICE void load(u32 stage, i32 first) {
    const u8* at = from;
    const u32 chunk = threadIdx.x % 8;
#pragma unroll
    for (u32 i = 0; i < TILE; i += AT_ONCE) {
#pragma unroll
      for (u32 block = 0; block < V_BLOCKS; ++block)
        if (block * 64 + 64 <= HEAD_DIM || block * 64 + chunk * 8 < HEAD_DIM)
          cp_async_16_or_zeros(to + stage * STAGE_BYTES + block * V_BLOCK + i * 128, at + block * 128,
                               first + (i32)i < visible);
      at += step;
    }
    from = at;
  }
};

// Loads K's scales of a tile: one for each key, or one for the tile.
DEVICE void load_scales(const Params& p, u32 to, const float* base, i32 first) {
  const i32 thread = threadIdx.x % GROUP;
  if (KEY_SCALES == 2)
    cp_async_4_or_zero(to + thread * 4, base + first + thread, first + thread < p.nk);
  else if (thread == 0)
    cp_async_4_or_zero(to, base + first / TILE, true);
}

// Producer that copies by all threads of the warpgroup, from any strides. V is loaded in the last pass only. The copies
// of up to COPIES_IN_FLIGHT tiles are in flight behind the tile whose full barrier was signalled. Before the producer
// blocks on a full ring it signals all of its copies, because otherwise the consumer warpgroups could not drift apart.
struct CpAsyncLoader {
  static constexpr u32 ARRIVALS = GROUP;  // arrivals that complete a full barrier

  template <int PASSES>
  DEVICE void run(const Params& p, const SharedLayout& shared, const Head& of, i32 tiles, Stage& at) const {
    KeyTileLoader keys(p, shared, p.k.ptr + head_offset(p.k, of.batch, of.kv_head));
    ValueTileLoader<FLOAT_VALUES> values(p, shared, p.v.ptr + head_offset(p.v, of.batch, of.kv_head) * SIZE<VALUE>);
    const float* scales = (const float*)p.k_scale.ptr + head_offset(p.k_scale, of.batch, of.kv_head);
    u32 in_flight = 0;
#pragma unroll 1
    for (int pass = 1; pass <= PASSES; ++pass) {
      if (pass == 2) keys.from -= (i64)tiles * TILE * p.k.n;
#pragma unroll 1
      for (i32 j = 0; j < tiles; ++j) {
        if (!shared.is_empty(at)) {
          shared.signal_all_full(at, in_flight);
          shared.wait_empty(at);
        }
        keys.load(at.stage, j * TILE);
        if (pass == PASSES) values.load(at.stage, j * TILE);
        if (KEY_SCALES) load_scales(p, shared.k_scales(at.stage), scales, j * TILE);
        cp_async_commit();
        at.next();
        if (++in_flight > COPIES_IN_FLIGHT) {
          cp_async_wait<COPIES_IN_FLIGHT>();
          shared.signal_full(at, in_flight--);
        }
      }
    }
    shared.signal_all_full(at, in_flight);
  }
  DEVICE void load_first_head(const Params&, const SharedLayout&) const {}
};

// Producer that loads by TMA, issued by one thread. It needs regular strides (see plan.cpp); CpAsyncLoader takes
// any strides.
struct TmaLoader {
  static constexpr u32 ARRIVALS = 1;
  const TensorMaps& maps;

  template <int PASSES>
  DEVICE void run(const Params&, const SharedLayout& shared, const Head& of, i32 tiles, Stage& at) const {
    if (threadIdx.x != 0) return;
    const i32 row = first_row(maps, of.batch, of.kv_head), matrix = matrix_of(maps, of.batch, of.kv_head);
#pragma unroll 1
    for (int pass = 1; pass <= PASSES; ++pass) {
#pragma unroll 1
      for (i32 j = 0; j < tiles; ++j, at.next()) {
        const u32 full = shared.full + 8 * at.stage;
        shared.wait_empty(at);
        barrier_expect(full, pass == PASSES ? K_BYTES + V_BYTES : K_BYTES);
        tma_load_keys(shared.k_tile(at.stage), maps, row, j * (TILE / 16), full);
        if (pass == PASSES)
          tma_load_values<HEAD_DIM, LANE_CHANNELS>(shared.v_tile(at.stage), maps, matrix, j * TILE, full);
      }
    }
  }
  DEVICE void load_first_head(const Params&, const SharedLayout&) const {}
};
