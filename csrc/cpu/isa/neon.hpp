// The vector layer on 128-bit NEON registers with the int8 dot product, and with the mixed-sign one of FEAT_I8MM;
// generic.hpp says what each operation means.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace intflash {
namespace {

struct Neon {
  static constexpr int kLanes = 4, kGroup = 4, kRows = 4, kCols = 4;
  static constexpr int kMaxRows = 16, kScoreBytes = 1 << 19, kStoreBlock = 0;
  static constexpr bool kRowOperations = false, kFloat16 = false, kWideP = false, kDithersPlanes = false,
                        kMatrixUnit = false, kFastPack = false, kUnsignedKeys = false;
  using Code = int8_t;
  using PCode = uint8_t;
  using I32 = int32x4_t;
  using U16 = uint16x8_t;
  using Codes = int8x16_t;

  static void begin(int64_t) {}
  static void end() {}
  static void keep_awake() {}
  static int depth_steps(int64_t head_dim) { return int((head_dim + 3) / 4); }
  static void copy_codes(const int8_t* x, int64_t n, int64_t padded, Code* out) {
    for (int64_t d = 0; d < n; ++d) out[d] = x[d];
    for (int64_t d = n; d < padded; ++d) out[d] = 0;
  }

  static I32 load(const int32_t* p) { return vld1q_s32(p); }
  static void store(int32_t* p, I32 a) { vst1q_s32(p, a); }
  static I32 set1(int32_t v) { return vdupq_n_s32(v); }
  static I32 add(I32 a, I32 b) { return vaddq_s32(a, b); }
  static I32 sub(I32 a, I32 b) { return vsubq_s32(a, b); }
  static I32 max(I32 a, I32 b) { return vmaxq_s32(a, b); }
  static I32 min_u(I32 a, I32 b) {
    return vreinterpretq_s32_u32(vminq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
  }
  static I32 shift_left(I32 a, int n) { return vshlq_s32(a, vdupq_n_s32(n)); }
  static I32 first(I32 x, int64_t count) {
    const int32_t indices[4] = {0, 1, 2, 3};
    const uint32x4_t inside = vcltq_s32(vld1q_s32(indices), vdupq_n_s32(count < 4 ? int32_t(count) : 4));
    return vbslq_s32(inside, x, vdupq_n_s32(INT32_MIN));
  }
  static void reduce_max(const I32* x, int32_t* out) {
    for (int r = 0; r < 16; ++r) out[r] = vmaxvq_s32(x[r]);
  }
  static void reduce_add(const I32* x, uint32_t* out) {
    for (int r = 0; r < 16; ++r) out[r] = vaddvq_u32(vreinterpretq_u32_s32(x[r]));
  }
  static I32 mul_high(I32 a, I32 c, uint64_t base = 0) {
    const uint32x4_t x = vreinterpretq_u32_s32(a), y = vreinterpretq_u32_s32(c);
    const uint64x2_t b = vdupq_n_u64(base);
    const uint64x2_t low = vmlal_u32(b, vget_low_u32(x), vget_low_u32(y)), high = vmlal_high_u32(b, x, y);
    return vreinterpretq_s32_u32(vcombine_u32(vshrn_n_u64(low, 32), vshrn_n_u64(high, 32)));
  }
  static I32 saturate_absent(I32 x, I32 s) {
    return vbslq_s32(vceqq_s32(s, vdupq_n_s32(INT32_MIN)), vdupq_n_s32(65535), x);
  }

  static U16 pack(I32 a, I32 b) { return vcombine_u16(vqmovun_s32(a), vqmovun_s32(b)); }
  static U16 set16(uint16_t v) { return vdupq_n_u16(v); }
  static U16 zero16() { return vdupq_n_u16(0); }
  static U16 high_byte(U16 a) { return vshrq_n_u16(a, 8); }
  static U16 and16(U16 a, uint16_t b) { return vandq_u16(a, vdupq_n_u16(b)); }
  template <int Shift>
  static U16 mantissa(U16 z) {
    return vorrq_u16(vbicq_u16(vdupq_n_u16(uint16_t(255 << Shift)), vshlq_n_u16(z, Shift)),
                     vdupq_n_u16(uint16_t(256 << Shift)));
  }
  static U16 add16(U16 a, uint16_t b) { return vaddq_u16(a, vdupq_n_u16(b)); }
  static U16 mul_round(U16 a, U16 b) {  // (2ab + 2^15) >> 16
    return vreinterpretq_u16_s16(vqrdmulhq_s16(vreinterpretq_s16_u16(a), vreinterpretq_s16_u16(b)));
  }
  static U16 power(U16 z) {  // a shift by 16 or more, to either side, gives 0: the count is a signed byte
    return vshlq_u16(vdupq_n_u16(512), vnegq_s16(vreinterpretq_s16_u16(vshrq_n_u16(z, 8))));
  }
  static U16 mul_high16(U16 a, U16 b) {
    const uint32x4_t low = vmull_u16(vget_low_u16(a), vget_low_u16(b)), high = vmull_high_u16(a, b);
    return vcombine_u16(vshrn_n_u32(low, 16), vshrn_n_u32(high, 16));
  }
  static U16 mul_high16(U16 a, U16 b, uint32_t base) {
    const uint32x4_t low = vdupq_n_u32(uint16_t(base));
    const uint32x4_t x = vmlal_u16(low, vget_low_u16(a), vget_low_u16(b)), y = vmlal_high_u16(low, a, b);
    return vqaddq_u16(vcombine_u16(vshrn_n_u32(x, 16), vshrn_n_u32(y, 16)), set16(uint16_t(base >> 16)));
  }
  static U16 average(U16 a, uint16_t b) { return vrhaddq_u16(a, vdupq_n_u16(b)); }
  static U16 shift_right(U16 a, U16 n) {  // by a negative left shift, whose amount is a signed byte
    return vshlq_u16(a, vnegq_s16(vreinterpretq_s16_u16(vminq_u16(n, vdupq_n_u16(16)))));
  }
  static U16 dither16(U16 z, const uint32_t* r) {
    const U16 v = mantissa<3>(z);  // 8 u
    const int16x8_t s =
        vnegq_s16(vreinterpretq_s16_u16(vshrq_n_u16(z, 8)));  // -128 to 0; a shift by 32 or more gives 0
    const uint32x4_t offset = vdupq_n_u32(132608 << 6);
    const uint32x4_t low = vshlq_u32(vmlal_u16(offset, vget_low_u16(v), vget_low_u16(v)), vmovl_s16(vget_low_s16(s))),
                     high = vshlq_u32(vmlal_high_u16(offset, v, v), vmovl_high_s16(s));
    return vcombine_u16(vshrn_n_u32(vaddq_u32(low, vld1q_u32(r)), 8),
                        vshrn_n_u32(vaddq_u32(high, vld1q_u32(r + 4)), 8));
  }
  static constexpr int dither_key(int i) { return i; }
  template <bool EndsAt15>
  static U16 round16(U16 w, U16 s) {
    const U16 h = average(w, 33151), near = average(w, 33152);
    U16 far = average(shift_right(h, vsubq_u16(s, vdupq_n_u16(2))), 0);
    if constexpr (EndsAt15) far = vandq_u16(far, vcltq_u16(s, vdupq_n_u16(15)));
    const U16 p = vbslq_u16(vcltq_u16(s, vdupq_n_u16(2)), near, far);
    return vaddq_u16(p, vandq_u16(h, vceqq_u16(s, vdupq_n_u16(0))));
  }
  static I32 store_p(PCode* p, U16 a, U16 b, I32 sum) {
    vst1q_u8(p, vcombine_u8(vmovn_u16(a), vmovn_u16(b)));
    return vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(sum), vaddq_u16(a, b)));
  }
  static constexpr int key_at(int at) { return at; }

  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, int32_t factor, int left, int shift) {
    const I32 h = shift_left(load(high), left);
    const int32x2_t f = vdup_n_s32(factor);
    int64x2_t a = vmull_s32(vget_low_s32(h), f), b = vmull_s32(vget_high_s32(h), f);
    if constexpr (P16) {
      const I32 l = shift_left(load(low), left);
      a = vmlal_s32(vshlq_n_s64(a, 8), vget_low_s32(l), f);
      b = vmlal_s32(vshlq_n_s64(b, 8), vget_high_s32(l), f);
    }
    const int64x2_t right = vdupq_n_s64(-shift);
    return vcombine_s32(vmovn_s64(vrshlq_s64(a, right)), vmovn_s64(vrshlq_s64(b, right)));
  }
  static void store_scaled(float* out, I32 x, float scale, int64_t count) {
    const float32x4_t y = vmulq_n_f32(vcvtq_f32_s32(x), scale);
    if (count >= 4) return vst1q_f32(out, y);
    float lanes[4];
    vst1q_f32(lanes, y);
    for (int i = 0; i < count; ++i) out[i] = lanes[i];
  }
  template <class Out>
  static void store_clamped(Out* out, I32 x, int limit, int64_t count) {
    int32_t lanes[4];
    store(lanes, vmaxq_s32(vminq_s32(x, set1(limit)), set1(-limit)));
    for (int i = 0; i < 4 && i < count; ++i) out[i] = Out(lanes[i]);
  }

  static Codes load_codes(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
  static Codes broadcast(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
  }
  static I32 dot_qk(I32 acc, Codes k, Codes q) { return vdotq_s32(acc, k, q); }
  static I32 dot_pv(I32 acc, Codes v, Codes p) {
    const Codes half = vdupq_n_s8(64);  // p = (p ^ 0x80) + 64 + 64 in signed codes
    return vdotq_s32(vdotq_s32(vdotq_s32(acc, v, veorq_s8(p, vdupq_n_s8(-128))), v, half), v, half);
  }

  static constexpr bool kOwnLinear = false, kSplitsWeights = false;
  static constexpr int kWeightGroup = 4, kXOffset = 0;
  using XCode = int8_t;
  static Codes load_weights(const int8_t* p) { return load_codes(p); }
  static void dot_wx(I32& acc, Codes w, Codes x) { acc = vdotq_s32(acc, w, x); }
  static I32 min(I32 a, I32 b) { return vminq_s32(a, b); }
  static I32 mul_high_signed(I32 a, I32 c) {
    return vcombine_s32(vshrn_n_s64(vmull_s32(vget_low_s32(a), vget_low_s32(c)), 32),
                        vshrn_n_s64(vmull_high_s32(a, c), 32));
  }
  static I32 mul_high_signed(I32 a, const int32_t* c) { return mul_high_signed(a, load(c)); }
  static I32 shift_right_signed(I32 a, int n) { return vshlq_s32(a, vdupq_n_s32(-n)); }
  static I32 load_widened(const int16_t* p) { return vmovl_s16(vld1_s16(p)); }
  static I32 load_widened(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)))));
  }
  static void store_saturated(int16_t* out, I32 x) { vst1_s16(out, vqmovn_s32(x)); }
  static void store_saturated(int8_t* out, I32 x) {
    const int16x4_t words = vqmovn_s32(x);
    const int32_t codes = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
    std::memcpy(out, &codes, 4);
  }
};

#ifdef __ARM_FEATURE_MATMUL_INT8
struct NeonI8mm : Neon {
  static I32 dot_pv(I32 acc, Codes v, Codes p) { return vusdotq_s32(acc, vreinterpretq_u8_s8(p), v); }

  // The product of two rows of eight codes by two channels is one instruction (smmla). Reads and writes whole pairs of
  // rows.
  static constexpr bool kOwnLinear = true;
  static constexpr int kWeightGroup = 8;
  static void linear(const XCode* x, int64_t x_ld, const int8_t* w, int steps, int panels, int rows, int32_t* out,
                     int64_t out_ld) {
    for (; rows > 0; rows -= 8, x += 8 * x_ld, out += 8 * out_ld)
      pairs<4>((rows + 1) / 2, x, x_ld, w, steps, panels, out, out_ld);
  }

 private:
  template <int Pairs>
  static void pairs(int count, const XCode* x, int64_t x_ld, const int8_t* w, int steps, int panels, int32_t* out,
                    int64_t out_ld) {
    if constexpr (Pairs > 1) {
      if (count < Pairs) return pairs<Pairs - 1>(count, x, x_ld, w, steps, panels, out, out_ld);
    }
    int c = 0;
    for (; c + 2 <= panels; c += 2) tile<Pairs, 2>(x, x_ld, w + 32 * c, 32 * panels, steps, out + 4 * c, out_ld);
    if (c < panels) tile<Pairs, 1>(x, x_ld, w + 32 * c, 32 * panels, steps, out + 4 * c, out_ld);
  }
  template <int Pairs, int Panels>
  static void tile(const XCode* x, int64_t x_ld, const int8_t* w, int64_t w_step, int steps, int32_t* out,
                   int64_t out_ld) {
    int32x4_t acc[Pairs][2 * Panels];
#pragma GCC unroll 4
    for (int r = 0; r < Pairs; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * Panels; ++c) acc[r][c] = vdupq_n_s32(0);
    for (int s = 0; s < steps; ++s, w += w_step, x += 8) {
      int8x16_t channels[2 * Panels];
#pragma GCC unroll 4
      for (int c = 0; c < 2 * Panels; ++c) channels[c] = vld1q_s8(w + 16 * c);
#pragma GCC unroll 4
      for (int r = 0; r < Pairs; ++r) {
        const int8x16_t two = vcombine_s8(vld1_s8(x + 2 * r * x_ld), vld1_s8(x + (2 * r + 1) * x_ld));
#pragma GCC unroll 4
        for (int c = 0; c < 2 * Panels; ++c) acc[r][c] = vmmlaq_s32(acc[r][c], two, channels[c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Pairs; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < Panels; ++c) {
        const int32x4_t a = acc[r][2 * c], b = acc[r][2 * c + 1];
        vst1q_s32(out + 2 * r * out_ld + 4 * c, vcombine_s32(vget_low_s32(a), vget_low_s32(b)));
        vst1q_s32(out + (2 * r + 1) * out_ld + 4 * c, vcombine_s32(vget_high_s32(a), vget_high_s32(b)));
      }
  }
};
#endif

}  // namespace
}  // namespace intflash
