// Bias and mask of a window's rows, and a key's exponent: its int32 score where there is neither bias nor mask, else
// its 64-bit T. Macros: see sm80/window.cu.
#pragma once
#include "exp2.cuh"
#include "params.cuh"

// With a bias or a mask the exponent of a key is T in 2^-32 octave: score * C + bias, or ABSENT_T.
#if BIAS || KEEP
typedef i64 Exponent;
constexpr Exponent NO_KEY = ABSENT_T;

template <typename T, int KIND>
struct MaskRow {
  const T* row;

  DEVICE MaskRow(const View& x, u32 batch, u32 batches, u32 reciprocal, u32 head, u32 at) {
    const u32 b = mask_batch(batch, batches, reciprocal);
    row = (const T*)x.ptr + head_offset(x, b, head) + at * x.n;
  }
  DEVICE T operator[](u32 key) const { return row[KIND == 1 ? key : 0]; }
};

struct Masks {
#if BIAS
  MaskRow<i32, BIAS> bias;
#endif
#if KEEP
  MaskRow<u8, KEEP> keep;
#endif
  DEVICE Masks(const Params& p, u32 batch, u32 head, u32 row)
#if BIAS && KEEP
      : bias(p.bias, batch, p.bias_batches, p.bias_reciprocal, head, row),
        keep(p.keep, batch, p.keep_batches, p.keep_reciprocal, head, row)
#elif BIAS
      : bias(p.bias, batch, p.bias_batches, p.bias_reciprocal, head, row)
#else
      : keep(p.keep, batch, p.keep_batches, p.keep_reciprocal, head, row)
#endif
  {
  }
  DEVICE Exponent exponent_of(i32 s, i32 C, u32 key) const {
    Exponent t = multiply_add(s, C, 0);
#if BIAS
    const i32 b = bias[key];
    t = b == NO_SCORE ? ABSENT_T : multiply_add(b, BIAS_UNIT, t);
#endif
#if KEEP
    t = keep[key] ? t : ABSENT_T;
#endif
    return t;
  }
};
DEVICE i64 row_max_exponent(Exponent peak, i32) { return peak; }
DEVICE i64 exp_offset(i64 t_max) { return t_max == ABSENT_T ? ABSENT_T : K0 - t_max; }
DEVICE i64 depth_of(Exponent t, i32, i64 B) { return t + B; }
DEVICE Exponent warp_max(Exponent x) {
  const i32 high = __reduce_max_sync(~0u, (i32)(x >> 32));
  const u32 low = __reduce_max_sync(~0u, (i32)(x >> 32) == high ? (u32)x : 0);
  return (i64)((u64)(u32)high << 32 | low);
}
#else
typedef i32 Exponent;
constexpr Exponent NO_KEY = NO_SCORE;

struct Masks {
  DEVICE Masks(const Params&, u32, u32, u32) {}
  DEVICE Exponent exponent_of(i32 s, i32, u32) const { return s; }
};
DEVICE i64 row_max_exponent(Exponent peak, i32 C) { return multiply_add(peak, C, 0); }
DEVICE i64 exp_offset(i64 t_max) { return K0 - t_max; }
DEVICE i64 depth_of(Exponent s, i32 C, i64 B) { return multiply_add(s, C, B); }
DEVICE Exponent warp_max(Exponent x) { return __reduce_max_sync(~0u, x); }
#endif
