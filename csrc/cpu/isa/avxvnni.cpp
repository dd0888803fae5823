#include "cpu/isa/avx2.hpp"

#include "cpu/attention.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
const Kernels kAvxVnniKernels = {"avxvnni",
                                 25000,
                                 Attention<AvxVnni>::unit_rows,
                                 Attention<AvxVnni>::run,
                                 absolute_maximum<AvxVnni>,
                                 quantize<AvxVnni>,
                                 &kIntegerKernels<AvxVnni>};
}
