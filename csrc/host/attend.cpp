#include "host/module.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/cuda/call.h"
#include "host/run_call.h"
#include "host/torch_op.h"

// Every check here accepts what it knows and declines everything else: `attend` then returns None, and Python serves
// the call in general or says what is wrong with it. So there is one place for error messages, and an argument, a field
// of a recipe or a kind of tensor that this file has never heard of is not ignored.
namespace intflash {
namespace {

enum class Granularity { kTensor, kHead, kToken, kBlock, kChannel, kOther };

// A tensor among the arguments of a call: a Python object, or torch's implementation where torch's dispatcher has
// called this file itself. A scale may be a Python float.
struct Given {
  nb::object object;
  void* implementation = nullptr;

  Given() = default;
  Given(nb::object x) : object(std::move(x)) {}
  Given(PyObject* x) : object(nb::borrow(x)) {}
  explicit Given(void* of_torch) : implementation(of_torch) {}
  bool is_number() const { return object.is_valid() && PyFloat_CheckExact(object.ptr()); }
  float number() const { return float(PyFloat_AsDouble(object.ptr())); }
  explicit operator bool() const { return implementation || (object.is_valid() && !object.is_none()); }
};

// The scales of one of q, k, v: those that its codes have, or how floats become codes.
struct Scaling {
  Granularity granularity = Granularity::kTensor;
  int bits = 8;
  int64_t block = 1;  // tokens per scale
  Given scale;        // a tensor; of floats also a float, or None where it is the call's own
};

struct ServedMethod {
  PyObject* name;  // interned
  Method method;
  Scaling floats[3];  // by the method's own recipe
};

// What Python tells of itself at import. All references are kept for as long as the process runs.
struct Python {
  PyObject *tensor, *parameter, *qtensor, *recipe;  // classes
  PyObject *is_grad_enabled, *get_num_threads;      // functions
  PyObject* machine_code = Py_None;                 // (file, kernel, macros) -> cubin, or None without a compiler
  PyObject* forward_ad;                             // the module that knows the level of forward-mode derivatives
  std::vector<PyObject*> watchers;                  // functions: true where torch must see the call
  std::vector<ServedMethod> methods;
  int64_t most_keys, most_head_dim, most_value_dim;
  float least_recipe_scale, least_scale;
  int32_t bias_limit;
};
Python& python = *new Python{};  // not destroyed: the interpreter ends before the process
bool is_ready = false;

// Interned names.
struct Names {
  PyObject* data = PyUnicode_InternFromString("data");
  PyObject* scale = PyUnicode_InternFromString("scale");
  PyObject* granularity = PyUnicode_InternFromString("granularity");
  PyObject* block_size = PyUnicode_InternFromString("block_size");
  PyObject* bits = PyUnicode_InternFromString("bits");
  PyObject* q = PyUnicode_InternFromString("q");
  PyObject* k = PyUnicode_InternFromString("k");
  PyObject* v = PyUnicode_InternFromString("v");
  PyObject* q_scale = PyUnicode_InternFromString("q_scale");
  PyObject* k_scale = PyUnicode_InternFromString("k_scale");
  PyObject* v_scale = PyUnicode_InternFromString("v_scale");
  PyObject* smooth_k = PyUnicode_InternFromString("smooth_k");
  PyObject* rotate = PyUnicode_InternFromString("rotate");
  PyObject* rule = PyUnicode_InternFromString("rule");
  PyObject* tensor = PyUnicode_InternFromString("tensor");
  PyObject* head = PyUnicode_InternFromString("head");
  PyObject* token = PyUnicode_InternFromString("token");
  PyObject* block = PyUnicode_InternFromString("block");
  PyObject* channel = PyUnicode_InternFromString("channel");
  PyObject* bound = PyUnicode_InternFromString("bound");
  PyObject* exact = PyUnicode_InternFromString("exact");
  PyObject* cpu = PyUnicode_InternFromString("cpu");
  PyObject* cuda = PyUnicode_InternFromString("cuda");
  PyObject* top_left = PyUnicode_InternFromString("top_left");
  PyObject* bottom_right = PyUnicode_InternFromString("bottom_right");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* _current_level = PyUnicode_InternFromString("_current_level");
};
const Names& names() {
  static const Names found;
  return found;
}

constexpr int64_t kUnbounded = -1;  // of a side of a window: masks.UNBOUNDED

// The arguments of `attention`, in their order in call.ARGUMENTS: a test compares the two.
constexpr const char* kArguments[] = {
    "q",           "k",         "v",          "attn_mask",  "is_causal",    "scale",
    "method",      "backend",   "enable_gqa", "bias",       "causal_align", "window_size",
    "recipe",      "out_dtype", "out_scale",  "return_lse", "cu_seqlens_q", "cu_seqlens_k",
    "check_finite"};
struct Arguments {
  PyObject *q, *k, *v, *attn_mask, *is_causal, *scale, *method, *backend, *enable_gqa, *bias, *causal_align,
      *window_size, *recipe, *out_dtype, *out_scale, *return_lse, *cu_seqlens_q, *cu_seqlens_k, *check_finite;
};

// Those of the custom op, as op.FLAT: QTensors and the recipe are laid out.
constexpr const char* kFlat[] = {"q",
                                 "k",
                                 "v",
                                 "attn_mask",
                                 "bias",
                                 "out_scale",
                                 "cu_seqlens_q",
                                 "cu_seqlens_k",
                                 "q_scale",
                                 "k_scale",
                                 "v_scale",
                                 "scale",
                                 "out_dtype",
                                 "number_scales",
                                 "sizes",
                                 "is_causal",
                                 "method",
                                 "backend",
                                 "enable_gqa",
                                 "causal_align",
                                 "return_lse",
                                 "check_finite",
                                 "codes",
                                 "smooth_k",
                                 "rotate",
                                 "q_granularity",
                                 "k_granularity",
                                 "v_granularity",
                                 "rule",
                                 "dynamic_out",
                                 "bound_out"};
struct Flat {
  PyObject *q, *k, *v, *attn_mask, *bias, *out_scale, *cu_seqlens_q, *cu_seqlens_k, *q_scale, *k_scale, *v_scale,
      *scale, *out_dtype, *number_scales, *sizes, *is_causal, *method, *backend, *enable_gqa, *causal_align,
      *return_lse, *check_finite, *codes, *smooth_k, *rotate, *q_granularity, *k_granularity, *v_granularity, *rule,
      *dynamic_out, *bound_out;
};

// Fills a struct of PyObject* with arguments by position.
template <class To, size_t N>
To by_position(nb::args given, const char* const (&)[N]) {
  static_assert(sizeof(To) == N * sizeof(PyObject*));
  if (given.size() != N) throw std::invalid_argument("all arguments are needed, by position");
  PyObject* all[N];
  for (size_t i = 0; i < N; ++i) all[i] = PyTuple_GetItem(given.ptr(), Py_ssize_t(i));
  To to;
  std::memcpy(&to, all, sizeof to);
  return to;
}

PyObject* kept(nb::handle x) { return x.inc_ref().ptr(); }

bool is_type(PyObject* x, PyObject* type) { return reinterpret_cast<PyObject*>(Py_TYPE(x)) == type; }

// Whether a string is this interned one; anything that is no str is not.
bool is_name(PyObject* x, PyObject* name) {
  if (x == name) return true;
  return PyUnicode_CheckExact(x) && PyUnicode_Compare(x, name) == 0;
}

nb::object attribute(PyObject* x, PyObject* name) {
  PyObject* found = PyObject_GetAttr(x, name);
  if (!found) nb::raise_python_error();
  return nb::steal(found);
}

bool flag(PyObject* x) {
  require(x == Py_True || x == Py_False);
  return x == Py_True;
}

bool truth_of_call(PyObject* function) {
  PyObject* found = PyObject_CallNoArgs(function);
  if (!found) nb::raise_python_error();
  const int truth = PyObject_IsTrue(found);
  Py_DECREF(found);
  if (truth < 0) nb::raise_python_error();
  return truth != 0;
}

int64_t integer(PyObject* x) {
  const int64_t value = PyLong_AsLongLong(x);
  if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

Granularity granularity_of(PyObject* x) {
  const Names& n = names();
  const std::pair<PyObject*, Granularity> known[] = {{n.tensor, Granularity::kTensor},
                                                     {n.head, Granularity::kHead},
                                                     {n.token, Granularity::kToken},
                                                     {n.block, Granularity::kBlock},
                                                     {n.channel, Granularity::kChannel}};
  for (const auto& [name, granularity] : known)
    if (x == name) return granularity;
  for (const auto& [name, granularity] : known)
    if (is_name(x, name)) return granularity;
  return Granularity::kOther;
}

// Reads a Recipe.
void read_recipe(PyObject* recipe, Scaling (&floats)[3]) {
  const Names& n = names();
  PyObject* const kinds[3] = {n.q, n.k, n.v};
  PyObject* const scales[3] = {n.q_scale, n.k_scale, n.v_scale};
  require(attribute(recipe, n.smooth_k).ptr() == Py_False && attribute(recipe, n.rotate).ptr() == Py_False);
  require(is_name(attribute(recipe, n.rule).ptr(), n.exact));
  const int bits = int(integer(attribute(recipe, n.bits).ptr()));
  for (int i = 0; i < 3; ++i)
    floats[i] = {granularity_of(attribute(recipe, kinds[i]).ptr()), bits, 1, attribute(recipe, scales[i])};
}

// Reads a tensor that is memory. Returns false for anything else, subclasses of torch's classes too.
bool read_memory(const Given& given, TorchTensor& t) {
  if (given.implementation) return torch_library.read_implementation(given.implementation, t);
  PyObject* const x = given.object.ptr();
  return x && (is_type(x, python.tensor) || is_type(x, python.parameter)) && torch_library.read(x, t);
}

// Reads tensors that are memory on one device, of a CPU or a GPU, and nothing else.
class Reader {
 public:
  // `dispatched`: torch has seen to gradients and negated tensors, and the output must lie in memory as the op's fake
  // kernel promises.
  explicit Reader(bool dispatched)
      : dispatched_(dispatched), wants_gradients_(!dispatched && truth_of_call(python.is_grad_enabled)) {}

  // The first tensor, q, decides which device it is.
  TorchTensor first(const Given& x) {
    const TorchTensor t = memory_of(x);
    on_gpu_ = t.is_cuda, device_index_ = t.device_index;
    return t;
  }
  TorchTensor operator()(const Given& x) const {
    const TorchTensor t = memory_of(x);
    require(on_gpu_ ? t.is_cuda && t.device_index == device_index_ : t.is_cpu);
    return t;
  }
  bool is_dispatched() const { return dispatched_; }

 private:
  TorchTensor memory_of(const Given& given) const {
    TorchTensor t;
    require(read_memory(given, t) && (t.is_cpu || t.is_cuda));
    if (dispatched_) return t;
    PyObject* const x = given.object.ptr();
    PyObject* negated = call_method(x, names().is_neg);
    require(negated == Py_False);
    require(!wants_gradients_ || attribute(x, names().requires_grad).ptr() == Py_False);
    return t;
  }
  static PyObject* call_method(PyObject* x, PyObject* name) {
    PyObject* found = PyObject_CallMethodObjArgs(x, name, nullptr);
    if (!found) nb::raise_python_error();
    Py_DECREF(found);  // a bool
    return found;
  }
  const bool dispatched_, wants_gradients_;
  bool on_gpu_ = false;
  int32_t device_index_ = 0;
};

// The last axes of a tensor as those of a view; the leading ones that it lacks are of size 1.
TensorView view_of(const TorchTensor& t) {
  require(t.axes <= 4);
  TensorView v;
  v.data = t.data;
  for (int64_t i = 0; i < t.axes; ++i) {
    const int64_t axis = 4 - t.axes + i;
    require(t.shape[i] > 0);
    if (t.shape[i] != 1) v.shape[axis] = t.shape[i], v.stride[axis] = t.stride[i];
  }
  return v;
}

// Whether all values of a scale are in [least, infinity).
bool are_in_range(const TensorView& scale, float least) {
  const View<float> view = scale.as<float>();
  for (int64_t a = 0; a < scale.shape[0]; ++a)
    for (int64_t b = 0; b < scale.shape[1]; ++b)
      for (int64_t c = 0; c < scale.shape[2]; ++c)
        for (int64_t d = 0; d < scale.shape[3]; ++d) {
          const float value = *view.at(a, b, c, d);
          if (!(value >= least && value < INFINITY)) return false;
        }
  return true;
}

// Whether an int32 bias has codes at its limit, which stand for values past it. Absent keys are no such codes.
bool is_saturated(const TensorView& bias) {
  const View<int32_t> view = bias.as<int32_t>();
  bool found = false;
  for (int64_t a = 0; a < bias.shape[0]; ++a)
    for (int64_t b = 0; b < bias.shape[1]; ++b)
      for (int64_t c = 0; c < bias.shape[2]; ++c) {
        const int32_t* row = view.at(a, b, c);
        const int64_t step = view.stride[3];
        for (int64_t d = 0; d < bias.shape[3]; ++d) {
          const int32_t value = row[d * step];
          found |= value == python.bias_limit || value == -python.bias_limit;
        }
      }
  return found;
}

// Sizes of q, k and v that a call can have, as validate.check_inputs: those of missing axes are 1.
void check_shapes(const TorchTensor (&t)[3], const TensorView& q, const TensorView& k, const TensorView& v, bool gqa) {
  require(t[0].axes >= 2 && t[1].axes == t[0].axes && t[2].axes == t[0].axes);
  require(q.shape[3] == k.shape[3] && k.shape[2] == v.shape[2] && k.shape[1] == v.shape[1]);
  require(q.shape[0] == k.shape[0] && k.shape[0] == v.shape[0]);
  require(q.shape[1] == k.shape[1] || (gqa && q.shape[1] % k.shape[1] == 0));
  require(k.shape[2] <= python.most_keys && q.shape[3] <= python.most_head_dim && v.shape[3] <= python.most_value_dim);
}

// A mask that broadcasts to the scores of a call, as masks.normalize_mask.
TensorView read_mask(const Reader& read, const Given& mask, int32_t dtype, const Call& call) {
  const TorchTensor t = read(mask);
  require(t.dtype == dtype);
  const TensorView m = view_of(t);
  require(call.batch % m.shape[0] == 0 && (m.shape[1] == 1 || m.shape[1] == call.heads_q) &&
          (m.shape[2] == 1 || m.shape[2] == call.nq) && (m.shape[3] == 1 || m.shape[3] == call.nk));
  return m;
}

FloatType float_type_of(int32_t dtype) {
  const TorchDtypes& d = torch_library.dtype;
  require(dtype == d.float32 || dtype == d.float16 || dtype == d.bfloat16);
  return dtype == d.float32 ? FloatType::kFloat32 : dtype == d.float16 ? FloatType::kFloat16 : FloatType::kBFloat16;
}

// A float tensor as its recipe quantizes it.
FloatInput read_float(const Reader& read, const TensorView& x, FloatType type, const Scaling& how) {
  const bool per_head = how.granularity == Granularity::kHead;
  require(per_head || how.granularity == Granularity::kTensor);
  FloatInput input = float_input(x, type, per_head, (1 << (how.bits - 1)) - 1);
  if (!how.scale) return input;
  if (how.scale.is_number()) {  // the recipe has checked it
    set_scale(input, how.scale.number());
    return input;
  }
  const TorchTensor t = read(how.scale);
  require(t.dtype == torch_library.dtype.float32 && t.axes <= 4);
  TensorView view;
  view.place(size_t(t.axes), [&](size_t a) { return t.shape[a]; }, [&](size_t a) { return t.stride[a]; });
  view.data = t.data;
  const int64_t batch = view.shape[0], heads = view.shape[1];
  require(view.shape[2] == 1 && view.shape[3] == 1);
  if (per_head) {
    require((t.axes == 1 || t.axes == 4) && heads == x.shape[1] && (batch == 1 || batch == x.shape[0]));
  } else {
    require(batch == 1 && heads == 1);
  }
  require(are_in_range(view, python.least_recipe_scale));
  set_scale(input, view.as<float>());
  return input;
}

// The scale of int8 codes of four axes.
TensorView read_scale(const Reader& read, const TorchTensor& codes, const Scaling& how) {
  require(codes.dtype == torch_library.dtype.int8 && codes.axes == 4);
  const TorchTensor t = read(how.scale);
  require(t.dtype == torch_library.dtype.float32 && t.axes == 4);
  const int64_t *size = codes.shape, *of = t.shape;
  const bool heads = of[1] == size[1] && (of[0] == 1 || of[0] == size[0]);
  switch (how.granularity) {
    case Granularity::kTensor: require(of[0] == 1 && of[1] == 1 && of[2] == 1 && of[3] == 1); break;
    case Granularity::kHead: require(heads && of[2] == 1 && of[3] == 1); break;
    case Granularity::kToken: require(heads && of[2] == size[2] && of[3] == 1); break;
    case Granularity::kBlock:
      require(heads && how.block > 0 && of[2] == (size[2] - 1) / how.block + 1 && of[3] == 1);
      break;
    case Granularity::kChannel: require(heads && of[2] == 1 && of[3] == size[3]); break;
    case Granularity::kOther: require(false);
  }
  const TensorView view = view_of(t);
  require(are_in_range(view, python.least_scale));
  return view;
}

const ServedMethod& method_named(PyObject* name) {
  for (const ServedMethod& m : python.methods)
    if (name == m.name) return m;
  for (const ServedMethod& m : python.methods)
    if (is_name(name, m.name)) return m;
  throw Declined{};
}

// Returns whether out_dtype is one of an output, and which.
bool find_out_type(PyObject* dtype, OutType& type) {
  for (int i = 0; i < 5; ++i)
    if (dtype == out_dtypes[i]) return type = OutType(i), true;
  return false;
}

char* empty_statistics(const TorchTensor& q, int32_t number, PyObject* dtype, MadeTensor& tensor) {
  int64_t stride[4], step = 1;
  for (int64_t i = q.axes - 1; i-- > 0; step *= q.shape[i]) stride[i] = step;
  char* data = nullptr;
  tensor = torch_library.empty(q.axes - 1, q.shape, stride, number, dtype, data, &q);
  return data;
}

// A call as either way brings it.
struct Request {
  const ServedMethod* method = nullptr;
  bool is_codes[3] = {};  // of q, k, v: none of them, all, or those of k and v
  Given tensor[3];        // codes or floats
  Scaling scaling[3];
  Given attn_mask, bias;                                                  // or none
  PyObject *scale = Py_None, *out_dtype = Py_None, *out_scale = Py_None;  // each may be None
  PyObject *backend = Py_None, *check_finite = Py_None;                   // each may be None
  bool is_causal = false, bottom_right = false, enable_gqa = false, return_lse = false;
  bool bounds_output = false;                     // integer output has the scale that no output exceeds
  int64_t left = kUnbounded, right = kUnbounded;  // the window
};

bool is_bottom_right(PyObject* align) {
  if (is_name(align, names().bottom_right)) return true;
  require(is_name(align, names().top_left));
  return false;
}

// Reads (left, right) of a window as masks.window.
void read_window(PyObject* left, PyObject* right, Request& r) {
  require(PyLong_CheckExact(left) && PyLong_CheckExact(right));
  int overflows = 0, overflows_too = 0;
  r.left = PyLong_AsLongLongAndOverflow(left, &overflows),
  r.right = PyLong_AsLongLongAndOverflow(right, &overflows_too);
  require(!overflows && !overflows_too && r.left >= kUnbounded && r.right >= kUnbounded);
}

// Sets the keys that each query sees, as masks.key_range.
void set_key_range(const Request& r, Call& call) {
  const int64_t far = call.nq + call.nk;  // no key is further from a query's own
  const int64_t own = r.bottom_right ? call.nk - call.nq : 0;
  const int64_t left = r.left, right = r.is_causal ? 0 : r.right;
  call.causal = right != kUnbounded || left != kUnbounded;
  call.causal_offset = own + (right == kUnbounded ? far : std::min(right, far));
  call.windowed = left != kUnbounded;
  call.window_start = own - std::min(left, far);
}

// Whether each of q, k and v is floats or codes as a call can have them.
void check_kinds(const Request& r) { require(r.is_codes[1] == r.is_codes[2] && (r.is_codes[1] || !r.is_codes[0])); }

// Sets what both ways bring alike.
template <class A>
void set_rest(const A& a, Request& r) {
  r.attn_mask = a.attn_mask, r.bias = a.bias, r.scale = a.scale, r.out_dtype = a.out_dtype, r.out_scale = a.out_scale;
  r.backend = a.backend, r.check_finite = a.check_finite;
  r.is_causal = flag(a.is_causal), r.bottom_right = is_bottom_right(a.causal_align);
  r.enable_gqa = flag(a.enable_gqa), r.return_lse = flag(a.return_lse);
}

Request request_of(const Arguments& a) {
  const Names& n = names();
  require(a.cu_seqlens_q == Py_None && a.cu_seqlens_k == Py_None);
  Request r;
  if (a.window_size != Py_None) {
    require(PyTuple_CheckExact(a.window_size) && PyTuple_Size(a.window_size) == 2);
    read_window(PyTuple_GetItem(a.window_size, 0), PyTuple_GetItem(a.window_size, 1), r);
  }
  r.method = &method_named(a.method);
  PyObject* const inputs[3] = {a.q, a.k, a.v};
  for (int i = 0; i < 3; ++i) r.is_codes[i] = is_type(inputs[i], python.qtensor);
  check_kinds(r);
  const bool has_recipe = a.recipe != Py_None;
  require(!has_recipe || (!r.is_codes[0] && is_type(a.recipe, python.recipe)));
  if (has_recipe) read_recipe(a.recipe, r.scaling);
  for (int i = 0; i < 3; ++i) {
    PyObject* const x = inputs[i];
    Scaling& s = r.scaling[i];
    if (!r.is_codes[i]) {
      r.tensor[i] = x;
      if (!has_recipe) s = r.method->floats[i];
      continue;
    }
    r.tensor[i] = attribute(x, n.data);
    const Granularity granularity = granularity_of(attribute(x, n.granularity).ptr());
    // A recipe says nothing else of codes; per head is its default.
    require(!has_recipe || (!s.scale && (s.granularity == granularity || s.granularity == Granularity::kHead)));
    const nb::object block = attribute(x, n.block_size);
    s = {granularity, int(integer(attribute(x, n.bits).ptr())), block.is_none() ? 1 : integer(block.ptr()),
         attribute(x, n.scale)};
  }
  set_rest(a, r);
  if (is_name(a.out_scale, n.bound)) r.out_scale = Py_None, r.bounds_output = true;
  return r;
}

Request request_of(const Flat& a) {
  const Names& n = names();
  require(a.cu_seqlens_q == Py_None && a.cu_seqlens_k == Py_None);
  require(!flag(a.smooth_k) && !flag(a.rotate) && !flag(a.dynamic_out) && is_name(a.rule, n.exact));
  Request r;
  require(PyList_Size(a.sizes) == 8 && PyList_Size(a.number_scales) == 3);
  read_window(PyList_GetItem(a.sizes, 6), PyList_GetItem(a.sizes, 7), r);
  r.method = &method_named(a.method);
  const char* const codes = PyUnicode_AsUTF8AndSize(a.codes, nullptr);
  if (!codes) nb::raise_python_error();
  for (int i = 0; i < 3; ++i) r.is_codes[i] = std::strchr(codes, "qkv"[i]) != nullptr;
  check_kinds(r);
  PyObject* const inputs[3] = {a.q, a.k, a.v};
  PyObject* const scales[3] = {a.q_scale, a.k_scale, a.v_scale};
  PyObject* const granularities[3] = {a.q_granularity, a.k_granularity, a.v_granularity};
  for (int i = 0; i < 3; ++i) {
    r.tensor[i] = inputs[i];
    Scaling& s = r.scaling[i];
    s.granularity = granularity_of(granularities[i]);
    if (s.granularity == Granularity::kBlock) s.block = integer(PyList_GetItem(a.sizes, i));
    s.bits = int(integer(PyList_GetItem(a.sizes, 3 + i)));
    s.scale = scales[i];
    PyObject* const number = PyList_GetItem(a.number_scales, i);  // 0: none
    if (!r.is_codes[i] && !s.scale && PyFloat_AsDouble(number) != 0) s.scale = number;
  }
  set_rest(a, r);
  r.bounds_output = flag(a.bound_out);
  return r;
}

double softmax_scale(PyObject* given, int64_t head_dim) {
  if (given == Py_None) return 1.0 / std::sqrt(double(head_dim));
  require(PyFloat_CheckExact(given) || PyLong_CheckExact(given));
  const double scale = PyFloat_AsDouble(given);
  if (PyErr_Occurred()) PyErr_Clear(), throw Declined{};  // an int that is too large
  require(scale > 0 && scale < INFINITY);
  return scale;
}

Response serve_on_cpu(const Request& r, const Reader& read, const TorchTensor (&t)[3]) {
  require(r.backend == Py_None || is_name(r.backend, names().cpu));
  require(r.out_scale == Py_None);
  const bool look = r.check_finite == Py_None || flag(r.check_finite);
  const TensorView q = view_of(t[0]), k = view_of(t[1]), v = view_of(t[2]);
  check_shapes(t, q, k, v, r.enable_gqa);

  Call call{};
  call.method = r.method->method;
  call.batch = q.shape[0], call.heads_q = q.shape[1], call.nq = q.shape[2], call.head_dim = q.shape[3];
  call.heads_k = k.shape[1], call.nk = k.shape[2], call.value_dim = v.shape[3];
  call.q_block = call.k_block = 1;
  call.sm_scale = softmax_scale(r.scale, call.head_dim);
  set_key_range(r, call);
  if (r.attn_mask) {
    const TensorView keep = read_mask(read, r.attn_mask, torch_library.dtype.boolean, call);
    call.keep = keep.as<uint8_t>(), call.keep_batch = keep.shape[0];
  }
  if (r.bias) {
    const TensorView bias = read_mask(read, r.bias, torch_library.dtype.int32, call);
    require(!look || !is_saturated(bias));
    call.bias = bias.as<int32_t>(), call.bias_batch = bias.shape[0];
  }
  const bool has_type = r.out_dtype != Py_None;
  require(!has_type || find_out_type(r.out_dtype, call.out_type));

  const nb::object number_of_threads = nb::steal(PyObject_CallNoArgs(python.get_num_threads));
  if (!number_of_threads.is_valid()) nb::raise_python_error();
  const int threads = int(integer(number_of_threads.ptr()));
  const Kernels& kernels = *supported_kernels().front();
  const int64_t* const q_step = t[0].stride + t[0].axes - 3;
  const bool tokens_first = t[0].axes > 2 && q_step[0] < q_step[1];
  require(!read.is_dispatched() || t[0].axes == 4 || !tokens_first);  // the op promises contiguous memory then
  CallRun run(kernels, call, threads, t[0].axes, tokens_first);
  Response found;
  const auto make_statistics = [&] {
    if (!r.return_lse) return;
    for (const auto& [to, tensor] : {std::pair(&call.t_max, &found.t_max), std::pair(&call.l_sum, &found.l_sum)})
      *to = reinterpret_cast<int64_t*>(empty_statistics(t[0], torch_library.dtype.int64, int64_dtype, *tensor));
  };
  const bool float_q = !r.is_codes[0], float_kv = !r.is_codes[1];
  const auto one_of = [](const Scaling& s, std::initializer_list<Granularity> kinds) {
    require(std::find(kinds.begin(), kinds.end(), s.granularity) != kinds.end());
  };
  using G = Granularity;
  FloatType type{};
  if (float_q) {
    type = float_type_of(t[0].dtype);
    require(!float_kv || (t[1].dtype == t[0].dtype && t[2].dtype == t[0].dtype));
  } else {
    one_of(r.scaling[0], {G::kTensor, G::kHead, G::kToken, G::kBlock});
    call.q = q.as<int8_t>(), call.q_scale = read_scale(read, t[0], r.scaling[0]).as<float>();
    call.q_block = r.scaling[0].block;
  }
  constexpr OutType same[] = {OutType::kFloat32, OutType::kFloat16, OutType::kBFloat16};
  if (!has_type) call.out_type = float_q ? same[int(type)] : OutType::kInt8;
  TensorView v_scale;
  if (float_kv) {
    require(!is_integer(call.out_type) && !r.bounds_output);
  } else {
    one_of(r.scaling[1], {G::kTensor, G::kHead, G::kBlock});
    one_of(r.scaling[2], {G::kTensor, G::kHead, G::kChannel});
    require(!is_integer(call.out_type) || r.scaling[2].bits == 8);
    require(r.bounds_output ? is_integer(call.out_type) : call.out_type != OutType::kInt8);
    v_scale = read_scale(read, t[2], r.scaling[2]);
    call.k = k.as<int8_t>(), call.v = v.as<int8_t>();
    call.k_scale = read_scale(read, t[1], r.scaling[1]).as<float>(), call.v_scale = v_scale.as<float>();
    call.k_block = r.scaling[1].block;
  }
  Quantization work{kernels, {}, look};
  const TensorView* const tensors[3] = {&q, &k, &v};
  for (int i = 0; i < 3; ++i) {
    if (r.is_codes[i]) continue;
    require(t[i].stride[t[i].axes - 1] == 1);
    work.input.push_back(read_float(read, *tensors[i], type, r.scaling[i]));
  }
  const RunningCall running;
  if (is_integer(call.out_type)) found.out_scale = set_default_out_scale(call, v_scale);
  make_statistics();
  found.out = work.input.empty() ? run.run() : run.run(work);
  require(found.out.is_valid());  // Python says which of them is not finite
  return found;
}

// --- On a GPU -----------------------------------------------------------------------------------------------------

OutType type_of(int32_t dtype) {
  for (int i = 0; i < 5; ++i)
    if (dtype == number_of(OutType(i))) return OutType(i);
  throw Declined{};
}

gpu::Tensor gpu_mask(const Reader& read, const Given& mask, int32_t dtype, const gpu::Problem& p) {
  const TorchTensor t = read(mask);
  require(t.dtype == dtype);
  const gpu::Tensor m = gpu::tensor_of(t, OutType::kFloat32);
  require(p.batch() % m.shape[0] == 0 && (m.shape[1] == 1 || m.shape[1] == p.heads()) &&
          (m.shape[2] == 1 || m.shape[2] == p.nq()) && (m.shape[3] == 1 || m.shape[3] == p.nk()));
  return m;
}

// The static scale of a float tensor x, as `gpu.scales` normalizes it.
gpu::Tensor gpu_static_scale(const Reader& read, const Given& scale, const gpu::Tensor& x, bool per_head) {
  const TorchTensor t = read(scale);
  require(t.dtype == torch_library.dtype.float32 && t.axes <= 4);
  int64_t count = 1;
  for (int64_t i = 0; i < t.axes; ++i) count *= t.shape[i];
  gpu::Tensor found;
  found.data = t.data;
  if (count == 1) return found;
  require(per_head && (t.axes == 1 || t.axes == 4));
  if (t.axes == 1) {
    require(t.shape[0] == x.shape[1]);
    found.shape[1] = t.shape[0], found.stride[1] = t.stride[0];
    return found;
  }
  require((t.shape[0] == 1 || t.shape[0] == x.shape[0]) && t.shape[1] == x.shape[1] && t.shape[2] == 1 &&
          t.shape[3] == 1);
  for (int i = 0; i < 4; ++i) found.shape[i] = t.shape[i], found.stride[i] = t.stride[i];
  return found;
}

// The scale of int8 codes, as QTensor normalizes it.
gpu::Tensor gpu_code_scale(const Reader& read, const Scaling& how, const gpu::Tensor& codes) {
  const TorchTensor t = read(how.scale);
  require(t.dtype == torch_library.dtype.float32 && t.axes == 4);
  const bool heads = t.shape[1] == codes.shape[1] && (t.shape[0] == 1 || t.shape[0] == codes.shape[0]);
  switch (how.granularity) {
    case Granularity::kTensor: require(t.shape[0] == 1 && t.shape[1] == 1 && t.shape[2] == 1); break;
    case Granularity::kHead: require(heads && t.shape[2] == 1); break;
    case Granularity::kToken: require(heads && t.shape[2] == codes.shape[2]); break;
    default: require(false);
  }
  require(t.shape[3] == 1);
  gpu::Tensor found;
  found.data = t.data;
  for (int i = 0; i < 4; ++i) found.shape[i] = t.shape[i], found.stride[i] = t.stride[i];
  return found;
}

// Returns a program's cubin, which Python finds on disk or compiles; empty where nothing can be compiled here.
std::string compile(const gpu::Program& program) {
  if (python.machine_code == Py_None) return {};
  const nb::object code =
      nb::handle(python.machine_code)(program.source->file, program.source->entry, gpu::macros_of(program));
  if (code.is_none()) return {};
  const nb::bytes bytes = nb::cast<nb::bytes>(code);
  return {bytes.c_str(), bytes.size()};
}

// Queues the launches of a call.
class LaunchesOnGpu : public gpu::Launches {
 public:
  LaunchesOnGpu(int32_t device_index, void* stream) : device_(gpu::find_device(device_index)), stream_(stream) {
    require(device_ && device_->gpu().is_hopper());
  }
  // On the current stream of a tensor's device.
  explicit LaunchesOnGpu(const TorchTensor& q) : LaunchesOnGpu(q.device_index, nullptr) {
    require(torch_library.current_stream(q.device_index, stream_));
  }
  const gpu::Gpu& gpu() const override { return device_->gpu(); }
  const char* constant(uint64_t bits) override { return device_->constant(bits); }
  void launch(gpu::Plan& plan) override {
    void* functions[gpu::kMostLaunches];
    require(device_->load(plan, compile, functions));
    const nb::gil_scoped_release released;
    device_->launch(plan, functions, stream_);
  }
  void clear(char* from, int64_t bytes) override { device_->clear(from, bytes, stream_); }
  void fill(float* to, float number) override {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    device_->fill(to, bits, stream_);
  }

 private:
  gpu::Device* device_;
  void* stream_ = nullptr;
};

Response serve_on_gpu(const Request& r, const Reader& read, const TorchTensor (&t)[3], gpu::Launches& launches) {
  require(r.backend == Py_None || is_name(r.backend, names().cuda));
  require(r.check_finite == Py_None || !flag(r.check_finite));  // values are read by Python alone
  require(r.left == kUnbounded && r.right == kUnbounded);       // no kernel of the plan knows a window
  check_shapes(t, view_of(t[0]), view_of(t[1]), view_of(t[2]), r.enable_gqa);
  gpu::ProblemCall call;
  gpu::Problem& p = call.p;
  call.q = t[0], call.return_lse = r.return_lse;
  p.method = r.method->method;
  require(gpu::has_kernels(p.method));
  p.q = gpu::tensor_of(t[0], type_of(t[0].dtype)), p.k = gpu::tensor_of(t[1], type_of(t[1].dtype));
  p.v = gpu::tensor_of(t[2], type_of(t[2].dtype));
  require(gpu::has_served_types(p) && r.is_codes[0] == p.q.is_codes() && r.is_codes[1] == p.k.is_codes());
  p.sm_scale = softmax_scale(r.scale, p.head_dim());
  p.is_causal = r.is_causal;
  if (r.is_causal && r.bottom_right) p.causal_offset = p.nk() - p.nq();
  if (r.attn_mask) p.keep = gpu_mask(read, r.attn_mask, torch_library.dtype.boolean, p);
  if (r.bias) p.bias = gpu_mask(read, r.bias, torch_library.dtype.int32, p);
  p.out_type = p.q.is_codes() ? OutType::kInt8 : p.q.type;
  require(r.out_dtype == Py_None || find_out_type(r.out_dtype, p.out_type));
  gpu::Tensor* const tensors[3] = {&p.q, &p.k, &p.v};
  int given = 0, floats = 0;
  for (int i = 0; i < 3; ++i) {
    const Scaling& how = r.scaling[i];
    if (r.is_codes[i]) {
      p.scale[i] = gpu_code_scale(read, how, *tensors[i]);
      require(i == 0 || how.granularity != Granularity::kToken);
      continue;
    }
    ++floats;
    p.per_head[i] = how.granularity == Granularity::kHead;
    require(how.bits == 8 && (p.per_head[i] || how.granularity == Granularity::kTensor));
    if (!how.scale) continue;
    ++given;
    if (how.scale.is_number()) {  // the recipe has checked it
      set_number(call, i, how.scale.number(), launches);
    } else {
      p.scale[i] = gpu_static_scale(read, how.scale, *tensors[i], p.per_head[i]);
    }
  }
  require(given == 0 || given == floats);
  if (r.is_codes[2]) {
    require(!p.has_integer_output() || r.scaling[2].bits == 8);
    p.v.available = torch_library.bytes_left(t[2], 1);
  }
  const bool has_out_scale = r.out_scale != Py_None;
  require(!(has_out_scale || r.bounds_output) || p.has_integer_output());
  require(has_out_scale || r.bounds_output || p.out_type != OutType::kInt8);
  if (has_out_scale && !PyFloat_CheckExact(r.out_scale)) {
    const TorchTensor s = read(r.out_scale);
    require(s.dtype == torch_library.dtype.float32 && s.axes == 4 && (s.shape[0] == 1 || s.shape[0] == p.batch()) &&
            (s.shape[1] == 1 || s.shape[1] == p.heads()) && s.shape[2] == 1 && s.shape[3] == 1);
    p.given_out_scale = gpu::tensor_of(s, OutType::kFloat32);
    call.out_scale = nb::borrow(r.out_scale);
  } else if (has_out_scale) {
    const double number = PyFloat_AsDouble(r.out_scale);
    require(number >= python.least_recipe_scale && number <= std::numeric_limits<float>::max());
    const int64_t one[4] = {1, 1, 1, 1};
    call.out_scale = torch_library
                         .empty(4, one, one, torch_library.dtype.float32, out_dtypes[int(OutType::kFloat32)],
                                p.given_out_scale.data, &t[0])
                         .to_python();
    launches.fill(reinterpret_cast<float*>(p.given_out_scale.data), float(number));
  }
  const bool tokens_first = t[0].axes > 2 && t[0].stride[t[0].axes - 3] < t[0].stride[t[0].axes - 2];
  require(!read.is_dispatched() || t[0].axes == 4 || !tokens_first);  // the op promises contiguous memory then
  gpu::Response found;
  gpu::Refusal why;
  require(gpu::run(call, launches, why, found));
  return std::move(found.of_call);
}

Response serve(const Request& r, bool dispatched) {
  Reader read(dispatched);
  TorchTensor t[3] = {read.first(r.tensor[0])};
  for (int i = 1; i < 3; ++i) t[i] = read(r.tensor[i]);
  if (!t[0].is_cuda) return serve_on_cpu(r, read, t);
  LaunchesOnGpu launches(t[0]);
  return serve_on_gpu(r, read, t, launches);
}

nb::object to_tuple(const Response& r) {
  return nb::make_tuple(r.out.to_python(), r.out_scale.to_python(), r.t_max.to_python(), r.l_sum.to_python());
}

// Whether a call of float q on a GPU may be one for its kernels.
bool is_for_gpu(const ServedMethod& m, PyObject* backend, int32_t device_index) {
  if (python.machine_code == Py_None || !(backend == Py_None || is_name(backend, names().cuda))) return false;
  if (!gpu::has_kernels(m.method)) return false;
  const gpu::Device* const device = gpu::find_device(device_index);
  return device && device->gpu().is_hopper();
}

bool is_for_gpu(const Arguments& a, int32_t device_index) {
  if (a.cu_seqlens_q != Py_None) return false;
  for (const ServedMethod& m : python.methods)
    if (is_name(a.method, m.name)) return is_for_gpu(m, a.backend, device_index);
  return false;
}

nb::object attend(nb::args given) {
  if (!is_ready) return nb::none();
  const auto arguments = by_position<Arguments>(given, kArguments);
  // Most calls for other kernels leave at once, because to throw takes microseconds.
  TorchTensor q;
  if (is_type(arguments.q, python.tensor) && torch_library.read(arguments.q, q) && q.is_cuda &&
      !is_for_gpu(arguments, q.device_index))
    return nb::none();
  try {
    const Request request = request_of(arguments);
    for (PyObject* watcher : python.watchers) require(!truth_of_call(watcher));
    require(integer(attribute(python.forward_ad, names()._current_level).ptr()) < 0);
    const Response found = serve(request, false);
    if (!found.out_scale.is_valid() && !found.t_max.is_valid()) return found.out.to_python();
    return to_tuple(found);
  } catch (const Declined&) {
    return nb::none();
  }
}

// The same for the custom op, which torch's dispatcher has called.
nb::object attend_flat(nb::args given) {
  if (!is_ready) return nb::none();
  if (TorchTensor q; given.size() && python.machine_code == Py_None && torch_library.read(given[0], q) && q.is_cuda)
    return nb::none();
  try {
    const Response found = serve(request_of(by_position<Flat>(given, kFlat)), true);
    return to_tuple(found);
  } catch (const Declined&) {
    return nb::none();
  }
}

// --- Kernels of the op's overloads `inference` and `inference_scaled` ------------------------------------------------

// An overload: its arguments are q, k and v, so many Tensor?, so many floats, and the options' number.
struct Overload {
  const char* name;
  int optional, floats;
  TorchOps::Kernel kernel;
  PyObject* serve;  // Python's function of the same arguments, which serves what is declined here

  int tensors() const { return 3 + optional; }
  int options() const { return tensors() + floats; }
  nb::object call_python(nb::handle arguments) const {
    PyObject* const found = PyObject_CallObject(serve, arguments.ptr());
    if (!found) nb::raise_python_error();
    return nb::steal(found);
  }
};

// What Python tells of the number of options: (is_causal, enable_gqa, causal_align, check_finite, backend, method,
// codes, three granularities, three widths in bits, out_dtype). The reference is kept for as long as the process runs.
PyObject* python_options_of = nullptr;

// Options that have been seen, by their number. Each is a request without tensors; `method` is null where none of them
// is served here. The GIL guards it.
std::unordered_map<int64_t, Request>& seen_options = *new std::unordered_map<int64_t, Request>;

const Request& options_of(int64_t number) {
  if (const auto at = seen_options.find(number); at != seen_options.end()) return at->second;
  const nb::object found = nb::handle(python_options_of)(number);
  const auto value = [&](size_t i) { return element(found, i).ptr(); };
  Request r;
  for (const ServedMethod& m : python.methods)
    if (is_name(value(5), m.name)) r.method = &m;
  r.is_causal = flag(value(0)), r.enable_gqa = flag(value(1)), r.bottom_right = is_bottom_right(value(2));
  r.check_finite = kept(value(3)), r.backend = kept(value(4)), r.out_dtype = kept(value(13));
  const char* const codes = PyUnicode_AsUTF8AndSize(value(6), nullptr);
  if (!codes) nb::raise_python_error();
  for (int i = 0; r.method && i < 3; ++i) {
    r.is_codes[i] = std::strchr(codes, "qkv"[i]) != nullptr;
    r.scaling[i] = r.method->floats[i];
    if (value(7 + i) != Py_None) r.scaling[i].granularity = granularity_of(value(7 + i));
    if (value(10 + i) != Py_None) r.scaling[i].bits = int(integer(value(10 + i)));
  }
  return seen_options.emplace(number, std::move(r)).first->second;
}

// The arguments of a call of an overload. Those that it does not have are null and 0.
struct InferenceCall {
  Given tensor[8];        // q, k, v, attn_mask, bias and the scales of q, k and v
  double number[4] = {};  // the softmax scale and the scales of q, k and v; 0: none
  int64_t options = 0;
};

// The same as torch's dispatcher hands them over.
class DispatchedArguments {
 public:
  DispatchedArguments(const Overload& of, const uint64_t* stack) : of_(of) {
    std::copy_n(stack, of.options() + 1, argument_);
  }
  ~DispatchedArguments() {
    for (int i = 0; i < 3; ++i) torch_ops.free(argument_[i]);
    for (int i = 3; i < of_.tensors(); ++i) torch_ops.free_optional(argument_[i]);
  }
  DispatchedArguments(const DispatchedArguments&) = delete;

  InferenceCall call() const {
    InferenceCall c;
    for (int i = 0; i < of_.tensors(); ++i) c.tensor[i] = Given(tensor(i));
    for (int i = 0; i < of_.floats; ++i) c.number[i] = number(i);
    c.options = options();
    return c;
  }
  // Calls Python's function with them.
  nb::object call_python() const {
    nb::object all = nb::steal(PyTuple_New(of_.options() + 1));
    const auto set = [&](int i, nb::object x) { PyTuple_SetItem(all.ptr(), i, x.release().ptr()); };
    for (int i = 0; i < of_.tensors(); ++i) {
      void* const x = tensor(i);
      set(i, x ? MadeTensor(torch_ops.handle_of(x)).to_python() : nb::none());
    }
    for (int i = 0; i < of_.floats; ++i) set(of_.tensors() + i, nb::float_(number(i)));
    set(of_.options(), nb::int_(options()));
    return of_.call_python(all);
  }

 private:
  // The address of a tensor's implementation, or null.
  void* tensor(int i) const {
    return i < 3 ? TorchOps::implementation(argument_[i]) : TorchOps::optional_implementation(argument_[i]);
  }
  double number(int i) const {
    double x;
    std::memcpy(&x, &argument_[of_.tensors() + i], sizeof x);
    return x;
  }
  int64_t options() const { return int64_t(argument_[of_.options()]); }

  const Overload& of_;
  uint64_t argument_[16];
};

// Returns the output, or null where Python must serve the call.
MadeTensor serve_natively(const InferenceCall& call) {
  if (!is_ready || torch_ops.is_grad_enabled()) return {};  // Python refuses gradients
  try {
    Request r = options_of(call.options);
    TorchTensor q;
    if (!r.method || !read_memory(call.tensor[0], q)) return {};
    if (q.is_cuda && !is_for_gpu(*r.method, r.backend, q.device_index)) return {};  // to throw takes microseconds
    for (int i = 0; i < 3; ++i) r.tensor[i] = call.tensor[i];
    r.attn_mask = call.tensor[3], r.bias = call.tensor[4];
    nb::object scale;
    if (call.number[0] != 0) scale = nb::float_(call.number[0]), r.scale = scale.ptr();
    for (int i = 0; i < 3; ++i) {
      if (call.tensor[5 + i]) {
        r.scaling[i].scale = call.tensor[5 + i];
      } else if (call.number[1 + i] != 0) {
        r.scaling[i].scale = nb::object(nb::float_(call.number[1 + i]));
      }
    }
    for (int i = 0; i < 3; ++i) require(!r.is_codes[i] || r.scaling[i].scale);
    check_kinds(r);
    return serve(r, true).out;
  } catch (const Declined&) {
    return {};
  }
}

void run_kernel(const Overload& overload, uint64_t* stack) {
  const DispatchedArguments given(overload, stack);
  const bool is_python_thread = PyGILState_GetThisThreadState();
  const nb::gil_scoped_acquire in_register;
  try {
    MadeTensor out = serve_natively(given.call());
    if (!out.is_valid()) out = MadeTensor(given.call_python());
    void* const handle = out.release();
    stack[0] = uint64_t(uintptr_t(handle ? handle : torch_ops.handle_of(out.implementation())));
  } catch (nb::python_error& error) {
    if (!is_python_thread) throw;  // its Python error ends with this call
    const std::string text = error.what();
    error.restore();
    torch_ops.raise_python_error(text);
  }
}

// The same for code that Inductor has made, with the arguments as Python objects.
PyObject* run_inference(const Overload& overload, PyObject* const* given, Py_ssize_t count) {
  if (count != overload.options() + 1) throw std::invalid_argument("all arguments are needed, by position");
  InferenceCall call;
  for (int i = 0; i < overload.tensors(); ++i) call.tensor[i] = Given(given[i]);
  for (int i = 0; i < overload.floats; ++i) call.number[i] = PyFloat_AsDouble(given[overload.tensors() + i]);
  call.options = PyLong_AsLongLong(given[overload.options()]);
  if (PyErr_Occurred()) nb::raise_python_error();
  MadeTensor out = serve_natively(call);
  if (out.is_valid()) return out.to_python().release().ptr();
  const nb::object arguments = nb::steal(PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SetItem(arguments.ptr(), i, nb::borrow(given[i]).release().ptr());
  return overload.call_python(arguments).release().ptr();
}

Overload overloads[] = {{"attention.inference", 2, 0,
                         [](uint64_t* stack, uint64_t, uint64_t) { run_kernel(overloads[0], stack); }, nullptr},
                        {"attention.inference_scaled", 5, 4,
                         [](uint64_t* stack, uint64_t, uint64_t) { run_kernel(overloads[1], stack); }, nullptr}};

// Plain C functions of Python (METH_FASTCALL): a call of one touches less code than a call through nanobind, and right
// after Inductor's code none of it is in the processor's nearest caches.
template <int OVERLOAD>
PyObject* inference(PyObject*, PyObject* const* given, Py_ssize_t count) {
  try {
    return run_inference(overloads[OVERLOAD], given, count);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Registers an overload's kernel. Returns the dispatch keys that have it.
nb::list add_inference_kernel(const char* name, nb::handle serve, nb::handle options_of) {
  nb::list keys;
  if (!is_ready || !torch_library.has_python_objects() || !torch_ops.load()) return keys;
  for (Overload& overload : overloads) {
    if (std::strcmp(name, overload.name)) continue;
    overload.serve = kept(serve), python_options_of = kept(options_of);
    for (const char* key : {"CPU", "CUDA"})
      if (torch_ops.add_kernel("intflash", name, key, overload.kernel)) keys.append(key);
  }
  return keys;
}

// Notes what a call with these arguments would launch on a GPU of so many multiprocessors, from tensors in CPU memory.
// With 0 processors it hands the launches to the driver, which must be none of a GPU.
nb::object gpu_launches(int processors, nb::tuple given) {
  try {
    const Request request = request_of(by_position<Arguments>(nb::borrow<nb::args>(given), kArguments));
    Reader read(false);
    TorchTensor t[3] = {read.first(request.tensor[0])};
    for (int i = 1; i < 3; ++i) t[i] = read(request.tensor[i]);
    require(t[0].is_cpu);
    gpu::NotedLaunches noted({processors}, t[0], nullptr, nullptr);
    Response found;
    if (processors) {
      found = serve_on_gpu(request, read, t, noted);
    } else {
      LaunchesOnGpu launches(0, nullptr);
      found = serve_on_gpu(request, read, t, launches);
    }
    return nb::make_tuple(noted.noted, found.out.to_python(), found.out_scale.to_python(), found.t_max.to_python(),
                          found.l_sum.to_python());
  } catch (const Declined&) {
    return nb::none();
  }
}

void use_calls(nb::tuple classes, nb::tuple functions, nb::handle forward_ad, nb::tuple watchers, nb::tuple methods,
               nb::tuple limits) {
  python.tensor = kept(classes[0]), python.parameter = kept(classes[1]), python.qtensor = kept(classes[2]),
  python.recipe = kept(classes[3]);
  python.is_grad_enabled = kept(functions[0]), python.get_num_threads = kept(functions[1]);
  python.forward_ad = kept(forward_ad);
  python.watchers.clear(), python.methods.clear(), seen_options.clear();
  for (nb::handle watcher : watchers) python.watchers.push_back(kept(watcher));
  for (nb::handle entry : methods) {  // (name, number, default recipe)
    ServedMethod m{};
    m.name = kept(entry[0]);
    PyUnicode_InternInPlace(&m.name);
    m.method = Method(nb::cast<int>(entry[1]));
    read_recipe(entry[2].ptr(), m.floats);
    python.methods.push_back(std::move(m));
  }
  python.most_keys = nb::cast<int64_t>(limits[0]), python.most_head_dim = nb::cast<int64_t>(limits[1]);
  python.most_value_dim = nb::cast<int64_t>(limits[2]);
  python.least_recipe_scale = nb::cast<float>(limits[3]), python.least_scale = nb::cast<float>(limits[4]);
  python.bias_limit = nb::cast<int32_t>(limits[5]);
  is_ready = torch_library.is_found();
}

}  // namespace

void bind_attend(nb::module_& m) {
  m.def("use_calls", use_calls, nb::arg("classes"), nb::arg("functions"), nb::arg("forward_ad"), nb::arg("watchers"),
        nb::arg("methods"), nb::arg("limits"), "What `attend` needs of Python, see intflash/backends/cpu.py.");
  m.def("attend", attend,
        "The call of `attention` with all its arguments by position. Returns the output; or (output, its scale, Tmax, "
        "l), where these are wanted; or None where Python must serve the call.");
  m.def("attend_flat", attend_flat,
        "The call of the custom op with all values of op.FLAT by position. Returns (output, its scale or None, Tmax or "
        "None, l or None); or None as `attend`.");
  m.def("add_inference_kernel", add_inference_kernel, nb::arg("overload"), nb::arg("serve"), nb::arg("options_of"),
        "Registers the kernel of an overload of intflash::attention in C++, see intflash/op.py. Returns the dispatch "
        "keys that have it: none where this torch has no such interface.");
  static PyMethodDef of_overloads[] = {
      {"inference", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(inference<0>)), METH_FASTCALL,
       "The overload of that name for code that Inductor has made, with all arguments by position."},
      {"inference_scaled", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(inference<1>)), METH_FASTCALL,
       "The overload of that name for code that Inductor has made, with all arguments by position."}};
  for (PyMethodDef& method : of_overloads) m.attr(method.ml_name) = nb::steal(PyCFunction_New(&method, nullptr));
  m.def(
      "use_compiler", [](nb::handle machine_code) { python.machine_code = kept(machine_code); },
      nb::arg("machine_code").none(), "What compiles programs for GPUs, see intflash/backends/cuda/__init__.py.");
  m.def("gpu_launches", gpu_launches, nb::arg("processors"), nb::arg("arguments"),
        "The launches that a call of `attention` with these arguments, by position, would queue on a GPU, and its "
        "result before them; or None as `attend`. Tensors are in CPU memory: for tests. With 0 processors the launches "
        "go "
        "to the driver, which a test has replaced.");
  const auto names_of = [](const auto& list) {
    nb::list names;
    for (const char* name : list) names.append(name);
    return nb::tuple(names);
  };
  m.attr("ARGUMENTS") = names_of(kArguments);
  m.attr("FLAT") = names_of(kFlat);
}

}  // namespace intflash
