// The Python module intflash._native: reads torch's tensors, allocates the outputs and runs the kernels.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/quantize_inputs.h"
#include "host/module.h"
#include "host/signals.h"
#include "host/tensors.h"

namespace nb = nanobind;
using namespace intflash;

const Kernels& intflash::kernels_named(const char* name) {
  for (const Kernels* k : supported_kernels())
    if (!*name || std::string_view(k->name) == name) return *k;
  throw std::invalid_argument("no such instruction set on this machine");
}

namespace {

// Reads how a float tensor is quantized: (float type, per head, qmax, scale), where scale is None, a float or a tensor.
FloatInput float_input(const TensorView& tensor, nb::handle how) {
  FloatInput x;
  x.data = tensor.data;
  x.batch = tensor.shape[0], x.heads = tensor.shape[1], x.tokens = tensor.shape[2], x.channels = tensor.shape[3];
  std::copy_n(tensor.stride, 4, x.stride);
  const nb::handle scale = element(how, 3);
  const bool is_number = nb::isinstance<nb::float_>(scale);
  x.type = FloatType(item(how, 0));
  x.bytes = x.type == FloatType::kFloat32 ? 4 : 2;
  x.qmax = int(item(how, 2));
  x.is_static = !scale.is_none();
  x.per_head = !x.is_static && item(how, 1);
  x.amax.resize(size_t(x.count()));
  if (x.is_static && !is_number) {
    x.scale = read_tensor(scale).as<float>();
    return x;
  }
  x.scales.resize(x.per_head ? size_t(x.count()) : 1);
  if (is_number) x.scales[0] = nb::cast<float>(scale);
  x.scale.data = x.scales.data();
  if (x.per_head) x.scale.stride[0] = x.heads, x.scale.stride[1] = 1;
  return x;
}

View<int8_t> contiguous_codes(const FloatInput& x) {
  return {x.codes, {x.heads * x.tokens * x.channels, x.tokens * x.channels, x.channels, 1}};
}

// The codes of a call on the calling thread. The memory is kept, because fresh pages cost more than the work of small
// calls.
struct CodeBuffer {
  std::vector<int8_t> bytes;
  void divide(FloatInput (&x)[3]) {
    size_t total = 0;
    for (FloatInput& t : x) total += size_t(t.size());
    if (bytes.size() < total) bytes.resize(total);
    int8_t* p = bytes.data();
    for (FloatInput& t : x) t.codes = p, p += t.size();
  }
};

// torch.empty_like, which takes half the time of the other, and problem.empty_output. Their references are never
// released.
PyObject *empty_like = nullptr, *empty_output = nullptr;

void use_torch(nb::handle like, nb::handle output) {
  empty_like = like.inc_ref().ptr(), empty_output = output.inc_ref().ptr();
}

// Allocates a call's output and, where it is integer and the call gives none, its scale; then releases the GIL.
struct Outputs {
  Call& call;
  nb::handle q, dtype;
  bool like_q;
  nb::object out_scale;  // the call's own, or None
  nb::handle v_scale{};  // tensor that a scale to be allocated is like, or null
  float scale = 0.0f;
  nb::object out{};
  std::optional<nb::gil_scoped_release> released{};

  void make() {
    try {
      const auto size = [](int64_t n) { return nb::int_(n); };
      out = like_q ? nb::handle(empty_like)(q)
                   : nb::handle(empty_output)(
                         q, nb::make_tuple(size(call.batch), size(call.heads_q), size(call.nq), size(call.value_dim)),
                         dtype);
      const TensorView view = read_tensor(out);
      call.out.batch_step = view.stride[0], call.out.head_step = view.stride[1], call.out.row_step = view.stride[2];
      call.out.set(view.data);
      if (v_scale.is_valid()) {
        out_scale = nb::handle(empty_like)(v_scale);
        *reinterpret_cast<float*>(read_tensor(out_scale).data) = scale;
      }
    } catch (...) {
      call.out.fail();
      throw;
    }
    released.emplace();
  }
  nb::object take() {
    released.reset();
    return nb::make_tuple(out, out_scale);
  }
};

// Returns (output, its scale where it is integer), or None where `look` asks for NaN and infinity in float q, k and v
// and there are some.
nb::object attention(const char* isa, int threads, int method, int out_type, nb::handle out_dtype, bool same_dtype,
                     double sm_scale, nb::handle q, nb::handle k, nb::handle v, nb::tuple scales, nb::handle out_scale,
                     nb::handle blocks, nb::handle causal, nb::handle bias, nb::handle keep, nb::handle packed,
                     nb::handle t_max, nb::handle l_sum, bool look) {
  const RunningCall running;
  const Kernels& kernels = kernels_named(isa);
  const TensorView queries = read_tensor(q), keys = read_tensor(k), values = read_tensor(v);
  const TensorView biases = read_tensor(bias), kept = read_tensor(keep);
  Call call{};
  call.method = Method(method);
  call.out_type = OutType(out_type);
  call.sm_scale = sm_scale;
  call.batch = queries.shape[0], call.heads_q = queries.shape[1], call.nq = queries.shape[2],
  call.head_dim = queries.shape[3];
  call.heads_k = keys.shape[1], call.nk = keys.shape[2], call.value_dim = values.shape[3];
  call.q_block = call.k_block = 1;
  if (!blocks.is_none()) call.q_block = item(blocks, 0), call.k_block = item(blocks, 1);
  call.out_scale = read_tensor(out_scale).as<float>();
  call.bias = biases.as<int32_t>(), call.bias_batch = biases.shape[0];
  call.keep = kept.as<uint8_t>(), call.keep_batch = kept.shape[0];
  if (!causal.is_none()) {
    call.causal = true;
    call.causal_offset = item(causal, 0);
    call.bottom_right = item(causal, 1);
  }
  if (!packed.is_none()) {
    const TensorView ends = read_tensor(element(packed, 0));
    call.ends_q = ends.as<int32_t>().data, call.ends_k = read_tensor(element(packed, 1)).as<int32_t>().data;
    call.sequences = ends.shape[1] - 1;
  }
  call.t_max = reinterpret_cast<int64_t*>(read_tensor(t_max).data);
  call.l_sum = reinterpret_cast<int64_t*>(read_tensor(l_sum).data);

  const nb::handle how_q = element(scales, 0), how_k = element(scales, 1), how_v = element(scales, 2);
  Outputs outputs{call, q, out_dtype, same_dtype && queries.shape[3] == values.shape[3] && queries.is_contiguous(),
                  nb::borrow(out_scale)};
  const std::function<void()> make_outputs = [&] { outputs.make(); };
  if (!PyTuple_Check(how_q.ptr())) {
    call.q = queries.as<int8_t>(), call.k = keys.as<int8_t>(), call.v = values.as<int8_t>();
    call.q_scale = read_tensor(how_q).as<float>(), call.k_scale = read_tensor(how_k).as<float>(),
    call.v_scale = read_tensor(how_v).as<float>();
    const bool is_integer = call.out_type == OutType::kInt8 || call.out_type == OutType::kInt16;
    if (is_integer && out_scale.is_none()) {  // s_V * 127 / qmax: |O| <= max|V|
      outputs.scale = *call.v_scale.data * 127.0f / (call.out_type == OutType::kInt8 ? 127.0f : 32767.0f);
      outputs.v_scale = how_v;
      call.out_scale.data = &outputs.scale;
    }
    run_attention(kernels, call, threads, make_outputs, check_signals);
    return outputs.take();
  }
  static thread_local CodeBuffer buffer;
  Quantization work{kernels, {float_input(queries, how_q), float_input(keys, how_k), float_input(values, how_v)}, look};
  buffer.divide(work.input);
  call.q = contiguous_codes(work.input[0]), call.k = contiguous_codes(work.input[1]),
  call.v = contiguous_codes(work.input[2]);
  call.q_scale = work.input[0].scale, call.k_scale = work.input[1].scale, call.v_scale = work.input[2].scale;
  if (!work.run(threads, make_outputs, check_signals)) return nb::none();
  run_attention(kernels, call, threads, [] {}, check_signals);
  return outputs.take();
}

}  // namespace

NB_MODULE(_native, m) {
  m.def(
      "instruction_sets",
      [] {
        nb::list names;
        for (const Kernels* k : supported_kernels()) names.append(k->name);
        return names;
      },
      "Names of the kernels this machine can run, best first.");
  m.def(
      "use_exchange", use_exchange, nb::arg("capsule").none(),
      "Read tensors by torch.Tensor.__dlpack_c_exchange_api__; with None by their methods, as before the first call.");
  m.def(
      "set_main_thread", [](unsigned long ident) { main_thread = ident; }, nb::arg("ident"),
      "The thread whose long calls look for signals: threading.main_thread().ident.");
  m.def("use_torch", use_torch, nb::arg("empty_like"), nb::arg("empty_output"), "How outputs are made.");
  m.def("attention", attention, nb::arg("isa"), nb::arg("threads"), nb::arg("method"), nb::arg("out_type"),
        nb::arg("out_dtype"), nb::arg("same_dtype"), nb::arg("sm_scale"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("scales"), nb::arg("out_scale").none(), nb::arg("blocks").none(), nb::arg("causal").none(),
        nb::arg("bias").none(), nb::arg("keep").none(), nb::arg("packed").none(), nb::arg("t_max").none(),
        nb::arg("l_sum").none(), nb::arg("look"), "Attention of one validated problem, see intflash/backends/cpu.py.");
  add_programs(m);
}
