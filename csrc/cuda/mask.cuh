// Bias and mask of a window's rows, and the exponent of a key: its score, or with a bias or a mask its 64-bit T.
// Macros: see window_attention.cu.
#pragma once
#include "exp2.cuh"
#include "params.cuh"

// A row's bias and mask; T, the weight of a key in 2^-32 octave, is its score times C without them.
#if BIAS || KEEP
constexpr i64 ABSENT_T = -(1ll << 62);  // below any T, and its p is 0
typedef i64 Weight;

template <typename T, int KIND> struct MaskRow {
    const T* row;

    DEVICE MaskRow(const View& x, u32 batch, u32 batches, u32 reciprocal, u32 head, u32 at) {
        const u32 b = reciprocal ? batch - __umulhi(batch, reciprocal) * batches : batch;
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
    {}
    DEVICE Weight weigh(i32 s, i32 C, u32 key) const {
        Weight t = multiply_add(s, C, 0);
#if BIAS
        const i32 b = bias[key];
        t = b == NO_SCORE ? ABSENT_T : multiply_add(b, 1 << 12, t);
#endif
#if KEEP
        t = keep[key] ? t : ABSENT_T;
#endif
        return t;
    }
};
DEVICE i64 row_top(Weight peak, i32) { return peak; }
DEVICE i64 offset(i64 top) { return top == ABSENT_T ? ABSENT_T : K0 - top; }
DEVICE Power depth(Weight t, i32, i64 B) { return power(t + B); }
DEVICE Weight warp_max(Weight x) {
    const i32 high = __reduce_max_sync(~0u, (i32)(x >> 32));
    const u32 low = __reduce_max_sync(~0u, (i32)(x >> 32) == high ? (u32)x : 0);
    return (i64)((u64)(u32)high << 32 | low);
}
#else
typedef i32 Weight;

struct Masks {
    DEVICE Masks(const Params&, u32, u32, u32) {}
    DEVICE Weight weigh(i32 s, i32, u32) const { return s; }
};
DEVICE i64 row_top(Weight peak, i32 C) { return multiply_add(peak, C, 0); }
DEVICE i64 offset(i64 top) { return K0 - top; }
DEVICE Power depth(Weight s, i32 C, i64 B) { return exponential(s, C, B); }
DEVICE Weight warp_max(Weight x) { return __reduce_max_sync(~0u, x); }
#endif
