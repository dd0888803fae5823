#include "cpu/isa/neon.hpp"

#include "cpu/attention.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
const Kernels kNeonKernels = {"neon",
                              25000,
                              Attention<Neon>::unit_rows,
                              Attention<Neon>::run,
                              absolute_maximum<Neon>,
                              quantize<Neon>,
                              &kIntegerKernels<Neon>};
}
