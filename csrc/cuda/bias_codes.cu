// Makes the integer codes of an additive mask: `bias_codes` of numerics/exp.py, with its bits.
//
// Macros: IN, the mask's type; FRACTION_BITS of the codes. A CTA's CTA_THREADS threads take ELEMENTS of them each,
// adjacent threads adjacent ones.
#include "quantize.cuh"

struct BiasParams {
  const IN* bias;
  i32* codes;
  u64 count;
  double least;    // the largest number that still makes a key absent, as NaN does
  double octaves;  // log2(e)
};

constexpr i32 LIMIT = 2147483647;

DEVICE i32 code(double x, const BiasParams& p) {
  if (!(x > p.least)) return NO_SCORE;
  const double scaled = x * p.octaves * (1 << FRACTION_BITS);  // the second product is exact
  return max(min(__double2ll_rn(fmax(fmin(scaled, 0x1p31), -0x1p31)), (i64)LIMIT), -(i64)LIMIT);
}
DEVICE i32 code(float x, const BiasParams& p) { return code((double)x, p); }
DEVICE i32 code(half_t x, const BiasParams& p) { return code((double)low_half(x.bits, x), p); }
DEVICE i32 code(bfloat_t x, const BiasParams& p) { return code((double)low_half(x.bits, x), p); }

extern "C" __global__ void __launch_bounds__(CTA_THREADS) bias_codes(const __grid_constant__ BiasParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const u64 first = (u64)blockIdx.x * (CTA_THREADS * ELEMENTS) + threadIdx.x;
  IN x[ELEMENTS];
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i)
    if (first + i * CTA_THREADS < p.count) x[i] = p.bias[first + i * CTA_THREADS];
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i)
    if (first + i * CTA_THREADS < p.count) p.codes[first + i * CTA_THREADS] = code(x[i], p);
}
