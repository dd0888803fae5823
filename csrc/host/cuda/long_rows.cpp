// Launches of csrc/cuda/sm90/long_rows.cu, which streams tiles of keys through shared memory.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>
#include <vector>

#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kSharedBytes = 227 * 1024;      // available to a CTA
constexpr int64_t kTableBytes = 32 * 1024;        // of the table of P of `intflash_online`
constexpr int64_t kStagingBytes = 2 * 16 * 1024;  // of floats that wait in shared memory to be quantized
constexpr int64_t kMaximaBytes = 3 * 16 * 4;      // of the maxima that each of up to 16 warps finds
// Times of 1, 2, ... of two or three warpgroups relative to that of all, measured.
constexpr double kWarpgroupTimes[2][3] = {{0.8, 1.0, 0}, {0.57, 0.78, 1.0}};
constexpr double kOutputTime = 0.1;  // part of that time that 64 rows' output takes
// To quantize a tile of K and V whose keys have 64 bytes of shared memory each, by all warpgroups of a CTA or beside
// its consumers.
constexpr double kQuantizeTileUs = 0.6;
// A separate quantization pass: its least time, and its rate at 3 bytes per element.
constexpr double kPassLeastUs = 4.0, kPassTbS = 4.0;
// To find the scales of a head: the rate of a CTA while all others read too, and the least time and the rate of a pass
// over all heads.
constexpr double kScanTbS = 0.053, kScalesLeastUs = 0.8, kScalesTbS = 6.0;

const Source kSource = {"sm90/long_rows.cu",
                        "attention",
                        {{"METHOD", kMethodNames},
                         {"TWO_GROUPS", nullptr},
                         {"HEAD_DIM", nullptr},
                         {"CONSUMERS", nullptr},
                         {"CAUSAL", nullptr},
                         {"ROW_SCALES", nullptr},
                         {"KEY_SCALES", nullptr},
                         {"QUERY", kTypeNames},
                         {"VALUE", kTypeNames},
                         {"OUT", kTypeNames},
                         {"TMA", nullptr},
                         {"P_SHARED", nullptr},
                         {"P_TABLE", nullptr},
                         {"STAGES", nullptr},
                         {"KV_RESIDENT", nullptr},
                         {"FLOAT_KV", nullptr},
                         {"VALUES_IN_RANGE", nullptr},
                         {"TENSOR_DIM", nullptr},
                         {"KEY_COUNTS", nullptr},
                         {"KEY_MASK", nullptr},
                         {"HEAD_AMAX_IN_KERNEL", nullptr},
                         {"REMAINDER_KEY_TILES", nullptr},
                         {"MANY_KEYS", nullptr}}};

// The kernel pads head_dim to a multiple of 16.
int64_t padded_channels(int64_t d) { return round_up(d, 16); }

// Whether P has two digits below the exact maximum of a row.
bool has_exact_p16(const Problem& p) { return p.method == Method::kP16 || p.has_two_groups(); }

// What TWO_GROUPS of a kernel says.
int32_t two_groups_macro(const Problem& p) { return p.has_two_groups() ? 1 + p.dithers() : 0; }

bool uses_p_table(const Problem& p) { return p.method == Method::kOnline; }

bool p_in_shared(const Problem& p, int64_t consumers) { return consumers == 3 && p.head_dim() > 96 && uses_p_table(p); }

// Bytes of P, where it goes through shared memory, of floats that wait to be quantized and of their maxima, and of the
// table of P.
int64_t extra_shared_bytes(const Problem& p, int64_t consumers, bool floats) {
  return 64 * consumers * kTile * p_in_shared(p, consumers) + floats * (kStagingBytes + kMaximaBytes) +
         uses_p_table(p) * kTableBytes;
}

// floats: of K and V, whose keys without a value the kernel marks in a byte for each key.
int64_t shared_bytes(const Problem& p, int64_t consumers, bool floats, int64_t stages) {
  const int64_t d = padded_channels(p.head_dim());
  return long_rows_shared_bytes(d, consumers, kTile * d, kTile * (floats && p.has_two_groups()), stages,
                                extra_shared_bytes(p, consumers, floats));
}

// The number of ring stages that fit in shared memory.
int64_t most_stages(const Problem& p, int64_t consumers, bool floats) {
  const int64_t one = shared_bytes(p, consumers, floats, 1), two = shared_bytes(p, consumers, floats, 2);
  return 1 + (kSharedBytes - one) / (two - one);
}

// Whether quantizing floats on the way leaves the consumers as many registers as TMA does.
bool light_quantization(int64_t d) { return d == 64; }

// The number of consumer warpgroups, as many as registers allow. light_loads: the producer needs few registers, as with
// TMA; rows: each row has its own scale.
int64_t consumers_of(const Problem& p, int64_t d, bool light_loads, bool rows) {
  if (has_exact_p16(p)) return 32 < d && d <= 64 && light_loads && !rows ? 3 : 2;
  if (p.method == Method::kP8) return d <= 96 || d == 128 ? 3 : 2;
  if (rows) return d <= (p.is_causal ? 64 : 80) ? 3 : 2;
  return d <= 96 || !p.is_causal ? 3 : 2;
}

// Whether K and V of a head can be resident in shared memory.
bool fits_resident(const Problem& p, int64_t stages) { return !p.is_causal && ceil_div(p.nk(), kTile) <= stages; }

// Whether K and V of a head should be resident where they fit, by measurement. They are faster for int8 Q, which is
// loaded during the previous output. Loading float Q takes more time than they save where there are at most two tiles
// of keys. With one pass over the keys they save nothing where no stage is left to load the next head ahead of time.
// With two passes over keys that are not resident, the first begins at the first tile that arrives. That is worth more
// where several CTAs share a head, unless a row of K is padded in shared memory.
bool is_faster_resident(const Problem& p, const Tensor& q, int64_t stages, int64_t processors) {
  const int64_t tiles = ceil_div(p.nk(), kTile), d = padded_channels(p.head_dim());
  if (p.method != Method::kOnline && tiles > 2 && d == key_width(d) && 2 * p.batch() * p.heads() <= processors)
    return false;
  return q.is_codes() || (tiles > 2 && (p.method != Method::kOnline || tiles < stages));
}

// Whether all ranges of two consumer warpgroups run at once. Ranges of three would leave more multiprocessors idle.
bool two_consumers_suffice(const Problem& p, int64_t processors) {
  return !p.is_causal && p.batch() * p.heads() * ceil_div(p.nq(), 2 * 64) <= processors;
}

// Whether the last rows of a head, at most 8, have the code path of long_rows_remainder.cuh, with K/V resident in
// shared memory. Registers hold the scores with 5 tiles of keys, from a head_dim of 64 on.
bool has_remainder_rows(const Problem& p) {
  const int64_t rows = p.nq() % 64;
  return p.fixed.remainder != 0 && 1 <= rows && rows <= 8 && (p.method == Method::kP8 || has_exact_p16(p)) &&
         !p.key_counts && !p.keep && padded_channels(p.head_dim()) >= 64 && 1 <= p.nk() && p.nk() <= 5 * kTile;
}

// The tiles of 64 rows that each CTA takes with K/V resident in shared memory. A CTA takes consecutive tiles, so that
// it loads few heads. Loading a head of floats takes as long as computing a tile or two: a CTA then takes whole heads,
// or tiles of a single head, where that costs it few more tiles.
Schedule schedule_resident_heads(const Problem& p, bool floats, int64_t processors) {
  const int64_t heads = p.batch() * p.heads();
  int64_t tiles = ceil_div(p.nq(), 64), ctas = std::min(heads * tiles, processors);
  int64_t each = heads * tiles / ctas, more = heads * tiles % ctas;
  if (floats && heads <= processors) {
    int64_t parts = processors / heads;
    const int64_t of_one = ceil_div(tiles, parts);
    if (of_one <= each + 1) {
      parts = ceil_div(tiles, of_one);
      ctas = heads * parts, tiles = parts * of_one, each = of_one, more = 0;
    }
  } else if (floats) {
    const int64_t whole = ceil_div(heads, processors);
    if (whole * tiles <= each + 2) ctas = ceil_div(heads, whole), each = whole * tiles, more = 0;
  }
  ::Share share{};
  share.whole = i32(tiles), share.rest_tiles = i32(each);
  share.whole_of_all = share.pieces = u32(heads * tiles);
  share.first = u32(more);
  share.whole_reciprocal = quotient_reciprocal(tiles);
  share.heads_reciprocal = quotient_reciprocal(p.heads());
  return {ctas, share};
}

// Whether heads begin where CTAs do.
bool is_in_step(const ::Share& share) {
  const i32 each = share.rest_tiles, tiles = share.whole;
  return share.first == 0 && (tiles % each == 0 || each % tiles == 0);
}

// The number of whole ranges of a head, tiles of 64 rows in a smaller range, and the first CTA that takes smaller ones.
struct RangeSplit {
  int64_t whole, tiles, first;
};

// Returns the split that finishes first when `processors` multiprocessors take ranges round robin.
RangeSplit find_range_split(int64_t nq, int64_t heads, int64_t consumers, int64_t processors) {
  const int64_t rows = 64 * consumers, most = nq / rows;
  const double* const times = kWarpgroupTimes[consumers - 2];
  const bool total_decides = heads * (most + 1) > 32 * processors;  // with this much work, as it is shared evenly
  std::vector<double> rest, ends;
  bool found = false;
  RangeSplit best{};
  double least = 0;
  for (int64_t whole = most; whole >= (most > 8 ? most - 3 : 0); --whole)
    for (int64_t tiles = consumers; tiles > 0; --tiles) {
      const int64_t left = nq - rows * whole;
      rest.assign(size_t(left / (64 * tiles)), times[tiles - 1]);
      if (const int64_t last = left % (64 * tiles))  // of several smaller ranges, a full one finishes last
        rest.push_back(times[ceil_div(last, 64) - 1] - kOutputTime * double(std::max<int64_t>(64 - last, 0)) / 64);
      const int64_t ranges = heads * (whole + ceil_div(left, 64 * tiles));
      for (const int64_t first : {heads * whole % std::min(ranges, processors), int64_t(0)}) {
        double cost;
        if (total_decides) {
          if (first != 0) continue;
          cost = 0;
          for (double time : rest) cost += time;
          cost += double(whole);
        } else {
          const int64_t ctas = std::min(heads * (whole + int64_t(rest.size())), processors);
          ends.assign(size_t(ctas), double(heads * whole / ctas));
          for (int64_t i = 0; i < heads * whole % ctas; ++i) ends[size_t(i)] += 1;
          const int64_t count = heads * int64_t(rest.size());
          for (int64_t i = 0; i < count; ++i) ends[size_t(first + i % (ctas - first))] += rest[size_t(i) % rest.size()];
          cost = *std::max_element(ends.begin(), ends.end());
        }
        if (!found || cost < least) found = true, least = cost, best = {whole, tiles, first};
      }
    }
  return best;
}

// The search takes tens of microseconds, so that its results are kept. Callers hold Python's global lock.
RangeSplit choose_range_split(int64_t nq, int64_t heads, int64_t consumers, int64_t processors) {
  static auto& known = *new std::map<std::tuple<int64_t, int64_t, int64_t, int64_t>, RangeSplit>;
  const auto key = std::tuple(nq, heads, consumers, processors);
  const auto at = known.find(key);
  if (at != known.end()) return at->second;
  if (known.size() >= 4096) known.clear();
  return known[key] = find_range_split(nq, heads, consumers, processors);
}

// Whether every CTA quantizes its heads in less time than a separate pass over K and V takes. The times were measured.
bool quantizing_is_faster(const Problem& p, int64_t processors) {
  const int64_t batch = p.k.shape[0], heads = p.k.shape[1], nk = p.nk(), d = p.k.shape[3];
  const ::Share share = schedule_resident_heads(p, true, processors).share;
  const int64_t loaded = ceil_div(share.rest_tiles, share.whole) + !is_in_step(share);
  return double(loaded * ceil_div(nk, kTile) * key_width(d)) / 64 * kQuantizeTileUs <
         kPassLeastUs + 6e-6 * double(batch) * double(heads) * double(nk) * double(d) / kPassTbS;
}

// Whether the byte offsets between a head's tokens fit in 32 bits.
bool offsets_fit_32_bits(const Tensor& x) { return x.shape[2] * std::abs(x.stride[2]) * x.bytes() < int64_t(1) << 31; }

// Whether the kernel pads head_dim to a multiple of 16 itself. The quantization pass writes rows of codes that are
// padded, and a thread stores its channels of the output in words of at most 16 bytes.
bool pads_channels(const Problem& p) { return p.is_float() && !p.has_integer_output() && p.head_dim() >= 40; }

// Whether the kernel can read the bool mask: it reads four keys at once.
bool is_key_mask(const Problem& p, Refusal& why) {
  const Tensor& keep = p.keep;
  const int64_t keys = p.nk();
  bool one_for_all = true;
  for (int i : {1, 2}) one_for_all &= keep.shape[i] == 1 || keep.stride[i] == 0;
  if (!one_for_all || keep.shape[3] != keys || p.is_causal)
    return why.no([&] {
      return "long rows take bool masks of keys alone and without causal ones, got shape " + text_of(keep.shape);
    });
  if (keys % 4 || keep.stride[3] != 1 || uintptr_t(keep.data) % 4 || (keep.shape[0] > 1 && keep.stride[0] % 4))
    return why.no([&] {
      return "long rows read four keys of a bool mask at once, got " + std::to_string(keys) + " keys and strides " +
             text_of(keep.stride);
    });
  if (keep.shape[0] * keep.stride[0] >= int64_t(1) << 32)
    return why.no([&] {
      return "masks of keys must lie within 4 GiB, got shape " + text_of(keep.shape) + " and strides " +
             text_of(keep.stride);
    });
  return true;
}

}  // namespace

bool is_long_rows_shape(const Problem& p, int64_t multiple, Refusal& why) {
  const int64_t d = p.head_dim(), dv = p.v.shape[3];
  return (d == dv && d % multiple == 0 && d <= 128) || why.no([&] {
    return "needs one head_dim, a multiple of " + std::to_string(multiple) + " up to 128, got " + std::to_string(d) +
           " and " + std::to_string(dv);
  });
}

int64_t long_rows_shared_bytes(int64_t d, int64_t consumers, int64_t value_bytes, int64_t scale_bytes, int64_t stages,
                               int64_t extra) {
  const int64_t stage = round_up(kTile * key_width(d) + value_bytes, 1024) + scale_bytes + 16;
  return stages * stage + 64 * consumers * key_width(d) + extra;
}

// The ranges that the tile scheduler hands out: `consumers` tiles of 64 rows each, then the rows that remain of each
// head, in smaller ranges. The kernel is persistent: a CTA takes one range after another. With a causal mask, where
// ranges take different times, each range has its own CTA, the longest first.
Schedule schedule_ranges(const Problem& p, int64_t consumers, const Gpu& gpu) {
  const int64_t heads = p.batch() * p.heads(), nq = p.nq(), rows = 64 * consumers;
  const int64_t processors = gpu.processors, *const fixed = p.fixed.range_split;
  const RangeSplit split = p.is_causal     ? RangeSplit{ceil_div(nq, rows), 1, 0}
                           : fixed[0] >= 0 ? RangeSplit{fixed[0], fixed[1], fixed[2]}
                                           : choose_range_split(nq, heads, consumers, processors);
  const int64_t rest = ceil_div(std::max<int64_t>(nq - rows * split.whole, 0), 64 * split.tiles);
  const int64_t whole_of_all = heads * split.whole, ranges = heads * (split.whole + rest);
  ::Share share{};
  share.whole = i32(split.whole), share.rest = i32(rest), share.rest_tiles = i32(split.tiles);
  share.whole_of_all = u32(whole_of_all), share.pieces = u32(ranges), share.first = u32(split.first);
  share.whole_reciprocal = quotient_reciprocal(split.whole);
  share.rest_reciprocal = quotient_reciprocal(rest);
  share.heads_reciprocal = quotient_reciprocal(p.heads());
  return {p.is_causal ? ranges : std::min(ranges, processors), share};
}

bool long_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why) {
  if (!gpu.is_hopper()) return why.no([] { return kHopperOnly; });
  if (p.keep && !is_key_mask(p, why)) return false;
  if (!is_long_rows_shape(p, pads_channels(p) ? 8 : 16, why)) return false;
  return !p.bias || why.no([] { return "long rows do not support bias"; });
}

// Whether the kernel quantizes the problem's float K and V itself: 16-bit floats, with K/V resident in shared memory.
// Where their scales would take a pass before, one that quantizes them too takes less time, by measurement.
bool long_rows_quantize_keys(const Problem& p, const Gpu& gpu) {
  const int64_t d = padded_channels(p.head_dim());
  if (p.q.bytes() != 2 || d == 16) return false;  // 16: registers would spill
  if (!offsets_fit_32_bits(p.k) || !offsets_fit_32_bits(p.v)) return false;
  const int64_t consumers = consumers_of(p, d, light_quantization(d), false);
  const int64_t stages = most_stages(p, consumers, true);
  if (!fits_resident(p, stages)) return false;
  if (p.fixed.fuses_keys >= 0) return bool(p.fixed.fuses_keys);
  const bool finds_scales = long_rows_find_scales(p, gpu) && !p.has_integer_output();
  if (p.is_dynamic() && !finds_scales && quantization_finds_scales(p, gpu)) return false;
  return quantizing_is_faster(p, gpu.processors);
}

// Whether the kernel that quantizes K and V finds the scales of their heads and Q's itself, by measurement: the
// producer finds those of a CTA's second head and later ones while the consumers compute, the first one's take the time
// of all.
bool long_rows_find_scales(const Problem& p, const Gpu& gpu) {
  if (!offsets_fit_32_bits(p.q)) return false;
  if (p.fixed.head_amax_in_kernel >= 0) return bool(p.fixed.head_amax_in_kernel);
  const int64_t heads = p.batch() * p.heads();
  if (!is_in_step(schedule_resident_heads(p, true, gpu.processors).share)) return heads >= 2 * gpu.processors;
  const double head_bytes = 2.0 * double(p.nq() + 2 * p.nk()) * double(p.head_dim());
  return head_bytes / (1e6 * kScanTbS) < kScalesLeastUs + double(heads) * head_bytes / (1e6 * kScalesTbS);
}

void long_rows_launch(const Attention& a, Launch& launch) {
  const Problem& p = a.p;
  const bool floats = !a.k.is_codes(), rows = a.has_row_scales();
  const int64_t own = p.head_dim(), d = padded_channels(own);
  Tensor k = a.k, v = a.v;
  if (!floats) k.shape[3] = v.shape[3] = d;                        // rows of codes are padded
  if (!floats && p.is_float()) k.shape[2] = round_up(p.nk(), 16);  // their keys too, where the call made them
  launch.has_maps =
      !floats && k.shape[2] % 16 == 0 && set_tensor_maps(launch, k, v, kTile / 16, key_width(d), lane_channels(int(d)));
  const bool light = floats ? light_quantization(d) : launch.has_maps && d == own;
  int64_t consumers = p.fixed.consumers < 0 ? consumers_of(p, d, light, rows) : p.fixed.consumers;
  const int64_t most = most_stages(p, consumers, floats);
  const bool is_faster =
      p.fixed.resident < 0 ? is_faster_resident(p, a.q, most, a.gpu.processors) : bool(p.fixed.resident);
  const bool resident = floats || (fits_resident(p, most) && is_faster);
  if (p.fixed.consumers < 0 && !resident && two_consumers_suffice(p, a.gpu.processors)) consumers = 2;
  const int64_t stages = resident ? most : kStages;
  launch.program = {&kSource,
                    {int32_t(p.method),
                     two_groups_macro(p),
                     int32_t(d),
                     int32_t(consumers),
                     p.is_causal,
                     rows,
                     0,
                     int32_t(a.q.type),
                     int32_t(OutType::kInt8),
                     int32_t(p.out_type),
                     launch.has_maps,
                     p_in_shared(p, consumers),
                     uses_p_table(p),
                     int32_t(stages),
                     resident,
                     floats,
                     a.is_fused && p.is_dynamic(),
                     d == own ? kLeftOut : int32_t(own),
                     p.key_counts ? 1 : kLeftOut,
                     p.keep ? 1 : kLeftOut,
                     floats && a.head_amax_in_kernel ? 1 : kLeftOut,
                     resident && has_remainder_rows(p) ? int32_t(ceil_div(p.nk(), kTile)) : kLeftOut,
                     p.has_many_keys() ? 1 : kLeftOut}};
  const Schedule schedule =
      resident ? schedule_resident_heads(p, floats, a.gpu.processors) : schedule_ranges(p, consumers, a.gpu);
  launch.grid[0] = uint32_t(schedule.ctas);
  launch.threads = uint32_t(128 * (consumers + 1));
  launch.shared_bytes = uint32_t(shared_bytes(p, consumers, floats, stages));
  ::Params& params = launch.set_parameters<::Params>() = attention_parameters(a, 1, schedule.share);
  if (p.key_counts) params.keep.ptr = reinterpret_cast<const u8*>(p.key_counts.data);
}

}  // namespace intflash::gpu
