// The parameters of the attention kernels, and how heads and batches are found from them.
#pragma once
#include "ptx.cuh"

constexpr int NO_SCORE = -2147483647 - 1;  // of an absent key

// A 4-D tensor: strides in elements; 0 along an axis that is broadcast. ptr null: there is none.
struct View {
    const u8* ptr;
    i64 b, h, n, d;
};

// What the tile scheduler of long rows hands out (sm90/tile_scheduler.cuh); reciprocals are `quotient`'s. With K/V
// resident in shared memory a piece is a tile of 64 rows, all are whole, and each CTA takes `rest_tiles` neighbours,
// the CTAs before `first` one more.
struct Share {
    i32 whole, rest;           // pieces of a head: of a CTA's full number of rows, and smaller ones
    i32 rest_tiles;            // of 64 rows in a smaller one
    u32 whole_of_all, pieces;  // of all heads: whole ones; both
    u32 first;                 // the CTAs from this one on take the smaller pieces
    u32 whole_reciprocal, rest_reciprocal, heads_reciprocal;
};

// One struct for all kernels; parameters.py fills the same fields in the same order.
struct Params {
    View q, k, v, out;
    View score;             // int64 k << 32 | C; null: from q_scale, k_scale and sm_scale
    View output;            // int64 e << 32 | Mr for integer output
    View q_scale, k_scale;  // float32, of float inputs
    View v_scale;           // float32: of float inputs, and what float output is multiplied by
    View bias;              // int32, 2^-20 octave
    View keep;              // uint8
    i64* t_max;             // [B, H, Nq], or null
    i32* l;
    double sm_scale;
    u32 group_reciprocal;   // ceil(2^32 / (query heads per key head)); 0 for one
    i32 nq, nk;
    i32 bias_batches, keep_batches;  // a mask's batch axis repeats
    i32 causal;             // key j is present for row i iff j <= i + causal
    i32 tiles;              // row tiles (or windows) of a CTA
    i32 count;              // of all windows, where a CTA takes several
    i32 heads;              // of Q
    u32 head_reciprocal;    // ceil(2^32 / heads); 0 for one
    u32 bias_reciprocal, keep_reciprocal;  // ceil(2^32 / batches); 0 for one, and for as many as Q has
    Share share;
};

DEVICE u32 key_head(const Params& p, u32 head) {
    return p.group_reciprocal ? __umulhi(head, p.group_reciprocal) : head;
}

// x / by, by the reciprocal floor((2^32 - 1) / by): its product is at most one too small.
DEVICE u32 quotient(u32 x, u32 by, u32 reciprocal) {
    const u32 q = __umulhi(x, reciprocal);
    return q + (x - q * by >= by);
}

DEVICE i64 head_offset(const View& x, i64 batch, i64 head) { return batch * x.b + head * x.h; }
