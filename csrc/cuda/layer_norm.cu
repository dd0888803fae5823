// LayerNorm of a program (docs/numerics.md, section 4): rows of a stream to codes, with an integer reciprocal square
// root. LANES lanes of a warp have one row, 8 adjacent channels of each in every turn; a warp keeps the constants of
// its channels in registers for all of its rows.
//
// Macros: CHANNELS (a multiple of 8), MAPPED (1: a row is the concatenation of PARTS rows of the input, which load_rows
// names), IN (i16 or i32), OUT (i8, i16 or i32).
#include "params.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int CHUNKS = CHANNELS / 8;  // of 8 channels
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;
constexpr int TURNS = (CHUNKS + LANES - 1) / LANES;
constexpr int ROWS_AT_ONCE = 32 / LANES;  // of a warp
constexpr int IN_WORDS = 2 * sizeof(IN), OUT_WORDS = 2 * sizeof(OUT);
constexpr u32 LARGEST_ROOT = 0x7FFFFFFF;

// hopper.py fills the same fields in the same order.
struct LayerNormParams {
  const u8* x;
  const i32* multiplier;
  const i32* bias;
  const i32* load_rows;
  const i64* roots;
  u8* out;
  i64 eps;
  i32 rows, shift, low, high;
  u32 image_rows, in_rows;  // rows of an image in the output, and in the input
  u32 image_reciprocal, padding;
};

template <typename T>
DEVICE T row_sum(T x) {
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// One step towards 2^46 / sqrt(n), root < 2^31 + 2^24.
DEVICE u32 newton_step(u32 root, u32 n) {
  const u32 u = __umulhi(__umulhi(root, root), n);  // 2^28 at the root
  return (u32)((u64)root * ((3u << 28) - u) >> 29);
}

// What the channels of a row are scaled with: z = ((x << f) - shifted_mean) * root >> 32.
struct RowScaling {
  i32 f, shifted_mean;
  i32 root;

  DEVICE RowScaling(const LayerNormParams& p, i64 total, i64 squares) {
    i64 q, r;
    if constexpr (sizeof(IN) == 2) {  // |total| <= 2^29
      i32 small = (i32)total / CHANNELS, rest = (i32)total - small * CHANNELS;
      if (rest < 0) --small, rest += CHANNELS;
      q = small, r = rest;
    } else {
      q = total / CHANNELS, r = total - q * CHANNELS;
      if (r < 0) --q, r += CHANNELS;
    }
    const i64 e = squares - 2 * q * total + CHANNELS * q * q - (u32)(r * r) / CHANNELS + p.eps;
    const i32 h = __clzll(e) >> 1;
    const u32 n = (u32)((u64)e << (2 * h) >> 32);
    u32 x = (u32)p.roots[(n >> 24) - 64];
    x = newton_step(newton_step(x, n), n);
    root = x < LARGEST_ROOT ? x : LARGEST_ROOT;
    f = h - 1;
    shifted_mean = (i32)((u32)q << f) + (i32)(((u64)r << f) / CHANNELS);
  }
  DEVICE i32 norm(i32 x) const { return __mulhi((i32)((u32)x << f) - shifted_mean, root); }
};

DEVICE i32 channel(const u32 (&w)[IN_WORDS], int i) {
  if constexpr (sizeof(IN) == 2)
    return i % 2 ? (i32)w[i / 2] >> 16 : (i32)(i16)w[i / 2];
  else
    return w[i];
}

DEVICE void packed(const LayerNormParams& p, const i32 (&y)[8], u32 (&w)[OUT_WORDS]) {
#pragma unroll
  for (int i = 0; i < OUT_WORDS; ++i) {
    if constexpr (sizeof(OUT) == 1)
      w[i] = pack_bytes(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
    else if constexpr (sizeof(OUT) == 2)
      w[i] = pack_halves(y[2 * i], y[2 * i + 1]);
    else
      w[i] = min(max(y[i], p.low), p.high);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) layer_norm(const __grid_constant__ LayerNormParams p) {
  const u32 lane = threadIdx.x % 32, chunk = lane % LANES;
  i32 multiplier[TURNS][8], bias[TURNS][8];
#pragma unroll
  for (int t = 0; t < TURNS; ++t) {
    if (chunk + t * LANES < CHUNKS) {
      load_constants(p.multiplier + (chunk + t * LANES) * 8, (u32(&)[8])multiplier[t]);
      load_constants(p.bias + (chunk + t * LANES) * 8, (u32(&)[8])bias[t]);
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  const i32 step = gridDim.x * WARPS * ROWS_AT_ONCE;
#pragma unroll 1
  for (i32 first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS_AT_ONCE; first < p.rows; first += step) {
    const i32 row = first + lane / LANES;
    const bool exists = row < p.rows;
    u32 w[TURNS][IN_WORDS];
    i32 total = 0;
    i64 wide_total = 0, squares = 0;
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
      const u32 at = chunk + t * LANES;
#pragma unroll
      for (u32& word : w[t]) word = 0;
      if (exists && at < CHUNKS) {
        i64 from;
        if (MAPPED) {
          constexpr u32 OF_PART = CHUNKS / PARTS;
          const u32 image = quotient(row, p.image_rows, p.image_reciprocal), part = at / OF_PART;
          const i32 source = p.load_rows[(row - image * p.image_rows) * PARTS + part];
          from = ((i64)image * p.in_rows + source) * OF_PART + (at - part * OF_PART);
        } else {
          from = (i64)row * CHUNKS + at;
        }
        load_global(p.x + from * 8 * sizeof(IN), w[t]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const i32 x = channel(w[t], i);
        if (sizeof(IN) == 2)
          total += x;
        else
          wide_total += x;
        squares = multiply_add(x, x, squares);
      }
    }
    if (sizeof(IN) == 2) wide_total = row_sum(total);
    const RowScaling scaling(p, sizeof(IN) == 2 ? wide_total : row_sum(wide_total), row_sum(squares));
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
      const u32 at = chunk + t * LANES;
      i32 y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        y[i] = (__mulhi(scaling.norm(channel(w[t], i)), multiplier[t][i]) + bias[t][i]) >> p.shift;
      u32 out[OUT_WORDS];
      packed(p, y, out);
      if (exists && at < CHUNKS) store_global(p.out + ((i64)row * CHUNKS + at) * 8 * sizeof(OUT), out);
    }
  }
}
