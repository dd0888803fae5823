// The output of rows of at most 64 keys: 32-bit accumulators, and a row sum below 2^22.
#pragma once
#include "output.cuh"

// floor(2^(55 - lz) / l) for 0 < l < 2^22 with lz leading zeros: a cubic for 1 / (1 - z), z = 1 - l / 2^(32 - lz), and
// an iteration of third order are never above and at most one below. tests/backends/hopper/test_windows.py tries all.
DEVICE u32 small_reciprocal(u32 l, i32 lz) {
    u32 z = (0u - l) << lz;
    i32 y = __umulhi(z, __umulhi(z, __umulhi(z, 1905566079u)) + 595489400u) + 535940460u;  // 2^29 units
    i32 e = (1 << 29) - y + __umulhi(z, y);
    e += __mulhi(e << 3, e);
    y += __mulhi(y, e << 3);
    u32 quotient = (u32)(y - 8) >> 6;
    u32 power;  // modulo 2^32, as the remainder is small
    asm("shl.b32 %0, 1, %1;" : "=r"(power) : "r"(55 - lz));
    return power - quotient * l >= l ? quotient + 1 : quotient;
}

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
    i32 factor, shift;
    i64 half;
    bool high;  // only the product's high word is shifted

    DEVICE Finish(u32 l, const Scaling& s) {
        l = l ? l : 1;  // a row without keys has acc = 0
        const i32 lz = __clz((i32)l), e = (i32)(s.packed >> 32);
        const i64 R = small_reciprocal(l, lz);
        factor = (i32)((R * (i32)s.packed + (1 << 23)) >> 24);
        shift = 55 - lz - e;
        high = alignable(s.packed);
        const i32 by = high ? max(32 - shift, 0) : 0;
        factor <<= by, shift += by;
        half = 1ll << (shift - 1);
    }
    DEVICE Finish(const Finish& of, u32 lane)
        : factor(__shfl_sync(~0u, of.factor, lane)), shift(__shfl_sync(~0u, of.shift, lane)), half(1ll << (shift - 1)),
          high(of.high) {}
    template <int COUNT> DEVICE void store(u8* to, const i32 (&acc)[COUNT]) const {
        i32 o[COUNT];
        if (high) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) o[i] = (i32)(multiply_add(acc[i], factor, half) >> 32) >> (shift - 32);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) o[i] = clamped<QMAX>(multiply_add(acc[i], factor, half) >> shift);
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
