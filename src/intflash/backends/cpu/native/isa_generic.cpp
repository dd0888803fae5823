#include "vec_generic.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kGenericKernels = {"generic", 4000, Attention<Generic>::unit_rows, Attention<Generic>::run, absolute_maximum<Generic>, quantize<Generic>};
}
