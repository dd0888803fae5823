// The vector layer with AMX int8 tiles for the two products. Everything else is the 512-bit vector layer.
#pragma once
#include "cpu/isa/avx512.hpp"

namespace intflash {
namespace {

struct Amx : Vec512 {
  static constexpr int kMaxRows = 32;
  static constexpr int kScoreBytes = 1 << 20;
  static constexpr bool kUnsignedKeys = false, kMatrixUnit = true, kOwnLinear = true, kSplitsWeights = false;
  static constexpr int kXOffset = 0;
  using XCode = int8_t;

  // A tile is 16 rows of 64 bytes, so that head_dim is divided into depths of 16 steps.
  static int depth_steps(int64_t head_dim) { return int((head_dim + 63) / 64 * 16); }

  static void begin(int64_t) { begin_rows(16); }
  static void begin_rows(int rows) {  // sets the rows of all tiles but 6, which has 16
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int t = 0; t < 8; ++t)
      if (t != 6) config.rows[t] = uint8_t(rows);
    // gcc's intrinsic claims to read 8 bytes of the 64; this keeps the stores of the others.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  // Tile instructions with the tile as a template argument, because gcc's intrinsics take literals only.
  template <int Tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
  }
  template <int Tile>
  static void load_tile(const void* x, int64_t line) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(x), "r"(line), "i"(Tile));
  }
  template <int Tile>
  static void store_tile(void* x, int64_t line) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(x), "r"(line), "i"(Tile) : "memory");
  }
  // Prefetches the 16 lines of a tile that is to be loaded or stored.
  template <bool Store>
  static inline __attribute__((always_inline)) void prefetch_tile(const void* x, int64_t line) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) __builtin_prefetch(static_cast<const char*>(x) + r * line, Store);
  }
  template <int Sum, int P, int Values>
  static void dot_tile() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(P), "i"(Values));
  }
  template <int Sum, int A, int B>
  static void dot_signed_tile() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
  }
  // Keeps the tile unit awake by a product whose sum is not used, into a tile that is dead at that point. After about
  // 900 cycles (0.35 us) without a tile product the next one holds up the whole core for 0.3 us. All tiles are dead
  // between the products of block().
  template <int Dead = 0>
  static void keep_awake() {
    dot_signed_tile<Dead, 4, 6>();
  }
  // Packs one step of a value panel by one byte permutation of its four rows of 16.
  static bool pack_values(const int8_t* v, int64_t row_step, int64_t rows, int64_t columns, Code* out) {
    const __m512i by_column = _mm512_set_epi32(0x3F2F1F0F, 0x3E2E1E0E, 0x3D2D1D0D, 0x3C2C1C0C, 0x3B2B1B0B, 0x3A2A1A0A,
                                               0x39291909, 0x38281808, 0x37271707, 0x36261606, 0x35251505, 0x34241404,
                                               0x33231303, 0x32221202, 0x31211101, 0x30201000);
    __m512i x = _mm512_setzero_si512();
    if (rows >= 4 && columns >= 16) {
      x = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(v)));
      x = _mm512_mask_broadcast_i32x4(x, 0x00F0, _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + row_step)));
      x = _mm512_mask_broadcast_i32x4(x, 0x0F00, _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + 2 * row_step)));
      x = _mm512_mask_broadcast_i32x4(x, 0xF000, _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + 3 * row_step)));
    } else {
      for (int i = 0; i < 4 && i < rows; ++i)
        x = _mm512_mask_broadcast_i32x4(x, __mmask16(0xF << 4 * i),
                                        _mm_maskz_loadu_epi8(lanes(columns), v + i * row_step));
    }
    _mm512_storeu_si512(out, _mm512_permutexvar_epi8(by_column, x));
    return true;
  }

  // Shifts by an instruction of the shuffles' port, because the other port has the products too.
  static U16 shift6_plan() { return _mm512_set1_epi64(0x322A221A120A023A); }
  static U16 shift6(U16 z, U16 plan) { return _mm512_multishift_epi64_epi8(plan, z); }
  template <int Shift>
  static U16 mantissa(U16 z) {  // the low byte of z << Shift takes bits from below the lane, which the mask drops
    constexpr int64_t first = Shift == 6 ? 0x322A221A120A023A : 0x3129211911090139;
    return mantissa_of<Shift>(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(first), z));
  }

  static bool pack_keys(const int8_t* k, int64_t row_step, int64_t count, int64_t dim, int steps, Code* out) {
    pack_key_panel<0>(k, row_step, 1, count, dim, steps, out);
    return true;
  }

  // Packs four rows of 32 channels into the same step of two panels.
  static void pack_value_pair(const int8_t* v, int64_t row_step, Code* first, Code* second) {
    const auto row = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + i * row_step)); };
    const auto rows = [&](int i) { return _mm512_inserti64x4(_mm512_castsi256_si512(row(i)), row(i + 1), 1); };
    const __m512i by_channel =
        _mm512_set_epi64(  // of each lane's two rows: four channels of the first panel, then of the second
            0x3F1F3E1E3D1D3C1C, 0x2F0F2E0E2D0D2C0C, 0x3B1B3A1A39193818, 0x2B0B2A0A29092808, 0x3717361635153414,
            0x2707260625052404, 0x3313321231113010, 0x2303220221012000);
    const __m512i low = _mm512_permutexvar_epi8(by_channel, rows(0)),
                  high = _mm512_permutexvar_epi8(by_channel, rows(2));
    _mm512_storeu_si512(first, _mm512_unpacklo_epi16(low, high));
    _mm512_storeu_si512(second, _mm512_unpackhi_epi16(low, high));
  }
  // Computes the scores, and updates max[r] with those of the first `whole` panels, each pair while the next is
  // computed.
  static void scores(const Code* q, const Code* k, int steps, int panels, int rows, int32_t* out, int64_t out_ld,
                     I32* max, int whole) {
    const auto update_max = [&](int32_t* s) {
      for (int r = 0; r < rows; ++r, s += out_ld) max[r] = Vec512::max(max[r], Vec512::max(load(s), load(s + 16)));
    };
    int c = 0;
    for (; c + 2 <= whole; c += 2) {
      product<true>(q, 4 * steps, k + int64_t(c) * 64 * steps, 64 * steps, 64, steps, 2, rows, out + 16 * c, out_ld,
                    false);
      if (c) update_max(out + 16 * (c - 2));
    }
    if (c) update_max(out + 16 * (c - 2));
    if (c < panels)
      product<true>(q, 4 * steps, k + int64_t(c) * 64 * steps, 64 * steps, 64, steps, panels - c, rows, out + 16 * c,
                    out_ld, false);
    for (int32_t* s = out + 16 * c; c < whole; ++c, s += 16)
      for (int r = 0; r < rows; ++r) max[r] = Vec512::max(max[r], load(s + r * out_ld));
  }

  static void values(const PCode* p, int64_t p_ld, const Code* v, int64_t v_ld, int steps, int panels, int rows,
                     int32_t* out, int64_t out_ld, bool add) {
    product<false>(p, p_ld, v, v_ld, 64, steps, panels, rows, out, out_ld, add);
  }
  // Reads and writes whole tiles of 16 rows.
  static void linear(const XCode* x, int64_t x_ld, const int8_t* w, int steps, int panels, int rows, int32_t* out,
                     int64_t out_ld) {
    for (; rows > 0; rows -= 32, x += 32 * x_ld, out += 32 * out_ld)
      product<true>(x, x_ld, w, 64, 64 * panels, steps, panels, rows, out, out_ld, false);
  }

 private:
  // Multiplies two tiles of rows by two panels at a time, so that each tile of a panel is loaded once for 32 rows.
  // Panels lie b_ld codes apart, their steps b_line.
  template <bool Signed>
  static void product(const void* a, int64_t a_ld, const Code* b, int64_t b_ld, int64_t b_line, int steps, int panels,
                      int rows, int32_t* out, int64_t out_ld, bool add) {
    const bool two_rows = rows > 16;
    int c = 0;
    for (; c + 2 <= panels; c += 2, b += 2 * b_ld, out += 32) {
      if (two_rows)
        block<Signed, 2, 2>(a, a_ld, b, b_ld, b_line, steps, out, out_ld, add);
      else
        block<Signed, 1, 2>(a, a_ld, b, b_ld, b_line, steps, out, out_ld, add);
    }
    if (c == panels) return;
    if (two_rows)
      block<Signed, 2, 1>(a, a_ld, b, b_ld, b_line, steps, out, out_ld, add);
    else
      block<Signed, 1, 1>(a, a_ld, b, b_ld, b_line, steps, out, out_ld, add);
  }

  // Tiles 0 to 3 hold sums, those of rows r and panel c in tile 2 r + c, tiles 4 and 5 rows, 6 and 7 panels.
  template <bool Signed, int R, int C>
  static inline void block(const void* rows, int64_t a_ld, const Code* b, int64_t b_ld, int64_t b_line, int steps,
                           int32_t* out, int64_t out_ld, bool add) {
    const Code* a = static_cast<const Code*>(rows);
    const int64_t line = 4 * out_ld;
    int32_t* below = out + 16 * out_ld;
    if (add) {
      _tile_loadd(0, out, line);
      if constexpr (C == 2) _tile_loadd(1, out + 16, line);
      if constexpr (R == 2) _tile_loadd(2, below, line);
      if constexpr (R == 2 && C == 2) _tile_loadd(3, below + 16, line);
    } else {
      _tile_zero(0);
      if constexpr (C == 2) _tile_zero(1);
      if constexpr (R == 2) _tile_zero(2);
      if constexpr (R == 2 && C == 2) _tile_zero(3);
    }
    for (int s = 0; s < steps; s += 16) {
      _tile_loadd(4, a + 4 * s, a_ld);
      _tile_loadd(6, b + b_line * s, b_line);
      if constexpr (C == 2) _tile_loadd(7, b + b_ld + b_line * s, b_line);
      if constexpr (R == 2) _tile_loadd(5, a + 16 * a_ld + 4 * s, a_ld);
      if constexpr (Signed) {
        _tile_dpbssd(0, 4, 6);
        if constexpr (C == 2) _tile_dpbssd(1, 4, 7);
        if constexpr (R == 2) _tile_dpbssd(2, 5, 6);
        if constexpr (R == 2 && C == 2) _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbusd(0, 4, 6);
        if constexpr (C == 2) _tile_dpbusd(1, 4, 7);
        if constexpr (R == 2) _tile_dpbusd(2, 5, 6);
        if constexpr (R == 2 && C == 2) _tile_dpbusd(3, 5, 7);
      }
    }
    _tile_stored(0, out, line);
    if constexpr (C == 2) _tile_stored(1, out + 16, line);
    if constexpr (R == 2) _tile_stored(2, below, line);
    if constexpr (R == 2 && C == 2) _tile_stored(3, below + 16, line);
  }
};

}  // namespace
}  // namespace intflash
