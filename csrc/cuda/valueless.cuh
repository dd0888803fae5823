// Words of the keys without a value, whose V codes are all 0 (docs/numerics.md, "Blocks and groups"). Word q of a block
// of 128 keys has a bit for each key that lane q of a quad holds: see block_float.cuh.
#pragma once
#include "params.cuh"

// Stores a block's words. codes: whether a code is not 0, of 128 threads: of key threadIdx.x or, with CONTIGUOUS_KEYS,
// in the bytes of a word of keys 4 lane to 4 lane + 3. keys: the number of the block's keys. All 128 threads must call
// this.
template <bool CONTIGUOUS_KEYS>
DEVICE void store_valueless_words(u32 codes, u32 keys, u32* to) {
  __shared__ u32 of_threads[128];
  of_threads[threadIdx.x] = codes;
  __syncthreads();
  const u32 lane = threadIdx.x % 32, word = threadIdx.x / 32, key = key_of_bit(word, lane);
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
  if (lane == 0) to[word] = zeros;
}
