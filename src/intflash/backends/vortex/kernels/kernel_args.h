// What the host hands to every kernel. The Python twin is launch.KernelArgs; a test compares the layouts.
#pragma once
#include <stdint.h>

typedef struct {
  uint64_t q_addr;           // rows padded with zeros to whole groups
  uint64_t k_addr;           // keys padded with zeros to whole tiles
  uint64_t v_addr;           // [keys, head_dim]; tensor unit: [head_dim, k_stride], transposed
  uint64_t o_addr;
  uint64_t scratch_addr;     // standard attention: scores, then probabilities, float [rows, k_stride]; integer: memory
                             // of its own for each group that runs at once, see run_blocks()
  uint64_t multiplier_addr;  // integer: output_multiplier_t [head_dim]
  uint64_t colsum_addr;      // integer tensor unit: column sums of V, int32 [head_dim]
  uint64_t stats_addr;       // integer, raw output: row_stats_t [rows]
  uint32_t grid_dim[3];
  uint32_t block_dim[3];
  uint32_t n_k;              // keys without padding, >= 1
  uint32_t k_stride;         // keys with padding
  uint32_t stage;            // standard attention: 0 scores, 1 softmax, 2 output
  float score_scale;         // float kernels: sm_scale * log2(e)
  uint32_t depth_multiplier; // integer: depth in Q.9 octaves = mulhu((s_max - s) << depth_shift, depth_multiplier)
  uint32_t depth_shift;      // 0..13; past 11 the kernel is compiled with WIDE
  int32_t q_max;             // integer output: clamp to [-q_max, q_max]
  uint32_t reserved;
} kernel_args_t;

// s_V / s_O = multiplier * 2^(exponent - 24) for one output column
typedef struct {
  uint32_t multiplier;       // 2^23 .. 2^24
  int32_t exponent;
} output_multiplier_t;

typedef struct {
  uint32_t l;                // sum of p
  int32_t s_max;             // integer score of the row maximum
} row_stats_t;
