#include "cpu/isa/amx.hpp"

#include "cpu/attention.hpp"
#include "cpu/quantize.hpp"
#include "cpu/amx_short_rows.hpp"

namespace intflash {
namespace {

// A P tile is 64 keys deep, a tile of qflash and iflash 32 keys: those run on the 512-bit vectors.
bool on_vectors(const Call& call) { return call.method >= Method::kQFlash; }

int unit_rows(const Call& call) {
  if (on_strips(call)) return 16;
  return on_vectors(call) ? kAvx512VnniKernels.unit_rows(call) : Attention<Amx>::unit_rows(call);
}

void attention(const Call& call, const Units& units, uint64_t call_id, Scratch& scratch) {
  if (on_vectors(call)) return kAvx512VnniKernels.attention(call, units, call_id, scratch);
  if (on_strips(call)) {
    if (call.method == Method::kP16) return Strips<true>::run(call, units, call_id, scratch);
    return Strips<false>::run(call, units, call_id, scratch);
  }
  Attention<Amx>::run(call, units, call_id, scratch);
}

}  // namespace

const Kernels kAmxKernels = {"amx", 25000, unit_rows, attention, absolute_maximum<Amx>, quantize<Amx>};
}  // namespace intflash
