// The operations of an integer model as the kernels see them: docs/numerics.md, section 4. They are plain data, filled
// in by program.cpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/call.h"

namespace intflash {

enum class LinearOutput : int32_t { kCodes, kTable, kResidual, kAccumulator };
enum class Width : int32_t { kInt8, kInt16, kInt32 };  // of a stored value

inline int64_t bytes_of(Width width) { return int64_t(1) << int32_t(width); }

// Values are clamped to [low, high] before they are stored.
struct Limits {
  int32_t low = 0, high = 0;
};

// Memory that begins at a cache line.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(size_t bytes) : bytes_(bytes + 63) {}
  char* data() { return bytes_.data() + (-reinterpret_cast<uintptr_t>(bytes_.data()) & 63); }
  const char* data() const { return const_cast<AlignedBytes*>(this)->data(); }

 private:
  std::vector<char> bytes_;
};

// Two weights of one output channel, or one and a zero.
struct WeightPair {
  int32_t k[2];  // their inputs
  int16_t weight[2];
};

// A linear layer's constants in the order in which one instruction set reads them, zero past out_features.
struct PackedLinear {
  int64_t in_features = 0, out_features = 0;
  int shift = 0;         // of the requantization, in [1, 62]
  int steps = 0;         // of the product's depth
  int64_t panels = 0;    // of kLanes output channels
  AlignedBytes weights;  // blocks of kCols panels: [step][panel][lane][group]
  std::vector<int32_t> bias, multiplier;
  // Where V::kSplitsWeights: what `weights` lack, one channel after the other, and where each channel's pairs begin.
  std::vector<WeightPair> remainders;
  std::vector<size_t> remainders_begin;
};

struct LinearCall {
  const PackedLinear* layer = nullptr;
  int64_t rows = 0, block_rows = 0;  // of the product, and of a unit of work
  const int8_t* x = nullptr;         // [rows, in_features]
  LinearOutput output = LinearOutput::kCodes;
  Width width = Width::kInt8;  // of the output, the residual and the table's entries
  Limits limits;               // of codes and residual
  const void* table = nullptr;
  int table_bits = 0;
  void* out = nullptr;                   // [images, out_rows, out_features]
  int64_t image_rows = 0, out_rows = 0;  // rows of an image in the product and in the output
  const int32_t* store_rows = nullptr;   // [image_rows]: rows of the output, or null for the product's own
  const void* residual = nullptr;        // [images, out_rows, out_features], or without images
  bool residual_is_constant = false;     // every image adds the same one
};

struct LayerNormCall {
  const void* x = nullptr;  // [images, in_rows, channels / parts]
  Width in = Width::kInt16, width = Width::kInt8;
  int64_t in_rows = 0, out_rows = 0, channels = 0, parts = 1;
  const int32_t* load_rows = nullptr;  // [out_rows, parts], or null for the same rows
  const int32_t *multiplier = nullptr,
                *bias = nullptr;  // [channels]; a vector can be read from each, and one value more
  int shift = 0;
  int64_t eps = 0;
  Limits limits;
  void* out = nullptr;  // [images, out_rows, channels]
};

struct PatchesCall {
  const void* image = nullptr;  // [images, channels, height, width] float32 or uint8
  bool is_float = false;
  int64_t channels = 0, height = 0, width = 0, patch_height = 0, patch_width = 0;
  float inverse = 0;
  int32_t zero_point = 0;
  int8_t* out = nullptr;
  int64_t image_rows() const { return height / patch_height * (width / patch_width); }
};

struct EmbeddingCall {
  std::vector<const int64_t*> indices;  // [images * image_rows], or null where the index is 0 everywhere
  std::vector<const void*> tables;      // [entries, channels]
  const void* rows = nullptr;           // [image_rows, channels], or null
  int64_t image_rows = 0, channels = 0;
  Width width = Width::kInt16;
  Limits limits;
  void* out = nullptr;
};

struct PoolCall {
  const void* x = nullptr;  // [images, rows, channels]
  Width in = Width::kInt8, width = Width::kInt8;
  int64_t rows = 0, first = 0, stop = 0, channels = 0;
  int32_t multiplier = 0;
  int shift = 0;
  Limits limits;
  void* out = nullptr;  // [images, channels]
};

// The kernels of one instruction set. Functions of rows take rows [first, last) of all images.
struct IntegerKernels {
  void (*pack)(const int8_t* weight, const int32_t* bias, const int32_t* multiplier, PackedLinear&);
  int64_t (*block_rows)(const PackedLinear&, int64_t rows, int threads);
  int64_t (*linear_units)(const LinearCall&);
  void (*linear)(const LinearCall&, const Units&, uint64_t call_id, Scratch&);
  void (*layer_norm)(const LayerNormCall&, int64_t first, int64_t last, Scratch&);
  void (*patches)(const PatchesCall&, int64_t first, int64_t last);
  void (*embedding)(const EmbeddingCall&, int64_t first, int64_t last);
  void (*pool)(const PoolCall&, int64_t first, int64_t last);  // images
};

}  // namespace intflash
