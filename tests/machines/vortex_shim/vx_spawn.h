// Native shim of <vx_spawn.h>: groups run one after another, their threads as fibers between barriers.
#pragma once
#include <stdint.h>
#include <vx_intrinsics.h>

extern "C" {
typedef union {
  struct {
    uint32_t x, y, z;
  };
  uint32_t m[3];
} dim3_t;

extern dim3_t blockIdx, threadIdx, gridDim, blockDim;
extern uint32_t vx_shim_group;                                    // 2, so that a missing parenthesis shows
void* vx_shim_local_mem(uint64_t bytes, uint64_t offset);

typedef void (*vx_kernel_func_cb)(void* arg);
int vx_spawn_threads(uint32_t dimension, const uint32_t* grid_dim, const uint32_t* block_dim, vx_kernel_func_cb kernel,
                     const void* arg);
}

// The SDK's macro does not parenthesize `size`; the shim computes both readings and fails when they differ.
#define __local_mem(size) vx_shim_local_mem((size), vx_shim_group * size)
#define __syncthreads() vx_shim_barrier(__LINE__)
