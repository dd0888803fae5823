// Runs a call whose tensors have been read: allocates its outputs and hands it to the kernels without the GIL.
#pragma once
#include <nanobind/nanobind.h>

#include <functional>
#include <optional>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/quantize_inputs.h"
#include "cpu/two_groups.hpp"
#include "host/signals.h"
#include "host/tensors.h"

namespace intflash {

namespace nb = nanobind;

// torch's dtypes by OutType, int32 and int64. Their references are never released.
inline PyObject* out_dtypes[5] = {};
inline PyObject *int32_dtype = nullptr, *int64_dtype = nullptr;

inline int32_t number_of(OutType type) {
  const TorchDtypes& d = torch_library.dtype;
  const int32_t numbers[] = {d.int8, d.int16, d.float16, d.bfloat16, d.float32};
  return numbers[int(type)];
}

// What a call gives: those that are not wanted are null.
struct Response {
  MadeTensor out, out_scale, t_max, l_sum;
};

inline bool is_integer(OutType type) { return type == OutType::kInt8 || type == OutType::kInt16; }

// The codes of a call on the calling thread. The memory is kept, because fresh pages cost more than the work of small
// calls.
struct CodeBuffer {
  std::vector<int8_t> bytes;
  void divide(std::vector<FloatInput>& x) {
    size_t total = 0;
    for (FloatInput& t : x) total += size_t(t.size());
    if (bytes.size() < total) bytes.resize(total);
    int8_t* p = bytes.data();
    for (FloatInput& t : x) t.codes = p, p += t.size();
  }
};

// Returns a float tensor [batch, heads, tokens, channels] that is quantized with scales of its own.
inline FloatInput float_input(const TensorView& tensor, FloatType type, bool per_head, int qmax) {
  FloatInput x;
  x.data = tensor.data;
  x.batch = tensor.shape[0], x.heads = tensor.shape[1], x.tokens = tensor.shape[2], x.channels = tensor.shape[3];
  std::copy_n(tensor.stride, 4, x.stride);
  x.type = type;
  x.bytes = type == FloatType::kFloat32 ? 4 : 2;
  x.qmax = qmax;
  x.is_static = false;
  x.per_head = per_head;
  x.amax.resize(size_t(x.count()));
  x.scales.resize(per_head ? size_t(x.count()) : 1);
  x.scale.data = x.scales.data();
  if (per_head) x.scale.stride[0] = x.heads, x.scale.stride[1] = 1;
  return x;
}

// Gives a float input a static scale: one number.
inline void set_scale(FloatInput& x, float number) {
  x.is_static = true, x.per_head = false;
  x.scales.assign(1, number);
  x.scale = {x.scales.data(), {0, 0, 0, 0}};
}

// Gives a float input static scales that lie in a tensor.
inline void set_scale(FloatInput& x, const View<float>& scale) {
  x.is_static = true, x.per_head = false;
  x.scale = scale;
}

// Sets the scale of integer output that no value exceeds, s_V * 127 / qmax, for each query head where there is one for
// each key head. Returns its tensor.
inline MadeTensor set_default_out_scale(Call& call, const TensorView& v_scale) {
  const int64_t heads = v_scale.shape[1] == 1 ? 1 : call.heads_q, group = call.heads_q / call.heads_k;
  const int64_t channels = v_scale.shape[3], shape[4] = {v_scale.shape[0], heads, 1, channels};
  const int64_t stride[4] = {heads * channels, channels, channels, 1};
  char* data = nullptr;
  MadeTensor made =
      torch_library.empty(4, shape, stride, torch_library.dtype.float32, out_dtypes[int(OutType::kFloat32)], data);
  const View<float> from = v_scale.as<float>();
  const float qmax = call.out_type == OutType::kInt8 ? 127.0f : 32767.0f;
  float* to = reinterpret_cast<float*>(data);
  for (int64_t b = 0; b < shape[0]; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t c = 0; c < channels; ++c) *to++ = *from.at(b, heads == 1 ? 0 : h / group, 0, c) * 127.0f / qmax;
  call.out_scale.data = reinterpret_cast<float*>(data);
  for (int i = 0; i < 4; ++i) call.out_scale.stride[i] = shape[i] == 1 ? 0 : stride[i];
  return made;
}

// Runs one call. The output is allocated by the calling thread when workers may have begun already.
class CallRun {
 public:
  // `axes`: of the output, the last ones of [batch, heads_q, nq, value_dim]; `tokens_first`: tokens lie before heads in
  // memory, as in a q that is a view of a model's QKV projection.
  CallRun(const Kernels& kernels, Call& call, int threads, int64_t axes, bool tokens_first)
      : kernels_(kernels), call_(call), threads_(threads), axes_(axes), tokens_first_(tokens_first) {}

  // Returns the output of codes.
  MadeTensor run() {
    call_.all_have_values = all_have_values(call_);
    run_attention(kernels_, call_, threads_, [this] { make_output(); }, check_signals);
    return take();
  }

  // Returns the output of floats, or of float q beside codes, or null where `look` asks for NaN and infinity and there
  // are some.
  MadeTensor run(Quantization& work) {
    static thread_local CodeBuffer buffer;
    buffer.divide(work.input);
    View<int8_t>* codes[] = {&call_.q, &call_.k, &call_.v};
    View<float>* scales[] = {&call_.q_scale, &call_.k_scale, &call_.v_scale};
    for (size_t i = 0; i < work.input.size(); ++i) {
      const FloatInput& x = work.input[i];
      *codes[i] = {x.codes, {x.heads * x.tokens * x.channels, x.tokens * x.channels, x.channels, 1}};
      *scales[i] = x.scale;
    }
    if (!work.run(threads_, [this] { make_output(); }, check_signals)) return take(), MadeTensor();
    call_.all_have_values = all_have_values(call_);
    run_attention(kernels_, call_, threads_, [] {}, check_signals);
    return take();
  }

 private:
  void make_output() {
    try {
      const int64_t shape[4] = {call_.batch, call_.heads_q, call_.nq, call_.value_dim};
      const int64_t row = call_.value_dim, rows = tokens_first_ ? call_.heads_q : call_.nq;
      call_.out.batch_step = call_.heads_q * call_.nq * row;
      call_.out.head_step = tokens_first_ ? row : rows * row;
      call_.out.row_step = tokens_first_ ? rows * row : row;
      const int64_t stride[4] = {call_.out.batch_step, call_.out.head_step, call_.out.row_step, 1};
      const int64_t* const sizes = shape + 4 - axes_;
      char* data = nullptr;
      out_ = torch_library.empty(axes_, sizes, stride + 4 - axes_, number_of(call_.out_type),
                                 out_dtypes[int(call_.out_type)], data);
      call_.out.set(data);
    } catch (...) {
      call_.out.fail();
      throw;
    }
    released_.emplace();
  }
  MadeTensor take() {
    released_.reset();
    return std::move(out_);
  }

  const Kernels& kernels_;
  Call& call_;
  const int threads_;
  const int64_t axes_;
  const bool tokens_first_;
  MadeTensor out_;
  std::optional<nb::gil_scoped_release> released_;
};

}  // namespace intflash
