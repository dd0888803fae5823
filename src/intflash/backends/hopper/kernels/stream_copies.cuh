// The loads of stream.cuh by one thread and the copy engine. It needs regular strides (tensor_maps.py says which);
// stream_loads.cuh takes any.
#pragma once
#include "copies.cuh"
#include "stream_loads.cuh"

struct EngineLoads {
    static constexpr u32 ARRIVALS = 1;
    const TensorMaps& maps;

    template <int PASSES>
    DEVICE void run(const Params&, const Shared& shared, u32 batch, u32 kv_head, i32 tiles, Stage& at) const {
        if (threadIdx.x != 0) return;
        const i32 row = maps.row(batch, kv_head), matrix = maps.matrix(batch, kv_head);
#pragma unroll 1
        for (int pass = 1; pass <= PASSES; ++pass) {
#pragma unroll 1
            for (i32 j = 0; j < tiles; ++j, at.next()) {
                const u32 full = shared.full + 8 * at.stage;
                shared.wait_empty(at);
                barrier_expect(full, pass == PASSES ? K_BYTES + V_BYTES : K_BYTES);
                copy_keys(shared.k_tile(at.stage), maps, row, j * (TILE / 16), full);
                if (pass == PASSES) copy_values(shared.v_tile(at.stage), maps, matrix, j * TILE, full);
            }
        }
    }
    DEVICE void help(const Params&, const Shared&) const {}
};
