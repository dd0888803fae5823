// Tiles of K and V in shared memory, and the operands that a warp's products (mma.sync) read from them.
//
// A row of K holds a key's channels. V is stored as it comes: a row for each key (KEY_MAJOR 0), or a row for each
// channel with contiguous keys (KEY_MAJOR 1), as 8-bit products need it. Rows are an odd number of 16-byte chunks
// apart, so that eight adjacent rows lie in different banks.
//
// Macros: HEAD_DIM, VALUE_DIM, SLICES, KEYS, STAGES, WARPS, ROW_TILES, KEY_MAJOR; see any_rows.cu. READ_ONCE: 1 where
// no other CTA reads the same tiles, so that L2 gives their lines up first.
#pragma once
#include "mma.cuh"
#include "params.cuh"

#ifndef READ_ONCE
#define READ_ONCE 0
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * ROW_TILES, CTA_ROWS = WARP_ROWS * WARPS;
constexpr int K_STEPS = (HEAD_DIM + 31) / 32;                   // products over 32 channels
constexpr int K_CHUNKS = (HEAD_DIM + 15) / 16;                  // chunks of 16 channels
constexpr int ALL_V_CHUNKS = (VALUE_DIM + 15) / 16;             // the same of V and the output
constexpr int V_CHUNKS = (ALL_V_CHUNKS + SLICES - 1) / SLICES;  // those of a CTA
constexpr int K_PITCH = 16 * (2 * K_STEPS + 1);                 // bytes between rows
constexpr int V_PITCH = KEY_MAJOR ? KEYS + 16 : 16 * (V_CHUNKS | 1);
constexpr int K_BYTES = KEYS * K_PITCH, V_BYTES = (KEY_MAJOR ? 16 * V_CHUNKS : KEYS) * V_PITCH;

DEVICE void load_matrices_transposed(u32 from, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// Of every 16 columns of two accumulators of Q K^T, lane q of a quad holds columns 2q, 2q + 1, 8 + 2q and 9 + 2q, while
// the left operand of P V needs keys 4q to 4q + 3 there. So key k of a tile is stored in row key_row(k).
DEVICE u32 key_row(u32 key) { return (key & ~15u) | ((key & 2) << 2) | ((key >> 1) & 6) | (key & 1); }
// In the same way channel 16c + 2g + e of V, where it has contiguous keys, is stored in row 16c + 8e + g. Lane q of a
// quad then holds outputs of channels 16c + 4q to 16c + 4q + 3.
DEVICE u32 channel_row(u32 channel) { return (channel & ~15u) | ((channel & 1) << 3) | ((channel >> 1) & 7); }

DEVICE i32 first_chunk() { return SLICES > 1 ? blockIdx.y * V_CHUNKS : 0; }

// Copies ROWS rows of WIDTH chunks of 16 bytes. from(row, chunk) and to(row, chunk) return addresses.
template <int ROWS, int WIDTH, class From, class To>
DEVICE void copy_rows(From from, To to) {
  const u64 policy = READ_ONCE ? evict_first() : 0;
#pragma unroll
  for (int round = 0; round < (ROWS * WIDTH + THREADS - 1) / THREADS; ++round) {
    const u32 i = threadIdx.x + round * THREADS;
    if (ROWS * WIDTH % THREADS && i >= ROWS * WIDTH) continue;
    if (READ_ONCE)
      cp_async_16(to(i / WIDTH, i % WIDTH), from(i / WIDTH, i % WIDTH), policy);
    else
      cp_async_16(to(i / WIDTH, i % WIDTH), from(i / WIDTH, i % WIDTH));
  }
}

// Copies tiles of one head's keys to shared memory. Keys past the last one repeat it, or are V's padding.
struct TileLoader {
  const u8 *k, *v;         // the head's first key
  u32 k_stride, v_stride;  // bytes between keys; of V with contiguous keys, between channels
  i32 keys;

  DEVICE TileLoader(const Params& p, u32 batch, u32 kv_head, i64 first_key, i32 keys)
      : k(p.k.ptr + head_offset(p.k, batch, kv_head) + first_key * p.k.n),
        v(p.v.ptr + head_offset(p.v, batch, kv_head) + first_key * p.v.n),
        k_stride(p.k.n),
        v_stride(KEY_MAJOR ? p.v.d : p.v.n),
        keys(keys) {}
  DEVICE void load_k(u32 to, i32 first) const {
    copy_rows<KEYS, K_CHUNKS>(
        [&](u32 row, u32 chunk) { return k + (u64)(u32)min(first + (i32)row, keys - 1) * k_stride + chunk * 16; },
        [&](u32 row, u32 chunk) { return to + key_row(row) * K_PITCH + chunk * 16; });
  }
  DEVICE void load_v(u32 to, i32 first) const {
    if constexpr (KEY_MAJOR)
      copy_rows<16 * V_CHUNKS, KEYS / 16>(
          [&](u32 row, u32 chunk) {
            return v + (u64)min(16 * first_chunk() + (i32)row, VALUE_DIM - 1) * v_stride +
                   min(first + (i32)chunk * 16, (keys - 1) & ~15);
          },
          [&](u32 row, u32 chunk) { return to + channel_row(row) * V_PITCH + chunk * 16; });
    else
      copy_rows<KEYS, V_CHUNKS>(
          [&](u32 row, u32 chunk) {
            return v + (u64)(u32)min(first + (i32)row, keys - 1) * v_stride +
                   min(first_chunk() + (i32)chunk, ALL_V_CHUNKS - 1) * 16;
          },
          [&](u32 row, u32 chunk) { return to + key_row(row) * V_PITCH + chunk * 16; });
  }
};

// A ring of STAGES tiles in shared memory, BYTES each. load(step, address) issues a thread's copies of a step, in
// order.
template <int BYTES, class Load>
struct TileRing {
  u32 base;
  Load load;
  u32 stage = 0, free = STAGES - 1;

  DEVICE TileRing(u32 base, Load load) : base(base), load(load) {
#pragma unroll 1
    for (i32 i = 0; i < STAGES - 1; ++i) issue(i, i);
  }
  DEVICE void issue(i32 step, u32 to) {
    load(step, base + to * BYTES);
    cp_async_commit();
  }
  // Returns the address of the tile of the next step, once the copies of all threads have arrived.
  DEVICE u32 wait() {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // also: all warps have left the free stage
    return base + stage * BYTES;
  }
  // Issues the copies into the free stage, after `wait` of step `step`. The tile's first products should be issued
  // before, so that they run while addresses are computed.
  DEVICE void refill(i32 step) {
    issue(step + STAGES - 1, free);
    free = stage, stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
};

// All codes of a key of V's tile, or of fewer channels where CTAs share them, where it has a row for each key.
DEVICE u32 codes_of_key(u32 v_tile, u32 key) {
  u32 codes = 0;
#pragma unroll
  for (int chunk = 0; chunk < V_CHUNKS; ++chunk) {
    u32 w[4];
    load_shared(v_tile + key_row(key) * V_PITCH + chunk * 16, w);
    codes |= w[0] | w[1] | w[2] | w[3];
  }
  return codes;
}

// The right operands of tiles of K and V, from key `first` of the tiles on (a multiple of 32).
struct TileOperands {
  u32 k, v;  // the lane's addresses

  DEVICE TileOperands(u32 k_tile, u32 v_tile, u32 first = 0) {
    const u32 lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2 * 16;
    k = k_tile + (first + row) * K_PITCH + chunk;
    v = v_tile + (KEY_MAJOR ? row * V_PITCH + first + chunk : (first + lane) * V_PITCH);
  }
  // 32 channels of the 16 keys of a group: the operands of its two tiles of scores.
  DEVICE void keys(int group, int step, OperandB (&b)[2]) const {
    u32 r[4];
    load_matrices(k + group * 16 * K_PITCH + step * 32, r);
    b[0] = {r[0], r[1]}, b[1] = {r[2], r[3]};
  }
  // 32 keys of 16 channels: the operands of even and of odd channels.
  DEVICE void values(int step, int chunk, OperandB (&b)[2]) const {
    u32 r[4];
    if constexpr (KEY_MAJOR) {
      load_matrices(v + chunk * 16 * V_PITCH + step * 32, r);
      b[0] = {r[0], r[1]}, b[1] = {r[2], r[3]};
    } else {  // pairs of channels are transposed, then their bytes are sorted
      load_matrices_transposed(v + step * 32 * V_PITCH + chunk * 16, r);
      b[0] = {permute(r[0], r[1], 0x6420), permute(r[2], r[3], 0x6420)};
      b[1] = {permute(r[0], r[1], 0x7531), permute(r[2], r[3], 0x7531)};
    }
  }
};
