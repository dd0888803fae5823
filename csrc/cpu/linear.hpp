// Linear layers on int8 codes, written once over a vector layer V (isa/*.hpp).
//
// A unit of work is a block of rows by a block of V::kCols panels of output channels. A thread packs the rows of its
// block once (gathered, offset by V::kXOffset, zero past in_features) and keeps them while it takes units of the same
// block. The sums of kTileRows rows by one block of channels stay in the L1 cache until the epilogue has read them.
//
// With V::kSplitsWeights the products of two adjacent inputs are summed in 16 bits, which saturate where the two
// weights sum to more than 128, one pair in fifty of normally distributed weights. There the packed weights hold less;
// what remains is a short list for each channel, multiplied with the transposed inputs of a tile's rows.
#pragma once
#include "cpu/arithmetic.hpp"
#include "cpu/integer.h"
#include "cpu/lanes.hpp"
#include "cpu/product.hpp"

namespace intflash {
namespace {

template <class V>
struct Linear {
  using I32 = typename V::I32;
  using XCode = typename V::XCode;
  static constexpr int kLanes = V::kLanes, kCols = V::kCols, kGroup = V::kWeightGroup;
  static constexpr int kColumns = kCols * kLanes;             // channels of a block
  static constexpr int kTileRows = V::kMatrixUnit ? 32 : 24;  // a multiple of all register tiles but one of 9
  static constexpr int kRowPad = 32;                          // matrix units read and write whole tiles

  static int steps_of(int64_t in_features) {
    return V::kMatrixUnit ? V::depth_steps(in_features) : ceil_div(in_features, kGroup);
  }

  // Packs weights [out_features, in_features] and their constants into a layer whose sizes and shift are set.
  // `multiplier` is null for accumulators.
  static void pack(const int8_t* w, const int32_t* bias, const int32_t* multiplier, PackedLinear& layer) {
    const int64_t in = layer.in_features, out = layer.out_features;
    layer.steps = steps_of(in);
    layer.panels = ceil_div(out, kLanes);
    layer.weights = AlignedBytes(size_t(layer.panels * kLanes * layer.steps * kGroup));
    layer.bias.assign(size_t(layer.panels * kLanes), 0);
    layer.multiplier.assign(size_t(layer.panels * kLanes) + 1, 0);  // the last vector's odd lanes are read one further
    if constexpr (V::kSplitsWeights) split(w, layer);
    int8_t* to = reinterpret_cast<int8_t*>(layer.weights.data());
    for (int64_t panel = 0; panel < layer.panels; panel += kCols) {
      const int64_t columns = smaller<int64_t>(kCols, layer.panels - panel) * kLanes;
      for (int64_t k = 0; k < int64_t(layer.steps) * kGroup; k += kGroup)
        for (int64_t n = panel * kLanes; n < panel * kLanes + columns; ++n)
          for (int64_t e = k; e < k + kGroup; ++e)
            *to++ = n < out && e < in ? int8_t(w[n * in + e] - remainder(w + n * in, e, in)) : int8_t(0);
    }
    for (int64_t n = 0; n < out; ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < in; ++k) sum += w[n * in + k];
      layer.bias[size_t(n)] = wrapping_add(bias[n], wrapping_multiply(-V::kXOffset, sum));
      layer.multiplier[size_t(n)] = multiplier ? multiplier[n] : 0;
    }
  }

  static int64_t column_blocks(const PackedLinear& layer) { return ceil_div(layer.panels, kCols); }

  // Rows of a unit: packed they take at most a quarter of a typical L2 cache, and there are some units for each thread.
  static int64_t block_rows(const PackedLinear& layer, int64_t rows, int threads) {
    constexpr int64_t kBytes = 1 << 18;
    const int64_t depth = layer.steps * kGroup;
    const int64_t fit = kBytes / (kTileRows * depth * int64_t(sizeof(XCode)) + 2 * column_values(depth));
    int64_t most = larger<int64_t>(fit, 1) * kTileRows;
    const int64_t wanted = threads == 1 ? 1 : ceil_div(3 * threads, column_blocks(layer));
    most = smaller(most, round_up(ceil_div(rows, wanted), kTileRows));
    const int64_t blocks = ceil_div(rows, most);
    return round_up(ceil_div(rows, blocks), kTileRows);  // blocks of even size
  }

  static int64_t units(const LinearCall& call) {
    return column_blocks(*call.layer) * ceil_div(call.rows, call.block_rows);
  }

  static void run(const LinearCall& call, const Units& units, uint64_t call_id, Scratch& scratch) {
    Linear linear(call, scratch);
    V::begin(64);
    for (int64_t first, last; units.next(first, last);)
      for (int64_t unit = first; unit < last; ++unit) linear.unit(unit, call_id);
    V::end();
  }

 private:
  static constexpr int kAccRows = kTileRows < kRowPad ? kRowPad : kTileRows;
  const LinearCall& call_;
  const PackedLinear& layer_;
  Scratch& scratch_;
  int64_t x_ld_;
  XCode* x_;
  int32_t* acc_;
  int16_t *index_, *columns_;       // columns_: of each tile of kTileRows rows, with V::kSplitsWeights
  int64_t *out_at_, *residual_at_;  // where each row of the block begins in the output and the residual

  Linear(const LinearCall& call, Scratch& scratch) : call_(call), layer_(*call.layer), scratch_(scratch) {
    x_ld_ = int64_t(layer_.steps) * kGroup + 64 / int64_t(sizeof(XCode));  // rows 4 KiB apart would share a cache set
    const int64_t rows = round_up(call.block_rows, kRowPad);
    int64_t total = 0;
    const auto place = [&](int64_t bytes) {
      const int64_t at = total;
      total += round_up(bytes, 64);
      return at;
    };
    const int64_t acc = place(kAccRows * kColumns * 4), index = place(kTileRows * kColumns * 2), out = place(rows * 8),
                  residual = place(rows * 8), x = place(rows * x_ld_ * int64_t(sizeof(XCode))),
                  by_columns = place(ceil_div(rows, kTileRows) * column_values(x_ld_) * 2);
    char* base = scratch.reserve(size_t(total));
    acc_ = reinterpret_cast<int32_t*>(base + acc);
    index_ = reinterpret_cast<int16_t*>(base + index);
    out_at_ = reinterpret_cast<int64_t*>(base + out);
    residual_at_ = reinterpret_cast<int64_t*>(base + residual);
    x_ = reinterpret_cast<XCode*>(base + x);
    columns_ = reinterpret_cast<int16_t*>(base + by_columns);
  }

  // Values of a tile's rows by columns.
  static int64_t column_values(int64_t depth) {
    if constexpr (V::kSplitsWeights) {
      static_assert(kTileRows <= V::kColumnRows && V::kColumnRows <= kAccRows);
      return depth * V::kColumnRows;
    }
    return 0;
  }
  // What the product does not take of weight k of a channel.
  static int remainder(const int8_t* w, int64_t k, int64_t in) {
    if constexpr (!V::kSplitsWeights) return 0;
    const int mine = w[k], other = (k ^ 1) < in ? w[k ^ 1] : 0, sum = mine + other;
    if (-128 <= sum && sum <= 128) return 0;  // else both weights have one sign
    const bool is_larger = mine * mine > other * other || (mine == other && k % 2 == 0);
    return !is_larger ? 0 : sum > 0 ? sum - 128 : sum + 128;
  }
  static void split(const int8_t* w, PackedLinear& layer) {
    const int64_t in = layer.in_features;
    for (int64_t n = 0; n < layer.panels * kLanes; ++n) {
      const size_t begin = layer.remainders.size();
      layer.remainders_begin.push_back(begin);
      int count = 0;
      for (int64_t k = 0; n < layer.out_features && k < in; ++k) {
        const int left = remainder(w + n * in, k, in);
        if (!left) continue;
        if (count % 2 == 0) layer.remainders.push_back({});
        layer.remainders.back().k[count % 2] = int32_t(k), layer.remainders.back().weight[count % 2] = int16_t(left);
        ++count;
      }
    }
    layer.remainders_begin.push_back(layer.remainders.size());
  }

  void unit(int64_t unit, uint64_t call_id) {
    const int64_t blocks = column_blocks(layer_), m = unit / blocks, n = unit % blocks;
    const int64_t first = m * call_.block_rows, rows = smaller(call_.block_rows, call_.rows - first);
    if (scratch_.call_id != call_id || scratch_.packed_head != m) {
      scratch_.call_id = call_id, scratch_.packed_head = m;
      enter_rows(first, rows);
    }
    const int panels = int(smaller<int64_t>(kCols, layer_.panels - n * kCols));
    const int8_t* w =
        reinterpret_cast<const int8_t*>(layer_.weights.data()) + n * kColumns * int64_t(layer_.steps) * kGroup;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int count = int(smaller<int64_t>(kTileRows, rows - r));
      Product<V>::linear(x_ + r * x_ld_, x_ld_, w, layer_.steps, panels, count, acc_, kColumns);
      if constexpr (V::kSplitsWeights)
        for (int p = 0; p < panels; ++p)
          V::add_remainders(columns_ + r / kTileRows * column_values(x_ld_), layer_.remainders.data(),
                            layer_.remainders_begin.data() + n * kColumns + p * kLanes, acc_ + p * kLanes, kColumns);
      switch (call_.width) {
        case Width::kInt8: epilogue<int8_t>(r, count, n * kColumns, panels); break;
        case Width::kInt16: epilogue<int16_t>(r, count, n * kColumns, panels); break;
        case Width::kInt32: epilogue<int32_t>(r, count, n * kColumns, panels); break;
      }
    }
  }

  void enter_rows(int64_t first, int64_t rows) {
    const int64_t in = layer_.in_features, depth = int64_t(layer_.steps) * kGroup;
    for (int64_t r = 0; r < rows; ++r) {
      const int8_t* x = call_.x + (first + r) * in;
      XCode* out = x_ + r * x_ld_;
      for (int64_t k = 0; k < in; ++k) out[k] = XCode(x[k] + V::kXOffset);
      for (int64_t k = in; k < depth; ++k) out[k] = 0;  // its weights are zero
      const int64_t image = (first + r) / call_.image_rows, row = (first + r) % call_.image_rows;
      const int64_t to = call_.store_rows ? call_.store_rows[row] : row;
      out_at_[r] = (image * call_.out_rows + to) * layer_.out_features;
      residual_at_[r] = ((call_.residual_is_constant ? 0 : image * call_.out_rows) + to) * layer_.out_features;
    }
    if constexpr (V::kSplitsWeights)
      for (int64_t r = 0; r < rows && !layer_.remainders.empty(); r += kTileRows)
        V::write_columns(x_ + r * x_ld_, x_ld_, int(smaller<int64_t>(kTileRows, rows - r)), in,
                         columns_ + r / kTileRows * column_values(x_ld_));
  }

  // Stores the sums of rows [first, first + rows) of the block, channels [n, n + panels * kLanes).
  template <class T>
  void epilogue(int64_t first, int rows, int64_t n, int panels) {
    const int64_t *out_at = out_at_ + first, *residual_at = residual_at_ + first;
    T* const out = static_cast<T*>(call_.out) + n;
    const int64_t channels = smaller<int64_t>(panels * kLanes, layer_.out_features - n);
    const Limits limits = call_.limits;
    switch (call_.output) {
      case LinearOutput::kCodes:
        return requantize(rows, n, panels, [&](int r, int64_t c, auto& y) {
          Lanes<V>::store_clamped(out + out_at[r] + c, y, limits, channels - c);
        });
      case LinearOutput::kResidual: {
        const T* const residual = static_cast<const T*>(call_.residual) + n;
        return requantize(rows, n, panels, [&](int r, int64_t c, auto& y) {
          const T* x = residual + residual_at[r] + c;
          for (I32& v : y) v = V::add(v, Lanes<V>::load(x, channels - c)), x += kLanes, c += kLanes;
          c -= int64_t(sizeof(y) / sizeof(I32)) * kLanes;
          Lanes<V>::store_clamped(out + out_at[r] + c, y, limits, channels - c);
        });
      }
      case LinearOutput::kTable: {
        const int32_t half = 1 << (call_.table_bits - 1);
        requantize(rows, n, panels, [&](int r, int64_t c, auto& y) {
          Lanes<V>::store_clamped(index_ + r * kColumns + c, y, {-half, half - 1}, kColumns);
        });
        const T* const middle = static_cast<const T*>(call_.table) + half;
        for (int r = 0; r < rows; ++r) look_up(middle, index_ + r * kColumns, channels, out + out_at[r]);
        return;
      }
      case LinearOutput::kAccumulator:
        for (int r = 0; r < rows; ++r)
          for (int64_t c = 0; c < channels; ++c)
            out[out_at[r] + c] = T(wrapping_add(acc_[r * kColumns + c], layer_.bias[size_t(n + c)]));
        return;
    }
  }

  // Calls f(row, channel from n on, vectors of y) for all sums, of kCols vectors at once where there are so many. y is
  // clamped to [-2^30, 2^30], past which every sum with a residual is clamped.
  template <class F>
  void requantize(int rows, int64_t n, int panels, const F& f) {
    if (panels == kCols) return requantize_panels<kCols>(rows, n, 0, f);
    for (int p = 0; p < panels; ++p) requantize_panels<1>(rows, n, p, f);
  }
  template <int Panels, class F>
  void requantize_panels(int rows, int64_t n, int first, const F& f) {
    const int64_t c = first * kLanes;
    const int32_t *bias = layer_.bias.data() + n + c, *multiplier = layer_.multiplier.data() + n + c, *acc = acc_ + c;
    I32 y[Panels];
    if (layer_.shift < 33) {
      for (int r = 0; r < rows; ++r, acc += kColumns) {
        for (int p = 0; p < Panels; ++p) y[p] = requantize_wide(acc + p * kLanes, n + c + p * kLanes);
        f(r, c, y);
      }
      return;
    }
    const int shift = layer_.shift - 32;
    const I32 half = V::set1(1 << (shift - 1));
    for (int r = 0; r < rows; ++r, acc += kColumns) {
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) {  // the upper half of a product is below 2^30
        const I32 sum = V::add(V::load(acc + p * kLanes), V::load(bias + p * kLanes));
        y[p] = V::shift_right_signed(V::add(V::mul_high_signed(sum, multiplier + p * kLanes), half), shift);
      }
      f(r, c, y);
    }
  }
  // The same where y may leave int32.
  I32 requantize_wide(const int32_t* acc, int64_t c) const {
    int32_t y[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const size_t n = size_t(c + i);
      const int64_t product = int64_t(wrapping_add(acc[i], layer_.bias[n])) * layer_.multiplier[n];
      const int64_t floor = (product + (int64_t(1) << (layer_.shift - 1))) >> layer_.shift;
      y[i] = int32_t(larger<int64_t>(smaller<int64_t>(floor, 1 << 30), -(1 << 30)));
    }
    return V::load(y);
  }

  // out[c] = middle[index[c]], from the middle of the table on
  template <class T>
  void look_up(const T* middle, const int16_t* index, int64_t count, T* out) const {
    if constexpr (V::kRowOperations && sizeof(T) == 1)
      if (V::look_up(middle, call_.table_bits, index, count, out)) return;
    int64_t c = 0;
    if constexpr (sizeof(T) == 1) {  // eight entries to one store
      for (; c + 8 <= count; c += 8) {
        T entries[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) entries[i] = middle[index[c + i]];
        std::memcpy(out + c, entries, 8);
      }
    }
    for (; c < count; ++c) out[c] = middle[index[c]];
  }
};

}  // namespace
}  // namespace intflash
