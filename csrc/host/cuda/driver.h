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

// Returns a GPU by its number, or null where there is no driver or the GPU is none that the kernels run on (compute
// capability 9.0). Throws std::runtime_error where the driver reports an error. Callers hold Python's global lock.
Device* find_device(int index);

// A GPU. All functions of kernels are of its primary context, which is torch's.
class Device {
 public:
  int processors() const { return processors_; }

  // Returns the address of a number in the GPU's memory. It is written before this returns and never changes, so that
  // any stream and any graph may read it; null where there is no more room.
  const char* constant(uint64_t bits);

  // Finds the kernels of a plan, compiled by `compile` where they have never been used before. Returns false where
  // nothing can be compiled.
  bool load(const Plan& plan, const Compiler& compile, void* (&functions)[4]);

  // Each queues work on a stream, whatever GPU is current: a plan's launches, which need no lock of Python's; zeros;
  // one 32-bit number.
  void launch(Plan& plan, void* const (&functions)[4], void* stream) const;
  void clear(char* from, int64_t bytes, void* stream) const;
  void fill(void* to, uint32_t bits, void* stream) const;

 private:
  friend Device* find_device(int);
  Device() = default;
  void* context_ = nullptr;
  int processors_ = 0;
  std::unordered_map<uint64_t, const char*>* constants_ = nullptr;  // never destroyed
  char *slab_ = nullptr, *slab_end_ = nullptr;                      // their memory that is free
};

}  // namespace intflash::gpu
