// Attention of few rows over many keys (decode), by kernels, one for each STEP. The queries of all query heads that
// share a key head are rows of the same tiles, so that K and V are read once for each tile of rows. CTAs take ranges of
// the keys, and each warp of a CTA takes 32 keys of a tile.
//
//   0  Q K^T and the row maxima of each range
//   1  P below the exact maximum of all ranges, and P V; the last CTA of a tile of rows stores the output
//   2  of intflash_bfp: the same again of heads some of whose keys have no value
//
// All sums are exact integers, so that any split of the keys gives the same bits.
//
// L2 keeps the scores from step 0 to step 1, because it gives up the lines of K and V first.
//
// Of intflash_bfp, steps 0 and 1 take all keys for keys with a value, because a pass over V before them would take half
// of the time that they do. Step 1 finds the keys without a value in its tiles of V, and the maxima that step 2 needs.
// The sums have 64 bits, because there may be more keys than 32 bits hold the sums of.
//
// Macros: STEP, TWO_GROUPS, LANE_ROWS (see softmax.cuh), and those of any_rows.cu without PACKED, WINDOW, ROW_TILES
// and MANY_KEYS. METHOD is any but Online, and KEYS is WARP_KEYS * WARPS. SCORES: 0 the score constants are p.score; 1
// they are computed here from p.q_scale and p.k_scale; 2 so is Q's scale, of heads that have one row each.
#define ROW_TILES 1
#define WARP_KEYS 32
#define READ_ONCE 1
#include "sm80/rows.cuh"

constexpr int ROWS = 8 * LANE_ROWS;
constexpr int PADDED_CHANNELS = 16 * ALL_V_CHUNKS, DIGITS = METHOD::DIGITS, KINDS = METHOD::KINDS;
// Sums of a row and a warp, int32: accumulators of each digit, then the sums of p, which TWO_GROUPS has of both kinds
// of keys. The pitch puts adjacent rows in different banks.
constexpr int OWN_CHANNELS = 16 * V_CHUNKS, WARP_SUMS = DIGITS * (OWN_CHANNELS + 1) + TWO_GROUPS;
constexpr int WARP_PITCH = (WARP_SUMS + 15) / 32 * 32 + 16;

// The same of a row and all keys: CHANNELS and then LAST numbers, in which TWO_GROUPS has both digits.
#if TWO_GROUPS
typedef i64 Sum;
constexpr int CHANNELS = PADDED_CHANNELS, LAST = 3, COPIES = 2;  // the last: the octave of the keys without a value
#else
typedef i32 Sum;
constexpr int CHANNELS = DIGITS * PADDED_CHANNELS, LAST = DIGITS, COPIES = 1;
#endif
constexpr int ROW_SUMS = CHANNELS + LAST;
// What the CTAs of a tile of rows add up: with TWO_GROUPS one of step 1 and one of step 2.
struct TileSums {
  Sum row[ROWS][ROW_SUMS];
  // how many CTAs have added their sums, and in the upper half how many of them have found keys without a value
  u64 arrived;
};

// The rows and the range of keys of a CTA.
struct Work {
  const Params& p;
  u32 of, key_head, batch, kv_head;  // of: counts the tiles of rows, and key_head the key heads, of all batches
  i32 first_row, rows;               // of the tile, in the rows of the key head
  i32 split, keys;
  i32 first, last;  // keys of the range
  i64 k_start = 0;

  DEVICE Work(const Params& p, u32 index) : p(p) {
    of = quotient(index, p.split.splits, p.split.splits_reciprocal), split = index - of * p.split.splits;
    key_head = quotient(of, p.split.row_tiles, p.split.row_tiles_reciprocal);
    batch = quotient(key_head, p.split.kv_heads, p.split.heads_reciprocal),
    kv_head = key_head - batch * p.split.kv_heads;
    first_row = (of - key_head * p.split.row_tiles) * ROWS, rows = min(all_rows() - first_row, ROWS), keys = p.nk;
    first = split * p.split.keys, last = min(first + p.split.keys, keys);
  }
  DEVICE i32 all_rows() const { return p.split.group * p.nq; }
  // A row past the last one stands for the last one.
  DEVICE RowPlace place(i32 row) const {
    const u32 r = first_row + min(row, rows - 1), head = quotient(r, p.nq, p.split.queries_reciprocal);
    return {kv_head * p.split.group + head, r - head * p.nq};
  }
  DEVICE const u32* valueless(const Params& p) const { return valueless_words(p, batch, kv_head, 0); }
  DEVICE i32 seen(i32 row) const { return CAUSAL ? max(min(keys, (i32)place(row).row + p.causal + 1), 0) : keys; }
  DEVICE i32 tiles() const { return (last - first + KEYS - 1) / KEYS; }
  // The first of this warp's keys in a tile.
  DEVICE i32 first_key(i32 tile) const { return first + tile * KEYS + warp_keys(); }
  DEVICE static i32 warp_keys() { return threadIdx.x / 32 * WARP_KEYS; }
  DEVICE i32* scores(i32 row) const {
    return p.split.scores + ((i64)key_head * all_rows() + first_row + row) * p.split.pitch;
  }
  DEVICE TileSums& sums(int copy = STEP == 2) const { return ((TileSums*)p.split.sums)[(i64)of * COPIES + copy]; }
  DEVICE i64* maxima(i32 split) const { return p.split.maxima + ((i64)of * p.split.splits + split) * (KINDS * ROWS); }
};

// Reads what other CTAs have written while this one runs.
template <typename T>
DEVICE T read_written(const T& x) {
  return *(volatile const T*)&x;
}
// Read the sums of all keys: an accumulator of a row, and what stands for the row.
#if TWO_GROUPS
DEVICE void read_channel(const Sum* row, i32 channel, i32 fraction, P16Accumulator& acc) {
  acc = rounded(read_written(row[channel]), fraction);
}
DEVICE RowSum read_row(const Sum* row, i32 fraction) {
  const Sum* last = row + CHANNELS;
  return SplitRow{0, 0, STEP == 2 ? (i32)read_written(last[2]) : NO_EXPONENT}.sum(read_written(last[0]),
                                                                                  read_written(last[1]), fraction);
}
#else
DEVICE void read_channel(const Sum* row, i32 channel, i32, i32& acc) { acc = read_written(row[channel]); }
DEVICE void read_channel(const Sum* row, i32 channel, i32, P16Accumulator& acc) {
  acc = {read_written(row[channel]), read_written(row[channel + PADDED_CHANNELS])};
}
DEVICE PlainRow read_row(const Sum* row, i32) {
  const u32 high = read_written(row[CHANNELS]), low = read_written(row[CHANNELS + LAST - 1]);
  return {DIGITS == 1 ? high : (high << 8) + low};
}
#endif

#if STEP == 2
typedef METHOD StepMethod;
#else
typedef METHOD::WithoutValueless StepMethod;
#endif
typedef WarpRows<StepMethod, Work> Rows;

#if STEP < 2
// Stores the maxima of a CTA's keys.
DEVICE void store_maxima(const Rows& rows) {
  __shared__ i64 maxima[WARPS][KINDS][ROWS];
#pragma unroll
  for (int h = 0; h < LANE_ROWS; ++h)
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) {
      const i64 most = rows.method.maximum(kind, 0, h);
      if (threadIdx.x % 4 == 0) maxima[threadIdx.x / 32][kind][threadIdx.x % 32 / 4 + 8 * h] = most;
    }
  __syncthreads();
  if (threadIdx.x < KINDS * ROWS) {
    i64 most = (&maxima[0][0][0])[threadIdx.x];
    for (int i = 1; i < WARPS; ++i) most = max(most, (&maxima[i][0][0])[threadIdx.x]);
    rows.work.maxima(rows.work.split)[threadIdx.x] = most;
  }
}
#endif

#if STEP == 0
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 memory[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Work work(p, blockIdx.x);
  Rows rows(p, work, 0);
  const Rows::Inputs inputs = rows.load_inputs();
  const TileLoader loader(p, work.batch, work.kv_head, 0, work.keys);
  const i32 tiles = work.tiles();
  const auto load = [&](i32 i, u32 to) {
    if (i < tiles) loader.load_k(to, work.first + i * KEYS);
  };
  TileRing<K_BYTES, decltype(load)> ring(shared_address(memory), load);
  if (work.split == 0)
    for (u32 i = threadIdx.x; i < COPIES * sizeof(TileSums) / 4; i += THREADS) ((u32*)&work.sums(0))[i] = 0;
  rows.init(0, inputs);
#pragma unroll 1
  for (i32 i = 0; i < tiles; ++i) {
    const TileOperands tile(ring.wait(), 0, Work::warp_keys());
    const i32 first = work.first_key(i);
    Scores s;
    rows.compute_scores<WARP_KEYS>(tile, s);
    ring.refill(i);
#pragma unroll
    for (int h = 0; h < LANE_ROWS; ++h)
#pragma unroll
      for (int group = 0; group < WARP_KEYS / 16; ++group) {
        const i32 key = first + first_key(group);
        if (rows.row_of(0, h) < work.rows && key < work.keys)
          store_global_16(work.scores(rows.row_of(0, h)) + key,
                          make_int4(score_of(s, 0, h, group, 0), score_of(s, 0, h, group, 1),
                                    score_of(s, 0, h, group, 2), score_of(s, 0, h, group, 3)),
                          evict_last());
      }
    if (!CAUSAL && first + WARP_KEYS <= work.keys)
      rows.method.update_row_max<WARP_KEYS, false>(s, rows.masks, first, work.keys);
    else
      rows.method.update_row_max<WARP_KEYS, true>(s, rows.masks, first, work.keys);
  }
  store_maxima(rows);
}

#else
#if TWO_GROUPS && STEP == 1
// Returns a bit for each of a warp's 32 keys of a tile that has no value. key: the first of them.
DEVICE u32 find_zeros(const Work& work, u32 v_tile, i32 key) {
  const u32 lane = threadIdx.x % 32;
  u32 zeros;
  if constexpr (KEY_MAJOR) {
    u32 codes = 0;  // of four keys
#pragma unroll 8
    for (u32 row = lane / 8; row < 16 * V_CHUNKS; row += 4)
      codes |= load_shared(v_tile + row * V_PITCH + Work::warp_keys() + lane % 8 * 4);
    codes |= __shfl_xor_sync(~0u, codes, 8);
    codes |= __shfl_xor_sync(~0u, codes, 16);
    zeros = __reduce_or_sync(~0u, bits_of_bytes(__vcmpeq4(codes, 0) & 0x01010101) << 4 * (lane % 8));
  } else {
    zeros = __ballot_sync(~0u, codes_of_key(v_tile, Work::warp_keys() + lane) == 0);
  }
  bool is_zero = zeros >> lane & 1 && key + (i32)lane < work.keys;
  if (SLICES > 1 && is_zero) {  // the other channels too
    const View& v = work.p.v;
    const u8* const at = v.ptr + head_offset(v, work.batch, work.kv_head) + (i64)(key + lane) * v.n;
    for (i32 i = 0; i < VALUE_DIM; ++i) is_zero &= at[i * v.d] == 0;
  }
  return __ballot_sync(~0u, is_zero);
}

// Stores which of a warp's keys have no value, and updates the maxima of both kinds. Returns whether there are any.
template <bool MASKED>
DEVICE bool note_zeros(Rows& rows, const Scores& s, u32 v_tile, i32 first) {
  const u32 zeros = find_zeros(rows.work, v_tile, first), quad = threadIdx.x % 4;
  const u32 mine = (zeros >> 4 * quad & 15) | (zeros >> (16 + 4 * quad) & 15) << 4;
  if (blockIdx.y == 0 && rows.work.first_row == 0 && threadIdx.x % 32 < 4)
    ((u8*)(rows.work.valueless(rows.p) + first / WORD_KEYS * 4 + quad))[first % WORD_KEYS / WARP_KEYS] = mine;
  rows.method.template update_row_max<WARP_KEYS, MASKED>(s, rows.masks, first, rows.work.keys, KeyBits{{mine}});
  return zeros != 0;
}
#endif

// Finds the maxima of all ranges of keys. The threads share the ranges, because the answers of memory take long.
DEVICE void finish_row_max(Rows& rows) {
  constexpr int COUNT = KINDS * ROWS, PARTS = THREADS / COUNT, AT_ONCE = 8;
  __shared__ i64 maxima[PARTS][COUNT];
  const i32 part = threadIdx.x / COUNT, i = threadIdx.x % COUNT, splits = rows.p.split.splits;
  i64 most = rows.work.maxima(min(part, splits - 1))[i];
#pragma unroll 1
  for (i32 first = part + PARTS; first < splits; first += AT_ONCE * PARTS)
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) most = max(most, rows.work.maxima(min(first + k * PARTS, splits - 1))[i]);
  maxima[part][i] = most;
  __syncthreads();
  rows.finish_row_max([&](int kind, int, int h) {
    i64 most = maxima[0][kind * ROWS + rows.row_of(0, h)];
#pragma unroll
    for (int i = 1; i < PARTS; ++i) most = max(most, maxima[i][kind * ROWS + rows.row_of(0, h)]);
    return most;
  });
}

// Stores a row's Tmax, by one lane of all.
DEVICE void store_t_max(const Rows& rows, int h) {
  const Work& work = rows.work;
  const Params& p = rows.p;
  if (p.l && work.split == 0 && blockIdx.y == 0 && threadIdx.x < 32 && threadIdx.x % 4 == 0 &&
      rows.row_of(0, h) < work.rows) {
    const RowPlace at = rows.place(0, h);
    p.t_max[row_index(p, work.batch, at.head, at.row)] = rows.method.t_max(0, h);
  }
}

DEVICE void add(Sum& to, Sum x) {
  if (!x) return;
#if TWO_GROUPS
  atomicAdd((u64*)&to, (u64)x);
#else
  atomicAdd(&to, x);
#endif
}

// Adds the sums of a CTA to those of its rows. memory: that of the ring.
DEVICE void add_to_sums(const Rows& rows, i32* memory) {
  const StepMethod& method = rows.method;
  const Work& work = rows.work;
  TileSums& all = work.sums();
  const auto of_warp = [&](i32 warp, i32 row) { return memory + (warp * ROWS + row) * WARP_PITCH; };
  const i32 lane = threadIdx.x % 4;
  __syncthreads();  // all warps have left the tiles
#pragma unroll
  for (int h = 0; h < LANE_ROWS; ++h) {
    const i32 row = rows.row_of(0, h);
    i32* const to = of_warp(threadIdx.x / 32, row);
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) {
      to[DIGITS * OWN_CHANNELS + digit] = quad_sum(method.sums[digit][0][h]);
#pragma unroll
      for (int chunk = 0; chunk < V_CHUNKS; ++chunk) {
        const auto channel = [&](int j) { return (u32)method.accumulator(digit, 0, h, chunk, j); };
        const u32 four[4] = {channel(0), channel(1), channel(2), channel(3)};
        store_shared(shared_address(to + digit * OWN_CHANNELS + 16 * chunk + 4 * lane), four);
      }
    }
#if TWO_GROUPS
    to[WARP_SUMS - 1] = quad_sum(method.other_l[0][h]);
    if (STEP == 2 && work.split == 0 && blockIdx.y == 0 && threadIdx.x < 32 && lane == 0 && row < work.rows)
      all.row[row][ROW_SUMS - 1] = method.other[0][h];
#endif
    store_t_max(rows, h);
  }
  __syncthreads();
  // a number of all warps
  const auto sum = [&](i32 row, i32 number) {
    u32 all_warps = 0;
#pragma unroll
    for (i32 warp = 0; warp < WARPS; ++warp) all_warps += of_warp(warp, row)[number];
    return all_warps;
  };
#pragma unroll 1
  for (i32 i = threadIdx.x; i < work.rows * OWN_CHANNELS; i += THREADS) {
    const i32 row = i / OWN_CHANNELS, own = i % OWN_CHANNELS, channel = 16 * first_chunk() + own;
    if (channel >= PADDED_CHANNELS) continue;
#if TWO_GROUPS
    add(all.row[row][channel], ((Sum)(i32)sum(row, own) << 8) + (i32)sum(row, own + OWN_CHANNELS));
#else
    for (int digit = 0; digit < DIGITS; ++digit)
      add(all.row[row][digit * PADDED_CHANNELS + channel], sum(row, digit * OWN_CHANNELS + own));
#endif
  }
  if (blockIdx.y == 0 && threadIdx.x < work.rows) {
    const i32 row = threadIdx.x, last = DIGITS * OWN_CHANNELS;
#if TWO_GROUPS
    add(all.row[row][CHANNELS], ((Sum)sum(row, last) << 8) + sum(row, last + 1));
    add(all.row[row][CHANNELS + 1], sum(row, last + 2));
#else
    for (int digit = 0; digit < DIGITS; ++digit) add(all.row[row][CHANNELS + digit], sum(row, last + digit));
#endif
  }
}

// Counts this CTA among those that have added their sums. Returns whether it is the last one of its rows, and none has
// found keys without a value.
DEVICE bool has_all_sums(const Work& work, bool finds_zeros) {
  __threadfence();
  __syncthreads();
  bool has_all = false;
  if (threadIdx.x == 0) {
    const u64 own = (u64)finds_zeros << 32 | 1;
    has_all = atomicAdd(&work.sums().arrived, own) + own == (u32)(work.p.split.splits * SLICES);
  }
  has_all = __syncthreads_or(has_all);
  __threadfence();
  return has_all;
}

DEVICE void store_outputs(const Work& work) {
  typedef METHOD::Accumulator Accumulator;
  const Params& p = work.p;
  for (i32 i = threadIdx.x; i < work.rows * (PADDED_CHANNELS / 4); i += THREADS) {
    const i32 row = i / (PADDED_CHANNELS / 4), channel = i % (PADDED_CHANNELS / 4) * 4;
    const RowPlace at = work.place(row);
    const Sum* sums = work.sums().row[row];
    const i32 fraction = TWO_GROUPS ? fraction_bits(p.nk) : 0;
    const METHOD::Row rows[1] = {read_row(sums, fraction)};
    if (p.l && channel == 0) p.l[row_index(p, work.batch, at.head, at.row)] = rows[0].l;
    Accumulator acc[1][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) read_channel(sums, channel + j, fraction, acc[0][j]);
    const OutputConstants constants = load_output_constants<OUT>(p, work.batch, at.head, work.kv_head);
    u32 words[1][SIZE<OUT>];
    METHOD::OutputScales<OUT, 1>(rows, constants).outputs(acc, words);
    store_channels<OUT>(p, work.batch, at, channel, words[0]);
  }
}

// Loads a warp's scores of a tile, or others where it is past the last one.
DEVICE void load_scores(const Rows& rows, i32 tile, Scores& s) {
  const Work& work = rows.work;
#pragma unroll
  for (int h = 0; h < LANE_ROWS; ++h)
#pragma unroll
    for (int group = 0; group < WARP_KEYS / 16; ++group) {
      const i32 row = min(rows.row_of(0, h), work.rows - 1);
      const i32 key = min(work.first_key(tile) + first_key(group), rows.p.split.pitch - 4);
      const int4 x = load_global_16(work.scores(row) + key, evict_first());
      s[0][2 * group][2 * h] = x.x, s[0][2 * group][2 * h + 1] = x.y;
      s[0][2 * group + 1][2 * h] = x.z, s[0][2 * group + 1][2 * h + 1] = x.w;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 memory[];
  const Work work(p, blockIdx.x);
#if STEP == 2
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (!(work.sums(0).arrived >> 32)) return;
#endif
  Rows rows(p, work, 0);
  const Rows::Inputs inputs = rows.load_inputs();
  const TileLoader loader(p, work.batch, work.kv_head, 0, work.keys);
  const i32 tiles = work.tiles();
  const auto load = [&](i32 i, u32 to) {
    if (i < tiles) loader.load_v(to, work.first + i * KEYS);
  };
  TileRing<V_BYTES, decltype(load)> ring(shared_address(memory), load);
  rows.init(0, inputs);
#if STEP == 1
  // Step 0 has let this kernel start when all kernels before step 0 had ended, so that the inputs could be read.
  wait_for_previous_kernel();
  let_next_kernel_start();
#endif
  bool some_zeros = false;
  Scores next;
  load_scores(rows, 0, next);  // before the maxima, so that memory is waited for once
  finish_row_max(rows);
#pragma unroll 1
  for (i32 i = 0; i < tiles; ++i) {
    const i32 first = work.first_key(i);
    Scores s;
#pragma unroll
    for (int j = 0; j < WARP_KEYS / 2; ++j) s[0][j / 4][j % 4] = next[0][j / 4][j % 4];
    const u32 v_tile = ring.wait();
    const TileOperands tile(0, v_tile, Work::warp_keys());
    ring.refill(i);
    load_scores(rows, i + 1, next);
    if (first >= work.keys) continue;
    const bool is_whole = !CAUSAL && first + WARP_KEYS <= work.keys;
#if TWO_GROUPS && STEP == 1
    some_zeros |= is_whole ? note_zeros<false>(rows, s, v_tile, first) : note_zeros<true>(rows, s, v_tile, first);
#endif
    if (is_whole)
      rows.add_values<WARP_KEYS, false>(s, tile, first);
    else
      rows.add_values<WARP_KEYS, true>(s, tile, first);
  }
#if TWO_GROUPS && STEP == 1
  some_zeros = blockIdx.y == 0 && __syncthreads_or(some_zeros);
  if (some_zeros) store_maxima(rows);  // step 0 took all keys for keys with a value
#endif
  add_to_sums(rows, (i32*)memory);
  if (has_all_sums(work, some_zeros)) store_outputs(work);
}
#endif
