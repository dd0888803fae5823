// AMX int8 tiles for the two products; everything else is the 512-bit vector layer.
#pragma once
#include "vec_avx512.hpp"

namespace intflash {
namespace {

struct Amx : Vec512 {
  static constexpr int kUnitRows = 16;
  static constexpr bool kUnsignedKeys = false, kMatrixUnit = true;

  // QK^T takes head_dim in tiles of equal depth: kdepth steps of 4 codes, at most 16.
  static int key_tiles(int64_t head_dim) { return int((head_dim + 63) / 64); }
  static int tile_steps(int64_t head_dim) { return int((head_dim + 4 * key_tiles(head_dim) - 1) / (4 * key_tiles(head_dim))); }
  static int depth_steps(int64_t head_dim) { return key_tiles(head_dim) * tile_steps(head_dim); }

  // Tiles 0-3: sums; 4, 5: Q and K; 6, 7: P and V.
  static void begin(int64_t head_dim) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    const int steps = tile_steps(head_dim);
    config.row_bytes[4] = uint16_t(4 * steps);
    config.rows[5] = uint8_t(steps);
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  static bool pack_keys(const int8_t* k, int64_t row_step, int64_t count, int64_t dim, int steps, Code* out) {
    pack_key_panel<0>(k, row_step, count, dim, steps, out);
    return true;
  }

  static void scores(const Code* q, const Code* k, int steps, int panels, int32_t* out, int64_t out_ld) {
    const int tiles = (steps + 15) / 16, depth = steps / tiles;
    const int64_t row_bytes = 4 * steps, panel = 64 * steps, tile = 64 * depth;
    int p = 0;
    for (; p + 4 <= panels; p += 4, k += 4 * panel, out += 64) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int t = 0; t < tiles; ++t) {
        _tile_loadd(4, q + 4 * depth * t, row_bytes);
        add_keys<0>(k + tile * t);
        add_keys<1>(k + tile * t + panel);
        add_keys<2>(k + tile * t + 2 * panel);
        add_keys<3>(k + tile * t + 3 * panel);
      }
      _tile_stored(0, out, 4 * out_ld);
      _tile_stored(1, out + 16, 4 * out_ld);
      _tile_stored(2, out + 32, 4 * out_ld);
      _tile_stored(3, out + 48, 4 * out_ld);
    }
    for (; p < panels; ++p, k += panel, out += 16) {
      _tile_zero(0);
      for (int t = 0; t < tiles; ++t) {
        _tile_loadd(4, q + 4 * depth * t, row_bytes);
        add_keys<0>(k + tile * t);
      }
      _tile_stored(0, out, 4 * out_ld);
    }
  }

  static void values(const PCode* p, int64_t p_ld, const Code* v, int64_t v_ld, int steps, int panels, int32_t* out,
                     int64_t out_ld, bool add) {
    int c = 0;
    for (; c + 4 <= panels; c += 4, v += 4 * v_ld, out += 64) {
      start<0>(out, out_ld, add);
      start<1>(out + 16, out_ld, add);
      start<2>(out + 32, out_ld, add);
      start<3>(out + 48, out_ld, add);
      for (int s = 0; s < steps; s += 16) {
        _tile_loadd(6, p + 4 * s, p_ld);
        add_values<0>(v + 64 * s);
        add_values<1>(v + 64 * s + v_ld);
        add_values<2>(v + 64 * s + 2 * v_ld);
        add_values<3>(v + 64 * s + 3 * v_ld);
      }
      _tile_stored(0, out, 4 * out_ld);
      _tile_stored(1, out + 16, 4 * out_ld);
      _tile_stored(2, out + 32, 4 * out_ld);
      _tile_stored(3, out + 48, 4 * out_ld);
    }
    for (; c < panels; ++c, v += v_ld, out += 16) {
      start<0>(out, out_ld, add);
      for (int s = 0; s < steps; s += 16) {
        _tile_loadd(6, p + 4 * s, p_ld);
        add_values<0>(v + 64 * s);
      }
      _tile_stored(0, out, 4 * out_ld);
    }
  }

 private:
  // The intrinsics want literal tile numbers.
#define INTFLASH_TILE(C, statement_of) \
  if constexpr (C == 0) statement_of(0); else if constexpr (C == 1) statement_of(1); \
  else if constexpr (C == 2) statement_of(2); else statement_of(3)
#define INTFLASH_ZERO(C) _tile_zero(C)
#define INTFLASH_LOAD(C) _tile_loadd(C, out, 4 * out_ld)
#define INTFLASH_KEYS(C) _tile_dpbssd(C, 4, 5)
#define INTFLASH_VALUES(C) _tile_dpbusd(C, 6, 7)
  template <int C>
  static void start(const int32_t* out, int64_t out_ld, bool add) {
    if (add) {
      INTFLASH_TILE(C, INTFLASH_LOAD);
    } else {
      INTFLASH_TILE(C, INTFLASH_ZERO);
    }
  }
  template <int C>  // sum C += Q times K
  static void add_keys(const Code* k) {
    _tile_loadd(5, k, 64);
    INTFLASH_TILE(C, INTFLASH_KEYS);
  }
  template <int C>  // sum C += P times V
  static void add_values(const Code* v) {
    _tile_loadd(7, v, 64);
    INTFLASH_TILE(C, INTFLASH_VALUES);
  }
#undef INTFLASH_TILE
#undef INTFLASH_ZERO
#undef INTFLASH_LOAD
#undef INTFLASH_KEYS
#undef INTFLASH_VALUES
};

}  // namespace
}  // namespace intflash
