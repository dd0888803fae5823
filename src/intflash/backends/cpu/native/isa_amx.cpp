#include "vec_amx.hpp"

#include "attention.hpp"
#include "quantize.hpp"

namespace intflash {
namespace {

static_assert(Amx::kUnitRows == Avx512Vnni::kUnitRows, "units are counted once per call");

// A P tile is 64 keys deep, a tile of qflash and iflash 32 keys: those run on the 512-bit vectors.
void attention(const Call& call, int64_t first, int64_t last, uint64_t call_id, Scratch& scratch) {
  if (call.method >= Method::kQFlash) return kAvx512VnniKernels.attention(call, first, last, call_id, scratch);
  Attention<Amx>::run(call, first, last, call_id, scratch);
}

}  // namespace

const Kernels kAmxKernels = {"amx", Amx::kUnitRows, attention, absolute_maximum, quantize};
}  // namespace intflash
