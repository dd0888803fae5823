// TMA loads of K and V^T. TMA computes the addresses of a box, permutes its rows and swizzles them.
#pragma once
#include "params.cuh"
#include "sm90/barrier.cuh"

// Return where a head begins: a row of K, a matrix of V^T.
DEVICE i32 first_row(const TensorMaps& maps, u32 batch, u32 head) { return batch * maps.k_batch + head * maps.k_head; }
DEVICE i32 matrix_of(const TensorMaps& maps, u32 batch, u32 head) { return batch * maps.v_batch + head * maps.v_head; }

DEVICE void tma_load_box(u32 to, const TensorMap& map, i32 first, i32 second, i32 third, i32 last, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %6, %5}], [%7];" ::"r"(to),
      "l"(&map), "r"(first), "r"(second), "r"(third), "r"(last), "r"(0), "r"(barrier)
      : "memory");
}

// Loads keys of a head from group `group` (of 16 keys) on, as many as the map's box holds.
DEVICE void tma_load_keys(u32 to, const TensorMaps& maps, i32 row, i32 group, u32 barrier) {
  tma_load_box(to, maps.k, 0, row, 0, group, barrier);
}
// Loads the values of 128 keys, in the order of value_row<LANE>.
template <int D, int LANE>
DEVICE void tma_load_values(u32 to, const TensorMaps& maps, i32 matrix, i32 key, u32 barrier) {
#pragma unroll
  for (int d = 0; d < D; d += 4 * LANE) tma_load_box(to + d * 128, maps.v, key, 0, d / LANE, matrix, barrier);
}
