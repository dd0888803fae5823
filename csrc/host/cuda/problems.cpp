// Plans of problems for GPUs: of a `Problem` of problem.py, as src/intflash/backends/cuda/backend.py brings it. Python
// has made the copies that kernels need, and runs the launches.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "host/cuda/call.h"
#include "host/module.h"

namespace intflash {
namespace {

// A tensor's memory. Of a tensor without memory ("meta") the address is a made-up one.
TorchTensor tensor(nb::handle x) {
  TorchTensor t;
  if (!torch_library.describe(x, t)) nb::raise_python_error();
  if (t.is_meta) t.data = reinterpret_cast<char*>(uintptr_t(1) << 39);
  return t;
}

OutType type_of(int32_t dtype) {
  for (int i = 0; i < 5; ++i)
    if (dtype == number_of(OutType(i))) return OutType(i);
  throw std::invalid_argument("a tensor of another type than int8, int16, float16, bfloat16 and float32");
}

// A tensor of four axes.
gpu::Tensor four_axes(nb::handle x, OutType type = OutType::kFloat32) {
  if (x.is_none()) return {};
  const TorchTensor t = tensor(x);
  if (t.axes != 4) throw std::invalid_argument("a tensor has " + std::to_string(t.axes) + " axes, not 4");
  gpu::Tensor found;
  found.data = t.data, found.type = type;
  for (int i = 0; i < 4; ++i) found.shape[i] = t.shape[i], found.stride[i] = t.stride[i];
  return found;
}

// Codes or floats, with what they have of memory.
gpu::Tensor values(nb::handle x) {
  const OutType type = type_of(tensor(x).dtype);
  gpu::Tensor found = four_axes(x, type);
  if (type == OutType::kInt8) found.available = torch_library.bytes_left(tensor(x), 1);
  return found;
}

const int32_t* cu_seqlens_of(nb::handle x, int64_t& sequences, bool is_planned) {
  if (x.is_none()) return nullptr;
  const TorchTensor t = tensor(x);
  if (is_planned && (t.dtype != torch_library.dtype.int32 || t.axes != 1 || t.stride[0] != 1))
    throw std::invalid_argument("cu_seqlens must be int32 in contiguous memory");
  sequences = t.shape[0] - 1;
  return reinterpret_cast<const int32_t*>(t.data);
}

Method method_of(nb::handle name) {
  const std::string given = nb::cast<std::string>(name);
  for (size_t i = 0; i < std::size(gpu::kMethods); ++i)
    if (given == gpu::kMethods[i]) return Method(i);
  throw std::invalid_argument("method '" + given + "' has no plan");
}

int kernel_of(nb::handle name) {
  const std::string given = nb::cast<std::string>(name);
  for (size_t i = 0; i < std::size(gpu::kKernelNames); ++i)
    if (given == gpu::kKernelNames[i]) return int(i);
  throw std::invalid_argument("no kernel is named '" + given + "'");
}

OutType out_type_of(nb::handle dtype) {
  for (int i = 0; i < 5; ++i)
    if (dtype.ptr() == out_dtypes[i]) return OutType(i);
  throw std::invalid_argument("no type of an output");
}

gpu::Gpu gpu_of(nb::handle given) {
  const auto at = [&](int i) { return nb::cast<int64_t>(given[i]); };
  return {int(at(0)), int(at(1)), int(at(2)), at(3)};
}

// Choices that tests fix, by name: numbers, tuples of them, or the name of a kernel.
gpu::Fixed fixed_of(nb::dict given) {
  gpu::Fixed f;
  const std::pair<const char*, int*> numbers[] = {
      {"exp_32bit", &f.exp_32bit}, {"cluster", &f.cluster},       {"consumers", &f.consumers},
      {"resident", &f.resident},   {"fuses_keys", &f.fuses_keys}, {"head_amax_in_kernel", &f.head_amax_in_kernel},
      {"remainder", &f.remainder}, {"key_splits", &f.key_splits}, {"large_tiles", &f.large_tiles}};
  struct Several {
    const char* name;
    int64_t* to;
    size_t count;
  };
  const Several tuples[] = {{"window_split", f.window_split, std::size(f.window_split)},
                            {"row_split", f.row_split, std::size(f.row_split)},
                            {"range_split", f.range_split, std::size(f.range_split)},
                            {"tile", f.tile, std::size(f.tile)}};
  for (const auto& [key, value] : given) {
    const std::string name = nb::cast<std::string>(key);
    bool is_known = name == "kernel";
    if (is_known) f.kernel = kernel_of(value);
    for (const auto& [known, to] : numbers)
      if (name == known) *to = nb::cast<int>(value), is_known = true;
    for (const auto& [known, to, count] : tuples) {
      if (name != known) continue;
      const nb::tuple found = nb::cast<nb::tuple>(value);
      if (found.size() != count) throw std::invalid_argument(name + " has " + std::to_string(count) + " numbers");
      for (size_t i = 0; i < count; ++i) to[i] = nb::cast<int64_t>(found[i]);
      is_known = true;
    }
    if (!is_known) throw std::invalid_argument("no choice '" + name + "' can be fixed");
  }
  return f;
}

// Reads all of a Problem but the scales of floats. With `is_planned` false only what the choice of a kernel depends on
// is checked.
gpu::Problem read(nb::handle problem, nb::dict fixed, bool is_planned) {
  gpu::Problem p;
  p.method = method_of(problem.attr("method"));
  gpu::Tensor* const to[3] = {&p.q, &p.k, &p.v};
  const char* const names[3] = {"q", "k", "v"};
  for (int i = 0; i < 3; ++i) {
    const nb::object x = problem.attr(names[i]);
    const bool is_codes = nb::hasattr(x, "granularity");
    *to[i] = values(is_codes ? nb::object(x.attr("data")) : x);
    if (is_codes) p.scale[i] = four_axes(x.attr("scale"));
    if (is_codes != to[i]->is_codes()) throw std::invalid_argument("codes have scales, and floats none");
  }
  if (!has_served_types(p))
    throw std::invalid_argument("Q, K and V are codes, floats of one type, or float Q beside codes");
  p.sm_scale = nb::cast<double>(problem.attr("sm_scale"));
  p.bias = four_axes(problem.attr("bias")), p.keep = four_axes(problem.attr("keep"));
  p.bias_fraction_bits = nb::cast<int>(problem.attr("bias_fraction_bits"));
  const nb::object causal = problem.attr("causal"), start = problem.attr("window_start");
  p.is_causal = !causal.is_none(), p.is_windowed = !start.is_none();
  if (p.is_causal) p.causal_offset = nb::cast<int64_t>(causal);
  if (p.is_windowed) p.window_start = nb::cast<int64_t>(start);
  p.is_bottom_right = nb::cast<std::string>(problem.attr("causal_align")) == "bottom_right";
  p.cu_seqlens_q = cu_seqlens_of(problem.attr("cu_seqlens_q"), p.sequences, is_planned);
  p.cu_seqlens_k = cu_seqlens_of(problem.attr("cu_seqlens_k"), p.sequences, is_planned);
  p.out_type = out_type_of(problem.attr("out_dtype"));
  p.given_out_scale = four_axes(problem.attr("out_scale"));
  p.fixed = fixed_of(fixed);
  return p;
}

// Why the scales of K and V do not fit, or an empty text.
std::string scale_refusal(const gpu::Problem& p, nb::handle problem) {
  const nb::object recipe = problem.attr("recipe");
  std::string kinds[2];
  for (int i = 0; i < 2; ++i) {
    const char* const name = i ? "v" : "k";
    kinds[i] = nb::cast<std::string>(p.is_float() ? recipe.attr(name) : problem.attr(name).attr("granularity"));
  }
  for (const std::string& kind : kinds)
    if (kind != "tensor" && kind != "head")
      return "K and V need one scale per tensor or head, got '" + kinds[0] + "' and '" + kinds[1] + "'";
  return {};
}

// Returns (name of the kernel, None, names of the tensors of which it needs copies), or (None, why there is none, ()).
nb::tuple find_kernel(nb::handle problem, nb::handle gpu, bool has_key_counts, nb::dict fixed) {
  gpu::Problem p = read(problem, fixed, false);
  if (has_key_counts) p.key_counts.data = p.q.data;
  gpu::Refusal why{true, scale_refusal(p, problem)};
  gpu::Kernel kernel;
  if (!why.text.empty() || !gpu::find_kernel(p, gpu_of(gpu), kernel, why))
    return nb::make_tuple(nb::none(), why.text, nb::tuple());
  nb::list copies;
  const std::pair<const gpu::Tensor*, const char*> tensors[] = {
      {&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}, {&p.bias, "bias"}, {&p.keep, "keep"}};
  for (const auto& [x, name] : tensors)
    if (gpu::is_for_any_shape(kernel) && gpu::needs_copy(p, *x)) copies.append(name);
  return nb::make_tuple(gpu::kKernelNames[int(kernel)], nb::none(), nb::tuple(copies));
}

// The static scale of a float tensor: one, or one per head: [H], [B, H] or of four axes.
gpu::Tensor static_scale(nb::handle scale, const gpu::Tensor& x) {
  const TorchTensor t = tensor(scale);
  int64_t count = 1;
  for (int64_t i = 0; i < t.axes; ++i) count *= t.shape[i];
  gpu::Tensor found;
  found.data = t.data;
  if (count == 1) return found;
  if (t.axes == 4) return four_axes(scale);
  if (t.axes > 2 || t.shape[t.axes - 1] != x.shape[1])
    throw std::invalid_argument("a static scale is one number or one per head");
  for (int64_t i = 0; i < t.axes; ++i)
    found.shape[2 - t.axes + i] = t.shape[i], found.stride[2 - t.axes + i] = t.stride[i];
  return found;
}

void read_scales(nb::handle problem, gpu::ProblemCall& call, gpu::Launches& launches) {
  gpu::Problem& p = call.p;
  const nb::object recipe = problem.attr("recipe");
  const gpu::Tensor* const tensors[3] = {&p.q, &p.k, &p.v};
  const char* const kinds[3] = {"q", "k", "v"};
  const char* const scales[3] = {"q_scale", "k_scale", "v_scale"};
  for (int i = 0; i < 3; ++i) {
    p.per_head[i] = nb::cast<std::string>(recipe.attr(kinds[i])) == "head";
    const nb::object scale = recipe.attr(scales[i]);
    if (scale.is_none() || tensors[i]->is_codes()) continue;
    if (nb::isinstance<nb::float_>(scale)) {
      set_number(call, i, float(nb::cast<double>(scale)), launches);
    } else {
      p.scale[i] = static_scale(scale, *tensors[i]);
    }
  }
}

gpu::Device* device_of(const TorchTensor& t) { return t.is_cuda ? gpu::find_device(t.device_index) : nullptr; }

nb::object described(const gpu::Tensor& x) {
  if (!x) return nb::none();
  return nb::make_tuple(uintptr_t(x.data), nb::make_tuple(x.shape[0], x.shape[1], x.shape[2], x.shape[3]));
}

gpu::Tensor constants_of(nb::handle given) {
  if (given.is_none()) return {};
  int64_t shape[4];
  for (int i = 0; i < 4; ++i) shape[i] = nb::cast<int64_t>(given[1][i]);
  return gpu::packed(reinterpret_cast<char*>(nb::cast<uintptr_t>(given[0])), shape);
}

// Returns (launches, kept tensors, memory of theirs by (address, bytes), (score, output) constants, output, its scale,
// Tmax, l).
nb::tuple plan(nb::handle problem, nb::handle gpu, uintptr_t stream, nb::object out, nb::object constants,
               nb::object key_counts, bool has_copies, bool only_constants, nb::dict fixed) {
  gpu::ProblemCall call;
  call.p = read(problem, fixed, true);
  gpu::Problem& p = call.p;
  if (const std::string reason = scale_refusal(p, problem); !reason.empty()) throw std::invalid_argument(reason);
  p.has_copies = has_copies, p.only_constants = only_constants;
  const nb::object q = problem.attr("q");
  call.q = tensor(p.has_float_query() ? q : nb::object(q.attr("data")));
  call.return_lse = nb::cast<bool>(problem.attr("return_lse"));
  if (!out.is_none()) call.out = out;
  if (p.given_out_scale) call.out_scale = problem.attr("out_scale");
  if (!constants.is_none()) p.ready_score = constants_of(constants[0]), p.ready_output = constants_of(constants[1]);
  if (!key_counts.is_none()) p.key_counts.data = tensor(key_counts).data;
  gpu::NotedLaunches launches(gpu_of(gpu), call.q, device_of(call.q), reinterpret_cast<void*>(stream));
  gpu::Response found;
  gpu::Refusal why{true, {}};
  try {
    if (p.has_float_query()) read_scales(problem, call, launches);
    if (!gpu::run(call, launches, why, found)) throw std::invalid_argument("no CUDA kernel: " + why.text);
  } catch (const Declined&) {
    throw std::runtime_error("the CUDA backend could not take memory from torch");
  }
  if (const nb::object workspace = found.workspace.to_python(); !workspace.is_none()) launches.keep(workspace);
  nb::list memory;
  for (const gpu::Part& part : found.parts) memory.append(nb::make_tuple(part.offset, part.bytes));
  const Response& r = found.of_call;
  return nb::make_tuple(launches.noted, launches.kept, memory,
                        nb::make_tuple(described(found.score), described(found.output)), r.out.to_python(),
                        r.out_scale.to_python(), r.t_max.to_python(), r.l_sum.to_python());
}

// Reads the shapes, the masks and the output's type of a problem of a float softmax, whose K and V may be of any type.
gpu::Problem read_float(nb::handle q, nb::handle k, nb::handle v, nb::handle causal, nb::handle out_dtype) {
  gpu::Problem p;
  p.q = values(q), p.k = values(k), p.v = values(v);
  p.is_causal = !causal.is_none();
  if (p.is_causal) p.causal_offset = nb::cast<int64_t>(causal);
  p.out_type = out_type_of(out_dtype);
  return p;
}

nb::object float_refusal(nb::handle q, nb::handle k, nb::handle v, nb::handle gpu, nb::handle out_dtype) {
  gpu::Refusal why{true, {}};
  if (gpu::float_rows_serve(read_float(q, k, v, nb::none(), out_dtype), gpu_of(gpu), why)) return nb::none();
  return nb::str(why.text.c_str());
}

nb::list plan_float(nb::handle q, nb::handle k, nb::handle v, nb::handle q_scale, nb::handle k_scale, int key_scales,
                    double sm_scale, nb::object causal, nb::handle gpu, nb::handle out, nb::handle out_dtype,
                    nb::object t_max, nb::object l_sum) {
  gpu::Problem p = read_float(q, k, v, causal, out_dtype);
  p.sm_scale = sm_scale;
  p.scale[0] = four_axes(q_scale), p.scale[1] = four_axes(k_scale);
  gpu::Memory memory;
  memory.out = four_axes(out, p.out_type);
  if (!t_max.is_none()) memory.t_max = reinterpret_cast<int64_t*>(tensor(t_max).data);
  if (!l_sum.is_none()) memory.l = reinterpret_cast<int32_t*>(tensor(l_sum).data);
  const TorchTensor like = tensor(q);
  const gpu::Gpu on = gpu_of(gpu);
  gpu::NotedLaunches launches(on, like, nullptr, nullptr);
  gpu::Plan made;
  gpu::float_rows_launch(p, key_scales, memory, on, made.next());
  launches.launch(made);
  return launches.noted;
}

}  // namespace

void bind_plans(nb::module_& m) {
  using nb::arg;
  m.def("find_kernel", find_kernel, arg("problem"), arg("gpu"), arg("has_key_counts"), arg("fixed"),
        "Which CUDA kernel serves a problem: (its name, None, names of the tensors of which it needs copies), or "
        "(None, why there is none, ()). gpu: (multiprocessors, major, minor, bytes of shared memory). Tensors may be "
        "on any device, meta too.");
  m.def("plan", plan, arg("problem"), arg("gpu"), arg("stream"), arg("out").none(), arg("constants").none(),
        arg("key_counts").none(), arg("has_copies"), arg("only_constants"), arg("fixed"),
        "The launches of a problem, which Python runs, and what they fill in: see intflash/backends/cuda/plans.py.");
  m.def("float_refusal", float_refusal, arg("q"), arg("k"), arg("v"), arg("gpu"), arg("out_dtype"),
        "Why the kernel of long rows with a float softmax does not serve these tensors, or None.");
  m.def("plan_float", plan_float, arg("q"), arg("k"), arg("v"), arg("q_scale"), arg("k_scale"), arg("key_scales"),
        arg("sm_scale"), arg("causal").none(), arg("gpu"), arg("out"), arg("out_dtype"), arg("t_max").none(),
        arg("l_sum").none(), "The launch of that kernel: see intflash/backends/cuda/long_rows_float.py.");
}

}  // namespace intflash
