// The kernels of integer models of one instruction set: linear.hpp, layer_norm.hpp, and here the smaller operations,
// which the compiler vectorizes.
#pragma once
#include "cpu/layer_norm.hpp"
#include "cpu/linear.hpp"

namespace intflash {
namespace {

template <class T>
inline T clamped(int64_t x, const Limits& limits) {
  return T(smaller<int64_t>(larger<int64_t>(x, limits.low), limits.high));
}

// Calls f with a null pointer to the type of a width.
template <class F>
void with_type(Width width, const F& f) {
  switch (width) {
    case Width::kInt8: return f(static_cast<int8_t*>(nullptr));
    case Width::kInt16: return f(static_cast<int16_t*>(nullptr));
    case Width::kInt32: return f(static_cast<int32_t*>(nullptr));
  }
}

// Returns clamp(round_half_even(x * inverse) + zero_point, -128, 127); a NaN gives 127, or -128 where its sign bit is
// set.
inline int8_t image_code(float x, float inverse, int32_t zero_point) {
  const int32_t low = -128 - zero_point, high = 127 - zero_point;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  constexpr int32_t magic_bits = 0x4B400000;  // quantize.hpp says how this rounds
  const float y = __builtin_fmaf(x, inverse, 12582912.0f);
  int32_t bits;
  std::memcpy(&bits, &y, 4);
  return int8_t(smaller(larger(bits, magic_bits + low), magic_bits + high) - magic_bits + zero_point);
#else
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52
  if (x != x) return std::signbit(x) ? -128 : 127;
  double y = double(x) * double(inverse);
  y = y < low ? low : y > high ? high : y;
  return int8_t(int32_t((y + magic) - magic) + zero_point);
#endif
}

inline void patches(const PatchesCall& call, int64_t first, int64_t last) {
  const int64_t columns = call.width / call.patch_width, plane = call.height * call.width;
  int8_t* out = call.out + first * call.channels * call.patch_height * call.patch_width;
  for (int64_t r = first; r < last; ++r) {
    const int64_t image = r / call.image_rows(), at = r % call.image_rows();
    const int64_t corner = at / columns * call.patch_height * call.width + at % columns * call.patch_width;
    for (int64_t c = 0; c < call.channels; ++c)
      for (int64_t a = 0; a < call.patch_height; ++a, out += call.patch_width) {
        const int64_t from = (image * call.channels + c) * plane + corner + a * call.width;
        if (call.is_float) {
          const float* x = static_cast<const float*>(call.image) + from;
          for (int64_t b = 0; b < call.patch_width; ++b) out[b] = image_code(x[b], call.inverse, call.zero_point);
        } else {
          const uint8_t* x = static_cast<const uint8_t*>(call.image) + from;
          for (int64_t b = 0; b < call.patch_width; ++b) out[b] = int8_t(x[b] ^ 0x80);
        }
      }
  }
}

inline void embedding(const EmbeddingCall& call, int64_t first, int64_t last) {
  with_type(call.width, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = first; r < last; ++r) {
      T* out = static_cast<T*>(call.out) + r * call.channels;
      const T* rows = static_cast<const T*>(call.rows);
      if (rows) rows += r % call.image_rows * call.channels;
      for (int64_t c = 0; c < call.channels; ++c) {
        int64_t sum = rows ? rows[c] : 0;
        for (size_t t = 0; t < call.tables.size(); ++t) {
          const int64_t index = call.indices[t] ? call.indices[t][r] : 0;
          sum += static_cast<const T*>(call.tables[t])[index * call.channels + c];
        }
        out[c] = clamped<T>(sum, call.limits);
      }
    }
  });
}

inline void pool(const PoolCall& call, int64_t first, int64_t last) {
  with_type(call.in, [&](auto* in) {
    with_type(call.width, [&](auto* type) {
      using In = std::remove_pointer_t<decltype(in)>;
      using T = std::remove_pointer_t<decltype(type)>;
      constexpr int64_t kChannels = 256;
      int32_t sums[kChannels];  // |sum| < 2^31
      for (int64_t image = first; image < last; ++image)
        for (int64_t from = 0; from < call.channels; from += kChannels) {
          const int64_t count = smaller(kChannels, call.channels - from);
          for (int64_t c = 0; c < count; ++c) sums[c] = 0;
          for (int64_t r = call.first; r < call.stop; ++r) {
            const In* x = static_cast<const In*>(call.x) + (image * call.rows + r) * call.channels + from;
            for (int64_t c = 0; c < count; ++c) sums[c] += x[c];
          }
          T* out = static_cast<T*>(call.out) + image * call.channels + from;
          for (int64_t c = 0; c < count; ++c)
            out[c] = clamped<T>((int64_t(sums[c]) * call.multiplier + (int64_t(1) << (call.shift - 1))) >> call.shift,
                                call.limits);
        }
    });
  });
}

template <class V>
constexpr IntegerKernels kIntegerKernels = {Linear<V>::pack,   Linear<V>::block_rows,
                                            Linear<V>::units,  Linear<V>::run,
                                            LayerNorm<V>::run, patches,
                                            embedding,         pool};

}  // namespace
}  // namespace intflash
