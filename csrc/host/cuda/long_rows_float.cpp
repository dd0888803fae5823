// Launches of csrc/cuda/sm90/long_rows_float.cu: int8 Q K^T, a float32 softmax, and 16-bit P and V.
#include "host/cuda/plan.h"

namespace intflash::gpu {
namespace {

constexpr int64_t kConsumers = 3;  // consumer warpgroups

const Source kSource = {"sm90/long_rows_float.cu",
                        "attention",
                        {{"HEAD_DIM", nullptr},
                         {"CONSUMERS", nullptr},
                         {"CAUSAL", nullptr},
                         {"KEY_SCALES", nullptr},
                         {"P_SHARED", nullptr},
                         {"P_TABLE", nullptr},
                         {"QUERY", kTypeNames},
                         {"VALUE", kTypeNames},
                         {"OUT", kTypeNames},
                         {"STAGES", nullptr},
                         {"KV_RESIDENT", nullptr},
                         {"FLOAT_KV", nullptr},
                         {"VALUES_IN_RANGE", nullptr}}};

}  // namespace

bool float_rows_serve(const Problem& p, const Gpu& gpu, Refusal& why) {
  if (!gpu.is_hopper()) return why.no([] { return kHopperOnly; });
  return is_aligned(p.q, "q", why) && is_aligned(p.k, "k", why) && is_aligned(p.v, "v", why) &&
         is_long_rows_shape(p, 16, why);
}

void float_rows_launch(const Problem& p, int key_scales, const Memory& memory, const Gpu& gpu, Launch& launch) {
  const int64_t d = p.head_dim(), scale_bytes[3] = {0, 16, 512};  // of K in a stage
  Attention a{p, memory, p.q, p.k, p.v, true, false, {p.scale[0], p.scale[1], {}}, {}, {}, gpu};
  launch.program = {&kSource,
                    {int32_t(d), int32_t(kConsumers), p.is_causal, key_scales, 0, 0, int32_t(OutType::kInt8),
                     int32_t(p.v.type), int32_t(p.out_type), int32_t(kStages), 0, 0, 0}};
  const Schedule schedule = schedule_ranges(p, kConsumers, gpu);
  launch.grid[0] = uint32_t(schedule.ctas);
  launch.threads = uint32_t(128 * (kConsumers + 1));
  launch.shared_bytes =
      uint32_t(long_rows_shared_bytes(d, kConsumers, 128 * ceil_div(d, 64) * 128, scale_bytes[key_scales], kStages, 0));
  launch.set_parameters<::Params>() = attention_parameters(a, 1, schedule.share);
}

}  // namespace intflash::gpu
