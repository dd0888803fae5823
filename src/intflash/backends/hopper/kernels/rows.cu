// Whole rows on chip: at most 256 keys of one head stay in shared memory, a warpgroup walks over tiles of 64 rows.
// Scores of a row stay in registers: one pass over K, the exact maximum, no rescale.
//
// Defined when this is compiled: KEYS (padded to 16), HEAD_DIM (a multiple of 16), BITS of p, IN and OUT types,
// KEY_MAJOR (V has contiguous keys), RESIDENT (programs of a multiprocessor, which bounds the registers).
#include "base.cuh"
#include "exponent.cuh"
#include "output.cuh"
#include "quantize.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 128;
constexpr int K_WIDTH = HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : 128;  // bytes of a row of K in shared memory
constexpr int D_CHUNKS = HEAD_DIM / 16, D_STEPS = (HEAD_DIM + 31) / 32;
constexpr int KEY_CHUNKS = KEYS / 16, KEY_STEPS = (KEYS + 31) / 32;
constexpr int V_BLOCK = HEAD_DIM * 128;  // bytes of 128 keys of V^T
constexpr int K_BYTES = (KEYS * K_WIDTH + 1023) / 1024 * 1024;
constexpr int CHANNELS = HEAD_DIM / 4;  // of a thread

typedef Codes<IN> In;

DEVICE void load_keys(const Params& p, u32 k_tile, u32 batch, u32 head) {
    const u8* base = (const u8*)element<IN>(p.k.ptr, head_offset(p.k, batch, head));
    float inv = head_inverse<IN>(p.k_scale, batch, head);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < KEYS * D_CHUNKS; i += THREADS) {
        u32 key = i / D_CHUNKS, chunk = i % D_CHUNKS;
        const void* from = element<IN>(base, min(key, p.nk - 1) * p.k.n + chunk * 16);
        u32 to = k_tile + swizzled<K_WIDTH>(score_row(key), chunk);
        if constexpr (SIZE<IN> == 1) {
            copy_16(to, from);
        } else {
            In::Raw<4> raw;
            load_words(from, raw.word);
            u32 w[4];
            In::codes(raw, inv, w);
            store_shared(to, w);
        }
    }
    if constexpr (HEAD_DIM % 32) {  // the last step of 32 channels has 16 that do not exist
        u32 zeros[4] = {0, 0, 0, 0};
        for (u32 key = threadIdx.x; key < KEYS; key += THREADS)
            store_shared(k_tile + swizzled<K_WIDTH>(score_row(key), D_CHUNKS), zeros);
    }
}

DEVICE u32 value_address(u32 v_tile, u32 row, u32 key) {
    return v_tile + key / 128 * V_BLOCK + swizzled<128>(row, key % 128 / 16) + key % 16;
}

// V^T with its keys contiguous: copied where it lies so, else turned in blocks of 4 keys by 16 channels.
DEVICE void load_values(const Params& p, u32 v_tile, u32 batch, u32 head) {
    const u8* base = (const u8*)element<IN>(p.v.ptr, head_offset(p.v, batch, head));
    if constexpr (KEY_MAJOR) {
        for (u32 i = threadIdx.x; i < HEAD_DIM * KEY_CHUNKS; i += THREADS) {
            u32 d = i / KEY_CHUNKS, chunk = i % KEY_CHUNKS;
            copy_16(value_address(v_tile, value_row<HEAD_DIM>(d), chunk * 16), base + d * p.v.d + chunk * 16);
        }
    } else {
        float inv = head_inverse<IN>(p.v_scale, batch, head);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < (KEYS / 4 + 31) / 32 * 32 * D_CHUNKS; i += THREADS) {
            u32 key = i % 32 * 4 + i / (32 * D_CHUNKS) * 128, chunk = i / 32 % D_CHUNKS;
            if (key >= KEYS) continue;
            In::Raw<4> raw[4];
            u32 w[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                load_words(element<IN>(base, min(key + j, p.nk - 1) * p.v.n + chunk * 16), raw[j].word);
#pragma unroll
            for (int j = 0; j < 4; ++j) In::codes(raw[j], inv, w[j]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 turned[4];
                transpose_bytes(w[0][j], w[1][j], w[2][j], w[3][j], turned);
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    store_shared(value_address(v_tile, value_row<HEAD_DIM>(chunk * 16 + 4 * j + c), key), turned[c]);
            }
        }
    }
}

// Rows of a thread: `row` and row + 8; their codes as the left operand of Q K^T.
struct Query {
    In::Raw<1> raw[D_STEPS][4];

    DEVICE void load(const Params& p, const u8* base, i32 row) {
        u32 quarter = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u8* from = (const u8*)element<IN>(base, min(row + 8 * h, p.nq - 1) * p.q.n + quarter * 4);
#pragma unroll
            for (int i = 0; i < 2 * D_STEPS; ++i)
                if (i < D_CHUNKS) load_words(element<IN>(from, i * 16), raw[i / 2][i % 2 * 2 + h].word);
        }
    }
    DEVICE void codes(float inv, u32 (&w)[D_STEPS][4]) const {
#pragma unroll
        for (int i = 0; i < D_STEPS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 word[1] = {0};
                if (2 * i + j / 2 < D_CHUNKS) In::codes(raw[i][j], inv, word);
                w[i][j] = word[0];
            }
    }
};

#if BITS == 8
typedef i32 Accumulator;
constexpr int DIGITS = 1;
#else
typedef Wide Accumulator;
constexpr int DIGITS = 2;
#endif

// P of a step of 32 keys as left operands of P V, one for each digit.
struct Step {
    u32 p[DIGITS][4];
};

DEVICE void exponentials(const i32 (&s)[KEYS / 2], const i32 (&C)[2], const i64 (&B)[2], Step (&steps)[KEY_STEPS]) {
#pragma unroll
    for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int group = 2 * i + j / 2, h = j % 2;  // of 16 keys; row or row + 8
            if (group >= KEY_CHUNKS) {
#pragma unroll
                for (int digit = 0; digit < DIGITS; ++digit) steps[i].p[digit][j] = 0;
                continue;
            }
            const i32* x = &s[8 * group + 2 * h];
#if BITS == 8
            steps[i].p[0][j] = four_p8(x[0], x[1], x[4], x[5], C[h], B[h]);
#else
            four_p16(x[0], x[1], x[4], x[5], C[h], B[h], steps[i].p[0][j], steps[i].p[1][j]);
#endif
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 k_tile = shared_address(shared), v_tile = k_tile + K_BYTES;
    const u32 batch = blockIdx.x, head = blockIdx.y, kv_head = key_head(p, head);
    const u32 warp = threadIdx.x / 32, quarter = threadIdx.x % 4;
    const i32 row_of_warp = warp * 16, row_of_thread = row_of_warp + threadIdx.x % 32 / 4;
    i32 row = blockIdx.z * p.tiles * 64;
    const i32 stop = min(row + p.tiles * 64, p.nq);

    const u8* q_base = (const u8*)element<IN>(p.q.ptr, head_offset(p.q, batch, head));
    Query query;
    query.load(p, q_base, row + row_of_thread);
    load_keys(p, k_tile, batch, kv_head);
    load_values(p, v_tile, batch, kv_head);
    const float q_inverse = head_inverse<IN>(p.q_scale, batch, head);
    const Scaling scaling = output_scaling<OUT>(p, batch, head, kv_head);
    copies_done();
    publish_shared();
    __syncthreads();
    const u64 k_operand = descriptor<K_WIDTH>(k_tile), v_operand = descriptor<128>(v_tile);

    for (; row < stop; row += 64) {
        u32 q[D_STEPS][4];
        query.codes(q_inverse, q);
        i32 s[KEYS / 2];
        wgmma_fence(s);
#pragma unroll
        for (int i = 0; i < D_STEPS; ++i) wgmma_s8(s, q[i], k_operand + 2 * i, i > 0);
        wgmma_commit();
        const i32 r = row + row_of_thread;
        if (row + 64 < stop) query.load(p, q_base, r + 64);
        i32 C[2];
        i64 B[2];
        bool shifted = false;
        i32 k[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Score score;
            if constexpr (SIZE<IN> == 1) {
                i64 at = head_offset(p.score, batch, head) + min(r + 8 * h, p.nq - 1) * p.score.n;
                score = unpack_score(__ldg((const i64*)p.score.ptr + at));
            } else {
                score = score_constants(__ldg((const float*)p.q_scale.ptr + head_offset(p.q_scale, batch, head)),
                                        __ldg((const float*)p.k_scale.ptr + head_offset(p.k_scale, batch, kv_head)),
                                        p.sm_scale);
            }
            C[h] = score.C, k[h] = score.k, shifted |= score.k > 0;
        }
        wgmma_wait(s);

        Step steps[KEY_STEPS] = {};
        u32 l[2] = {0, 0};
        i64 top[2];
        if (row + row_of_warp < p.nq) {  // the last tile of 197 rows has one warp with rows
            if (shifted) {
#pragma unroll
                for (int i = 0; i < KEYS / 2; ++i) s[i] <<= k[i / 2 % 2];
            }
            constexpr int LAST = KEYS - 16;  // only the last 16 keys may not exist
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                i32 key = LAST + 4 * quarter + i / 4 * 2 + i % 2;
                i32& x = s[LAST / 2 + i];
                x = key < p.nk ? x : NO_SCORE;
            }
            i32 peak[2] = {s[0], s[2]};
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], s[i]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                top[h] = (i64)quad_max(peak[h]) * C[h];
                B[h] = K0 - top[h];
            }
            exponentials(s, C, B, steps);
            u32 present = 0;  // bytes of the last step's keys that exist
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (LAST + 4 * (i32)quarter + i < p.nk) present |= 0xFFu << (8 * i);
            Step& last = steps[KEY_STEPS - 1];
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit)
#pragma unroll
                for (int h = 0; h < 2; ++h) last.p[digit][(LAST % 32 ? 2 : 0) + h] &= present;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 sums[2] = {0, 0};
#pragma unroll
                for (int digit = 0; digit < DIGITS; ++digit)
#pragma unroll
                    for (int i = 0; i < KEY_STEPS; ++i)
                        sums[digit] = add_bytes(steps[i].p[digit][2 + h], add_bytes(steps[i].p[digit][h], sums[digit]));
                l[h] = quad_sum(DIGITS == 1 ? sums[0] : (sums[0] << 8) + sums[1]);
            }
        }
        i32 acc[DIGITS][HEAD_DIM / 2];
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) wgmma_fence(acc[digit]);
#pragma unroll
        for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit)
                wgmma_u8(acc[digit], steps[i].p[digit], v_operand + i / 4 * (V_BLOCK >> 4) + i % 4 * 2, i > 0);
        wgmma_commit();
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) wgmma_wait(acc[digit]);

#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (r + 8 * h >= p.nq) continue;
            Accumulator mine[CHANNELS];
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                int at = 4 * (i / 2) + 2 * h + i % 2;
#if BITS == 8
                mine[i] = acc[0][at];
#else
                mine[i] = {acc[0][at], acc[1][at]};
#endif
            }
            i64 to = head_offset(p.out, batch, head) + (r + 8 * h) * p.out.n + quarter * CHANNELS;
            store_outputs<OUT>((u8*)element<OUT>(p.out.ptr, to), mine, l[h], scaling);
            if (p.l && quarter == 0) {
                i64 at = ((i64)batch * gridDim.y + head) * p.nq + r + 8 * h;
                p.t_max[at] = top[h];
                p.l[at] = l[h];
            }
        }
    }
}
