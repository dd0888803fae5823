#include "vec_generic.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kGenericKernels = {"generic", Generic::kUnitRows, Attention<Generic>::run, absolute_maximum, quantize};
}
