// What the host code of any rows and of few rows shares: the macros of both kernels and how a CTA's work is split.
#pragma once
#include <initializer_list>

#include "host/cuda/plan.h"

namespace intflash::gpu {

constexpr int64_t kChunk = 16;      // bytes of a copy, and channels that a row is padded to
constexpr int64_t kManyKeys = 512;  // from which on few_rows.cu is taken
inline int64_t padded(int64_t count) { return round_up(count, kChunk); }

// How the work is split: warps of a CTA, tiles of 16 rows of a warp, keys of a tile, stages, CTAs per multiprocessor,
// CTAs that share the channels of V.
struct Tile {
  int64_t warps = 4, row_tiles = 1, keys = 64, stages = 3, ctas_per_sm = 3, slices = 1;
};

// A file of csrc/cuda with its macros: those of any_rows.cu and few_rows.cu, then its own.
Source source_of(const char* file, std::initializer_list<const char*> own);
constexpr int kRowScales = 6;  // the place of ROW_SCALES

// Sets the macros of a kernel: those of both, then its own.
void set_macros(const Attention& a, const Tile& tile, int32_t causal, const Source& source,
                std::initializer_list<int32_t> own, Program& program);
int32_t dither_macro(const Problem& p);  // what DITHER of a kernel says

}  // namespace intflash::gpu
