// FlashAttention on the tensor unit, fp16 inputs, fp32 accumulate, tile 8 x 8 x 16 with 8 threads a warp; online softmax.
// The report's program stops at N % 8 == 0 and d = 8; here padded keys are masked and wider heads loop over tiles.
// One warp owns 8 query rows and up to 32 output columns, whose sums lie in local memory (V comes transposed).
#include "float_math.h"
#include "kernel_args.h"
#include "tensor_tile.h"

namespace vt = vortex::tensor;
using ctx = vt::wmma_context<WARP, vt::fp16, vt::fp32>;
static_assert(ctx::tileM == 8 && ctx::tileN == 8 && ctx::tileK == 16 && S_KEYS == 16, "8 threads a warp, fp16");

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t DEPTH = (D + 15) / 16 * 16;      // Q and K rows are padded with zeros to the tile's 16
static constexpr uint32_t P_STRIDE = 18;                   // halves; whole words

struct Local {
  float s[8 * S_STRIDE];
  float o[8 * O_STRIDE];
  uint16_t p[8 * P_STRIDE];
};
static_assert(sizeof(Local) < LOCAL_LIMIT, "local memory of a group");

KERNEL attend(kernel_args_t* arg, uint32_t block, uint32_t column_block) {
  const uint32_t r = threadIdx.x, row = block * 8 + r;
  const uint32_t first_column = column_block * O_COLUMNS;
  const uint32_t columns = uniform_min(O_COLUMNS, D - first_column);
  const uint32_t n_k = arg->n_k, k_stride = arg->k_stride;
  const float scale = arg->score_scale;
  const uint16_t* q = pointer<const uint16_t>(arg->q_addr) + block * 8 * DEPTH;
  const uint16_t* k = pointer<const uint16_t>(arg->k_addr);
  const uint16_t* v = pointer<const uint16_t>(arg->v_addr) + first_column * k_stride;
  Local* local = static_cast<Local*>(__local_mem((sizeof(Local))));
  float* s_row = local->s + r * S_STRIDE;
  float* o_row = local->o + r * O_STRIDE;
  uint16_t* p_row = local->p + r * P_STRIDE;

  for (uint32_t c = 0; c < O_COLUMNS; ++c) o_row[c] = 0;
  ctx::fragment_a a;
  ctx::fragment_b b;
  ctx::fragment_acc acc;
  float m = LOWEST, l = 0;
  for (uint32_t j = 0; j < n_k; j += S_KEYS) {
    for (uint32_t tile = 0; tile < S_KEYS; tile += 8) {
      ctx::fill_fragment(acc, 0.0f);
      for (uint32_t i = 0; i < DEPTH; i += 16) {
        ctx::load_matrix_sync(a, q + i, DEPTH);
        ctx::load_matrix_sync<vt::col_major>(b, k + (j + tile) * DEPTH + i, DEPTH);
        ctx::mma_sync(acc, a, b, acc);
      }
      ctx::store_matrix_sync(local->s + tile, acc, S_STRIDE);
    }
    WARP_SYNC();
    const uint32_t present = uniform_min(S_KEYS, n_k - j);
    float m_new = m;
    for (uint32_t c = 0; c < present; ++c) {
      const float s = s_row[c] * scale;
      s_row[c] = s;
      m_new = fmax2(m_new, s);
    }
    const float decay = exp2_nonpositive(m - m_new);
    m = m_new;
    l *= decay;
    for (uint32_t c = 0; c < columns; ++c) o_row[c] *= decay;
    for (uint32_t c = 0; c < present; ++c) {
      const float p = exp2_nonpositive(s_row[c] - m);
      l += p;
      p_row[c] = half_of_unit(p);
    }
    for (uint32_t c = present; c < S_KEYS; ++c) p_row[c] = 0;
    WARP_SYNC();
    ctx::load_matrix_sync(a, local->p, P_STRIDE);
    for (uint32_t c = 0; c < columns; c += 8) {
      ctx::load_matrix_sync(acc, local->o + c, O_STRIDE);
      ctx::load_matrix_sync<vt::col_major>(b, v + c * k_stride + j, k_stride);
      ctx::mma_sync(acc, a, b, acc);
      ctx::store_matrix_sync(local->o + c, acc, O_STRIDE);
    }
    WARP_SYNC();
  }
  const float inverse = 1.0f / l;
  float* o_global = pointer<float>(arg->o_addr) + row * D + first_column;
  for (uint32_t c = 0; c < columns; ++c) o_global[c] = o_row[c] * inverse;
}

SPAWN(attend)
