// Launches of csrc/cuda/sm80/any_rows.cu, which serves any number of queries and keys, head_dim to 256, every mask and
// packed sequences on each GPU from compute capability 8.0 on.
#include <algorithm>
#include <initializer_list>

#include "host/cuda/any_rows.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kTableBytes = 32 * 1024;  // of the table of P of `intflash_online`

const Source kSource = source_of("sm80/any_rows.cu", {"PACKED", "WINDOW", "ROW_TILES", "DITHER", "MANY_KEYS"});

// Bytes of the table of P and the stages: TABLE_BYTES + STAGES * STAGE_BYTES of the kernel, for any layout of V.
int64_t shared_bytes(const Problem& p, const Tile& tile) {
  const int64_t stage =
      key_tile_bytes(tile.keys, p.head_dim()) + value_tile_bytes(tile.keys, ceil_div(p.v.shape[3], tile.slices));
  return kTableBytes * (p.method == Method::kOnline) + tile.stages * stage;
}

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

}  // namespace

// A file of csrc/cuda with its macros: those of any_rows.cu and few_rows.cu, then its own.
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

// What DITHER of a kernel says.
int32_t dither_macro(const Problem& p) { return !p.dithers() ? 0 : p.cu_seqlens_q ? 2 : 1; }

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
  return true;
}

void any_rows_launch(const Attention& a, Launch& launch) {
  const Problem& p = a.p;
  const Tile tile = choose_tile(p, a.gpu);
  const int32_t causal = !p.is_causal ? 0 : p.cu_seqlens_q && p.is_bottom_right ? 2 : 1;
  set_macros(a, tile, causal, kSource,
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

}  // namespace intflash::gpu
