// Launches of absmax.cu, head_absmax.cu, quantize_inputs.cu, constants.cu and valueless.cu, which run before the
// attention kernels.
#include <algorithm>
#include <utility>

#include "cpu/arithmetic.hpp"
#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kTokens = 128;     // of a tile of quantize_inputs.cu, one for each of its threads
constexpr int64_t kMostCluster = 8;  // CTAs of a cluster
// What a CTA of a cluster holds in registers, by measurement: tiles, and bytes of a token.
constexpr int64_t kMostTiles = 4, kMostRowBytes = 256;
// Chunks of Q that each of its threads loads: more take longer than a launch that all multiprocessors share.
constexpr int64_t kMostQueryChunks = 64;
constexpr int64_t kChunkBytes = 16;   // of absmax.cu and head_absmax.cu
constexpr int64_t kCtaChunks = 2048;  // that a CTA of these loads at once
constexpr int64_t kMostRounds = 4;    // of them that a CTA of a cluster loads where heads are few
constexpr int64_t kMostCtas = 4;  // of absmax.cu on a multiprocessor, for each tensor: more only add atomic operations
constexpr const char* kUnits[] = {"Octaves", "TableSteps"};

const Source kAbsmax = {
    "absmax.cu", "absmax", {{"PARAMS_BYTES", nullptr}, {"IN", kTypeNames}, {"CTA_CHUNKS", nullptr}}};
const Source kHeadAbsmax = {"head_absmax.cu",
                            "head_absmax",
                            {{"PARAMS_BYTES", nullptr},
                             {"IN", kTypeNames},
                             {"HEAD_DIM", nullptr},
                             {"VALUE_DIM", nullptr},
                             {"CTA_TOKENS", nullptr},
                             {"CLUSTER", nullptr}}};
const Source kQuantize = {"quantize_inputs.cu",
                          "quantize_inputs",
                          {{"PARAMS_BYTES", nullptr},
                           {"IN", kTypeNames},
                           {"HEAD_DIM", nullptr},
                           {"VALUE_DIM", nullptr},
                           {"VALUES_IN_RANGE", nullptr},
                           {"VALUELESS", nullptr},
                           {"KEY_MAJOR", nullptr},
                           {"CLUSTER", nullptr},
                           {"TILES", nullptr}}};
const Source kConstants = {
    "constants.cu",
    "constants",
    {{"PARAMS_BYTES", nullptr}, {"UNIT", kUnits}, {"QMAX", nullptr}, {"GIVEN", nullptr}, {"MOST_E", nullptr}}};
constexpr int32_t kMostOutputExponent = 29;  // numerics.exp.OUTPUT_EXPONENTS
constexpr int32_t kMostGap = 96;             // numerics.groups.MAX_GAP: a row of blocks has its own bound
const Source kValueless = {
    "valueless.cu", "valueless", {{"PARAMS_BYTES", nullptr}, {"HEAD_DIM", nullptr}, {"KEY_MAJOR", nullptr}}};

// The CTAs of quantize_inputs.cu that take a head, and the tiles of 128 tokens of each.
struct ClusterOfHead {
  int64_t tiles, ctas;
};
ClusterOfHead cluster_of_head(int64_t tokens) {
  const int64_t all = ceil_div(tokens, kTokens), tiles = ceil_div(all, kMostCluster);
  return {tiles, ceil_div(all, tiles)};
}

// Channels of a tensor with the zeros that pad its rows to whole chunks.
int64_t chunked_channels(const Tensor& x) { return round_up(x.shape[3], kChunkBytes / x.bytes()); }
int64_t chunks_of_head(const Tensor& x) { return x.shape[2] * chunked_channels(x) * x.bytes() / kChunkBytes; }

// Describes the memory of a tensor with contiguous channels, each element once: adjacent axes are joined, and axes of
// stride 0 are left out.
::Runs runs(const Tensor& x) {
  std::pair<int64_t, int64_t> axes[3], kept[3] = {{0, 1}, {0, 1}, {0, 1}};  // stride, size
  for (int i = 0; i < 3; ++i) axes[i] = {x.stride[i], x.shape[i]};
  std::sort(axes, axes + 3);
  int64_t run = chunked_channels(x);
  int count = 0;
  for (const auto& [stride, size] : axes) {
    if (size == 1 || stride == 0) continue;
    if (count == 0 && stride == run) {
      run *= size;
    } else if (count && stride == kept[count - 1].first * kept[count - 1].second) {
      kept[count - 1].second *= size;
    } else {
      kept[count++] = {stride, size};
    }
  }
  ::Runs r{};
  const int64_t chunks = run * x.bytes() / kChunkBytes;
  r.ptr = reinterpret_cast<const u8*>(x.data);
  for (int i = 0; i < 3; ++i) r.strides[i] = kept[i].first * x.bytes();
  r.count = u32(chunks * kept[0].second * kept[1].second * kept[2].second);
  r.run = u32(chunks);
  r.run_reciprocal = quotient_reciprocal(chunks);
  for (int i = 0; i < 2; ++i) r.sizes[i] = u32(kept[i].second), r.size_reciprocals[i] = quotient_reciprocal(r.sizes[i]);
  return r;
}

}  // namespace

uint64_t packed_score(const Problem& p, float q_scale, float k_scale) {
  const Exponent e =
      exponent_constants(q_scale, k_scale, p.sm_scale, p.method == Method::kOnline ? kTableSteps : kOctaves);
  return uint64_t(e.k) << 32 | e.c;
}

Tensor found_scale(const Problem& p, int which, float* data) {
  const Tensor& x = which == 0 ? p.q : which == 1 ? p.k : p.v;
  const bool heads = p.per_head[which];
  return packed(reinterpret_cast<char*>(data), {heads ? x.shape[0] : 1, heads ? x.shape[1] : 1, 1, 1});
}

int64_t absmax_cluster(const Problem& p, const Gpu& gpu) {
  if (gpu.major < 9) return 0;
  constexpr int64_t kLong = kMostCluster * kMostRounds * kCtaChunks;
  int64_t most = 0, long_heads = 0;  // chunks of a head; heads of more than `kLong`
  const Tensor* const tensors[] = {&p.q, &p.k, &p.v};
  for (int i = 0; i < (p.is_float() ? 3 : 1); ++i) {
    if (!p.per_head[i]) return 0;
    const Tensor& x = *tensors[i];
    most = std::max(most, chunks_of_head(x));
    if (chunks_of_head(x) > kLong) long_heads += x.shape[0] * x.shape[1];
  }
  // where heads are few and long, CTAs of all multiprocessors are to read them
  if (long_heads && long_heads * kMostCluster < gpu.processors) return 0;
  return std::clamp<int64_t>(ceil_div(most, kCtaChunks), 1, kMostCluster);
}

void absmax_launch(const Problem& p, float* scales, uint32_t* zeros, int64_t scale_count, const Gpu& gpu,
                   Launch& launch) {
  Tensor absent = p.q;  // no heads of which a maximum would be wanted
  absent.shape[1] = 0;
  const Tensor* const tensors[] = {&p.q, p.is_float() ? &p.k : &absent, p.is_float() ? &p.v : &absent};
  launch.threads = 256;
  if (p.is_float() && !p.per_head[0] && !p.per_head[1] && !p.per_head[2]) {
    ::AbsmaxParams& params = launch.set_parameters<::AbsmaxParams>();
    u32 most = 0;
    for (int i = 0; i < 3; ++i) params.x[i] = runs(*tensors[i]), most = std::max(most, params.x[i].count);
    params.amax = zeros, params.scales = scales;
    launch.program = {&kAbsmax, {int32_t(sizeof(::AbsmaxParams)), int32_t(p.q.type), int32_t(kCtaChunks)}};
    launch.grid[0] = uint32_t(std::min(ceil_div(most, kCtaChunks), kMostCtas * gpu.processors) * 3);
    return;
  }
  ::HeadAbsmaxParams& params = launch.set_parameters<::HeadAbsmaxParams>();
  const int64_t d = chunked_channels(p.q), dv = chunked_channels(*tensors[2]);
  const int64_t tokens = kCtaChunks * kChunkBytes / (std::max(d, dv) * p.q.bytes());
  int64_t ctas = 0, most_heads = 0, first = 0;
  for (int i = 0; i < 3; ++i) {
    const Tensor& x = *tensors[i];
    const int64_t heads = x.shape[0] * x.shape[1], tiles = ceil_div(x.shape[2], tokens);
    params.x[i] = data_view(x);
    params.tokens[i] = u32(x.shape[2]), params.heads[i] = u32(x.shape[1]), params.all_heads[i] = u32(heads);
    params.first[i] = u32(first), params.per_head[i] = tensors[i] == &absent || p.per_head[i];
    params.tile_reciprocals[i] = quotient_reciprocal(tiles);
    params.head_reciprocals[i] = quotient_reciprocal(x.shape[1]);
    first += params.per_head[i] ? heads : 1;
    ctas = std::max(ctas, tiles * heads), most_heads = std::max(most_heads, heads);
  }
  const int64_t cluster = absmax_cluster(p, gpu);
  params.amax = zeros, params.finished = zeros + (zeros ? scale_count : 0), params.scales = scales;
  launch.program = {&kHeadAbsmax,
                    {int32_t(sizeof(::HeadAbsmaxParams)), int32_t(p.q.type), int32_t(d), int32_t(dv),
                     cluster ? kLeftOut : int32_t(tokens), int32_t(cluster)}};
  launch.grid[0] = uint32_t(3 * (cluster ? most_heads * cluster : ctas));
}

bool quantization_finds_scales(const Problem& p, const Gpu& gpu) {
  if (gpu.major < 9) return false;  // no clusters
  for (int i = 0; i < 3; ++i)
    if (p.scale[i] || !p.per_head[i]) return false;
  const int64_t row_bytes = std::max(p.head_dim(), p.v.shape[3]) * p.q.bytes();
  const ClusterOfHead cluster = cluster_of_head(p.nk());
  return row_bytes <= kMostRowBytes && cluster.tiles <= kMostTiles &&
         chunks_of_head(p.q) <= kMostQueryChunks * kTokens * cluster.ctas * cluster.tiles;
}

void quantize_launch(const Problem& p, const Tensor (&scale)[3], bool finds_scales, const Tensor& k_codes,
                     const Tensor& v_codes, const Tensor& valueless, Launch& launch) {
  ::QuantizeParams& params = launch.set_parameters<::QuantizeParams>();
  const bool floats = p.is_float();
  const Tensor* const tensors[] = {&p.k, &p.v, &p.q};
  for (int i = 0; i < 3; ++i) params.x[i] = data_view(*tensors[i]), params.scales[i] = view(scale[(i + 1) % 3]);
  if (floats) params.codes[0] = data_view(k_codes);
  params.codes[1] = data_view(v_codes);
  params.valueless = reinterpret_cast<u32*>(valueless.data);
  params.tokens = u32(p.nk()), params.heads = u32(p.k.shape[1]), params.batches = u32(p.batch());
  params.queries = u32(p.nq()), params.query_heads = u32(p.heads());
  const int64_t channels = round_up(p.v.shape[3], kChannels);
  const ClusterOfHead cluster = finds_scales ? cluster_of_head(p.nk()) : ClusterOfHead{1, ceil_div(p.nk(), kTokens)};
  launch.program = {
      &kQuantize,
      {int32_t(sizeof(::QuantizeParams)), int32_t(p.v.type), int32_t(round_up(p.head_dim(), kChannels)),
       int32_t(channels), floats && p.is_dynamic(), bool(valueless), p.v.stride[3] == 1 ? kLeftOut : 1,
       finds_scales ? int32_t(cluster.ctas) : kLeftOut, finds_scales ? int32_t(cluster.tiles) : kLeftOut}};
  launch.grid[0] =
      uint32_t((finds_scales ? 3 * p.heads() : (floats ? 2 : 1) * p.k.shape[1]) * p.batch() * cluster.ctas);
  launch.threads = uint32_t(kTokens * cluster.tiles);
  launch.shared_bytes = uint32_t(cluster.tiles * channels * kTokens);
}

void constants_launch(const Problem& p, const Choice& choice, const Tensor (&scale)[3], char* workspace,
                      float* out_scale, Launch& launch) {
  ::ConstantsParams& params = launch.set_parameters<::ConstantsParams>();
  params.q_scale = view(scale[0]), params.k_scale = view(scale[1]), params.v_scale = view(scale[2]);
  params.given = view(p.given_out_scale);
  params.score = reinterpret_cast<i64*>(workspace + choice.score);
  params.sm_scale = p.sm_scale;
  const bool integer = p.has_integer_output();
  int64_t scores = 1, outputs = 1;
  for (int i = 0; i < 4; ++i) {
    scores *= choice.score_shape[i], outputs *= choice.output_shape[i];
    params.score_shape[i] = u32(choice.score_shape[i]), params.output_shape[i] = u32(choice.output_shape[i]);
  }
  if (integer) {
    params.output = reinterpret_cast<i64*>(workspace + choice.output);
    if (!p.given_out_scale) params.out_scale = out_scale;
  }
  params.score_count = u32(scores), params.output_count = integer ? u32(outputs) : 0;
  params.group = u32(p.group());
  launch.program = {&kConstants,
                    {int32_t(sizeof(::ConstantsParams)), p.method == Method::kOnline,
                     p.out_type == OutType::kInt8    ? 127
                     : p.out_type == OutType::kInt16 ? 32767
                                                     : 0,
                     bool(p.given_out_scale), kMostOutputExponent + p.has_two_groups() * kMostGap}};
  launch.grid[0] = uint32_t(ceil_div(std::max(params.score_count, params.output_count), 128));
  launch.threads = 128;
}

Tensor valueless_words(const Problem& p, char* data) {
  const int64_t blocks = p.sequences ? p.nk() / kWordKeys + p.sequences : ceil_div(p.nk(), kWordKeys);
  return packed(data, {p.k.shape[0], p.k.shape[1], 1, blocks * (kWordKeys / 32)});
}

void valueless_launch(const Problem& p, const Tensor& v, const Tensor& words, Launch& launch) {
  ::ValuelessParams& params = launch.set_parameters<::ValuelessParams>();
  const int64_t heads = v.shape[1], blocks = words.shape[3] / (kWordKeys / 32);
  const bool key_major = !p.cu_seqlens_k && is_key_major(v, round_up(v.shape[2], 16));
  params.v = data_view(v);
  params.words = reinterpret_cast<u32*>(words.data);
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.keys = u32(v.shape[2]), params.blocks = u32(blocks), params.heads = u32(heads);
  params.count = u32(p.sequences);
  params.blocks_reciprocal = quotient_reciprocal(blocks), params.heads_reciprocal = quotient_reciprocal(heads);
  launch.program = {&kValueless, {int32_t(sizeof(::ValuelessParams)), int32_t(v.shape[3]), key_major}};
  launch.grid[0] = uint32_t(v.shape[0] * heads * blocks);
  launch.threads = 128;
}

}  // namespace intflash::gpu
