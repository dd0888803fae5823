// An integer model, packed for one instruction set: the operations of docs/numerics.md, section 4, over one workspace.
#pragma once
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/integer.h"

namespace intflash {

// Where a buffer begins in the workspace: image i of B has its bytes from B * offset + i * (its bytes) on.
// `column` and `step` count bytes of rows that hold several buffers side by side (queries, keys and values).
struct Place {
  int64_t offset = 0, column = 0, step = 0;
};

// One forward pass.
struct Pass {
  char* workspace;
  int64_t images;
  int threads;
  const std::vector<const void*>& inputs;  // in the order of the program, null where an optional one is not given
  const std::vector<void*>& outputs;
  InterruptCheck check;
  char* at(const Place& place) const { return workspace + images * place.offset + place.column; }
};

struct LinearStep {
  Place x, out, residual;
  int64_t image_rows = 0;
  LinearCall call;  // residual: a constant, else in the workspace
  bool has_residual_buffer = false;
};

struct AttentionStep {
  Place q, k, v, out;
  Method method;
  int64_t windows, heads, tokens, head_dim;
  double sm_scale;
  const float *q_scale, *k_scale, *v_scale, *out_scale;  // one or one of each head
  bool per_head[4];
  const int32_t* bias = nullptr;  // [heads, tokens, tokens]
  const uint8_t* mask = nullptr;  // [windows, tokens, tokens]
  int mask_input = -1;            // [images, tokens]
};

class Program {
 public:
  Program(const Kernels& kernels, int64_t image_bytes) : kernels_(kernels), image_bytes_(image_bytes) {}

  // Copies a constant, with `padding` zero bytes behind it, into memory that lives as long as the program.
  template <class T>
  const T* keep(const T* data, int64_t count, int64_t padding = 0) {
    if (!data) return nullptr;
    constants_.emplace_back(size_t(count) * sizeof(T) + size_t(padding));
    char* to = constants_.back().data();
    std::memcpy(to, data, size_t(count) * sizeof(T));
    return reinterpret_cast<const T*>(to);
  }
  PackedLinear* pack(const int8_t* weight, const int32_t* bias, const int32_t* multiplier, int64_t out_features,
                     int64_t in_features, int shift);

  void add(const LinearStep& step);
  void add(const AttentionStep& step);
  void add(LayerNormCall call, Place x, Place out);
  void add(PatchesCall call, int image, Place out);
  void add(EmbeddingCall call, std::vector<int> indices, Place out);
  void add(PoolCall call, Place x, Place out);
  void add_output(Place x, int64_t bytes, int output);

  // Runs the operations on up to `threads` threads. Several calls may run at once.
  void run(int64_t images, const std::vector<const void*>& inputs, const std::vector<void*>& outputs, int threads,
           InterruptCheck check);

 private:
  const Kernels& kernels_;
  const int64_t image_bytes_;
  std::deque<AlignedBytes> constants_;
  std::deque<PackedLinear> layers_;
  std::vector<std::function<void(const Pass&)>> steps_;

  // Workspaces that no call uses.
  struct Workspace {
    AlignedBytes bytes;
    int64_t images = 0;
  };
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;

  int64_t cost(int64_t products) const;
  void run_rows(const Pass& pass, int64_t rows, int64_t values,
                const std::function<void(int64_t, int64_t, Scratch&)>& function) const;
};

}  // namespace intflash
