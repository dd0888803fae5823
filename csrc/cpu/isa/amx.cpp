#include "cpu/isa/amx.hpp"

#include "cpu/amx_short_rows.hpp"
#include "cpu/attention.hpp"
#include "cpu/integer.hpp"
#include "cpu/quantize.hpp"

namespace intflash {
namespace {

// qflash and iflash run on the 512-bit vectors, because their tiles are 32 keys deep and P's AMX tile 64 keys.
bool on_vectors(const Call& call) { return call.method >= Method::kQFlash; }

int unit_rows(const Call& call) {
  if (are_short_rows(call)) return 16;
  return on_vectors(call) ? kAvx512VnniKernels.unit_rows(call) : Attention<Amx>::unit_rows(call);
}

void attention(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
  if (on_vectors(call)) return kAvx512VnniKernels.attention(call, units, call_id, scratch);
  if (are_short_rows(call)) {
    if (call.method == Method::kP16) return AmxShortRows<true>::run(call, units, call_id, scratch);
    if (call.method == Method::kTwoGroups)
      return AmxShortRows<true, Level::kRounded>::run(call, units, call_id, scratch);
    return AmxShortRows<false>::run(call, units, call_id, scratch);
  }
  Attention<Amx>::run(call, units, call_id, scratch);
}

}  // namespace

const Kernels kAmxKernels = {
    "amx", 25000, unit_rows, attention, absolute_maximum<Amx>, quantize<Amx>, &kIntegerKernels<Amx>};
}  // namespace intflash
