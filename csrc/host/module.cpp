// The Python module intflash._native.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string_view>

#include "host/module.h"
#include "host/run_call.h"

using namespace intflash;

const Kernels& intflash::kernels_named(const char* name) {
  for (const Kernels* k : supported_kernels())
    if (!*name || std::string_view(k->name) == name) return *k;
  throw std::invalid_argument("no such instruction set on this machine");
}

namespace {

void use_torch(nb::handle empty_strided, nb::tuple dtypes, nb::handle int32, nb::handle int64, bool find) {
  for (size_t i = 0; i < 5; ++i) out_dtypes[i] = element(dtypes, i).inc_ref().ptr();
  int32_dtype = int32.inc_ref().ptr();
  int64_dtype = int64.inc_ref().ptr();
  torch_library.load(empty_strided, find);
}

// Reads how a float tensor is quantized: (float type, per head, qmax, scale), where scale is None, a float or a tensor.
FloatInput read_float_input(const TensorView& tensor, nb::handle how) {
  FloatInput x = float_input(tensor, FloatType(item(how, 0)), item(how, 1), int(item(how, 2)));
  const nb::handle scale = element(how, 3);
  if (nb::isinstance<nb::float_>(scale)) {
    set_scale(x, nb::cast<float>(scale));
  } else if (!scale.is_none()) {
    set_scale(x, read_tensor(scale).as<float>());
  }
  return x;
}

// Returns (output, its scale where it is integer), or None where `look` asks for NaN and infinity in floats and there
// are some. `scales`: of q, k and v, tensors for codes and what `read_float_input` reads for floats.
nb::object attention(const char* isa, int threads, int method, int out_type, double sm_scale, nb::handle q,
                     nb::handle k, nb::handle v, nb::tuple scales, nb::object out_scale, nb::handle blocks,
                     nb::handle causal, nb::handle bias, int bias_fraction_bits, nb::handle keep, nb::handle packed,
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
  call.bias_fraction_bits = bias_fraction_bits;
  call.keep = kept.as<uint8_t>(), call.keep_batch = kept.shape[0];
  if (!causal.is_none()) {
    call.causal = true;
    call.causal_offset = item(causal, 0);
    call.bottom_right = item(causal, 1);
    if (const nb::handle start = element(causal, 2); !start.is_none()) {
      call.windowed = true;
      call.window_start = nb::cast<int64_t>(start);
    }
  }
  if (!packed.is_none()) {
    const TensorView ends = read_tensor(element(packed, 0));
    call.ends_q = ends.as<int32_t>().data, call.ends_k = read_tensor(element(packed, 1)).as<int32_t>().data;
    call.sequences = ends.shape[1] - 1;
  }
  call.t_max = reinterpret_cast<int64_t*>(read_tensor(t_max).data);
  call.l_sum = reinterpret_cast<int64_t*>(read_tensor(l_sum).data);

  CallRun run(kernels, call, threads, 4, queries.tokens_first);
  Quantization work{kernels, {}, look};
  const TensorView* const tensors[] = {&queries, &keys, &values};
  View<int8_t>* const codes[] = {&call.q, &call.k, &call.v};
  View<float>* const of_codes[] = {&call.q_scale, &call.k_scale, &call.v_scale};
  for (int i = 0; i < 3; ++i) {
    const nb::handle how = element(scales, i);
    if (PyTuple_Check(how.ptr())) {
      work.input.push_back(read_float_input(*tensors[i], how));
      continue;
    }
    const TensorView scale = read_tensor(how);
    *codes[i] = tensors[i]->as<int8_t>(), *of_codes[i] = scale.as<float>();
    if (i == 2 && is_integer(call.out_type) && out_scale.is_none())
      out_scale = set_default_out_scale(call, scale).to_python();
  }
  const MadeTensor out = work.input.empty() ? run.run() : run.run(work);
  return out.is_valid() ? nb::object(nb::make_tuple(out.to_python(), out_scale)) : nb::object(nb::none());
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
      "set_main_thread", [](unsigned long ident) { main_thread = ident; }, nb::arg("ident"),
      "The thread whose long calls look for signals: threading.main_thread().ident.");
  m.def("use_torch", use_torch, nb::arg("empty_strided"), nb::arg("out_dtypes"), nb::arg("int32"), nb::arg("int64"),
        nb::arg("find") = true,
        "Tell of torch: torch.empty_strided, its dtypes in the order of OutType, int32, int64. Without `find` tensors "
        "are read "
        "and made by Python methods.");
  m.def("reads_torch", [] { return torch_library.is_found(); }, "Whether torch has the C functions that read tensors.");
  m.def("attention", attention, nb::arg("isa"), nb::arg("threads"), nb::arg("method"), nb::arg("out_type"),
        nb::arg("sm_scale"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scales"), nb::arg("out_scale").none(),
        nb::arg("blocks").none(), nb::arg("causal").none(), nb::arg("bias").none(), nb::arg("bias_fraction_bits"),
        nb::arg("keep").none(), nb::arg("packed").none(), nb::arg("t_max").none(), nb::arg("l_sum").none(),
        nb::arg("look"), "Attention of one validated problem, see intflash/backends/cpu.py.");
  bind_attend(m);
  bind_plans(m);
  bind_launches(m);
  bind_programs(m);
}
