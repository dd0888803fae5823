// Words of the keys without a value, whose V codes are all 0 (docs/numerics.md, "Two groups"): see `key_of_bit` of
// params.cuh.
#pragma once
#include "params.cuh"

// Stores a block's words, or nothing where `to` is null. codes: whether a code is not 0, of 128 threads: of key
// threadIdx.x % 128 or, with CONTIGUOUS_KEYS, in the bytes of a word of keys 4 lane to 4 lane + 3. keys: the number of
// the block's keys. The CTA has 128 threads for each of BLOCKS blocks, which must all call this.
template <bool CONTIGUOUS_KEYS, int BLOCKS = 1>
DEVICE void store_valueless_words(u32 codes, u32 keys, u32* to) {
  __shared__ u32 of_blocks[BLOCKS * 128];
  const u32 thread = threadIdx.x % 128;
  const u32* const of_threads = of_blocks + (threadIdx.x - thread);
  of_blocks[threadIdx.x] = codes;
  __syncthreads();
  const u32 lane = thread % 32, word = thread / 32, key = key_of_bit(word, lane);
  bool some;
  if constexpr (CONTIGUOUS_KEYS) {
    u32 all = 0;
#pragma unroll
    for (u32 i = 0; i < 128; i += 32) all |= of_threads[i + key / 4];
    some = all >> key % 4 * 8 & 255;
  } else {
    some = of_threads[key];
  }
  const u32 zeros = __ballot_sync(~0u, !some && key < keys);
  if (lane == 0 && to) to[word] = zeros;
}
