// Launches of csrc/cuda/sm80/window.cu, for at most 64 queries and keys: one or more warps per window and head.
#include <algorithm>
#include <cstdlib>

#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kMostTokens = 64;  // queries or keys

const Source kSource = {"sm80/window.cu",
                        "attention",
                        {{"NQ", nullptr},
                         {"NK", nullptr},
                         {"HEAD_DIM", nullptr},
                         {"BITS", nullptr},
                         {"TWO_GROUPS", nullptr},
                         {"IN", kTypeNames},
                         {"OUT", kTypeNames},
                         {"KEY_MAJOR", nullptr},
                         {"PACKED", nullptr},
                         {"ROW_SCALES", nullptr},
                         {"HEAD_AMAX_IN_KERNEL", nullptr},
                         {"BIAS", nullptr},
                         {"KEEP", nullptr},
                         {"WARPS_PER_WINDOW", nullptr},
                         {"TILE_ROWS", nullptr},
                         {"WINDOWS_PER_CTA", nullptr},
                         {"CTAS_PER_SM", nullptr},
                         {"BIAS_FRACTION_BITS", nullptr}}};

// Bytes between the first and the last token of a window, or the largest stride if that is larger.
int64_t span_bytes(const Tensor& x) {
  int64_t most = x.shape[2] * std::abs(x.stride[2]) * x.bytes();
  for (int64_t stride : x.stride) most = std::max(most, std::abs(stride) >> 1);
  return most;
}

bool has_contiguous_keys(const Tensor& v) { return v.is_codes() && v.stride[2] == 1 && v.shape[2] > 1; }

int32_t mask_kind(const Tensor& mask) { return !mask ? 0 : mask.shape[3] > 1 ? 1 : 2; }

// How windows are split: warps per window, rows per tile of a warp (8 or 16), windows per CTA.
struct Split {
  int64_t parts, rows, windows;
  // The number of warps of a window that have rows. A single last row takes nearly as long as a tile.
  int64_t warps(int64_t nq) const {
    const int64_t remainder = nq % 16 == 1;
    return std::min(parts, ceil_div(nq - remainder, rows) + remainder);
  }
};

// Several warps share a window while there are few windows.
Split choose_split(int64_t count, const Fixed& fixed) {
  if (fixed.window_split[0] > 0) return {fixed.window_split[0], fixed.window_split[1], fixed.window_split[2]};
  if (count > 8 * 132) return {1, 16, 1};
  return count > 66 ? Split{4, 16, 1} : Split{8, 8, 1};
}

// The number of warps per multiprocessor whose registers hold K and V as loaded, the scores and 40 other values. Where
// warps share a window, each loads a part of its floats and has few rows: up to head_dim 48, ptxas then needs 128
// registers at most.
int64_t resident_warps(int64_t nk, int64_t d, int64_t itemsize, bool masked, bool shared) {
  if (shared && d <= 48) return 16;
  const int64_t key_tiles = ceil_div(nk, 8), groups = ceil_div(nk, 16), scores = key_tiles * (masked ? 11 : 4);
  const int64_t registers = (key_tiles * d / 16 + groups * ceil_div(d, 32) * 4) * itemsize + scores + 40;
  return registers <= 128 ? 16 : registers <= 168 ? 12 : 8;
}

}  // namespace

bool window_serves(const Problem& p, Refusal& why) {
  if (p.method == Method::kOnline) return why.no([] { return "windows do not support intflash_online"; });
  if (p.key_counts) return why.no([] { return "windows do not support counts of keys"; });
  const int64_t batch = p.batch(), heads = p.heads(), nq = p.nq(), nk = p.nk(), d = p.head_dim(), dv = p.v.shape[3];
  if (std::max(nq, nk) > kMostTokens)
    return why.no([&] {
      return "windows have at most 64 queries and keys, got " + std::to_string(nq) + " and " + std::to_string(nk);
    });
  if (d != dv || d % 16 || d > 64)
    return why.no([&] {
      return "needs one head_dim, a multiple of 16 up to 64, got " + std::to_string(d) + " and " + std::to_string(dv);
    });
  if (p.is_causal) return why.no([] { return "windows do not support a causal mask"; });
  if (batch * heads * heads >= int64_t(1) << 32)
    return why.no(
        [&] { return "indexes at most 2^32 / heads windows and heads, got " + std::to_string(batch * heads); });
  for (const Tensor* x : {&p.q, &p.k, &p.v})
    if (span_bytes(*x) >= int64_t(1) << 31) return why.no([] { return "tokens of a window must lie within 2 GiB"; });
  if (has_contiguous_keys(p.v)) {
    bool aligned = uintptr_t(p.v.data) % 4 == 0 && is_readable(p.v, round_up(nk, 16));
    for (int i = 0; i < 4; ++i) aligned &= p.v.shape[i] == 1 || p.v.stride[i] == 1 || p.v.stride[i] % 4 == 0;
    if (!aligned)
      return why.no([] { return "contiguous keys of V need rows at multiples of 4 bytes, padded to 16 keys"; });
    if (dv * p.v.stride[3] >= int64_t(1) << 32)
      return why.no([&] { return "channels of V must lie within 4 GiB, got strides " + text_of(p.v.stride); });
  }
  for (const Tensor* mask : {&p.bias, &p.keep}) {
    if (!*mask) continue;
    if (mask->shape[3] > 1 && mask->stride[3] != 1) return why.no([] { return "a mask needs contiguous keys"; });
  }
  return true;
}

void window_launch(const Attention& a, Launch& launch) {
  const Problem& p = a.p;
  const int64_t nq = p.nq(), nk = p.nk(), d = p.head_dim(), count = p.batch() * p.heads();
  const Split split = choose_split(count, p.fixed);
  const int64_t parts = split.warps(nq), warps = parts * split.windows;
  const int64_t resident = resident_warps(nk, d, a.q.bytes(), p.bias || p.keep, parts > 1);
  const bool key_major = !a.is_fused && has_contiguous_keys(a.v);
  bool packed = true;
  for (const Tensor* x : {&a.q, &a.k, &a.memory.out, &a.v})
    packed &= (key_major && x == &a.v) || x->stride[2] == d || x->shape[2] == 1;
  launch.program = {&kSource,
                    {int32_t(nq), int32_t(nk), int32_t(d), has_p16(p.method) ? 16 : 8, p.has_two_groups(),
                     int32_t(a.q.type), int32_t(p.out_type), key_major, packed, a.has_row_scales(),
                     a.head_amax_in_kernel, mask_kind(p.bias), mask_kind(p.keep), int32_t(parts), int32_t(split.rows),
                     int32_t(split.windows), int32_t(std::max<int64_t>(1, resident / warps)), p.bias_macro()}};
  launch.grid[0] = uint32_t(ceil_div(count, split.windows));
  launch.threads = uint32_t(32 * warps);
  launch.set_parameters<::Params>() = attention_parameters(a, 1, {});
}

}  // namespace intflash::gpu
