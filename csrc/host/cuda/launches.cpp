// Launches of kernels that Python has chosen and whose parameters it has packed, see
// src/intflash/backends/cuda/program.py.
#include <nanobind/nanobind.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "host/cuda/driver.h"
#include "host/module.h"

namespace nb = nanobind;

namespace intflash {
namespace {

gpu::Device& device_of(int index) {
  gpu::Device* const found = gpu::find_device(index);
  if (!found) throw std::runtime_error("libcuda.so.1 of NVIDIA's driver was not found or lacks functions");
  return *found;
}

// The memory of a Python object that has some, as ctypes structures do.
class Buffer {
 public:
  explicit Buffer(nb::handle of) {
    if (PyObject_GetBuffer(of.ptr(), &view_, PyBUF_SIMPLE)) nb::raise_python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  void* data() const { return view_.buf; }

 private:
  Py_buffer view_;
};

uintptr_t load_kernel(int device, nb::bytes code, const char* entry, uint32_t shared_bytes) {
  return reinterpret_cast<uintptr_t>(device_of(device).load(code.c_str(), entry, shared_bytes));
}

void launch_kernel(int device, uintptr_t kernel, nb::tuple grid, uint32_t threads, uint32_t shared_bytes, bool overlaps,
                   nb::tuple parameters, uintptr_t stream) {
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<void*> pointers;
  for (nb::handle x : parameters) {
    buffers.push_back(std::make_unique<Buffer>(x));
    pointers.push_back(buffers.back()->data());
  }
  const auto size = [&](int axis) { return nb::cast<uint32_t>(grid[axis]); };
  device_of(device).launch(
      {reinterpret_cast<void*>(kernel), {size(0), size(1), size(2)}, threads, shared_bytes, overlaps, pointers.data()},
      reinterpret_cast<void*>(stream));
}

template <class T, size_t N>
void fill(T (&to)[N], nb::tuple from) {
  if (from.size() != N) throw std::invalid_argument("a tensor map has five dimensions");
  for (size_t i = 0; i < N; ++i) to[i] = nb::cast<T>(from[i]);
}

nb::bytes tensor_map(int device, uintptr_t address, nb::tuple sizes, nb::tuple strides, nb::tuple box, int swizzle) {
  gpu::MapShape shape;
  fill(shape.sizes, sizes), fill(shape.strides, strides), fill(shape.box, box);
  shape.swizzle = swizzle, shape.address = reinterpret_cast<const char*>(address);
  ::TensorMap map;
  device_of(device).encode(shape, map);
  return nb::bytes(reinterpret_cast<const char*>(&map), sizeof map);
}

}  // namespace

void bind_launches(nb::module_& m) {
  m.def("load_kernel", load_kernel, nb::arg("device"), nb::arg("code"), nb::arg("entry"), nb::arg("shared_bytes"),
        "Loads a cubin and returns its kernel's handle, with this much dynamic shared memory allowed.");
  m.def("launch_kernel", launch_kernel, nb::arg("device"), nb::arg("kernel"), nb::arg("grid"), nb::arg("threads"),
        nb::arg("shared_bytes"), nb::arg("overlaps"), nb::arg("parameters"), nb::arg("stream"),
        "Queues a launch on a stream, whatever GPU is current. `parameters`: objects with a buffer, whose bytes are "
        "copied.");
  m.def("tensor_map", tensor_map, nb::arg("device"), nb::arg("address"), nb::arg("sizes"), nb::arg("strides"),
        nb::arg("box"), nb::arg("swizzle"), "The driver's 128 bytes of a tensor map of bytes with five dimensions.");
}

}  // namespace intflash
