// Native shim of <vx_tensor.h>: every thread holds the whole tile, the products are plain loops, and each call meets
// the other threads of its warp first, as a warp in lockstep does.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {
void vx_shim_warp(int call);                                       // all threads of the warp are here
void vx_shim_store_tile(void* to, const void* from, uint32_t rows, uint32_t columns, size_t stride);   // 32-bit elements
float vx_shim_half(uint16_t bits);
}

#define WARP_SYNC() vx_shim_warp(4)   // fibers do not run in lockstep

namespace vortex {
namespace tensor {

struct fp32 {
  using dtype = float;
};
struct fp16 {
  using dtype = uint16_t;
  static float value(uint16_t bits) { return vx_shim_half(bits); }
};
struct int32 {
  using dtype = int32_t;
};
struct int8 {
  using dtype = int8_t;
  static int32_t value(int8_t code) { return code; }
};
enum mem_layout { row_major, col_major };

template <uint32_t THREADS, typename Input, typename Output>
struct wmma_context {
  using input_t = typename Input::dtype;
  using output_t = typename Output::dtype;
  static constexpr uint32_t tileM = 8, tileN = 8, tileK = 8 * 4 / sizeof(input_t);
  static_assert(THREADS == 8, "the tile sizes above are those of 8 threads a warp");

  template <typename T, uint32_t ROWS, uint32_t COLUMNS>
  struct fragment {
    static constexpr uint32_t rows = ROWS, columns = COLUMNS;
    using type = T;
    T at[ROWS][COLUMNS];
  };
  using fragment_a = fragment<input_t, tileM, tileK>;
  using fragment_b = fragment<input_t, tileK, tileN>;
  using fragment_acc = fragment<output_t, tileM, tileN>;

  template <typename Fragment, typename T>
  static void fill_fragment(Fragment& f, T value) {
    for (uint32_t i = 0; i < Fragment::rows; ++i)
      for (uint32_t j = 0; j < Fragment::columns; ++j) f.at[i][j] = value;
  }
  template <mem_layout LAYOUT = row_major, typename Fragment>
  static void load_matrix_sync(Fragment& f, const void* from, size_t stride) {
    vx_shim_warp(1);
    const typename Fragment::type* x = static_cast<const typename Fragment::type*>(from);
    for (uint32_t i = 0; i < Fragment::rows; ++i)
      for (uint32_t j = 0; j < Fragment::columns; ++j) f.at[i][j] = LAYOUT == row_major ? x[i * stride + j] : x[j * stride + i];
  }
  template <mem_layout LAYOUT = row_major, typename Fragment>
  static void store_matrix_sync(void* to, const Fragment& f, size_t stride) {
    static_assert(LAYOUT == row_major && sizeof(typename Fragment::type) == 4, "what the kernels use");
    vx_shim_warp(2);
    vx_shim_store_tile(to, f.at, Fragment::rows, Fragment::columns, stride);
  }
  static void mma_sync(fragment_acc& d, const fragment_a& a, const fragment_b& b, const fragment_acc& c) {
    vx_shim_warp(3);
    for (uint32_t i = 0; i < tileM; ++i)
      for (uint32_t j = 0; j < tileN; ++j) {
        output_t sum = c.at[i][j];
        for (uint32_t k = 0; k < tileK; ++k) sum += Input::value(a.at[i][k]) * Input::value(b.at[k][j]);
        d.at[i][j] = sum;
      }
  }
};

}  // namespace tensor
}  // namespace vortex
