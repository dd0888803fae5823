// The bias of short rows: int32, NO_SCORE for an absent key. Macros: see short_rows_mainloop.cuh.
#pragma once
#include "exp2.cuh"
#include "params.cuh"

// The biases of a thread's rows `row` and row + 8: of each 16 keys four, from 4 (lane % 4) on. Each thread copies what
// it reads itself to shared memory, ahead of time, so that no thread waits for another and no registers hold them.
struct BiasRows {
  static constexpr int GROUPS = KEYS / 16, THREADS = 128 * WARPGROUPS;
  static constexpr int SHIFT = 24 - BIAS_FRACTION_BITS;  // from a bias's unit to 2^-24 octave
  static constexpr i32 REACH = 32 << (24 - SHIFT);       // 32-bit exponents hold biases in [-REACH, REACH)
  // Returns T of a score with its bias.
  DEVICE static i64 add(i32 bias, i64 t) { return bias == NO_SCORE ? ABSENT_T : multiply_add(bias, BIAS_UNIT, t); }
  u32 mine;  // address of this thread's first four biases

  BiasRows() = default;
  DEVICE BiasRows(u32 shared) : mine(shared + threadIdx.x * 16) {}
  DEVICE u32 place(int group, int h) const { return mine + (2 * group + h) * THREADS * 16; }

  // Prefetches rows [row, end) to L2, because the copies of one tile would not keep memory busy.
  DEVICE static void prefetch(const Params& p, u32 batch, u32 head, i32 row, i32 end) {
    constexpr i32 LINE = 32, LINES = (KEYS + LINE - 1) / LINE;  // keys of 128 bytes
    const i32 rows = p.bias.n ? end - row : 1;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < rows * LINES; i += THREADS) {
      const i32* line = row_of(p, batch, head, row + i / LINES) + min(i % LINES * LINE, p.nk - 1);
      prefetch_line(line);
    }
  }
  DEVICE static const i32* row_of(const Params& p, u32 batch, u32 head, i32 row) {
    const u32 b = mask_batch(batch, p.bias_batches, p.bias_reciprocal);
    return (const i32*)p.bias.ptr + head_offset(p.bias, b, head) + min(row, p.nq - 1) * p.bias.n;
  }
  DEVICE void begin_load(const Params& p, u32 batch, u32 head, i32 row) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32* biases = row_of(p, batch, head, row + 8 * h);
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) copy(p, biases, group, group + 1 == GROUPS, place(group, h));
    }
    cp_async_commit();
  }
  // For remainder rows, where a warp has every fourth group of row `row`: its i-th one is then group i of `load`.
  DEVICE void begin_load_of_remainder(const Params& p, u32 batch, u32 head, i32 row) const {
    const i32* biases = row_of(p, batch, head, row);
#pragma unroll
    for (int i = 0; i < (GROUPS + 3) / 4; ++i) copy(p, biases, 4 * i + threadIdx.x / 32 % 4, true, place(i, 0));
    cp_async_commit();
  }
  // Keys past the last one repeat others.
  DEVICE void copy(const Params& p, const i32* biases, i32 group, bool last, u32 to) const {
    const i32 key = 16 * group + threadIdx.x % 4 * 4;
    if constexpr (BIAS == 4) {
      cp_async_16(to, biases + (last ? min(key, p.nk - 4) : key));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        cp_async_4_or_zero(to + 4 * i, biases + (last ? min(key + i, p.nk - 1) : key + i), true);
    }
  }
  DEVICE void load(int group, int h, i32 (&x)[4]) const { load_shared(place(group, h), (u32(&)[4])x); }
};
