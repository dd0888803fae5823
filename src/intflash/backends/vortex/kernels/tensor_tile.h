// Shape shared by the two tensor-unit kernels. Compile with -fno-strict-aliasing: fragments are read through float.
#pragma once
#include <stdint.h>
#include <vx_tensor.h>

// Threads of a warp run in lockstep and their local memory accesses in order: only the compiler must be held back.
#ifndef WARP_SYNC
#define WARP_SYNC() compiler_fence()
#endif

static constexpr uint32_t WARP = 8;
static constexpr uint32_t S_KEYS = 16;        // scores of so many keys lie in local memory at once
static constexpr uint32_t O_COLUMNS = 32;     // output columns of one group
static constexpr uint32_t S_STRIDE = S_KEYS + 1, O_STRIDE = O_COLUMNS + 1;   // one word more: rows start in different banks
