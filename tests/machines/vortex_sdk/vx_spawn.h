// Stand-in for Vortex's <vx_spawn.h>: the same names and types, nothing behind them.
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

extern __thread dim3_t blockIdx, threadIdx;
extern dim3_t gridDim, blockDim;
extern __thread uint32_t __local_group_id;
extern uint32_t __warps_per_group;

typedef void (*vx_kernel_func_cb)(void* arg);
int vx_spawn_threads(uint32_t dimension, const uint32_t* grid_dim, const uint32_t* block_dim, vx_kernel_func_cb kernel,
                     const void* arg);
}

// As in the SDK, `size` stands without parentheses: callers bring their own.
#define __local_mem(size) (void*)((int8_t*)csr_read(VX_CSR_LOCAL_MEM_BASE) + __local_group_id * size)
#define __syncthreads() vx_barrier(__local_group_id, __warps_per_group)
