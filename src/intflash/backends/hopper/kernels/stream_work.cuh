// Long rows: which rows a multiprocessor's program computes, one piece of work after another (stream.py, `share`).
#pragma once
#include "stream_loads.cuh"

// A thread's rows are `row` and row + 8; those from `end` on are not the program's.
struct Place {
    u32 batch, head, kv_head;
    i32 row, end;
};

// threadIdx.x, read again: no register holds what follows from it meanwhile.
DEVICE u32 thread_anew() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// Rows [row, end) of a head.
struct Work {
    u32 batch, head, kv_head;
    i32 row, end;

    // Whole pieces of all heads come first, then what they leave of each.
    DEVICE Work(const Params& p, u32 i) {
        const Share& share = p.share;
        i32 rows = ROWS;
        u32 of;
        if (i < share.whole_of_all) {
            of = quotient(i, share.whole, share.whole_reciprocal);
            const i32 piece = i - of * share.whole;
            row = (CAUSAL ? share.whole - 1 - piece : piece) * ROWS;  // the last rows see most keys: first
        } else {
            i -= share.whole_of_all;
            of = quotient(i, share.rest, share.rest_reciprocal);
            rows = 64 * share.rest_tiles;
            row = share.whole * ROWS + (i - of * share.rest) * rows;
        }
        batch = quotient(of, p.heads, share.heads_reciprocal);
        head = of - batch * p.heads;
        kv_head = key_head(p, head);
        end = min(row + rows, p.nq);
    }
    DEVICE Place place(u32 thread) const {
        const i32 group = thread / GROUP - 1, of_group = thread % GROUP / 32 * 16 + thread % 32 / 4;
        return {batch, head, kv_head, row + group * 64 + of_group, end};
    }
};

// The program's pieces: whole ones in turn with all other programs; the rest in turn from program `first` on.
struct Turns {
    const Share& share;
    u32 i;

    DEVICE Turns(const Params& p) : share(p.share), i(blockIdx.x) {
        if (i >= share.whole_of_all) begin_rest();
    }
    DEVICE bool done() const { return i >= share.pieces; }
    DEVICE void next() {
        const bool whole = i < share.whole_of_all;
        i += whole ? gridDim.x : gridDim.x - share.first;
        if (whole && i >= share.whole_of_all) begin_rest();
    }
    DEVICE void begin_rest() {
        i = blockIdx.x < share.first ? share.pieces : share.whole_of_all + blockIdx.x - share.first;
    }
};
