#include "cpu/isa/avx2.hpp"

#include "cpu/attention.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
const Kernels kAvx2Kernels = {"avx2",
                              12500,
                              Attention<Avx2>::unit_rows,
                              Attention<Avx2>::run,
                              absolute_maximum<Avx2>,
                              quantize<Avx2>,
                              &kIntegerKernels<Avx2>};
}
