// What the module uses of torch: the C functions that compiled models call (torch's
// csrc/inductor/aoti_torch/c/shim.h), the same in every version since 2.7, found at run time in the libraries that
// `import torch` has loaded. So one module, built without torch's headers, serves all versions.
//
// Reading a tensor this way takes 0.07 us and allocating one 0.3 us (docs/design/call-path.md has the other ways).
// Where the functions are not found, the module reads tensors by their Python methods and allocates by torch.empty.
#pragma once
#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

namespace intflash {

// A tensor's memory as torch has it. The pointers are valid while nobody changes the tensor.
struct TorchTensor {
  char* data = nullptr;
  int64_t axes = 0;
  const int64_t *shape = nullptr, *stride = nullptr;
  int32_t dtype = 0;
  bool is_cpu = false, is_cuda = false, is_meta = false;
  int32_t device_index = 0;        // of a CUDA tensor
  void* implementation = nullptr;  // torch's, see Torch::Handle
};

// Torch's libraries, which the process has loaded.
#ifdef __APPLE__
constexpr const char *kTorchCore = "@rpath/libtorch_cpu.dylib", *kTorchPython = "@rpath/libtorch_python.dylib";
#else
constexpr const char *kTorchCore = "libtorch_cpu.so", *kTorchPython = "libtorch_python.so";
#endif
inline void* loaded_library(const char* name) { return dlopen(name, RTLD_NOLOAD | RTLD_LAZY); }

// Finds a library's function. Returns whether it is there.
template <class F>
bool find_function(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function;
}

// A function of torch's stable C interface: it returns 0, or what went wrong.
template <class... Arguments>
using TorchFunction = int32_t (*)(Arguments...);

// The numbers of torch's dtypes.
struct TorchDtypes {
  int32_t int8, int16, int32, int64, float16, bfloat16, float32, boolean;
};

// A tensor that the module hands to its caller: memory that torch has made for it, or a Python object. Null by default.
class MadeTensor {
 public:
  MadeTensor() = default;
  explicit MadeTensor(nanobind::object tensor) : object_(std::move(tensor)) {}
  explicit MadeTensor(void* handle) : handle_(handle) {}  // owned from here on
  MadeTensor(MadeTensor&& other) noexcept
      : object_(std::move(other.object_)), handle_(std::exchange(other.handle_, nullptr)) {}
  MadeTensor& operator=(MadeTensor&& other) noexcept {
    std::swap(object_, other.object_), std::swap(handle_, other.handle_);
    return *this;
  }
  ~MadeTensor();

  bool is_valid() const { return handle_ || object_.is_valid(); }
  // Returns the Python object; of a null tensor None.
  nanobind::object to_python() const;
  // Returns torch's handle, which the caller owns; of a Python object null.
  void* release() { return std::exchange(handle_, nullptr); }
  // Returns the address of torch's implementation of it; of a null tensor null.
  void* implementation() const;

 private:
  nanobind::object object_;
  void* handle_ = nullptr;
};

class Torch {
 public:
  using Handle = void*;  // of a tensor: the address of an at::Tensor, which is the address of its implementation

  TorchDtypes dtype{};

  // Whether tensors can be read. `make_empty` is torch.empty_strided.
  bool is_found() const { return is_found_; }

  // Finds the functions. A second call replaces `make_empty`; with `find` false nothing is used but Python methods.
  void load(nanobind::handle make_empty, bool find) {
    cdata_ = PyUnicode_InternFromString("_cdata");
    make_empty_ = make_empty.inc_ref().ptr();
    is_found_ = find && find_functions();
  }

  // Reads a dense tensor of torch. Returns false where it is none: of sparse and nested ones torch has no strides or
  // sizes, others have no memory.
  bool read(nanobind::handle tensor, TorchTensor& t) const { return describe(tensor, t) && t.data; }

  bool read_implementation(void* implementation, TorchTensor& t) const {
    return describe_implementation(implementation, t) && t.data;
  }

  // The same, also of tensors without memory ("meta").
  bool describe(nanobind::handle tensor, TorchTensor& t) const {
    void* const implementation = implementation_of(tensor);
    if (implementation) return describe_implementation(implementation, t);
    PyErr_Clear();
    return false;
  }

  bool describe_implementation(void* implementation, TorchTensor& t) const {
    t.implementation = implementation;
    const Handle handle = &t.implementation;
    int32_t device = 0;
    int64_t *shape = nullptr, *stride = nullptr;
    void* data = nullptr;
    if (get_device_type_(handle, &device) || get_dim_(handle, &t.axes) || get_sizes_(handle, &shape) ||
        get_strides_(handle, &stride) || get_dtype_(handle, &t.dtype) || get_data_ptr_(handle, &data))
      return false;
    t.is_cpu = device == cpu_, t.is_cuda = device == cuda_, t.is_meta = device == meta_;
    if (t.is_cuda && get_device_index_(handle, &t.device_index)) return false;
    t.shape = shape, t.stride = stride, t.data = static_cast<char*>(data);
    return true;
  }

  // Returns the address of a tensor's TensorImpl, or null with a Python error. A pointer to it is a handle.
  void* implementation_of(nanobind::handle tensor) const {
    PyObject* number = PyObject_GetAttr(tensor.ptr(), cdata_);
    void* found = number ? PyLong_AsVoidPtr(number) : nullptr;
    Py_XDECREF(number);
    return found;
  }

  // Returns the bytes from a tensor's first element to the end of its storage.
  int64_t bytes_left(const TorchTensor& t, int64_t element_bytes) const {
    void* implementation = t.implementation;
    const Handle handle = &implementation;
    int64_t bytes = 0, offset = 0;
    if (get_storage_size_(handle, &bytes) || get_storage_offset_(handle, &offset)) return 0;
    return bytes - offset * element_bytes;
  }

  // Returns the stream on which torch queues work of this thread, or false where this torch does not tell.
  bool current_stream(int32_t device_index, void*& stream) const {
    return get_stream_ && !get_stream_(device_index, &stream);
  }

  // Allocates memory beside a tensor; `free` returns it to torch, which hands it out again in the order of the stream.
  // Returns null where torch has none: `empty` then says so.
  void* allocate(int64_t bytes, const TorchTensor& like, char*& data) const {
    Handle made = nullptr;
    const int64_t step = 1;
    void* memory = nullptr;
    if (empty_strided_(1, &bytes, &step, dtype.int8, like.is_cuda ? cuda_ : cpu_, like.device_index, &made) ||
        get_data_ptr_(made, &memory))
      return nullptr;
    data = static_cast<char*>(memory);
    return made;
  }
  void free(void* memory) const { delete_(memory); }

  // Allocates a tensor, on a CPU or on the device of `like`. `python_dtype` is the dtype of that number.
  MadeTensor empty(int64_t axes, const int64_t* shape, const int64_t* stride, int32_t number,
                   nanobind::handle python_dtype, char*& data, const TorchTensor* like = nullptr) const {
    namespace nb = nanobind;
    Handle made = nullptr;
    const bool on_gpu = like && like->is_cuda;
    const int32_t index = on_gpu ? like->device_index : 0;
    if (has_python_objects() && !empty_strided_(axes, shape, stride, number, on_gpu ? cuda_ : cpu_, index, &made)) {
      MadeTensor tensor(made);
      void* memory = nullptr;
      if (!get_data_ptr_(made, &memory)) {
        data = static_cast<char*>(memory);
        return tensor;
      }
    }
    nb::list sizes, steps;  // torch says in Python what is wrong, as that there is no memory
    for (int64_t i = 0; i < axes; ++i) sizes.append(shape[i]), steps.append(stride[i]);
    const nb::object device = on_gpu ? nb::str("cuda:") + nb::str(nb::int_(index)) : nb::object(nb::str("cpu"));
    nb::object tensor =
        nb::handle(make_empty_)(sizes, steps, nb::arg("dtype") = python_dtype, nb::arg("device") = device);
    data = reinterpret_cast<char*>(nb::cast<intptr_t>(tensor.attr("data_ptr")()));
    return MadeTensor(std::move(tensor));
  }

  bool has_python_objects() const { return is_found_ && wrap_; }

  // Returns the Python object of a tensor. The handle may only be freed then.
  nanobind::object to_python(Handle tensor) const {
    PyObject* const made = wrap_(tensor);
    if (!made) nanobind::raise_python_error();
    return nanobind::steal(made);
  }

 private:
  template <class... Arguments>
  using Function = TorchFunction<Arguments...>;

  bool find_functions() {
    void *const core = loaded_library(kTorchCore), *const python = loaded_library(kTorchPython);
    if (!core || !python) return false;
    bool all = true;
    const auto find = [&](auto& function, const char* name) { all = find_function(core, name, function) && all; };
    find(get_dim_, "aoti_torch_get_dim");
    find(get_sizes_, "aoti_torch_get_sizes");
    find(get_strides_, "aoti_torch_get_strides");
    find(get_dtype_, "aoti_torch_get_dtype");
    find(get_data_ptr_, "aoti_torch_get_data_ptr");
    find(get_device_type_, "aoti_torch_get_device_type");
    find(get_device_index_, "aoti_torch_get_device_index");
    find(get_storage_size_, "aoti_torch_get_storage_size");
    find(get_storage_offset_, "aoti_torch_get_storage_offset");
    find(empty_strided_, "aoti_torch_empty_strided");
    find(delete_, "aoti_torch_delete_tensor_object");
    const auto number = [&](int32_t& value, const char* name) {
      int32_t (*function)() = nullptr;
      find(function, name);
      value = function ? function() : 0;
    };
    number(cpu_, "aoti_torch_device_type_cpu");
    number(cuda_, "aoti_torch_device_type_cuda");
    number(meta_, "aoti_torch_device_type_meta");
    number(dtype.int8, "aoti_torch_dtype_int8");
    number(dtype.int16, "aoti_torch_dtype_int16");
    number(dtype.int32, "aoti_torch_dtype_int32");
    number(dtype.int64, "aoti_torch_dtype_int64");
    number(dtype.float16, "aoti_torch_dtype_float16");
    number(dtype.bfloat16, "aoti_torch_dtype_bfloat16");
    number(dtype.float32, "aoti_torch_dtype_float32");
    number(dtype.boolean, "aoti_torch_dtype_bool");
    // PyObject* THPVariable_Wrap(at::TensorBase), by reference or by value: both take the tensor's address, and the one
    // by value leaves a tensor that may only be destroyed. It is C++, so that a version without it is no error.
    wrap_ = nullptr;
#ifndef __APPLE__
    if (void* cuda = loaded_library("libtorch_cuda.so"))
      find_function(cuda, "aoti_torch_get_current_cuda_stream", get_stream_);
#endif
    for (const char* name : {"_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE"})
      if (!wrap_) find_function(python, name, wrap_);
    return all;
  }

  bool is_found_ = false;
  PyObject *cdata_ = nullptr, *make_empty_ = nullptr;
  int32_t cpu_ = 0, cuda_ = 0, meta_ = 0;
  Function<Handle, int64_t*> get_dim_ = nullptr;
  Function<Handle, int64_t**> get_sizes_ = nullptr, get_strides_ = nullptr;
  Function<Handle, int32_t*> get_dtype_ = nullptr, get_device_type_ = nullptr, get_device_index_ = nullptr;
  Function<Handle, int64_t*> get_storage_size_ = nullptr, get_storage_offset_ = nullptr;
  Function<int32_t, void**> get_stream_ = nullptr;
  Function<Handle, void**> get_data_ptr_ = nullptr;
  Function<int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*> empty_strided_ = nullptr;
  Function<Handle> delete_ = nullptr;
  PyObject* (*wrap_)(Handle) = nullptr;
};

inline Torch torch_library;

inline MadeTensor::~MadeTensor() {
  if (handle_) torch_library.free(handle_);
}

inline void* MadeTensor::implementation() const {
  if (handle_) return *static_cast<void**>(handle_);
  return object_.is_valid() && !object_.is_none() ? torch_library.implementation_of(object_) : nullptr;
}

inline nanobind::object MadeTensor::to_python() const {
  if (handle_) return torch_library.to_python(handle_);
  return object_.is_valid() ? object_ : nanobind::object(nanobind::none());
}

}  // namespace intflash
