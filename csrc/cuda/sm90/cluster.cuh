// What the CTAs of a cluster do together: they run at once and read each other's shared memory.
#pragma once
#include "ptx.cuh"

// Waits for all threads of the cluster. What they have written to shared memory before is visible after it.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns a word of another CTA's shared memory. address: of the word in this CTA's own, at the same offset.
DEVICE u32 load_shared_of(u32 cta, u32 address) {
  u32 word;
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.u32 %0, [there];}"
               : "=r"(word)
               : "r"(address), "r"(cta)
               : "memory");
  return word;
}

// Replaces each number by the largest of all threads of the CTA, or of the CTAS CTAs of the cluster, which must all
// call this. exchange: shared memory of COUNT words for each of a CTA's warps.
template <int CTAS, int WARPS, int COUNT>
DEVICE void maxima_of_cluster(u32 (&x)[COUNT], u32* exchange) {
  const auto wait_for_all = [] {
    if constexpr (CTAS > 1)
      cluster_sync();
    else
      __syncthreads();
  };
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const u32 of_warp = __reduce_max_sync(~0u, x[i]);
    if (threadIdx.x % 32 == 0) exchange[i * WARPS + threadIdx.x / 32] = of_warp;
    x[i] = 0;
  }
  wait_for_all();
  if constexpr (CTAS > 1) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      for (u32 warp = threadIdx.x % 32; warp < CTAS * WARPS; warp += 32)
        x[i] = max(x[i], load_shared_of(warp / WARPS, shared_address(exchange + i * WARPS + warp % WARPS)));
      x[i] = __reduce_max_sync(~0u, x[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT * WARPS; ++i) x[i / WARPS] = max(x[i / WARPS], exchange[i]);
  }
  wait_for_all();
}
