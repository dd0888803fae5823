// Where the operands of warpgroup products lie in shared memory, and the descriptors that say so.
#pragma once
#include "ptx.cuh"

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
