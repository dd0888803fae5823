// Computes the scales of float Q, K and V, one per tensor: amax / 127, and 1 where amax is below 2^-100
// (docs/numerics.md).
//
// Macros: IN, the floats' type; CTA_CHUNKS, how many chunks of 16 bytes a CTA loads at once. Three adjacent CTAs of the
// grid take Q, K and V, so that the data that was read last, and is in L2 for the next kernel, belongs to the same
// heads of all three tensors. The last CTA to finish converts the maxima to scales.
#include "quantize.cuh"

// AT_ONCE: loads of 16 bytes that a thread has in flight. With fewer loads per CTA, more CTAs would contend for the
// address of the maximum. CTAS: on a multiprocessor, so that ptxas gives these loads registers of their own.
constexpr u32 THREADS = 256, AT_ONCE = 8, CTAS = 4;
static_assert(THREADS * AT_ONCE == CTA_CHUNKS);

static_assert(sizeof(AbsmaxParams) == PARAMS_BYTES);

// Returns the address of chunk i.
template <bool IN_ONE_RUN>
DEVICE const u8* chunk(const Runs& x, u32 i) {
  if (IN_ONE_RUN) return x.ptr + (u64)i * 16;
  const u32 first = quotient(i, x.run, x.run_reciprocal), second = quotient(first, x.sizes[0], x.size_reciprocals[0]);
  const u32 third = quotient(second, x.sizes[1], x.size_reciprocals[1]);
  return x.ptr + (u64)(i - first * x.run) * 16 + (first - second * x.sizes[0]) * x.strides[0] +
         (second - third * x.sizes[1]) * x.strides[1] + third * x.strides[2];
}

// Returns the bits of this thread's largest magnitude. first: its first chunk; step: the distance to its next chunk.
template <bool IN_ONE_RUN>
DEVICE u32 largest_of_thread(const Runs& x, u32 first, u32 step) {
  u32 most = 0;
#pragma unroll 1
  for (; first < x.count; first += step) {
    u32 words[AT_ONCE][4];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) load_words(chunk<IN_ONE_RUN>(x, min(first + i * THREADS, x.count - 1)), words[i]);
#pragma unroll
    for (const auto& of_chunk : words) most = max_magnitudes(most, of_chunk, IN{});
  }
  return max_of_pair(most, IN{});
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) absmax(const __grid_constant__ AbsmaxParams p) {
  __shared__ u32 of_warps[THREADS / 32];
  const u32 which = blockIdx.x % 3, step = gridDim.x / 3 * CTA_CHUNKS;
  const u32 first = blockIdx.x / 3 * CTA_CHUNKS + threadIdx.x;
  const Runs& x = p.x[which];
  wait_for_previous_kernel();
  let_next_kernel_start();
  u32 most = x.run == x.count ? largest_of_thread<true>(x, first, step) : largest_of_thread<false>(x, first, step);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 i = 1; i < THREADS / 32; ++i) most = max(most, of_warps[i]);
  atomicMax(p.amax + which, __float_as_uint(magnitude(most, IN{})));
  __threadfence();
  if (atomicAdd(p.amax + 3, 1u) != gridDim.x - 1) return;
  __threadfence();
  for (int i = 0; i < 3; ++i) p.scales[i] = scale_of_amax(__uint_as_float(atomicMax(p.amax + i, 0u)));
}
