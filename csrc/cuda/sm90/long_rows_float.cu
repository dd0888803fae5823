// The kernel of long rows for lite (VALUE is bfloat_t) and int_flash_half (VALUE is half_t).
#include "sm90/float_softmax.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Params p) {
  attend<FloatSoftmax>(p, CpAsyncLoader());
}
