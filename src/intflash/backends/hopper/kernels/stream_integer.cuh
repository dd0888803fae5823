// The steps of intflash, intflash_p8 and intflash_online in stream.cuh's loop.
#pragma once
#include "stream.cuh"

constexpr i32 NO_OCTAVE = -(1 << 30);

// The largest scores of this thread's two rows; T is (S << shift) * C.
struct Peaks {
    i32 C[2], shift[2], peak[2];
    bool shifted;

    DEVICE void look(const Scores& s) {
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], s[i]);
    }
};

// p of one digit or two (256 high + low), multiplied into as many accumulators.
template <int DIGITS> struct Digits : Peaks {
    static constexpr int ACCUMULATORS = DIGITS * HEAD_DIM / 2;
    struct P {
        Codes8 digit[DIGITS];
    };
    i32 acc[DIGITS][HEAD_DIM / 2];
    i32 sums[DIGITS][4];  // of P, by products with 8 columns of ones; row 8's are the last two
    u64 ones;
    i64 B[2];

    DEVICE void start(int h, Score score) { C[h] = score.C, shift[h] = score.k, peak[h] = NO_SCORE, B[h] = K0; }
    DEVICE void start(u64 eight_ones) {
        ones = eight_ones;
        shifted = __any_sync(~0u, shift[0] > 0 || shift[1] > 0);
#pragma unroll
        for (int i = 0; i < DIGITS * HEAD_DIM / 2; ++i) acc[i / (HEAD_DIM / 2)][i % (HEAD_DIM / 2)] = 0;
#pragma unroll
        for (int i = 0; i < DIGITS * 4; ++i) sums[i / 4][i % 4] = 0;
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit)  // before any product
            wgmma_hold(acc[digit]), wgmma_hold(sums[digit]);
    }
    template <bool SHIFTED> DEVICE void exponentials(const Scores& s, P& p) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const i32* x = &s[16 * (i / 4) + 8 * (i % 4 / 2) + 2 * (i % 2)];
            const int h = i % 2, by = SHIFTED ? shift[h] : 0;
            const i32 a = x[0] << by, b = x[1] << by, c = x[4] << by, d = x[5] << by;
            if constexpr (DIGITS == 1) p.digit[0].word[i / 4][i % 4] = four_p8(a, b, c, d, C[h], B[h]);
            else four_p16(a, b, c, d, C[h], B[h], p.digit[0].word[i / 4][i % 4], p.digit[1].word[i / 4][i % 4]);
        }
    }
    DEVICE void exponentials(const Scores& s, P& p) {
        if (shifted) exponentials<true>(s, p);
        else exponentials<false>(s, p);
    }
    DEVICE void keep(P& p, int step, int word, u32 bytes) {
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) p.digit[digit].word[step][word] &= bytes;
    }
    DEVICE void products(const P& p, u64 v) {
        wgmma_order();
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int digit = 0; digit < DIGITS; ++digit) {
                wgmma_u8(acc[digit], p.digit[digit].word[i], v + 2 * i, true);
                wgmma_u8(sums[digit], p.digit[digit].word[i], ones, true);
            }
        wgmma_commit();
    }
    DEVICE void wait() {
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) wgmma_wait(acc[digit]), wgmma_wait(sums[digit]);
    }
    DEVICE u32 l(int h) const {
        return DIGITS == 1 ? sums[0][2 * h] : ((u32)sums[0][2 * h] << 8) + sums[DIGITS - 1][2 * h];
    }
};

// The exact maximum, of a first pass.
template <int DIGITS> struct Exact : Digits<DIGITS> {
    static constexpr int PASSES = 2;
    i64 top[2];

    DEVICE void between() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = (i64)(quad_max(this->peak[h]) << this->shift[h]) * this->C[h];
            this->B[h] = K0 - top[h];
        }
    }
    DEVICE void settle() {}
    DEVICE i64 t_max(int h) const { return top[h]; }
};

struct ExactP8 : Exact<1> {
    typedef i32 Accumulator;
    DEVICE i32 result(int i) const { return acc[0][i]; }
};

struct ExactP16 : Exact<2> {
    typedef Wide Accumulator;
    DEVICE Wide result(int i) const { return {acc[0][i], acc[1][i]}; }
};

// Granules of 128 keys; a row's accumulators are shifted when a granule raises its octave.
struct Online : Digits<1> {
    static constexpr int PASSES = 1;
    typedef i32 Accumulator;
    i32 octave[2];

    DEVICE void start(int h, Score score) { Digits<1>::start(h, score), octave[h] = NO_OCTAVE; }
    DEVICE void start(u64 eight_ones) { Digits<1>::start(eight_ones); }
    DEVICE i32 octave_of(int h) const {  // rounded up
        return (i32)(multiply_add(peak[h] << shift[h], C[h], 0xFFFFFFFFll) >> 32);
    }
    DEVICE void settle() {
        if (__any_sync(~0u, octave_of(0) > octave[0] || octave_of(1) > octave[1])) raise();
        peak[0] = peak[1] = NO_SCORE;
    }
    DEVICE void raise() {
        i32 by[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            peak[h] = quad_max(peak[h]);
            const i32 raised = max(octave[h], peak[h] == NO_SCORE ? NO_OCTAVE : octave_of(h));
            by[h] = min(raised - octave[h], 31);
            octave[h] = raised;
            B[h] = K0 - ((i64)raised << 32);
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) acc[0][i] >>= by[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[0][i] >>= by[i / 2];
        wgmma_hold(acc[0]);  // before the next product
        wgmma_hold(sums[0]);
    }
    DEVICE i64 t_max(int h) const { return (i64)octave[h] << 32; }
    DEVICE i32 result(int i) const { return acc[0][i]; }
};
