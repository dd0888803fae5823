// Quantizes floats to int8 codes: the exact product x * inv is rounded once, half to even, and clamped to +-127
// (docs/numerics.md, section 1). int8 inputs pass unchanged. Also computes the scale of a head from its absolute
// maximum.
#pragma once
#include "params.cuh"

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the float MAGIC + code holds the code in its lowest bits
constexpr u32 MAGIC_BITS = 0x4B400000;

struct half_t {
  u16 bits;
};
struct bfloat_t {
  u16 bits;
};

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

// `Codes<T>` quantizes elements of type T. Raw holds the bytes of 4 * COUNT elements, so that loads can be issued
// early. codes() packs four codes into a word. transposed() takes four rows and returns, for each element, a word with
// the codes of the four rows. Callers pass the scale's reciprocal through `usable_inverse`, and call `clamp_far_values`
// first where `has_far_values` is true. IN_RANGE: no value is outside the scale's range, so nothing is clamped.
struct NoClamping {
  static DEVICE float usable_inverse(float inv) { return inv; }
  static DEVICE bool has_far_values(float) { return false; }
  template <typename RAW>
  static DEVICE void clamp_far_values(RAW&, float) {}
};
template <typename T, bool IN_RANGE = false>
struct Codes;

template <bool IN_RANGE>
struct Codes<i8, IN_RANGE> : NoClamping {
  template <int COUNT>
  struct Raw {
    u32 word[COUNT];
  };
  template <int COUNT>
  static DEVICE void codes(const Raw<COUNT>& raw, float, u32 (&w)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) w[i] = raw.word[i];
  }
  template <int COUNT>
  static DEVICE void transposed(const Raw<COUNT> (&rows)[4], float, u32 (&w)[4 * COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      transpose_bytes(rows[0].word[i], rows[1].word[i], rows[2].word[i], rows[3].word[i], (u32(&)[4])w[4 * i]);
  }
};

// RULE provides value(), which reads an element of Raw, code(), which rounds it to an integer, and pack().
template <typename T, class RULE>
struct FloatCodes : RULE {
  template <int COUNT>
  struct Raw {
    u32 word[COUNT * (int)sizeof(T)];
  };
  template <int COUNT>
  static DEVICE void codes(const Raw<COUNT>& raw, float inv, u32 (&w)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      w[i] = RULE::pack(code(raw, 4 * i, inv), code(raw, 4 * i + 1, inv), code(raw, 4 * i + 2, inv),
                        code(raw, 4 * i + 3, inv));
  }
  template <int COUNT>
  static DEVICE void transposed(const Raw<COUNT> (&rows)[4], float inv, u32 (&w)[4 * COUNT]) {
#pragma unroll
    for (int i = 0; i < 4 * COUNT; ++i)
      w[i] = RULE::pack(code(rows[0], i, inv), code(rows[1], i, inv), code(rows[2], i, inv), code(rows[3], i, inv));
  }
  template <int COUNT>
  static DEVICE i32 code(const Raw<COUNT>& raw, int i, float inv) {
    return RULE::code(RULE::value(raw.word, i), inv);
  }
};

DEVICE u32 low_bytes(i32 a, i32 b, i32 c, i32 d) {
  return permute(permute(a, b, 0x0040), permute(c, d, 0x0040), 0x5410);
}
struct FloatRule : NoClamping {
  static DEVICE float value(const u32* words, int i) { return __uint_as_float(words[i]); }
  // Returns the bits of the float MAGIC + code.
  static DEVICE i32 code(float x, float inv) {
    const float y = __fmaf_rn(x, inv, MAGIC);
    return __float_as_int(fminf(fmaxf(y, MAGIC - 127.0f), MAGIC + 127.0f));
  }
  static DEVICE u32 pack(i32 a, i32 b, i32 c, i32 d) { return low_bytes(a, b, c, d); }
};
// For |x| <= amax and inv within 2^-22 of 127 / amax (or smaller, by `usable_inverse`), all codes are within +-127.
template <class RULE>
struct InRangeRule : NoClamping {
  static DEVICE float usable_inverse(float inv) { return RULE::usable_inverse(inv); }
  static DEVICE float value(const u32* words, int i) { return RULE::value(words, i); }
  static DEVICE i32 code(float x, float inv) { return __float_as_int(__fmaf_rn(x, inv, MAGIC)); }
  static DEVICE u32 pack(i32 a, i32 b, i32 c, i32 d) { return low_bytes(a, b, c, d); }
};
template <>
struct Codes<float, false> : FloatCodes<float, FloatRule> {};
template <>
struct Codes<float, true> : FloatCodes<float, InRangeRule<FloatRule>> {};

DEVICE u32 max_pair(u32 a, u32 b, half_t) {
  asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
DEVICE u32 max_pair(u32 a, u32 b, bfloat_t) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
// Returns the bits of a power of two between 128 and 256 scales, or the nearest one that the type has. x / s is below
// 2^23 in either case.
DEVICE u32 far_value_bound(i32 exponent, half_t) {
  const i32 field = 149 - exponent;
  return field > 0 ? field << 10 : 1 << max(9 + field, 0);
}
DEVICE u32 far_value_bound(i32 exponent, bfloat_t) { return min(261 - exponent, 255) << 7; }

template <typename T>
struct IsHalf {
  static constexpr bool value = false;
};
template <>
struct IsHalf<half_t> {
  static constexpr bool value = true;
};

// Takes 3.5 instructions per element: widen, multiply-add, subtract MAGIC and clamp from below in one instruction, and
// half of a saturating pack. Compared as integers, the bits of y = x / s + MAGIC are ordered as y is, except that y in
// (-MAGIC, 0] would wrap around. Where a value may reach that range, values are clamped first.
template <typename T>
struct SixteenBitRule {
  // No float16 other than 0 is below 2^-24, so with a reciprocal above 2^46 all of them saturate in the same way.
  static DEVICE float usable_inverse(float inv) { return IsHalf<T>::value ? fminf(inv, 0x1p46f) : inv; }
  static DEVICE bool has_far_values(float inv) { return inv > (IsHalf<T>::value ? 190.0f : 3e-32f); }
  template <typename RAW>
  static DEVICE void clamp_far_values(RAW& raw, float inv) {
    const u32 least = (far_value_bound((i32)(__float_as_uint(inv) >> 23), T{}) | 0x8000) * 0x10001;
#pragma unroll
    for (u32& word : raw.word) word = max_pair(word, least, T{});
  }
  static DEVICE float value(const u32* words, int i) {
    return i % 2 ? high_half(words[i / 2], T{}) : low_half(words[i / 2], T{});
  }
  static DEVICE i32 code(float x, float inv) {  // the pack saturates from above
    return max((i32)(__float_as_uint(__fmaf_rn(x, inv, MAGIC)) - MAGIC_BITS), -127);
  }
  static DEVICE u32 pack(i32 a, i32 b, i32 c, i32 d) { return pack_bytes(a, b, c, d); }
};
template <>
struct Codes<half_t, false> : FloatCodes<half_t, SixteenBitRule<half_t>> {};
template <>
struct Codes<half_t, true> : FloatCodes<half_t, InRangeRule<SixteenBitRule<half_t>>> {};
template <>
struct Codes<bfloat_t, false> : FloatCodes<bfloat_t, SixteenBitRule<bfloat_t>> {};
template <>
struct Codes<bfloat_t, true> : FloatCodes<bfloat_t, InRangeRule<SixteenBitRule<bfloat_t>>> {};

// Volatile loads: the compiler does not move them ahead of `wait_for_previous_kernel`, as it may move read-only loads.
DEVICE uint4 load_volatile(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
DEVICE uint2 load_volatile(const uint2* from) {
  uint2 x;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}
DEVICE u32 load_volatile(const u32* from) {
  u32 x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
template <int WORDS>
DEVICE void load_words(const void* from, u32 (&w)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      uint4 x = load_volatile((const uint4*)from + i / 4);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
  } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      uint2 x = load_volatile((const uint2*)from + i / 2);
      w[i] = x.x, w[i + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) w[i] = load_volatile((const u32*)from + i);
  }
}

template <typename T>
constexpr int SIZE = sizeof(T);

// Returns the address of element `i` from `base`.
template <typename T>
DEVICE const void* element(const u8* base, i64 i) {
  return base + i * SIZE<T>;
}

// Returns the address of the element of a batch and head in a tensor with one element for each.
template <typename T>
DEVICE const T* head_element(const View& x, u32 batch, u32 head) {
  return (const T*)x.ptr + (u64)batch * (u32)x.b + (u64)head * (u32)x.h;
}

// The scales of float inputs and their reciprocals, rounded once. The caller gives the scales, or the kernel computes
// them from each head's own maxima (AMAX_IN_KERNEL). `load` issues the loads and `divide` waits for them. Each lane of
// a quad computes one reciprocal and the quad exchanges them.
template <typename T, bool AMAX_IN_KERNEL>
struct Scales {
  const float *q_at, *k_at, *v_at;
  float q, k, v, q_inverse, k_inverse, v_inverse;

  DEVICE Scales(const Params& p, u32 batch, u32 head, u32 kv_head)
      : q_at(head_element<float>(p.q_scale, batch, head)),
        k_at(head_element<float>(p.k_scale, batch, kv_head)),
        v_at(head_element<float>(p.v_scale, batch, kv_head)) {}
  DEVICE void load() {
    if constexpr (SIZE<T> > 1 && !AMAX_IN_KERNEL) q = *q_at, k = *k_at, v = *v_at;
  }
  DEVICE void divide() {
    if constexpr (SIZE<T> == 1) return;
    const u32 which = threadIdx.x % 4;
    const float inverse = Codes<T>::usable_inverse(__frcp_rn(which == 0 ? q : which == 1 ? k : v));
    q_inverse = __shfl_sync(~0u, inverse, 0), k_inverse = __shfl_sync(~0u, inverse, 1);
    v_inverse = __shfl_sync(~0u, inverse, 2);
  }
};

// --- the scale of a head from its own absolute maximum: amax / 127, and 1 where amax is below 2^-100
// (docs/numerics.md)

// The bits of magnitudes are ordered as the magnitudes are. Of 16-bit floats two are compared at a time, as floats: an
// integer comparison would take an instruction of its own for the signs. The largest of values with NaN is NaN.
DEVICE u32 max_magnitudes(u32 most, u32 word, float) { return max(most, word & 0x7FFFFFFFu); }
DEVICE u32 max_magnitudes(u32 most, u32 word, half_t) {
  asm("{.reg .b32 x; abs.f16x2 x, %1; max.NaN.f16x2 %0, %0, x;}" : "+r"(most) : "r"(word));
  return most;
}
DEVICE u32 max_magnitudes(u32 most, u32 word, bfloat_t) {
  asm("{.reg .b32 x; abs.bf16x2 x, %1; max.NaN.bf16x2 %0, %0, x;}" : "+r"(most) : "r"(word));
  return most;
}
template <typename T, int COUNT>
DEVICE u32 max_magnitudes(u32 most, const u32 (&words)[COUNT], T type) {
#pragma unroll
  for (u32 word : words) most = max_magnitudes(most, word, type);
  return most;
}
DEVICE u32 max_of_pair(u32 most, float) { return most; }
template <typename T>
DEVICE u32 max_of_pair(u32 most, T) {
  return max(most & 0xFFFF, most >> 16);
}
DEVICE float magnitude(u32 bits, float) { return __uint_as_float(bits); }
template <typename T>
DEVICE float magnitude(u32 bits, T type) {
  return low_half(bits, type);
}

// Returns this thread's part of the largest magnitude of `count` rows of CHANNELS elements, `stride` bytes apart.
// THREADS threads share the rows, each with AT_ONCE loads in flight, because memory latency dominates.
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
    for (const auto& chunk : words) most = max_magnitudes(most, chunk, T{});
  }
  return max_of_pair(most, T{});
}

DEVICE float scale_of_amax(float amax) { return amax < 0x1p-100f ? 1.0f : __fdiv_rn(amax, 127.0f); }
template <typename T>
DEVICE float scale_of_magnitude(u32 bits) {
  return scale_of_amax(magnitude(bits, T{}));
}
