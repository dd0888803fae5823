// Writes the codes of float K and V from scales per tensor or head, or copies V's codes. V's codes are stored with
// contiguous keys, as 8-bit tensor cores read them. Tokens are padded with zeros: those of K to a multiple of 16, those
// of V to one of 128.
//
// Macros: IN, the inputs' type; HEAD_DIM of K and VALUE_DIM of V (multiples of 8); VALUES_IN_RANGE (1: no float is
// outside its scale's range); VALUELESS (1: finds the keys without a value too); KEY_MAJOR (1: V's codes have
// contiguous keys already, in rows that are not padded). 128 threads take 128 tokens of a head of one tensor. CTAs take
// the last heads first, because the previous kernel has left those in L2; the codes of the first heads, written last,
// then stay there.
//
// CLUSTER: the kernel also finds the scales of K, V and Q, one for each head. So many CTAs, of TILES times 128 threads,
// are a cluster and take a head of one tensor. K and V stay in registers between the search and the quantization, so
// that memory is read once.
#include "quantize.cuh"
#include "valueless.cuh"
#ifdef CLUSTER
#include "sm90/cluster.cuh"
#else
#define CLUSTER 0
#define TILES 1
#endif

constexpr int TILE_THREADS = 128, THREADS = TILES * TILE_THREADS, TOKENS = 128;
constexpr int CHUNKS = HEAD_DIM / 8;  // a thread loads 8 channels of a token at once
constexpr int VALUE_CHUNKS = VALUE_DIM / 8;
constexpr int KEY_WORDS = TOKENS / 4;  // a word holds four keys of a channel
typedef Codes<IN, VALUES_IN_RANGE> In;
typedef In::Raw<2> Chunk;
constexpr bool FLOATS = SIZE<IN> > 1;  // else codes of V

static_assert(sizeof(QuantizeParams) == PARAMS_BYTES);

#if CLUSTER
// Returns the scale of a head from the maxima of all threads of the cluster, and stores it for the next kernels.
DEVICE float scale_of_head(u32 most, const View& scales, u32 batch, u32 head) {
  __shared__ u32 exchange[THREADS / 32];
  u32 all[1] = {most};
  maxima_of_cluster<CLUSTER, THREADS / 32>(all, exchange);
  const float scale = scale_of_magnitude<IN>(all[0]);
  if (blockIdx.x % CLUSTER == 0 && threadIdx.x == 0) *(float*)head_element<float>(scales, batch, head) = scale;
  return scale;
}

// Finds the scale of a head of Q.
DEVICE void find_query_scale(const QuantizeParams& p, u32 of) {
  const u32 batch = of / p.query_heads, head = of - batch * p.query_heads;
  const i32 queries = p.queries, each = (queries + CLUSTER - 1) / CLUSTER;
  const i32 first = min((i32)(blockIdx.x % CLUSTER) * each, queries - 1);
  const View& x = p.x[2];
  const i64 stride = x.n * SIZE<IN>;
  const u8* const from = x.ptr + head_offset(x, batch, head) * SIZE<IN> + first * stride;
  const u32 most = largest_magnitude<IN, HEAD_DIM, THREADS, 8>(from, stride, min(each, queries - first), threadIdx.x);
  scale_of_head(most, p.scales[2], batch, head);
}
#endif

// The tokens of 128 threads.
struct TokenTile {
  u32 index, batch, head;  // `index` counts the tiles of all heads
  i32 first, count;        // tokens from the first of the tile to the last of the head; none where that is not positive
  float inverse;
  const u8* from;  // address of the tile's first token
  i64 stride;      // in bytes, between tokens

  // of: the head among those of all batches; tile: among the head's.
  DEVICE TokenTile(const QuantizeParams& p, u32 which, u32 of, u32 tile, u32 tiles) : index(of * tiles + tile) {
    batch = of / p.heads, head = of - batch * p.heads;
    first = tile * TOKENS, count = p.tokens - first;
    const View& x = p.x[which];
    stride = x.n * SIZE<IN>;
    from = x.ptr + head_offset(x, batch, head) * SIZE<IN> + first * stride;
    if constexpr (!CLUSTER && FLOATS) set_scale(*head_element<float>(p.scales[which], batch, head));
  }
  DEVICE void set_scale(float scale) { inverse = In::usable_inverse(__frcp_rn(scale)); }
  DEVICE void load(i32 token, i32 channel, Chunk& raw) const {
    load_words(from + token * stride + channel * SIZE<IN>, raw.word);
  }
  DEVICE void clamp(Chunk& raw) const {
    if (In::has_far_values(inverse)) In::clamp_far_values(raw, inverse);
  }
  // some: whether keys have a value, as `store_valueless_words` takes it.
  DEVICE void store_valueless(const QuantizeParams& p, u32 some) const {
    store_valueless_words<true, TILES>(some, count, count > 0 ? p.valueless + index * 4 : nullptr);
  }
  // With CLUSTER: finds the scale from all chunks that the thread holds.
  template <int COUNT>
  DEVICE void find_scale(const QuantizeParams& p, u32 which, const Chunk (&chunks)[COUNT]) {
#if CLUSTER
    u32 most = 0;
#pragma unroll
    for (const Chunk& chunk : chunks) most = max_magnitudes(most, chunk.word, IN{});
    set_scale(scale_of_head(max_of_pair(most, IN{}), p.scales[which], batch, head));
#endif
  }
};

// Quantizes tokens of K. A thread takes 8 channels in each round.
DEVICE void quantize_keys(const QuantizeParams& p, TokenTile& tile) {
  constexpr int ROUNDS = TOKENS * CHUNKS / TILE_THREADS, GROUP = CLUSTER ? ROUNDS : SIZE<IN> == 4 ? 4 : 8;
  const View& codes = p.codes[0];
  u8* to = (u8*)codes.ptr + head_offset(codes, tile.batch, tile.head) + (i64)tile.first * codes.n;
  const i32 padded = (tile.count + 15) & ~15;
#pragma unroll 1
  for (int group = 0; group < ROUNDS; group += GROUP) {
    Chunk raw[GROUP] = {};
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const i32 at = threadIdx.x % TILE_THREADS + (group + i) * TILE_THREADS;
      if (group + i < ROUNDS && at / CHUNKS < tile.count) tile.load(at / CHUNKS, at % CHUNKS * 8, raw[i]);
    }
    tile.find_scale(p, 0, raw);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const i32 at = threadIdx.x % TILE_THREADS + (group + i) * TILE_THREADS;
      if (group + i >= ROUNDS || at / CHUNKS >= padded) continue;
      tile.clamp(raw[i]);
      u32 w[2];
      In::codes(raw[i], tile.inverse, w);
      *(uint2*)(to + at / CHUNKS * codes.n + at % CHUNKS * 8) = make_uint2(w[0], w[1]);
    }
  }
}

// Returns where shared memory holds word `word` of a channel. The swizzle puts the channels that a warp stores together
// into different banks, and keeps four words together.
DEVICE u32 word_place(u32 channel, u32 word) { return channel * KEY_WORDS + (word ^ channel / 8 % 8 * 4); }

// Quantizes keys of V. A thread takes 4 keys by 8 channels in each round, and the tile's threads transpose them through
// shared memory.
DEVICE void quantize_values(const QuantizeParams& p, TokenTile& tile) {
  extern __shared__ __align__(16) u32 of_tiles[];
  u32* const transposed = of_tiles + threadIdx.x / TILE_THREADS * (VALUE_DIM * KEY_WORDS);
  constexpr int BLOCKS = TOKENS / 4 * VALUE_CHUNKS, ROUNDS = (BLOCKS + TILE_THREADS - 1) / TILE_THREADS;
  constexpr int GROUP = CLUSTER ? ROUNDS : SIZE<IN> == 4 ? 1 : 2;
  constexpr bool ALL_TAKE_PART = BLOCKS % (GROUP * TILE_THREADS) == 0;  // in every round
  const u32 thread = threadIdx.x % TILE_THREADS;
#pragma unroll
  for (int group = 0; group < ROUNDS; group += GROUP) {
    Chunk raw[4 * GROUP] = {};
#pragma unroll
    for (int i = 0; i < 4 * GROUP; ++i) {
      const i32 at = thread + (group + i / 4) * TILE_THREADS, key = at / VALUE_CHUNKS * 4 + i % 4;
      if ((ALL_TAKE_PART || at < BLOCKS) && (!CLUSTER || tile.count > 0))
        tile.load(min(key, tile.count - 1), at % VALUE_CHUNKS * 8, raw[i]);
    }
    tile.find_scale(p, 1, raw);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const i32 at = thread + (group + i) * TILE_THREADS, key = at / VALUE_CHUNKS * 4, chunk = at % VALUE_CHUNKS;
      if (!ALL_TAKE_PART && at >= BLOCKS) break;
      Chunk rows[4];
      u32 present = 0;  // bytes of the keys that exist
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        rows[j] = raw[4 * i + j];
        tile.clamp(rows[j]);
        if (key + j < tile.count) present |= 0xFFu << (8 * j);
      }
      u32 w[8];
      In::transposed(rows, tile.inverse, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) transposed[word_place(chunk * 8 + j, key / 4)] = w[j] & present;
    }
  }
  __syncthreads();
  const View& codes = p.codes[1];
  u8* to = (u8*)codes.ptr + head_offset(codes, tile.batch, tile.head) + tile.first;
#pragma unroll
  for (int round = 0; round < (VALUE_DIM * 8 + TILE_THREADS - 1) / TILE_THREADS; ++round) {
    const u32 at = thread + round * TILE_THREADS, channel = at / 8, word = at % 8 * 4;
    if ((VALUE_DIM * 8 % TILE_THREADS && channel >= VALUE_DIM) || (CLUSTER && tile.count <= 0)) break;
    *(uint4*)(to + channel * codes.d + word * 4) = *(const uint4*)(transposed + word_place(channel, word));
  }
  if constexpr (VALUELESS) {
    u32 some = 0;
#pragma unroll 8
    for (u32 channel = thread / KEY_WORDS; channel < VALUE_DIM; channel += TILE_THREADS / KEY_WORDS)
      some |= transposed[word_place(channel, thread % KEY_WORDS)];
    tile.store_valueless(p, some);
  }
}

#if KEY_MAJOR
// Copies codes of V whose keys are contiguous, at any address.
DEVICE void copy_values(const QuantizeParams& p, const TokenTile& tile) {
  const View& codes = p.codes[1];
  const i32 key = threadIdx.x % KEY_WORDS * 4;
  u8* to = (u8*)codes.ptr + head_offset(codes, tile.batch, tile.head) + tile.first + key;
  u32 some = 0;
#pragma unroll 4
  for (i32 channel = threadIdx.x / KEY_WORDS; channel < VALUE_DIM; channel += THREADS / KEY_WORDS) {
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (key + j < tile.count) word |= tile.from[channel * (i64)p.x[1].d + key + j] << (8 * j);
    *(u32*)(to + channel * codes.d) = word;
    some |= word;
  }
  if constexpr (VALUELESS) tile.store_valueless(p, some);
}
#endif

extern "C" __global__ void
#if CLUSTER
__cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(THREADS) quantize_inputs(const __grid_constant__ QuantizeParams p) {
  const u32 tiles = (p.tokens + TOKENS - 1) / TOKENS;
  wait_for_previous_kernel();
  let_next_kernel_start();
#if CLUSTER
  const u32 which = blockIdx.x / CLUSTER % 3, i = blockIdx.x / CLUSTER / 3;
  const u32 count = p.batches * (which == 2 ? p.query_heads : p.heads);
  if (i >= count) return;
  const u32 of = count - 1 - i, tile_of_head = blockIdx.x % CLUSTER * TILES + threadIdx.x / TILE_THREADS;
  if (which == 2) return find_query_scale(p, of);
#else
  const u32 which = FLOATS ? blockIdx.x % 2 : 1, i = blockIdx.x / (FLOATS ? 2 : 1);
  const u32 count = p.batches * p.heads * tiles;
  if (i >= count) return;
  const u32 of = (count - 1 - i) / tiles, tile_of_head = count - 1 - i - of * tiles;
#endif
  TokenTile tile(p, which, of, tile_of_head, tiles);
#if KEY_MAJOR
  copy_values(p, tile);
#else
  if (which == 1)
    quantize_values(p, tile);
  else if constexpr (FLOATS)
    quantize_keys(p, tile);
#endif
}
