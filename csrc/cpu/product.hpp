// The integer matrix products of packed panels in register tiles of V::kRows x V::kCols vectors.
#pragma once
#include "cpu/arithmetic.hpp"

namespace intflash {
namespace {

// What the columns of a product are: keys of scores, channels of values, or output channels of a linear layer.
enum class Columns { kKeys, kValues, kWeights };

template <class V>
struct Product {
  using Code = typename V::Code;
  using PCode = typename V::PCode;
  static constexpr int kLanes = V::kLanes, kGroup = V::kGroup, kBlock = 4 * V::kLanes;

  // The steps of a product: the first `steps` ones, then those listed of a block of keys that is not full.
  struct Depth {
    int steps, tails;
    int tail[kBlock / kGroup];
  };

  // Computes out[r][j] = start[r] + sum_d q[r][d] k[j][d] over `panels` panels of keys, and updates max[r] with the
  // scores of the first `whole` panels.
  static void scores(const Code* q, const Code* k, int steps, int panels, int rows, const int32_t* start, int32_t* out,
                     int64_t out_ld, typename V::I32* max, int whole) {
    if constexpr (V::kMatrixUnit) {
      V::scores(q, k, steps, panels, rows, out, out_ld, max, whole);
    } else {
      rows_of<Columns::kKeys>(q, int64_t(steps) * kGroup, k, int64_t(steps) * kGroup * kLanes, Depth{steps, 0, {}},
                              panels, rows, start, false, out, out_ld);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < whole; ++c) max[r] = V::max(max[r], V::load(out + r * out_ld + c * kLanes));
    }
  }

  // Computes out[r][c] = sum_j p[r][j] v[j][c] over n keys, or with `add` adds that. Panels lie `v_ld` codes apart.
  static void values(const PCode* p, int64_t p_ld, const Code* v, int64_t v_ld, int64_t n, int panels, int rows,
                     int32_t* out, int64_t out_ld, bool add) {
    Depth depth = {int(n / kBlock) * (kBlock / kGroup), 0, {}};
    for (int step = 0; n % kBlock && step < kBlock / kGroup; ++step)
      if (V::key_at(step * kGroup) < n % kBlock) depth.tail[depth.tails++] = depth.steps + step;
    if constexpr (V::kMatrixUnit)
      V::values(p, p_ld, v, v_ld, depth.steps + (n % kBlock ? kBlock / kGroup : 0), panels, rows, out, out_ld, add);
    else
      rows_of<Columns::kValues>(p, p_ld, v, v_ld, depth, panels, rows, nullptr, add, out, out_ld);
  }
  // Does the same with keys in their own order, n a multiple of kGroup.
  static void values_in_key_order(const PCode* p, int64_t p_ld, const Code* v, int64_t v_ld, int n, int panels,
                                  int rows, int32_t* out, int64_t out_ld) {
    rows_of<Columns::kValues>(p, p_ld, v, v_ld, Depth{n / kGroup, 0, {}}, panels, rows, nullptr, false, out, out_ld);
  }
  // Computes out[r][n] = sum_k x[r][k] w[n][k] of up to V::kCols panels of weights, which are interleaved:
  // [step][panel][lane][group].
  static void linear(const typename V::XCode* x, int64_t x_ld, const int8_t* w, int steps, int panels, int rows,
                     int32_t* out, int64_t out_ld) {
    if constexpr (V::kOwnLinear)
      V::linear(x, x_ld, w, steps, panels, rows, out, out_ld);
    else
      rows_of<Columns::kWeights>(x, x_ld, w, 0, Depth{steps, 0, {}}, panels, rows, nullptr, false, out, out_ld);
  }

 private:
  template <Columns K, class A, class B>
  static void rows_of(const A* a, int64_t a_ld, const B* b, int64_t b_ld, const Depth& depth, int panels, int rows,
                      const int32_t* start, bool add, int32_t* out, int64_t out_ld) {
    const int tiles = (rows + V::kRows - 1) / V::kRows;
    for (int t = 0; t < tiles; ++t) {
      const int r = t * rows / tiles, count = (t + 1) * rows / tiles - r;  // tiles of even size
      row_count<K, V::kRows>(count, a + r * a_ld, a_ld, b, b_ld, depth, panels, start ? start + r : nullptr, add,
                             out + r * out_ld, out_ld);
    }
  }

  template <Columns K, int R, class... Args>
  static void row_count(int count, const Args&... args) {
    if constexpr (R > 1) {
      if (count < R) return row_count<K, R - 1>(count, args...);
    }
    columns<K, R>(args...);
  }

  template <Columns K, int R, class A, class B>
  static void columns(const A* a, int64_t a_ld, const B* b, int64_t b_ld, const Depth& depth, int panels,
                      const int32_t* start, bool add, int32_t* out, int64_t out_ld) {
    int c = 0;
    for (; c + V::kCols <= panels; c += V::kCols)
      tile<K, R, V::kCols>(a, a_ld, b + c * b_ld, b_ld, depth, start, add, out + c * kLanes, out_ld);
    if (c < panels)
      column_count<K, R, V::kCols - 1>(panels - c, a, a_ld, b + c * b_ld, b_ld, depth, start, add, out + c * kLanes,
                                       out_ld);
  }

  template <Columns K, int R, int C, class... Args>
  static void column_count(int count, const Args&... args) {
    if constexpr (C > 1) {
      if (count < C) return column_count<K, R, C - 1>(count, args...);
    }
    if constexpr (C > 0) tile<K, R, C>(args...);
  }

  template <Columns K, int R, int C, class A, class B>
  static inline void tile(const A* a, int64_t a_ld, const B* b, int64_t b_ld, const Depth& depth, const int32_t* start,
                          bool add, int32_t* out, int64_t out_ld) {
    typename V::I32 acc[R][C];  // stays in registers, because every loop over it is unrolled
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        acc[r][c] = add ? V::load(out + r * out_ld + c * kLanes) : V::set1(start ? start[r] : 0);
    constexpr int kCodes = K == Columns::kWeights ? V::kWeightGroup : V::kGroup;  // of a column in a step
    const auto step = [&](int s) __attribute__((always_inline)) {
      typename V::Codes column[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        if constexpr (K == Columns::kWeights)
          column[c] = V::load_weights(b + (int64_t(s) * C + c) * kCodes * kLanes);
        else
          column[c] = V::load_codes(b + c * b_ld + int64_t(s) * kCodes * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename V::Codes x = V::broadcast(a + r * a_ld + s * kCodes);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
          if constexpr (K == Columns::kKeys)
            acc[r][c] = V::dot_qk(acc[r][c], column[c], x);
          else if constexpr (K == Columns::kValues)
            acc[r][c] = V::dot_pv(acc[r][c], column[c], x);
          else
            V::dot_wx(acc[r][c], column[c], x);
      }
    };
    for (int s = 0; s < depth.steps; ++s) step(s);
    if constexpr (K == Columns::kValues)
      for (int t = 0; t < depth.tails; ++t) step(depth.tail[t]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) V::store(out + r * out_ld + c * kLanes, acc[r][c]);
  }
};

}  // namespace
}  // namespace intflash
