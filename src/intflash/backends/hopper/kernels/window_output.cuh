// The output of rows of at most 64 keys: 32-bit accumulators, and a row sum below 2^22.
#pragma once
#include "output.cuh"

// Neighbouring outputs of one row. Integers in two forms where `Outputs` has three, and held above -QMAX without asking
// whether any is below: with int8 large batches take 2% less time so.
template <typename TO, int COUNT>
DEVICE void store_window(u8* to, const i32 (&acc)[COUNT], const RowScale<TO, i32>& row, const Scaling& s) {
    if constexpr (!IsInteger<TO>::value) {
        store_outputs<TO>(to, acc, row, s);
    } else {
        constexpr int QMAX = sizeof(TO) == 1 ? 127 : 32767;
        i32 o[COUNT];
        if (alignable(s.packed)) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) o[i] = scaled_aligned(acc[i], row.n);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) o[i] = clamped<QMAX>(scaled(acc[i], row.n));
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) o[i] = sizeof(TO) == 1 ? max(o[i], -QMAX) : clamped<QMAX>(o[i]);  // pack_bytes saturates
        u32 w[COUNT * sizeof(TO) / 4];
        Outputs<TO, i32, COUNT>::pack(o, w);
        store_words(to, w);
    }
}
