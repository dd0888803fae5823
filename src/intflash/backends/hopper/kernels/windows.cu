// Few queries and keys (Swin's windows): one warp takes a head of a window, or while there are few of them a tile of
// its rows. Q, K, V, P and the output stay in registers; only warps that share a window's floats exchange their codes.
//
// Defined when this is compiled: NQ and NK (1..64), HEAD_DIM (16, 32, 48, 64), BITS of p, IN and OUT types, KEY_MAJOR
// (V has contiguous keys), PACKED (Q, K, V and the output have rows of HEAD_DIM elements), ROW_SCALES (Q has a scale
// per token), BIAS and KEEP (0: none, 1: contiguous keys, 2: one for all keys), PARTS of a window, each a warp, ROWS
// of a tile (16, or 8: less to do for each of many parts), WINDOWS of a program (1 with PARTS > 1), RESIDENT programs
// of a multiprocessor, which bound the registers.
#include "base.cuh"
#include "exponent.cuh"
#include "mma.cuh"
#include "output.cuh"
#include "quantize.cuh"
#include "window_output.cuh"

typedef Codes<IN> In;

// Keys in groups of 16, a word of four p for each lane of a quad: half a step of P V. The last group may hold 8.
constexpr int GROUPS = (NK + 15) / 16, STEPS = (GROUPS + 1) / 2, LAST = NK - 16 * (GROUPS - 1);
constexpr bool HALF = LAST <= 8;
constexpr int KEY_TILES = 2 * GROUPS - HALF;  // of Q K^T: 8 keys
constexpr int WORDS = HEAD_DIM / 16;          // of four codes: channels of a row of Q or K in one lane of a quad
constexpr int BLOCKS = (HEAD_DIM + 31) / 32;  // of 32 channels of V: four for each lane's g
constexpr int DIGITS = BITS / 8;
// The one row of a last tile, as 49 = 3 * 16 + 1 has it, is computed by other products (`tail`).
constexpr bool TAIL = NQ % 16 == 1;
constexpr int HALVES = ROWS / 8;
constexpr int ROW_TILES = (NQ - TAIL + ROWS - 1) / ROWS, ROW_PARTS = PARTS > 1 ? PARTS - TAIL : 1;
constexpr bool SHARED = PARTS > 1 && SIZE<IN> > 1;  // floats: each warp makes the codes of some keys for all
constexpr int TILES = ROW_PARTS ? (ROW_TILES + ROW_PARTS - 1) / ROW_PARTS : 0;  // of a part

DEVICE constexpr bool half_group(int group) { return HALF && group == GROUPS - 1; }
// Slots (bytes of a word) of a group in which some lane has a key.
DEVICE constexpr int live(int group) {
    return group < GROUPS - 1 ? 4 : HALF ? (LAST < 2 ? LAST : 2) : (LAST < 4 ? LAST : 4);
}
DEVICE u32 slot_key(int group, u32 quarter, int slot) { return 16 * group + (half_group(group) ? 2 : 4) * quarter + slot; }
// The key that column `column` of score tile 2 * group + odd stands for: accumulators become P's words in place.
DEVICE u32 score_key(int group, int odd, u32 column) {
    return 16 * group + (half_group(group) ? column : 4 * (column / 2) + 2 * odd + column % 2);
}
DEVICE u32 existing(u32 key, bool always) { return always ? key : min(key, NK - 1); }
// Bytes of the last group's word whose keys exist.
DEVICE u32 present_bytes(u32 quarter) {
    u32 bytes = 0;
#pragma unroll
    for (int i = 0; i < live(GROUPS - 1); ++i)
        if (slot_key(GROUPS - 1, quarter, i) < NK) bytes |= 0xFFu << (8 * i);
    return bytes;
}

DEVICE u32 row_stride(const View& x) { return PACKED ? HEAD_DIM : (u32)x.n; }
DEVICE const u8* head_base(const View& x, u32 batch, u32 head) {
    return (const u8*)element<IN>(x.ptr, (u64)batch * (u32)x.b + (u64)head * (u32)x.h);
}

// A row of Q or K: this lane's quarter of its channels, in any order as long as Q and K have the same.
struct Row {
    In::Raw<WORDS> raw;

    DEVICE void load(const u8* base, u32 stride, u32 row) {
        load_words(element<IN>(base, row * stride + threadIdx.x % 4 * (HEAD_DIM / 4)), raw.word);
    }
};

template <int COUNT> struct alignas(COUNT % 4 == 0 ? 16 : COUNT % 2 == 0 ? 8 : 4) Words { u32 word[COUNT]; };

// Four keys of a group's quarter by the four channels from 4 g of a block of V.
struct Square {
    In::Raw<1> raw[4];

    static DEVICE constexpr int slots(int group) { return SHARED ? 4 : live(group); }

    DEVICE void load(const u8* base, u32 stride, int group, int block, u32 g, u32 quarter) {
        const u32 channel = HEAD_DIM % 32 ? min(32 * block + 4 * g, HEAD_DIM - 4) : 32 * block + 4 * g;
#pragma unroll
        for (int i = 0; i < slots(group); ++i)
            load_words(element<IN>(base, existing(slot_key(group, quarter, i), group < GROUPS - 1) * stride + channel), raw[i].word);
    }
    // Word j: the keys of channel j. What the bytes of missing slots hold is multiplied by 0.
    DEVICE void turn(int group, float inv, u32 (&w)[4]) const {
        u32 x[4][1];
#pragma unroll
        for (int i = 0; i < 4; ++i) In::codes(raw[i < slots(group) ? i : 0], inv, x[i]);
        if (slots(group) == 1) {
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = x[0][0] >> (8 * j);
        } else {
            transpose_bytes(x[0][0], x[1][0], x[2][0], x[3][0], w);
        }
    }
};

// K and V as operands: a tile of 8 keys, and a group's and block's square of V, have one set of words each.
struct KeysValues {
    u32 k[KEY_TILES][WORDS], v[GROUPS * BLOCKS][4];

    // Words 2i and 2i + 1 of a tile; channels that do not exist are 0.
    DEVICE Right keys(int tile, int i) const { return {k[tile][2 * i], 2 * i + 1 < WORDS ? k[tile][2 * i + 1] : 0}; }
    DEVICE u32 at(int group, int block, int j) const { return group < GROUPS ? v[group * BLOCKS + block][j] : 0; }
    DEVICE Right values(int step, int b, int j) const { return {at(2 * step, b, j), at(2 * step + 1, b, j)}; }
    DEVICE Left channels(int step, int b, int j) const {  // channels of j and j + 1 as rows
        return {at(2 * step, b, j), at(2 * step, b, j + 1), at(2 * step + 1, b, j), at(2 * step + 1, b, j + 1)};
    }
};

// What one of SHARES warps loads and makes codes of: every SHARES-th tile of K and square of V.
template <int SHARES> struct Loader {
    static constexpr int K_MOST = (KEY_TILES + SHARES - 1) / SHARES, V_MOST = (GROUPS * BLOCKS + SHARES - 1) / SHARES;
    Row row[K_MOST];
    Square square[V_MOST];

    static DEVICE int tile(u32 share, int i) { return i * SHARES + (SHARES - 1 - share); }  // V's first come first
    static DEVICE int block(u32 share, int i) { return i * SHARES + share; }
    static DEVICE bool has_tile(u32 share, int i) { return SHARES == 1 || tile(share, i) < KEY_TILES; }
    static DEVICE bool has_block(u32 share, int i) { return SHARES == 1 || block(share, i) < GROUPS * BLOCKS; }

    DEVICE void load_keys(const u8* base, u32 stride, u32 g, u32 share) {
#pragma unroll
        for (int i = 0; i < K_MOST; ++i) {
            const int t = tile(share, i);
            if (has_tile(share, i)) row[i].load(base, stride, existing(score_key(t / 2, t % 2, g), t / 2 < GROUPS - 1));
        }
    }
    DEVICE void load_values(const u8* base, u32 stride, u32 g, u32 quarter, u32 share) {
#pragma unroll
        for (int i = 0; i < V_MOST; ++i) {
            const int b = block(share, i);
            if (has_block(share, i)) square[i].load(base, stride, b / BLOCKS, b % BLOCKS, g, quarter);
        }
    }
    DEVICE void codes(float k_inverse, float v_inverse, KeysValues& to) const {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) In::codes(row[i].raw, k_inverse, to.k[i]);
#pragma unroll
        for (int i = 0; i < GROUPS * BLOCKS; ++i)
            if (!KEY_MAJOR) square[i].turn(i / BLOCKS, v_inverse, to.v[i]);
    }
    DEVICE void exchange(float k_inverse, float v_inverse, u32 share, KeysValues& to) const {
        __shared__ Words<WORDS> k[KEY_TILES][32];
        __shared__ Words<4> v[GROUPS * BLOCKS][32];
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < K_MOST; ++i) {
            Words<WORDS> w;
            In::codes(row[i].raw, k_inverse, w.word);
            if (has_tile(share, i)) k[tile(share, i)][lane] = w;
        }
#pragma unroll
        for (int i = 0; i < V_MOST; ++i) {
            Words<4> w;
            square[i].turn(block(share, i) / BLOCKS, v_inverse, w.word);
            if (has_block(share, i)) v[block(share, i)][lane] = w;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) {
            const Words<WORDS> w = k[i][lane];
#pragma unroll
            for (int j = 0; j < WORDS; ++j) to.k[i][j] = w.word[j];
        }
#pragma unroll
        for (int i = 0; i < GROUPS * BLOCKS; ++i) {
            const Words<4> w = v[i][lane];
#pragma unroll
            for (int j = 0; j < 4; ++j) to.v[i][j] = w.word[j];
        }
    }
};

#if KEY_MAJOR
DEVICE void load_key_major(const View& x, const u8* base, u32 g, u32 quarter, KeysValues& to) {
#pragma unroll
    for (int i = 0; i < GROUPS * BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 channel = min(i % BLOCKS * 32 + 4 * g, HEAD_DIM - 4) + j;
            const u8* from = base + channel * (u32)x.d + slot_key(i / BLOCKS, quarter, 0);
            to.v[i][j] = half_group(i / BLOCKS) ? __ldg((const u16*)from) : __ldg((const u32*)from);
        }
}
#endif

// A row's bias and mask; T, the weight of a key in 2^-32 octave, is its score times C without them.
#if BIAS || KEEP
constexpr i64 ABSENT_T = -(1ll << 62);  // below any T, and its p is 0
typedef i64 Weight;

template <typename T, int KIND> struct MaskRow {
    const T* row;

    DEVICE MaskRow(const View& x, u32 batch, u32 batches, u32 reciprocal, u32 head, u32 at) {
        const u32 b = reciprocal ? batch - __umulhi(batch, reciprocal) * batches : 0;
        row = (const T*)x.ptr + head_offset(x, b, head) + at * x.n;
    }
    DEVICE T operator[](u32 key) const { return __ldg(row + (KIND == 1 ? key : 0)); }
};

struct Masks {
#if BIAS
    MaskRow<i32, BIAS> bias;
#endif
#if KEEP
    MaskRow<u8, KEEP> keep;
#endif
    DEVICE Masks(const Params& p, u32 batch, u32 head, u32 row)
#if BIAS && KEEP
        : bias(p.bias, batch, p.bias_batches, p.bias_reciprocal, head, row),
          keep(p.keep, batch, p.keep_batches, p.keep_reciprocal, head, row)
#elif BIAS
        : bias(p.bias, batch, p.bias_batches, p.bias_reciprocal, head, row)
#else
        : keep(p.keep, batch, p.keep_batches, p.keep_reciprocal, head, row)
#endif
    {}
    DEVICE Weight weigh(i32 s, i32 C, u32 key) const {
        Weight t = multiply_add(s, C, 0);
#if BIAS
        const i32 b = bias[key];
        t = b == NO_SCORE ? ABSENT_T : multiply_add(b, 1 << 12, t);
#endif
#if KEEP
        t = keep[key] ? t : ABSENT_T;
#endif
        return t;
    }
};
DEVICE i64 row_top(Weight peak, i32) { return peak; }
DEVICE i64 offset(i64 top) { return top == ABSENT_T ? ABSENT_T : K0 - top; }
DEVICE Power depth(Weight t, i32, i64 B) { return power(t + B); }
DEVICE Weight warp_max(Weight x) {
    const i32 high = __reduce_max_sync(~0u, (i32)(x >> 32));
    const u32 low = __reduce_max_sync(~0u, (i32)(x >> 32) == high ? (u32)x : 0);
    return (i64)((u64)(u32)high << 32 | low);
}
#else
typedef i32 Weight;

struct Masks {
    DEVICE Masks(const Params&, u32, u32, u32) {}
    DEVICE Weight weigh(i32 s, i32, u32) const { return s; }
};
DEVICE i64 row_top(Weight peak, i32 C) { return multiply_add(peak, C, 0); }
DEVICE i64 offset(i64 top) { return K0 - top; }
DEVICE Power depth(Weight s, i32 C, i64 B) { return exponential(s, C, B); }
DEVICE Weight warp_max(Weight x) { return __reduce_max_sync(~0u, x); }
#endif

// p of up to four slots, one word for each digit; slots past `LIVE` hold anything.
template <int LIVE> DEVICE void p_words(const Weight (&x)[4], i32 C, i64 B, u32 (&w)[DIGITS]) {
    const Power powers[4] = {depth(x[0], C, B), depth(x[LIVE > 1], C, B), depth(x[LIVE > 2 ? 2 : 0], C, B),
                             depth(x[LIVE > 3 ? 3 : 0], C, B)};
#if BITS == 8
    w[0] = four_p8(powers);
#else
    four_p16(powers, w[0], w[1]);
#endif
}

// Scales of float inputs and their reciprocals.
struct Scales {
    float q, k, v, q_inverse, k_inverse, v_inverse;

    DEVICE void load(const Params& p, u32 batch, u32 head, u32 kv_head) {
        if constexpr (SIZE<IN> == 1) return;
        const u32 which = threadIdx.x % 4;  // one division for all three
        const View& x = which == 0 ? p.q_scale : which == 1 ? p.k_scale : p.v_scale;
        const float s = __ldg((const float*)x.ptr + head_offset(x, batch, which == 0 ? head : kv_head));
        const float inverse = __frcp_rn(s);
        q = __shfl_sync(~0u, s, 0), k = __shfl_sync(~0u, s, 1), v = __shfl_sync(~0u, s, 2);
        q_inverse = __shfl_sync(~0u, inverse, 0), k_inverse = __shfl_sync(~0u, inverse, 1);
        v_inverse = __shfl_sync(~0u, inverse, 2);
    }
};

struct Window {
    const Params& p;
    u32 batch, head, kv_head, g, quarter;
    KeysValues kv;
    Scaling scaling;
    Score score;
    Scales scales;

    DEVICE Score row_score(u32 row) const { return ROW_SCALES ? head_score(row) : score; }
    DEVICE Score head_score(u32 row) const {
        if constexpr (SIZE<IN> == 1)
            return unpack_score(__ldg((const i64*)p.score.ptr + head_offset(p.score, batch, head) + row * p.score.n));
        else
            return score_constants(scales.q, scales.k, p.sm_scale);
    }

    // Row `row` of this lane, and row + 8 where a tile has 16.
    DEVICE void tile(const Row (&q)[HALVES], u32 row) const {
        u32 codes[2][WORDS] = {};
#pragma unroll
        for (int h = 0; h < HALVES; ++h) In::codes(q[h].raw, scales.q_inverse, codes[h]);
        i32 s[KEY_TILES][4] = {};
#pragma unroll
        for (int i = 0; i < (WORDS + 1) / 2; ++i) {
            const bool both = 2 * i + 1 < WORDS;
            const Left a = {codes[0][2 * i], codes[1][2 * i], both ? codes[0][2 * i + 1] : 0, both ? codes[1][2 * i + 1] : 0};
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t) mma_s8_s8(s[t], a, kv.keys(t, i));
        }
        Left steps[DIGITS][STEPS] = {};
        i64 top[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const u32 r = min(row + 8 * h, NQ - 1);
            const Score unit = row_score(r);
            if (unit.k) {
#pragma unroll
                for (int i = 0; i < KEY_TILES; ++i) s[i][2 * h] <<= unit.k, s[i][2 * h + 1] <<= unit.k;
            }
            const Masks masks(p, batch, head, r);
            Weight x[GROUPS][4], peak;  // keys that do not exist repeat the last one
#pragma unroll
            for (int t = 0; t < GROUPS; ++t)
#pragma unroll
                for (int i = 0; i < live(t); ++i) {
                    const u32 key = existing(slot_key(t, quarter, i), t < GROUPS - 1);
                    x[t][i] = masks.weigh(s[2 * t + i / 2][2 * h + i % 2], unit.C, key);
                    peak = t + i && peak > x[t][i] ? peak : x[t][i];
                }
            top[h] = row_top(quad_max(peak), unit.C);
            const i64 B = offset(top[h]);
#pragma unroll
            for (int t = 0; t < GROUPS; ++t) {
                u32 w[DIGITS];
                if (t < GROUPS - 1) p_words<4>(x[t], unit.C, B, w);
                else p_words<live(GROUPS - 1)>(x[t], unit.C, B, w);
#pragma unroll
                for (int digit = 0; digit < DIGITS; ++digit)
                    steps[digit][t / 2].word[t % 2 * 2 + h] = t < GROUPS - 1 || LAST == 16 ? w[digit] : w[digit] & present_bytes(quarter);
            }
        }
        i32 sums[DIGITS][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit)
                mma_u8_s8(sums[digit], steps[digit][i], {0x01010101, 0x01010101});
        i32 out[2][BLOCKS][8];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                i32 acc[DIGITS][4] = {};
#pragma unroll
                for (int i = 0; i < STEPS; ++i)
#pragma unroll
                    for (int digit = 0; digit < DIGITS; ++digit) mma_u8_s8(acc[digit], steps[digit][i], kv.values(i, b, j));
#pragma unroll
                for (int i = 0; i < 4; ++i) out[i / 2][b][i % 2 * 4 + j] = joined(acc, i);
            }
        u32 l[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) l[h] = joined(sums, 2 * h);
        const u32 lane = threadIdx.x % 32;
        const Finish<OUT> mine(l[HALVES > 1 && lane % 2], scaling);  // half of the quad divides for either row
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const Finish<OUT> finish = HALVES > 1 ? Finish<OUT>(mine, (lane & ~1u) + h) : mine;
            if (row + 8 * h >= NQ - TAIL) continue;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
                if (HEAD_DIM % 32 == 0 || 32 * b + 8 * quarter < HEAD_DIM)
                    finish.store(output(row + 8 * h, 32 * b + 8 * quarter), out[h][b]);
            if (p.l && quarter == 0) keep_statistics(row + 8 * h, top[h], l[h]);
        }
    }

    // 256 high + low: below 2^31 for at most 64 keys.
    static DEVICE i32 joined(const i32 (&x)[DIGITS][4], int i) { return DIGITS == 1 ? x[0][i] : (x[0][i] << 8) + x[DIGITS - 1][i]; }

    DEVICE u8* output(u32 row, u32 channel) const {
        return (u8*)element<OUT>(p.out.ptr, (u64)batch * (u32)p.out.b + (u64)head * (u32)p.out.h + row * row_stride(p.out) + channel);
    }

    DEVICE void keep_statistics(u32 row, i64 top, u32 l) const {
        i64 at = (i64)(batch * p.heads + head) * NQ + row;
        p.t_max[at] = top;
        p.l[at] = l;
    }

    // The last row alone. K and V are left operands here, so that the row's keys are spread over all lanes: lane
    // (g, q) has the keys of column g in both tiles of group q; then channels 4 g + 0..3 of each block.
    DEVICE void tail(const Row& q) const {
        constexpr u32 row = NQ - 1;
        u32 codes[WORDS];
        In::codes(q.raw, scales.q_inverse, codes);
        i32 x[2];
#pragma unroll
        for (int t = 0; t < GROUPS; ++t) {
            i32 s[4] = {};
#pragma unroll
            for (int i = 0; i < (WORDS + 1) / 2; ++i) {
                const Right even = kv.keys(2 * t, i), odd = kv.keys(2 * t + !half_group(t), i);
                mma_s8_s8(s, {even.word[0], odd.word[0], even.word[1], odd.word[1]}, {codes[2 * i], 2 * i + 1 < WORDS ? codes[2 * i + 1] : 0});
            }
            if (t == 0 || quarter >= t) x[0] = s[0], x[1] = s[2];
        }
        const Score unit = row_score(row);
        if (unit.k) x[0] <<= unit.k, x[1] <<= unit.k;
        const Masks masks(p, batch, head, row);
        Weight weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 key = quarter < GROUPS - 1 ? score_key(0, i, g) + 16 * quarter
                                                   : score_key(GROUPS - 1, HALF ? 0 : i, g);
            weight[i] = masks.weigh(x[i], unit.C, min(key, NK - 1));
        }
        const i64 top = row_top(warp_max(weight[0] > weight[1] ? weight[0] : weight[1]), unit.C);
        const i64 B = offset(top);
        // p of slots 0 and 2, or 1 and 3, of the word that lanes 2j and 2j + 1 of g share
        u32 mask = g % 2 ? 0xFF00FF00 : 0x00FF00FF;
        if (quarter >= GROUPS - 1) mask &= quarter == GROUPS - 1 ? present_bytes(g / 2) : 0;
        u32 w[DIGITS], l = 0;
        const Weight four[4] = {weight[0], weight[0], weight[1], weight[1]};
        p_words<4>(four, unit.C, B, w);
        u32 groups[DIGITS][2 * STEPS] = {};
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) {
            w[digit] &= mask;
            l = add_bytes(w[digit], l << 8);
            w[digit] |= __shfl_xor_sync(~0u, w[digit], 4);
#pragma unroll
            for (int t = 0; t < GROUPS; ++t) groups[digit][t] = __shfl_sync(~0u, w[digit], 8 * quarter + t);
        }
        l = __reduce_add_sync(~0u, l);
        const Finish<OUT> finish(l, scaling);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            i32 out[4];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                i32 acc[DIGITS][4] = {};
#pragma unroll
                for (int i = 0; i < STEPS; ++i)
#pragma unroll
                    for (int digit = 0; digit < DIGITS; ++digit)
                        mma_s8_u8(acc[digit], kv.channels(i, b, j), {groups[digit][2 * i], groups[digit][2 * i + 1]});
                out[j] = joined(acc, 0), out[j + 1] = joined(acc, 2);
            }
            if (quarter == 0 && (HEAD_DIM % 32 == 0 || 32 * b + 4 * g < HEAD_DIM)) finish.store(output(row, 32 * b + 4 * g), out);
        }
        if (p.l && threadIdx.x % 32 == 0) keep_statistics(row, top, l);
    }
};

extern "C" __global__ void __launch_bounds__(32 * PARTS * WINDOWS, RESIDENT) attention(const __grid_constant__ Params p) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 part = PARTS > 1 ? warp : 0, place = PARTS > 1 ? blockIdx.x : blockIdx.x * WINDOWS + warp;
    if (WINDOWS > 1 && place >= p.count) return;
    const u32 batch = p.head_reciprocal ? __umulhi(place, p.head_reciprocal) : place, head = place - batch * p.heads;
    const u32 kv_head = key_head(p, head), g = lane / 4, quarter = lane % 4;
    Window w = {p, batch, head, kv_head, g, quarter};

    const u32 share = SHARED ? part : 0;
    Loader<SHARED ? PARTS : 1> loader;
    loader.load_keys(head_base(p.k, batch, kv_head), row_stride(p.k), g, share);
    const u8 *q_base = head_base(p.q, batch, head), *v_base = head_base(p.v, batch, kv_head);
    const u32 q_stride = row_stride(p.q);
    const bool has_tail = TAIL && (PARTS == 1 || part == PARTS - 1);
    u32 row = part * TILES * ROWS + g;
    Row q[HALVES];
    const auto load_queries = [&] {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) q[h].load(q_base, q_stride, min(row + 8 * h, NQ - 1));  // a tail's part: the last row
    };
    load_queries();
#if KEY_MAJOR
    load_key_major(p.v, v_base, g, quarter, w.kv);
#else
    loader.load_values(v_base, row_stride(p.v), g, quarter, share);
#endif
    w.scales.load(p, batch, head, kv_head);
    if constexpr (!ROW_SCALES) w.score = w.head_score(0);
    if constexpr (SIZE<IN> == 1 || IsInteger<OUT>::value) w.scaling = output_scaling<OUT>(p, batch, head, kv_head);
    else w.scaling.v_scale = w.scales.v;
    if constexpr (SHARED) loader.exchange(w.scales.k_inverse, w.scales.v_inverse, share, w.kv);
    else loader.codes(w.scales.k_inverse, w.scales.v_inverse, w.kv);

    if (PARTS == 1 || !has_tail) {
#pragma unroll 1
        for (int i = 0; i < TILES; ++i) {
            Row now[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; ++h) now[h] = q[h];
            const u32 first = row;
            row += ROWS;
            if (i + 1 < TILES + (TAIL && PARTS == 1)) load_queries();
            w.tile(now, first);
        }
    }
    if (has_tail) w.tail(q[0]);
}
