// NVIDIA's driver, opened at run time: one module, built without CUDA, serves machines with a GPU and without.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>

#include "host/cuda/plan.h"

namespace intflash::gpu {

// The programs of a call by their macros: (file, kernel's name, [(macro, value)]) -> cubin. Throws where it cannot be
// compiled; returns an empty string where nothing can be compiled here.
using Compiler = std::function<std::string(const Program&)>;

class Device;

// Returns a GPU by its number, or null where there is no driver. Throws std::runtime_error where the driver reports an
// error. Callers hold Python's global lock.
Device* find_device(int index);

// What a launch is for the driver.
struct KernelLaunch {
  void* kernel;  // of `Device::load`
  uint32_t grid[3], threads, shared_bytes;
  bool overlaps;  // the kernel may start before the previous one has ended: its code waits before it touches memory
  void** parameters;
};

// A GPU. All functions of kernels are of its primary context, which is torch's.
class Device {
 public:
  const Gpu& gpu() const { return gpu_; }

  // Returns the address of a number in the GPU's memory. It is written before this returns and never changes, so that
  // any stream and any graph may read it; null where there is no more room.
  const char* constant(uint64_t bits);

  // Loads machine code, and returns its kernel with this much dynamic shared memory allowed. It stays loaded.
  void* load(const char* code, const char* entry, uint32_t shared_bytes) const;
  // Finds the kernels of a plan, compiled by `compile` where they have never been used before. Returns false where
  // nothing can be compiled.
  bool load(const Plan& plan, const Compiler& compile, void* (&functions)[kMostLaunches]) const;

  void encode(const MapShape& shape, ::TensorMap& map) const;
  // Each queues work on a stream, whatever GPU is current: a launch; a plan's launches, which need no lock of Python's;
  // zeros; one 32-bit number. Programs do not overlap before compute capability 9.0.
  void launch(const KernelLaunch& launch, void* stream) const;
  void launch(Plan& plan, void* const (&functions)[kMostLaunches], void* stream) const;
  void clear(char* from, int64_t bytes, void* stream) const;
  void fill(void* to, uint32_t bits, void* stream) const;

 private:
  friend Device* find_device(int);
  Device() = default;
  void* context_ = nullptr;
  Gpu gpu_;
  std::unordered_map<uint64_t, const char*>* constants_ = nullptr;  // never destroyed
  char *slab_ = nullptr, *slab_end_ = nullptr;                      // their memory that is free
};

}  // namespace intflash::gpu
