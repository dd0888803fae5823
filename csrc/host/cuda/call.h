// Runs the plan of a call on a GPU: takes its memory from torch and queues its launches, or notes them.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "host/cuda/driver.h"
#include "host/run_call.h"

namespace intflash::gpu {

// Where the launches of a call go.
class Launches {
 public:
  virtual ~Launches() = default;
  virtual const Gpu& gpu() const = 0;
  // The address of a number that no kernel writes, or null.
  virtual const char* constant(uint64_t bits) = 0;
  virtual void launch(Plan& plan) = 0;
  virtual void clear(char* from, int64_t bytes) = 0;
  virtual void fill(float* to, float number) = 0;
  // The call's working memory as a tensor of bytes that outlives the call, where the launches have not run at its end.
  virtual bool keeps_memory() const { return false; }
};

// Notes the launches of a call in place of queuing them: of tensors on a GPU, or of others as if they were on one.
class NotedLaunches : public Launches {
 public:
  NotedLaunches(const Gpu& gpu, const TorchTensor& like, Device* device, void* stream)
      : gpu_(gpu), like_(like), device_(device), stream_(stream) {}
  const Gpu& gpu() const override { return gpu_; }
  const char* constant(uint64_t bits) override;
  void launch(Plan& plan) override;
  void clear(char* from, int64_t bytes) override;
  void fill(float* to, float number) override;
  bool keeps_memory() const override { return true; }
  void keep(nb::object x) { kept.append(x); }

  nb::list noted;  // dictionaries: file, entry, macros, grid, threads, shared_bytes, parameters, maps
  nb::list kept;   // tensors whose addresses they hold

 private:
  const Gpu gpu_;
  const TorchTensor like_;
  Device* const device_;
  void* const stream_;
};

// A problem with what its call brings beside it.
struct ProblemCall {
  Problem p;
  TorchTensor q;                 // the output has its axes and its device
  float numbers[3] = {0, 0, 0};  // scales of Q, K and V that the recipe gives as numbers
  nb::object out, out_scale;     // the caller's own; null otherwise
  bool return_lse = false;
};

struct Response {
  intflash::Response of_call;
  Tensor score, output;     // the packed constants; null where the kernel computes them
  MadeTensor workspace;     // a tensor, with `keeps_memory`
  std::vector<Part> parts;  // of the workspace; offsets are addresses
};

// Returns false where the kernels do not serve the problem; `why` says why where it is wanted.
bool run(ProblemCall& call, Launches& launches, Refusal& why, Response& found);

// A tensor's memory: its last axes, with the strides that torch gives it; those that it lacks are of size 1. Throws
// Declined for more than four axes and for axes without elements.
Tensor tensor_of(const TorchTensor& t, OutType type);
// A program's macros as (name, value) pairs of texts.
nb::tuple macros_of(const Program& program);
// A scale given as a number: its address.
void set_number(ProblemCall& call, int which, float number, Launches& launches);

}  // namespace intflash::gpu
