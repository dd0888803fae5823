#include "cpu/isa/avx512.hpp"

#include "cpu/attention.hpp"
#include "cpu/quantize.hpp"
#include "cpu/avx512_short_rows.hpp"

namespace intflash {
namespace {

int unit_rows(const Call& call) { return VectorStrips<true>::takes(call) ? VectorStrips<true>::unit_rows(call) : Attention<Avx512Vnni>::unit_rows(call); }

void attention(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
  if (!VectorStrips<true>::takes(call)) return Attention<Avx512Vnni>::run(call, units, call_id, scratch);
  if (call.method == Method::kP16) return VectorStrips<true>::run(call, units, call_id, scratch);
  VectorStrips<false>::run(call, units, call_id, scratch);
}

}  // namespace

const Kernels kAvx512VnniKernels = {"avx512vnni", 25000, unit_rows, attention, absolute_maximum<Avx512Vnni>, quantize<Avx512Vnni>};
}  // namespace intflash
