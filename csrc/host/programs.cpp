// Integer models in Python: the class Program, which src/intflash/integer/cpu.py fills with operations.
#include <optional>
#include <string_view>
#include <vector>

#include "cpu/program.h"
#include "host/module.h"
#include "host/signals.h"
#include "host/tensors.h"

namespace nb = nanobind;

namespace intflash {
namespace {

// A contiguous tensor of a program.
struct Constant {
  char* data = nullptr;
  int64_t count = 0;
  std::vector<int64_t> shape;
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
};

Constant constant(nb::handle tensor) {
  Constant c;
  if (tensor.is_none()) return c;
  c.data = read_tensor(tensor).data;
  c.count = 1;
  const nb::object shape = tensor.attr("shape");
  for (size_t i = 0; i < nb::len(shape); ++i) c.shape.push_back(item(shape, i)), c.count *= c.shape.back();
  return c;
}

Place place(nb::handle tuple) { return {item(tuple, 0), item(tuple, 1), item(tuple, 2)}; }

Limits limits(nb::handle tuple) { return {int32_t(item(tuple, 0)), int32_t(item(tuple, 1))}; }

void add_linear(Program& p, nb::handle x, nb::handle out, nb::handle weight, nb::handle bias, nb::handle multiplier,
                int shift, int64_t rows, int epilogue, int width, nb::handle clamp, nb::handle table, int table_bits,
                nb::handle store_rows, nb::handle residual_place, nb::handle residual, int64_t out_rows) {
  const Constant w = constant(weight);
  LinearStep step;
  step.x = place(x), step.out = place(out);
  step.image_rows = rows;
  LinearCall& call = step.call;
  call.layer = p.pack(w.as<int8_t>(), constant(bias).as<int32_t>(), constant(multiplier).as<int32_t>(), w.shape[0],
                      w.shape[1], shift);
  call.output = LinearOutput(epilogue), call.width = Width(width), call.limits = limits(clamp);
  const int64_t bytes = bytes_of(call.width);
  const Constant entries = constant(table), map = constant(store_rows), fixed = constant(residual);
  call.table = p.keep(entries.data, entries.count * bytes), call.table_bits = table_bits;
  call.store_rows = p.keep(map.as<int32_t>(), map.count);
  call.out_rows = out_rows;
  call.residual = p.keep(fixed.data, fixed.count * bytes), call.residual_is_constant = fixed.data != nullptr;
  step.has_residual_buffer = !residual_place.is_none();
  if (step.has_residual_buffer) step.residual = place(residual_place);
  p.add(step);
}

void add_layer_norm(Program& p, nb::handle x, nb::handle out, nb::handle multiplier, nb::handle bias, int shift,
                    int64_t eps, int in, int width, nb::handle clamp, int64_t in_rows, int64_t out_rows,
                    int64_t channels, nb::handle load_rows) {
  constexpr int64_t kPadding = 68;  // a vector and one value
  LayerNormCall call;
  const Constant m = constant(multiplier), b = constant(bias), map = constant(load_rows);
  call.in = Width(in), call.width = Width(width), call.limits = limits(clamp);
  call.in_rows = in_rows, call.out_rows = out_rows, call.channels = channels;
  call.parts = map.data ? map.shape[1] : 1;
  call.load_rows = p.keep(map.as<int32_t>(), map.count);
  call.multiplier = p.keep(m.as<int32_t>(), m.count, kPadding), call.bias = p.keep(b.as<int32_t>(), b.count, kPadding);
  call.shift = shift, call.eps = eps;
  p.add(call, place(x), place(out));
}

void add_patches(Program& p, int image, nb::handle out, bool is_float, nb::handle shape, nb::handle patch,
                 float inverse, int zero_point) {
  PatchesCall call;
  call.is_float = is_float, call.inverse = inverse, call.zero_point = zero_point;
  call.channels = item(shape, 0), call.height = item(shape, 1), call.width = item(shape, 2);
  call.patch_height = item(patch, 0), call.patch_width = item(patch, 1);
  p.add(call, image, place(out));
}

void add_embedding(Program& p, nb::tuple indices, nb::tuple tables, nb::handle rows, nb::handle out, int width,
                   nb::handle clamp, int64_t image_rows, int64_t channels) {
  EmbeddingCall call;
  call.width = Width(width), call.limits = limits(clamp), call.image_rows = image_rows, call.channels = channels;
  std::vector<int> inputs;
  for (size_t i = 0; i < indices.size(); ++i) {
    const Constant table = constant(tables[i]);
    inputs.push_back(int(item(indices, i)));
    call.tables.push_back(p.keep(table.data, table.count * bytes_of(call.width)));
  }
  const Constant fixed = constant(rows);
  call.rows = p.keep(fixed.data, fixed.count * bytes_of(call.width));
  p.add(call, inputs, place(out));
}

// `scales` are float32 tensors of one scale or one of each head, for q, k, v and the output.
void add_attention(Program& p, nb::handle q, nb::handle k, nb::handle v, nb::handle out, int method, nb::handle shape,
                   double sm_scale, nb::handle scales, nb::handle bias, nb::handle mask, int mask_input) {
  AttentionStep step;
  step.q = place(q), step.k = place(k), step.v = place(v), step.out = place(out);
  step.method = Method(method), step.sm_scale = sm_scale;
  step.windows = item(shape, 0), step.heads = item(shape, 1), step.tokens = item(shape, 2);
  step.head_dim = item(shape, 3);
  const float** to[4] = {&step.q_scale, &step.k_scale, &step.v_scale, &step.out_scale};
  for (size_t i = 0; i < 4; ++i) {
    const Constant scale = constant(element(scales, i));
    *to[i] = p.keep(scale.as<float>(), scale.count);
    step.per_head[i] = scale.count > 1;
  }
  const Constant biases = constant(bias), kept = constant(mask);
  step.bias = p.keep(biases.as<int32_t>(), biases.count);
  step.mask = p.keep(kept.as<uint8_t>(), kept.count);
  step.mask_input = mask_input;
  p.add(step);
}

void add_pool(Program& p, nb::handle x, nb::handle out, int in, int width, nb::handle clamp, int64_t rows,
              int64_t first, int64_t stop, int64_t channels, int32_t multiplier, int shift) {
  PoolCall call;
  call.in = Width(in), call.width = Width(width), call.limits = limits(clamp);
  call.rows = rows, call.first = first, call.stop = stop, call.channels = channels;
  call.multiplier = multiplier, call.shift = shift;
  p.add(call, place(x), place(out));
}

void add_output(Program& p, nb::handle x, int64_t bytes, int output) { p.add_output(place(x), bytes, output); }

void run(Program& p, int64_t images, nb::tuple inputs, nb::tuple outputs, int threads) {
  const RunningCall running;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (size_t i = 0; i < inputs.size(); ++i) from.push_back(constant(inputs[i]).data);
  for (size_t i = 0; i < outputs.size(); ++i) to.push_back(constant(outputs[i]).data);
  const nb::gil_scoped_release released;
  p.run(images, from, to, threads, check_signals);
}

}  // namespace

void bind_programs(nb::module_& m) {
  using nb::arg;
  nb::class_<Program>(m, "Program", "An integer model packed for one instruction set, see intflash/integer/cpu.py.")
      .def(
          "__init__",
          [](Program* p, const char* isa, int64_t image_bytes) { new (p) Program(kernels_named(isa), image_bytes); },
          arg("isa"), arg("image_bytes"))
      .def("linear", add_linear, arg("x"), arg("out"), arg("weight"), arg("bias"), arg("multiplier").none(),
           arg("shift"), arg("rows"), arg("epilogue"), arg("width"), arg("limits"), arg("table").none(),
           arg("table_bits"), arg("store_rows").none(), arg("residual_place").none(), arg("residual").none(),
           arg("out_rows"))
      .def("layer_norm", add_layer_norm, arg("x"), arg("out"), arg("multiplier"), arg("bias"), arg("shift"), arg("eps"),
           arg("in_width"), arg("width"), arg("limits"), arg("in_rows"), arg("out_rows"), arg("channels"),
           arg("load_rows").none())
      .def("patches", add_patches, arg("image"), arg("out"), arg("is_float"), arg("shape"), arg("patch"),
           arg("inverse"), arg("zero_point"))
      .def("embedding", add_embedding, arg("indices"), arg("tables"), arg("rows").none(), arg("out"), arg("width"),
           arg("limits"), arg("image_rows"), arg("channels"))
      .def("attention", add_attention, arg("q"), arg("k"), arg("v"), arg("out"), arg("method"), arg("shape"),
           arg("sm_scale"), arg("scales"), arg("bias").none(), arg("mask").none(), arg("mask_input"))
      .def("pool", add_pool, arg("x"), arg("out"), arg("in_width"), arg("width"), arg("limits"), arg("rows"),
           arg("first"), arg("stop"), arg("channels"), arg("multiplier"), arg("shift"))
      .def("output", add_output, arg("x"), arg("bytes"), arg("output"))
      .def("run", run, arg("images"), arg("inputs"), arg("outputs"), arg("threads"));
}

}  // namespace intflash
