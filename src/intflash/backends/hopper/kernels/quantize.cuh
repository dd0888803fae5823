// Codes of 16 neighbouring elements, from int8 (as they are) or by the library's rule from floats:
// the exact product x * inv rounded once, half to even, clamped to +-127 (docs/numerics.md, section 1).
#pragma once
#include "base.cuh"

struct half_t { u16 bits; };
struct bfloat_t { u16 bits; };

DEVICE float low_half(u32 pair, half_t) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(pair));
    return x;
}
DEVICE float high_half(u32 pair, half_t) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(pair));
    return x;
}
DEVICE float low_half(u32 pair, bfloat_t) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair, bfloat_t) { return __uint_as_float(pair & 0xFFFF0000u); }

// The float 1.5 * 2^23 + code; its low byte is the code.
DEVICE u32 code_bits(float x, float inv) {
    constexpr float magic = 12582912.0f;
    float y = __fmaf_rn(x, inv, magic);
    y = fminf(fmaxf(y, magic - 127.0f), magic + 127.0f);
    return __float_as_uint(y);
}

DEVICE u32 four_codes(float a, float b, float c, float d, float inv) {
    u32 ab = permute(code_bits(a, inv), code_bits(b, inv), 0x0040);
    u32 cd = permute(code_bits(c, inv), code_bits(d, inv), 0x0040);
    return permute(ab, cd, 0x5410);
}

template <typename T> struct Codes;

// load(): the raw bytes of 4 * COUNT elements, so that loads can be issued early; codes(): their codes, 4 in a word.
template <> struct Codes<i8> {
    template <int COUNT> struct Raw { u32 word[COUNT]; };
    template <int COUNT> static DEVICE void codes(const Raw<COUNT>& raw, float, u32 (&w)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) w[i] = raw.word[i];
    }
};
template <typename T> struct SixteenBit {
    template <int COUNT> struct Raw { u32 word[2 * COUNT]; };
    template <int COUNT> static DEVICE void codes(const Raw<COUNT>& raw, float inv, u32 (&w)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            u32 a = raw.word[2 * i], b = raw.word[2 * i + 1];
            w[i] = four_codes(low_half(a, T{}), high_half(a, T{}), low_half(b, T{}), high_half(b, T{}), inv);
        }
    }
};
template <> struct Codes<half_t> : SixteenBit<half_t> {};
template <> struct Codes<bfloat_t> : SixteenBit<bfloat_t> {};
template <> struct Codes<float> {
    template <int COUNT> struct Raw { u32 word[4 * COUNT]; };
    template <int COUNT> static DEVICE void codes(const Raw<COUNT>& raw, float inv, u32 (&w)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            w[i] = four_codes(__uint_as_float(raw.word[4 * i]), __uint_as_float(raw.word[4 * i + 1]),
                              __uint_as_float(raw.word[4 * i + 2]), __uint_as_float(raw.word[4 * i + 3]), inv);
    }
};

template <int WORDS> DEVICE void load_words(const void* from, u32 (&w)[WORDS]) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            uint4 x = __ldg((const uint4*)from + i / 4);
            w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
        }
    } else if constexpr (WORDS == 2) {
        uint2 x = __ldg((const uint2*)from);
        w[0] = x.x, w[1] = x.y;
    } else {
        w[0] = __ldg((const u32*)from);
    }
}

template <typename T> constexpr int SIZE = sizeof(T);

// Where element `i` from `base` lies.
template <typename T> DEVICE const void* element(const u8* base, i64 i) { return base + i * SIZE<T>; }

// 1 / s of a head, rounded once; 1 for codes.
template <typename T> DEVICE float head_inverse(const View& scale, u32 batch, u32 head) { return __frcp_rn(__ldg((const float*)scale.ptr + head_offset(scale, batch, head))); }
template <> DEVICE float head_inverse<i8>(const View&, u32, u32) { return 1.0f; }
