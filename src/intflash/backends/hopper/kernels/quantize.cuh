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

// Of a kernel that overlaps the one before it: not moved before it waits (volatile), as read-only loads may be.
DEVICE uint4 load_late(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}
DEVICE uint2 load_late(const uint2* from) {
    uint2 x;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}
DEVICE u32 load_late(const u32* from) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
template <bool READ_ONLY, typename T> DEVICE T load(const T* from) {
    if constexpr (READ_ONLY) return __ldg(from);
    else return load_late(from);
}
template <bool READ_ONLY = true, int WORDS> DEVICE void load_words(const void* from, u32 (&w)[WORDS]) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            uint4 x = load<READ_ONLY>((const uint4*)from + i / 4);
            w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
        }
    } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) {
            uint2 x = load<READ_ONLY>((const uint2*)from + i / 2);
            w[i] = x.x, w[i + 1] = x.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[i] = load<READ_ONLY>((const u32*)from + i);
    }
}

template <typename T> constexpr int SIZE = sizeof(T);

// Where element `i` from `base` lies.
template <typename T> DEVICE const void* element(const u8* base, i64 i) { return base + i * SIZE<T>; }

// 1 / s of a head, rounded once; 1 for codes.
template <typename T> DEVICE float head_inverse(const View& scale, u32 batch, u32 head) {
    return __frcp_rn(__ldg((const float*)scale.ptr + head_offset(scale, batch, head)));
}
template <> DEVICE float head_inverse<i8>(const View&, u32, u32) { return 1.0f; }

// Codes of 16-bit floats with two instructions less: x is clamped in pairs, before it is widened, to +-bound, the
// 16-bit float whose code is 127. There is one (`bounded`) unless 127 scales are a subnormal number, with gaps above a
// scale.
template <typename T> struct Rounder {
    float inv;
    DEVICE Rounder(const View& scale, u32 batch, u32 head) : inv(head_inverse<T>(scale, batch, head)) {}
    DEVICE bool bounded() const { return true; }
    template <bool BOUNDED, typename RAW, int COUNT> DEVICE void codes(const RAW& raw, u32 (&w)[COUNT]) const {
        Codes<T>::codes(raw, inv, w);
    }
};

DEVICE u32 clamp_pair(u32 x, u32 bound, half_t) {
    asm("{.reg .b32 l; xor.b32 l, %1, 0x80008000; max.f16x2 %0, %0, l; min.f16x2 %0, %0, %1;}"
        : "+r"(x) : "r"(bound));
    return x;
}
DEVICE u32 clamp_pair(u32 x, u32 bound, bfloat_t) {
    asm("{.reg .b32 l; xor.b32 l, %1, 0x80008000; max.bf16x2 %0, %0, l; min.bf16x2 %0, %0, %1;}"
        : "+r"(x) : "r"(bound));
    return x;
}
DEVICE u32 bound_of(float x, half_t) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(w) : "f"(fminf(x, 65504.0f)));
    return w;
}
DEVICE u32 bound_of(float x, bfloat_t) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(w) : "f"(x));
    return w;
}

template <typename T> struct PairRounder {
    float inv;
    u32 bound;
    DEVICE PairRounder(const View& scale, u32 batch, u32 head) {
        float s = __ldg((const float*)scale.ptr + head_offset(scale, batch, head));
        inv = __frcp_rn(s);
        bound = bound_of(127.0f * s, T{});
    }
    DEVICE bool bounded() const {
        u32 code = __float_as_uint(__fmaf_rn(low_half(bound, T{}), inv, 12582912.0f)) - 0x4B400000u;
        return code == 127 || (code < 127 && (bound & 0xFFFF) == 0x7BFF);  // or no x is as large
    }
    template <bool BOUNDED, typename RAW, int COUNT> DEVICE void codes(const RAW& raw, u32 (&w)[COUNT]) const {
        if constexpr (!BOUNDED) {
            Codes<T>::codes(raw, inv, w);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                u32 a = clamp_pair(raw.word[2 * i], bound, T{}), b = clamp_pair(raw.word[2 * i + 1], bound, T{});
                u32 low = permute(rounded(low_half(a, T{})), rounded(high_half(a, T{})), 0x0040);
                u32 high = permute(rounded(low_half(b, T{})), rounded(high_half(b, T{})), 0x0040);
                w[i] = permute(low, high, 0x5410);
            }
        }
    }
    DEVICE u32 rounded(float x) const { return __float_as_uint(__fmaf_rn(x, inv, 12582912.0f)); }
};
template <> struct Rounder<half_t> : PairRounder<half_t> { using PairRounder::PairRounder; };
template <> struct Rounder<bfloat_t> : PairRounder<bfloat_t> { using PairRounder::PairRounder; };
