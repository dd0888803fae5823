#include "vec_avx512.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
const Kernels kAvx512VnniKernels = {"avx512vnni", 40000, Attention<Avx512Vnni>::unit_rows, Attention<Avx512Vnni>::run, absolute_maximum<Avx512Vnni>, quantize<Avx512Vnni>};
}
