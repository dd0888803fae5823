// TMA loads of K and V^T. TMA computes the addresses of a box, permutes its rows and swizzles them.
#pragma once
#include "sm90/barrier.cuh"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// tensor_maps.py encodes the maps. `row` and `matrix` return where a head begins: a row of K, a matrix of V^T.
struct TensorMaps {
  TensorMap k, v;
  i32 k_batch, k_head, v_batch, v_head;

  DEVICE i32 row(u32 batch, u32 head) const { return batch * k_batch + head * k_head; }
  DEVICE i32 matrix(u32 batch, u32 head) const { return batch * v_batch + head * v_head; }
};

DEVICE void tma_load_box(u32 to, const TensorMap& map, i32 first, i32 second, i32 last, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %5, %5, %4}], [%6];" ::"r"(to),
      "l"(&map), "r"(first), "r"(second), "r"(last), "r"(0), "r"(barrier)
      : "memory");
}

// Loads keys of a head from group `group` (of 16 keys) on, as many as the map's box holds.
DEVICE void tma_load_keys(u32 to, const TensorMaps& maps, i32 row, i32 group, u32 barrier) {
  tma_load_box(to, maps.k, 0, row, group, barrier);
}
// Loads the values of 128 keys.
DEVICE void tma_load_values(u32 to, const TensorMaps& maps, i32 matrix, i32 key, u32 barrier) {
  tma_load_box(to, maps.v, key, 0, matrix, barrier);
}
