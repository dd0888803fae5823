// The loads of stream.cuh by one thread: the copy engine finds the addresses, permutes the rows and swizzles them. It
// needs regular strides (tensor_maps.py says which); stream_loads.cuh takes any.
#pragma once
#include "stream_loads.cuh"

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Coordinates of a head: groups of 16 keys of K, matrices of V^T.
struct TensorMaps {
    TensorMap k, v;
    i32 k_batch, k_head, v_batch, v_head;
};

DEVICE void copy_box(u32 to, const TensorMap& map, i32 first, i32 last, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %4, %4, %4, %3}], [%5];" ::"r"(to), "l"(&map), "r"(first), "r"(last), "r"(0), "r"(barrier)
        : "memory");
}

struct EngineLoads {
    static constexpr u32 ARRIVALS = 1;
    const TensorMaps& maps;

    template <int PASSES>
    DEVICE void run(const Params&, const Shared& shared, u32 batch, u32 kv_head, i32 tiles, Stage& at) const {
        if (threadIdx.x != 0) return;
        const i32 group = batch * maps.k_batch + kv_head * maps.k_head;
        const i32 matrix = batch * maps.v_batch + kv_head * maps.v_head;
#pragma unroll 1
        for (int pass = 1; pass <= PASSES; ++pass) {
#pragma unroll 1
            for (i32 j = 0; j < tiles; ++j, at.next()) {
                const u32 full = shared.full + 8 * at.stage;
                shared.wait_empty(at);
                barrier_expect(full, pass == PASSES ? K_BYTES + V_BYTES : K_BYTES);
                copy_box(shared.k_tile(at.stage), maps.k, 0, group + j * (TILE / 16), full);
                if (pass == PASSES) copy_box(shared.v_tile(at.stage), maps.v, j * TILE, matrix, full);
            }
        }
    }
    DEVICE void help(const Params&, const Shared&) const {}
};
