// intflash_p8 on the tensor unit, int8 x int8 -> int32, tile 8 x 8 x 32 with 8 threads a warp.
// Both operands share one type, so p (0..255) enters as p ^ 0x80, which is p - 128, and 128 times V's column sums are
// added back: exact, because padded keys have V = 0. B (K by rows, V transposed) loads column-major from global memory.
// One warp owns 8 query rows and up to 32 output columns: the sums of 64 columns would not fit local memory beside p.
// P and the sums never leave integers; fragments only travel through the F register file, as the tensor unit demands.
#define P_BITS 8
#include "intflash.h"
#include "tensor_tile.h"

namespace vt = vortex::tensor;
using ctx = vt::wmma_context<WARP, vt::int8, vt::int32>;
static_assert(ctx::tileM == 8 && ctx::tileN == 8 && ctx::tileK == 32, "8 threads a warp, int8");

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t DEPTH = (D + 31) / 32 * 32;      // Q and K rows are padded with zeros to the tile's 32
static constexpr uint32_t P_STRIDE = 36;                   // bytes; whole words, and no two rows start in one bank
static_assert(D % 8 == 0 && D >= 8 && D <= 64, "head_dim is padded to a multiple of 8 up to 64");

struct Local {
  int32_t s[8 * S_STRIDE];
  int32_t o[8 * O_STRIDE];
  int8_t p[8 * P_STRIDE];
};
static_assert(sizeof(Local) < LOCAL_LIMIT, "local memory of a group");

// 8 x 16 scores of keys j .. j + 15 to local memory.
static inline __attribute__((always_inline)) void scores(Local* local, const int8_t* q, const int8_t* k) {
  ctx::fragment_a a;
  ctx::fragment_b b;
  ctx::fragment_acc c;
  for (uint32_t tile = 0; tile < S_KEYS; tile += 8) {
    ctx::fill_fragment(c, 0);
    for (uint32_t i = 0; i < DEPTH; i += 32) {
      ctx::load_matrix_sync(a, q + i, DEPTH);
      ctx::load_matrix_sync<vt::col_major>(b, k + tile * DEPTH + i, DEPTH);
      ctx::mma_sync(c, a, b, c);
    }
    ctx::store_matrix_sync(local->s + tile, c, S_STRIDE);
  }
}

static void attend(kernel_args_t* arg) {
  const uint32_t r = threadIdx.x, row = blockIdx.x * 8 + r;
  const uint32_t first_column = blockIdx.y * O_COLUMNS;
  const uint32_t columns = uniform_min(O_COLUMNS, D - first_column);
  const uint32_t n_k = arg->n_k, k_stride = arg->k_stride;
  const Depth depth(arg);
  const int8_t* q = pointer<const int8_t>(arg->q_addr) + blockIdx.x * 8 * DEPTH;
  const int8_t* k = pointer<const int8_t>(arg->k_addr);
  const int8_t* v = pointer<const int8_t>(arg->v_addr) + first_column * k_stride;
  Local* local = static_cast<Local*>(__local_mem((sizeof(Local))));
  int32_t* s_row = local->s + r * S_STRIDE;
  int32_t* o_row = local->o + r * O_STRIDE;
  int8_t* p_row = local->p + r * P_STRIDE;

  int32_t s_max = -2147483647 - 1;
  for (uint32_t j = 0; j < n_k; j += S_KEYS) {
    scores(local, q, k + j * DEPTH);
    SYNC();
    const uint32_t count = uniform_min(S_KEYS, n_k - j);
    for (uint32_t c = 0; c < count; ++c) s_max = imax(s_max, s_row[c]);
    SYNC();
  }
  s_max = shift_left(s_max, depth.query_shift());

  uint32_t l = 0;
  for (uint32_t c = 0; c < O_COLUMNS; ++c) o_row[c] = 0;
  ctx::fragment_a a;
  ctx::fragment_b b;
  ctx::fragment_acc o;
  for (uint32_t j = 0; j < n_k; j += 32) {
    for (uint32_t half = 0; half < 32; half += S_KEYS) {
      scores(local, q, k + (j + half) * DEPTH);
      SYNC();
      const uint32_t present = uniform_min(j + half < n_k ? n_k - j - half : 0, S_KEYS);
      for (uint32_t c = 0; c < present; ++c) {
        const uint32_t p = p_of_depth(depth.of(s_max, shift_left(s_row[c], depth.query_shift())));
        l += p;
        p_row[half + c] = static_cast<int8_t>(p ^ 0x80);
      }
      for (uint32_t c = present; c < S_KEYS; ++c) p_row[half + c] = -128;   // any value: these keys have V = 0
      SYNC();
    }
    ctx::load_matrix_sync(a, local->p, P_STRIDE);
    for (uint32_t c = 0; c < columns; c += 8) {
      ctx::load_matrix_sync(o, local->o + c, O_STRIDE);
      ctx::load_matrix_sync<vt::col_major>(b, v + c * k_stride + j, k_stride);
      ctx::mma_sync(o, a, b, o);
      ctx::store_matrix_sync(local->o + c, o, O_STRIDE);
    }
    SYNC();
  }
  const int32_t* colsum = pointer<const int32_t>(arg->colsum_addr) + first_column;
  for (uint32_t c = 0; c < columns; ++c) o_row[c] += colsum[c];            // 255 * 127 * N < 2^31
  store_row<D>(arg, row, first_column, columns, o_row, l, s_max);
}

int main() {
  kernel_args_t* arg = reinterpret_cast<kernel_args_t*>(csr_read(VX_CSR_MSCRATCH));
  return vx_spawn_threads(2, arg->grid_dim, arg->block_dim, reinterpret_cast<vx_kernel_func_cb>(attend), arg);
}
