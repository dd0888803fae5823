#include "vec_neon.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kNeonKernels = {"neon", 25000, Attention<Neon>::unit_rows, Attention<Neon>::run, absolute_maximum<Neon>, quantize<Neon>};
}
