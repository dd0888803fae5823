// Kernels of torch ops in C++: registered by torch's stable C interface (torch's csrc/stable/library.h), which the
// module finds at run time as torch.h finds the rest. Every version since 2.7 has it.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/torch.h"

namespace intflash {

class TorchOps {
 public:
  using Handle = Torch::Handle;
  // Takes the arguments from the stack, owns them from there on, and leaves the results there. Called without the GIL.
  // An exception passes through torch to the caller of the op.
  using Kernel = void (*)(uint64_t* stack, uint64_t arguments, uint64_t results);

  // Finds the functions. Returns whether this torch has all of them.
  bool load() {
    void *const core = loaded_library(kTorchCore), *const python = loaded_library(kTorchPython);
    if (!core || !python) return false;
    bool all = true;
    const auto find = [&](auto& function, void* library, const char* name) {
      all = find_function(library, name, function) && all;
    };
    find(make_library_, core, "aoti_torch_library_init_impl");
    find(add_kernel_, core, "aoti_torch_library_impl");
    find(copy_handle_, core, "aoti_torch_new_tensor_handle");
    find(grad_mode_, core, "aoti_torch_grad_mode_is_enabled");
    // std::vector<int> THPUtils_unpackLongs(PyObject*)
    find(unpack_, python, "_Z20THPUtils_unpackLongsP7_object");
    find_function(core, "torch_delete_stable_ivalue", delete_optional_);  // from torch 2.13 on
    if (!minus_one_) minus_one_ = nanobind::make_tuple(-1).release().ptr();
    return all;
  }

  // Registers a kernel of an op's overload for a dispatch key. It stays until the process ends.
  bool add_kernel(const char* of_namespace, const char* overload, const char* key, Kernel kernel) const {
    void* library = nullptr;
    return !make_library_(of_namespace, key, "intflash._native", 0, &library) &&
           !add_kernel_(library, overload, kernel);
  }

  bool is_grad_enabled() const { return grad_mode_(); }

  // Return the address of a tensor's implementation. A Tensor? is 0 or the address of a handle.
  static void* implementation(uint64_t argument) { return *reinterpret_cast<void**>(argument); }
  static void* optional_implementation(uint64_t argument) {
    return argument ? implementation(*reinterpret_cast<uint64_t*>(argument)) : nullptr;
  }

  static void free(uint64_t argument) { torch_library.free(reinterpret_cast<Handle>(argument)); }
  void free_optional(uint64_t argument) const {
    if (!argument) return;
    uint64_t* const value = reinterpret_cast<uint64_t*>(argument);
    free(*value);
    if (delete_optional_) {
      delete_optional_(value);
    } else {
      delete value;  // as torch's header does
    }
  }

  // Returns a handle of a tensor, which the caller owns.
  Handle handle_of(void* implementation) const {
    Handle made = nullptr;
    if (copy_handle_(&implementation, &made)) throw std::runtime_error("torch could not pass on a tensor");
    return made;
  }

  // Throws torch's exception of the Python error that is set, so that the op's caller sees the error as it is. Torch's
  // class of it is in no interface; but torch throws it where it finds an error set after it has read the int -1.
  [[noreturn]] void raise_python_error(const std::string& text) const {
    unpack_(minus_one_);
    throw std::runtime_error(text);  // of a torch that reads ints in another way
  }

 private:
  template <class... Arguments>
  using Function = TorchFunction<Arguments...>;

  Function<const char*, const char*, const char*, uint32_t, void**> make_library_ = nullptr;
  Function<void*, const char*, Kernel> add_kernel_ = nullptr;
  Function<Handle, Handle*> copy_handle_ = nullptr;
  bool (*grad_mode_)() = nullptr;
  std::vector<int> (*unpack_)(PyObject*) = nullptr;
  Function<uint64_t*> delete_optional_ = nullptr;
  PyObject* minus_one_ = nullptr;  // (-1,)
};

inline TorchOps torch_ops;

}  // namespace intflash
