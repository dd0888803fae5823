// Codes of 16-bit floats by 3.5 instructions each: widen, multiply-add, subtract the magic number with the lower clamp
// in one, and half of a saturating pack. As integers, the bits of y = x / s + 1.5 * 2^23 order as y does and only
// y in (-1.5 * 2^23, 0] would wrap around: where a value may come so far (`far`), values are first brought near.
#pragma once
#include "output.cuh"
#include "quantize.cuh"

template <typename T> struct Near : Codes<T> {
    static DEVICE float usable(float inv) { return inv; }
    static DEVICE bool far(float) { return false; }
    template <typename RAW> static DEVICE void bring_near(RAW&, float) {}
};

DEVICE u32 larger_pair(u32 a, u32 b, half_t) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
DEVICE u32 larger_pair(u32 a, u32 b, bfloat_t) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
// The bits of a power of two from 128 to 256 scales, or the nearest that the type has; x / s below 2^23 in any case.
DEVICE u32 far_bound(i32 exponent, half_t) {
    const i32 field = 149 - exponent;
    return field > 0 ? field << 10 : 1 << max(9 + field, 0);
}
DEVICE u32 far_bound(i32 exponent, bfloat_t) { return min(261 - exponent, 255) << 7; }

template <typename T> struct IsHalf { static constexpr bool value = false; };
template <> struct IsHalf<half_t> { static constexpr bool value = true; };

template <typename T> struct NearPairs : Codes<T> {
    // No float16 but 0 is below 2^-24: past 2^46 all of them saturate alike.
    static DEVICE float usable(float inv) { return IsHalf<T>::value ? fminf(inv, 0x1p46f) : inv; }
    static DEVICE bool far(float inv) { return inv > (IsHalf<T>::value ? 190.0f : 3e-32f); }
    template <typename RAW> static DEVICE void bring_near(RAW& raw, float inv) {
        const u32 least = (far_bound((i32)(__float_as_uint(inv) >> 23), T{}) | 0x8000) * 0x10001;
#pragma unroll
        for (u32& word : raw.word) word = larger_pair(word, least, T{});
    }
    template <typename RAW, int COUNT> static DEVICE void codes(const RAW& raw, float inv, u32 (&w)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const u32 a = raw.word[2 * i], b = raw.word[2 * i + 1];
            w[i] = pack_bytes(code(low_half(a, T{}), inv), code(high_half(a, T{}), inv), code(low_half(b, T{}), inv),
                              code(high_half(b, T{}), inv));
        }
    }
    static DEVICE i32 code(float x, float inv) {  // the pack saturates above
        return max((i32)(__float_as_uint(__fmaf_rn(x, inv, 12582912.0f)) - 0x4B400000u), -127);
    }
};
template <> struct Near<half_t> : NearPairs<half_t> {};
template <> struct Near<bfloat_t> : NearPairs<bfloat_t> {};
