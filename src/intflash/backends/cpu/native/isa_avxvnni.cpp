#include "vec_avx2.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kAvxVnniKernels = {"avxvnni", 25000, Attention<AvxVnni>::unit_rows, Attention<AvxVnni>::run, absolute_maximum<AvxVnni>, quantize<AvxVnni>};
}
