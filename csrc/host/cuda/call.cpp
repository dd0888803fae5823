#include "host/cuda/call.h"

#include <algorithm>
#include <cstring>

#include "host/module.h"

namespace intflash::gpu {
namespace {

uint64_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Addresses of tensors without memory ("meta"), which are only planned for.
char* fake_memory(int64_t bytes) {
  static uintptr_t next = uintptr_t(1) << 40;
  char* const at = reinterpret_cast<char*>(next);
  next += uintptr_t(round_up(std::max<int64_t>(bytes, 1), 256));
  return at;
}

MadeTensor empty(int64_t axes, const int64_t* shape, const int64_t* stride, int32_t number, PyObject* dtype,
                 char*& data, const TorchTensor& like) {
  if (!like.is_meta) return torch_library.empty(axes, shape, stride, number, dtype, data, &like);
  data = fake_memory(1);
  return MadeTensor(nb::object(nb::none()));
}

// The call's working memory, which goes back to torch when the call returns.
class Workspace {
 public:
  Workspace(int64_t bytes, const TorchTensor& like) {
    if (!bytes) return;
    memory_ = torch_library.allocate(bytes, like, data);
    require(memory_);  // Python says that there is no memory
  }
  ~Workspace() {
    if (memory_) torch_library.free(memory_);
  }
  Workspace(const Workspace&) = delete;
  char* data = nullptr;

 private:
  void* memory_ = nullptr;
};

}  // namespace

Tensor tensor_of(const TorchTensor& t, OutType type) {
  require(t.axes <= 4);
  Tensor x;
  x.data = t.data, x.type = type;
  int64_t step = 1;
  for (int64_t axis = 3, i = t.axes - 1; axis >= 0; --axis, --i) {
    if (i >= 0) {
      require(t.shape[i] > 0);
      x.shape[axis] = t.shape[i], step = t.stride[i];
    }
    x.stride[axis] = step;
    step *= x.shape[axis];
  }
  return x;
}

nb::tuple macros_of(const Program& program) {
  nb::list macros;
  for (int i = 0; i < program.source->count(); ++i) {
    const Macro& macro = program.source->macros[i];
    const int32_t value = program.values[i];
    if (value == kLeftOut) continue;
    const nb::object text = macro.values ? nb::object(nb::str(macro.values[value])) : nb::str(nb::int_(value));
    macros.append(nb::make_tuple(macro.name, text));
  }
  return nb::tuple(macros);
}

void set_number(ProblemCall& call, int which, float number, Launches& launches) {
  call.numbers[which] = number;
  call.p.scale[which].data = const_cast<char*>(launches.constant(bits_of(number)));
  require(call.p.scale[which].data);
}

// --- Launches that are noted --------------------------------------------------------------------------------------

const char* NotedLaunches::constant(uint64_t bits) {
  if (like_.is_meta) return fake_memory(8);
  const char* const there = device_ ? device_->constant(bits) : nullptr;
  if (there) return there;
  const int64_t shape = 2, stride = 1;
  char* data = nullptr;
  keep(torch_library.empty(1, &shape, &stride, torch_library.dtype.int32, int32_dtype, data, &like_).to_python());
  if (device_) {
    device_->fill(data, uint32_t(bits), stream_), device_->fill(data + 4, uint32_t(bits >> 32), stream_);
  } else {
    std::memcpy(data, &bits, sizeof bits);
  }
  return data;
}

void NotedLaunches::launch(Plan& plan) {
  const auto map = [](const MapShape& m) {
    nb::list sizes, strides, box;
    for (uint64_t x : m.sizes) sizes.append(x);
    for (uint64_t x : m.strides) strides.append(x);
    for (uint32_t x : m.box) box.append(x);
    return nb::make_tuple(nb::tuple(sizes), nb::tuple(strides), nb::tuple(box), m.swizzle, uintptr_t(m.address));
  };
  for (int i = 0; i < plan.count; ++i) {
    const Launch& l = plan.launches[i];
    nb::dict note;
    note["file"] = l.program.source->file, note["entry"] = l.program.source->entry;
    note["macros"] = macros_of(l.program);
    note["grid"] = nb::make_tuple(l.grid[0], l.grid[1], l.grid[2]);
    note["threads"] = l.threads, note["shared_bytes"] = l.shared_bytes;
    note["parameters"] = nb::bytes(reinterpret_cast<const char*>(l.parameters), l.parameter_bytes);
    if (l.has_maps) {
      const char* const bytes = reinterpret_cast<const char*>(&l.maps);
      constexpr size_t kEncoded = 2 * sizeof(::TensorMap);  // what the driver fills in
      note["maps"] = nb::make_tuple(map(l.k_map), map(l.v_map));
      note["after_maps"] = nb::bytes(bytes + kEncoded, sizeof l.maps - kEncoded);
    }
    noted.append(note);
  }
}

void NotedLaunches::clear(char* from, int64_t bytes) {
  if (device_) {
    device_->clear(from, bytes, stream_);
  } else if (!like_.is_meta) {
    std::memset(from, 0, size_t(bytes));
  }
}

void NotedLaunches::fill(float* to, float number) {
  if (device_) {
    device_->fill(to, uint32_t(bits_of(number)), stream_);
  } else if (!like_.is_meta) {
    *to = number;
  }
}

// --- The run ------------------------------------------------------------------------------------------------------

bool run(ProblemCall& call, Launches& launches, Refusal& why, Response& found) {
  Problem& p = call.p;
  const TorchTensor& q = call.q;
  Choice choice;
  if (!choose(p, launches.gpu(), choice, why)) return false;
  if ((choice.fills_constants || choice.scores_in_kernel) && !p.has_integer_output() && call.numbers[0] &&
      call.numbers[1]) {  // known on the host
    const uint64_t bits = packed_score(p, call.numbers[0], call.numbers[1]);
    const int64_t one[4] = {1, 1, 1, 1};
    p.ready_score = packed(const_cast<char*>(launches.constant(bits)), one);
    require(p.ready_score.data);
    if (!choose(p, launches.gpu(), choice, why)) return false;
  }

  const int64_t* const step = q.stride + q.axes - 3;
  const bool tokens_first = q.axes > 2 && step[0] < step[1];
  const int64_t batch = p.batch(), heads = p.heads(), nq = p.nq(), d = p.v.shape[3];
  const auto& dtype = torch_library.dtype;
  intflash::Response& of_call = found.of_call;
  Memory memory;
  if (call.out.is_valid()) {
    TorchTensor out;
    require(torch_library.describe(call.out, out));
    memory.out = tensor_of(out, p.out_type);
    if (q.is_meta) memory.out.data = fake_memory(1);
    of_call.out = MadeTensor(call.out);
  } else if (!p.only_constants) {
    memory.out.type = p.out_type;
    const int64_t shape[4] = {batch, heads, nq, d};
    const int64_t stride[4] = {heads * nq * d, tokens_first ? d : nq * d, tokens_first ? heads * d : d, 1};
    for (int i = 0; i < 4; ++i) memory.out.shape[i] = shape[i], memory.out.stride[i] = stride[i];
    const int64_t skipped = 4 - q.axes;
    of_call.out = empty(q.axes, shape + skipped, stride + skipped, number_of(p.out_type), out_dtypes[int(p.out_type)],
                        memory.out.data, q);
  }
  if (call.return_lse) {
    int64_t steps[4], rows = 1;
    for (int64_t i = q.axes - 1; i-- > 0; rows *= q.shape[i]) steps[i] = rows;
    char* data = nullptr;
    of_call.t_max = empty(q.axes - 1, q.shape, steps, dtype.int64, int64_dtype, data, q);
    memory.t_max = reinterpret_cast<int64_t*>(data);
    of_call.l_sum = empty(q.axes - 1, q.shape, steps, dtype.int32, int32_dtype, data, q);
    memory.l = reinterpret_cast<int32_t*>(data);
  }
  if (call.out_scale.is_valid()) of_call.out_scale = MadeTensor(call.out_scale);
  if (p.has_integer_output() && !p.given_out_scale && choice.fills_constants) {
    const int64_t* const of = choice.output_shape;
    const int64_t steps[4] = {of[1] * of[2] * of[3], of[2] * of[3], of[3], 1};
    char* data = nullptr;
    of_call.out_scale = empty(4, of, steps, dtype.float32, out_dtypes[int(OutType::kFloat32)], data, q);
    memory.out_scale = reinterpret_cast<float*>(data);
  }
  const Workspace workspace(launches.keeps_memory() ? 0 : choice.bytes, q);
  memory.workspace = workspace.data;
  if (launches.keeps_memory() && choice.bytes) {
    const int64_t one = 1;
    found.workspace = empty(1, &choice.bytes, &one, dtype.int8, out_dtypes[int(OutType::kInt8)], memory.workspace, q);
    for (int i = 0; i < choice.part_count; ++i)
      found.parts.push_back({int64_t(uintptr_t(memory.workspace)) + choice.parts[i].offset, choice.parts[i].bytes});
  }
  if (choice.zeros.bytes) launches.clear(memory.workspace + choice.zeros.offset, choice.zeros.bytes);
  Plan plan;
  fill_plan(p, choice, memory, launches.gpu(), plan);
  if (choice.fills_constants) {
    found.score = packed(memory.workspace + choice.score, choice.score_shape);
    if (p.has_integer_output()) found.output = packed(memory.workspace + choice.output, choice.output_shape);
  }
  launches.launch(plan);
  return true;
}

}  // namespace intflash::gpu
