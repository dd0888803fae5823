// Rows of any length, of the integer methods: METHOD is ExactP8, ExactP16 or Online.
#include "stream_integer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Params p) {
    attend<METHOD>(p);
}
