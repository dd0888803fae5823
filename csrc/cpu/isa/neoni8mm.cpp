#include "cpu/isa/neon.hpp"

#include "cpu/attention.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
const Kernels kNeonI8mmKernels = {"neoni8mm",
                                  25000,
                                  Attention<NeonI8mm>::unit_rows,
                                  Attention<NeonI8mm>::run,
                                  absolute_maximum<NeonI8mm>,
                                  quantize<NeonI8mm>,
                                  &kIntegerKernels<NeonI8mm>};
}
