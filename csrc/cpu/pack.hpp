// Packs Q, K and V codes of any strides into the panels that Product reads.
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

template <class V>
struct Pack {
  using Code = typename V::Code;
  static constexpr int kLanes = V::kLanes, kGroup = V::kGroup, kBlock = 4 * V::kLanes;
  static constexpr int kFlip = V::kUnsignedKeys ? 0x80 : 0;

  // Packs rows of `steps * kGroup` codes, zero past head_dim. offset[r] cancels the keys' offset of 128 (kFlip).
  static void queries(const int8_t* q, int64_t row_step, int64_t step, int rows, int64_t dim, int steps, Code* out,
                      int32_t* offset) {
    const int64_t depth = int64_t(steps) * kGroup;
    for (int r = 0; r < rows; ++r, out += depth) {
      const int8_t* x = q + r * row_step;
      if (step == 1) {
        V::copy_codes(x, dim, depth, out);
      } else {
        for (int64_t d = 0; d < depth; ++d) out[d] = d < dim ? x[d * step] : 0;
      }
      offset[r] = 0;
      if constexpr (kFlip != 0) offset[r] = -128 * (step == 1 ? V::code_sum(x, dim) : V::code_sum(out, depth));
    }
  }

  // Packs panels of kLanes keys: [step][key][group]. Keys past n repeat key 0, and their scores are masked.
  static void keys(const int8_t* k, int64_t key_step, int64_t step, int64_t n, int64_t dim, int steps, Code* out) {
    for (int64_t key = 0; key < n; key += kLanes) {
      if constexpr (V::kFastPack) {
        if (step == 1 &&
            V::pack_keys(k + key * key_step, key_step, smaller<int64_t>(kLanes, n - key), dim, steps, out)) {
          out += int64_t(steps) * kGroup * kLanes;
          continue;
        }
      }
      for (int s = 0; s < steps; ++s)
        for (int lane = 0; lane < kLanes; ++lane) {
          const int8_t* x = k + (key + lane < n ? key + lane : 0) * key_step;
          for (int e = 0; e < kGroup; ++e, ++out) {
            const int64_t d = s * kGroup + e;
            *out = Code((d < dim ? x[d * step] : 0) ^ kFlip);
          }
        }
    }
  }

  // Packs panels of kLanes channels: [step][channel][group], zero past n and past dim. Keys are in the order in which P
  // is stored, or with in_key_order in their own.
  static void values(const int8_t* v, int64_t key_step, int64_t step, int64_t n, int64_t pad, int64_t dim,
                     bool in_key_order, Code* out) {
    for (int64_t c = 0; c < dim; c += kLanes)
      for (int64_t at = 0; at < pad; at += kGroup, out += kGroup * kLanes) {
        const int64_t in_block = at % kBlock;
        const int64_t first =
            in_key_order ? at : at - in_block + V::key_at(int(in_block));  // a group is consecutive keys
        if constexpr (V::kFastPack) {
          if (step == 1 && V::pack_values(v + first * key_step + c, key_step, n - first, dim - c, out)) continue;
        }
        for (int lane = 0; lane < kLanes; ++lane)
          for (int e = 0; e < kGroup; ++e) {
            const bool inside = first + e < n && c + lane < dim;
            out[lane * kGroup + e] = inside ? v[(first + e) * key_step + (c + lane) * step] : 0;
          }
      }
  }
};

// Writes the sum of V over each tile of kQFlashTile keys to sums[tile][channel].
inline void column_sums(const int8_t* v, int64_t key_step, int64_t step, int64_t n, int64_t dim, int64_t dim_pad,
                        int32_t* sums) {
  for (int64_t key = 0; key < n; key += kQFlashTile, sums += dim_pad) {
    for (int64_t c = 0; c < dim_pad; ++c) sums[c] = 0;
    for (int64_t j = key; j < n && j < key + kQFlashTile; ++j) {
      const int8_t* row = v + j * key_step;
      if (step == 1)
        for (int64_t c = 0; c < dim; ++c) sums[c] += row[c];
      else
        for (int64_t c = 0; c < dim; ++c) sums[c] += row[c * step];
    }
  }
}

}  // namespace
}  // namespace intflash
