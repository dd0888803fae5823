// Scales of a head from its own absolute maxima: amax / 127, 1 where amax is below 2^-100 (docs/numerics.md).
#pragma once
#include "quantize.cuh"

// The bits of |x| are ordered as |x|, also two 16-bit floats at a time.
DEVICE u32 larger_magnitudes(u32 most, u32 word, float) { return max(most, word & 0x7FFFFFFFu); }
template <typename T> DEVICE u32 larger_magnitudes(u32 most, u32 word, T) { return __vmaxu2(most, word & 0x7FFF7FFFu); }
DEVICE u32 one_magnitude(u32 most, float) { return most; }
template <typename T> DEVICE u32 one_magnitude(u32 most, T) { return max(most & 0xFFFF, most >> 16); }
DEVICE float magnitude(u32 bits, float) { return __uint_as_float(bits); }
template <typename T> DEVICE float magnitude(u32 bits, T type) { return low_half(bits, type); }

// Of `count` rows of CHANNELS, `stride` bytes apart, this thread's of THREADS, with AT_ONCE loads in flight: memory's
// latency is what this costs.
template <typename T, int CHANNELS, int THREADS, int AT_ONCE>
DEVICE u32 largest_magnitude(const u8* base, i32 stride, i32 count, i32 thread) {
    constexpr i32 CHUNKS = CHANNELS * SIZE<T> / 16;
    u32 most = 0;
#pragma unroll 1
    for (i32 first = thread; first < count * CHUNKS; first += THREADS * AT_ONCE) {
        u32 words[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const i32 chunk = min(first + i * THREADS, count * CHUNKS - 1);
            load_words(base + (i64)(chunk / CHUNKS) * stride + chunk % CHUNKS * 16, words[i]);
        }
#pragma unroll
        for (int i = 0; i < 4 * AT_ONCE; ++i) most = larger_magnitudes(most, words[i / 4][i % 4], T{});
    }
    return one_magnitude(most, T{});
}

template <typename T> DEVICE float scale_of_magnitude(u32 bits) {
    const float amax = magnitude(bits, T{});
    return amax < 0x1p-100f ? 1.0f : __fdiv_rn(amax, 127.0f);
}
