// The bias of short rows: int32 in 2^-20 octave, NO_SCORE for an absent key. Macros: see short_rows_mainloop.cuh.
#pragma once
#include "exp2.cuh"
#include "params.cuh"

constexpr i64 ABSENT_T = -(1ll << 62);  // below every T; its p is 0

// The biases of a thread's rows `row` and row + 8: of each 16 keys four, from 4 (lane % 4) on. Each thread copies what
// it reads itself to shared memory, ahead of time, so that no thread waits for another and no registers hold them.
struct BiasRows {
  static constexpr int GROUPS = KEYS / 16, THREADS = 128 * WARPGROUPS;
  static constexpr i32 REACH = 32 << 20;  // 32-bit exponents hold biases in [-REACH, REACH)
  u32 mine;                               // address of this thread's first four biases

  BiasRows() = default;
  DEVICE BiasRows(u32 shared) : mine(shared + threadIdx.x * 16) {}
  DEVICE u32 place(int group, int h) const { return mine + (2 * group + h) * THREADS * 16; }

  // Keys past the last one repeat others.
  DEVICE void begin_load(const Params& p, u32 batch, u32 head, i32 row) const {
    const u32 b = p.bias_reciprocal ? batch - __umulhi(batch, p.bias_reciprocal) * p.bias_batches : batch;
    const i32* base = (const i32*)p.bias.ptr + head_offset(p.bias, b, head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32* biases = base + min(row + 8 * h, p.nq - 1) * p.bias.n;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        const i32 key = 16 * group + threadIdx.x % 4 * 4;
        if constexpr (BIAS == 4) {
          cp_async_16(place(group, h), biases + (group + 1 < GROUPS ? key : min(key, p.nk - 4)));
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            cp_async_4_or_zero(place(group, h) + 4 * i,
                               biases + (group + 1 < GROUPS ? key + i : min(key + i, p.nk - 1)), true);
        }
      }
    }
    cp_async_commit();
  }
  DEVICE void load(int group, int h, i32 (&x)[4]) const { load_shared(place(group, h), (u32(&)[4])x); }
};
