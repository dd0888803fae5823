// Rows of any length, of the integer methods: METHOD is ExactP8, ExactP16 or Online; COPIES: the copy engine loads.
#include "sm90/integer_softmax.cuh"
#if FLOATS
#include "sm90/long_rows_quantize.cuh"
typedef FloatLoads Loads;
#else
typedef ThreadLoads Loads;
#endif

#if COPIES
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    attend<METHOD>(p, EngineLoads{maps});
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Params p) {
    attend<METHOD>(p, Loads());
}
#endif
