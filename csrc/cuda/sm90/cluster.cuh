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
