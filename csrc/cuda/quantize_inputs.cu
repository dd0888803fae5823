// Writes the codes of float K and V from scales per tensor or head. V's codes are stored with contiguous keys, as 8-bit
// tensor cores read them; each row is padded with zeros to a multiple of 128 keys.
//
// Macros: IN, the floats' type; HEAD_DIM of K and VALUE_DIM of V (multiples of 8); VALUES_IN_RANGE (1: no
// float is outside its scale's range); VALUELESS (1: finds the keys without a value too). A CTA quantizes 128
// tokens of a head of one tensor. CTAs take the last heads first, because the previous kernel has left those in L2; the
// codes of the first heads, written last, then stay there.
#include "quantize.cuh"
#include "valueless.cuh"

constexpr int THREADS = 128, TOKENS = 128;
constexpr int CHUNKS = HEAD_DIM / 8;  // a thread loads 8 channels of a token at once
constexpr int VALUE_CHUNKS = VALUE_DIM / 8;
constexpr int KEY_WORDS = TOKENS / 4;  // a word holds four keys of a channel
typedef Codes<IN, VALUES_IN_RANGE> In;

static_assert(sizeof(QuantizeParams) == PARAMS_BYTES);

// The tokens of a CTA.
struct TokenTile {
  u32 index, batch, head;  // `index` counts the tiles of all heads
  i32 first, count;        // tokens from the first of the tile to the last of the head
  float inverse;
  const u8* from;  // address of the tile's first token
  i64 stride;      // in bytes, between tokens

  DEVICE TokenTile(const QuantizeParams& p, u32 which, u32 i) : index(i) {
    const u32 tiles = (p.tokens + TOKENS - 1) / TOKENS, of = i / tiles;
    batch = of / p.heads, head = of - batch * p.heads;
    first = (i - of * tiles) * TOKENS, count = p.tokens - first;
    inverse = In::usable_inverse(__frcp_rn(*head_element<float>(p.scales[which], batch, head)));
    const View& x = p.x[which];
    stride = x.n * SIZE<IN>;
    from = x.ptr + head_offset(x, batch, head) * SIZE<IN> + first * stride;
  }
  template <int COUNT>
  DEVICE void load(i32 token, i32 channel, In::Raw<COUNT>& raw) const {
    load_words(from + token * stride + channel * SIZE<IN>, raw.word);
  }
  template <int COUNT>
  DEVICE void clamp(In::Raw<COUNT>& raw) const {
    if (In::has_far_values(inverse)) In::clamp_far_values(raw, inverse);
  }
};

// Quantizes tokens of K. A thread takes 8 channels in each round.
DEVICE void quantize_keys(const TokenTile& tile, const View& codes) {
  constexpr int ROUNDS = TOKENS * CHUNKS / THREADS, GROUP = SIZE<IN> == 4 ? 4 : 8;
  u8* to = (u8*)codes.ptr + head_offset(codes, tile.batch, tile.head) + (i64)tile.first * codes.n;
#pragma unroll 1
  for (int group = 0; group < ROUNDS; group += GROUP) {
    In::Raw<2> raw[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const i32 at = threadIdx.x + (group + i) * THREADS;
      if (group + i < ROUNDS && at / CHUNKS < tile.count) tile.load(at / CHUNKS, at % CHUNKS * 8, raw[i]);
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const i32 at = threadIdx.x + (group + i) * THREADS;
      if (group + i >= ROUNDS || at / CHUNKS >= tile.count) continue;
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

// Quantizes keys of V. A thread takes 4 keys by 8 channels in each round, and the CTA transposes them through shared
// memory.
DEVICE void quantize_values(const TokenTile& tile, const View& codes, u32* valueless) {
  __shared__ __align__(16) u32 transposed[VALUE_DIM * KEY_WORDS];
  constexpr int BLOCKS = TOKENS / 4 * VALUE_CHUNKS, ROUNDS = (BLOCKS + THREADS - 1) / THREADS;
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const i32 at = threadIdx.x + round * THREADS, key = at / VALUE_CHUNKS * 4, chunk = at % VALUE_CHUNKS;
    if (BLOCKS % THREADS && at >= BLOCKS) break;
    In::Raw<2> raw[4];
    u32 present = 0;  // bytes of the keys that exist
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile.load(min(key + i, tile.count - 1), chunk * 8, raw[i]);
      if (key + i < tile.count) present |= 0xFFu << (8 * i);
    }
    u32 w[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.clamp(raw[i]);
    In::transposed(raw, tile.inverse, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) transposed[word_place(chunk * 8 + i, key / 4)] = w[i] & present;
  }
  __syncthreads();
  u8* to = (u8*)codes.ptr + head_offset(codes, tile.batch, tile.head) + tile.first;
#pragma unroll
  for (int round = 0; round < (VALUE_DIM * 8 + THREADS - 1) / THREADS; ++round) {
    const u32 at = threadIdx.x + round * THREADS, channel = at / 8, word = at % 8 * 4;
    if (VALUE_DIM * 8 % THREADS && channel >= VALUE_DIM) break;
    *(uint4*)(to + channel * codes.d + word * 4) = *(const uint4*)(transposed + word_place(channel, word));
  }
  if constexpr (VALUELESS) {
    u32 some = 0;
#pragma unroll 8
    for (u32 channel = threadIdx.x / KEY_WORDS; channel < VALUE_DIM; channel += THREADS / KEY_WORDS)
      some |= transposed[word_place(channel, threadIdx.x % KEY_WORDS)];
    store_valueless_words<true>(some, tile.count, valueless + tile.index * 4);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_inputs(const __grid_constant__ QuantizeParams p) {
  const u32 which = blockIdx.x % 2, i = blockIdx.x / 2;
  const u32 count = p.batches * p.heads * ((p.tokens + TOKENS - 1) / TOKENS);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (i >= count) return;
  const TokenTile tile(p, which, count - 1 - i);
  if (which == 1)
    quantize_values(tile, p.codes[1], p.valueless);
  else
    quantize_keys(tile, p.codes[0]);
}
