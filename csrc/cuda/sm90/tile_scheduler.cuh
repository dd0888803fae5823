// The tile scheduler of long rows: gives a persistent CTA one work tile after another. long_rows.cpp fills p.share
// (`schedule_ranges`, `schedule_resident_heads`).
#pragma once
#include "sm90/long_rows_load.cuh"

// The rows of a thread are `row` and row + 8. Rows from `end` on do not belong to the CTA.
struct ThreadRows : Head {
  i32 row, end;
};

// Reads threadIdx.x again, so that no register has to hold values derived from it in the meantime.
DEVICE u32 reread_thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Rows [row, end) of a head.
struct WorkTile : Head {
  i32 row, end;

  DEVICE WorkTile(const Params& p, u32 of, i32 row, i32 rows) : row(row), end(min(row + rows, p.nq)) {
    batch = quotient(of, p.heads, p.share.heads_reciprocal);
    head = of - batch * p.heads;
    kv_head = key_head(p, head);
  }
  DEVICE i32 tiles() const { return (end - row + 63) / 64; }
  // Returns the thread's rows of a row tile.
  DEVICE ThreadRows place(u32 thread, i32 tile) const {
    return {*this, row + tile * 64 + (i32)(thread % GROUP / 32 * 16 + thread % 32 / 4), end};
  }
  // Whether a row tile is computed as remainder rows.
  DEVICE bool is_remainder(const Params& p, i32 tile) const {
    return REMAINDER_KEY_TILES && p.nq - (row + tile * 64) < 64;
  }
  DEVICE void keep_in_registers() {
    keep_in_register(batch), keep_in_register(head), keep_in_register(kv_head), keep_in_register(row);
  }
};

// Hands out ranges round robin: the whole ones to all CTAs, then the smaller ones to the CTAs from `first` on.
struct RangeScheduler {
  u32 i;

  DEVICE RangeScheduler(const Params& p) : i(blockIdx.x) {
    if (i >= p.share.whole_of_all) begin_rest(p.share);
  }
  DEVICE bool done(const Params& p) const { return i >= p.share.pieces; }
  DEVICE void next(const Params& p) {
    const bool whole = i < p.share.whole_of_all;
    i += whole ? gridDim.x : gridDim.x - p.share.first;
    if (whole && i >= p.share.whole_of_all) begin_rest(p.share);
  }
  DEVICE void begin_rest(const Share& share) {
    i = blockIdx.x < share.first ? share.pieces : share.whole_of_all + blockIdx.x - share.first;
  }
  // The whole ranges of all heads come first, then the remaining rows of each head.
  DEVICE WorkTile work(const Params& p) const {
    const Share& share = p.share;
    if (i < share.whole_of_all) {
      const u32 of = quotient(i, share.whole, share.whole_reciprocal);
      const i32 piece = i - of * share.whole;  // the last rows see the most keys and come first
      return WorkTile(p, of, (CAUSAL ? share.whole - 1 - piece : piece) * CTA_ROWS, CTA_ROWS);
    }
    const u32 rest = i - share.whole_of_all, of = quotient(rest, share.rest, share.rest_reciprocal);
    const i32 rows = 64 * share.rest_tiles;
    return WorkTile(p, of, share.whole * CTA_ROWS + (rest - of * share.rest) * rows, rows);
  }
};

// For K/V resident in shared memory. The CTA's tiles of 64 rows are consecutive, from i to end, of which the last CTA
// may lack some. A work tile consists of those of one head.
struct ResidentScheduler {
  u32 i, end;

  DEVICE ResidentScheduler(const Params& p) {
    i = blockIdx.x * p.share.rest_tiles + min(blockIdx.x, p.share.first);
    end = i + p.share.rest_tiles + (blockIdx.x < p.share.first);
  }
  DEVICE bool done(const Params& p) const { return i >= end || i >= p.share.pieces; }
  DEVICE void next(const Params& p) { i = (head(p) + 1) * p.share.whole; }
  DEVICE u32 head(const Params& p) const { return quotient(i, p.share.whole, p.share.whole_reciprocal); }
  DEVICE WorkTile work(const Params& p) const {
    const u32 of = head(p);
    return WorkTile(p, of, 64 * (i - of * p.share.whole), 64 * (end - i));
  }
};

template <bool>
struct TileSchedulerOf {
  typedef RangeScheduler Type;
};
template <>
struct TileSchedulerOf<true> {
  typedef ResidentScheduler Type;
};
typedef TileSchedulerOf<KV_RESIDENT>::Type TileScheduler;
