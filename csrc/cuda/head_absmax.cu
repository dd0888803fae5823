// Computes the scales of float Q, K and V, one for each head of each batch or, where `per_head` is 0, one for the
// tensor: amax / 127, and 1 where amax is below 2^-100 (docs/numerics.md).
//
// Macros: IN, the floats' type; HEAD_DIM of Q and K and VALUE_DIM of V, in whole chunks of 16 bytes. A CTA reads TOKENS
// tokens of a head, and the last CTA of a scale converts its maximum. Three adjacent CTAs take Q, K and V, so that the
// data that was read last, and is in L2 for the next kernel, belongs to the same heads of all three tensors.
#include "quantize.cuh"

// AT_ONCE: loads of 16 bytes that a thread has in flight; TOKENS of the wider tensor take as many of each thread.
constexpr i32 THREADS = 256, AT_ONCE = 8;
constexpr i32 TOKENS = THREADS * AT_ONCE * 16 / ((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) * SIZE<IN>);
static_assert(TOKENS == CTA_TOKENS && HEAD_DIM * SIZE<IN> % 16 == 0 && VALUE_DIM * SIZE<IN> % 16 == 0);
static_assert(sizeof(HeadAbsmaxParams) == PARAMS_BYTES);

extern "C" __global__ void __launch_bounds__(THREADS) head_absmax(const __grid_constant__ HeadAbsmaxParams p) {
  __shared__ u32 of_warps[THREADS / 32];
  const u32 which = blockIdx.x % 3, i = blockIdx.x / 3, tiles = (p.tokens[which] + TOKENS - 1) / TOKENS;
  const u32 of = quotient(i, tiles, p.tile_reciprocals[which]);  // the head among all of the batches
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (of >= p.all_heads[which]) return;
  const u32 batch = quotient(of, p.heads[which], p.head_reciprocals[which]), head = of - batch * p.heads[which];
  const i32 first = (i - of * tiles) * TOKENS, count = min((i32)p.tokens[which] - first, TOKENS);
  const View& x = p.x[which];
  const i64 stride = x.n * SIZE<IN>;
  const u8* const from = x.ptr + head_offset(x, batch, head) * SIZE<IN> + first * stride;
  u32 most = which == 2 ? largest_magnitude<IN, VALUE_DIM, THREADS, AT_ONCE>(from, stride, count, threadIdx.x)
                        : largest_magnitude<IN, HEAD_DIM, THREADS, AT_ONCE>(from, stride, count, threadIdx.x);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 i = 1; i < THREADS / 32; ++i) most = max(most, of_warps[i]);
  const u32 slot = p.first[which] + (p.per_head[which] ? of : 0);
  const u32 ctas = p.per_head[which] ? tiles : tiles * p.all_heads[which];  // that share the slot
  if (ctas > 1) {
    atomicMax(p.amax + slot, __float_as_uint(magnitude(most, IN{})));
    __threadfence();
    if (atomicAdd(p.finished + slot, 1u) != ctas - 1) return;
    __threadfence();
    p.scales[slot] = scale_of_amax(__uint_as_float(atomicMax(p.amax + slot, 0u)));
  } else {
    p.scales[slot] = scale_of_magnitude<IN>(most);
  }
}
