// Stand-in for Vortex's <vx_tensor.h>: the part of wmma_context that our kernels use, as calls to nothing.
// The SDK keeps fragments in F registers (flw, fsw, fmv.s around the tensor instruction); here they are opaque words.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {
void vx_stub_fill(void* fragment, uint32_t bits);
void vx_stub_load(void* fragment, const void* from, size_t stride, int layout);
void vx_stub_store(void* to, const void* fragment, size_t stride);
void vx_stub_mma(void* d, const void* a, const void* b, const void* c);
}

namespace vortex {
namespace tensor {

struct fp32 { using dtype = float; };
struct fp16 { using dtype = uint16_t; };
struct int32 { using dtype = int32_t; };
struct int8 { using dtype = int8_t; };
enum mem_layout { row_major, col_major };

template <uint32_t THREADS, typename Input, typename Output>
struct wmma_context {
  static constexpr uint32_t tileM = 8, tileN = 8, tileK = 8 * 4 / sizeof(typename Input::dtype);
  static_assert(THREADS == 8, "the tile sizes above are those of 8 threads a warp");
  struct fragment_a { uint32_t words[8]; };
  struct fragment_b { uint32_t words[8]; };
  struct fragment_acc { uint32_t words[8]; };

  template <typename Fragment, typename T>
  static void fill_fragment(Fragment& fragment, T) { vx_stub_fill(&fragment, 0); }
  template <mem_layout LAYOUT = row_major, typename Fragment>
  static void load_matrix_sync(Fragment& fragment, const void* from, size_t stride) {
    vx_stub_load(&fragment, from, stride, LAYOUT);
  }
  template <mem_layout LAYOUT = row_major, typename Fragment>
  static void store_matrix_sync(void* to, const Fragment& fragment, size_t stride) {
    vx_stub_store(to, &fragment, stride);
  }
  static void mma_sync(fragment_acc& d, const fragment_a& a, const fragment_b& b, const fragment_acc& c) {
    vx_stub_mma(&d, &a, &b, &c);
  }
};

}  // namespace tensor
}  // namespace vortex
