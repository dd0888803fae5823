// The vector layer on 512-bit registers with AVX-512 VNNI; generic.hpp says what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/isa/floats_avx512.hpp"
#include "cpu/isa/pack_avx512.hpp"

namespace intflash {
namespace {

struct Vec512 : Pack512 {
  static constexpr int kLanes = 16, kGroup = 4, kRows = 6, kCols = 4;
  static constexpr bool kFastPack = true, kWholeRows = true, kFloat16 = true, kWideP = false;
  using I32 = __m512i;
  using U16 = __m512i;
  using Codes = __m512i;
  using Code = int8_t;
  using PCode = uint8_t;

  static I32 load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, I32 a) { _mm512_storeu_si512(p, a); }
  static I32 set1(int32_t v) { return _mm512_set1_epi32(v); }
  // x, of which the compiler does not know what it is or where else it could be.
  static I32 held(I32 x) {
    asm("" : "+v"(x));
    return x;
  }
  // For the compiler: gcc's tile loads do not say that they read memory.
  static void stores_before_loads() { asm volatile("" : : : "memory"); }
  static I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
  static I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
  static I32 max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
  static I32 min_u(I32 a, I32 b) { return _mm512_min_epu32(a, b); }
  static I32 shift_left(I32 a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
  static I32 first(I32 x, int64_t count) {
    return _mm512_mask_mov_epi32(set1(INT32_MIN), lanes(count), x);
  }
  // Sixteen rows become one vector of their lanes' maxima or sums, row r in lane r.
  template <class Combine>
  static I32 reduce_rows(const I32* x, Combine combine) {
    I32 a[8], b[4], c[2];
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) a[i] = combine(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) b[i] = combine(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 16
    for (int i = 0; i < 2; ++i) c[i] = combine(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xDD));
    return combine(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xDD));
  }
  static void reduce_max(const I32* x, int32_t* out) {
    store(out, reduce_rows(x, [](I32 a, I32 b) { return _mm512_max_epi32(a, b); }));
  }
  static void reduce_add(const I32* x, uint32_t* out) {
    _mm512_storeu_si512(out, reduce_rows(x, [](I32 a, I32 b) { return _mm512_add_epi32(a, b); }));
  }
  // Of so many rows: a window of 49 leaves one.
  static void reduce_max(const I32* x, int rows, int32_t* out) { rows == 1 ? void(*out = _mm512_reduce_max_epi32(*x)) : reduce_max(x, out); }
  static void reduce_add(const I32* x, int rows, uint32_t* out) { rows == 1 ? void(*out = uint32_t(_mm512_reduce_add_epi32(*x))) : reduce_add(x, out); }
  static I32 high_halves(__m512i even, __m512i odd) {
    return _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);  // even lanes: their product's high half
  }
  static __m512i odd_lanes(I32 a) { return _mm512_srli_epi64(a, 32); }
  static I32 mul_high(I32 a, I32 c) { return high_halves(_mm512_mul_epu32(a, c), _mm512_mul_epu32(odd_lanes(a), c)); }
  static I32 mul_high(I32 a, I32 c, uint64_t base) {
    const __m512i b = _mm512_set1_epi64(int64_t(base));
    return high_halves(_mm512_add_epi64(_mm512_mul_epu32(a, c), b), _mm512_add_epi64(_mm512_mul_epu32(odd_lanes(a), c), b));
  }
  static I32 bury_absent(I32 x, I32 s) {
    const __mmask16 absent = _mm512_cmpeq_epi32_mask(s, _mm512_set1_epi32(INT32_MIN));
    return _mm512_mask_mov_epi32(x, absent, _mm512_set1_epi32(65535));
  }

  static U16 pack(I32 a, I32 b) { return _mm512_packus_epi32(a, b); }
  static U16 set16(uint16_t v) { return _mm512_set1_epi16(int16_t(v)); }
  static U16 zero16() { return _mm512_setzero_si512(); }
  static U16 high_byte(U16 a) {  // a shuffle: the shifts' port has enough to do
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(1, -1, 3, -1, 5, -1, 7, -1, 9, -1, 11, -1, 13, -1, 15, -1));
    return _mm512_shuffle_epi8(a, order);
  }
  static U16 and16(U16 a, uint16_t b) { return _mm512_and_si512(a, _mm512_set1_epi16(int16_t(b))); }
  template <int Shift>
  static U16 mantissa(U16 z) { return mantissa_of<Shift>(_mm512_slli_epi16(z, Shift)); }
  static U16 shift6_plan() { return zero16(); }
  static U16 shift6(U16 z, U16) { return _mm512_slli_epi16(z, 6); }
  template <int Shift>
  static U16 mantissa_of(U16 shifted) {  // (~shifted & (255 << Shift)) | 256 << Shift
    return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(int16_t(255 << Shift)), _mm512_set1_epi16(int16_t(256 << Shift)), 0xAE);
  }
  static U16 add16(U16 a, uint16_t b) { return _mm512_add_epi16(a, _mm512_set1_epi16(int16_t(b))); }
  static U16 mul_round(U16 a, U16 b) { return _mm512_mulhrs_epi16(a, b); }
  static U16 power(U16 z) { return _mm512_srlv_epi16(_mm512_set1_epi16(512), high_byte(z)); }
  static U16 mul_high16(U16 a, U16 b) { return _mm512_mulhi_epu16(a, b); }
  static U16 mul_high16(U16 a, U16 b, uint32_t base) {  // a product's high half is at most 65534: the carry fits
    const __mmask32 carry = _mm512_cmpgt_epu16_mask(_mm512_mullo_epi16(a, b), set16(uint16_t(~base)));
    const __m512i high = mul_high16(a, b), carried = _mm512_mask_sub_epi16(high, carry, high, set16(65535));
    return _mm512_adds_epu16(carried, set16(uint16_t(base >> 16)));
  }
  static U16 average(U16 a, uint16_t b) { return _mm512_avg_epu16(a, _mm512_set1_epi16(int16_t(b))); }
  static U16 shift_right(U16 a, U16 n) { return _mm512_srlv_epi16(a, n); }
  // (w + 33152 + 2^(s-1)) >> s: past s = 0 the sum and its first shift are an average
  static U16 round16(U16 w, U16 s) {
    const __m512i n = _mm512_sub_epi16(s, _mm512_set1_epi16(1)), half = _mm512_sllv_epi16(_mm512_set1_epi16(1), n);
    const __m512i average = _mm512_avg_epu16(w, _mm512_add_epi16(half, _mm512_set1_epi16(int16_t(33151))));
    const __m512i far = _mm512_maskz_srlv_epi16(_mm512_cmplt_epu16_mask(s, _mm512_set1_epi16(15)), average, n);
    return _mm512_mask_add_epi16(far, _mm512_testn_epi16_mask(s, s), w, _mm512_set1_epi16(int16_t(33152)));
  }
  static I32 store_p(PCode* p, U16 a, U16 b, I32 sum) {
    const __m512i bytes = _mm512_packus_epi16(a, b);
    _mm512_storeu_si512(p, bytes);
    return _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi8(1));
  }
  // The same of bytes; `ones` has 0 for those that do not count, the sum is of bytes << left.
  static I32 store_bytes(PCode* p, Codes bytes, I32 sum, Codes ones, int left) {
    _mm512_storeu_si512(p, bytes);
    if (left == 0) return _mm512_dpbusd_epi32(sum, bytes, ones);
    return _mm512_add_epi32(sum, _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, ones), 8));
  }
  // four vectors packed into one: 4 keys of each, in each 128-bit lane
  static constexpr int key_at(int at) { return at / 4 % 4 * 16 + at / 16 * 4 + at % 4; }

  static constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  // What rows of sums of p ask of the output's rounding: floor(sum * scale + 1/2) of short sums; else
  // (sum * factor + half) >> shift in the product's high half.
  struct Factors {
    alignas(64) float scale[16];
    alignas(64) int32_t factor[16], half[16], shift[16];
    bool short_sums;  // of 24 bits
  };
  // Of up to 16 rows, 0 where l is 0; false where a row's factor needs more than 32 bits, or l is 2^24 or more. Quotient and
  // product have 24 bits as integers: rounded down as floats they are these.
  template <bool P16>
  static bool factors(const uint32_t* l, int rows, int64_t mr, int e, Factors& out) {
    const __m512i given = _mm512_maskz_loadu_epi32(lanes(rows), l), lz = _mm512_lzcnt_epi32(given);
    const __mmask16 some = _mm512_test_epi32_mask(given, given);
    const __m512i shift = sub(set1(55 - e), lz);
    const __mmask16 wide = _mm512_cmplt_epi32_mask(shift, set1(27)) | _mm512_cmplt_epi32_mask(lz, set1(8));
    if (wide & some) return false;
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(sub(set1(55 + 127), lz), 23));  // 2^(55 - lz)
    const __m512 reciprocal = _mm512_div_round_ps(power, _mm512_cvtepi32_ps(given), kDown);    // floor(power / l), in (2^23, 2^24]
    const __m512 product = _mm512_fmadd_round_ps(reciprocal, _mm512_set1_ps(float(mr) / (1 << 24)), _mm512_set1_ps(0.5f), kDown);
    const __m512 factor = _mm512_roundscale_ps(product, kDown);
    out.short_sums = !P16 && _mm512_cmpgt_epu32_mask(given, set1((1 << 24) / 127)) == 0;  // sums are at most 127 l
    if (out.short_sums) {
      _mm512_store_ps(out.scale, _mm512_maskz_scalef_ps(some, factor, _mm512_cvtepi32_ps(sub(lz, set1(55 - e)))));
      return true;
    }
    const __m512i left = _mm512_max_epi32(_mm512_setzero_si512(), sub(set1(33), shift)), end = sub(add(shift, left), set1(32));
    _mm512_store_si512(out.factor, _mm512_maskz_sllv_epi32(some, _mm512_cvtps_epi32(factor), left));
    _mm512_store_si512(out.half, _mm512_sllv_epi32(set1(1), sub(end, set1(1))));
    _mm512_store_si512(out.shift, end);
    return true;
  }
  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, const Factors& all, int row) {
    const __m512i x = P16 ? add(shift_left(load(high), 8), load(low)) : load(high);
    const __m512i odd = P16 ? odd_lanes(x) : _mm512_castps_si512(_mm512_movehdup_ps(_mm512_loadu_ps(high)));  // the load unit's shuffle
    return rescaled(x, odd, all, row);
  }
  static I32 rescaled(I32 x, I32 odd, const Factors& all, int row) {
    const __m512i f = set1(all.factor[row]);
    const __m512i top = high_halves(_mm512_mul_epi32(x, f), _mm512_mul_epi32(odd, f));
    return _mm512_srav_epi32(add(top, set1(all.half[row])), set1(all.shift[row]));
  }
  // Exact: both factors have 24 bits, the sum is rounded once, and down as its floor is.
  static I32 rescaled_short(I32 x, const Factors& all, int row) {
    return _mm512_cvt_roundps_epi32(_mm512_fmadd_round_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(all.scale[row]), _mm512_set1_ps(0.5f), kDown), kDown);
  }
  // 64 int8 codes, clamped to 127 by the saturating packs and to -127
  static void store_quad(int8_t* out, I32 a, I32 b, I32 c, I32 d) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, _mm512_max_epi8(codes, _mm512_set1_epi8(-127))));
  }
  template <bool P16>
  static I32 rescale(const int32_t* high, const int32_t* low, int32_t factor, int left, int shift) {
    const __m512i f = set1(factor), half = _mm512_set1_epi64(int64_t(1) << (shift - 1));
    const __m512i h = shift_left(load(high), left);
    __m512i even = _mm512_mul_epi32(h, f), odd = _mm512_mul_epi32(odd_lanes(h), f);
    if constexpr (P16) {
      const __m512i l = shift_left(load(low), left);
      even = _mm512_add_epi64(_mm512_slli_epi64(even, 8), _mm512_mul_epi32(l, f));
      odd = _mm512_add_epi64(_mm512_slli_epi64(odd, 8), _mm512_mul_epi32(odd_lanes(l), f));
    }
    const __m512i top = high_halves(_mm512_add_epi64(even, half), _mm512_add_epi64(odd, half));
    return _mm512_sra_epi32(top, _mm_cvtsi32_si128(shift - 32));
  }
  static void store_scaled(float* out, I32 x, float scale, int64_t count) { _mm512_mask_storeu_ps(out, lanes(count), scaled(x, scale)); }
  static __m512 scaled(I32 x, float scale) { return _mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(scale)); }
  static void store_float16(uint16_t* out, I32 x, float scale, int64_t count) {
    _mm256_mask_storeu_epi16(out, lanes(count), _mm512_cvtps_ph(scaled(x, scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static I32 clamp(I32 x, int limit) { return _mm512_max_epi32(_mm512_min_epi32(x, set1(limit)), set1(-limit)); }
  static void store_clamped(int8_t* out, I32 x, int limit, int64_t count) {
    const __m128i codes = _mm512_cvtepi32_epi8(clamp(x, limit));
    if (count >= 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
    else
      _mm_mask_storeu_epi8(out, lanes(count), codes);
  }
  // 32 int8 codes, at least -limit = -127 by the clamp that the saturating packs leave to do
  static void store_pair(int8_t* out, I32 a, I32 b) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
    const __m512i words = _mm512_packs_epi32(a, b);
    const __m512i codes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_max_epi8(_mm512_castsi512_si256(codes), _mm256_set1_epi8(-127)));
  }
  static void store_clamped(int16_t* out, I32 x, int limit, int64_t count) {
    _mm256_mask_storeu_epi16(out, lanes(count), _mm512_cvtepi32_epi16(clamp(x, limit)));
  }
  static int32_t code_sum(const Code* x, int64_t n) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t d = 0; d < n; d += 64) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(bytes(n - d), x + d));
    return _mm512_reduce_add_epi32(sum);
  }
  // A whole or half register is the usual row.
  static void copy_rows(const int8_t* x, int64_t row_step, int rows, int64_t n, int64_t padded, Code* out) {
    if (n == 64 && padded == 64)
      for (int r = 0; r < rows; ++r) _mm512_storeu_si512(out + 64 * r, _mm512_loadu_si512(x + r * row_step));
    else if (n == 32 && padded == 64)
      for (int r = 0; r < rows; ++r)
        _mm512_storeu_si512(out + 64 * r, _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + r * row_step))));
    else
      for (int r = 0; r < rows; ++r) copy_codes(x + r * row_step, n, padded, out + r * padded);
  }
  static void copy_codes(const int8_t* x, int64_t n, int64_t padded, Code* out) {
    for (int64_t d = 0; d < padded; d += 64) {
      const __m512i codes = _mm512_maskz_loadu_epi8(bytes(n - d), x + d);
      if (padded - d >= 64)
        _mm512_storeu_si512(out + d, codes);
      else if (padded - d == 32)  // what a mask stores cannot be loaded before it is in the cache
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), _mm512_castsi512_si256(codes));
      else
        _mm512_mask_storeu_epi8(out + d, bytes(padded - d), codes);
    }
  }

  static Codes load_codes(const void* p) { return _mm512_loadu_si512(p); }
  static I32 dot_qk(I32 acc, Codes k, Codes q) { return _mm512_dpbusd_epi32(acc, k, q); }
  // The sum stays in its register: gcc copies and spills the many of a tile.
  static void dot_in_place(I32& acc, Codes u, Codes s) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s)); }
  static I32 dot_pv(I32 acc, Codes v, Codes p) { return _mm512_dpbusd_epi32(acc, p, v); }
};

struct Avx512Vnni : Vec512 {
  static constexpr int kMaxRows = 16, kScoreBytes = 1 << 20;
  static constexpr bool kUnsignedKeys = true, kMatrixUnit = false;
  static void begin(int64_t) {}
  static void end() {}
  template <int = 0>
  static void stay_awake() {}
  static int depth_steps(int64_t head_dim) { return int((head_dim + 3) / 4); }
  static bool pack_keys(const int8_t* k, int64_t row_step, int64_t count, int64_t dim, int steps, Code* out) {
    pack_key_panel<0x80>(k, row_step, 1, count, dim, steps, out);
    return true;
  }
};

}  // namespace
}  // namespace intflash
