// The kernel of long rows for the integer methods. METHOD is TwoGroups where TWO_GROUPS is not 0, else ExactP8,
// ExactP16 or Online. TMA is 1 where TMA loads K and V.
#if TWO_GROUPS
#include "sm90/two_groups_softmax.cuh"
#else
#include "sm90/integer_softmax.cuh"
#endif
#if REMAINDER_KEY_TILES
#include "sm90/long_rows_remainder.cuh"
#endif
#if FLOAT_KV
#include "sm90/long_rows_quantize.cuh"
typedef QuantizingLoader Loader;
#else
typedef CpAsyncLoader Loader;
#endif

#if TMA
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
  attend<METHOD>(p, TmaLoader{maps});
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Params p) {
  attend<METHOD>(p, Loader());
}
#endif
