// LayerNorm of a program (docs/numerics.md, section 4): rows of a stream to codes, with an integer reciprocal square
// root. LANES lanes of a warp have one row, and each of them 8 adjacent channels in every turn. A warp keeps the
// constants of its channels in registers for all of its rows, and loads the next rows while it computes.
//
// Macros: CHANNELS (a multiple of 8), MAPPED (1: a row is the concatenation of PARTS rows of the input, which load_rows
// names), IN (i16 or i32), OUT (i8, i16 or i32), LANES (a power of two), CTAS_PER_SM, SECOND (1: the rows are also
// scaled to a second output), OUT2 (its type).
#include "params.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int CHUNKS = CHANNELS / 8;  // of 8 channels
constexpr int TURNS = (CHUNKS + LANES - 1) / LANES;
constexpr int ROWS_AT_ONCE = 32 / LANES;  // of a warp
constexpr int IN_WORDS = 2 * sizeof(IN);
constexpr bool NARROW = sizeof(IN) == 2;
constexpr u32 LARGEST_ROOT = 0x7FFFFFFF;

// What an output is scaled with. hopper.py fills the same fields in the same order.
struct OutputParams {
  const i32* multiplier;
  const i32* bias;
  u8* out;
  i32 shift, low, high, padding;
};
struct LayerNormParams {
  const u8* x;
  const i32* load_rows;
  const i64* roots;
  OutputParams first, second;
  i64 eps;
  i32 rows;
  u32 image_rows, in_rows;  // rows of an image in the output, and in the input
  u32 image_reciprocal;
};

// The sum over the lanes of a row.
template <typename T>
DEVICE T row_sum(T x) {
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
DEVICE i64 row_sum_of_squares(i64 x) {
  if constexpr (NARROW && LANES == 32) {  // each lane's is below 2^48 / 32
    const u32 low = __reduce_add_sync(~0u, (u32)x & 0xFFFFFF), high = __reduce_add_sync(~0u, (u32)(x >> 24));
    return ((i64)high << 24) + low;
  } else {
    return row_sum(x);
  }
}

// One step towards 2^46 / sqrt(n), root < 2^31 + 2^24.
DEVICE u32 newton_step(u32 root, u32 n) {
  const u32 u = __umulhi(__umulhi(root, root), n);  // 2^28 at the root
  return (u32)((u64)root * ((3u << 28) - u) >> 29);
}

// What the channels of a row are scaled with: (x * 2^f - shifted_mean) * root >> 32.
struct RowScaling {
  i32 power, shifted_mean, root;

  DEVICE RowScaling(const LayerNormParams& p, i64 total, i64 squares) {
    i32 q, r;
    if constexpr (NARROW) {  // |total| <= 2^29
      q = (i32)total / CHANNELS, r = (i32)total - q * CHANNELS;
    } else {
      q = (i32)(total / CHANNELS), r = (i32)(total - (i64)q * CHANNELS);
    }
    if (r < 0) --q, r += CHANNELS;
    // Q - 2 q S + C q^2 = Q - q (S + r)
    const i64 between = NARROW ? (i64)q * ((i32)total + r) : q * (total + r);
    const i64 e = squares - between - (u32)(r * r) / CHANNELS + p.eps;
    const i32 h = __clzll(e) >> 1;
    const u32 n = (u32)((u64)e << (2 * h) >> 32);
    u32 x = (u32)p.roots[(n >> 24) - 64];
    x = newton_step(newton_step(x, n), n);
    root = x < LARGEST_ROOT ? x : LARGEST_ROOT;
    const i32 f = h - 1;
    power = 1 << f;
    // floor(r 2^30 / C) by 2^30 = quotient * C + remainder
    constexpr u32 QUOTIENT = (1u << 30) / CHANNELS, REMAINDER = (1u << 30) % CHANNELS;
    const u32 mean_fraction = r * QUOTIENT + r * REMAINDER / CHANNELS;
    shifted_mean = (i32)((u32)q << f) + (i32)(mean_fraction >> (30 - f));
  }
  DEVICE i32 norm(i32 x) const { return __mulhi((i32)((u32)x * (u32)power - (u32)shifted_mean), root); }
};

DEVICE i32 channel(const u32 (&w)[IN_WORDS], int i) {
  if constexpr (sizeof(IN) == 2)
    return i % 2 ? (i32)w[i / 2] >> 16 : (i32)(i16)w[i / 2];
  else
    return w[i];
}

typedef u32 Words[TURNS][IN_WORDS];

// Loads the lane's part of a row; zeros where there is none, at negative rows.
DEVICE void load_row(const LayerNormParams& p, i32 row, u32 chunk, Words& w) {
#pragma unroll
  for (int t = 0; t < TURNS; ++t) {
    const u32 at = chunk + t * LANES;
#pragma unroll
    for (u32& word : w[t]) word = 0;
    if (row >= 0 && at < CHUNKS) {
      i64 from = (i64)row * CHUNKS + at;
      if (MAPPED) {
        constexpr u32 OF_PART = CHUNKS / PARTS;
        const u32 image = quotient(row, p.image_rows, p.image_reciprocal), part = at / OF_PART;
        const i32 source = (i32)load_constant(p.load_rows + (row - image * p.image_rows) * PARTS + part);
        from = ((i64)image * p.in_rows + source) * OF_PART + (at - part * OF_PART);
      }
      load_global(p.x + from * 8 * sizeof(IN), w[t]);
    }
  }
}

DEVICE RowScaling scaling_of(const LayerNormParams& p, const Words& w) {
  i32 total = 0;
  i64 wide_total = 0, squares = 0;
#pragma unroll
  for (int t = 0; t < TURNS; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const i32 x = channel(w[t], i);
      if (NARROW)
        total += x;
      else
        wide_total += x;
      squares = multiply_add(x, x, squares);
    }
  return RowScaling(p, NARROW ? row_sum(total) : row_sum(wide_total), row_sum_of_squares(squares));
}

// An output of type T, with the constants of the lane's channels.
template <typename T>
struct Output {
  static constexpr int WORDS = 2 * sizeof(T);
  const OutputParams& p;
  i32 multiplier[TURNS][8], bias[TURNS][8];

  DEVICE Output(const OutputParams& p, u32 chunk) : p(p) {
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
      if (chunk + t * LANES < CHUNKS) {
        load_constants(p.multiplier + (chunk + t * LANES) * 8, (u32(&)[8])multiplier[t]);
        load_constants(p.bias + (chunk + t * LANES) * 8, (u32(&)[8])bias[t]);
      }
    }
  }
  DEVICE void packed(const i32 (&y)[8], u32 (&w)[WORDS]) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (sizeof(T) == 1)
        w[i] = pack_bytes(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
      else if constexpr (sizeof(T) == 2)
        w[i] = pack_halves(y[2 * i], y[2 * i + 1]);
      else
        w[i] = min(max(y[i], p.low), p.high);
    }
  }
  DEVICE void store(i32 row, bool exists, u32 chunk, const Words& w, const RowScaling& scaling) const {
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
      const u32 at = chunk + t * LANES;
      i32 y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        y[i] = (__mulhi(scaling.norm(channel(w[t], i)), multiplier[t][i]) + bias[t][i]) >> p.shift;
      u32 out[WORDS];
      packed(y, out);
      if (exists && at < CHUNKS) store_global(p.out + ((i64)row * CHUNKS + at) * 8 * sizeof(T), out);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    layer_norm(const __grid_constant__ LayerNormParams p) {
  const u32 lane = threadIdx.x % 32, chunk = lane % LANES;
  const Output<OUT> first(p.first, chunk);
#if SECOND
  const Output<OUT2> second(p.second, chunk);
#endif
  wait_for_previous_kernel();
  let_next_kernel_start();
  const i32 step = gridDim.x * WARPS * ROWS_AT_ONCE;
  // From the last row to the first: the L2 cache holds the rows that the previous kernel has written last, and the next
  // one begins with the first.
  const i32 in_warp = lane / LANES;
  i32 row = p.rows - 1 - (i32)((blockIdx.x * WARPS + threadIdx.x / 32) * ROWS_AT_ONCE) - in_warp;
  Words w;
  load_row(p, row, chunk, w);
#pragma unroll 1
  for (; row + in_warp >= 0; row -= step) {  // the lanes of a warp go on together
    Words next;
    load_row(p, row - step, chunk, next);
    const RowScaling scaling = scaling_of(p, w);
    first.store(row, row >= 0, chunk, w, scaling);
#if SECOND
    second.store(row, row >= 0, chunk, w, scaling);
#endif
#pragma unroll
    for (int t = 0; t < TURNS; ++t)
#pragma unroll
      for (int i = 0; i < IN_WORDS; ++i) w[t][i] = next[t][i];
  }
}
