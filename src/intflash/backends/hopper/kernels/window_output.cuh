// The output of rows of at most 64 keys: 32-bit accumulators, and a row sum below 2^22.
#pragma once
#include "output.cuh"

// Rounds and stores neighbouring outputs of one row; made from the row's sum, or from another lane's.
template <typename TO, bool INTEGER = IsInteger<TO>::value> struct Finish;

template <typename TO> struct Finish<TO, false> {
    float factor;

    DEVICE Finish(u32 l, const Scaling& s) : factor(row_factor(l, s.v_scale)) {}
    DEVICE Finish(const Finish& of, u32 lane) : factor(__shfl_sync(~0u, of.factor, lane)) {}
    template <int COUNT> DEVICE void store(u8* to, const i32 (&acc)[COUNT]) const {
        u32 w[COUNT * sizeof(TO) / 4];
        Outputs<TO, i32, COUNT>::floats(acc, factor, w);
        store_words(to, w);
    }
};

template <typename TO> struct Finish<TO, true> {
    static constexpr int QMAX = sizeof(TO) == 1 ? 127 : 32767;
    Normalizer n;
    bool high;  // only the product's high word is shifted

    DEVICE Finish(u32 l, const Scaling& s) : n(normalizer<i32>(l, s.packed)), high(alignable(s.packed)) {}
    DEVICE Finish(const Finish& of, u32 lane)
        : n{__shfl_sync(~0u, of.n.factor, lane), __shfl_sync(~0u, of.n.shift, lane)}, high(of.high) {}
    template <int COUNT> DEVICE void store(u8* to, const i32 (&acc)[COUNT]) const {
        i32 o[COUNT];
        if (high) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) o[i] = scaled_aligned(acc[i], n);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) o[i] = clamped<QMAX>(scaled(acc[i], n));
        }
        u32 w[COUNT * sizeof(TO) / 4];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) o[i] = max(o[i], -QMAX);  // packing saturates above
#pragma unroll
        for (int i = 0; i < COUNT * (int)sizeof(TO) / 4; ++i) {
            if constexpr (sizeof(TO) == 1) w[i] = pack_bytes(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
            else w[i] = permute(min(o[2 * i], QMAX), min(o[2 * i + 1], QMAX), 0x5410);
        }
        store_words(to, w);
    }
};
