#include "cpu/isa/generic.hpp"

#include "cpu/attention.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
const Kernels kGenericKernels = {"generic",
                                 4000,
                                 Attention<Generic>::unit_rows,
                                 Attention<Generic>::run,
                                 absolute_maximum<Generic>,
                                 quantize<Generic>,
                                 &kIntegerKernels<Generic>};
}
