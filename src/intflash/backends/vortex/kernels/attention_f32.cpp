// Standard attention in three kernels, float32: scores and probabilities go through global memory.
// stage 0: one thread per score, grid (keys / 16, rows); stage 1: one thread per row; stage 2: one thread per output.
#include "float_math.h"
#include "kernel_args.h"

static constexpr uint32_t D = HEAD_DIM;

static void scores(kernel_args_t* arg, uint32_t block, uint32_t row) {
  const uint32_t key = block * GROUP_THREADS + threadIdx.x;
  const float* q = pointer<const float>(arg->q_addr) + row * D;
  const float* k = pointer<const float>(arg->k_addr) + key * D;
  float s = 0;
  for (uint32_t i = 0; i < D; ++i) s += q[i] * k[i];
  pointer<float>(arg->scratch_addr)[row * arg->k_stride + key] = s * arg->score_scale;
}

static void softmax(kernel_args_t* arg, uint32_t block) {
  const uint32_t row = block * GROUP_THREADS + threadIdx.x, n_k = arg->n_k;
  float* s = pointer<float>(arg->scratch_addr) + row * arg->k_stride;
  float s_max = s[0];
  for (uint32_t j = 1; j < n_k; ++j) s_max = fmax2(s_max, s[j]);
  float l = 0;
  for (uint32_t j = 0; j < n_k; ++j) {
    const float p = exp2_nonpositive(s[j] - s_max);
    l += p;
    s[j] = p;
  }
  const float inverse = 1.0f / l;
  for (uint32_t j = 0; j < n_k; ++j) s[j] *= inverse;
}

static void output(kernel_args_t* arg, uint32_t block) {
  const uint32_t index = block * GROUP_THREADS + threadIdx.x, n_k = arg->n_k;
  const uint32_t row = index / D, column = index % D;
  const float* p = pointer<const float>(arg->scratch_addr) + row * arg->k_stride;
  const float* v = pointer<const float>(arg->v_addr) + column;
  float o = 0;
  for (uint32_t j = 0; j < n_k; ++j) o += p[j] * v[j * D];
  pointer<float>(arg->o_addr)[index] = o;
}

KERNEL stage(kernel_args_t* arg, uint32_t x, uint32_t y) {
  if (arg->stage == 0)
    scores(arg, x, y);
  else if (arg->stage == 1)
    softmax(arg, x);
  else
    output(arg, x);
}

SPAWN(stage)
