// One thread's share of a tile of 64 rows and 128 keys in the softmax of long rows on Hopper: 64 scores of two rows.
// Each kernel loads what it works on and stores what it makes, and nothing else; block_float_sm90.py counts the rest.
#include "two_groups.cuh"

DEVICE i32 quad_maximum(i32 x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}
template <int N>
DEVICE void load(i32 (&s)[N], const i32* in) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = in[i * 128 + threadIdx.x];
}

// intflash and intflash_p8, the row's maximum known.
template <int DIGITS>
DEVICE void exact(const i32* in, u32* out, i32 C, const u32* B) {
  i32 s[64];
  load(s, in);
  const u32 b[2] = {B[threadIdx.x], B[128 + threadIdx.x]};
  u32 sums[DIGITS][2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    u32 p[DIGITS];
    four_p<DIGITS == 1 ? 2 : 0>(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], C, b[i % 2], p);
#pragma unroll
    for (int d = 0; d < DIGITS; ++d) {
      sums[d][i % 2] = add_bytes(p[d], sums[d][i % 2]);
      out[(i * DIGITS + d) * 128 + threadIdx.x] = p[d];
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * DIGITS; ++i) out[(64 + i) * 128 + threadIdx.x] = sums[i / 2][i % 2];
}
extern "C" __global__ void p8(const i32* in, u32* out, i32 C, const u32* B) { exact<1>(in, out, C, B); }
extern "C" __global__ void p16(const i32* in, u32* out, i32 C, const u32* B) { exact<2>(in, out, C, B); }

// intflash_bfp: the block's maxima and octaves, then P.
extern "C" __global__ void block_float(const i32* in, u32* out, i32 C, const u32*) {
  i32 s[64], peak[2];
  load(s, in);
  peak[0] = s[0], peak[1] = s[4];
#pragma unroll
  for (int i = 0; i < 64; ++i) peak[i / 4 % 2] = max(peak[i / 4 % 2], s[i]);
  u32 B[2], sums[2][2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i32 octave = octave_above(quad_maximum(peak[h]), C);
    B[h] = block_offset(octave);
    out[(68 + h) * 128 + threadIdx.x] = octave;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    u32 p[4], digit[2];
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = block_p16((u32)s[4 * i + j] * (u32)(-(C >> 8)) + B[i % 2]);
    pack_block_p(p, digit);
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      sums[d][i % 2] = add_bytes(digit[d], sums[d][i % 2]);
      out[(i * 2 + d) * 128 + threadIdx.x] = digit[d];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[(64 + i) * 128 + threadIdx.x] = sums[i / 2][i % 2];
}

// The sums of a block of 64 channels, in two digits, merged into the row's of 64 or 32 bits.
template <class T>
DEVICE void merge(const i32* in, T* acc, const u32* power) {
  i32 digits[64];
  load(digits, in);
  const u32 up[2] = {power[threadIdx.x], power[128 + threadIdx.x]};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    T& sum = acc[i * 128 + threadIdx.x];
    const i32 x = digits[i] + (digits[32 + i] >> 8);
    if constexpr (sizeof(T) == 8)
      sum = multiply_add(x, up[i / 2 % 2], sum);
    else
      sum += x * (i32)up[i / 2 % 2];
  }
}
extern "C" __global__ void merge_64bit(const i32* in, i64* acc, const u32* power) { merge(in, acc, power); }
extern "C" __global__ void merge_32bit(const i32* in, i32* acc, const u32* power) { merge(in, acc, power); }
