// The Python module: raw pointers, shapes and strides in, results written in place. No tensor object
// crosses the border, which keeps a call under a microsecond.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace nb = nanobind;
using namespace intflash;

namespace {

// Elements of tuples (a torch.Size is one), without a Python object for the index.
nb::handle element(nb::handle tuple, size_t i) { return PyTuple_GetItem(tuple.ptr(), Py_ssize_t(i)); }
int64_t item(nb::handle tuple, size_t i) {
  const int64_t value = PyLong_AsLongLong(element(tuple, i).ptr());
  if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

// Fake, functional and wrapped tensors have none.
int64_t known(int64_t address) {
  if (!address) throw std::invalid_argument("a tensor has no memory of its own here: it is a fake, functional or wrapped one");
  return address;
}
int64_t address(nb::handle tuple, size_t i) { return known(item(tuple, i)); }

// (pointer, shape, stride) of four axes; an axis of size 1 is a broadcast one.
template <class T>
View<T> view(nb::handle tensor) {
  View<T> v;
  if (tensor.is_none()) return v;
  v.data = reinterpret_cast<const T*>(address(tensor, 0));
  const nb::handle shape = element(tensor, 1), stride = element(tensor, 2);
  for (size_t i = 0; i < 4; ++i) v.stride[i] = item(shape, i) == 1 ? 0 : item(stride, i);
  return v;
}

const Kernels& kernels_named(const char* name) {
  for (const Kernels* k : supported_kernels())
    if (!*name || std::string_view(k->name) == name) return *k;
  throw std::invalid_argument("no such instruction set on this machine");
}

// A float tensor [batch, heads, tokens, channels] to be quantized into contiguous codes.
struct FloatInput {
  const char* data;
  int64_t batch, heads, tokens, channels, stride[4], bytes;
  FloatType type;
  bool is_static, per_head;  // per_head: of a dynamic scale
  int qmax;
  std::vector<float> amax, scales;  // per piece; dynamic: one or [batch, heads]; a static number: one
  View<float> scale;
  int8_t* codes;

  // What is measured and encoded at once: a head, or, where one scale serves all heads and a token's lie side by side, as
  // many tokens of all heads, in memory's order.
  struct Piece {
    const char* data;
    Rows rows;
    int8_t* codes;
  };
  Piece piece(int64_t i) const {
    const int64_t b = i / heads, h = i % heads;
    const char* x = data + b * stride[0] * bytes;
    if (heads_side_by_side()) {
      const int64_t first = tokens * h / heads, last = tokens * (h + 1) / heads;
      return {x + first * stride[2] * bytes, {last - first, channels, stride[2], heads, tokens * channels},
              codes + (b * heads * tokens + first) * channels};
    }
    const Rows rows = stride[2] == channels ? Rows{1, tokens * channels, 0} : Rows{tokens, channels, stride[2]};
    return {x + h * stride[1] * bytes, rows, codes + i * tokens * channels};
  }
  bool heads_side_by_side() const { return heads > 1 && stride[1] == channels && !per_head && scale.stride[0] == 0 && scale.stride[1] == 0; }
  int64_t count() const { return batch * heads; }
};

constexpr float kTinyAmax = 7.888609052210118e-31f;  // 2^-100: below, a tensor counts as 0

struct Quantization {
  const Kernels& kernels;
  FloatInput input[3];
  bool look;           // for NaN and infinity, which order above all numbers
  bool finite = true;  // what was found

  void measure(FloatInput& x, int64_t i) const {
    if (x.is_static && !look) return;
    const FloatInput::Piece piece = x.piece(i);
    x.amax[size_t(i)] = kernels.absolute_maximum(piece.data, x.type, piece.rows);
  }
  void choose_scales(FloatInput& x) {
    for (float a : x.amax) finite = finite && (!look || std::isfinite(a));  // each: no comparison finds a NaN
    if (x.is_static) return;
    if (!x.per_head) x.amax[0] = *std::max_element(x.amax.begin(), x.amax.end());
    for (size_t i = 0; i < x.scales.size(); ++i) x.scales[i] = x.amax[i] < kTinyAmax ? 1.0f : x.amax[i] / float(x.qmax);
  }
  void encode(FloatInput& x, int64_t i) const {
    const float amax = x.is_static ? 1.0f : x.amax[x.per_head ? size_t(i) : 0];
    const float inverse = amax < kTinyAmax ? 0.0f : 1.0f / *x.scale.at(i / x.heads, i % x.heads);
    const FloatInput::Piece piece = x.piece(i);
    kernels.quantize(piece.data, x.type, piece.rows, inverse, x.qmax, piece.codes);
  }

  // Tickets run over the pieces of all three tensors.
  std::pair<FloatInput*, int64_t> find(int64_t ticket) {
    for (FloatInput& x : input) {
      if (ticket < x.count()) return {&x, ticket};
      ticket -= x.count();
    }
    throw std::logic_error("ticket out of range");
  }
  template <void (Quantization::*Step)(FloatInput&, int64_t) const>
  static void run_step(void* self, Tickets& tickets) {
    auto& me = *static_cast<Quantization*>(self);
    for (int64_t ticket; tickets.next(ticket);) {
      auto [x, i] = me.find(ticket);
      (me.*Step)(*x, i);
    }
  }

  // False where it found what is not finite; the codes are then of no use.
  bool run(int threads) {
    int64_t tickets = 0, values = 0;
    for (const FloatInput& x : input) tickets += x.count(), values += x.count() * x.tokens * x.channels;
    if (threads <= 1 || values < 1 << 17) return run_alone();  // the values: some ten microseconds in all
    run_tickets(threads, tickets, run_step<&Quantization::measure>, this);
    for (FloatInput& x : input) choose_scales(x);
    if (finite) run_tickets(threads, tickets, run_step<&Quantization::encode>, this);
    return finite;
  }

  // One tensor after the other, and the second time from its end: much of it is in the cache still.
  bool run_alone() {
    for (FloatInput& x : input) {
      for (int64_t i = 0; i < x.count(); ++i) measure(x, i);
      choose_scales(x);
      for (int64_t i = x.count(); finite && i-- > 0;) encode(x, i);
    }
    return finite;
  }
};

// tensor: (pointer, shape, stride); how: (float type, per head, qmax, scale), scale: None, a number, or a tensor
FloatInput float_input(nb::handle tensor, nb::handle how) {
  FloatInput x;
  x.data = reinterpret_cast<const char*>(address(tensor, 0));
  const nb::handle shape = element(tensor, 1), stride = element(tensor, 2), scale = element(how, 3);
  x.batch = item(shape, 0), x.heads = item(shape, 1), x.tokens = item(shape, 2), x.channels = item(shape, 3);
  for (size_t i = 0; i < 4; ++i) x.stride[i] = item(stride, i);
  x.type = FloatType(item(how, 0));
  x.bytes = x.type == FloatType::kFloat32 ? 4 : 2;
  x.qmax = int(item(how, 2));
  x.is_static = !scale.is_none();
  x.per_head = !x.is_static && item(how, 1);
  x.amax.resize(size_t(x.count()));
  if (PyTuple_Check(scale.ptr())) {
    x.scale = view<float>(scale);
    return x;
  }
  x.scales.resize(x.per_head ? size_t(x.count()) : 1);
  if (x.is_static) x.scales[0] = nb::cast<float>(scale);
  x.scale.data = x.scales.data();
  if (x.per_head) x.scale.stride[0] = x.heads, x.scale.stride[1] = 1;
  return x;
}

View<int8_t> contiguous_codes(const FloatInput& x) {
  return {x.codes, {x.heads * x.tokens * x.channels, x.tokens * x.channels, x.channels, 1}};
}

// Codes of the caller's thread between quantization and attention; kept, because fresh pages cost more
// than the work on small calls.
struct CodeBuffer {
  std::vector<int8_t> bytes;
  void divide(FloatInput (&x)[3]) {
    size_t total = 0;
    for (FloatInput& t : x) total += size_t(t.count() * t.tokens * t.channels);
    if (bytes.size() < total) bytes.resize(total);
    int8_t* p = bytes.data();
    for (FloatInput& t : x) t.codes = p, p += t.count() * t.tokens * t.channels;
  }
};

// False where `look` asked for NaN and infinity in float q, k or v and there are some: nothing is computed then.
bool attention(const char* isa, int threads, int method, int out_type, int64_t out, nb::tuple out_stride, double sm_scale, nb::tuple q, nb::tuple k,
               nb::tuple v, nb::tuple scales, nb::handle out_scale, bool default_scale, nb::tuple blocks, nb::handle causal, nb::handle bias,
               nb::handle keep, nb::handle packed, int64_t t_max, int64_t l_sum, bool look) {
  const Kernels& kernels = kernels_named(isa);
  Call call{};
  call.method = Method(method);
  call.out_type = OutType(out_type);
  call.out = reinterpret_cast<void*>(known(out));
  for (size_t i = 0; i < 3; ++i) call.out_stride[i] = item(out_stride, i);
  call.sm_scale = sm_scale;
  const nb::handle q_shape = element(q, 1), k_shape = element(k, 1);
  call.batch = item(q_shape, 0), call.heads_q = item(q_shape, 1), call.nq = item(q_shape, 2), call.head_dim = item(q_shape, 3);
  call.heads_k = item(k_shape, 1), call.nk = item(k_shape, 2), call.value_dim = item(element(v, 1), 3);
  call.q_block = item(blocks, 0), call.k_block = item(blocks, 1);
  call.out_scale = view<float>(out_scale);
  call.bias = view<int32_t>(bias);
  call.keep = view<uint8_t>(keep);
  call.bias_batch = bias.is_none() ? 1 : item(element(bias, 1), 0);
  call.keep_batch = keep.is_none() ? 1 : item(element(keep, 1), 0);
  if (!causal.is_none()) {
    call.causal = true;
    call.causal_offset = item(causal, 0);
    call.bottom_right = item(causal, 1);
  }
  if (!packed.is_none()) {
    call.ends_q = reinterpret_cast<const int32_t*>(address(packed, 0));
    call.ends_k = reinterpret_cast<const int32_t*>(address(packed, 1));
    call.sequences = item(packed, 2);
  }
  call.t_max = reinterpret_cast<int64_t*>(t_max);
  call.l_sum = reinterpret_cast<int64_t*>(l_sum);

  const bool floats = nb::len(element(scales, 0)) == 4;
  if (!floats) {
    call.q = view<int8_t>(q), call.k = view<int8_t>(k), call.v = view<int8_t>(v);
    call.q_scale = view<float>(element(scales, 0)), call.k_scale = view<float>(element(scales, 1)), call.v_scale = view<float>(element(scales, 2));
    if (default_scale)  // s_V * 127 / qmax: |O| <= max|V|
      *const_cast<float*>(call.out_scale.data) = *call.v_scale.data * 127.0f / (call.out_type == OutType::kInt8 ? 127.0f : 32767.0f);
    nb::gil_scoped_release release;
    run_attention(kernels, call, threads);
    return true;
  }
  static thread_local CodeBuffer buffer;
  Quantization work{kernels, {float_input(q, element(scales, 0)), float_input(k, element(scales, 1)), float_input(v, element(scales, 2))}, look};
  buffer.divide(work.input);
  call.q = contiguous_codes(work.input[0]), call.k = contiguous_codes(work.input[1]), call.v = contiguous_codes(work.input[2]);
  call.q_scale = work.input[0].scale, call.k_scale = work.input[1].scale, call.v_scale = work.input[2].scale;
  nb::gil_scoped_release release;
  if (!work.run(threads)) return false;
  run_attention(kernels, call, threads);
  return true;
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("instruction_sets", [] {
    nb::list names;
    for (const Kernels* k : supported_kernels()) names.append(k->name);
    return names;
  }, "Names of the kernels this machine can run, best first.");
  m.def("attention", attention, nb::arg("isa"), nb::arg("threads"), nb::arg("method"), nb::arg("out_type"), nb::arg("out"), nb::arg("out_stride"),
        nb::arg("sm_scale"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scales"), nb::arg("out_scale").none(), nb::arg("default_scale"),
        nb::arg("blocks"), nb::arg("causal").none(), nb::arg("bias").none(), nb::arg("keep").none(), nb::arg("packed").none(),
        nb::arg("t_max"), nb::arg("l_sum"), nb::arg("look"),
        "Attention of one validated problem, see intflash/backends/cpu/__init__.py. Tensors but out are (pointer, shape, stride).");
}
