// A head's codes by the copy engine, begun by one thread: where strides are regular (tensor_maps.py) and V has contiguous
// keys. The last keys are copied by threads, as those that are absent are copies of the last one.
#pragma once
#include "copies.cuh"
#include "rows_loads.cuh"

template <int THREADS> struct EngineLoader {
    static constexpr i32 LAST = KEYS - 16;
    static_assert(K_WIDTH == HEAD_DIM);
    const TensorMaps& maps;
    const u32 k_tile, v_tile, barrier;
    const i32 row, matrix, last;
    const Tokens tokens;

    DEVICE EngineLoader(const Params& p, const TensorMaps& maps, u32 k_tile, u32 v_tile, u32 barrier, u32 batch, u32 head)
        : maps(maps), k_tile(k_tile), v_tile(v_tile), barrier(barrier), row(maps.row(batch, head)),
          matrix(maps.matrix(batch, head)), last(p.nk - 1), tokens(p.k, batch, head) {}

    DEVICE u64 known() const { return (u64)tokens.base; }
    DEVICE void begin_keys() const {
        if (threadIdx.x == 0) {
            barrier_init(barrier, 1);
            publish_shared();
            barrier_expect(barrier, LAST * K_WIDTH + V_BYTES);
            copy_keys(k_tile, maps, row, 0, barrier);
#pragma unroll
            for (int key = 0; key < KEYS; key += 128) copy_values(v_tile + key / 128 * V_BLOCK, maps, matrix, key, barrier);
        }
        const i32 key = threadIdx.x / D_CHUNKS, chunk = threadIdx.x % D_CHUNKS;
        if (key < 16)
            copy_16(k_tile + LAST * K_WIDTH + swizzled<K_WIDTH>(score_row(key), chunk), tokens.at(min(LAST + key, last), chunk * 16));
    }
    DEVICE void begin_values(const Params&, u32, u32) const {}
    DEVICE void finish_keys(float) const {}
    DEVICE void finish_values(float) const {}
    DEVICE void publish() const {
        if (threadIdx.x / D_CHUNKS >= 16) return;
        copies_done();
        publish_shared();
    }
    DEVICE void wait() const { barrier_wait(barrier, 0); }
};
