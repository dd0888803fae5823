// A head's codes by the copy engine, begun by one thread: where strides are regular (tensor_maps.py) and V has contiguous
// keys. The last keys are copied by threads, as those that are absent are copies of the last one.
#pragma once
#include "copies.cuh"
#include "rows_loads.cuh"

template <int THREADS> struct EngineLoader {
    static constexpr i32 LAST = KEYS - 16;  // from this key on by threads
    static_assert(K_WIDTH == HEAD_DIM && 16 * D_CHUNKS <= THREADS);
    const TensorMaps& maps;
    const u32 k_tile, v_tile, barrier;
    const i32 row, matrix, last;
    const Tokens tokens;

    DEVICE EngineLoader(const Params& p, const TensorMaps& maps, u32 k_tile, u32 v_tile, u32 barrier, u32 batch,
                        u32 head)
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
            for (int i = 0; i < V_BYTES / V_BLOCK; ++i) copy_values(v_tile + i * V_BLOCK, maps, matrix, 128 * i, barrier);
        }
        const i32 key = threadIdx.x / D_CHUNKS, chunk = threadIdx.x % D_CHUNKS;
        if (copies_last())
            copy_16(k_tile + LAST * K_WIDTH + swizzled<K_WIDTH>(score_row(key), chunk),
                    tokens.at(min(LAST + key, last), chunk * 16));
    }
    DEVICE bool copies_last() const { return threadIdx.x < 16 * D_CHUNKS; }
    DEVICE void begin_values(const Params&, u32, u32) const {}  // they are on their way
    DEVICE void finish(float, float) const {
        if (!copies_last()) return;
        copies_done();
        publish_shared();
    }
    DEVICE void wait() const { barrier_wait(barrier, 0); }  // where another has met those of all threads
};
