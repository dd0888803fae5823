// Rules of the machine, in one place. simx aborts on a branch that splits a warp without vx_split and vx_join,
// so control flow depends on uniform values only and everything per thread is a select.
#pragma once
#include <stdint.h>
#include "kernel_args.h"
#include <vx_intrinsics.h>
#include <vx_spawn.h>

// Address of a 64-bit kernel argument on a 32- or 64-bit device.
template <typename T>
static inline T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// The barrier instruction does not tell the compiler that memory changed: fence it on both sides.
static inline __attribute__((always_inline)) void compiler_fence() { __asm__ volatile("" ::: "memory"); }
#define SYNC()       \
  do {               \
    compiler_fence(); \
    __syncthreads(); \
    compiler_fence(); \
  } while (0)

// All ones when c, else 0. The empty asm keeps the compiler from turning the mask back into a branch.
static inline uint32_t mask_of(bool c) {
  uint32_t mask = 0u - static_cast<uint32_t>(c);
  __asm__("" : "+r"(mask));
  return mask;
}

// c ? a : b without a branch: czero pairs under Zicond, mask arithmetic elsewhere.
static inline int32_t select(bool c, int32_t a, int32_t b) {
#ifdef __riscv_zicond
  return c ? a : b;
#else
  return b ^ ((a ^ b) & static_cast<int32_t>(mask_of(c)));
#endif
}

static inline uint32_t keep_if(bool c, uint32_t a) {
#ifdef __riscv_zicond
  return c ? a : 0;
#else
  return a & mask_of(c);
#endif
}

static inline int32_t imax(int32_t a, int32_t b) { return select(a < b, b, a); }
static inline int32_t imin(int32_t a, int32_t b) { return select(a < b, a, b); }

// For loop bounds: both arguments are the same in every thread.
static inline uint32_t uniform_min(uint32_t a, uint32_t b) { return a < b ? a : b; }

// All threads of a group copy WORDS 32-bit words to local memory; WORDS is a multiple of THREADS.
template <uint32_t WORDS, uint32_t THREADS>
static inline void stage_words(void* local, const void* global, uint32_t thread) {
  static_assert(WORDS % THREADS == 0, "a partial copy would diverge");
  uint32_t* to = static_cast<uint32_t*>(local) + thread;
  const uint32_t* from = static_cast<const uint32_t*>(global) + thread;
  for (uint32_t i = 0; i < WORDS; i += THREADS) to[i] = from[i];
}

// Groups that the device runs at once.
static inline uint32_t resident_groups(const kernel_args_t* arg) {
  const uint32_t threads = vx_num_threads();
  return vx_num_cores() * (vx_num_warps() / ((arg->block_dim[0] + threads - 1) / threads));
}

// Runs FUNCTION(arg, x, y) for the blocks of a group: number blockIdx.x of those that run at once, and every so many on.
// The grid that is spawned has one group for each: vx_spawn_threads leaves blocks out when two or more cores have one
// more than the others. A group's scratch memory is its own as long as it runs.
template <void (*FUNCTION)(kernel_args_t*, uint32_t, uint32_t)>
static __attribute__((noinline)) void run_blocks(kernel_args_t* arg) {
  const uint32_t width = arg->grid_dim[0], stride = resident_groups(arg);
  uint32_t x = blockIdx.x;
#pragma GCC unroll 1
  for (uint32_t y = 0; y < arg->grid_dim[1]; ++y, x -= width) {
#pragma GCC unroll 1
    for (; x < width; x += stride) FUNCTION(arg, x, y);
  }
}

// Moves the stack down by a distance of the thread's own. Stacks lie 8 KB apart, so that a frame of one layout would put
// the same word of all threads into one set of the data cache, which holds four of them.
static constexpr uint32_t STACK_COLOURS = 16, COLOUR_BYTES = 256;
template <void (*FUNCTION)(kernel_args_t*, uint32_t, uint32_t)>
static void on_own_cache_lines(void* arg) {
  void* skipped = __builtin_alloca(vx_hart_id() % STACK_COLOURS * COLOUR_BYTES + 1);
  __asm__ volatile("" : : "r"(skipped) : "memory");
  run_blocks<FUNCTION>(static_cast<kernel_args_t*>(arg));
}

// The program's main().
#define KERNEL static inline __attribute__((always_inline)) void
#define SPAWN(function)                                                                  \
  int main() {                                                                           \
    kernel_args_t* arg = reinterpret_cast<kernel_args_t*>(csr_read(VX_CSR_MSCRATCH));     \
    const uint32_t grid[] = {resident_groups(arg)};                                      \
    return vx_spawn_threads(1, grid, arg->block_dim, on_own_cache_lines<function>, arg); \
  }

static constexpr uint32_t GROUP_THREADS = 16;   // two warps of eight: one group fills a core of the report's machine
static constexpr uint32_t LOCAL_LIMIT = 2048;   // bytes a group; above that local memory aliases on simx
