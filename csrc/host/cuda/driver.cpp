#include "host/cuda/driver.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <unordered_map>

namespace intflash::gpu {
namespace {

// What of cuda.h is used, whose interface is stable.
using Result = int;
struct LaunchAttribute {
  int id;
  int padding;
  union {
    int allowed;
    char bytes[64];
  };
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
constexpr int kProgrammaticStreamSerialization = 6;                                // CU_LAUNCH_ATTRIBUTE_...
constexpr int kMaxDynamicSharedBytes = 8;                                          // CU_FUNC_ATTRIBUTE_...
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedBytes = 97;  // CU_DEVICE_ATTRIBUTE_...
constexpr int kCaptureModeRelaxed = 2;
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING

struct Driver {
  Result (*init)(unsigned) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  Result (*error_text)(Result, const char**) = nullptr;
  Result (*device_get)(int*, int) = nullptr;
  Result (*device_attribute)(int*, int, int) = nullptr;
  Result (*retain)(void**, int) = nullptr;
  Result (*current)(void**) = nullptr;
  Result (*push)(void*) = nullptr;
  Result (*pop)(void**) = nullptr;
  Result (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned) = nullptr;
  Result (*kernel)(void**, void*, const char*) = nullptr;
  Result (*function)(void**, void*) = nullptr;
  Result (*set_attribute)(void*, int, int) = nullptr;
  Result (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;
  Result (*encode)(::TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                   const uint32_t*, int, int, int, int) = nullptr;
  Result (*memset8)(void*, unsigned char, size_t, void*) = nullptr;
  Result (*memset32)(void*, unsigned, size_t, void*) = nullptr;
  Result (*allocate)(void**, size_t) = nullptr;
  Result (*stream_create)(void**, unsigned) = nullptr;
  Result (*stream_synchronize)(void*) = nullptr;
  Result (*stream_destroy)(void*) = nullptr;
  Result (*exchange_mode)(int*) = nullptr;
  bool is_found = false;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return;
    bool all = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      all = all && function;
    };
    find(init, "cuInit");
    find(error_name, "cuGetErrorName");
    find(error_text, "cuGetErrorString");
    find(device_get, "cuDeviceGet");
    find(device_attribute, "cuDeviceGetAttribute");
    find(retain, "cuDevicePrimaryCtxRetain");
    find(current, "cuCtxGetCurrent");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
    find(load, "cuLibraryLoadData");
    find(kernel, "cuLibraryGetKernel");
    find(this->function, "cuKernelGetFunction");
    find(set_attribute, "cuFuncSetAttribute");
    find(launch, "cuLaunchKernelEx");
    find(encode, "cuTensorMapEncodeTiled");
    find(memset8, "cuMemsetD8Async");
    find(memset32, "cuMemsetD32Async");
    find(allocate, "cuMemAlloc_v2");
    find(stream_create, "cuStreamCreate");
    find(stream_synchronize, "cuStreamSynchronize");
    find(stream_destroy, "cuStreamDestroy_v2");
    find(exchange_mode, "cuThreadExchangeStreamCaptureMode");
    is_found = all && init(0) == 0;
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void check(Result result, const char* what) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().error_name(result, &name);
  driver().error_text(result, &text);
  throw std::runtime_error(std::string(what) + " failed: " + (name ? name : std::to_string(result).c_str()) + ", " +
                           (text ? text : "unknown error"));
}

// Makes a context current for as long as it lives.
class Current {
 public:
  explicit Current(void* context) {
    void* now = nullptr;
    check(driver().current(&now), "cuCtxGetCurrent");
    if (now == context) return;
    check(driver().push(context), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  ~Current() {
    void* popped;
    if (is_pushed_) driver().pop(&popped);
  }
  Current(const Current&) = delete;

 private:
  bool is_pushed_ = false;
};

// Allows, in this thread and for as long as it lives, what the capture of a graph forbids: loading a kernel, and
// allocating and filling memory outside of the graph.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { check(driver().exchange_mode(&mode_), "cuThreadExchangeStreamCaptureMode"); }
  ~OutsideOfCapture() { driver().exchange_mode(&mode_); }
  OutsideOfCapture(const OutsideOfCapture&) = delete;

 private:
  int mode_ = kCaptureModeRelaxed;
};

// The caller has made the device's context current.
void encode_map(const MapShape& shape, ::TensorMap& map) {
  constexpr uint32_t steps[5] = {1, 1, 1, 1, 1};
  const int swizzle = shape.swizzle == 32 ? 1 : shape.swizzle == 64 ? 2 : 3;
  // bytes; no interleaving; L2 promotion by 256 bytes; zeros outside
  check(driver().encode(&map, 0, 5, const_cast<char*>(shape.address), shape.sizes, shape.strides, shape.box, steps, 0,
                        swizzle, 3, 0),
        "cuTensorMapEncodeTiled");
}

void queue(const KernelLaunch& l, bool may_overlap, void* stream) {
  LaunchAttribute overlap{};
  overlap.id = kProgrammaticStreamSerialization, overlap.allowed = 1;
  const LaunchConfig config = {{l.grid[0], l.grid[1], l.grid[2]}, {l.threads, 1, 1}, l.shared_bytes, stream, &overlap,
                               l.overlaps && may_overlap};
  check(driver().launch(&config, l.kernel, l.parameters, nullptr), "cuLaunchKernelEx");
}

struct KernelKey {
  const void* device;
  Program program;
  uint32_t shared_bytes;
  bool operator==(const KernelKey& o) const {
    return device == o.device && program.source == o.program.source && shared_bytes == o.shared_bytes &&
           !std::memcmp(program.values, o.program.values, sizeof program.values);
  }
};
struct KernelHash {
  size_t operator()(const KernelKey& key) const {
    uint64_t h = uint64_t(uintptr_t(key.program.source)) ^ key.shared_bytes;
    for (int32_t value : key.program.values) h = (h ^ uint32_t(value)) * 0x9E3779B97F4A7C15ull;
    return size_t(h ^ h >> 32);
  }
};

// None of these is destroyed: the process may end while another thread launches.
auto& kernels = *new std::unordered_map<KernelKey, void*, KernelHash>;
constexpr int kMostDevices = 64;
constexpr size_t kSlabBytes = 1 << 20;

}  // namespace

Device* find_device(int index) {
  static Device* devices[kMostDevices] = {};
  const Driver& d = driver();
  if (!d.is_found || index < 0 || index >= kMostDevices) return nullptr;
  if (devices[index]) return devices[index];
  int handle = 0;
  Device made;
  check(d.device_get(&handle, index), "cuDeviceGet");
  int shared_bytes = 0;
  for (const auto& [value, attribute] :
       {std::pair(&made.gpu_.major, kMajor), std::pair(&made.gpu_.minor, kMinor),
        std::pair(&made.gpu_.processors, kMultiprocessors), std::pair(&shared_bytes, kSharedBytes)})
    check(d.device_attribute(value, attribute, handle), "cuDeviceGetAttribute");
  made.gpu_.shared_bytes = shared_bytes;
  check(d.retain(&made.context_, handle), "cuDevicePrimaryCtxRetain");
  made.constants_ = new std::unordered_map<uint64_t, const char*>;
  return devices[index] = new Device(made);
}

const char* Device::constant(uint64_t bits) {
  const char*& found = (*constants_)[bits];
  if (found) return found;
  const Driver& d = driver();
  const Current current(context_);
  const OutsideOfCapture outside;
  if (!slab_) {
    void* memory = nullptr;
    check(d.allocate(&memory, kSlabBytes), "cuMemAlloc");
    slab_ = static_cast<char*>(memory), slab_end_ = slab_ + kSlabBytes;
  }
  if (slab_ == slab_end_) return nullptr;
  // A stream of its own: neither waits for the caller's work nor becomes part of a graph.
  void* stream = nullptr;
  check(d.stream_create(&stream, kNonBlocking), "cuStreamCreate");
  const Result low = d.memset32(slab_, unsigned(bits), 1, stream);
  const Result high = d.memset32(slab_ + 4, unsigned(bits >> 32), 1, stream);
  const Result done = d.stream_synchronize(stream);
  d.stream_destroy(stream);
  check(low ? low : high, "cuMemsetD32Async");
  check(done, "cuStreamSynchronize");
  found = slab_;
  slab_ += 8;
  return found;
}

void* Device::load(const char* code, const char* entry, uint32_t shared_bytes) const {
  const Driver& d = driver();
  const Current current(context_);
  const OutsideOfCapture outside;
  void *library = nullptr, *kernel = nullptr, *found = nullptr;
  check(d.load(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  check(d.kernel(&kernel, library, entry), "cuLibraryGetKernel");
  check(d.function(&found, kernel), "cuKernelGetFunction");
  check(d.set_attribute(found, kMaxDynamicSharedBytes, int(shared_bytes)), "cuFuncSetAttribute");
  return found;
}

bool Device::load(const Plan& plan, const Compiler& compile, void* (&functions)[kMostLaunches]) const {
  for (int i = 0; i < plan.count; ++i) {
    const Launch& l = plan.launches[i];
    void*& function = kernels[{this, l.program, l.shared_bytes}];
    if (!function) {
      const std::string code = compile(l.program);
      if (code.empty()) return false;
      function = load(code.data(), l.program.source->entry, l.shared_bytes);
    }
    functions[i] = function;
  }
  return true;
}

void Device::encode(const MapShape& shape, ::TensorMap& map) const {
  const Current current(context_);
  encode_map(shape, map);
}

void Device::launch(const KernelLaunch& launch, void* stream) const {
  const Current current(context_);
  queue(launch, gpu_.major >= 9, stream);
}

void Device::launch(Plan& plan, void* const (&functions)[kMostLaunches], void* stream) const {
  const Current current(context_);
  for (int i = 0; i < plan.count; ++i) {
    Launch& l = plan.launches[i];
    if (l.has_maps) encode_map(l.k_map, l.maps.k), encode_map(l.v_map, l.maps.v);
    void* parameters[] = {l.parameters, &l.maps};
    queue({functions[i], {l.grid[0], l.grid[1], l.grid[2]}, l.threads, l.shared_bytes, true, parameters}, true, stream);
  }
}

void Device::clear(char* from, int64_t bytes, void* stream) const {
  const Current current(context_);
  check(driver().memset8(from, 0, size_t(bytes), stream), "cuMemsetD8Async");
}

void Device::fill(void* to, uint32_t bits, void* stream) const {
  const Current current(context_);
  check(driver().memset32(to, bits, 1, stream), "cuMemsetD32Async");
}

}  // namespace intflash::gpu
