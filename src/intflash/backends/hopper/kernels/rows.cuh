// Whole rows on chip, at most 224 keys: loads, products, exponentials, output. K and V^T of a head lie in shared
// memory, a warpgroup computes tiles of 64 rows whose scores stay in registers: one pass over K, the exact maximum,
// no rescale.
//
// Defined when this is compiled: KEYS (padded to 16), HEAD_DIM (a multiple of 16), BITS of p, IN and OUT types,
// SHORT (T + B in 32 bits where it fits), KEY_MAJOR (V has contiguous keys), ROW_SCALES (Q has a scale per token),
// FOUND (floats whose scales are the head's own maxima's), TAIL (rows_tail.cuh).
#pragma once
#include "base.cuh"
#include "exponent.cuh"
#include "output.cuh"
#include "quantize.cuh"
#include "wgmma.cuh"

constexpr int K_WIDTH = HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : 128;  // bytes of a row of K in shared memory
constexpr int D_CHUNKS = HEAD_DIM / 16, D_STEPS = (HEAD_DIM + 31) / 32;
constexpr int KEY_CHUNKS = KEYS / 16;
constexpr int V_BLOCK = HEAD_DIM * 128;  // bytes of 128 keys of V^T
constexpr int K_BYTES = (KEYS * K_WIDTH + 1023) / 1024 * 1024, V_BYTES = (KEYS + 127) / 128 * V_BLOCK;
constexpr int CHANNELS = HEAD_DIM / 4;  // of a thread

typedef Codes<IN> In;
#if BITS == 8
typedef i32 Accumulator;
constexpr int DIGITS = 1;
#else
typedef Wide Accumulator;
constexpr int DIGITS = 2;
#endif

// Where token `i` of a tensor begins, from its first one; strides of 32 bits (rows.py checks).
struct Tokens {
    const u8* base;
    i32 stride;  // bytes

    DEVICE Tokens(const View& x, u32 batch, u32 head)
        : base(x.ptr + head_offset(x, batch, head) * SIZE<IN>), stride((i32)x.n * SIZE<IN>) {}
    DEVICE const u8* at(i32 token, i32 channel) const {
        return (const u8*)multiply_add(token, stride, (i64)(base + channel * SIZE<IN>));
    }
};

template <typename RAW, int COUNT> DEVICE void bring_near(RAW (&raw)[COUNT], float inv) {
    if (!In::far(inv)) return;
#pragma unroll
    for (RAW& x : raw) In::bring_near(x, inv);
}

// Rows of 16-channel chunks in K's place, by THREADS threads in rounds: a thread keeps its chunk and its rows lie
// ROWS apart, so that addresses advance by constants. GROUP rounds are in flight together.
template <int THREADS, bool PERMUTED> struct RowLoader {
    static constexpr int ROWS = THREADS / D_CHUNKS, ROUNDS = (KEYS + ROWS - 1) / ROWS;
    static constexpr int GROUP = SIZE<IN> == 4 ? 2 : ROUNDS < 8 ? ROUNDS : 4;
    const Tokens tokens;
    const i32 row, chunk, last;
    In::Raw<4> raw[GROUP];

    DEVICE RowLoader(const Tokens& x, i32 thread, i32 count)
        : tokens(x), row(thread / D_CHUNKS), chunk(thread % D_CHUNKS), last(count - 1) {}
    DEVICE bool has(int round) const {
        return round < ROUNDS && (THREADS % D_CHUNKS == 0 || row < ROWS) &&
               ((round + 1) * ROWS <= KEYS || row + round * ROWS < KEYS);
    }
    DEVICE const u8* from(int round) const { return tokens.at(min(row + round * ROWS, last), chunk * 16); }
    DEVICE u32 to(u32 tile, int round) const {
        u32 r = row + round * ROWS;
        return tile + swizzled<K_WIDTH>(PERMUTED ? score_row(r) : r, chunk);
    }
    DEVICE void load(int first) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            if (has(first + j)) load_words(from(first + j), raw[j].word);
    }
    DEVICE void store(u32 tile, float inv, int first) {
        bring_near(raw, inv);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            if (!has(first + j)) continue;
            u32 w[4];
            In::codes(raw[j], inv, w);
            store_shared(to(tile, first + j), w);
        }
    }
    DEVICE void copy(u32 tile) const {
#pragma unroll
        for (int j = 0; j < ROUNDS; ++j)
            if (has(j)) copy_16(to(tile, j), from(j));
    }
};

DEVICE u32 value_address(u32 v_tile, u32 row, u32 key) {
    return v_tile + key / 128 * V_BLOCK + swizzled<128>(row, key % 128 / 16) + key % 16;
}

// V^T from rows of V, in blocks of 4 keys by 16 channels: neighbouring threads take neighbouring chunks of a row, and
// the swizzle of value_row's rows puts their stores into different banks.
template <int THREADS> struct ValueLoader {
    static constexpr int BLOCKS = KEYS / 4 * D_CHUNKS, ROUNDS = (BLOCKS + THREADS - 1) / THREADS;
    static constexpr int GROUP = SIZE<IN> == 4 ? 1 : ROUNDS < 2 ? ROUNDS : 2;
    static constexpr int LANE_CHANNELS = CHANNELS % 16 ? 4 : 16;  // of a chunk, which one lane gets: 2 every 8 rows
    const Tokens tokens;
    const i32 thread, last;
    In::Raw<4> raw[GROUP][4];

    DEVICE ValueLoader(const Tokens& x, i32 thread, i32 count) : tokens(x), thread(thread), last(count - 1) {}
    DEVICE i32 key(int round) const { return (thread + round * THREADS) / D_CHUNKS * 4; }
    DEVICE i32 chunk(int round) const { return (thread + round * THREADS) % D_CHUNKS; }
    DEVICE const u8* from(int round, int r) const { return tokens.at(min(key(round) + r, last), chunk(round) * 16); }
    DEVICE bool has(int round) const { return round < ROUNDS && thread + round * THREADS < BLOCKS; }
    DEVICE void load(int first) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            if (!has(first + j)) continue;
#pragma unroll
            for (int r = 0; r < 4; ++r)
                load_words(from(first + j, r), raw[j][r].word);
        }
    }
    DEVICE void store(u32 tile, float inv, int first) {
#pragma unroll
        for (auto& block : raw) bring_near(block, inv);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            if (!has(first + j)) continue;
            u32 w[4][4];
#pragma unroll
            for (int r = 0; r < 4; ++r) In::codes(raw[j][r], inv, w[r]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                u32 turned[4];
                transpose_bytes(w[0][c], w[1][c], w[2][c], w[3][c], turned);
#pragma unroll
                for (int d = 0; d < 4; ++d) {  // addresses differ by constants
                    const int channel = 4 * c + d, same = channel / LANE_CHANNELS * LANE_CHANNELS + d % 2;
                    const u32 row = value_row<HEAD_DIM>(chunk(first + j) * 16 + same);
                    store_shared(value_address(tile, row, key(first + j)) + 512 * (channel - same), turned[d]);
                }
            }
        }
    }
};

// V^T as it lies, keys contiguous: neighbouring threads copy neighbouring chunks of a row.
template <int THREADS> DEVICE void copy_values(u32 tile, const View& v, u32 batch, u32 head, i32 thread) {
    constexpr int LANES = KEY_CHUNKS <= 4 ? 4 : KEY_CHUNKS <= 8 ? 8 : 16, ROWS = THREADS / LANES;
    const u8* base = v.ptr + head_offset(v, batch, head);
    const i32 chunk = thread % LANES, row = thread / LANES;
    if (KEY_CHUNKS < LANES && chunk >= KEY_CHUNKS) return;
#pragma unroll
    for (int i = 0; i < (HEAD_DIM + ROWS - 1) / ROWS; ++i) {
        const i32 d = row + i * ROWS;
        if ((i + 1) * ROWS <= HEAD_DIM || d < HEAD_DIM)
            copy_16(value_address(tile, value_row<HEAD_DIM>(d), chunk * 16),
                    (const u8*)multiply_add(d, (i32)v.d, (i64)(base + chunk * 16)));
    }
}

// The last step of 32 channels may have 16 that do not exist.
template <int THREADS> DEVICE void zero_channels(u32 k_tile, i32 thread) {
    if constexpr (HEAD_DIM % 32) {
        const u32 zeros[4] = {0, 0, 0, 0};
        for (i32 key = thread; key < KEYS; key += THREADS)
            store_shared(k_tile + swizzled<K_WIDTH>(score_row(key), D_CHUNKS), zeros);
    }
}

// What is read of a head besides Q, K and V. What is computed from it would delay loads if it came before them.
struct HeadConstants {
    Scales<IN, FOUND> scales;
    const i64 *score_at, *output_at;
    i64 score;
    Scaling scaling;

    DEVICE HeadConstants(const Params& p, u32 batch, u32 head, u32 kv_head)
        : scales(p, batch, head, kv_head), score_at(head_element<i64>(p.score, batch, head)),
          output_at(head_element<i64>(p.output, batch, head)) {}
    DEVICE u64 known() const { return (u64)(SIZE<IN> == 1 ? score_at : (const i64*)scales.q_at) | (u64)scales.k_at; }
    DEVICE void load() {
        scales.load();
        if constexpr (SIZE<IN> == 1) score = *score_at;
        if constexpr (IsInteger<OUT>::value) scaling.packed = *output_at;
        else scaling.v_scale = SIZE<IN> == 1 ? *scales.v_at : scales.v;
    }
    DEVICE Score of_scores(const Params& p) const {
        if constexpr (SIZE<IN> == 1) return unpack_score(score);
        else return score_constants(scales.q, scales.k, p.sm_scale);
    }
};

// K and V of a head by THREADS threads, as many loads in flight as registers allow.
template <int THREADS> struct HeadLoader {
    typedef RowLoader<THREADS, true> Keys;
    typedef ValueLoader<THREADS> Values;
    Keys keys;
    Values values;
    const u32 k_tile, v_tile;

    static constexpr bool EARLY = Values::GROUP == Values::ROUNDS;  // all of V can be on its way before K is stored

    DEVICE HeadLoader(const Params& p, u32 k_tile, u32 v_tile, u32 batch, u32 head, i32 thread)
        : keys(Tokens(p.k, batch, head), thread, p.nk), values(Tokens(p.v, batch, head), thread, p.nk), k_tile(k_tile),
          v_tile(v_tile) {}

    DEVICE u64 known() const { return (u64)keys.from(0) | (u64)values.tokens.base; }
    DEVICE void begin_keys() {
        zero_channels<THREADS>(k_tile, values.thread);
        if constexpr (SIZE<IN> == 1) keys.copy(k_tile);
        else keys.load(0);
    }
    DEVICE void begin_values(const Params& p, u32 batch, u32 head) {
        if constexpr (KEY_MAJOR) copy_values<THREADS>(v_tile, p.v, batch, head, values.thread);
        else if constexpr (EARLY) values.load(0);
    }
    DEVICE void finish_keys(float inverse) {
        if constexpr (SIZE<IN> > 1) {
#pragma unroll
            for (int first = 0; first < Keys::ROUNDS; first += Keys::GROUP) {
                if (first > 0) keys.load(first);
                keys.store(k_tile, inverse, first);
            }
        }
    }
    DEVICE void finish_values(float inverse) {
        if constexpr (!KEY_MAJOR) {
#pragma unroll
            for (int first = 0; first < Values::ROUNDS; first += Values::GROUP) {
                if constexpr (!EARLY) values.load(first);
                values.store(v_tile, inverse, first);
            }
        }
    }
};

// The row's keys in two parts (one where there are few): the second's scores are computed under the first's maximum,
// P V of the first under the exponentials of the second.
constexpr int FIRST = KEYS < 64 ? 0 : KEYS / 64 * 32, REST = KEYS - FIRST;

// A sum of p from those of its digits.
DEVICE u32 joined(const u32 (&sums)[DIGITS]) { return DIGITS == 1 ? sums[0] : (sums[0] << 8) + sums[DIGITS - 1]; }

// Left operands of P V, a step of 32 keys each, one for each digit.
template <int KEY_COUNT> struct Weights {
    u32 step[KEY_COUNT ? (KEY_COUNT + 31) / 32 : 1][DIGITS][4];
};

// A tile of 64 rows; a thread has rows h = 0, 1.
struct Tile {
    u32 q[D_STEPS][4];  // the rows' codes, left operand of Q K^T
    Score score[2];
    i32 peak[2];
    i64 B[2];
    u32 sums[2][DIGITS], l[2];
    RowScale<OUT> scales[2];
    i32 acc[DIGITS][HEAD_DIM / 2];
    u64 k_operand, v_operand;
    u32 present;  // bytes of the thread's last four keys that exist
    bool active;  // whether the warp has rows: the last tile of 197 has one warp with rows
    bool fits;    // whether 32 bits hold every T + B of the warp: exponent.cuh, short_limit

    DEVICE void prepare(u32 k_tile, u32 v_tile, i32 nk) {
        k_operand = descriptor<K_WIDTH>(k_tile), v_operand = descriptor<128>(v_tile);
        present = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (KEYS - 16 + 4 * (i32)(threadIdx.x % 4) + i < nk) present |= 0xFFu << (8 * i);
    }

    template <int COUNT> DEVICE void issue_scores(i32 (&s)[COUNT], int first) {
        wgmma_order();
#pragma unroll
        for (int i = 0; i < D_STEPS; ++i) {
            const u64 k = k_operand + (first * K_WIDTH >> 4) + 2 * i;
            if (i == 0) wgmma_s8_new(s, q[i], k);
            else wgmma_s8(s, q[i], k, true);
        }
        wgmma_commit();
    }

    // S << k with absent keys NO_SCORE, and the rows' maxima.
    template <bool LAST, int COUNT> DEVICE void maximum(i32 (&s)[COUNT]) {
        if (score[0].k | score[1].k) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) s[i] <<= score[i / 2 % 2].k;
        }
        if constexpr (LAST) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (!(present >> (i / 4 * 16 + i % 2 * 8) & 1)) s[COUNT - 8 + i] = NO_SCORE;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], s[i]);
    }

    // By the largest codes there are, or, where most maxima could be past that, by the rows' own.
    DEVICE void short_limits(i32 (&limit)[2]) const {
        constexpr i32 USUAL = 48;  // octaves that a maximum seldom reaches
#pragma unroll
        for (int h = 0; h < 2; ++h) limit[h] = short_limit(score[h].C, score[h].k, 128 * HEAD_DIM);
        if (__all_sync(~0u, min(limit[0], limit[1]) >= USUAL)) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 sum = 0;
#pragma unroll
            for (int i = 0; i < D_STEPS; ++i) sum = add_magnitudes(q[i][h], add_magnitudes(q[i][2 + h], sum));
            limit[h] = short_limit(score[h].C, score[h].k, quad_sum(sum));
        }
    }

    template <bool LAST, int COUNT, int KEY_COUNT>
    DEVICE void exponentials(const i32 (&s)[COUNT], Weights<KEY_COUNT>& p) {
        if (SHORT && fits) exponentials<LAST, true>(s, p);
        else exponentials<LAST, false>(s, p);
    }
    template <bool LAST, bool IN_SHORT, int COUNT, int KEY_COUNT>
    DEVICE void exponentials(const i32 (&s)[COUNT], Weights<KEY_COUNT>& p) {
#pragma unroll
        for (int group = 0; group < KEY_COUNT / 16; ++group)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32(&to)[DIGITS][4] = p.step[group / 2];
                const int j = group % 2 * 2 + h;
                const i32* x = &s[8 * group + 2 * h];
                u32 four[DIGITS];
                const i32 C = score[h].C;
                if constexpr (IN_SHORT) four_p<4 / DIGITS>(x[0], x[1], x[4], x[5], C >> 8, (u32)(B[h] >> 8), four);
                else four_p(x[0], x[1], x[4], x[5], C, B[h], four);
#pragma unroll
                for (int digit = 0; digit < DIGITS; ++digit) {
                    to[digit][j] = four[digit];
                    if (LAST && group == KEY_COUNT / 16 - 1) to[digit][j] &= present;
                    sums[h][digit] = add_bytes(to[digit][j], sums[h][digit]);
                }
            }
    }

    template <int KEY_COUNT> DEVICE void issue_values(Weights<KEY_COUNT>& p, int first) {
        wgmma_order();
#pragma unroll
        for (int i = 0; i < (KEY_COUNT + 31) / 32; ++i)
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit) {
                const int step = first / 32 + i;
                const u64 v = v_operand + step / 4 * (V_BLOCK >> 4) + step % 4 * 2;
                if (step == 0) wgmma_u8_new(acc[digit], p.step[i][digit], v);
                else wgmma_u8(acc[digit], p.step[i][digit], v, true);
            }
        wgmma_commit();
    }

    DEVICE void run(const Scaling& scaling) {
        peak[0] = peak[1] = NO_SCORE;
#pragma unroll
        for (int i = 0; i < 2 * DIGITS; ++i) sums[i / DIGITS][i % DIGITS] = 0;
        i32 a[FIRST ? FIRST / 2 : 1], b[REST / 2], limit[2];
        if constexpr (FIRST > 0) {
            issue_scores(a, 0);
            issue_scores(b, FIRST);
            if (SHORT) short_limits(limit);  // under the products
            wgmma_wait<1>(a);
            if (active) maximum<false>(a);
        } else {
            issue_scores(b, 0);
            if (SHORT) short_limits(limit);
        }
        wgmma_wait(b);
        Weights<FIRST> pa = {};
        Weights<REST> pb = {};
        if (active) {
            maximum<true>(b);
            bool holds = true;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                peak[h] = quad_max(peak[h]);
                const i64 top = multiply_add(peak[h], score[h].C, 0);
                B[h] = K0 - top;
                if (SHORT) holds &= octave_above(top) <= limit[h];
            }
            fits = SHORT && __all_sync(~0u, holds);
            if constexpr (FIRST > 0) exponentials<false>(a, pa);
        }
        if constexpr (FIRST > 0) issue_values(pa, 0);
        if (active) exponentials<true>(b, pb);
        issue_values(pb, FIRST);
        if (active) {  // under the products
#pragma unroll
            for (int h = 0; h < 2; ++h) l[h] = quad_sum(joined(sums[h]));
            row_scales<OUT>(l, scaling, scales);
        }
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) wgmma_wait(acc[digit]);
    }

    // Both rows' outputs; `row` is the thread's first.
    DEVICE void store(const Params& p, u32 batch, u32 head, u32 heads, i32 row, const Scaling& scaling) {
        const i64 base = (i64)(p.out.ptr + (head_offset(p.out, batch, head) + threadIdx.x % 4 * CHANNELS) * SIZE<OUT>);
        Accumulator mine[2][CHANNELS];
#pragma unroll
        for (int i = 0; i < 2 * CHANNELS; ++i) {
            Accumulator& to = mine[i / 2 % 2][i / 4 * 2 + i % 2];
#if BITS == 8
            to = acc[0][i];
#else
            to = {acc[0][i], acc[1][i]};
#endif
        }
        u32 words[2][CHANNELS * SIZE<OUT> / 4];
        output_words<OUT>(mine, scales, scaling, words);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i32 r = row + 8 * h;
            if (r < p.nq) store_words((u8*)multiply_add(r, (i32)p.out.n * SIZE<OUT>, base), words[h]);
            if (p.l && threadIdx.x % 4 == 0 && r < p.nq) {
                const i64 at = ((i64)batch * heads + head) * p.nq + r;
                p.t_max[at] = multiply_add(peak[h], score[h].C, 0);
                p.l[at] = l[h];
            }
        }
    }
};
