// Loads and stores of up to a vector of int8, int16 or int32 values.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/integer.h"

namespace intflash {
namespace {

template <class V>
struct Lanes {
  using I32 = typename V::I32;
  static constexpr int kLanes = V::kLanes;

  template <class T>
  static I32 load(const T* x) {
    return V::load_widened(x);
  }
  static I32 load(const int32_t* x) { return V::load(x); }
  // Loads the first `count` lanes, zero in the others.
  template <class T>
  static I32 load(const T* x, int64_t count) {
    if (count >= kLanes) return load(x);
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = x[i];
    return load(lanes);
  }

  // Stores the first `count` values of vectors, clamped to limits in T's range.
  template <class T, int N>
  static void store_clamped(T* out, I32 (&x)[N], const Limits& limits, int64_t count) {
    if constexpr (V::kStoreBlock > 0 && sizeof(T) < 4)
      if (N % V::kStoreBlock == 0 && count >= N * kLanes) {
        for (int i = 0; i < N; i += V::kStoreBlock) V::store_block(out + i * kLanes, x + i, limits.low, limits.high);
        return;
      }
    const I32 low = V::set1(limits.low), high = V::set1(limits.high);
    for (int i = 0; i < N; ++i, out += kLanes, count -= kLanes) store(out, V::min(V::max(x[i], low), high), count);
  }

 private:
  template <class T>
  static void store(T* out, I32 x) {
    V::store_saturated(out, x);
  }
  static void store(int32_t* out, I32 x) { V::store(out, x); }
  template <class T>
  static void store(T* out, I32 x, int64_t count) {
    if (count >= kLanes) return store(out, x);
    T lanes[kLanes];
    store(lanes, x);
    for (int64_t i = 0; i < count; ++i) out[i] = lanes[i];
  }
};

}  // namespace
}  // namespace intflash
