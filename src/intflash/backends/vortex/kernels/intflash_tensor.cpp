// intflash / intflash_p8 on the tensor unit, int8 x int8 -> int32, tile 8 x 8 x 32 with 8 threads a warp.
// Both operands share one type, so 8-bit p enters as p ^ 0x80, which is p - 128, and 16-bit p as two such digits:
// p = 256 * high + low. What the digits leave out, 128 or 128 * 257 times V's column sums, is added back at the end:
// exact, because padded keys have V = 0. B (K by rows, V transposed) loads column-major from global memory.
// Pass 1 forms the scores and finds the row's exact maximum, pass 2 reads them back: eight words, one access, a key.
// One warp owns 8 query rows and up to 32 output columns: the sums of 64 columns would not fit local memory beside p.
// P and the sums never leave integers; fragments only travel through the F register file, as the tensor unit demands.
#include "intflash.h"
#include "tensor_tile.h"

namespace vt = vortex::tensor;
using ctx = vt::wmma_context<WARP, vt::int8, vt::int32>;
static_assert(ctx::tileM == 8 && ctx::tileN == 8 && ctx::tileK == 32, "8 threads a warp, int8");

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t DEPTH = (D + 31) / 32 * 32;      // Q and K rows are padded with zeros to the tile's 32
static constexpr uint32_t DIGITS = P_BITS / 8;
static constexpr int32_t LEFT_OUT = P_BITS == 16 ? 128 * 257 : 128;
static constexpr uint32_t P_STRIDE = 36;                   // bytes; whole words, and no two rows start in one bank
static_assert(D % 8 == 0 && D >= 8 && D <= 64, "head_dim is padded to a multiple of 8 up to 64");

struct Local {
  union {
    int32_t s[8 * S_STRIDE];                               // pass 1
    uint32_t p[DIGITS][8 * P_STRIDE / 4];                  // pass 2
  };
  int32_t o[8 * O_STRIDE];
};
static_assert(sizeof(Local) < LOCAL_LIMIT, "local memory of a group");

// Scores of S_KEYS keys from `k` on to local memory.
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

// acc += high << 8, element by element: a fragment is an array of 32-bit words, whatever its type says.
static inline __attribute__((always_inline)) void add_high_digit(ctx::fragment_acc& acc, const ctx::fragment_acc& high) {
  static_assert(sizeof(acc) % 4 == 0, "words");
  uint32_t* to = reinterpret_cast<uint32_t*>(&acc);
  const uint32_t* from = reinterpret_cast<const uint32_t*>(&high);
  for (uint32_t i = 0; i < sizeof(acc) / 4; ++i) to[i] += from[i] << 8;
}

KERNEL attend(kernel_args_t* arg, uint32_t block, uint32_t column_block) {
  const uint32_t r = threadIdx.x, row = block * 8 + r;
  const uint32_t first_column = column_block * O_COLUMNS;
  const uint32_t columns = uniform_min(O_COLUMNS, D - first_column);
  const uint32_t n_k = arg->n_k, k_stride = arg->k_stride;
  const Depth depth(arg);
  const int8_t* q = pointer<const int8_t>(arg->q_addr) + block * 8 * DEPTH;
  const int8_t* k = pointer<const int8_t>(arg->k_addr);
  const int8_t* v = pointer<const int8_t>(arg->v_addr) + first_column * k_stride;
  const int32_t* colsum = pointer<const int32_t>(arg->colsum_addr) + first_column;
  Local* local = static_cast<Local*>(__local_mem((sizeof(Local))));
  int32_t* s_row = local->s + r * S_STRIDE;
  int32_t* o_row = local->o + r * O_STRIDE;
  int32_t* s_global = pointer<int32_t>(arg->scratch_addr) + blockIdx.x * (k_stride * WARP) + r;

  int32_t s_max = -2147483647 - 1;
#pragma GCC unroll 1
  for (uint32_t j = 0; j < n_k; j += S_KEYS) {
    scores(local, q, k + j * DEPTH);
    WARP_SYNC();
    const uint32_t count = uniform_min(S_KEYS, n_k - j);
#pragma GCC unroll 1
    for (uint32_t c = 0; c < count; ++c) {
      const int32_t s = s_row[c];
      s_global[(j + c) * WARP] = s;
      s_max = imax(s_max, s);
    }
    WARP_SYNC();
  }
  s_max = shift_left(s_max, depth.query_shift());

  uint32_t l = 0;
#if LONG
  int64_t* total = pointer<int64_t>(arg->scratch_addr) + gridDim.x * (k_stride * WARP / 2) +
                   blockIdx.x * (O_COLUMNS * WARP) + r;
  for (uint32_t c = 0; c < O_COLUMNS; ++c) total[c * WARP] = 0;
#endif
  for (uint32_t c = 0; c < O_COLUMNS; ++c) o_row[c] = 0;
#pragma GCC unroll 1
  for (uint32_t j = 0; j < n_k; j += 32) {
#pragma GCC unroll 1
    for (uint32_t c = 0; c < 32; c += 4) {
      uint32_t low = 0, high = 0;
      for (uint32_t i = 0; i < 4; ++i) {
        const int32_t s = s_global[(j + c + i) * WARP];
        const uint32_t p = keep_if(j + c + i < n_k, p_of_depth(depth.of(s_max, shift_left(s, depth.query_shift()))));
        l += p;
        low |= (p & 255) << (8 * i);
        high |= (p >> 8) << (8 * i);
      }
      const uint32_t word = (r * P_STRIDE + c) / 4;
      local->p[0][word] = low ^ 0x80808080;
      if (DIGITS == 2) local->p[DIGITS - 1][word] = high ^ 0x80808080;
    }
    WARP_SYNC();
#pragma GCC unroll 1
    for (uint32_t c = 0; c < columns; c += 8) {
      ctx::fragment_a a;                                   // loaded anew: both digits' would not fit 32 registers
      ctx::fragment_b b;
      ctx::fragment_acc o, high;
      ctx::load_matrix_sync<vt::col_major>(b, v + c * k_stride + j, k_stride);
      if (DIGITS == 2) {
        ctx::load_matrix_sync(a, local->p[DIGITS - 1], P_STRIDE);
        ctx::fill_fragment(high, 0);
        ctx::mma_sync(high, a, b, high);
      }
      ctx::load_matrix_sync(a, local->p[0], P_STRIDE);
      ctx::load_matrix_sync(o, local->o + c, O_STRIDE);
      ctx::mma_sync(o, a, b, o);
      if (DIGITS == 2) add_high_digit(o, high);
      ctx::store_matrix_sync(local->o + c, o, O_STRIDE);
    }
    WARP_SYNC();
#if LONG
    if ((j + 32) % FLUSH_KEYS == 0 || j + 32 >= n_k) {
      for (uint32_t c = 0; c < O_COLUMNS; ++c) {
        total[c * WARP] += o_row[c];
        o_row[c] = 0;
      }
      WARP_SYNC();
    }
#endif
  }
#if LONG
  for (uint32_t c = 0; c < columns; ++c) total[c * WARP] += static_cast<int64_t>(LEFT_OUT) * colsum[c];
  store_columns<D, WARP>(arg, row, first_column, columns, total, l);
#else
  for (uint32_t c = 0; c < columns; ++c) o_row[c] += LEFT_OUT * colsum[c];        // below 2^31 for at most FLUSH_KEYS
  store_columns<D, 1>(arg, row, first_column, columns, o_row, l);                 // keys, and for 8-bit p up to 65,536
#endif
  store_stats(arg, row, l, s_max);
}

SPAWN(attend)
