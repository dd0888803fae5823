// FlashAttention, float32, one query row per thread, online softmax: the report's SIMT program for any N and head_dim.
// The query and the output row live in registers, which bounds head_dim (see flash_f32_split).
#include "float_math.h"
#include "kernel_args.h"

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t TILE_KEYS = D <= 8 ? 16 : D <= 16 ? 8 : D <= 32 ? 4 : 2;   // K and V: at most 512 bytes each
static constexpr uint32_t TILE_WORDS = TILE_KEYS * D;

KERNEL attend(kernel_args_t* arg, uint32_t block, uint32_t) {
  const uint32_t thread = threadIdx.x, row = block * GROUP_THREADS + thread, n_k = arg->n_k;
  const float* k_global = pointer<const float>(arg->k_addr);
  const float* v_global = pointer<const float>(arg->v_addr);
  const float* q_global = pointer<const float>(arg->q_addr) + row * D;
  float* k_tile = static_cast<float*>(__local_mem((2 * TILE_WORDS * 4)));
  float* v_tile = k_tile + TILE_WORDS;

  float q[D], o[D];
  for (uint32_t i = 0; i < D; ++i) {
    q[i] = q_global[i] * arg->score_scale;
    o[i] = 0;
  }
  float m = LOWEST, l = 0;
  for (uint32_t j = 0; j < n_k; j += TILE_KEYS) {
    stage_words<TILE_WORDS, GROUP_THREADS>(k_tile, k_global + j * D, thread);
    stage_words<TILE_WORDS, GROUP_THREADS>(v_tile, v_global + j * D, thread);
    SYNC();
    float s[TILE_KEYS];
    float m_new = m;
    for (uint32_t c = 0; c < TILE_KEYS; ++c) {
      float dot = 0;
      for (uint32_t i = 0; i < D; ++i) dot += q[i] * k_tile[c * D + i];
      s[c] = fselect(j + c < n_k, dot, LOWEST);
      m_new = fmax2(m_new, s[c]);
    }
    const float decay = exp2_nonpositive(m - m_new);
    m = m_new;
    l *= decay;
    for (uint32_t i = 0; i < D; ++i) o[i] *= decay;
    for (uint32_t c = 0; c < TILE_KEYS; ++c) {
      const float p = fselect(j + c < n_k, exp2_nonpositive(s[c] - m), 0.0f);
      l += p;
      for (uint32_t i = 0; i < D; ++i) o[i] += p * v_tile[c * D + i];
    }
    SYNC();
  }
  const float inverse = 1.0f / l;
  float* o_global = pointer<float>(arg->o_addr) + row * D;
  for (uint32_t i = 0; i < D; ++i) o_global[i] = o[i] * inverse;
}

SPAWN(attend)
