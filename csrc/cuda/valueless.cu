// Finds the keys without a value among V's codes: see valueless.cuh. A CTA takes a block of 128 keys.
//
// Macros: HEAD_DIM; KEY_MAJOR, 1 where V's keys are contiguous and 0 where its channels are.
#include "valueless.cuh"

constexpr u32 THREADS = 128, BLOCK = 128;

static_assert(sizeof(ValuelessParams) == PARAMS_BYTES);

// Returns a thread's part of the codes, as `store_valueless_words` takes it.
DEVICE u32 codes_of_thread(const View& v, const u8* head, u32 first, u32 keys) {
  u32 codes = 0;
#if KEY_MAJOR
  const u32 key = first + threadIdx.x % 32 * 4;
  if (key < keys)
#pragma unroll
    for (u32 d = threadIdx.x / 32; d < HEAD_DIM; d += THREADS / 32) codes |= *(const u32*)(head + d * v.d + key);
#else
  const u32 key = first + threadIdx.x;
  if (key < keys)
#pragma unroll
    for (u32 d = 0; d < HEAD_DIM; d += 16) {
      const uint4 x = *(const uint4*)(head + key * v.n + d);
      codes |= x.x | x.y | x.z | x.w;
    }
#endif
  return codes;
}

extern "C" __global__ void __launch_bounds__(THREADS) valueless(const __grid_constant__ ValuelessParams p) {
  const u32 of = quotient(blockIdx.x, p.blocks, p.blocks_reciprocal), block = blockIdx.x - of * p.blocks;
  const u32 batch = quotient(of, p.heads, p.heads_reciprocal);
  const u8* head = p.v.ptr + head_offset(p.v, batch, of - batch * p.heads);
  wait_for_previous_kernel();
  let_next_kernel_start();
  u32 first = block * BLOCK, keys = p.keys;
  if (p.cu_seqlens_k) {
    u32 i = p.count - 1;
    while (i > 0 && block < first_block_of_sequence(i, p.cu_seqlens_k[i])) --i;
    first = p.cu_seqlens_k[i] + (block - first_block_of_sequence(i, p.cu_seqlens_k[i])) * BLOCK,
    keys = p.cu_seqlens_k[i + 1];
  }
  const u32 codes = codes_of_thread(p.v, head, first, keys), count = first < keys ? keys - first : 0;
  store_valueless_words<KEY_MAJOR>(codes, count, p.words + blockIdx.x * 4);
}
