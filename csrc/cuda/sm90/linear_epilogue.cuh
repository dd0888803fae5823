// What becomes of a linear's accumulators (docs/numerics.md, section 4): the requantization, and one of four epilogues.
//
// A thread has rows `row` and row + 8 of a tile. Of each 32 columns it has 8 adjacent ones, because the weights' rows
// are placed so in shared memory (linear.cu).
#pragma once
#include "params.cuh"
#include "sm90/wgmma_layout.cuh"

enum Epilogue { CODES, TABLE, RESIDUAL, ACCUMULATOR };

// hopper.py fills the same fields in the same order.
struct LinearParams {
  const u8* x;
  const u8* weight;
  const i32* bias;
  const i32* multiplier;
  const u8* table;
  const u8* residual;
  const i32* store_rows;  // where each product row of an image is stored, or null
  u8* out;
  i32 rows, columns;     // of the product
  i32 steps;             // of 128 codes of a row
  i32 shift;             // of the requantization; of its upper word without WIDE_SHIFT
  i32 low, high;         // limits of the output, or of a table's index
  u32 image_rows;        // rows of an image in the product
  u32 out_rows;          // and in the output
  u32 image_reciprocal;  // for `quotient`
  u32 padding;
};

constexpr int GROUPS = COLUMNS / 32;  // of 32 columns
constexpr int OUT_BYTES = sizeof(OUT);
constexpr int WORDS = 8 * OUT_BYTES / 4;  // of the 8 columns of a thread
constexpr int CONSTANT_BYTES = EPILOGUE == ACCUMULATOR ? COLUMNS * 4 : COLUMNS * 8;
// A table has TABLE_COPIES copies, side by side in each 128 bytes of shared memory, so that lanes rarely conflict.
constexpr int TABLE_SHARED_BYTES = EPILOGUE == TABLE ? (OUT_BYTES << TABLE_BITS) * TABLE_COPIES : 0;
constexpr u32 TABLE_CHUNK = 128 / TABLE_COPIES;
constexpr bool PREFETCHES = EPILOGUE == RESIDUAL && OUT_BYTES == 2;

// Fills the constants of the CTA's columns, in the order in which a thread reads them: bias and multiplier of two
// adjacent columns. thread: of `threads`.
DEVICE void fill_constants(const LinearParams& p, u32 to, i32 first_column, u32 thread, u32 threads) {
#pragma unroll 1
  for (u32 pair = thread; pair < COLUMNS / 2; pair += threads) {
    const i32 column = first_column + pair / 16 * 32 + pair % 4 * 8 + pair / 4 % 4 * 2;
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (column + j < p.columns) {
        w[j] = load_constant(p.bias + column + j);
        if (EPILOGUE != ACCUMULATOR) w[2 + j] = load_constant(p.multiplier + column + j);
      }
    }
    if (EPILOGUE == ACCUMULATOR)
      store_shared(to + pair * 8, {w[0], w[1]});
    else
      store_shared(to + pair * 16, w);
  }
}

DEVICE void fill_table(const LinearParams& p, u32 to, u32 thread, u32 threads) {
  if constexpr (EPILOGUE == TABLE) {
    constexpr u32 WORDS_OF_CHUNK = TABLE_CHUNK / 4;
    for (u32 word = thread; word < TABLE_SHARED_BYTES / 4; word += threads) {
      const u32 line = word / 32, in_chunk = word % WORDS_OF_CHUNK;
      store_shared(to + word * 4, load_constant(p.table + 4 * (line * WORDS_OF_CHUNK + in_chunk)));
    }
  }
}

// The rows of a thread's tile: where they are in the output and in the residual, in bytes from the CTA's first column.
struct OutputRows {
  bool exists[2];
  i64 out[2], residual[2];

  DEVICE OutputRows(const LinearParams& p, i32 row, i32 first_column) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32 from = row + 8 * h;
      exists[h] = from < p.rows;
      i64 to = from, fixed = from;
      if (MAPPED || CONSTANT_RESIDUAL) {
        const u32 image = quotient(from, p.image_rows, p.image_reciprocal);
        fixed = from - (i32)(image * p.image_rows);
        if (MAPPED) fixed = exists[h] ? p.store_rows[fixed] : 0;
        to = (i64)image * p.out_rows + fixed;
      }
      out[h] = (to * p.columns + first_column + threadIdx.x % 4 * 8) * OUT_BYTES;
      residual[h] = CONSTANT_RESIDUAL ? (fixed * p.columns + first_column + threadIdx.x % 4 * 8) * OUT_BYTES : out[h];
    }
  }
};

struct EpilogueOfTile {
  const LinearParams& p;
  u32 constants, table;  // shared addresses; the table's is that of the lane's copy
  i32 column;            // the thread's first one
  u32 residual[PREFETCHES ? GROUPS : 1][2][4];

  DEVICE EpilogueOfTile(const LinearParams& p, u32 constants, u32 table, i32 first_column)
      : p(p),
        constants(constants + threadIdx.x % 4 * (EPILOGUE == ACCUMULATOR ? 8 : 16)),
        table(table + threadIdx.x % TABLE_COPIES * TABLE_CHUNK),
        column(first_column + threadIdx.x % 4 * 8) {}

  // Whether the thread's 8 columns of a group exist.
  DEVICE bool has_group(int g) const { return column + g * 32 < p.columns; }

  // Begins to load the residual, long before it is needed.
  DEVICE void prefetch(const OutputRows& rows) {
    if constexpr (PREFETCHES) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (rows.exists[h] && has_group(g))
            load_global(p.residual + rows.residual[h] + g * 32 * OUT_BYTES, residual[g][h]);
    }
  }

  DEVICE i32 requantized(i32 acc, i32 multiplier) const {
    const i64 wide = multiply_add(acc, multiplier, WIDE_SHIFT ? 1ll << (p.shift - 1) : 1ll << (p.shift + 31));
    if (!WIDE_SHIFT) return (i32)(wide >> 32) >> p.shift;
    const i64 y = wide >> p.shift;  // saturated, which leaves room for a residual of 24 bits
    return (i32)min(max(y, -(1ll << 30)), 1ll << 30);
  }

  DEVICE u32 lookup(i32 y) const {
    const u32 at = (min(max(y, p.low), p.high) - p.low) * OUT_BYTES;
    const u32 from = table + at + (at & ~(TABLE_CHUNK - 1)) * (TABLE_COPIES - 1);
    u32 entry;
    if (OUT_BYTES == 1)
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(entry) : "r"(from));
    else
      asm volatile("ld.shared.u16 %0, [%1];" : "=r"(entry) : "r"(from));
    return entry;
  }

  // The values of 8 columns as they are stored.
  DEVICE void packed(const i32 (&y)[8], u32 (&w)[WORDS]) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (EPILOGUE == TABLE && OUT_BYTES == 1)
        w[i] = permute(permute(lookup(y[4 * i]), lookup(y[4 * i + 1]), 0x3340),
                       permute(lookup(y[4 * i + 2]), lookup(y[4 * i + 3]), 0x3340), 0x5410);
      else if constexpr (EPILOGUE == TABLE)
        w[i] = permute(lookup(y[2 * i]), lookup(y[2 * i + 1]), 0x5410);
      else if constexpr (OUT_BYTES == 1)
        w[i] = pack_bytes(max(y[4 * i], p.low), max(y[4 * i + 1], p.low), max(y[4 * i + 2], p.low),
                          max(y[4 * i + 3], p.low));
      else if constexpr (OUT_BYTES == 2)
        w[i] = pack_halves(max(y[2 * i], p.low), max(y[2 * i + 1], p.low));
      else
        w[i] = EPILOGUE == ACCUMULATOR ? y[i] : min(max(y[i], p.low), p.high);
    }
  }

  DEVICE void add_residual(i32 (&y)[8], const OutputRows& rows, int g, int h) const {
    if constexpr (PREFETCHES) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[2 * i] += (i32)(i16)residual[g][h][i];
        y[2 * i + 1] += (i32)residual[g][h][i] >> 16;
      }
    } else if (rows.exists[h]) {
      u32 w[8];
      load_global(p.residual + rows.residual[h] + g * 32 * OUT_BYTES, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] += (i32)w[i];
    }
  }

  DEVICE void store(const OutputRows& rows, const i32 (&acc)[COLUMNS / 2]) const {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      if (!has_group(g)) break;
      i32 y[2][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = g * 4 + i;
        if constexpr (EPILOGUE == ACCUMULATOR) {
          u32 bias[2];
          load_shared(constants + pair * 32, bias);
#pragma unroll
          for (int e = 0; e < 4; ++e) y[e / 2][2 * i + e % 2] = acc[4 * pair + e] + (i32)bias[e % 2];
        } else {
          u32 w[4];
          load_shared(constants + pair * 64, w);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            y[e / 2][2 * i + e % 2] = requantized(acc[4 * pair + e] + (i32)w[e % 2], w[2 + e % 2]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (EPILOGUE == RESIDUAL) add_residual(y[h], rows, g, h);
        u32 w[WORDS];
        packed(y[h], w);
        if (rows.exists[h]) store_global(p.out + rows.out[h] + g * 32 * OUT_BYTES, w);
      }
    }
  }
};
