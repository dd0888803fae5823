// Rows of any length, of the integer methods: METHOD is ExactP8, ExactP16 or Online; COPIES: the copy engine loads.
#include "stream_copies.cuh"
#include "stream_integer.cuh"
#if FLOATS
#include "stream_floats.cuh"
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
