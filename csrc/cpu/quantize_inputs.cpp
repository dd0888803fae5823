#include "cpu/quantize_inputs.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace intflash {
namespace {

constexpr float kTinyAmax = 7.888609052210118e-31f;  // 2^-100: below, a tensor counts as 0

// Numbers of values.
constexpr int64_t kFew = 1 << 17;            // about 10 microseconds: done by one thread
constexpr int64_t kShort = 1 << 19;          // about 40 microseconds
constexpr int64_t kInterruptible = 1 << 25;  // about 50 ms on slow kernels: from here on the work looks for interrupts
constexpr int64_t kLongestRange = 1 << 22;

}  // namespace

FloatInput::Piece FloatInput::piece(int64_t i) const {
  const int64_t b = i / heads, h = i % heads;
  const char* x = data + b * stride[0] * bytes;
  if (heads_side_by_side()) {
    const int64_t first = tokens * h / heads, last = tokens * (h + 1) / heads;
    return {x + first * stride[2] * bytes,
            {last - first, channels, stride[2], heads, tokens * channels},
            codes + (b * heads * tokens + first) * channels};
  }
  const Rows rows = stride[2] == channels ? Rows{1, tokens * channels, 0} : Rows{tokens, channels, stride[2]};
  return {x + h * stride[1] * bytes, rows, codes + i * tokens * channels};
}

void Quantization::measure(FloatInput& x, int64_t i) const {
  if (x.is_static && !look_for_nonfinite) return;
  const FloatInput::Piece piece = x.piece(i);
  x.amax[size_t(i)] = kernels.absolute_maximum(piece.data, x.type, piece.rows);
}

void Quantization::choose_scales(FloatInput& x) {
  for (float& a : x.amax) {
    if (std::isfinite(a)) continue;
    a = INFINITY;  // comparisons below would lose a NaN
    is_finite = is_finite && !look_for_nonfinite;
  }
  if (x.is_static) return;
  if (!x.per_head) x.amax[0] = *std::max_element(x.amax.begin(), x.amax.end());
  for (size_t i = 0; i < x.scales.size(); ++i) {
    const bool has_scale = x.amax[i] >= kTinyAmax && x.amax[i] < INFINITY;  // docs/numerics.md, "Unchecked calls"
    x.scales[i] = has_scale ? x.amax[i] / float(x.qmax) : 1.0f;
  }
}

void Quantization::encode(FloatInput& x, int64_t i) const {
  const float amax = x.is_static ? 1.0f : x.amax[x.per_head ? size_t(i) : 0];
  const float inverse = amax < kTinyAmax ? 0.0f : 1.0f / *x.scale.at(i / x.heads, i % x.heads);
  const FloatInput::Piece piece = x.piece(i);
  kernels.quantize(piece.data, x.type, piece.rows, inverse, x.qmax, piece.codes);
}

// The items of the thread pool's work are the pieces of all tensors.
std::pair<FloatInput*, int64_t> Quantization::find_piece(int64_t item) {
  for (FloatInput& x : input) {
    if (item < x.count()) return {&x, item};
    item -= x.count();
  }
  throw std::logic_error("item out of range");
}

template <void (Quantization::*Step)(FloatInput&, int64_t) const>
void Quantization::run_step(void* self, ThreadRanges& ranges) {
  auto& me = *static_cast<Quantization*>(self);
  for (int64_t item, last; ranges.next(item, last);)
    for (; item < last; ++item) {
      auto [x, i] = me.find_piece(item);
      (me.*Step)(*x, i);
    }
}

bool Quantization::run(int threads, const std::function<void()>& first, InterruptCheck check) {
  int64_t items = 0, values = 0;
  for (const FloatInput& x : input) items += x.count(), values += x.size();
  if (values < kInterruptible) check = nullptr;
  if (threads <= 1 || values < kFew) {
    first();
    return run_alone(check);
  }
  Work work{run_step<&Quantization::measure>, this, items, values < kShort, items, check};
  if (check) work.longest_range = std::max<int64_t>(1, kLongestRange * items / values);
  run_in_parallel(threads, work, first);
  for (FloatInput& x : input) choose_scales(x);
  work.function = run_step<&Quantization::encode>;
  if (is_finite) run_in_parallel(threads, work, [] {});
  return is_finite;
}

// One tensor after the other, encoded from its end on, because much of the end is still in the cache.
bool Quantization::run_alone(InterruptCheck check) {
  InterruptPoll poll(check);
  const auto rethrow_interrupt = [&] {
    if (const std::exception_ptr interrupt = poll()) std::rethrow_exception(interrupt);
  };
  for (FloatInput& x : input) {
    for (int64_t i = 0; i < x.count(); ++i) measure(x, i), rethrow_interrupt();
    choose_scales(x);
    for (int64_t i = x.count(); is_finite && i-- > 0;) encode(x, i), rethrow_interrupt();
  }
  return is_finite;
}

}  // namespace intflash
