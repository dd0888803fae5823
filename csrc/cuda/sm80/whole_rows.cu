// Attention of rows of at most 288 keys for every NVIDIA GPU from compute capability 8.0 on, by mma.sync.
//
// A CTA takes rows of one head, whose K and V are codes in shared memory; floats are quantized on the way there. A warp
// computes one tile of 16 rows after another. The scores of a row stay in registers, so that one product with K gives
// both the row's maximum and P.
//
// Macros: METHOD (ExactP16, ExactP8 or WholeTwoGroups), HEAD_DIM, VALUE_DIM, QUERY, OUT, ROW_SCALES, WARPS,
// CTAS_PER_SM, VALUES_IN_RANGE, BIAS, BIAS_FRACTION_BITS and KEEP as in any_rows.cu, and
//   NK                   number of keys; KEYS: those padded to a multiple of 32
//   KEY_MAJOR            1: V has contiguous keys in shared memory: floats, and codes that come so
//   SCORES               3: Q, K and V are floats, and all rows have one score constant; 0: codes
//   HEAD_AMAX_IN_KERNEL  1: the kernel finds the scales of the head of Q, K and V
#define ROW_TILES 1
#define SLICES 1
#define STAGES 2  // of a ring of tiles, which is not used here
#define WINDOW 0
#define FEW_KEYS 1
#include "sm80/rows.cuh"
#include "sm80/whole_two_groups.cuh"

constexpr int NOW = WholeTwoGroups::NOW;        // keys that are computed: those past the last one repeat it
constexpr i32 STEP_ROWS = 16 * WARPS;           // of all warps of a CTA
constexpr int VALUELESS_WORDS = 4 * BIT_WORDS;  // of the keys without a value

// The rows of a CTA.
struct Work {
  u32 batch, head, kv_head;
  i32 first, end, rows;  // those of the CTA, and how many the head has
  i32 keys = NK;
  i64 k_start = 0;
  const u32* valueless_words = nullptr;  // of intflash_bfp
  Score score{};                         // of floats

  DEVICE Work(const Params& p) {
    const u32 parts = p.share.whole, of = quotient(blockIdx.x, parts, p.share.whole_reciprocal);
    batch = quotient(of, p.heads, p.share.heads_reciprocal), head = of - batch * p.heads;
    kv_head = key_head(p, head);
    rows = p.nq, first = (blockIdx.x - of * parts) * p.tiles * 16, end = min(first + p.tiles * 16, rows);
  }
  // A row past the last one stands for the last one.
  DEVICE RowPlace place(i32 row) const { return {head, min(row, rows - 1)}; }
  DEVICE i32 seen(i32) const { return NK; }
  DEVICE const u32* valueless(const Params&) const { return valueless_words; }
};

#if SCORES
// Divides `count` into parts of at most `most` that are about equal.
DEVICE constexpr int even_part(int count, int most) {
  const int parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

// The floats of a head's K and V, which a CTA quantizes. Keys past the last one repeat it. A thread has many loads in
// flight, because few threads share the time that memory takes to answer: up to 8 chunks of 8 channels of a key, or 4
// blocks of 4 keys and 4 channels of V. 32 lanes have a block of 32 keys and 16 channels of V and write to different
// banks.
struct FloatLoader {
  static constexpr i32 CHUNKS = HEAD_DIM / 8, ALL_CHUNKS = KEYS * CHUNKS;
  static constexpr i32 WIDTH = (VALUE_DIM + 15) / 16, ALL_BLOCKS = KEYS / 32 * WIDTH;
  static constexpr int ROUNDS = (ALL_CHUNKS + THREADS - 1) / THREADS, BLOCK_ROUNDS = (ALL_BLOCKS + WARPS - 1) / WARPS;
  static constexpr int AT_ONCE = even_part(ROUNDS, 8), BLOCKS_AT_ONCE = even_part(BLOCK_ROUNDS, 4);
  typedef In::Raw<2> Chunk;
  typedef In::Raw<1> Block[4];
  const u8 *k, *v;
  i64 k_stride, v_stride;  // in bytes
  float k_inverse, v_inverse;

  DEVICE FloatLoader(const Params& p, const Work& work)
      : k(p.k.ptr + head_offset(p.k, work.batch, work.kv_head) * SIZE<QUERY>),
        v(p.v.ptr + head_offset(p.v, work.batch, work.kv_head) * SIZE<QUERY>),
        k_stride(p.k.n * SIZE<QUERY>),
        v_stride(p.v.n * SIZE<QUERY>) {}
  DEVICE void set_scales(const Params& p, const Work& work) {
    k_inverse = inverse(*head_element<float>(p.k_scale, work.batch, work.kv_head));
    v_inverse = inverse(*head_element<float>(p.v_scale, work.batch, work.kv_head));
  }
  DEVICE static float inverse(float scale) { return In::usable_inverse(__frcp_rn(scale)); }

  // The i-th of a thread's chunks from `first` on, and blocks. Indices past the last are clamped to it.
  DEVICE static i32 chunk(i32 first, int i) { return min(first + i * THREADS, ALL_CHUNKS - 1); }
  DEVICE static i32 block(i32 first, int i) { return min(first + i * WARPS, ALL_BLOCKS - 1); }
  DEVICE static i32 key_of_block(i32 block) { return block / WIDTH * 32 + threadIdx.x % 32 / 4 * 4; }
  DEVICE static i32 channel_of_block(i32 block) {
    return min(block % WIDTH * 16 + (i32)threadIdx.x % 4 * 4, VALUE_DIM - 4);
  }

  template <int COUNT>
  DEVICE void load_chunks(i32 first, Chunk (&raw)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const i32 at = chunk(first, i), key = min(at / CHUNKS, NK - 1);
      load_words(k + key * k_stride + at % CHUNKS * 8 * SIZE<QUERY>, raw[i].word);
    }
  }
  template <int COUNT>
  DEVICE void store_chunks(u32 to, i32 first, Chunk (&raw)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const i32 at = chunk(first, i);
      if (In::has_far_values(k_inverse)) In::clamp_far_values(raw[i], k_inverse);
      u32 w[2];
      In::codes(raw[i], k_inverse, w);
      store_shared(to + key_row(at / CHUNKS) * K_PITCH + at % CHUNKS * 8, w);
    }
  }
  template <int COUNT>
  DEVICE void load_blocks(i32 first, Block (&raw)[COUNT]) const {
#pragma unroll
    for (int b = 0; b < COUNT; ++b) {
      const i32 at = block(first, b), key = key_of_block(at), channel = channel_of_block(at);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        load_words(v + min(key + i, NK - 1) * v_stride + channel * SIZE<QUERY>, raw[b][i].word);
    }
  }
  template <int COUNT>
  DEVICE void store_blocks(u32 to, i32 first, Block (&raw)[COUNT]) const {
#pragma unroll
    for (int b = 0; b < COUNT; ++b) {
      const i32 at = block(first, b), key = key_of_block(at), channel = channel_of_block(at);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (In::has_far_values(v_inverse)) In::clamp_far_values(raw[b][i], v_inverse);
      u32 w[4];
      In::transposed(raw[b], v_inverse, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) store_shared(to + channel_row(channel + i) * V_PITCH + key, w[i]);
    }
  }
  DEVICE void quantize(u32 k_tile, u32 v_tile) const {
#pragma unroll 1
    for (i32 first = threadIdx.x; first < ALL_CHUNKS; first += AT_ONCE * THREADS) {
      Chunk raw[AT_ONCE];
      load_chunks(first, raw), store_chunks(k_tile, first, raw);
    }
#pragma unroll 1
    for (i32 first = threadIdx.x / 32; first < ALL_BLOCKS; first += BLOCKS_AT_ONCE * WARPS) {
      Block raw[BLOCKS_AT_ONCE];
      load_blocks(first, raw), store_blocks(v_tile, first, raw);
    }
  }
};

// A thread's part of the largest magnitude of a head's rows.
template <int CHANNELS>
DEVICE u32 largest_of_head(const View& x, u32 batch, u32 head, i32 count) {
  const u8* from = x.ptr + head_offset(x, batch, head) * SIZE<QUERY>;
  return largest_magnitude<QUERY, CHANNELS, THREADS, 8>(from, x.n * SIZE<QUERY>, count, threadIdx.x);
}

// Stores the scales of Q, K and V of a head, from the maxima that the threads have found. CTAs that share a head write
// the same scales.
DEVICE void store_scales(const Params& p, const Work& work, const u32 (&most)[3]) {
  __shared__ u32 of_warps[3][WARPS];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 of_warp = __reduce_max_sync(~0u, most[i]);
    if (threadIdx.x % 32 == 0) of_warps[i][threadIdx.x / 32] = of_warp;
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    u32 all = 0;
#pragma unroll
    for (u32 of_warp : of_warps[threadIdx.x]) all = max(all, of_warp);
    const View& scale = threadIdx.x == 0 ? p.q_scale : threadIdx.x == 1 ? p.k_scale : p.v_scale;
    const u32 head = threadIdx.x == 0 ? work.head : work.kv_head;
    *(float*)head_element<float>(scale, work.batch, head) = scale_of_magnitude<QUERY>(all);
  }
  __syncthreads();
}

// Finds the scales of a head, and quantizes K and V, which stay in registers meanwhile.
DEVICE void find_scales_and_quantize(const Params& p, const Work& work, FloatLoader& loader, u32 k, u32 v) {
  FloatLoader::Chunk chunks[FloatLoader::ROUNDS];
  FloatLoader::Block blocks[FloatLoader::BLOCK_ROUNDS];
  loader.load_chunks(threadIdx.x, chunks), loader.load_blocks(threadIdx.x / 32, blocks);
  u32 most[3] = {largest_of_head<HEAD_DIM>(p.q, work.batch, work.head, p.nq), 0, 0};
#pragma unroll
  for (const auto& chunk : chunks) most[1] = max_magnitudes(most[1], chunk.word, QUERY{});
#pragma unroll
  for (const auto& block : blocks)
#pragma unroll
    for (const auto& row : block) most[2] = max_magnitudes(most[2], row.word, QUERY{});
  most[1] = max_of_pair(most[1], QUERY{}), most[2] = max_of_pair(most[2], QUERY{});
  store_scales(p, work, most);
  loader.set_scales(p, work);
  loader.store_chunks(k, threadIdx.x, chunks), loader.store_blocks(v, threadIdx.x / 32, blocks);
}
constexpr int RAW_REGISTERS = 2 * SIZE<QUERY> * (FloatLoader::ROUNDS + 2 * FloatLoader::BLOCK_ROUNDS);
// Whether registers hold K and V then: the search of Q and addresses take about 48.
constexpr bool HOLDS_KEYS_AND_VALUES =
    HEAD_AMAX_IN_KERNEL && RAW_REGISTERS + 48 <= registers_per_thread(THREADS * CTAS_PER_SM);

DEVICE void load_head(const Params& p, Work& work, u32 k, u32 v) {
  __shared__ i32 constants[2];
  FloatLoader loader(p, work);
  if constexpr (HOLDS_KEYS_AND_VALUES)
    find_scales_and_quantize(p, work, loader, k, v);
  else if constexpr (HEAD_AMAX_IN_KERNEL)
    store_scales(p, work,
                 {largest_of_head<HEAD_DIM>(p.q, work.batch, work.head, p.nq),
                  largest_of_head<HEAD_DIM>(p.k, work.batch, work.kv_head, NK),
                  largest_of_head<VALUE_DIM>(p.v, work.batch, work.kv_head, NK)});
  if (threadIdx.x == 0) {  // alone: some GPUs have few units for float64
    const Score score = score_constants(*head_element<float>(p.q_scale, work.batch, work.head),
                                        *head_element<float>(p.k_scale, work.batch, work.kv_head), p.sm_scale);
    constants[0] = score.C, constants[1] = score.k;
  }
  if constexpr (!HOLDS_KEYS_AND_VALUES) loader.set_scales(p, work), loader.quantize(k, v);
  __syncthreads();
  work.score = {constants[0], constants[1]};
}
#else
DEVICE void load_head(const Params& p, const Work& work, u32 k, u32 v) {
  const TileLoader loader(p, work.batch, work.kv_head, 0, NK);
  loader.load_k(k, 0), loader.load_v(v, 0);
  cp_async_wait_all();
  __syncthreads();
}
#endif

// Finds the keys without a value among V's codes in shared memory: see valueless.cuh.
DEVICE void find_valueless(u32 v, u32* words) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 word = threadIdx.x / 32; word < VALUELESS_WORDS; word += WARPS) {
    const u32 own = word / 4 * WORD_KEYS + key_of_bit(word % 4, lane), key = min(own, NK - 1);
    u32 codes = 0;
    if constexpr (KEY_MAJOR) {
#pragma unroll 8
      for (u32 channel = 0; channel < VALUE_DIM; ++channel)
        codes |= load_shared(v + channel_row(channel) * V_PITCH + key / 4 * 4);
      codes &= 0xFFu << key % 4 * 8;
    } else {
      codes = codes_of_key(v, key);
    }
    const u32 zeros = __ballot_sync(~0u, codes == 0 && own < NK);
    if (lane == 0) words[word] = zeros;
  }
  __syncthreads();
}

// Asks for the 16 rows of Q of a warp ahead of time.
DEVICE void prefetch_queries(const Params& p, const Work& work, i32 row) {
  constexpr i32 BYTES = HEAD_DIM * SIZE<QUERY>, STEP = 64;
  const i32 lane = threadIdx.x % 32;
  const u8* const from =
      p.q.ptr +
      (head_offset(p.q, work.batch, work.head) + (i64)min(row + lane / 2, work.rows - 1) * p.q.n) * SIZE<QUERY>;
#pragma unroll
  for (i32 at = 0; at < BYTES; at += 2 * STEP)
    if (at + lane % 2 * STEP < BYTES) prefetch_line(from + at + lane % 2 * STEP);
}

// Computes the row maxima, P and the sums of a warp's rows.
template <class Method>
DEVICE void attend(WarpRows<Method, Work>& rows, const TileOperands& operands) {
  Scores s;
  rows.template compute_scores<NOW>(operands, s);
  if constexpr (Method::FINDS_ZEROS) {
    rows.take(s, operands);
  } else {
    rows.method.template update_row_max<NOW, false>(s, rows.masks, 0, NK);
    rows.finish_row_max([&](int kind, int m, int h) { return rows.method.maximum(kind, m, h); });
    rows.template add_values_of<NOW, NK>(s, operands, 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 k = shared_address(memory), v = k + K_BYTES;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Work work(p);
  prefetch_queries(p, work, work.first + threadIdx.x / 32 * 16);
  load_head(p, work, k, v);
  if constexpr (METHOD::FINDS_ZEROS) {
    __shared__ u32 valueless[VALUELESS_WORDS];
    find_valueless(v, valueless);
    work.valueless_words = valueless;
  }
  const TileOperands operands(k, v);
#pragma unroll 1
  for (i32 row = work.first + threadIdx.x / 32 * 16; row < work.end; row += STEP_ROWS) {
    WarpRows<METHOD, Work> rows(p, work, row);
    rows.init(0);
    if (row + STEP_ROWS < work.end) prefetch_queries(p, work, row + STEP_ROWS);
    attend(rows, operands);
    rows.store();
  }
}
