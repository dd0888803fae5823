#include "host/cuda/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace intflash::gpu {

::View view(const Tensor& x) {
  ::View v{};
  v.ptr = reinterpret_cast<const u8*>(x.data);
  i64* const steps[] = {&v.b, &v.h, &v.n, &v.d};
  for (int i = 0; i < 4; ++i) *steps[i] = !x || x.shape[i] == 1 ? 0 : x.stride[i];
  return v;
}

::View data_view(const Tensor& x) {
  return {reinterpret_cast<const u8*>(x.data), x.stride[0], x.stride[1], x.stride[2], x.stride[3]};
}

std::string text_of(const int64_t (&four)[4]) {
  std::string text = "(";
  for (int i = 0; i < 4; ++i) text += (i ? ", " : "") + std::to_string(four[i]);
  return text + ")";
}

bool is_readable(const Tensor& x, int64_t tokens) {
  int64_t last = std::max<int64_t>(tokens - x.shape[2], 0) * x.stride[2];
  for (int i = 0; i < 4; ++i) last += (x.shape[i] - 1) * x.stride[i];
  return last < x.available;
}

bool is_key_major(const Tensor& v, int64_t keys) {
  if (v.stride[2] != 1 || uintptr_t(v.data) % 16) return false;
  for (int i : {0, 1, 3})
    if (v.shape[i] > 1 && v.stride[i] % 16) return false;
  return is_readable(v, keys);
}

::Params attention_parameters(const Attention& a, int32_t tiles, const ::Share& share) {
  const Problem& p = a.p;
  ::Params t{};
  t.q = data_view(a.q), t.k = data_view(a.k), t.v = data_view(a.v), t.out = data_view(a.memory.out);
  t.score = view(a.constants.score), t.output = view(a.constants.output);
  t.q_scale = view(a.scale[0]), t.k_scale = view(a.scale[1]);
  t.v_scale = view(a.scale[2] ? a.scale[2] : a.constants.v_scale);
  t.bias = view(p.bias), t.keep = view(p.keep), t.valueless = view(a.valueless);
  t.t_max = reinterpret_cast<i64*>(a.memory.t_max), t.l = a.memory.l;
  t.sm_scale = p.sm_scale;
  t.group_reciprocal = reciprocal(p.group());
  t.nq = i32(p.nq()), t.nk = i32(p.nk());
  const int64_t bias_batches = p.bias ? p.bias.shape[0] : 1, keep_batches = p.keep ? p.keep.shape[0] : 1;
  t.bias_batches = i32(bias_batches), t.keep_batches = i32(keep_batches);
  t.causal = p.is_causal ? i32(p.causal_offset) : 0;
  t.window_start = p.is_windowed ? i32(p.window_start) : 0;
  t.tiles = tiles;
  t.count = i32(p.sequences ? p.sequences : p.batch() * p.heads()), t.heads = i32(p.heads());
  t.head_reciprocal = reciprocal(p.heads());
  t.bias_reciprocal = bias_batches == p.batch() ? 0 : reciprocal(bias_batches);
  t.keep_reciprocal = keep_batches == p.batch() ? 0 : reciprocal(keep_batches);
  t.share = share;
  t.cu_seqlens_q = p.cu_seqlens_q, t.cu_seqlens_k = p.cu_seqlens_k;
  return t;
}

bool set_tensor_maps(Launch& launch, const Tensor& k, const Tensor& v, int64_t groups, int64_t width, int64_t lane) {
  std::memset(&launch.maps, 0, sizeof launch.maps);  // the padding too, so that equal plans have equal bytes
  // A map lists the dimensions of a box in the order of shared memory, so that TMA permutes the rows: K's as
  // `score_row` orders each 16 keys, and those of V^T as `value_row` orders the channels
  // (csrc/cuda/sm90/wgmma_layout.cuh). The second coordinate of K is the row at which a head begins, so that heads may
  // have any number of keys. Keys past the last whole group are copied as zeros.
  {
    const int64_t b = k.shape[0] > 1 ? k.stride[0] : 0, h = k.shape[1] > 1 ? k.stride[1] : 0, row = k.stride[2];
    if (k.stride[3] != 1 || row % 16 || k.shape[2] < 16 || row == 0 || b % row || h % row) return false;
    const int64_t batch = b / row, head = h / row;
    const int64_t rows = (k.shape[0] - 1) * batch + (k.shape[1] - 1) * head + 2;
    if (rows >= int64_t(1) << 31) return false;
    launch.k_map = {{uint64_t(k.shape[3]), uint64_t(rows), 4, 2, uint64_t(k.shape[2] / 16)},
                    {uint64_t(row), uint64_t(4 * row), uint64_t(2 * row), uint64_t(16 * row)},
                    {uint32_t(width), 2, 4, 2, uint32_t(groups)},
                    int(width),
                    k.data};
    launch.maps.k_batch = i32(batch), launch.maps.k_head = i32(head);
  }
  const int64_t b = v.shape[0] > 1 ? v.stride[0] : 0, h = v.shape[1] > 1 ? v.stride[1] : 0, channel = v.stride[3];
  const int64_t d = v.shape[3], matrix = h ? h : b ? b : d * channel;
  if (v.stride[2] != 1 || channel % 16 || matrix == 0 || b % matrix || matrix % 16) return false;
  const int64_t batch = b / matrix, head = h / matrix;
  const int64_t matrices = (v.shape[0] - 1) * batch + (v.shape[1] - 1) * head + 1;
  launch.v_map = {{uint64_t(v.shape[2]), 2, uint64_t(d / lane), uint64_t(lane / 2), uint64_t(matrices)},
                  {uint64_t(channel), uint64_t(lane * channel), uint64_t(2 * channel), uint64_t(matrix)},
                  {128, 2, 4, uint32_t(lane / 2), 1},
                  128,
                  v.data};
  launch.maps.v_batch = i32(batch), launch.maps.v_head = i32(head);
  return true;
}

namespace {

// Rows of K's codes, and of V's with contiguous keys, are padded with zeros to multiples of so many keys.
constexpr int64_t kKeyPadding = 16, kValuePadding = 128;
constexpr int64_t kAlignment = 256;  // of parts of the workspace

// Whether kernels index this many heads, rows this far apart, and masks that repeat so often.
bool is_within_limits(const Problem& p, Refusal& why) {
  if (p.heads() > kGridLimit)
    return why.no([&] {
      return "takes at most 65535 heads, got " + std::to_string(p.heads()) +
             ": move independent heads to the batch axis";
    });
  const std::pair<const Tensor*, const char*> tensors[] = {
      {&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}, {&p.bias, "bias"}, {&p.keep, "keep"}};
  for (const auto& [x, name] : tensors) {
    if (*x && x->shape[2] * std::abs(x->stride[2]) >= int64_t(1) << 31)
      return why.no([x = x, name = name] {
        return std::string("rows of ") + name + " must lie within 2^31 elements, got strides " + text_of(x->stride);
      });
    const bool is_mask = x == &p.bias || x == &p.keep;
    if (!is_mask && x->shape[2] > 1 && std::abs(x->stride[2]) * x->bytes() >= int64_t(1) << 31)
      return why.no([x = x, name = name] {
        return std::string("tokens of ") + name + " must be less than 2^31 bytes apart, got strides " +
               text_of(x->stride);
      });
    // beyond, the quotient by the reciprocal that finds a mask's batch is not exact
    if (is_mask && *x && x->shape[0] < p.batch() && p.batch() * x->shape[0] >= int64_t(1) << 32)
      return why.no([&, x = x] {
        return "a mask of " + std::to_string(x->shape[0]) + " batches repeats over at most 2^32 in all, got " +
               std::to_string(p.batch());
      });
  }
  return true;
}

// From so many keys on, few rows of floats are left to few_rows.cu, although a pass has to quantize their K and V.
constexpr int64_t kManyFloatKeys = 4096;

// Why none of the kernels for particular shapes serves the problem is left in `why`.
bool find_particular_kernel(const Problem& p, const Gpu& gpu, Kernel& kernel, Refusal& why) {
  if (p.has_float_query() && !p.is_float() && p.head_dim() % 16)
    return why.no([&] {
      return "beside float Q the codes of K and V need a head_dim that is a multiple of 16, got " +
             std::to_string(p.head_dim());
    });
  // long rows would read K and V for each query head, in one CTA, and a copy of V's codes
  if (p.fixed.kernel < 0 && p.nk() >= (p.is_float() ? kManyFloatKeys : 0) && takes_few_rows(p, gpu))
    return why.no([] { return "few rows over many keys have a kernel of their own"; });
  const auto is_wanted = [&](Kernel k) { return p.fixed.kernel < 0 || p.fixed.kernel == int(k); };
  if (p.fixed.kernel >= 0 && is_for_any_shape(Kernel(p.fixed.kernel)))
    return why.no([] { return "its kernels for particular shapes were not wanted"; });
  if (p.cu_seqlens_q) return why.no([] { return "its kernels for particular shapes do not support packed sequences"; });
  if (p.is_windowed) return why.no([] { return "its kernels for particular shapes do not support sliding windows"; });
  if (!is_aligned(p.q, "q", why) || !is_aligned(p.k, "k", why) || !is_aligned(p.v, "v", why, true)) return false;
  // these quantize all of Q, K and V or nothing
  if (Refusal ignored; p.has_float_query() == p.is_float()) {
    if (is_wanted(Kernel::kWindow) && window_serves(p, ignored)) return kernel = Kernel::kWindow, true;
    if (has_short_rows(p.method) && is_wanted(Kernel::kShortRows) && short_rows_serve(p, gpu, ignored))
      return kernel = Kernel::kShortRows, true;
  }
  if (p.fixed.kernel == int(Kernel::kWholeRows)) return kernel = Kernel::kWholeRows, whole_rows_serve(p, gpu, why);
  Refusal ignored;
  const bool is_whole = is_wanted(Kernel::kWholeRows) && whole_rows_serve(p, gpu, ignored);
  if (is_whole && whole_rows_beat_long_rows(p)) return kernel = Kernel::kWholeRows, true;
  if (long_rows_serve(p, gpu, why)) return kernel = Kernel::kLongRows, true;
  return kernel = Kernel::kWholeRows, is_whole;
}

// K's codes of a workspace, with rows padded to 16 codes.
Tensor key_codes(const Problem& p, const Choice& c, char* workspace) {
  const int64_t row = round_up(p.head_dim(), 16);
  Tensor x = packed(workspace + c.key_codes, {p.k.shape[0], p.k.shape[1], round_up(p.nk(), kKeyPadding), row});
  x.shape[2] = p.nk(), x.shape[3] = p.head_dim();
  x.type = OutType::kInt8;
  return x;
}

// Whether a kernel other than long rows finds the scales of each head itself, instead of a pass over all heads before:
// by measurement on an H200, while a CTA does not read too many rows of Q that others compute.
bool finds_scales_in_kernel(const Problem& p, Kernel kernel) {
  if (kernel == Kernel::kWindow) return true;
  if (p.fixed.head_amax_in_kernel >= 0) return bool(p.fixed.head_amax_in_kernel);
  return p.nq() <= kMostSearchedQueries || (kernel == Kernel::kShortRows && short_rows_cluster(p) > 1);
}

void set_constant_shapes(const Problem& p, const Tensor (&scale)[3], Choice& c) {
  const int64_t heads = p.heads();
  const auto heads_of = [&](const Tensor& s) { return s.shape[1] > 1 ? heads : 1; };
  c.score_shape[0] = std::max(scale[0].shape[0], scale[1].shape[0]);
  c.score_shape[1] = std::max(scale[0].shape[1], heads_of(scale[1]));
  c.score_shape[2] = scale[0].shape[2], c.score_shape[3] = 1;
  for (int i = 0; i < 4; ++i) c.output_shape[i] = 1;
  if (!p.has_integer_output()) return;
  c.output_shape[0] = scale[2].shape[0], c.output_shape[1] = heads_of(scale[2]);
  if (p.given_out_scale)
    for (int i = 0; i < 4; ++i) c.output_shape[i] = std::max(c.output_shape[i], p.given_out_scale.shape[i]);
}

}  // namespace

int64_t numel(const int64_t (&shape)[4]) { return shape[0] * shape[1] * shape[2] * shape[3]; }

Tensor packed(char* data, const int64_t (&shape)[4]) {
  Tensor x;
  x.data = data;
  int64_t step = 1;
  for (int i = 3; i >= 0; step *= shape[i--]) x.shape[i] = shape[i], x.stride[i] = step;
  return x;
}

Tensor value_codes(const Problem& p, const Choice& c, char* workspace) {
  const int64_t batch = p.k.shape[0], heads = p.k.shape[1], nk = p.nk(), d = p.v.shape[3];
  const int64_t row = round_up(nk, kValuePadding), channels = round_up(d, 16);
  Tensor v = packed(workspace + c.value_codes, {batch, heads, channels, row});
  v.shape[2] = nk, v.shape[3] = d, v.stride[2] = 1, v.stride[3] = row;
  v.type = OutType::kInt8;
  v.available = batch * heads * channels * row;
  return v;
}

bool is_aligned(const Tensor& x, const char* name, Refusal& why, bool may_have_contiguous_keys) {
  if (may_have_contiguous_keys && x.is_codes() && x.stride[2] == 1 && x.stride[3] != 1 && x.shape[2] > 1) return true;
  bool aligned = x.stride[3] == 1 && uintptr_t(x.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) aligned &= x.shape[i] == 1 || x.stride[i] * x.bytes() % 16 == 0;
  return aligned || why.no([&] {
    return std::string(name) + " needs contiguous channels and tokens at multiples of 16 bytes, got strides " +
           text_of(x.stride);
  });
}

bool has_short_rows(Method method) { return method != Method::kOnline; }

bool find_kernel(const Problem& p, const Gpu& gpu, Kernel& kernel, Refusal& why) {
  if (!is_within_limits(p, why)) return false;
  if (p.given_out_scale && p.given_out_scale.shape[3] > 1)
    return why.no([] { return "out_scale must not differ between channels"; });
  Refusal particular{why.wanted, {}};
  if (find_particular_kernel(p, gpu, kernel, particular)) return true;
  if (any_rows_serve(p, gpu, why)) return kernel = takes_few_rows(p, gpu) ? Kernel::kFewRows : Kernel::kAnyRows, true;
  why.text = particular.text + "; " + why.text;
  return false;
}

bool needs_copy(const Problem& p, const Tensor& x) {
  if (&x == &p.bias || &x == &p.keep) return x && x.shape[3] > 1 && x.stride[3] != 1;
  if (&x == &p.v && !p.cu_seqlens_q && x.is_codes() && is_key_major(x, round_up(x.shape[2], 16))) return false;
  bool is_whole = x.stride[3] == 1 && x.shape[3] % (x.is_codes() ? 16 : 8) == 0 && uintptr_t(x.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) is_whole &= x.shape[i] == 1 || x.stride[i] * x.bytes() % 16 == 0;
  return !is_whole;
}

bool choose(const Problem& p, const Gpu& gpu, Choice& c, Refusal& why) {
  c = {};
  if (!find_kernel(p, gpu, c.kernel, why)) return false;
  if (is_for_any_shape(c.kernel) && !p.has_copies)
    for (const Tensor* x : {&p.q, &p.k, &p.v, &p.bias, &p.keep})
      if (needs_copy(p, *x)) return why.no([] { return "some tensors need copies for 16-byte accesses"; });
  const auto place = [&](int64_t bytes) {
    const int64_t at = c.bytes;
    c.parts[c.part_count++] = {at, bytes};
    c.bytes += round_up(bytes, kAlignment);
    return at;
  };
  const auto place_constants = [&] {
    const auto scale = [&](int i) { return p.scale[i] ? p.scale[i] : found_scale(p, i, nullptr); };
    set_constant_shapes(p, {scale(0), scale(1), scale(2)}, c);
    c.score = place(8 * numel(c.score_shape));
    if (p.has_integer_output()) c.output = place(8 * numel(c.output_shape));
  };
  if (p.only_constants) return c.fills_constants = true, place_constants(), true;
  const bool is_long = c.kernel == Kernel::kLongRows;
  const bool is_whole = c.kernel == Kernel::kWholeRows;
  const bool quantizes_keys = c.kernel == Kernel::kWindow || c.kernel == Kernel::kShortRows || is_whole;  // of floats
  c.copies_values = is_long && !p.is_float() && !is_key_major(p.v, round_up(p.nk(), 16));
  const bool is_few = c.kernel == Kernel::kFewRows;
  c.scores_in_kernel =
      p.has_float_query() && !p.has_integer_output() && !p.ready_score && (is_long || (is_few && !p.is_float()));
  c.fuses_keys = p.is_float() && (quantizes_keys || (is_long && long_rows_quantize_keys(p, gpu)));
  if (p.is_dynamic()) {
    const bool heads = p.per_head[0] && (!p.is_float() || (p.per_head[1] && p.per_head[2]));
    const bool finds_all = c.fuses_keys && !p.has_integer_output() &&
                           (is_long ? long_rows_find_scales(p, gpu) : finds_scales_in_kernel(p, c.kernel));
    c.head_amax_in_kernel = heads && (p.is_float() ? finds_all : is_few && c.scores_in_kernel && p.nq() == 1);
    c.scales_in_quantization = p.is_float() && !c.fuses_keys && quantization_finds_scales(p, gpu);
    c.finds_scales = !c.head_amax_in_kernel && !c.scales_in_quantization;
  }
  c.fills_constants = (!(c.fuses_keys || c.scores_in_kernel) || p.has_integer_output()) && !p.ready_score;
  const bool finds_them_itself = quantizes_keys || is_few || (is_long && c.fuses_keys);
  c.finds_valueless = p.has_two_groups() && !finds_them_itself;
  if (c.finds_scales || c.scales_in_quantization || ((is_long || is_whole) && c.head_amax_in_kernel)) {
    for (int i = 0; i < 3; ++i)
      if (!p.scale[i]) c.scale_count += numel(found_scale(p, i, nullptr).shape);
    c.scales = place(4 * c.scale_count);
    if (c.finds_scales && !absmax_cluster(p, gpu)) c.zeros = {place(8 * c.scale_count), 8 * c.scale_count};
  }
  const int64_t key_heads = p.k.shape[0] * p.k.shape[1];
  if (p.is_float() && !c.fuses_keys)
    c.key_codes = place(key_heads * round_up(p.nk(), kKeyPadding) * round_up(p.head_dim(), 16));
  if (c.copies_values || (p.is_float() && !c.fuses_keys))
    c.value_codes = place(key_heads * round_up(p.v.shape[3], 16) * round_up(p.nk(), kValuePadding));
  if (c.fills_constants) place_constants();
  if (c.finds_valueless || (is_few && p.has_two_groups()))
    c.valueless = place(4 * numel(valueless_words(p, nullptr).shape));
  if (is_few) {
    const FewRows few = few_rows(p, gpu);
    c.key_scores = place(few.score_bytes), c.maxima = place(few.maximum_bytes), c.sums = place(few.sum_bytes);
  }
  return true;
}

void fill_plan(const Problem& p, const Choice& c, const Memory& memory, const Gpu& gpu, Plan& plan) {
  plan.count = 0;
  char* const workspace = memory.workspace;
  Attention a{p, memory, p.q, p.k, p.v, p.has_float_query(), c.head_amax_in_kernel, {}, {}, {}, gpu};
  Tensor scale[3] = {p.scale[0], p.scale[1], p.scale[2]};
  if (c.scale_count) {
    float* const found = reinterpret_cast<float*>(workspace + c.scales);
    float* next = found;
    for (Tensor& s : scale)
      if (!s) s = found_scale(p, int(&s - scale), next), next += numel(s.shape);
    uint32_t* const zeros = c.zeros.bytes ? reinterpret_cast<uint32_t*>(workspace + c.zeros.offset) : nullptr;
    if (c.finds_scales) absmax_launch(p, found, zeros, c.scale_count, gpu, plan.next());
  }
  if (c.finds_valueless) a.valueless = valueless_words(p, workspace + c.valueless);
  const auto quantize_inputs = [&] {
    if (p.is_float()) a.k = key_codes(p, c, workspace);
    a.v = value_codes(p, c, workspace);
    quantize_launch(p, scale, c.scales_in_quantization, a.k, a.v, a.valueless, plan.next());
  };
  if (c.scales_in_quantization) quantize_inputs();
  if (c.fills_constants) {
    constants_launch(p, c, scale, workspace, memory.out_scale, plan.next());
    a.constants.score = packed(workspace + c.score, c.score_shape);
    if (p.has_integer_output()) a.constants.output = packed(workspace + c.output, c.output_shape);
    if (p.only_constants) return;
  } else if (p.ready_score) {
    a.constants.score = p.ready_score, a.constants.output = p.ready_output;
  }
  if (!a.constants.output) a.constants.v_scale = scale[2];
  if (c.copies_values || (p.is_float() && !c.fuses_keys && !c.scales_in_quantization)) quantize_inputs();
  if (p.has_float_query()) {
    a.scale[0] = scale[0];
    if (c.fuses_keys || c.scores_in_kernel) a.scale[1] = scale[1];
    if (c.fuses_keys) a.scale[2] = scale[2];
  }
  if (c.finds_valueless && !p.is_float() && !c.copies_values) valueless_launch(p, a.v, a.valueless, plan.next());
  switch (c.kernel) {
    case Kernel::kWindow: window_launch(a, plan.next()); break;
    case Kernel::kShortRows: short_rows_launch(a, plan.next()); break;
    case Kernel::kLongRows: long_rows_launch(a, plan.next()); break;
    case Kernel::kWholeRows: whole_rows_launch(a, plan.next()); break;
    case Kernel::kFewRows: few_rows_launches(a, c, plan); break;
    case Kernel::kAnyRows: any_rows_launch(a, plan.next()); break;
  }
}

}  // namespace intflash::gpu
