// Computes the launch constants on the device, where scales may be known only there: `numerics.exp.exponent_constants`
// and `output_multiplier` in float64, with the same order of operations and the same saturations. A thread computes one
// constant of each kind.
//
// Macros: UNIT (Octaves or TableSteps, the unit of T); QMAX (the largest code of the output; 0 for float output, which
// has no output constants); GIVEN (1: the caller gave the output's scale); MOST_E (the largest exponent of s_V / s_O).
#include "exp2.cuh"

constexpr i32 THREADS = 128;
constexpr i32 LEAST_E = -7;            // numerics.exp.OUTPUT_EXPONENTS
constexpr double MAX_RATIO = 0x1p128;  // numerics.exp

static_assert(sizeof(ConstantsParams) == PARAMS_BYTES);

// The index of a constant: batch, head, token, and channel or block of keys.
struct Index {
  u32 b, h, n, d;
  DEVICE Index(u32 i, const u32 (&shape)[4]) {
    d = i % shape[3], i /= shape[3];
    n = i % shape[2], i /= shape[2];
    h = i % shape[1], b = i / shape[1];
  }
};

DEVICE float scale_at(const View& x, i64 b, i64 h, i64 n, i64 d) {
  return ((const float*)x.ptr)[b * x.b + h * x.h + n * x.n + d * x.d];
}

// Packs rho = s_V / s_O = Mr * 2^(e - 24). The quotient and Mr are each rounded once, and e saturates. Below its range
// outputs are less than half a step of s_O, and Mr is 0.
DEVICE i64 pack_output(float v_scale, float out_scale) {
  const double quotient = __ddiv_rn((double)v_scale, (double)out_scale);
  const double rho = quotient > MAX_RATIO ? MAX_RATIO : quotient;
  const i32 e = (i32)((__double_as_longlong(rho) >> 52) & 2047) - 1022;  // the exponent of frexp
  const u32 Mr = (u32)__double2ll_rn(__dmul_rn(rho, __longlong_as_double((i64)(24 - e + 1023) << 52)));
  return (i64)min(max(e, LEAST_E), MOST_E) << 32 | (e < LEAST_E ? 0 : Mr);
}

extern "C" __global__ void __launch_bounds__(THREADS) constants(const __grid_constant__ ConstantsParams p) {
  const u32 i = blockIdx.x * THREADS + threadIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (i < p.score_count) {
    const Index at(i, p.score_shape);
    const float q_scale = scale_at(p.q_scale, at.b, at.h, at.n, 0);
    const float k_scale = scale_at(p.k_scale, at.b, at.h / p.group, at.d, 0);
    const Score score = score_constants<UNIT>(q_scale, k_scale, p.sm_scale);
    p.score[i] = (i64)score.k << 32 | (u32)score.C;
  }
  if (QMAX && i < p.output_count) {
    const Index at(i, p.output_shape);
    const float v_scale = scale_at(p.v_scale, at.b, at.h / p.group, 0, at.d);
    float out_scale;
    if (GIVEN)
      out_scale = scale_at(p.given, at.b, at.h, 0, at.d);
    else
      p.out_scale[i] = out_scale = __fdiv_rn(__fmul_rn(v_scale, 127.0f), (float)QMAX);
    p.output[i] = pack_output(v_scale, out_scale);
  }
}
