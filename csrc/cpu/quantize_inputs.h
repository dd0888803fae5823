// Float tensors of a call become int8 codes: docs/numerics.md section 1.
#pragma once
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cpu/call.h"
#include "cpu/thread_pool.h"

namespace intflash {

// A float tensor [batch, heads, tokens, channels] to be quantized into contiguous codes.
struct FloatInput {
  const char* data;
  int64_t batch, heads, tokens, channels, stride[4], bytes;
  FloatType type;
  bool is_static;  // the scale is given
  bool per_head;   // of a scale that is not given
  int qmax;
  std::vector<float> amax;    // per piece
  std::vector<float> scales;  // not given: one, or [batch, heads]; a given number: one
  View<float> scale;
  int8_t* codes;

  // What is measured and encoded at once: a head; or, where one scale serves all heads and a token's heads lie side by
  // side, as many tokens of all heads, in the order of memory.
  struct Piece {
    const char* data;
    Rows rows;
    int8_t* codes;
  };
  Piece piece(int64_t i) const;
  int64_t count() const { return batch * heads; }
  int64_t size() const { return count() * tokens * channels; }

 private:
  bool heads_side_by_side() const {
    return heads > 1 && stride[1] == channels && !per_head && scale.stride[0] == 0 && scale.stride[1] == 0;
  }
};

struct Quantization {
  const Kernels& kernels;
  std::vector<FloatInput> input;  // of q, k and v, or of q alone
  bool look_for_nonfinite;
  bool is_finite = true;  // what was found

  // Finds the scales that are not given and fills in the codes. `first` and `check` are as in thread_pool.h. Returns
  // false where it looked for NaN and infinity and there are some; the codes are then of no use.
  bool run(int threads, const std::function<void()>& first, InterruptCheck check);

 private:
  void measure(FloatInput& x, int64_t i) const;
  void encode(FloatInput& x, int64_t i) const;
  void choose_scales(FloatInput& x);
  bool run_alone(InterruptCheck check);
  std::pair<FloatInput*, int64_t> find_piece(int64_t item);
  template <void (Quantization::*Step)(FloatInput&, int64_t) const>
  static void run_step(void* self, ThreadRanges& ranges);
};

}  // namespace intflash
