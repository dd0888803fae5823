// AMX's tiles in plain C++, as the intrinsics and inline assembly of cpu/isa/amx.hpp use them for signed products.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace amx_tiles {

struct Tile {
  uint8_t row[16][64];
};
inline Tile tiles[8];

inline void load(int t, const void* x, int64_t line) {
  for (int r = 0; r < 16; ++r) std::memcpy(tiles[t].row[r], static_cast<const char*>(x) + r * line, 64);
}
inline void store(int t, void* x, int64_t line) {
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(x) + r * line, tiles[t].row[r], 64);
}
inline void zero(int t) { tiles[t] = Tile{}; }
template <class A>
void dot(int sum, int a, int b) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) {
      int32_t acc;
      std::memcpy(&acc, tiles[sum].row[r] + 4 * c, 4);
      for (int k = 0; k < 64; ++k) acc += int32_t(A(tiles[a].row[r][k])) * int8_t(tiles[b].row[k / 4][4 * c + k % 4]);
      std::memcpy(tiles[sum].row[r] + 4 * c, &acc, 4);
    }
}

}  // namespace amx_tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadd(t, x, line) amx_tiles::load(t, x, line)
#define _tile_stored(t, x, line) amx_tiles::store(t, x, line)
#define _tile_zero(t) amx_tiles::zero(t)
#define _tile_dpbssd(sum, a, b) amx_tiles::dot<int8_t>(sum, a, b)
#define _tile_dpbusd(sum, a, b) amx_tiles::dot<uint8_t>(sum, a, b)
#define _tile_loadconfig(x) static_cast<void>(x)
#define _tile_release() static_cast<void>(0)
