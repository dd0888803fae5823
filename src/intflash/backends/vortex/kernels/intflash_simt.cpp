// intflash / intflash_p8, one query row per thread: integer instructions only (RV32IM, Zicond where there is).
// Pass 1 forms every score once and finds the row's exact maximum, pass 2 turns the scores into p and sums p * V: the
// bits do not depend on tiles. Three rules keep memory accesses few, since they are what costs cycles:
//   - all threads read the same word of K or V at the same time, one access for four codes;
//   - scores and p lie key by key in the group's scratch memory, so that a warp's eight words are one access;
//   - head_dim is cut into chunks whose queries and sums fit registers, so that nothing goes to the stack.
// No thread reads what another wrote, so there is no barrier.
#include "intflash.h"

static constexpr uint32_t D = HEAD_DIM;
static constexpr uint32_t CHUNK = D % 16 == 0 ? 16 : 8;        // columns at a time
static constexpr uint32_t CHUNKS = D / CHUNK;
static constexpr uint32_t TILE_KEYS = 32;                      // keys whose partial scores lie in local memory
static_assert(D % 8 == 0 && D >= 8 && D <= 64, "head_dim is padded to a multiple of 8 up to 64");

// Local memory of a group, a column per thread: partial scores, then the chunk's sums.
static constexpr uint32_t LOCAL_WORDS = TILE_KEYS * GROUP_THREADS;
static_assert(LOCAL_WORDS * 4 <= LOCAL_LIMIT && 2 * 16 * GROUP_THREADS <= LOCAL_WORDS, "local memory of a group");

// Byte `i` of a word of four codes, with its sign.
static inline __attribute__((always_inline)) int32_t code(uint32_t word, uint32_t i) {
  return static_cast<int32_t>(word << (24 - 8 * i)) >> 24;
}

static inline __attribute__((always_inline)) int32_t dot(const int32_t* q, const int8_t* k) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(k);
  int32_t s = 0;
#pragma GCC unroll 4
  for (uint32_t w = 0; w < CHUNK / 4; ++w) {
    const uint32_t word = words[w];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) s += q[4 * w + i] * code(word, i);
  }
  return s;
}

static inline __attribute__((always_inline)) void load_query(int32_t* q, const int8_t* row, uint32_t shift) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(row);
#pragma GCC unroll 16
  for (uint32_t i = 0; i < CHUNK; ++i) q[i] = shift_left(code(words[i / 4], i % 4), shift);
}

static inline __attribute__((always_inline)) void multiply_add(int32_t* acc, int32_t p, const int8_t* v) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(v);
#pragma GCC unroll 4
  for (uint32_t w = 0; w < CHUNK / 4; ++w) {
    const uint32_t word = words[w];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) acc[4 * w + i] += p * code(word, i);
  }
}

// Scores of a chunk of head_dim for keys first .. last - 1, added to those of the chunks before it.
template <bool FIRST>
static inline __attribute__((always_inline)) void partial_scores(int32_t* sums, const int8_t* q_row, uint32_t shift,
                                                                 const int8_t* k, uint32_t keys) {
  int32_t q[CHUNK];
  load_query(q, q_row, shift);
  int32_t* const end = sums + keys * GROUP_THREADS;
#pragma GCC unroll 1
  for (; sums != end; sums += GROUP_THREADS, k += D) *sums = FIRST ? dot(q, k) : *sums + dot(q, k);
}

KERNEL attend(kernel_args_t* arg, uint32_t block, uint32_t) {
  const uint32_t thread = threadIdx.x;
  const uint32_t row = block * GROUP_THREADS + thread;
  const uint32_t n_k = arg->n_k;
  const int8_t* k_global = pointer<const int8_t>(arg->k_addr);
  const int8_t* v_global = pointer<const int8_t>(arg->v_addr);
  const int8_t* q_row = pointer<const int8_t>(arg->q_addr) + row * D;
  int32_t* local = static_cast<int32_t*>(__local_mem((LOCAL_WORDS * 4))) + thread;
  int32_t* scores = pointer<int32_t>(arg->scratch_addr) + blockIdx.x * (n_k * GROUP_THREADS) + thread;
  int32_t* const scores_end = scores + n_k * GROUP_THREADS;
  const Depth depth(arg);

  int32_t s_max = -2147483647 - 1;                            // below every score: n_k >= 1 replaces it
  if (CHUNKS == 1) {
    int32_t q[CHUNK];
    load_query(q, q_row, depth.query_shift());
    const int8_t* k = k_global;
#pragma GCC unroll 1
    for (int32_t* s = scores; s != scores_end; s += GROUP_THREADS, k += D) {
      const int32_t score = dot(q, k);
      *s = score;
      s_max = imax(s_max, score);
    }
  } else {
#pragma GCC unroll 1
    for (uint32_t j = 0; j < n_k; j += TILE_KEYS) {
      const uint32_t keys = uniform_min(TILE_KEYS, n_k - j);
      const int8_t* k = k_global + j * D;
      partial_scores<true>(local, q_row, depth.query_shift(), k, keys);
#pragma GCC unroll 1
      for (uint32_t c = CHUNK; c < D; c += CHUNK) partial_scores<false>(local, q_row + c, depth.query_shift(), k + c, keys);
      int32_t* s = scores + j * GROUP_THREADS;
      const int32_t* const end = local + keys * GROUP_THREADS;
#pragma GCC unroll 1
      for (const int32_t* sum = local; sum != end; sum += GROUP_THREADS, s += GROUP_THREADS) {
        *s = *sum;
        s_max = imax(s_max, *sum);
      }
    }
  }

  uint32_t l = 0;                                             // 65193 * N < 2^32
  if (CHUNKS > 1) {
#pragma GCC unroll 1
    for (int32_t* s = scores; s != scores_end; s += GROUP_THREADS) {
      const uint32_t p = p_of_depth(depth.of(s_max, *s));
      l += p;
      *s = static_cast<int32_t>(p);
    }
  }
#pragma GCC unroll 1
  for (uint32_t c = 0; c < D; c += CHUNK) {
    const int8_t* v = v_global + c;
    const int32_t* s = scores;
#if LONG
    int64_t* total = reinterpret_cast<int64_t*>(local - thread) + thread;
    for (uint32_t i = 0; i < CHUNK; ++i) total[i * GROUP_THREADS] = 0;
#pragma GCC unroll 1
    for (uint32_t first = 0; first < n_k; first += FLUSH_KEYS) {
      const int32_t* const end = scores + uniform_min(first + FLUSH_KEYS, n_k) * GROUP_THREADS;
#else
      const int32_t* const end = scores_end;
#endif
      int32_t acc[CHUNK];
      for (uint32_t i = 0; i < CHUNK; ++i) acc[i] = 0;
#pragma GCC unroll 1
      for (; s != end; s += GROUP_THREADS, v += D) {
        uint32_t p;
        if (CHUNKS == 1) {
          p = p_of_depth(depth.of(s_max, *s));
          l += p;
        } else {
          p = static_cast<uint32_t>(*s);
        }
        multiply_add(acc, static_cast<int32_t>(p), v);
      }
#if LONG
      for (uint32_t i = 0; i < CHUNK; ++i) total[i * GROUP_THREADS] += acc[i];
    }
    store_columns<D, GROUP_THREADS>(arg, row, c, CHUNK, total, l);
#else
    for (uint32_t i = 0; i < CHUNK; ++i) local[i * GROUP_THREADS] = acc[i];
    store_columns<D, GROUP_THREADS>(arg, row, c, CHUNK, local, l);
#endif
  }
  store_stats(arg, row, l, s_max);
}

SPAWN(attend)
