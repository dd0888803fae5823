// Launches of csrc/cuda/sm80/whole_rows.cu, for at most 288 keys on every GPU: whole rows of scores stay in registers.
#include <algorithm>

#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kMostKeys = 288, kWarps = 4;
constexpr int64_t kCtasPerProcessor = 2;   // at least, where heads have enough rows
static_assert(kMostKeys <= kRoundedKeys);  // for intflash_bfp
constexpr int64_t kStaticBytes = 256;      // for the kernel's own variables there

constexpr const char* kSoftmaxes[] = {"ExactP16", "ExactP8", nullptr, "WholeTwoGroups"};  // of each method
const Source kSource = {"sm80/whole_rows.cu",
                        "attention",
                        {{"METHOD", kSoftmaxes},
                         {"HEAD_DIM", nullptr},
                         {"VALUE_DIM", nullptr},
                         {"QUERY", kTypeNames},
                         {"OUT", kTypeNames},
                         {"KEY_MAJOR", nullptr},
                         {"ROW_SCALES", nullptr},
                         {"WARPS", nullptr},
                         {"CTAS_PER_SM", nullptr},
                         {"VALUES_IN_RANGE", nullptr},
                         {"NK", nullptr},
                         {"KEYS", nullptr},
                         {"SCORES", nullptr},
                         {"HEAD_AMAX_IN_KERNEL", nullptr},
                         {"BIAS", nullptr},
                         {"KEEP", nullptr},
                         {"BIAS_FRACTION_BITS", nullptr}}};

int64_t padded_keys(const Problem& p) { return round_up(p.nk(), 32); }

int64_t shared_bytes(const Problem& p) {
  return key_tile_bytes(padded_keys(p), p.head_dim()) + value_tile_bytes(padded_keys(p), p.v.shape[3]);
}

// CTAs per multiprocessor whose scores, accumulators and Q fit the registers; 0 if none does.
int64_t ctas_per_sm(const Problem& p, const Gpu& gpu) {
  const int64_t digits = p.method == Method::kP8 ? 1 : 2;
  int64_t registers = round_up(p.nk(), 16) / 2 + 4 * ceil_div(p.head_dim(), 32);
  if (p.has_two_groups())  // whose accumulators are of few channels at a time; T of biased keys has 64 bits
    registers += p.bias ? 90 : 48;
  else  // ptxas takes more for what it moves ahead where there are many keys and few channels
    registers += digits * round_up(p.v.shape[3], 16) / 2 + (digits == 1 ? 24 : 40) +
                 (p.nk() > 128 && p.v.shape[3] < 64 ? 70 : 0);
  const int64_t by_registers = registers <= 104 ? 4 : registers <= 168 ? 3 : registers <= 256 ? 2 : 0;
  return std::min(by_registers,
                  (gpu.shared_bytes + kReservedBytes) / (shared_bytes(p) + kReservedBytes + kStaticBytes));
}

}  // namespace

bool whole_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  if (p.method == Method::kOnline || p.has_float_query() != p.is_float())
    return why.no([] { return "whole rows are not of intflash_online, and of floats or codes alone"; });
  if (p.key_counts || p.is_causal || p.is_windowed || p.cu_seqlens_q)
    return why.no([] { return "whole rows support neither causal masks and windows nor packed sequences"; });
  for (const Tensor* mask : {&p.bias, &p.keep}) {
    if (*mask && !p.has_two_groups()) return why.no([] { return "whole rows have masks for intflash_bfp only"; });
    if (needs_copy(p, *mask)) return why.no([] { return "whole rows need masks with contiguous keys"; });
  }
  const int64_t d = p.head_dim(), dv = p.v.shape[3], multiple = p.is_float() ? kChannels : 16;
  if (p.nk() > kMostKeys)
    return why.no([&] { return "whole rows hold at most " + number(kMostKeys) + " keys, got " + number(p.nk()); });
  if (d % multiple || dv % multiple)
    return why.no([&] {
      return "whole rows need a head_dim that is a multiple of " + number(multiple) + ", got " + number(d) + " and " +
             number(dv);
    });
  if (needs_copy(p, p.v))
    return why.no([&] {
      return "whole rows need contiguous channels of V, or keys at multiples of 16 bytes, got strides " +
             text_of(p.v.stride);
    });
  if (p.batch() * p.heads() * ceil_div(p.nq(), 16) >= int64_t(1) << 31)
    return why.no([&] { return "takes at most 2^31 tiles of 16 rows, got " + text_of(p.q.shape); });
  if (ctas_per_sm(p, gpu) == 0)
    return why.no([&] { return "registers or shared memory do not hold rows of " + number(p.nk()) + " keys"; });
  return true;
}

// By measurements on an H200, of what short rows do not serve. Long rows compute whole tiles of 128 keys and of 64
// rows, and copy V of codes where a row of it does not have contiguous keys. Of intflash_bfp they are faster with
// floats of a head_dim of 128 that fill their tiles.
bool whole_rows_beat_long_rows(const Problem& p) {
  constexpr int64_t kFewKeys = 224;
  const int64_t d = p.head_dim();
  const bool fills_tiles = p.nk() % kTile == 0;
  if (p.nk() <= kFewKeys) return p.has_two_groups();
  if (!p.has_two_groups()) return p.is_float() ? !fills_tiles && d <= 80 : !needs_copy(p, p.v);
  if (!p.is_float() || p.keep || !fills_tiles) return true;
  return d != 128;
}

void whole_rows_launch(const Attention& a, Launch& launch) {
  const Problem& p = a.p;
  const bool floats = a.is_fused;
  const int64_t heads = p.batch() * p.heads(), tiles = ceil_div(p.nq(), 16);
  // with few heads several CTAs take one, each with a tile of every warp at least
  const int64_t wanted = ceil_div(kCtasPerProcessor * a.gpu.processors, heads);
  const int64_t of_cta = round_up(ceil_div(tiles, std::min(wanted, ceil_div(tiles, kWarps))), kWarps);
  const int64_t parts = ceil_div(tiles, of_cta);
  // where a multiprocessor has one CTA, more warps load its head in less time, although not all have rows
  const bool is_alone = floats && heads * parts <= a.gpu.processors;
  const int64_t warps = is_alone ? 2 * kWarps : kWarps, ctas = is_alone ? 1 : ctas_per_sm(p, a.gpu);
  launch.program = {
      &kSource,
      {int32_t(p.method), int32_t(p.head_dim()), int32_t(p.v.shape[3]), int32_t(a.q.type), int32_t(p.out_type),
       floats || is_key_major(a.v, round_up(p.nk(), 16)), a.has_row_scales(), int32_t(warps), int32_t(ctas),
       floats && p.is_dynamic(), int32_t(p.nk()), int32_t(padded_keys(p)), floats ? 3 : 0, a.head_amax_in_kernel,
       mask_kind(p, p.bias), mask_kind(p, p.keep), p.bias_macro()}};
  ::Share share{};
  share.whole = i32(parts), share.whole_reciprocal = quotient_reciprocal(parts);
  share.heads_reciprocal = quotient_reciprocal(p.heads());
  launch.set_parameters<::Params>() = attention_parameters(a, i32(of_cta), share);
  launch.grid[0] = uint32_t(heads * parts);
  launch.threads = uint32_t(32 * warps);
  launch.shared_bytes = uint32_t(shared_bytes(p));
}

}  // namespace intflash::gpu
