// The memory of torch's tensors as the kernels address it.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>

#include "cpu/call.h"
#include "host/torch.h"

namespace intflash {

// Return elements of tuples (a torch.Size is one) without a Python object for the index.
inline nanobind::handle element(nanobind::handle tuple, size_t i) {
  return PyTuple_GetItem(tuple.ptr(), Py_ssize_t(i));
}
inline int64_t item(nanobind::handle tuple, size_t i) {
  const int64_t value = PyLong_AsLongLong(element(tuple, i).ptr());
  if (value == -1 && PyErr_Occurred()) nanobind::raise_python_error();
  return value;
}

// A tensor's memory, sizes and strides along batch, heads, tokens and channels. Missing axes are of size 1; the only
// axis of a vector is heads. An axis of size 1 is broadcast with stride 0.
struct TensorView {
  char* data = nullptr;
  int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};
  bool tokens_first = false;  // whether a tensor of four axes has tokens before heads in memory

  template <class Sizes, class Strides>
  void place(size_t axes, const Sizes& size, const Strides& step) {
    if (axes > 4) throw std::invalid_argument("a tensor of more than four axes");
    for (size_t i = 0; i < axes; ++i) {
      const size_t axis = axes == 1 ? 1 : i;
      if (size(i) != 1) shape[axis] = size(i), stride[axis] = step(i);
    }
    tokens_first = axes == 4 && step(1) < step(2);
  }
  template <class T>
  View<T> as() const {
    View<T> v;
    v.data = reinterpret_cast<const T*>(data);
    std::copy_n(stride, 4, v.stride);
    return v;
  }
};

inline TensorView read_tensor(nanobind::handle tensor) {
  TensorView v;
  if (tensor.is_none()) return v;
  TorchTensor t;
  if (torch_library.is_found()) {
    if (torch_library.read(tensor, t)) {
      v.data = t.data;
      v.place(size_t(t.axes), [&](size_t i) { return t.shape[i]; }, [&](size_t i) { return t.stride[i]; });
    }
  } else {
    v.data = reinterpret_cast<char*>(nanobind::cast<intptr_t>(tensor.attr("data_ptr")()));
    const nanobind::object shape = tensor.attr("shape"), stride = tensor.attr("stride")();
    v.place(nanobind::len(shape), [&](size_t i) { return item(shape, i); }, [&](size_t i) { return item(stride, i); });
  }
  // These are fake, functional and wrapped tensors.
  if (!v.data)
    throw std::invalid_argument("a tensor has no memory of its own here: it is a fake, functional or wrapped one");
  return v;
}

}  // namespace intflash
