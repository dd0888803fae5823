#include "vec_neon.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kNeonKernels = {"neon", Neon::kUnitRows, Attention<Neon>::run, absolute_maximum, quantize};
}
