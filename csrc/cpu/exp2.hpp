// Computes p of a row of scores in 16-bit lanes. The bits are those of docs/numerics.md section 2, in fewer steps:
//   x9 = (Tmax - T) >> 23          depth below the maximum, octaves in Q.9, saturated at 65535
//   x  = (x9 + 1) >> 1             rounded to Q.8;  t = 3686 - x = 0xEFF - z with z = x + 153:
//   s  = z >> 8 = 14 - hi,  f = 255 - (z & 255),  u = 256 + f
//   w  = u*u >> 2,  m = u*u + 132608,  m >> 2 = w + 33152,  h = m >> 3 = (w + 33152) >> 1
//   p16 = ((m >> (1 + s)) + 1) >> 1, of intflash 0 from s = 15 on
//         of intflash_bfp dithered above kRoundedKeys keys: (((m << 6) >> s) + r) >> 8 in 32-bit lanes, with r the
//         dither of the key (kDither); (m << 6) >> s is 0 from s = 25 on
//   p8  = ((m >> (9 + s)) + 1) >> 1, a rounding product: (h * 2^(9 - s) + 2^14) >> 15
//         with h = m >> 4 = (u*u >> 4) + 8288, 0 past s = 9; the bits that m >> 4 drops lie below every rounding bit
// intflash_online rounds the depth below its reference level to steps of 1/112 octave, 2^24 in T:
//   x10 = (level - T + 2^23 + (67 << 24)) >> 22   4 (step + 67) and two bits below it, saturated at 65535
//   z = 153 + floor(16 step / 7) = (4 (step + 67) * 37449) >> 16; p8 is 0 from step 1008 on
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

// What the depths of a row's keys are counted from: the maximum of their T, or an octave above that. Of intflash_bfp,
// by how it makes p16: the maximum of keys with a value (kRounded, kDithered), the octave of keys without one
// (kRoundedOctave, kDitheredOctave). Of intflash_online: the octave in the unit of its table.
enum class Level { kMaximum, kRounded, kRoundedOctave, kDithered, kDitheredOctave, kTableOctave };
template <Level L>
constexpr bool kIsAboveMaximum = L == Level::kRoundedOctave || L == Level::kDitheredOctave || L == Level::kTableOctave;
template <Level L>
constexpr bool kDithers = L == Level::kDithered || L == Level::kDitheredOctave;  // p16
template <Level L>
constexpr bool kEndsAt15 = L == Level::kMaximum;  // p16 is 0 from s = 15 on

// Fraction bits of a depth in 16-bit lanes, and what intflash_online adds to its depths in T.
template <Level L>
constexpr int kDepthBits = L == Level::kTableOctave ? 10 : 9;
constexpr int64_t kStepOffset = (int64_t(67) << 24) + (1 << 23);
constexpr uint16_t kStepFactor = 37449;
constexpr bool steps_are_exact() {
  for (uint32_t step = 0; step < 1024; ++step)
    if (4 * (step + 67) * kStepFactor >> 16 != 153 + 16 * step / 7) return false;
  return true;
}
static_assert(steps_are_exact());

// The constants by which a row's scores become depths: x = (((min(top - S, limit) << shift) * c) + base) >> 32.
struct RowScale {
  uint32_t c = 0;  // C << kDepthBits when that fits, else C, with shift = kDepthBits + k
  int shift = 0;
  uint32_t limit = 0;  // far past the last depth with a p above 0; keeps the shift inside 32 bits
};

// The constants of the rows of a unit; `step` is 0 where they share one scale.
struct RowLevels {
  const RowScale* scale;
  int step;
  const int32_t* top;    // the maximum of S
  const uint64_t* base;  // scaled_base of the level's distance above that maximum, where it is above
};

template <Level L = Level::kMaximum>
inline RowScale row_scale(Exponent e) {
  constexpr int bits = kDepthBits<L>;
  if (e.k == 0 && e.c < (1u << (32 - bits))) return {e.c << bits, 0, 0xFFFFFFFFu};
  // Without a pre-shift c >= 2^-bits, so that the limit is 2^11 units or more; with one c >= 2^(k-2), and it is 2^19.
  // A product is below 2^62.
  return {e.c, bits + e.k, (1u << (31 - bits - e.k)) - 1};
}

template <Level L>
inline uint64_t scaled_base(int64_t above) {  // at 32 units every p is 0, and base >> 16 fits 32 bits
  constexpr int64_t offset = L == Level::kTableOctave ? kStepOffset : 0;
  return uint64_t(smaller(above, int64_t(1) << 37) + offset) << kDepthBits<L>;
}

// Whether differences of S may have 16 bits: those past 65535 must give a p of 0, with z in octave 10 (P8), 15 (P16),
// 18 or 25 (intflash_bfp, rounded or dithered) or deeper, or a step of 1008 or more. Where c has 24 fraction bits the
// lower half of C << kDepthBits is zero, and the depth is the high half of a 16-bit product.
template <bool P16, Level L = Level::kMaximum>
inline bool fits_16_bits(const RowScale& r) {
  constexpr int octave = !P16 ? 10 : kEndsAt15<L> ? 15 : kDithers<L> ? 25 : 18;
  constexpr uint32_t dead = L == Level::kTableOctave ? 4 * 1008 : 2 * (octave * 256 - 153);
  return r.shift == 0 && r.c % 65536 == 0 && (uint64_t(65535) * r.c) >> 32 >= dead;
}

// What a depth is computed from: a difference of S of 32 or of 16 bits, one with a shift and a limit, or nothing where
// the row holds depths already.
enum class Depth { k32Bit, k16Bit, kShifted, kGiven };

// What dithering adds to p16 of each of kDitherKeys keys in 2^-8, in the order in which V adds it.
constexpr int kDitherKeys = 2048;
template <class V>
struct Dither {
  uint32_t of_key[kDitherKeys] = {};
  constexpr Dither() {
    constexpr int vector = 2 * V::kLanes;
    for (int i = 0; i < kDitherKeys; ++i)
      for (int key = i / vector * vector + V::dither_key(i % vector), bit = 0; bit < 4; ++bit)
        of_key[i] |= uint32_t(key >> bit & 1) << (7 - bit) | uint32_t(key >> (7 + bit) & 1) << (3 - bit);
  }
};
template <class V>
alignas(64) constexpr Dither<V> kDither;

template <class V>
struct Exp2 {
  using I32 = typename V::I32;
  using U16 = typename V::U16;
  using PCode = typename V::PCode;
  static constexpr int kBlock = 4 * V::kLanes;
  template <Level L>
  static constexpr bool kTable = L == Level::kTableOctave;

  template <Depth D, Level L, bool Masked>
  static inline I32 depth(const int32_t* s, const RowScale& r, I32 top, uint64_t base) {
    const I32 score = V::load(s);
    if constexpr (D == Depth::kGiven) {
      return score;
    } else {
      I32 d = V::sub(top, score);
      if constexpr (D == Depth::kShifted) d = V::shift_left(V::min_u(d, V::set1(int32_t(r.limit))), r.shift);
      const I32 c = V::set1(int32_t(r.c)), x = kIsAboveMaximum<L> ? V::mul_high(d, c, base) : V::mul_high(d, c);
      return Masked ? V::saturate_absent(x, score) : x;
    }
  }

  template <bool Masked>
  static inline I32 below(const int32_t* s, I32 top) {
    const I32 score = V::load(s);
    return V::sub(top, Masked ? V::max(score, V::sub(top, V::set1(65536)))
                              : score);  // the difference of an absent key would wrap
  }

  template <Depth D, Level L, bool Masked>
  static inline U16 depths(const int32_t* s, const RowScale& r, I32 top, uint64_t base) {
    if constexpr (D == Depth::k16Bit) {
      const U16 d = V::pack(below<Masked>(s, top), below<Masked>(s + V::kLanes, top)),
                c = V::set16(uint16_t(r.c >> 16));
      return kIsAboveMaximum<L> ? V::mul_high16(d, c, uint32_t(base >> 16)) : V::mul_high16(d, c);
    } else {
      return V::pack(depth<D, L, Masked>(s, r, top, base), depth<D, L, Masked>(s + V::kLanes, r, top, base));
    }
  }

  // p from a depth, by the operations of V or of an object that keeps their constants in registers.
  template <bool Online = false, class O = V>
  static inline __attribute__((always_inline)) U16 p8(U16 x, const O& o = O()) {
    const U16 z = Online ? V::mul_high16(V::and16(x, 65532), V::set16(kStepFactor)) : o.average(x, 2 * 153);
    const U16 v = o.template mantissa<6>(z);
    return V::mul_round(o.add16(V::mul_high16(v, v), 8288), o.power(z));
  }

  template <Level L = Level::kMaximum, class O = V>
  static inline __attribute__((always_inline)) U16 p16(U16 x9, const O& o = O()) {
    const U16 z = o.average(x9, 2 * 153);
    const U16 v = o.template mantissa<7>(z);
    const U16 w = V::mul_high16(v, v);
    return o.template round16<kEndsAt15<L>>(w, o.high_byte(z));
  }

  template <Level L>
  static inline U16 rounded_or_dithered16(U16 x9, const uint32_t* dither) {
    if constexpr (kDithers<L>)
      return V::dither16(V::average(x9, 2 * 153), dither);
    else
      return p16<L>(x9);
  }

  // Computes P of one block of kBlock keys, the first of which is `key`, a multiple of kBlock. `sum` accumulates P8,
  // P16 - 32768 or the high digits, `sum_low` the low digits.
  template <bool P16, Depth D, Level L, bool Masked, bool Half>
  static inline void block(const int32_t* s, const RowScale& r, I32 top, uint64_t base, int64_t key, PCode* high,
                           PCode* low, I32& sum, I32& sum_low) {
    const U16 x0 = depths<D, L, Masked>(s, r, top, base);
    const U16 x1 = Half ? V::zero16() : depths<D, L, Masked>(s + 2 * V::kLanes, r, top, base);
    const uint32_t* dither = kDither<V>.of_key + (kDithers<L> ? key % kDitherKeys : 0);
    if constexpr (P16 && kDithers<L> && V::kDithersPlanes) {
      V::template store_dithered<Half>(high, low, V::average(x0, 2 * 153), V::average(x1, 2 * 153), dither, sum,
                                       sum_low);
    } else if constexpr (P16) {
      const U16 a = rounded_or_dithered16<L>(x0, dither),
                b = Half ? V::zero16() : rounded_or_dithered16<L>(x1, dither + kBlock / 2);
      if constexpr (V::kWideP) {
        sum = V::store_p16(high, a, b, sum);
        return;
      }
      sum = V::store_p(high, V::high_byte(a), V::high_byte(b), sum);
      sum_low = V::store_p(low, V::and16(a, 255), V::and16(b, 255), sum_low);
    } else {
      sum = V::store_p(high, p8<kTable<L>>(x0), Half ? V::zero16() : p8<kTable<L>>(x1), sum);
    }
  }

  // Computes P of n keys of a row from `key` on.
  template <bool P16, Depth D, Level L, bool Masked>
  static inline I32 row(const int32_t* s, int64_t key, int64_t n, const RowScale& r, I32 top, uint64_t base,
                        PCode* high, PCode* low) {
    I32 sum = V::set1(0), sum_low = V::set1(0);
    int64_t j = 0;
    for (; j + kBlock <= n; j += kBlock)
      block<P16, D, L, Masked, false>(s + j, r, top, base, key + j, high + j, low + j, sum, sum_low);
    if (n - j > kBlock / 2)
      block<P16, D, L, true, false>(s + j, r, top, base, key + j, high + j, low + j, sum, sum_low);
    else if (n > j)
      block<P16, D, L, true, true>(s + j, r, top, base, key + j, high + j, low + j, sum, sum_low);
    return P16 && !V::kWideP ? V::add(V::shift_left(sum, 8), sum_low) : sum;
  }

  // Computes P of n keys of `rows` rows from `key` on, a multiple of kBlock, and adds its sum to sums[r]. Scores from n
  // to the end of the block are kAbsent.
  template <bool P16, Depth D, Level L, bool Masked>
  static void rows_of(const int32_t* s, int64_t s_ld, int64_t key, int64_t n, const RowLevels& levels, int rows,
                      PCode* high, int64_t high_ld, PCode* low, int64_t low_ld, I32* sums) {
    int64_t asleep = 0;
    for (int i = 0; i < rows; ++i, s += s_ld, high += high_ld, low += low_ld) {
      if (asleep += n; asleep >= 1024) V::keep_awake(), asleep = 0;
      const RowScale r = levels.scale[i * levels.step];
      const I32 top = V::set1(levels.top[i]);
      const uint64_t base = kIsAboveMaximum<L> ? levels.base[i] : 0;
      const bool is_short = D == Depth::k32Bit && fits_16_bits<P16, L>(r);
      sums[i] = V::add(sums[i], is_short ? row<P16, D == Depth::k32Bit ? Depth::k16Bit : D, L, Masked>(
                                               s, key, n, r, top, base, high, low)
                                         : row<P16, D, L, Masked>(s, key, n, r, top, base, high, low));
    }
  }

  template <bool P16, Level L, class... Args>
  static void rows(Depth depth, bool masked, Args... args) {
    if (depth == Depth::kGiven) return rows_of<P16, Depth::kGiven, L, false>(args...);
    if (depth == Depth::kShifted) return rows_of<P16, Depth::kShifted, L, true>(args...);
    if (masked) return rows_of<P16, Depth::k32Bit, L, true>(args...);
    return rows_of<P16, Depth::k32Bit, L, false>(args...);
  }
};

}  // namespace
}  // namespace intflash
