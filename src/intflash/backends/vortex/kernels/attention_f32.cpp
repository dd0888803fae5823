// Standard attention in three kernels, float32: scores and probabilities go through global memory.
// stage 0: one thread per score, grid (keys / 16, rows); stage 1: one thread per row; stage 2: one thread per output.
#include "float_math.h"
#include "kernel_args.h"

static constexpr uint32_t D = HEAD_DIM;

static void scores(kernel_args_t* arg) {
  const uint32_t key = blockIdx.x * GROUP_THREADS + threadIdx.x, row = blockIdx.y;
  const float* q = pointer<const float>(arg->q_addr) + row * D;
  const float* k = pointer<const float>(arg->k_addr) + key * D;
  float s = 0;
  for (uint32_t i = 0; i < D; ++i) s += q[i] * k[i];
  pointer<float>(arg->scratch_addr)[row * arg->k_stride + key] = s * arg->score_scale;
}

static void softmax(kernel_args_t* arg) {
  const uint32_t row = blockIdx.x * GROUP_THREADS + threadIdx.x, n_k = arg->n_k;
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

static void output(kernel_args_t* arg) {
  const uint32_t index = blockIdx.x * GROUP_THREADS + threadIdx.x, n_k = arg->n_k;
  const uint32_t row = index / D, column = index % D;
  const float* p = pointer<const float>(arg->scratch_addr) + row * arg->k_stride;
  const float* v = pointer<const float>(arg->v_addr) + column;
  float o = 0;
  for (uint32_t j = 0; j < n_k; ++j) o += p[j] * v[j * D];
  pointer<float>(arg->o_addr)[index] = o;
}

// Without stack colours: these kernels keep nothing on the stack, and start once for each of very many small groups.
int main() {
  kernel_args_t* arg = reinterpret_cast<kernel_args_t*>(csr_read(VX_CSR_MSCRATCH));
  void (*const stages[])(kernel_args_t*) = {scores, softmax, output};
  return vx_spawn_threads(2, arg->grid_dim, arg->block_dim, reinterpret_cast<vx_kernel_func_cb>(stages[arg->stage]), arg);
}
