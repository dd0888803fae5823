#include "vec_neon.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kNeonKernels = {"neon", Attention<Neon>::unit_rows, Attention<Neon>::run, absolute_maximum<Neon>, quantize<Neon>};
}
