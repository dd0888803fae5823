// Launches of csrc/cuda/sm80/attention.cu and few_rows.cu, which serve any number of queries and keys, head_dim to 256,
// every mask and packed sequences on each GPU from compute capability 8.0 on.
#include <algorithm>
#include <initializer_list>

#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kChunk = 16;               // bytes of a copy, and channels that a row is padded to
constexpr int64_t kTileRows = 16;            // of few_rows.cu, whose tile has 16 rows or 8
constexpr int64_t kManyKeys = 512;           // from which on few_rows.cu is taken
constexpr int64_t kLeastKeysOfTiles = 4096;  // from which on it takes several tiles of rows of a key head
constexpr int64_t kMostScores = 1 << 24;     // of several tiles, which L2 should hold
constexpr int64_t kCtasPerProcessor = 2;     // of few_rows.cu, at least, where there are enough keys
constexpr int64_t kTableBytes = 32 * 1024;   // of the table of P of `intflash_online`

// A file of csrc/cuda with its macros: those of attention.cu and few_rows.cu, then its own.
Source source_of(const char* file, std::initializer_list<const char*> own) {
  Source source = {file,
                   "attention",
                   {{"METHOD", kMethodNames},
                    {"HEAD_DIM", nullptr},
                    {"VALUE_DIM", nullptr},
                    {"QUERY", kTypeNames},
                    {"OUT", kTypeNames},
                    {"KEY_MAJOR", nullptr},
                    {"ROW_SCALES", nullptr},
                    {"BIAS", nullptr},
                    {"KEEP", nullptr},
                    {"WARPS", nullptr},
                    {"KEYS", nullptr},
                    {"STAGES", nullptr},
                    {"SLICES", nullptr},
                    {"CTAS_PER_SM", nullptr},
                    {"VALUES_IN_RANGE", nullptr},
                    {"CAUSAL", nullptr},
                    {"BIAS_FRACTION_BITS", nullptr}}};
  int count = source.count();
  for (const char* name : own) source.macros[count++] = {name, nullptr};
  return source;
}
const Source kAnyRowsSource = source_of("sm80/attention.cu", {"PACKED", "WINDOW", "ROW_TILES", "DITHER", "MANY_KEYS"});
const Source kFewRowsSource = source_of("sm80/few_rows.cu", {"TWO_GROUPS", "LANE_ROWS", "SCORES", "STEP", "DITHER"});
constexpr int kRowScales = 6;  // the place of ROW_SCALES

int64_t padded(int64_t count) { return round_up(count, kChunk); }

// How the work is split: warps of a CTA, tiles of 16 rows of a warp, keys of a tile, stages, CTAs per multiprocessor,
// CTAs that share the channels of V.
struct Tile {
  int64_t warps = 4, row_tiles = 1, keys = 64, stages = 3, ctas_per_sm = 3, slices = 1;
};

// Bytes of the table of P and the stages: TABLE_BYTES + STAGES * STAGE_BYTES of the kernel, for any layout of V.
int64_t shared_bytes(const Problem& p, const Tile& tile) {
  const int64_t stage =
      key_tile_bytes(tile.keys, p.head_dim()) + value_tile_bytes(tile.keys, ceil_div(p.v.shape[3], tile.slices));
  return kTableBytes * (p.method == Method::kOnline) + tile.stages * stage;
}

// What DITHER of a kernel says.
int32_t dither_macro(const Problem& p) { return !p.dithers() ? 0 : p.cu_seqlens_q ? 2 : 1; }

// Chooses the tile, by measurements on an H100, whose registers and shared memory suffice on the GPU. Two tiles of rows
// share what a warp reads of K and V; one leaves registers for masks and for P16's two digits. These have registers for
// two tiles up to 63 channels, which is faster from 40 on where there are enough CTAs.
Tile choose_tile(const Problem& p, const Gpu& gpu) {
  if (const int64_t (&t)[6] = p.fixed.tile; t[0] > 0) return {t[0], t[1], t[2], t[3], t[4], t[5]};
  const int64_t dv = p.v.shape[3], d = std::max(p.head_dim(), dv);
  const bool is_masked = p.bias || p.keep;
  // three CTAs where ptxas does not spill registers
  const int64_t three = p.is_causal || gpu.major >= 12 ? 2 : 3;
  if (p.method == Method::kOnline) {
    Tile tile{4, 1, 128, 2, d > 96 ? 1 : 2, 1 + (d > 128)};
    if (d > 96 && shared_bytes(p, tile) > gpu.shared_bytes) tile.slices *= 2;
    return tile;
  }
  // a row's sums have 64 bits
  if (p.has_many_keys()) return {4, 1, 64, 2, 2, ceil_div(dv, 64)};
  if (p.method == Method::kP8) {
    if (d > 128) return {4, 1, 32, 3, 2, 1};
    if (p.bias || (is_masked && d > 64)) return {4, 1, 64, 3, d <= 64 ? three : 2, 1};
    if (d > 64 && p.nk() <= kManyKeys) return {4, 1, 32, 3, three, 1};
    return {4, 2, 32, 3, d <= 64 ? three : 2, 1};
  }
  if (d > 128) return {4, 1, 32, 3, 2, 2};
  const Tile two{4, 2, 32, 3, 2, 1};
  const int64_t ctas = p.batch() * p.heads() * (p.nq() / (16 * two.row_tiles * two.warps));
  if (32 < d && d < 64 && !is_masked && ctas >= two.ctas_per_sm * gpu.processors) return two;
  Tile tile{4, 1, 64, 3, d > 64 || p.bias ? 2 : three, 1};
  const int64_t together = tile.ctas_per_sm * (shared_bytes(p, tile) + kReservedBytes);
  if (d > 96 && together > gpu.shared_bytes + kReservedBytes) tile.keys = 32;
  return tile;
}

// Sets the macros of a kernel: those of both, then its own.
void set_macros(const Attention& a, const Tile& tile, int32_t causal, const Source& source,
                std::initializer_list<int32_t> own, Program& program) {
  const Problem& p = a.p;
  const bool is_packed = p.cu_seqlens_q;
  program = {&source,
             {int32_t(p.method), int32_t(round_up(p.head_dim(), kChannels)), int32_t(p.v.shape[3]), int32_t(a.q.type),
              int32_t(p.out_type), !is_packed && is_key_major(a.v, padded(p.nk())), a.has_row_scales(),
              mask_kind(p, p.bias), mask_kind(p, p.keep), int32_t(tile.warps), int32_t(tile.keys), int32_t(tile.stages),
              int32_t(tile.slices), int32_t(tile.ctas_per_sm), a.is_fused && p.is_dynamic(), causal, p.bias_macro()}};
  std::copy(own.begin(), own.end(), program.values + source.count() - own.size());
}

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

bool repeats_masks_exactly(const Problem& p, Refusal& why) {
  for (const Tensor* mask : {&p.bias, &p.keep})
    // beyond, the quotient by the reciprocal is not exact
    if (*mask && mask->shape[0] < p.batch() && p.batch() * mask->shape[0] >= int64_t(1) << 32)
      return why.no([&] {
        return "a mask of " + std::to_string(mask->shape[0]) + " batches repeats over at most 2^32 in all, got " +
               std::to_string(p.batch());
      });
  return true;
}

int32_t mask_kind(const Problem& p, const Tensor& mask) {
  if (!mask) return 0;
  if (mask.shape[3] == 1) return 2;
  const int64_t bytes = &mask == &p.bias ? 4 : 1;
  bool whole = !p.cu_seqlens_q && mask.shape[3] % 4 == 0 && uintptr_t(mask.data) % (4 * bytes) == 0;
  for (int i = 0; i < 3; ++i) whole &= mask.shape[i] == 1 || mask.stride[i] % 4 == 0;
  return whole ? 4 : 1;
}

int64_t key_tile_bytes(int64_t keys, int64_t d) { return keys * 16 * (2 * ceil_div(d, 32) + 1); }

int64_t value_tile_bytes(int64_t keys, int64_t channels) {
  const int64_t chunks = ceil_div(channels, 16);
  return std::max(16 * chunks * (keys + 16), keys * 16 * (chunks | 1));
}

bool takes_few_rows(const Problem& p, const Gpu& gpu) {
  if (p.nk() < kManyKeys || p.method == Method::kOnline || p.cu_seqlens_q || p.is_windowed) return false;
  if (row_tiles(p) == 1) return true;
  // Other kernels take all keys of a row in one CTA. Where these are few, most of the GPU would be idle.
  const int64_t ctas = p.batch() * p.heads() * ceil_div(p.nq(), 64);
  return p.nk() >= kLeastKeysOfTiles && 2 * std::max(all_row_tiles(p), ctas) <= gpu.processors &&
         p.batch() * p.heads() * p.nq() * p.nk() <= kMostScores;
}

bool any_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  const int64_t d = p.head_dim(), dv = p.v.shape[3], rows = p.nq(), batch = p.batch();
  if (p.key_counts) return why.no([] { return "any rows do not support counts of keys"; });
  if (p.method == Method::kOnline && p.bias) return why.no([] { return "intflash_online has no bias"; });
  if (std::max(d, dv) > 256)
    return why.no([&] { return "takes at most 256 channels, got " + number(d) + " and " + number(dv); });
  if (batch * p.heads() * ceil_div(rows, 16) >= int64_t(1) << 31)
    return why.no([&] { return "takes at most 2^31 tiles of 16 rows, got " + text_of(p.q.shape); });
  const int64_t needed = shared_bytes(p, choose_tile(p, gpu));
  if (needed > gpu.shared_bytes)
    return why.no([&] {
      return "head_dim " + number(d) + " needs " + number(needed) + " bytes of shared memory, this GPU has " +
             number(gpu.shared_bytes);
    });
  return repeats_masks_exactly(p, why);
}

void any_rows_launch(const Attention& a, Launch& launch) {
  const Problem& p = a.p;
  const Tile tile = choose_tile(p, a.gpu);
  const int32_t causal = !p.is_causal ? 0 : p.cu_seqlens_q && p.is_bottom_right ? 2 : 1;
  set_macros(a, tile, causal, kAnyRowsSource,
             {bool(p.cu_seqlens_q), p.is_windowed, int32_t(tile.row_tiles), dither_macro(p), p.has_many_keys()},
             launch.program);
  // each packed sequence may end within a tile
  const int64_t tiles = ceil_div(p.nq(), 16 * tile.row_tiles * tile.warps) + p.sequences;
  ::Share share{};
  share.whole_reciprocal = quotient_reciprocal(tiles), share.heads_reciprocal = quotient_reciprocal(p.heads());
  launch.set_parameters<::Params>() = attention_parameters(a, i32(tiles), share);
  launch.grid[0] = uint32_t(p.batch() * p.heads() * tiles);
  launch.grid[1] = uint32_t(tile.slices);
  launch.threads = uint32_t(32 * tile.warps);
  launch.shared_bytes = uint32_t(shared_bytes(p, tile));
}

FewRows few_rows(const Problem& p, const Gpu& gpu) {
  const int64_t heads = p.batch() * p.k.shape[1], all_tiles = all_row_tiles(p);
  const int64_t tile = few_rows_tile(p, gpu).keys, tiles = ceil_div(p.nk(), tile);
  const int64_t wanted = p.fixed.key_splits > 0
                             ? p.fixed.key_splits
                             : std::max<int64_t>(1, std::min(tiles, kCtasPerProcessor * gpu.processors / all_tiles));
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
    set_macros(a, tile, p.is_causal, kFewRowsSource,
               {p.has_two_groups(), int32_t(lane_rows(p)), scores, step, dither_macro(p)}, launch.program);
    if (has_scores_of_heads) launch.program.values[kRowScales] = 1;
    launch.set_parameters<::Params>() = params;
    launch.grid[0] = uint32_t(splits), launch.grid[1] = uint32_t(step == 0 ? 1 : tile.slices);
    launch.threads = uint32_t(32 * tile.warps);
    launch.shared_bytes = uint32_t(step == 0 ? of_keys : of_values);
  }
}

}  // namespace intflash::gpu
