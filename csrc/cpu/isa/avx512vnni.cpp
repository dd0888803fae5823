#include "cpu/isa/avx512.hpp"

#include "cpu/attention.hpp"
#include "cpu/avx512_short_rows.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
namespace {

int unit_rows(const Call& call) {
  return Avx512ShortRows<true>::takes(call) ? Avx512ShortRows<true>::unit_rows(call)
                                            : Attention<Avx512Vnni>::unit_rows(call);
}

void attention(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
  if (!Avx512ShortRows<true>::takes(call)) return Attention<Avx512Vnni>::run(call, units, call_id, scratch);
  if (call.method == Method::kP16) return Avx512ShortRows<true>::run(call, units, call_id, scratch);
  if (call.method == Method::kTwoGroups)
    return Avx512ShortRows<true, Level::kRounded>::run(call, units, call_id, scratch);
  Avx512ShortRows<false>::run(call, units, call_id, scratch);
}

}  // namespace

const Kernels kAvx512VnniKernels = {"avx512vnni",
                                    25000,
                                    unit_rows,
                                    attention,
                                    absolute_maximum<Avx512Vnni>,
                                    quantize<Avx512Vnni>,
                                    &kIntegerKernels<Avx512Vnni>};
}  // namespace intflash
