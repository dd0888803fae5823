// The vector layer in plain C++: four lanes as arrays. It also documents what every operation means.
#pragma once
#include <cstdint>
#include <cstring>

namespace intflash {

struct Generic {
  static constexpr int kLanes = 4;               // int32 lanes
  static constexpr int kGroup = 4;               // codes per lane and dot step
  static constexpr int kRows = 4, kCols = 2;     // the tile of sums in registers, in rows and vectors
  static constexpr int kMaxRows = 16;            // query rows of a unit of work at most
  static constexpr int kScoreBytes = 1 << 20;    // scores of a unit kept between the passes: half of a typical L2
  static constexpr bool kMatrixUnit = false;     // has its own products (AMX)
  static constexpr bool kFastPack = false;       // has its own packing of contiguous rows
  static constexpr bool kRowOperations = false;  // has operations on whole rows: output factors, quantization
  static constexpr int kStoreBlock = 0;          // vectors that store_block clamps and stores at once; 0: it has none
  static constexpr bool kFloat16 =
      false;  // converts float16: has store_float16, and widen_float16 without row operations
  static constexpr bool kWideP = false;          // stores P16 in one plane of int16, as p - 32768
  static constexpr bool kDithersPlanes = false;  // has store_dithered in place of dither16, which stores both planes
  static constexpr bool kUnsignedKeys = false;   // packs K as code ^ 0x80
  using Code = int8_t;                           // a packed code of Q, K and V
  using PCode = uint8_t;                         // a stored digit of P
  struct I32 {
    int32_t x[4];
  };
  struct Codes {
    int8_t x[16];
  };  // kGroup codes per lane
  struct U16 {
    uint16_t x[8];
  };

  // Copies n codes, then zeros up to `padded`.
  static void copy_codes(const int8_t* x, int64_t n, int64_t padded, Code* out) {
    for (int64_t d = 0; d < n; ++d) out[d] = x[d];
    for (int64_t d = n; d < padded; ++d) out[d] = 0;
  }

  static void begin(int64_t) {}  // takes head_dim; called ahead of a thread's part of a call, as end() after it
  static void end() {}
  static void keep_awake() {
  }  // called about every thousand scores between products, because AMX's unit sleeps otherwise
  static int depth_steps(int64_t head_dim) { return int((head_dim + kGroup - 1) / kGroup); }

  static I32 load(const int32_t* p) {
    I32 r;
    std::memcpy(&r, p, sizeof r);
    return r;
  }
  static void store(int32_t* p, I32 a) { std::memcpy(p, &a, sizeof a); }
  static I32 set1(int32_t v) { return {{v, v, v, v}}; }
  static I32 add(I32 a, I32 b) {
    for (int i = 0; i < 4; ++i) a.x[i] = int32_t(uint32_t(a.x[i]) + uint32_t(b.x[i]));
    return a;
  }
  static I32 sub(I32 a, I32 b) {
    for (int i = 0; i < 4; ++i) a.x[i] = int32_t(uint32_t(a.x[i]) - uint32_t(b.x[i]));
    return a;
  }
  static I32 max(I32 a, I32 b) {
    for (int i = 0; i < 4; ++i) a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
    return a;
  }
  static I32 min_u(I32 a, I32 b) {
    for (int i = 0; i < 4; ++i) a.x[i] = uint32_t(a.x[i]) < uint32_t(b.x[i]) ? a.x[i] : b.x[i];
    return a;
  }
  static I32 shift_left(I32 a, int n) {
    for (int i = 0; i < 4; ++i) a.x[i] = int32_t(uint32_t(a.x[i]) << n);
    return a;
  }
  // Returns the first `count` lanes of x, kAbsent in the others.
  static I32 first(I32 x, int64_t count) {
    for (int i = 0; i < 4; ++i) x.x[i] = i < count ? x.x[i] : INT32_MIN;
    return x;
  }
  // Write the maximum, or the sum, of the lanes of x[r] to out[r], for 16 rows.
  static void reduce_max(const I32* x, int32_t* out) {
    for (int r = 0; r < 16; ++r) {
      out[r] = x[r].x[0];
      for (int i = 1; i < 4; ++i) out[r] = x[r].x[i] > out[r] ? x[r].x[i] : out[r];
    }
  }
  static void reduce_add(const I32* x, uint32_t* out) {
    for (int r = 0; r < 16; ++r)
      out[r] = uint32_t(x[r].x[0]) + uint32_t(x[r].x[1]) + uint32_t(x[r].x[2]) + uint32_t(x[r].x[3]);
  }
  // (a * c + base) >> 32, unsigned
  static I32 mul_high(I32 a, I32 c, uint64_t base = 0) {
    for (int i = 0; i < 4; ++i) a.x[i] = int32_t((uint64_t(uint32_t(a.x[i])) * uint32_t(c.x[i]) + base) >> 32);
    return a;
  }
  // s == kAbsent ? 65535 : x
  static I32 saturate_absent(I32 x, I32 s) {
    for (int i = 0; i < 4; ++i) x.x[i] = s.x[i] == INT32_MIN ? 65535 : x.x[i];
    return x;
  }
  static U16 pack(I32 a, I32 b) {  // saturating, from non-negative int32
    U16 r;
    for (int i = 0; i < 4; ++i)
      r.x[i] = uint16_t(a.x[i] > 65535 ? 65535 : a.x[i]), r.x[4 + i] = uint16_t(b.x[i] > 65535 ? 65535 : b.x[i]);
    return r;
  }
  static U16 set16(uint16_t v) { return {{v, v, v, v, v, v, v, v}}; }
  static U16 zero16() { return {{0, 0, 0, 0, 0, 0, 0, 0}}; }
  static U16 high_byte(U16 a) {
    for (auto& v : a.x) v = uint16_t(v >> 8);
    return a;
  }
  // Returns (511 - (z & 255)) << Shift: 1 + f / 256 with f = 255 - (z & 255) in fixed point.
  template <int Shift>
  static U16 mantissa(U16 z) {
    for (auto& v : z.x) v = uint16_t((511u - (v & 255u)) << Shift);
    return z;
  }
  static U16 add16(U16 a, uint16_t b) {
    for (auto& v : a.x) v = uint16_t(v + b);
    return a;
  }
  // The instruction is signed; all operands here are positive as int16.
  static U16 mul_round(U16 a, U16 b) {
    for (int i = 0; i < 8; ++i) a.x[i] = uint16_t((uint32_t(a.x[i]) * b.x[i] + (1u << 14)) >> 15);
    return a;
  }
  // 2^(9 - (z >> 8)), 0 where that is below 1
  static U16 power(U16 z) {
    for (auto& v : z.x) v = v >> 8 > 9 ? 0 : uint16_t(512u >> (v >> 8));
    return z;
  }
  static U16 mul_high16(U16 a, U16 b) {
    for (int i = 0; i < 8; ++i) a.x[i] = uint16_t((uint32_t(a.x[i]) * b.x[i]) >> 16);
    return a;
  }
  // (a * b + base) >> 16, saturating
  static U16 mul_high16(U16 a, U16 b, uint32_t base) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t x = (uint64_t(a.x[i]) * b.x[i] + base) >> 16;
      a.x[i] = uint16_t(x > 65535 ? 65535 : x);
    }
    return a;
  }
  static U16 average(U16 a, uint16_t b) {
    for (auto& v : a.x) v = uint16_t((unsigned(v) + b + 1) >> 1);
    return a;
  }
  // ((m >> (1 + s)) + 1) >> 1 from w = (m >> 2) - 33152 and h = m >> 3, where m mod 4 < 2:
  // m >> 2 = h + g for s = 0, g = (w + 33153) >> 1 for s = 1, else from h alone; 0 for s > 14 (hi < 0)
  template <bool EndsAt15>
  static U16 round16(U16 w, U16 s) {
    const U16 h = average(w, 33151), g = average(w, 33152);
    for (int i = 0; i < 8; ++i)
      w.x[i] = s.x[i] == 0                     ? uint16_t(h.x[i] + g.x[i])
               : s.x[i] == 1                   ? g.x[i]
               : s.x[i] > (EndsAt15 ? 14 : 17) ? 0
                                               : uint16_t(((h.x[i] >> (s.x[i] - 2)) + 1) >> 1);
    return w;
  }
  // (((m << 6) >> s) + r) >> 8 with s = z >> 8, m of z's low byte and an r for each lane. At most 65,193: z >= 153.
  static U16 dither16(U16 z, const uint32_t* r) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t u = 511u - (z.x[i] & 255u), s = z.x[i] >> 8, m = u * u + 132608;
      z.x[i] = uint16_t(((s > 31 ? 0 : (m << 6) >> s) + r[i]) >> 8);
    }
    return z;
  }
  // Returns the key, of the vector's 2 * kLanes, to which r[i] belongs.
  static constexpr int dither_key(int i) { return i; }
  static U16 and16(U16 a, uint16_t b) {
    for (auto& v : a.x) v &= b;
    return a;
  }
  // Stores values <= 255 and returns `sum` plus them, spread over lanes.
  static I32 store_p(PCode* p, U16 a, U16 b, I32 sum) {
    for (int i = 0; i < 8; ++i) {
      p[i] = uint8_t(a.x[i]), p[8 + i] = uint8_t(b.x[i]);
      sum.x[i & 3] += a.x[i] + b.x[i];
    }
    return sum;
  }
  // Returns the key at position `at` of a packed block of 4 * kLanes keys, whose order is that of the vector's packs.
  static constexpr int key_at(int at) { return at; }

  // ((high << left) * factor + 2^(shift - 1)) >> shift, or with P16 of 256 * high + low; 32 <= shift < 63,
  // and what is shifted left fits 32 bits
  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, int32_t factor, int left, int shift) {
    I32 r;
    for (int i = 0; i < 4; ++i) {
      const int64_t sum = (P16 ? int64_t(high[i]) * 256 + low[i] : high[i]) * (int64_t(1) << left);
      r.x[i] = int32_t((sum * factor + (int64_t(1) << (shift - 1))) >> shift);
    }
    return r;
  }
  // Stores the first `count` lanes as floats times `scale`, each step rounded.
  static void store_scaled(float* out, I32 x, float scale, int64_t count) {
    for (int i = 0; i < 4 && i < count; ++i) out[i] = float(x.x[i]) * scale;
  }
  // Stores the first `count` lanes, clamped to [-limit, limit].
  template <class Out>
  static void store_clamped(Out* out, I32 x, int limit, int64_t count) {
    for (int i = 0; i < 4 && i < count; ++i) out[i] = Out(x.x[i] < -limit ? -limit : x.x[i] > limit ? limit : x.x[i]);
  }

  static Codes load_codes(const void* p) {
    Codes r;
    std::memcpy(&r, p, sizeof r);
    return r;
  }
  static Codes broadcast(const void* p) {
    Codes r;
    for (int i = 0; i < 16; i += 4) std::memcpy(r.x + i, p, 4);
    return r;
  }
  // Return acc plus the sum over the group of k * q (k signed or ^ 0x80, q signed), or of v * p (v signed, p unsigned).
  static I32 dot_qk(I32 acc, Codes k, Codes q) {
    for (int i = 0; i < 16; ++i) acc.x[i / 4] += int32_t(k.x[i]) * q.x[i];
    return acc;
  }
  static I32 dot_pv(I32 acc, Codes v, Codes p) {
    for (int i = 0; i < 16; ++i) acc.x[i / 4] += int32_t(v.x[i]) * uint8_t(p.x[i]);
    return acc;
  }

  // Linear layers. Activations are multiplied as x + kXOffset; the bias of a packed layer takes the offset back.
  static constexpr bool kOwnLinear = false;  // has its own product (linear)
  static constexpr bool kSplitsWeights =
      false;                                   // its product saturates where two adjacent weights sum to more than 128
  static constexpr int kWeightGroup = kGroup;  // weights of a channel side by side
  static constexpr int kXOffset = 0;
  using XCode = int8_t;
  static Codes load_weights(const int8_t* p) { return load_codes(p); }
  static void dot_wx(I32& acc, Codes w, Codes x) { acc = dot_qk(acc, w, x); }

  static I32 min(I32 a, I32 b) {
    for (int i = 0; i < 4; ++i) a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i];
    return a;
  }
  // (a * c) >> 32, signed. Factors in memory have one more value behind them.
  static I32 mul_high_signed(I32 a, I32 c) {
    for (int i = 0; i < 4; ++i) a.x[i] = int32_t((int64_t(a.x[i]) * c.x[i]) >> 32);
    return a;
  }
  static I32 mul_high_signed(I32 a, const int32_t* c) { return mul_high_signed(a, load(c)); }
  static I32 shift_right_signed(I32 a, int n) {
    for (int i = 0; i < 4; ++i) a.x[i] >>= n;
    return a;
  }
  template <class In>
  static I32 load_widened(const In* p) {
    I32 r;
    for (int i = 0; i < 4; ++i) r.x[i] = p[i];
    return r;
  }
  // Stores the lanes, saturated to Out.
  template <class Out>
  static void store_saturated(Out* out, I32 x) {
    constexpr int32_t high = (1 << (8 * sizeof(Out) - 1)) - 1;
    for (int i = 0; i < 4; ++i) out[i] = Out(x.x[i] < -high - 1 ? -high - 1 : x.x[i] > high ? high : x.x[i]);
  }
};

}  // namespace intflash
