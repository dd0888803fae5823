// Computes the scales of float Q, K and V, one for each head of each batch or, where `per_head` is 0, one for the
// tensor: amax / 127, and 1 where amax is below 2^-100 (docs/numerics.md).
//
// Macros: IN, the floats' type; HEAD_DIM of Q and K and VALUE_DIM of V, in whole chunks of 16 bytes; CLUSTER. Three
// adjacent CTAs or clusters take Q, K and V, so that the data that was read last, and is in L2 for the next kernel,
// belongs to the same heads of all three tensors.
//
//   CLUSTER > 0  a cluster of so many CTAs takes a head and exchanges its maxima; each head has a scale of its own
//   CLUSTER = 0  a CTA reads TOKENS tokens of a head, and the last CTA of a scale converts its maximum
#include "quantize.cuh"
#include "sm90/cluster.cuh"

// AT_ONCE: loads of 16 bytes that a thread has in flight; TOKENS of the wider tensor take as many of each thread. CTAS:
// on a multiprocessor, so that ptxas gives these loads registers of their own.
constexpr i32 THREADS = 256, AT_ONCE = 8, CTAS = 4;
static_assert(HEAD_DIM * SIZE<IN> % 16 == 0 && VALUE_DIM * SIZE<IN> % 16 == 0);
static_assert(sizeof(HeadAbsmaxParams) == PARAMS_BYTES);

// Returns the thread's part of the largest magnitude of `count` tokens of a head, from `first` on.
DEVICE u32 largest_of_tokens(const HeadAbsmaxParams& p, u32 which, u32 head, i32 first, i32 count) {
  const u32 batch = quotient(head, p.heads[which], p.head_reciprocals[which]);
  const View& x = p.x[which];
  const i64 stride = x.n * SIZE<IN>;
  const u8* const from = x.ptr + head_offset(x, batch, head - batch * p.heads[which]) * SIZE<IN> + first * stride;
  return which == 2 ? largest_magnitude<IN, VALUE_DIM, THREADS, AT_ONCE>(from, stride, count, threadIdx.x)
                    : largest_magnitude<IN, HEAD_DIM, THREADS, AT_ONCE>(from, stride, count, threadIdx.x);
}

#if CLUSTER
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, CTAS)
    head_absmax(const __grid_constant__ HeadAbsmaxParams p) {
  __shared__ u32 of_warps[THREADS / 32];
  const u32 i = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, which = i % 3, head = i / 3;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (head >= p.all_heads[which]) return;
  const i32 each = (p.tokens[which] + CLUSTER - 1) / CLUSTER, first = rank * each;
  u32 most[1] = {largest_of_tokens(p, which, head, first, min((i32)p.tokens[which] - first, each))};
  maxima_of_cluster<CLUSTER, THREADS / 32>(most, of_warps);
  if (rank == 0 && threadIdx.x == 0) p.scales[p.first[which] + head] = scale_of_magnitude<IN>(most[0]);
}
#else
constexpr i32 TOKENS = THREADS * AT_ONCE * 16 / ((HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) * SIZE<IN>);
static_assert(TOKENS == CTA_TOKENS);

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) head_absmax(const __grid_constant__ HeadAbsmaxParams p) {
  __shared__ u32 of_warps[THREADS / 32];
  const u32 which = blockIdx.x % 3, i = blockIdx.x / 3, tiles = (p.tokens[which] + TOKENS - 1) / TOKENS;
  const u32 of = quotient(i, tiles, p.tile_reciprocals[which]);  // the head among all of the batches
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (of >= p.all_heads[which]) return;
  const i32 first = (i - of * tiles) * TOKENS, count = min((i32)p.tokens[which] - first, TOKENS);
  u32 most[1] = {largest_of_tokens(p, which, of, first, count)};
  maxima_of_cluster<1, THREADS / 32>(most, of_warps);
  if (threadIdx.x != 0) return;
  const u32 slot = p.first[which] + (p.per_head[which] ? of : 0);
  const u32 ctas = p.per_head[which] ? tiles : tiles * p.all_heads[which];  // that share the slot
  if (ctas > 1) {
    atomicMax(p.amax + slot, __float_as_uint(magnitude(most[0], IN{})));
    __threadfence();
    if (atomicAdd(p.finished + slot, 1u) != ctas - 1) return;
    __threadfence();
    p.scales[slot] = scale_of_amax(__uint_as_float(atomicMax(p.amax + slot, 0u)));
  } else {
    p.scales[slot] = scale_of_magnitude<IN>(most[0]);
  }
}
#endif
