// Launches of csrc/cuda/sm80/few_rows.cu, which splits the keys of few rows over CTAs, on each GPU from compute
// capability 8.0 on.
#include <algorithm>

#include "host/cuda/any_rows.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kTileRows = 16;            // of a tile, which has 16 rows or 8
constexpr int64_t kLeastKeysOfTiles = 4096;  // from which on several tiles of rows of a key head are taken
constexpr int64_t kMostScores = 1 << 24;     // of several tiles, which L2 should hold
constexpr int64_t kCtasPerProcessor = 2;     // where there are enough keys

const Source kSource = source_of("sm80/few_rows.cu", {"TWO_GROUPS", "LANE_ROWS", "SCORES", "STEP", "DITHER"});

int64_t digits(Method method) { return has_p16(method) ? 2 : 1; }

// The rows of a key head, and how few_rows.cu divides them: rows of a tile, of which a lane has one or two.
int64_t rows_of_key_head(const Problem& p) { return p.group() * p.nq(); }
int64_t lane_rows(const Problem& p) { return rows_of_key_head(p) <= kTileRows / 2 ? 1 : 2; }
int64_t tile_rows(const Problem& p) { return kTileRows / 2 * lane_rows(p); }
int64_t row_tiles(const Problem& p) { return ceil_div(rows_of_key_head(p), tile_rows(p)); }
int64_t all_row_tiles(const Problem& p) { return p.batch() * p.k.shape[1] * row_tiles(p); }

// Large tiles are faster, by measurements on an H200; accumulators of two operands of P leave no registers for them.
Tile few_rows_tile(const Problem& p, const Gpu& gpu) {
  const int64_t dv = p.v.shape[3], d = std::max(p.head_dim(), dv);
  const int64_t operands = lane_rows(p) == 1 ? 1 : digits(p.method);  // see softmax.cuh
  const Tile usual{4, 1, 128, d <= 128 ? 4 : 2, 2, 1 + (operands * dv > 256)}, large{8, 1, 256, 3, 2, 1};
  const int64_t stage = std::max(key_tile_bytes(large.keys, p.head_dim()), value_tile_bytes(large.keys, dv));
  if (operands > 1 || d > 128 || large.ctas_per_sm * large.stages * stage > gpu.shared_bytes) return usual;
  return p.fixed.large_tiles == 0 ? usual : large;
}

// Bytes that few_rows.cu has in shared memory for the sums of a CTA's warps, and of a tile of rows in global memory for
// all sums of a step and for the maxima of a split.
int64_t warp_sums_bytes(const Problem& p, const Tile& tile) {
  const int64_t channels = kChunk * ceil_div(ceil_div(p.v.shape[3], kChunk), tile.slices);
  const int64_t sums = digits(p.method) * (channels + 1) + p.has_two_groups();
  return 4 * tile.warps * tile_rows(p) * ((sums + 15) / 32 * 32 + 16);
}
int64_t tile_sums_bytes(const Problem& p) {
  const int64_t channels = padded(p.v.shape[3]);
  return 8 + tile_rows(p) * (p.has_two_groups() ? 8 * (channels + 3) : 4 * digits(p.method) * (channels + 1));
}
int64_t tile_maxima_bytes(const Problem& p) { return 8 * tile_rows(p) * (1 + p.has_two_groups()); }

}  // namespace

bool takes_few_rows(const Problem& p, const Gpu& gpu) {
  if (p.method == Method::kOnline || p.cu_seqlens_q || p.is_windowed || p.key_counts) return false;
  if (p.nk() < kManyKeys) return false;
  if (row_tiles(p) == 1) return true;
  // Other kernels take all keys of a row in one CTA. Where these are few, most of the GPU would be idle.
  const int64_t ctas = p.batch() * p.heads() * ceil_div(p.nq(), 64);
  return p.nk() >= kLeastKeysOfTiles && 2 * std::max(all_row_tiles(p), ctas) <= gpu.processors &&
         p.batch() * p.heads() * p.nq() * p.nk() <= kMostScores;
}

FewRows few_rows(const Problem& p, const Gpu& gpu) {
  const int64_t heads = p.batch() * p.k.shape[1], all_tiles = all_row_tiles(p);
  const int64_t tile = few_rows_tile(p, gpu).keys, tiles = ceil_div(p.nk(), tile);
  // where each of several CTAs on a multiprocessor would have one tile, one that has them all is faster, because a CTA
  // of the next step fits beside it and starts early
  const int64_t places = kCtasPerProcessor * gpu.processors;
  const int64_t ctas = tiles * all_tiles <= places ? gpu.processors : places;
  const int64_t wanted =
      p.fixed.key_splits > 0 ? p.fixed.key_splits : std::max<int64_t>(1, std::min(tiles, ctas / all_tiles));
  const int64_t most = kMostSums / tile;  // tiles of a CTA, whose sums have 32 bits
  FewRows few;
  few.keys = std::min(ceil_div(tiles, wanted), most) * tile, few.splits = ceil_div(p.nk(), few.keys);
  few.score_bytes = heads * rows_of_key_head(p) * padded(p.nk()) * 4;
  few.maximum_bytes = all_tiles * few.splits * tile_maxima_bytes(p);
  few.sum_bytes = all_tiles * tile_sums_bytes(p) * (1 + p.has_two_groups());  // of steps 1 and 2
  return few;
}

void few_rows_launches(const Attention& a, const Choice& choice, Plan& plan) {
  const Problem& p = a.p;
  const FewRows few = few_rows(p, a.gpu);
  const Tile tile = few_rows_tile(p, a.gpu);
  const int64_t key_heads = p.k.shape[1], ctas = all_row_tiles(p), dv = p.v.shape[3];
  ::Params params = attention_parameters(a, 1, {});
  char* const workspace = a.memory.workspace;
  if (p.has_two_groups()) params.valueless = view(valueless_words(p, workspace + choice.valueless));
  params.split = {i32(few.splits),
                  i32(few.keys),
                  i32(p.group()),
                  i32(key_heads),
                  i32(row_tiles(p)),
                  i32(padded(p.nk())),
                  quotient_reciprocal(few.splits),
                  quotient_reciprocal(key_heads),
                  quotient_reciprocal(p.nq()),
                  quotient_reciprocal(row_tiles(p)),
                  reinterpret_cast<i32*>(workspace + choice.key_scores),
                  reinterpret_cast<i64*>(workspace + choice.maxima),
                  workspace + choice.sums};
  const int64_t of_keys = tile.stages * key_tile_bytes(tile.keys, p.head_dim());
  const int64_t of_values =
      std::max(tile.stages * value_tile_bytes(tile.keys, ceil_div(dv, tile.slices)), warp_sums_bytes(p, tile));
  // where the score constants come from: see few_rows.cu
  const int32_t scores = a.constants.score ? 0 : a.head_amax_in_kernel ? 2 : 1;
  // rows i and i + 8, which a lane has, may be of two heads
  const bool has_scores_of_heads = lane_rows(p) == 2 && (scores || a.constants.score.shape[1] > 1);
  const int64_t splits = ctas * few.splits;
  for (int step = 0; step < 2 + p.has_two_groups(); ++step) {
    Launch& launch = plan.next();
    set_macros(a, tile, p.is_causal, kSource,
               {p.has_two_groups(), int32_t(lane_rows(p)), scores, step, dither_macro(p)}, launch.program);
    if (has_scores_of_heads) launch.program.values[kRowScales] = 1;
    launch.set_parameters<::Params>() = params;
    launch.grid[0] = uint32_t(splits), launch.grid[1] = uint32_t(step == 0 ? 1 : tile.slices);
    launch.threads = uint32_t(32 * tile.warps);
    launch.shared_bytes = uint32_t(step == 0 ? of_keys : of_values);
  }
}

}  // namespace intflash::gpu
