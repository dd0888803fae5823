// PTX's arithmetic that C++ has no operator for.
#pragma once

// Bits as another type of the same size; integers also of another size.
template <class To, class From>
static To as(From x) {
  if constexpr (sizeof(To) == sizeof(From)) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
  } else {
    return To(x);
  }
}
template <class D, class V>
static void put(D& to, V x) { to = as<D>(x); }

static u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 s = selector >> 4 * i & 15, byte = u32(bytes >> 8 * (s & 7)) & 255;
    out |= (s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return out;
}
template <class A, class B>
static u32 dp4a(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; ++i) c += u32(s32(A(a >> 8 * i)) * s32(B(b >> 8 * i)));
  return c;
}
template <class T>
static T bfi(T a, T b, u32 at, u32 length) {
  at &= 255, length &= 255;
  for (u32 i = 0; i < length && at + i < 8 * sizeof(T); ++i) b = (b & ~(T(1) << (at + i))) | (a >> i & 1) << (at + i);
  return b;
}
template <class T>
static T shift_left(T x, u32 by) { return by >= 8 * sizeof(T) ? 0 : T(x << by); }
template <class T>
static T shift_right(T x, u32 by) { return x >> (by >= 8 * sizeof(T) ? 8 * sizeof(T) - 1 : by) >> (by >= 8 * sizeof(T) && T(-1) > 0); }
static u32 reversed_bits(u32 x) {
  u32 y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}
static u32 clz(u32 x) { return x ? u32(__builtin_clz(x)) : 32; }
static u32 clz(u64 x) { return x ? u32(__builtin_clzll(x)) : 64; }
template <class T>
static u32 pack_sat(s32 a, s32 b, u32 c) {
  using Limits = std::numeric_limits<T>;
  const auto clamp = [](s32 x) { return u32(std::min(std::max(x, s32(Limits::min())), s32(Limits::max()))) & 255; };
  return c << 16 | clamp(a) << 8 | clamp(b);
}
static u32 pack_sat_halves(s32 a, s32 b) {
  const auto clamp = [](s32 x) { return u32(u16(std::min(std::max(x, -32768), 32767))); };
  return clamp(a) << 16 | clamp(b);
}
static u32 bf16_of(float x) {
  const u32 bits = as<u32>(x);
  return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float bf16_to(u32 x) { return as<float>(x << 16); }
static u32 f16_of(float x) { return as<u16>(f16(x)); }
static float f16_to(u32 x) { return float(as<f16>(u16(x))); }
// NAN_WINS: of a number and NaN the largest is NaN, 0x7FFF; else it is the number.
template <float (*TO)(u32), u32 (*OF)(float), bool NAN_WINS>
static u32 max_halves(u32 a, u32 b) {
  const auto of = [](u32 x, u32 y) {
    const bool is_nan = NAN_WINS && (std::isnan(TO(x)) || std::isnan(TO(y)));
    return is_nan ? 0x7FFF : OF(std::fmax(TO(x), TO(y)));
  };
  return of(a & 0xFFFF, b & 0xFFFF) | of(a >> 16, b >> 16) << 16;
}
