// Compares the products and LayerNorms of one vector layer with plain C++, on processors or emulators that need not
// have all of it: AMX's tiles are emulated on AVX-512, AVX-VNNI by AVX-512 VNNI. tests/integer/test_vector_layers.py
// and scripts/sanitize_cpu.sh build it with -DLAYER=..., the name of the layer's class.
#define Amx 1
#define AvxVnni 2
#define Avx512Vnni 3
#define Avx2 4
#define Generic 5
#define Neon 6
#define NeonI8mm 7
#if LAYER == Amx
#define INTFLASH_HEADER "cpu/isa/amx.hpp"
#include "machines/cpu/amx_tiles.h"
#elif LAYER == Avx512Vnni
#define INTFLASH_HEADER "cpu/isa/avx512.hpp"
#elif LAYER == AvxVnni
#include <immintrin.h>
#define __AVXVNNI__
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define INTFLASH_HEADER "cpu/isa/avx2.hpp"
#elif LAYER == Avx2
#define INTFLASH_HEADER "cpu/isa/avx2.hpp"
#elif LAYER == Generic
#define INTFLASH_HEADER "cpu/isa/generic.hpp"
#else
#define INTFLASH_HEADER "cpu/isa/neon.hpp"
#endif
#undef Amx
#undef AvxVnni
#undef Avx512Vnni
#undef Avx2
#undef Generic
#undef Neon
#undef NeonI8mm
#include INTFLASH_HEADER

#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>

#include "cpu/integer.hpp"

namespace intflash {

char* Scratch::reserve(size_t bytes) {
  if (bytes > capacity) {
    std::free(data);
    capacity = (bytes + 4095) / 4096 * 4096;
    data = static_cast<char*>(std::aligned_alloc(4096, capacity));
    packed_head = -1;
  }
  return data;
}

namespace {

using V = LAYER;

std::mt19937_64 generator(1);
int64_t between(int64_t low, int64_t high) { return low + int64_t(generator() % uint64_t(high - low + 1)); }

struct All {
  int64_t units;
  bool drawn = false;
  static bool next(void* context, int64_t& first, int64_t& last) {
    All& all = *static_cast<All*>(context);
    first = 0, last = all.units;
    return !std::exchange(all.drawn, true);
  }
};

int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

bool product_is_right(int64_t rows, int64_t k, int64_t n, Scratch& scratch) {
  static uint64_t call_id = 0;
  std::vector<int8_t> x, w;
  std::vector<int32_t> bias, multiplier;
  const bool extreme = between(0, 3) == 0;
  for (int64_t i = 0; i < rows * k; ++i) x.push_back(int8_t(extreme ? -128 : between(-128, 127)));
  for (int64_t i = 0; i < n * k; ++i) w.push_back(int8_t(extreme ? 127 - 254 * (i & 1) : between(-127, 127)));
  for (int64_t i = 0; i < n; ++i) bias.push_back(int32_t(between(-(1 << 24), 1 << 24)));
  for (int64_t i = 0; i < n; ++i) multiplier.push_back(int32_t(between(0, INT32_MAX)));
  PackedLinear layer;
  layer.in_features = k, layer.out_features = n, layer.shift = int(between(28, 45));
  Linear<V>::pack(w.data(), bias.data(), multiplier.data(), layer);
  std::vector<int16_t> residual(size_t(rows * n)), out(size_t(rows * n)), table(256);
  for (auto& value : residual) value = int16_t(between(-32768, 32767));
  for (auto& value : table) value = int16_t(between(-32768, 32767));
  LinearCall call;
  call.layer = &layer, call.rows = call.image_rows = call.out_rows = rows;
  call.block_rows = Linear<V>::block_rows(layer, rows, int(between(1, 4)));
  call.x = x.data(), call.out = out.data(), call.residual = residual.data();
  call.width = Width::kInt16, call.limits = {-30000, 32767};
  call.table = table.data(), call.table_bits = 8;
  for (LinearOutput output : {LinearOutput::kCodes, LinearOutput::kResidual, LinearOutput::kTable}) {
    call.output = output;
    All all{Linear<V>::units(call)};
    Linear<V>::run(call, {All::next, &all, false}, ++call_id, scratch);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t c = 0; c < n; ++c) {
        int64_t acc = bias[size_t(c)];
        for (int64_t i = 0; i < k; ++i) acc += x[size_t(m * k + i)] * w[size_t(c * k + i)];
        const int64_t y = (acc * multiplier[size_t(c)] + (int64_t(1) << (layer.shift - 1))) >> layer.shift;
        const size_t at = size_t(m * n + c);
        const int64_t expected = output == LinearOutput::kTable   ? table[size_t(clamp(y, -128, 127) + 128)]
                                 : output == LinearOutput::kCodes ? clamp(y, -30000, 32767)
                                                                  : clamp(residual[at] + y, -30000, 32767);
        if (out[at] != expected) {
          std::printf("rows %ld, K %ld, N %ld, output %d: row %ld, channel %ld is %d, not %ld\n", long(rows), long(k),
                      long(n), int(output), long(m), long(c), out[at], long(expected));
          return false;
        }
      }
  }
  return true;
}

bool layer_norm_is_right(int64_t channels, Scratch& scratch) {
  constexpr int64_t rows = 3;
  std::vector<int16_t> x(size_t(rows * channels));
  std::vector<int8_t> out(size_t(rows * channels));
  std::vector<int32_t> m(size_t(channels) + 32), b(size_t(channels) + 32);
  const int64_t reach = between(0, 1) ? 32767 : 3;
  for (auto& value : x) value = int16_t(between(-reach, reach));
  for (auto& value : m) value = int32_t(between(-INT32_MAX, INT32_MAX));
  for (auto& value : b) value = int32_t(between(-(1 << 29), 1 << 29));
  LayerNormCall call;
  call.x = x.data(), call.out = out.data(), call.in_rows = call.out_rows = rows, call.channels = channels;
  call.multiplier = m.data(), call.bias = b.data(), call.shift = 20, call.eps = 5, call.limits = {-128, 127};
  LayerNorm<V>::run(call, 0, rows, scratch);
  for (int64_t r = 0; r < rows; ++r) {
    const int16_t* row = x.data() + r * channels;
    int64_t s = 0, squares = 0;
    for (int64_t c = 0; c < channels; ++c) s += row[c], squares += int64_t(row[c]) * row[c];
    int64_t q = s / channels;
    if (q * channels > s) --q;
    const int64_t rest = s - q * channels;
    const int64_t e = squares - 2 * q * s + channels * q * q - rest * rest / channels + call.eps;
    int bits = 0;
    while (bits < 63 && e >> bits) ++bits;
    const int h = (64 - bits) / 2, f = h - 1;
    const uint32_t n = uint32_t(h >= 16 ? uint64_t(e) << (2 * h - 32) : uint64_t(e) >> (32 - 2 * h));
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t t = (row[c] - q) * (int64_t(1) << f) - (rest << f) / channels;
      const int64_t z = (t * reciprocal_root(n)) >> 32;
      const int64_t y = clamp((((z * m[size_t(c)]) >> 32) + b[size_t(c)]) >> call.shift, -128, 127);
      if (out[size_t(r * channels + c)] != y) {
        std::printf("LayerNorm of %ld channels: %d, not %ld\n", long(channels), out[size_t(r * channels + c)], long(y));
        return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace intflash

int main() {
  using namespace intflash;
  Scratch scratch;
  for (int i = 0; i < 150; ++i)
    if (!product_is_right(between(1, 70), between(1, 200), between(1, 150), scratch)) return 1;
  if (!product_is_right(130, 3072, 70, scratch)) return 1;
  for (int64_t channels : {2, 3, 15, 16, 17, 64, 96, 100, 768})
    for (int i = 0; i < 5; ++i)
      if (!layer_norm_is_right(channels, scratch)) return 1;
  std::free(scratch.data);
  std::puts("right");
}
