// intflash / intflash_p8 with one query row split among LANES threads (the report's future work): a thread scores every
// LANES-th key and sums D / LANES columns, so neither the query nor the sums have to fit one thread's registers.
// Threads meet in local memory, where the query, the tile (of K, then of V) and the row's p lie. Integer instructions only.
#include "intflash.h"

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t COLUMNS = D / LANES;                 // sums per thread
static constexpr uint32_t ROWS = GROUP_THREADS / LANES;        // query rows per group
static_assert(D % 8 == 0 && D >= 8 && D <= 64, "head_dim is padded to a multiple of 8 up to 64");
static_assert(LANES * ROWS == GROUP_THREADS && LANES * COLUMNS == D, "LANES divides 16 and head_dim");

#if P_BITS == 16
typedef uint16_t p_t;
#else
typedef uint8_t p_t;
#endif

static constexpr uint32_t local_bytes(uint32_t keys) {
  return keys * D + ROWS * keys * sizeof(p_t) + ROWS * D + GROUP_THREADS * 4;
}
// The largest power of two of keys that fits; at least one key per lane.
static constexpr uint32_t TILE_KEYS = local_bytes(64) < LOCAL_LIMIT ? 64 : local_bytes(32) < LOCAL_LIMIT ? 32
                                      : local_bytes(16) < LOCAL_LIMIT ? 16 : 8;
static_assert(TILE_KEYS % LANES == 0 && local_bytes(TILE_KEYS) < LOCAL_LIMIT, "local memory of a group");

struct Local {
  int8_t tile[TILE_KEYS * D];
  int32_t exchange[GROUP_THREADS];      // partial maxima, then partial l
  int8_t q[ROWS * D];
  p_t p[ROWS * TILE_KEYS];
};
static_assert(sizeof(Local) <= LOCAL_LIMIT, "local memory of a group");

// A thread scores keys lane, lane + LANES, ... of the tile, BLOCK at a time: a q element is loaded once for all of them.
static constexpr uint32_t KEYS = TILE_KEYS / LANES;
static constexpr uint32_t BLOCK = KEYS < 4 ? KEYS : 4;

static inline __attribute__((always_inline)) void scores(int32_t* s, const int8_t* q, const int8_t* k) {
  for (uint32_t b = 0; b < BLOCK; ++b) s[b] = 0;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < D; ++i) {
    const int32_t q_i = q[i];
    for (uint32_t b = 0; b < BLOCK; ++b) s[b] += q_i * k[b * LANES * D + i];
  }
}

static void attend(kernel_args_t* arg) {
  const uint32_t thread = threadIdx.x;
  const uint32_t lane = thread % LANES, team = thread / LANES;
  const uint32_t row = blockIdx.x * ROWS + team;
  const uint32_t n_k = arg->n_k;
  const int8_t* k_global = pointer<const int8_t>(arg->k_addr);
  const int8_t* v_global = pointer<const int8_t>(arg->v_addr);
  Local* local = static_cast<Local*>(__local_mem((sizeof(Local))));
  const Depth depth(arg);

  const int8_t* q_global = pointer<const int8_t>(arg->q_addr) + row * D;
  for (uint32_t i = lane; i < D; i += LANES) local->q[team * D + i] = q_global[i];
  const int8_t* q = local->q + team * D;

  int32_t s_max = -2147483647 - 1;
  for (uint32_t j = 0; j < n_k; j += TILE_KEYS) {
    stage_words<TILE_KEYS * D / 4, GROUP_THREADS>(local->tile, k_global + j * D, thread);
    SYNC();
    const uint32_t count = uniform_min(TILE_KEYS, n_k - j);
    for (uint32_t first_key = 0; first_key < count; first_key += BLOCK * LANES) {
      const uint32_t c = first_key + lane;
      int32_t s[BLOCK];
      scores(s, q, local->tile + c * D);
      for (uint32_t b = 0; b < BLOCK; ++b) s_max = select(j + c + b * LANES < n_k, imax(s_max, s[b]), s_max);
    }
    SYNC();
  }
  local->exchange[thread] = s_max;
  SYNC();
  for (uint32_t i = 0; i < LANES; ++i) s_max = imax(s_max, local->exchange[team * LANES + i]);
  s_max = shift_left(s_max, depth.query_shift());
  SYNC();

  uint32_t l = 0;
  int64_t total[COLUMNS];
  for (uint32_t i = 0; i < COLUMNS; ++i) total[i] = 0;
  for (uint32_t first = 0; first < n_k; first += FLUSH_KEYS) {
    const uint32_t last = uniform_min(first + FLUSH_KEYS, n_k);
    int32_t acc[COLUMNS];
    for (uint32_t i = 0; i < COLUMNS; ++i) acc[i] = 0;
    for (uint32_t j = first; j < last; j += TILE_KEYS) {
      stage_words<TILE_KEYS * D / 4, GROUP_THREADS>(local->tile, k_global + j * D, thread);
      SYNC();
      const uint32_t count = uniform_min(TILE_KEYS, last - j);
      for (uint32_t first_key = 0; first_key < count; first_key += BLOCK * LANES) {
        const uint32_t c = first_key + lane;
        int32_t s[BLOCK];
        scores(s, q, local->tile + c * D);
        for (uint32_t b = 0; b < BLOCK; ++b) {
          const uint32_t key = c + b * LANES;
          const uint32_t p = keep_if(j + key < n_k, p_of_depth(depth.of(s_max, shift_left(s[b], depth.query_shift()))));
          l += p;
          local->p[team * TILE_KEYS + key] = static_cast<p_t>(p);
        }
      }
      SYNC();
      stage_words<TILE_KEYS * D / 4, GROUP_THREADS>(local->tile, v_global + j * D, thread);
      SYNC();
      const p_t* p = local->p + team * TILE_KEYS;
      const int8_t* v = local->tile + lane * COLUMNS;
#pragma GCC unroll 1
      for (uint32_t c = 0; c < count; ++c) {
        const int32_t p_c = p[c];
        for (uint32_t i = 0; i < COLUMNS; ++i) acc[i] += p_c * v[c * D + i];
      }
      SYNC();
    }
    for (uint32_t i = 0; i < COLUMNS; ++i) total[i] += acc[i];
  }
  local->exchange[thread] = static_cast<int32_t>(l);
  SYNC();
  l = 0;
  for (uint32_t i = 0; i < LANES; ++i) l += static_cast<uint32_t>(local->exchange[team * LANES + i]);
  store_row<D>(arg, row, lane * COLUMNS, COLUMNS, total, l, s_max);
}

int main() {
  kernel_args_t* arg = reinterpret_cast<kernel_args_t*>(csr_read(VX_CSR_MSCRATCH));
  return vx_spawn_threads(1, arg->grid_dim, arg->block_dim, reinterpret_cast<vx_kernel_func_cb>(attend), arg);
}
