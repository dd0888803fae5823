#include "vec_avx2.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kAvxVnniKernels = {"avxvnni", AvxVnni::kUnitRows, Attention<AvxVnni>::run, absolute_maximum, quantize};
}
