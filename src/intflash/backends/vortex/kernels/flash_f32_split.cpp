// FlashAttention, float32, one query row split among LANES threads: a thread scores every LANES-th key of a tile and owns
// D / LANES output columns, so registers no longer bound head_dim. K and V are read through the data cache (a tile of
// 64 float columns would not fit local memory); only the tile's probabilities are shared.
#include "float_math.h"
#include "kernel_args.h"

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t COLUMNS = D / LANES;
static constexpr uint32_t ROWS = GROUP_THREADS / LANES;
static constexpr uint32_t KEYS = 4;                     // per thread and tile
static constexpr uint32_t TILE_KEYS = KEYS * LANES;
static_assert(LANES * ROWS == GROUP_THREADS && LANES * COLUMNS == D, "LANES divides 16 and head_dim");

struct Local {
  float p[ROWS * TILE_KEYS];
  float exchange[GROUP_THREADS];
};
static_assert(sizeof(Local) < LOCAL_LIMIT, "local memory of a group");

KERNEL attend(kernel_args_t* arg, uint32_t block, uint32_t) {
  const uint32_t thread = threadIdx.x, lane = thread % LANES, team = thread / LANES;
  const uint32_t row = block * ROWS + team, n_k = arg->n_k;
  const float scale = arg->score_scale;
  const float* q = pointer<const float>(arg->q_addr) + row * D;
  const float* k = pointer<const float>(arg->k_addr);
  const float* v = pointer<const float>(arg->v_addr) + lane * COLUMNS;
  Local* local = static_cast<Local*>(__local_mem((sizeof(Local))));
  float* p_row = local->p + team * TILE_KEYS;

  float o[COLUMNS];
  for (uint32_t i = 0; i < COLUMNS; ++i) o[i] = 0;
  float m = LOWEST, l = 0;
  for (uint32_t j = 0; j < n_k; j += TILE_KEYS) {
    float s[KEYS];
    for (uint32_t b = 0; b < KEYS; ++b) s[b] = 0;
    const float* k_lane = k + (j + lane) * D;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < D; ++i) {
      const float q_i = q[i] * scale;
      for (uint32_t b = 0; b < KEYS; ++b) s[b] += q_i * k_lane[b * LANES * D + i];
    }
    float m_new = m;
    for (uint32_t b = 0; b < KEYS; ++b) {
      s[b] = fselect(j + lane + b * LANES < n_k, s[b], LOWEST);
      m_new = fmax2(m_new, s[b]);
    }
    local->exchange[thread] = m_new;
    SYNC();
    for (uint32_t i = 0; i < LANES; ++i) m_new = fmax2(m_new, local->exchange[team * LANES + i]);
    const float decay = exp2_nonpositive(m - m_new);
    m = m_new;
    l *= decay;
    for (uint32_t i = 0; i < COLUMNS; ++i) o[i] *= decay;
    for (uint32_t b = 0; b < KEYS; ++b) {
      const float p = fselect(j + lane + b * LANES < n_k, exp2_nonpositive(s[b] - m), 0.0f);
      l += p;
      p_row[lane + b * LANES] = p;
    }
    SYNC();
    const uint32_t count = uniform_min(TILE_KEYS, n_k - j);
#pragma GCC unroll 1
    for (uint32_t c = 0; c < count; ++c) {
      const float p = p_row[c];
      const float* v_c = v + (j + c) * D;
      for (uint32_t i = 0; i < COLUMNS; ++i) o[i] += p * v_c[i];
    }
    SYNC();
  }
  local->exchange[thread] = l;
  SYNC();
  l = 0;
  for (uint32_t i = 0; i < LANES; ++i) l += local->exchange[team * LANES + i];
  SYNC();                                               // the next block of rows writes there
  const float inverse = 1.0f / l;
  float* o_global = pointer<float>(arg->o_addr) + row * D + lane * COLUMNS;
  for (uint32_t i = 0; i < COLUMNS; ++i) o_global[i] = o[i] * inverse;
}

SPAWN(attend)
