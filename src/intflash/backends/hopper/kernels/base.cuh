// What every kernel of this folder shares: parameters, addresses in shared memory, asynchronous copies.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr int NO_SCORE = -2147483647 - 1;  // of an absent key

// A 4-D tensor: strides in elements; 0 along an axis that is broadcast. ptr null: there is none.
struct View {
    const u8* ptr;
    i64 b, h, n, d;
};

// How long rows are shared out (stream_work.cuh); reciprocals are `quotient`'s. Where heads stay in shared memory, pieces
// are tiles of 64 rows, all whole, and each program takes `rest_tiles` neighbours, those before `first` one more.
struct Share {
    i32 whole, rest;           // pieces of a head: those of a program's full number of rows, and smaller ones
    i32 rest_tiles;            // of 64 rows in a smaller one
    u32 whole_of_all, pieces;  // of all heads: whole ones; both
    u32 first;                 // programs from this one on take the smaller ones
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
    i32 tiles;              // row tiles (or windows) of a program
    i32 count;              // of all windows, where a program takes several
    i32 heads;              // of Q
    u32 head_reciprocal;    // ceil(2^32 / heads); 0 for one
    u32 bias_reciprocal, keep_reciprocal;  // ceil(2^32 / batches); 0 for one, and for as many as Q has
    Share share;
};

// What is computed before a loop stays so: the compiler would do it again in every turn.
DEVICE void once(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE void once(i32& x) { asm volatile("" : "+r"(x)); }
DEVICE void once(u8*& x) { asm volatile("" : "+l"(x)); }

DEVICE u32 key_head(const Params& p, u32 head) {
    return p.group_reciprocal ? __umulhi(head, p.group_reciprocal) : head;
}

// x / by, by the reciprocal floor((2^32 - 1) / by): its product is at most one too small.
DEVICE u32 quotient(u32 x, u32 by, u32 reciprocal) {
    const u32 q = __umulhi(x, reciprocal);
    return q + (x - q * by >= by);
}

DEVICE i64 head_offset(const View& x, i64 batch, i64 head) { return batch * x.b + head * x.h; }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ordinary stores to shared memory become visible to wgmma.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A kernel launched with `overlaps` may start while the one before runs: it reads and writes nothing before
// `await_previous`, and has no read-only loads, which could be moved before it.
DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The same once `known` (not 0, as addresses are) has been computed, which ptxas would leave for later.
DEVICE void await_previous(u64 known) {
    asm volatile("{.reg .pred p; setp.ne.u64 p, %0, 0; @p griddepcontrol.wait;}" ::"l"(known) : "memory");
}
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Bytes of a row of a wgmma operand in shared memory: 32, 64 or 128, each with its own swizzle.
template <int WIDTH> DEVICE u32 swizzled(u32 row, u32 chunk) {
    if constexpr (WIDTH == 128) return row * 128 + ((chunk ^ (row & 7)) << 4);
    else if constexpr (WIDTH == 64) return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
    else return row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4);
}

// wgmma's descriptor of a K-major tile with rows of WIDTH swizzled bytes; +2 is the next 32 bytes of each row.
template <int WIDTH> DEVICE u64 descriptor(u32 address) {
    constexpr u64 layout = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(8 * WIDTH >> 4) << 32) | (layout << 62);
}

// The same of a tile whose rows are the product's steps, 16-bit elements in blocks of 64 columns, BLOCK bytes each;
// +128 is the next 16 rows.
template <int BLOCK> DEVICE u64 columns_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(BLOCK >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// The accumulators of Q K^T hold, of every 16 columns, columns 2q, 2q+1, 8+2q, 9+2q in lane q of four; the left
// operand of P V wants keys 4q..4q+3 there. So key k of a tile is row score_row(k) of K in shared memory.
DEVICE u32 score_row(u32 key) { return (key & ~15u) | ((key & 2) << 2) | ((key >> 1) & 6) | (key & 1); }

// Likewise row value_row(d) of V^T: then lane q of four holds channels q D/4 .. (q + 1) D/4 of the output.
template <int D> DEVICE u32 value_row(u32 d) {
    u32 lane = d / (D / 4), i = d % (D / 4);
    return 8 * (i >> 1) + 2 * lane + (i & 1);
}

DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// x << by; 0 for by < 0 and by > 31: PTX's shl clamps.
DEVICE u32 shift_left(u32 x, i32 by) {
    u32 r;
    asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(by));
    return r;
}

// Four numbers, saturated, as the bytes of a word.
DEVICE u32 pack_bytes(i32 a, i32 b, i32 c, i32 d) {
    u32 w;
    asm("{.reg .b32 t; cvt.pack.sat.s8.s32.b32 t, %4, %3, 0; cvt.pack.sat.s8.s32.b32 %0, %2, %1, t;}"
        : "=r"(w) : "r"(a), "r"(b), "r"(c), "r"(d));
    return w;
}

// The same of numbers from 0 to 255.
DEVICE u32 pack_unsigned_bytes(u32 a, u32 b, u32 c, u32 d) {
    u32 w;
    asm("{.reg .b32 t; cvt.pack.sat.u8.s32.b32 t, %4, %3, 0; cvt.pack.sat.u8.s32.b32 %0, %2, %1, t;}"
        : "=r"(w) : "r"(a), "r"(b), "r"(c), "r"(d));
    return w;
}

// 4 x 4 bytes: word i of `r` holds byte i of a, b, c, d.
DEVICE void transpose_bytes(u32 a, u32 b, u32 c, u32 d, u32 (&r)[4]) {
    u32 ab = permute(a, b, 0x5140), cd = permute(c, d, 0x5140);
    r[0] = permute(ab, cd, 0x5410);
    r[1] = permute(ab, cd, 0x7632);
    ab = permute(a, b, 0x7362), cd = permute(c, d, 0x7362);
    r[2] = permute(ab, cd, 0x5410);
    r[3] = permute(ab, cd, 0x7632);
}

DEVICE void store_shared(u32 to, u32 word) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory"); }

DEVICE u32 load_shared(u32 from) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

DEVICE void load_shared(u32 from, u32 (&w)[2]) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(from) : "memory");
}
DEVICE void load_shared(u32 from, u32 (&w)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
}

DEVICE void store_shared(u32 to, const u32 (&w)[2]) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(w[0]), "r"(w[1]) : "memory");
}
DEVICE void store_shared(u32 to, const u32 (&w)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

template <typename T> DEVICE T quad_max(T x) {
    T y = __shfl_xor_sync(~0u, x, 1);
    x = x > y ? x : y;
    y = __shfl_xor_sync(~0u, x, 2);
    return x > y ? x : y;
}

DEVICE u32 quad_sum(u32 x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// One IMAD.WIDE: of the spellings tried, this pair alone is fused into it (C++ widens first, mad.wide adds apart).
DEVICE i64 multiply_add(i32 a, i32 b, i64 c) {
    i64 d;
    asm("{.reg .u32 l, h; mov.b64 {l, h}, %3; mad.lo.cc.s32 l, %1, %2, l; madc.hi.s32 h, %1, %2, h;\n"
        "mov.b64 %0, {l, h};}"
        : "=l"(d) : "r"(a), "r"(b), "l"(c));
    return d;
}
