// The prologue of short rows: loads K and V^T of a head to shared memory, by loads and stores, cp.async or TMA, and the
// constants of the head to registers. Macros: see short_rows_mainloop.cuh.
#pragma once
#include "epilogue.cuh"
#include "exp2.cuh"
#include "params.cuh"
#include "quantize.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma_layout.cuh"

constexpr int K_WIDTH = HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : 128;  // bytes per row of K in shared memory
constexpr int D_CHUNKS = HEAD_DIM / 16, D_STEPS = (HEAD_DIM + 31) / 32;
constexpr int KEY_CHUNKS = KEYS / 16;
constexpr int V_BLOCK = HEAD_DIM * 128;  // bytes of 128 keys of V^T
constexpr int K_BYTES = (KEYS * K_WIDTH + 1023) / 1024 * 1024, V_BYTES = (KEYS + 127) / 128 * V_BLOCK;
constexpr int BARRIER_BYTES = 16 * TMA;
constexpr int CHANNELS = HEAD_DIM / 4;  // channels per thread

typedef Codes<IN, VALUES_IN_RANGE> In;

// Addresses of the tokens of a head. Strides fit in 32 bits (short_rows.cpp checks this).
struct Tokens {
  const u8* base;
  i32 stride;  // in bytes

  DEVICE Tokens(const View& x, u32 batch, u32 head)
      : base(x.ptr + head_offset(x, batch, head) * SIZE<IN>), stride((i32)x.n * SIZE<IN>) {}
  DEVICE const u8* at(i32 token, i32 channel) const {
    return (const u8*)multiply_add(token, stride, (i64)(base + channel * SIZE<IN>));
  }
};

template <typename RAW, int COUNT>
DEVICE void clamp_far_values(RAW (&raw)[COUNT], float inv) {
  if (!In::has_far_values(inv)) return;
#pragma unroll
  for (RAW& x : raw) In::clamp_far_values(x, inv);
}

// Loads chunks of 16 channels of K by THREADS threads in rounds. A thread keeps its chunk, and its rows are ROWS apart,
// so that addresses advance by constants. GROUP rounds are in flight together.
template <int THREADS>
struct RowLoader {
  static constexpr int ROWS = THREADS / D_CHUNKS, ROUNDS = (KEYS + ROWS - 1) / ROWS;
  static constexpr int GROUP = SIZE<IN> == 4 ? 2 : ROUNDS < 8 ? ROUNDS : 4;
  static constexpr bool HOLDS_ALL = GROUP >= ROUNDS;
  static constexpr int RAW_REGISTERS = 4 * SIZE<IN> * GROUP;
  const Tokens tokens;
  const i32 row, chunk, last;
  In::Raw<4> raw[GROUP];

  DEVICE RowLoader(const Tokens& x, i32 thread, i32 count)
      : tokens(x), row(thread / D_CHUNKS), chunk(thread % D_CHUNKS), last(count - 1) {}
  DEVICE bool has(int round) const {
    return round < ROUNDS && (THREADS % D_CHUNKS == 0 || row < ROWS) &&
           ((round + 1) * ROWS <= KEYS || row + round * ROWS < KEYS);
  }
  DEVICE const u8* from(int round) const { return tokens.at(min(row + round * ROWS, last), chunk * 16); }
  DEVICE u32 to(u32 tile, int round) const {
    constexpr bool REGULAR = ROWS % 16 == 0;  // the swizzle is the same in every round
    const u32 r = row + (REGULAR ? 0 : round * ROWS);
    return tile + swizzled<K_WIDTH>(score_row(r), chunk) + (REGULAR ? round * ROWS * K_WIDTH : 0);
  }
  DEVICE void load(int first) {
#pragma unroll
    for (int j = 0; j < GROUP; ++j)
      if (has(first + j)) load_words(from(first + j), raw[j].word);
  }
  DEVICE void store(u32 tile, float inv, int first) {
    clamp_far_values(raw, inv);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (!has(first + j)) continue;
      u32 w[4];
      In::codes(raw[j], inv, w);
      store_shared(to(tile, first + j), w);
    }
  }
  // The largest magnitude of what the thread holds.
  DEVICE u32 largest() const {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j)
      if (has(j)) most = max_magnitudes(most, raw[j].word, IN{});
    return max_of_pair(most, IN{});
  }
  DEVICE void copy(u32 tile) const {
#pragma unroll
    for (int j = 0; j < ROUNDS; ++j)
      if (has(j)) cp_async_16(to(tile, j), from(j));
  }
};

DEVICE u32 value_address(u32 v_tile, u32 row, u32 key) {
  return v_tile + key / 128 * V_BLOCK + swizzled<128>(row, key % 128 / 16) + key % 16;
}

// Builds V^T from rows of V, in blocks of 4 keys by 16 channels. Adjacent threads take adjacent chunks of a row, and
// the swizzle of value_row's rows spreads their stores over different banks.
template <int THREADS>
struct ValueLoader {
  static constexpr int BLOCKS = KEYS / 4 * D_CHUNKS, ROUNDS = (BLOCKS + THREADS - 1) / THREADS;
  static constexpr int GROUP = SIZE<IN> == 4 ? 1 : ROUNDS < 2 ? ROUNDS : 2;
  static constexpr bool HOLDS_ALL = GROUP >= ROUNDS;
  static constexpr int RAW_REGISTERS = 4 * 4 * SIZE<IN> * GROUP;
  // channels of a chunk that go to one lane: 2 in every 8 rows
  static constexpr int LANE_CHANNELS = CHANNELS % 16 ? 4 : 16;
  const Tokens tokens;
  const i32 thread, last;
  In::Raw<4> raw[GROUP][4];

  DEVICE ValueLoader(const Tokens& x, i32 thread, i32 count) : tokens(x), thread(thread), last(count - 1) {}
  DEVICE i32 key(int round) const { return (thread + round * THREADS) / D_CHUNKS * 4; }
  DEVICE i32 chunk(int round) const { return (thread + round * THREADS) % D_CHUNKS; }
  DEVICE const u8* from(int round, int r) const { return tokens.at(min(key(round) + r, last), chunk(round) * 16); }
  DEVICE bool has(int round) const { return round < ROUNDS && thread + round * THREADS < BLOCKS; }
  DEVICE void load(int first) {
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (!has(first + j)) continue;
#pragma unroll
      for (int r = 0; r < 4; ++r) load_words(from(first + j, r), raw[j][r].word);
    }
  }
  DEVICE u32 largest() const {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (has(j)) most = max_magnitudes(most, raw[j][r].word, IN{});
    return max_of_pair(most, IN{});
  }
  DEVICE void store(u32 tile, float inv, int first) {
#pragma unroll
    for (auto& block : raw) clamp_far_values(block, inv);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (!has(first + j)) continue;
      u32 transposed[16];
      In::transposed(raw[j], inv, transposed);
#pragma unroll
      for (int channel = 0; channel < 16; ++channel) {  // the addresses differ by constants
        const int same = channel / LANE_CHANNELS * LANE_CHANNELS + channel % 2;
        const u32 row = value_row<CHANNELS>(chunk(first + j) * 16 + same);
        store_shared(value_address(tile, row, key(first + j)) + 512 * (channel - same), transposed[channel]);
      }
    }
  }
};

// Copies V^T where V already has contiguous keys. Adjacent threads copy adjacent chunks of a row.
template <int THREADS>
DEVICE void cp_async_values(u32 tile, const View& v, u32 batch, u32 head, i32 thread) {
  constexpr int LANES = KEY_CHUNKS <= 4 ? 4 : KEY_CHUNKS <= 8 ? 8 : KEY_CHUNKS <= 16 ? 16 : 32;
  constexpr int ROWS = THREADS / LANES;
  static_assert(KEY_CHUNKS <= LANES);
  const u8* base = v.ptr + head_offset(v, batch, head);
  const i32 chunk = thread % LANES, row = thread / LANES;
  if (KEY_CHUNKS < LANES && chunk >= KEY_CHUNKS) return;
  constexpr bool REGULAR = CHANNELS % ROWS == 0 && ROWS % 2 == 0;
  const u32 first = value_address(tile, value_row<CHANNELS>(row), chunk * 16);
#pragma unroll
  for (int i = 0; i < (HEAD_DIM + ROWS - 1) / ROWS; ++i) {
    const i32 d = row + i * ROWS;
    u32 to;
    if (REGULAR)
      to = (first ^ value_row<CHANNELS>(i * ROWS) % 8 * 16) + value_row<CHANNELS>(i * ROWS) * 128;
    else
      to = value_address(tile, value_row<CHANNELS>(d), chunk * 16);
    if ((i + 1) * ROWS <= HEAD_DIM || d < HEAD_DIM)
      cp_async_16(to, (const u8*)multiply_add(d, (i32)v.d, (i64)(base + chunk * 16)));
  }
}

// The last step of 32 channels may have 16 that do not exist.
template <int THREADS>
DEVICE void zero_channels(u32 k_tile, i32 thread) {
  if constexpr (HEAD_DIM % 32) {
    const u32 zeros[4] = {0, 0, 0, 0};
    for (i32 key = thread; key < KEYS; key += THREADS)
      store_shared(k_tile + swizzled<K_WIDTH>(score_row(key), D_CHUNKS), zeros);
  }
}

// What the kernel reads of a head besides Q, K and V. Computing with it before the loads are issued would delay them.
struct HeadConstants {
  Scales<IN, HEAD_AMAX_IN_KERNEL> scales;
  const i64 *score_at, *output_at;
  i64 score;
  OutputConstants output_constants;

  DEVICE HeadConstants(const Params& p, u32 batch, u32 head, u32 kv_head)
      : scales(p, batch, head, kv_head),
        score_at(head_element<i64>(p.score, batch, head)),
        output_at(head_element<i64>(p.output, batch, head)) {}
  DEVICE u64 addresses() const { return SIZE<IN> == 1 ? (u64)score_at : (u64)scales.q_at | (u64)scales.k_at; }
  DEVICE void load() {
    scales.load();
    if constexpr (SIZE<IN> == 1) score = *score_at;
    if constexpr (IsInteger<OUT>::value)
      output_constants.packed = *output_at;
    else
      output_constants.v_scale = SIZE<IN> == 1 ? *scales.v_at : scales.v;
  }
  DEVICE Score of_scores(const Params& p) const {
    if constexpr (SIZE<IN> == 1)
      return unpack_score(score);
    else
      return score_constants(scales.q, scales.k, p.sm_scale);
  }
};

// Loads K and V of a head by THREADS threads, with as many loads in flight as registers allow.
template <int THREADS>
struct HeadLoader {
  typedef RowLoader<THREADS> Keys;
  typedef ValueLoader<THREADS> Values;
  Keys keys;
  Values values;
  const u32 k_tile, v_tile;

  // whether all loads of V can be issued before K is stored
  static constexpr bool PREFETCH_V = Values::HOLDS_ALL;
  // Whether a thread's part of K and of V stays in registers from the search for the head's scales to quantization.
  static constexpr bool HOLDS_KEYS = HEAD_AMAX_IN_KERNEL && Keys::HOLDS_ALL;
  static constexpr bool HOLDS_VALUES = HEAD_AMAX_IN_KERNEL && Values::HOLDS_ALL;

  DEVICE HeadLoader(const Params& p, u32 k_tile, u32 v_tile, u32 batch, u32 head, i32 thread)
      : keys(Tokens(p.k, batch, head), thread, p.nk),
        values(Tokens(p.v, batch, head), thread, p.nk),
        k_tile(k_tile),
        v_tile(v_tile) {}

  DEVICE u64 addresses() const { return (u64)keys.from(0) | (u64)values.tokens.base; }
  DEVICE void begin_keys() {
    if constexpr (SIZE<IN> == 1)
      keys.copy(k_tile);
    else
      keys.load(0);
  }
  DEVICE void begin_values(const Params& p, u32 batch, u32 head) {
    if constexpr (KEY_MAJOR)
      cp_async_values<THREADS>(v_tile, p.v, batch, head, values.thread);
    else if constexpr (PREFETCH_V)
      values.load(0);
  }
  // Returns once this thread's part of the head is in shared memory.
  DEVICE void finish(float k_inverse, float v_inverse) {
    if constexpr (SIZE<IN> > 1) {
#pragma unroll
      for (int first = 0; first < Keys::ROUNDS; first += Keys::GROUP) {
        if (first > 0) keys.load(first);
        keys.store(k_tile, k_inverse, first);
      }
    }
    if constexpr (!KEY_MAJOR) {
#pragma unroll
      for (int first = 0; first < Values::ROUNDS; first += Values::GROUP) {
        if constexpr (!PREFETCH_V) values.load(first);
        values.store(v_tile, v_inverse, first);
      }
    }
    cp_async_wait_all();
    fence_async_proxy();
  }
  DEVICE void wait() const {}  // nothing is copied asynchronously by other agents
};

#if TMA
// Loads the codes of a head by TMA, issued by one thread. It needs regular strides (plan.cpp) and V with
// contiguous keys. Threads copy the last 16 keys, because absent keys must be copies of the last one.
template <int THREADS>
struct TmaHeadLoader {
  static constexpr i32 LAST = KEYS - 16;  // threads copy the keys from this one on
  static constexpr bool HOLDS_KEYS = false, HOLDS_VALUES = false;
  static_assert(K_WIDTH == HEAD_DIM && 16 * D_CHUNKS <= THREADS);
  const TensorMaps& maps;
  const u32 k_tile, v_tile, barrier;
  const i32 row, matrix, last;
  const Tokens tokens;

  DEVICE TmaHeadLoader(const Params& p, const TensorMaps& maps, u32 k_tile, u32 v_tile, u32 barrier, u32 batch,
                       u32 head)
      : maps(maps),
        k_tile(k_tile),
        v_tile(v_tile),
        barrier(barrier),
        row(first_row(maps, batch, head)),
        matrix(matrix_of(maps, batch, head)),
        last(p.nk - 1),
        tokens(p.k, batch, head) {}

  DEVICE u64 addresses() const { return (u64)tokens.base; }
  DEVICE void begin_keys() const {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      fence_async_proxy();
      barrier_expect(barrier, LAST * K_WIDTH + V_BYTES);
      tma_load_keys(k_tile, maps, row, 0, barrier);
#pragma unroll
      for (int i = 0; i < V_BYTES / V_BLOCK; ++i)
        tma_load_values<HEAD_DIM, CHANNELS>(v_tile + i * V_BLOCK, maps, matrix, 128 * i, barrier);
    }
    const i32 key = threadIdx.x / D_CHUNKS, chunk = threadIdx.x % D_CHUNKS;
    if (copies_last())
      cp_async_16(k_tile + LAST * K_WIDTH + swizzled<K_WIDTH>(score_row(key), chunk),
                  tokens.at(min(LAST + key, last), chunk * 16));
  }
  DEVICE bool copies_last() const { return threadIdx.x < 16 * D_CHUNKS; }
  DEVICE void begin_values(const Params&, u32, u32) const {}  // `begin_keys` has issued them
  DEVICE void finish(float, float) const {
    if (!copies_last()) return;
    cp_async_wait_all();
    fence_async_proxy();
  }
  DEVICE void wait() const { barrier_wait(barrier, 0); }  // call it after a barrier that follows `finish`
};
#endif
