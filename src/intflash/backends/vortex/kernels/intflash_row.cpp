// intflash / intflash_p8, one query row per thread: integer instructions only (RV32IM, Zicond where there).
// Pass 1 finds the row's exact maximum score, pass 2 forms p and sums p * V: the bits do not depend on tiles.
// Past head_dim 8 the query and the sums no longer fit 31 registers: there intflash_split is the kernel to use.
#include "intflash.h"

static constexpr uint32_t D = HEAD_DIM;
static_assert(D % 8 == 0 && D >= 8 && D <= 64, "head_dim is padded to a multiple of 8 up to 64");

// A power of two of keys: K and V take at most 512 bytes each.
static constexpr uint32_t TILE_KEYS = D <= 8 ? 64 : D <= 16 ? 32 : D <= 32 ? 16 : 8;
static constexpr uint32_t TILE_WORDS = TILE_KEYS * D / 4;

static inline __attribute__((always_inline)) int32_t dot(const int32_t* q, const int8_t* k) {
  int32_t s = 0;
  for (uint32_t i = 0; i < D; ++i) s += q[i] * k[i];
  return s;
}

static void attend(kernel_args_t* arg) {
  const uint32_t thread = threadIdx.x;
  const uint32_t row = blockIdx.x * GROUP_THREADS + thread;
  const uint32_t n_k = arg->n_k;
  const int8_t* k_global = pointer<const int8_t>(arg->k_addr);
  const int8_t* v_global = pointer<const int8_t>(arg->v_addr);
  int8_t* k_tile = static_cast<int8_t*>(__local_mem((2 * TILE_KEYS * D)));
  int8_t* v_tile = k_tile + TILE_KEYS * D;

  int32_t q[D];
  const int8_t* q_row = pointer<const int8_t>(arg->q_addr) + row * D;
  const Depth depth(arg);
  for (uint32_t i = 0; i < D; ++i) q[i] = shift_left(q_row[i], depth.query_shift());

  int32_t s_max = -2147483647 - 1;                            // below every score: n_k >= 1 replaces it
  for (uint32_t j = 0; j < n_k; j += TILE_KEYS) {
    stage_words<TILE_WORDS, GROUP_THREADS>(k_tile, k_global + j * D, thread);
    SYNC();
    const int8_t* end = k_tile + uniform_min(TILE_KEYS, n_k - j) * D;
#pragma GCC unroll 1
    for (const int8_t* k = k_tile; k != end; k += D) s_max = imax(s_max, dot(q, k));
    SYNC();
  }

  uint32_t l = 0;                                             // 65193 * N < 2^32
  int64_t total[D];
  for (uint32_t i = 0; i < D; ++i) total[i] = 0;
  for (uint32_t first = 0; first < n_k; first += FLUSH_KEYS) {
    const uint32_t last = uniform_min(first + FLUSH_KEYS, n_k);
    int32_t acc[D];
    for (uint32_t i = 0; i < D; ++i) acc[i] = 0;
    for (uint32_t j = first; j < last; j += TILE_KEYS) {
      stage_words<TILE_WORDS, GROUP_THREADS>(k_tile, k_global + j * D, thread);
      stage_words<TILE_WORDS, GROUP_THREADS>(v_tile, v_global + j * D, thread);
      SYNC();
      const int8_t* end = k_tile + uniform_min(TILE_KEYS, last - j) * D;
#pragma GCC unroll 1
      for (const int8_t* k = k_tile; k != end; k += D) {
        const int32_t p = p_of_depth(depth.of(s_max, dot(q, k)));
        const int8_t* v = k + TILE_KEYS * D;
        l += p;
        for (uint32_t i = 0; i < D; ++i) acc[i] += p * v[i];
      }
      SYNC();
    }
    for (uint32_t i = 0; i < D; ++i) total[i] += acc[i];
  }
  store_row<D>(arg, row, 0, D, total, l, s_max);
}

int main() {
  kernel_args_t* arg = reinterpret_cast<kernel_args_t*>(csr_read(VX_CSR_MSCRATCH));
  return vx_spawn_threads(1, arg->grid_dim, arg->block_dim, reinterpret_cast<vx_kernel_func_cb>(attend), arg);
}
