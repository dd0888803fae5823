// The softmax of intflash, intflash_p8 and intflash_online in the mainloop of long rows. Further macros: METHOD, and
// ROW_SCALES (0: one score constant serves all rows of a head).
#pragma once
#include "exp2.cuh"
#include "sm90/long_rows_mainloop.cuh"

constexpr int CHANNELS = HEAD_DIM / 4;  // of a thread

struct Codes8 {  // of 64 keys: left operands of two products of 32 keys
    u32 word[2][4];
};

// P of a warpgroup's rows in shared memory, 64 bytes of a row for each half of a tile. A warp's products read its own
// 16 rows only, so it waits for no other.
struct SharedCodes {
    static constexpr u32 HALF_BYTES = 64 * HALF;
    u32 mine;  // where this thread's first matrix row goes: of 8 rows and 16 keys
    u64 operand_0;

    SharedCodes() = default;
    DEVICE SharedCodes(u32 codes) {
        // broadcast, so that the compiler knows it as uniform
        const u32 base = codes + (__shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1) * 2 * HALF_BYTES;
        const u32 row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 8;
        mine = base + swizzled<HALF>(row, threadIdx.x % 32 / 8);
        operand_0 = descriptor<HALF>(base);
    }
    DEVICE u64 operand(int half) const { return operand_0 + half * (HALF_BYTES >> 4); }
    DEVICE void store(const Codes8& p, int half) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             mine + half * HALF_BYTES + 8 * h * HALF),
                         "r"(p.word[0][h]), "r"(p.word[0][2 + h]), "r"(p.word[1][h]), "r"(p.word[1][2 + h])
                         : "memory");
    }
    DEVICE static void publish() {
        fence_async_proxy();
        __syncwarp();
    }
};

// The magnitudes of a thread's two rows' codes, added by its quad: both sums in one word.
DEVICE u32 row_magnitudes(const SharedLayout& shared) {
    const u32 warp = threadIdx.x / 32 - 4, row = warp * 16 + threadIdx.x % 32 / 4;
    u32 sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2 * D_CHUNKS; ++i) {
        const u32 from = shared.query + swizzled<K_WIDTH>(row + i % 2 * 8, i / 2) + threadIdx.x % 4 * 4;
        sum[i % 2] = add_magnitudes(load_shared(from), sum[i % 2]);
    }
    return quad_sum(sum[1] << 16 | sum[0]);
}

// Bytes of p of the keys that a row sees; `word` holds keys 4q .. 4q + 3 of 16.
DEVICE u32 seen_bytes(const VisibleKeys& visible, int step, int word) {
    const i32 key = step * 32 + word / 2 * 16;
    u32 beyond;
    asm("shl.b32 %0, -1, %1;" : "=r"(beyond) : "r"(8 * max(visible.keys[word % 2] - key, 0)));
    return ~beyond;
}

// The largest scores of this thread's two rows; T is (S << shift) * C.
struct Peaks {
    i32 C[2], shift[2], peak[2];
    bool fits;  // whether the shorter form of the exponential serves the warp's rows

    DEVICE void update_row_max(const Scores& s, bool partial, const VisibleKeys& visible) {
        take_maxima(peak, s, partial, visible);
    }
    DEVICE i64 exponent(int h, i32 score) const { return (i64)(score << shift[h]) * C[h]; }
};

template <int DIGITS> struct AccumulatorOf { typedef i32 Type; };
template <> struct AccumulatorOf<2> { typedef Wide Type; };

// The first of a word's four scores of a half, neighbours in pairs; the row of a word is its last bit.
DEVICE const i32* scores_of_word(const Scores& s, int word) {
    return &s[16 * (word / 4) + 8 * (word % 4 / 2) + 2 * (word % 2)];
}

// p of one digit or two (256 high + low), multiplied into as many accumulators. T counts Units.
template <int DIGITS, class Unit = Octaves> struct Digits : Peaks {
    typedef typename AccumulatorOf<DIGITS>::Type Accumulator;
    struct P {
        Codes8 digit[DIGITS];
    };
    i32 acc[DIGITS][HEAD_DIM / 2];
    u32 sums[DIGITS][2];  // of this thread's P
    SharedCodes kept;     // where P_SHARED

    DEVICE void start(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
        if (P_SHARED) kept = SharedCodes(shared.codes);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!ROW_SCALES && h == 1) {
                C[1] = C[0], shift[1] = shift[0], peak[1] = NO_SCORE;
                continue;
            }
            Score score = score_of(p, at, h);
            if (!ROW_SCALES) score = {__shfl_sync(~0u, score.C, 0), __shfl_sync(~0u, score.k, 0)};  // known as uniform
            C[h] = score.C, shift[h] = score.k, peak[h] = NO_SCORE;
        }
#pragma unroll
        for (int i = 0; i < DIGITS * HEAD_DIM / 2; ++i) acc[i / (HEAD_DIM / 2)][i % (HEAD_DIM / 2)] = 0;
#pragma unroll
        for (int i = 0; i < DIGITS * 2; ++i) sums[i / 2][i % 2] = 0;
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) wgmma_hold(acc[digit]);  // before any product
    }
    DEVICE static Score score_of(const Params& p, const ThreadRows& at, int h) {
        if (FLOAT_KV)
            return score_constants<Unit>(*head_element<float>(p.q_scale, at.batch, at.head),
                                         *head_element<float>(p.k_scale, at.batch, at.kv_head), p.sm_scale);
        const i64 row = head_offset(p.score, at.batch, at.head) + min(at.row + 8 * h, p.nq - 1) * p.score.n;
        return unpack_score(((const i64*)p.score.ptr)[row]);
    }
    DEVICE void add(const P& p) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit)
                sums[digit][i % 2] = add_bytes(p.digit[digit].word[i / 4][i % 4], sums[digit][i % 2]);
    }
    DEVICE void mask_p(P& p, const VisibleKeys& visible) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 bytes = seen_bytes(visible, i / 4, i % 4);
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit) p.digit[digit].word[i / 4][i % 4] &= bytes;
        }
    }
    DEVICE void keep(const P& p, int half) const {
        static_assert(DIGITS == 1 || !P_SHARED);
        if constexpr (P_SHARED) {
            kept.store(p.digit[0], half);
            if (half == 1) kept.publish();
        }
    }
    DEVICE void products(const P& p, int half, u64 v) {
        wgmma_order();
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit)
                if constexpr (P_SHARED) wgmma_u8(acc[digit], kept.operand(half) + 2 * i, v + 2 * i);
                else wgmma_u8(acc[digit], p.digit[digit].word[i], v + 2 * i);
        wgmma_commit();
    }
    DEVICE float tile_scale(u32) const { return 1.0f; }
    DEVICE void wait() {
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) wgmma_wait(acc[digit]);
    }
    DEVICE u32 l(int h) const {
        return quad_sum(DIGITS == 1 ? sums[0][h] : (sums[0][h] << 8) + sums[DIGITS - 1][h]);
    }
    DEVICE Accumulator result(int i) const {
        if constexpr (DIGITS == 1) return acc[0][i];
        else return {acc[0][i], acc[1][i]};
    }
    DEVICE void store(const Params& p, const ThreadRows& at, const i64 (&t_max)[2]) const {
        const Scaling scaling = output_scaling<OUT>(p, at.batch, at.head, at.kv_head);
        const u32 l[2] = {this->l(0), this->l(1)};
        RowScale<OUT, Accumulator> scales[2];
        row_scales(makes_second() ? l[1] : l[0], scaling, scales);
        Accumulator mine[2][CHANNELS];
#pragma unroll
        for (int i = 0; i < 2 * CHANNELS; ++i) mine[i / 2 % 2][i / 4 * 2 + i % 2] = result(i);
        u32 words[2][CHANNELS * SIZE<OUT> / 4];
        output_words<OUT>(mine, scales, scaling, words);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i32 row = at.row + 8 * h;
            if (row >= at.end) continue;
            const i64 to = head_offset(p.out, at.batch, at.head) + row * p.out.n + threadIdx.x % 4 * CHANNELS;
            store_words((u8*)element<OUT>(p.out.ptr, to), words[h]);
            if (p.l && threadIdx.x % 4 == 0) {
                const i64 to = ((i64)at.batch * p.heads + at.head) * p.nq + row;
                p.t_max[to] = t_max[h];
                p.l[to] = l[h];
            }
        }
    }
};

// The exact maximum, of a first pass.
template <int DIGITS> struct Exact : Digits<DIGITS> {
    typedef typename Digits<DIGITS>::P P;
    static constexpr int PASSES = 2, IN_FLIGHT = ROW_SCALES ? 0 : 1;  // 1 would spill
    static constexpr int BUFFERS = DIGITS * HEAD_DIM / 2 > (CONSUMERS == 3 ? 48 : 64) ? 1 : 2;
    static constexpr bool RESCALES = false, WHOLE_TILES = false;  // a row's maximum is known
    static constexpr int UNROLL = 1, DOTS = DIGITS == 2 ? 0 : 2;  // DOTS: see four_p
    i64 B[2];

    // The largest octave of either row at which 32 bits hold T + B of both.
    DEVICE i32 limit(const SharedLayout& shared) const {
        const u32 magnitudes = row_magnitudes(shared), a = magnitudes & 0xFFFF, b = magnitudes >> 16;
        if (!ROW_SCALES) return exp_32bit_limit(this->C[0], this->shift[0], max(a, b));
        return min(exp_32bit_limit(this->C[0], this->shift[0], a), exp_32bit_limit(this->C[1], this->shift[1], b));
    }
    DEVICE void between(const SharedLayout& shared) {
        const i32 limit = this->limit(shared);
        bool fits = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 top = this->exponent(h, quad_max(this->peak[h]));
            fits &= octave_above(top) <= limit;
            B[h] = K0 - top;
        }
        this->fits = __all_sync(~0u, fits);
    }
    template <bool EXP_32BIT> DEVICE void powers(const Scores& s, P& p) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const i32* x = scores_of_word(s, i);
            const int h = i % 2, by = EXP_32BIT ? 0 : this->shift[h];
            const i32 a = x[0] << by, b = x[1] << by, c = x[4] << by, d = x[5] << by;
            u32 four[DIGITS];
            if constexpr (EXP_32BIT) four_p<DOTS>(a, b, c, d, this->C[h] >> 8, (u32)(B[h] >> 8), four);
            else four_p(a, b, c, d, this->C[h], B[h], four);
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit) p.digit[digit].word[i / 4][i % 4] = four[digit];
        }
    }
    DEVICE void exponentials(const Scores& s, bool partial, const VisibleKeys& visible, u32, P& p) {
        if (this->fits) powers<true>(s, p);
        else powers<false>(s, p);
        if (partial) this->mask_p(p, visible);
        this->add(p);
    }
    DEVICE void store(const Params& p, const ThreadRows& at) const {
        Digits<DIGITS>::store(p, at, {K0 - B[0], K0 - B[1]});
    }
};

typedef Exact<1> ExactP8;
typedef Exact<2> ExactP16;

// Granules of 128 keys; a row's accumulators are shifted when a granule raises its octave. P is looked up.
struct Online : Digits<1, TableSteps> {
    static constexpr int PASSES = 1, BUFFERS = 2;
    static constexpr bool RESCALES = true, WHOLE_TILES = true;
    static constexpr int UNROLL = P_SHARED || ROW_SCALES || HEAD_DIM <= 32 ? 1 : 2;  // 2 would spill there
    TableUnit units[ROW_SCALES ? 2 : 1];
    TableRow rows[2];
    u32 lane;       // where this lane's part of the table begins
    i32 by[2];      // octaves by which a row rises
    bool rises[2];  // whether one of the warp does

    DEVICE const TableUnit& unit(int h) const { return units[ROW_SCALES ? h : 0]; }
    DEVICE void start(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
        Digits::start(p, at, shared);
        lane = shared.table + threadIdx.x % 32 * 4;
        units[0] = TableUnit({C[0], shift[0]});
        if (ROW_SCALES) units[ROW_SCALES] = TableUnit({C[1], shift[1]});
        fits = unit(0).clamps();
        if (ROW_SCALES) fits = __all_sync(~0u, fits && unit(1).clamps());
#pragma unroll
        for (int h = 0; h < 2; ++h) rows[h].start();
    }
    // Both halves at once: scores of the second are on their way to entries while bytes of the first are loaded.
    template <bool CLAMPS>
    DEVICE void exponentials(const Scores (&s)[2], bool partial, const VisibleKeys (&visible)[2], P (&p)[2]) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const i32* x = scores_of_word(s[i / 8], i % 8);
            const auto p_of = [&](i32 score) { return look_up(rows[i % 2].entry<CLAMPS>(score, unit(i % 2)), lane); };
            u32& word = p[i / 8].digit[0].word[i % 8 / 4][i % 4];
            word = pack_unsigned_bytes(p_of(x[0]), p_of(x[1]), p_of(x[4]), p_of(x[5]));
        }
        if (partial) mask_p(p[0], visible[0]), mask_p(p[1], visible[1]);
    }
    // What the next tile's scores mean for the sums. The accumulators follow once their products are done (settle).
    DEVICE void raise_row_octaves() {
#pragma unroll
        for (int h = 0; h < 2; ++h) rises[h] = __any_sync(~0u, peak[h] > rows[h].limit);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (rises[h]) raise(h);
            peak[h] = NO_SCORE;
        }
    }
    DEVICE void raise(int h) {
        TableRow& row = rows[h];
        const bool needs_64_bits = __any_sync(~0u, row.needs_64_bits(peak[h], unit(h)));
        const i32 score = quad_max(peak[h]);
        const u32 l = quad_sum(sums[0][h]);
        by[h] = needs_64_bits ? row.raise_64bit(score, unit(h)) : row.raise_32bit(score, unit(h));
        sums[0][h] = threadIdx.x % 4 ? 0 : l >> by[h];  // a sum of the quad's is shifted, not its parts
    }
    DEVICE void rescale_acc(const Scores (&)[2], bool, const VisibleKeys (&)[2], u32, float) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (rises[h])
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 4; ++i) acc[0][4 * (i / 2) + 2 * h + i % 2] >>= by[h];
        wgmma_hold(acc[0]);  // before the next product
    }
    DEVICE void store(const Params& p, const ThreadRows& at) const {
        Digits::store(p, at, {(i64)rows[0].octave(unit(0)) << 32, (i64)rows[1].octave(unit(1)) << 32});
    }
};
