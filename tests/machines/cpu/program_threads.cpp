// Runs one program from several threads at once, each on several threads of the pool, and compares the results with
// those of one thread. scripts/sanitize_cpu.sh builds it with the thread sanitizer.
#include <atomic>
#include <cstdio>
#include <random>
#include <thread>

#include "cpu/program.h"

using namespace intflash;

namespace {

constexpr int64_t kTokens = 37, kHeads = 3, kHeadDim = 16, kChannels = kHeads * kHeadDim, kImages = 3;

std::mt19937 generator(1);

template <class T>
std::vector<T> random_values(int64_t count, int64_t low, int64_t high) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(T(low + int64_t(generator() % uint64_t(high - low + 1))));
  return values;
}

// A place of kTokens rows of `channels` values of `bytes` each, which moves `end` on.
Place place(int64_t& end, int64_t channels, int64_t bytes = 1) {
  const Place found{end, 0, channels * bytes};
  end += (kTokens * channels * bytes + 63) / 64 * 64;
  return found;
}

LinearStep linear(Program& program, Place x, Place out, int64_t k, int64_t n) {
  LinearStep step;
  step.x = x, step.out = out, step.image_rows = step.call.out_rows = kTokens;
  step.call.layer =
      program.pack(random_values<int8_t>(n * k, -127, 127).data(), random_values<int32_t>(n, -3000, 3000).data(),
                   random_values<int32_t>(n, 1 << 29, 1 << 30).data(), n, k, 42);
  step.call.limits = {-127, 127};
  return step;
}

void add_block(Program& program, const std::vector<Place>& at) {
  PatchesCall patches;
  patches.channels = 1, patches.height = kTokens, patches.width = kChannels;
  patches.patch_height = 1, patches.patch_width = kChannels;
  program.add(patches, 0, at[0]);
  program.add(linear(program, at[0], at[1], kChannels, 3 * kChannels));
  AttentionStep attention{};
  attention.q = attention.k = attention.v = at[1];
  attention.k.column = kChannels, attention.v.column = 2 * kChannels;
  attention.out = at[2], attention.method = Method::kP16;
  attention.windows = 1, attention.heads = kHeads, attention.tokens = kTokens, attention.head_dim = kHeadDim;
  attention.sm_scale = 0.25;
  static const float scale = 0.02f;
  attention.q_scale = attention.k_scale = attention.v_scale = attention.out_scale = &scale;
  attention.mask_input = -1;
  program.add(attention);
  LinearStep residual = linear(program, at[2], at[3], kChannels, kChannels);
  residual.call.output = LinearOutput::kResidual, residual.call.width = Width::kInt16;
  residual.call.limits = {-32768, 32767};
  const auto position = random_values<int16_t>(kTokens * kChannels, -9000, 9000);
  residual.call.residual = program.keep(position.data(), int64_t(position.size()));
  residual.call.residual_is_constant = true;
  program.add(residual);
  LayerNormCall norm;
  const auto m = random_values<int32_t>(kChannels, 1, 1 << 17), b = random_values<int32_t>(kChannels, -4000, 4000);
  norm.in_rows = norm.out_rows = kTokens, norm.channels = kChannels, norm.shift = 8, norm.eps = 99;
  norm.multiplier = program.keep(m.data(), kChannels, 68), norm.bias = program.keep(b.data(), kChannels, 68);
  norm.limits = {-128, 127};
  program.add(norm, at[3], at[4]);
  program.add_output(at[4], kTokens * kChannels, 0);
}

}  // namespace

int main() {
  int64_t end = 0;
  const std::vector<Place> places = {place(end, kChannels), place(end, 3 * kChannels), place(end, kChannels),
                                     place(end, kChannels, 2), place(end, kChannels)};
  Program program(*supported_kernels().back(), end);
  add_block(program, places);
  const auto image = random_values<uint8_t>(kImages * kTokens * kChannels, 0, 255);
  const auto result = [&](int threads) {
    std::vector<int8_t> out(image.size());
    program.run(kImages, {image.data()}, {out.data()}, threads, nullptr);
    return out;
  };
  const auto expected = result(1);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&, i] {
      for (int repeat = 0; repeat < 20; ++repeat) wrong += result(1 + (i + repeat) % 4) != expected;
    });
  for (auto& caller : callers) caller.join();
  std::printf(wrong ? "%d wrong\n" : "right\n", wrong.load());
  return wrong != 0;
}
