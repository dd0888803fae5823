// Long rows: one warpgroup loads tiles of 128 keys into a ring in shared memory, CONSUMERS warpgroups of 64 rows each
// compute on them. A method is a struct (stream_integer.cuh); loads, barriers, products and masks are here.
//
// Defined when this is compiled: METHOD, HEAD_DIM (a multiple of 16), CONSUMERS, CAUSAL (0 or 1), ROW_SCALES (0: one
// score constant serves all rows of a head), OUT.
//
// A tile's scores are taken in two halves of 64 keys, whose registers are free for the next tile's as soon as their
// exponentials are done: so Q K^T of tile j + 1 and P V of tile j run under the exponentials of tile j.
#pragma once
#include "barrier.cuh"
#include "base.cuh"
#include "exponent.cuh"
#include "output.cuh"
#include "wgmma.cuh"

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int ROWS = 64 * CONSUMERS;
constexpr int TILE = 128, HALF = 64;  // keys
constexpr int STAGES = 4;
constexpr int D_CHUNKS = HEAD_DIM / 16, D_STEPS = (HEAD_DIM + 31) / 32;
constexpr int K_WIDTH = HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : 128;  // bytes of a row of K in shared memory
constexpr int K_BYTES = TILE * K_WIDTH, V_BYTES = TILE * HEAD_DIM;
constexpr int STAGE_BYTES = (K_BYTES + V_BYTES + 1023) / 1024 * 1024;
constexpr int CHANNELS = HEAD_DIM / 4;  // of a thread
constexpr int LAG = 2;

typedef Ring<STAGES> Stage;
typedef i32 Scores[HALF / 2];
struct Codes8 {  // of 64 keys: left operands of two products of 32 keys
    u32 word[2][4];
};

struct Shared {
    u32 tiles, query, ones, full, empty;
    DEVICE Shared(u32 base)
        : tiles(base), query(base + STAGES * STAGE_BYTES), ones(query + ROWS * K_WIDTH), full(ones + 1024),
          empty(full + 8 * STAGES) {}
    DEVICE u32 k_tile(u32 stage) const { return tiles + stage * STAGE_BYTES; }
    DEVICE u32 v_tile(u32 stage) const { return k_tile(stage) + K_BYTES; }
    DEVICE void wait_full(const Stage& s) const { barrier_wait(full + 8 * s.stage, s.parity); }
    DEVICE void wait_empty(const Stage& s) const { barrier_wait(empty + 8 * s.stage, s.parity ^ 1); }
    DEVICE bool is_empty(const Stage& s) const { return barrier_test(empty + 8 * s.stage, s.parity ^ 1); }
    // The tile `ago` tiles before the one that goes to s.
    DEVICE void announce(const Stage& s, u32 ago) const {
        publish_shared();
        barrier_arrive(full + 8 * ((s.stage + STAGES - ago) % STAGES));
    }
    DEVICE void announce_all(const Stage& s, u32& in_flight) const {
        copies_wait<0>();
        for (; in_flight; --in_flight) announce(s, in_flight);
    }
    DEVICE void release(u32 stage) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
    }
};

// Tiles of keys that rows [first, last] see, and how many of them are seen whole by every row.
struct Walk {
    i32 count, whole;
    DEVICE Walk(const Params& p, i32 first, i32 last) {
        i32 keys = CAUSAL ? min(p.nk, last + p.causal + 1) : p.nk;
        i32 seen = CAUSAL ? min(p.nk, first + p.causal + 1) : p.nk;
        count = keys > 0 ? (keys + TILE - 1) / TILE : 0;
        whole = seen > 0 ? seen / TILE : 0;
    }
};

DEVICE Walk walk_of(const Params& p, i32 row, i32 rows) {
    Walk w(p, row, min(row + rows, p.nq) - 1);
    if (row >= p.nq) w.count = 0;
    return w;
}

// --- loads

// The inverses of score_row within 16 keys, and of value_row.
DEVICE u32 key_of_row(u32 row) { return (row & ~15u) | ((row & 6) << 1) | ((row & 8) >> 2) | (row & 1); }
template <int D> DEVICE u32 channel_of_row(u32 row) { return row / 2 % 4 * (D / 4) + row / 8 * 2 + row % 2; }

// What a thread copies, one 16-byte chunk of each of several rows in shared memory: between them the addresses differ
// by constants there and by a multiple of a stride in memory.
struct Loader {
    static constexpr u32 WIDE = K_WIDTH / 16, KEYS_AT_ONCE = GROUP / WIDE, CHANNELS_AT_ONCE = GROUP / 8;
    const u8 *k, *v;
    i64 k_step, v_step;  // between the rows that a thread copies
    u32 k_to, v_to;
    i32 k_left, v_left;  // keys from this thread's first one on

    DEVICE Loader(const Params& p, const Shared& shared, const u8* k_base, const u8* v_base) {
        const u32 thread = threadIdx.x % GROUP, key = key_of_row(thread / WIDE), keys = thread % 8 * 16;
        k = k_base + key * p.k.n + thread % WIDE * 16;
        k_step = KEYS_AT_ONCE * p.k.n;
        k_to = shared.k_tile(0) + swizzled<K_WIDTH>(thread / WIDE, thread % WIDE);
        k_left = thread % WIDE < D_CHUNKS ? p.nk - key : 0;
        v = v_base + channel_of_row<HEAD_DIM>(thread / 8) * p.v.d + keys;
        v_step = CHANNELS_AT_ONCE / 4 * p.v.d;
        v_to = shared.v_tile(0) + swizzled<128>(thread / 8, thread % 8);
        v_left = p.nk - keys;
    }
    DEVICE void keys(u32 stage, i32 first) {
        const u8* from = k;
#pragma unroll
        for (u32 i = 0; i < TILE; i += KEYS_AT_ONCE) {
            copy_16_or_zeros(k_to + stage * STAGE_BYTES + i * K_WIDTH, from, first + (i32)i < k_left);
            from += k_step;
        }
        k = from;
    }
    DEVICE void values(u32 stage, i32 first) {
        const u8* from = v + first;
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM; i += CHANNELS_AT_ONCE) {
            copy_16_or_zeros(v_to + stage * STAGE_BYTES + i * 128, from, first < v_left);
            from += v_step;
        }
    }
};

// The values are those of the last pass. Up to LAG tiles' copies are in flight behind the one that is announced; none
// that has been issued waits for a buffer to be free, or the warpgroups could not drift apart.
template <class Method>
DEVICE void produce(const Params& p, const Shared& shared, const u8* k, const u8* v, i32 tiles) {
    Loader load(p, shared, k, v);
    Stage at;
    u32 in_flight = 0;
#pragma unroll 1
    for (int pass = 1; pass <= Method::PASSES; ++pass) {
        if (pass == 2) load.k -= (i64)tiles * TILE * p.k.n;
#pragma unroll 1
        for (i32 j = 0; j < tiles; ++j) {
            if (!shared.is_empty(at)) {
                shared.announce_all(at, in_flight);
                shared.wait_empty(at);
            }
            load.keys(at.stage, j * TILE);
            if (pass == Method::PASSES) load.values(at.stage, j * TILE);
            copies_commit();
            at.next();
            if (++in_flight > LAG) {
                copies_wait<LAG>();
                shared.announce(at, in_flight--);
            }
        }
    }
    shared.announce_all(at, in_flight);
}

// --- a warpgroup's rows; a thread's are one and the one 8 below

DEVICE void load_query(const Params& p, const u8* base, i32 first, u32 to, u32 group) {
    constexpr u32 WIDE = K_WIDTH / 16;
    const u32 thread = threadIdx.x % GROUP, chunk = thread % WIDE;
#pragma unroll
    for (u32 i = 0; i < 64; i += GROUP / WIDE) {
        const u32 row = thread / WIDE + i;
        copy_16_or_zeros(to + swizzled<K_WIDTH>(row, chunk), base + min(first + (i32)row, p.nq - 1) * p.q.n + chunk * 16,
                         chunk < D_CHUNKS);
    }
    copies_done();
    publish_shared();
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
}

// Keys from `first` on: NO_SCORE where a row does not see them.
DEVICE void mask_scores(const Scores& s, const i32 (&seen)[2], i32 first, Scores& masked) {
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) {
        i32 key = first + i / 8 * 16 + threadIdx.x % 4 * 4 + i / 4 % 2 * 2 + i % 2;
        masked[i] = key < seen[i / 2 % 2] ? s[i] : NO_SCORE;
    }
}

// Bytes of p of the keys that a row sees; `word` holds keys 4q .. 4q + 3 of 16.
DEVICE u32 seen_bytes(const i32 (&seen)[2], i32 first, int step, int word) {
    i32 key = first + step * 32 + word / 2 * 16 + threadIdx.x % 4 * 4;
    u32 beyond;
    asm("shl.b32 %0, -1, %1;" : "=r"(beyond) : "r"(8 * max(seen[word % 2] - key, 0)));
    return ~beyond;
}

template <class Method> struct Consumer {
    // Where registers are short one buffer takes both halves in turn (of methods that know a row's maximum before).
    static constexpr int BUFFERS = Method::PASSES == 2 && Method::ACCUMULATORS > (CONSUMERS == 3 ? 48 : 64) ? 1 : 2;
    const Params& p;
    const Shared& shared;
    Method method;
    Scores s[BUFFERS];
    u64 q;
    i32 seen[2];

    DEVICE Consumer(const Params& p, const Shared& shared) : p(p), shared(shared) {}

    DEVICE void issue_scores(int half, u32 stage) {
        const u64 k = descriptor<K_WIDTH>(shared.k_tile(stage)) + half * (HALF * K_WIDTH >> 4);
        Scores& to = s[half % BUFFERS];
        wgmma_order();
        wgmma_s8_new(to, q, k);
#pragma unroll
        for (int i = 1; i < D_STEPS; ++i) wgmma_s8(to, q + 2 * i, k + 2 * i, true);
        wgmma_commit();
    }

    // Scores in flight are written by products only (else the compiler waits for each product): a mask makes a copy.
    DEVICE void look(int half, bool partial, i32 key) {
        if (partial) {
            Scores masked;
            mask_scores(s[half % BUFFERS], seen, key + half * HALF, masked);
            method.look(masked);
        } else {
            method.look(s[half % BUFFERS]);
        }
    }

    DEVICE void first_scores(const Stage& at) {
        shared.wait_full(at);
#pragma unroll
        for (int half = 0; half < BUFFERS; ++half) issue_scores(half, at.stage);
#pragma unroll
        for (int half = 0; half < BUFFERS; ++half) wgmma_wait(s[half]);
    }

    // Pass 1: the scores' maxima.
    DEVICE void first_pass(i32 tiles, i32 whole, Stage& at) {
        first_scores(at);
#pragma unroll 1
        for (i32 j = 0; j + 1 < tiles; ++j) {
            if constexpr (BUFFERS == 1) {
                look(0, CAUSAL && j >= whole, j * TILE);
                issue_scores(1, at.stage);
                wgmma_wait(s[0]);
            }
            shared.release(at.stage);
            at.next();
            shared.wait_full(at);
#pragma unroll
            for (int half = 2 - BUFFERS; half < 2; ++half) {
                look(half, CAUSAL && j >= whole, j * TILE);
                issue_scores((half + 2 - BUFFERS) % 2, at.stage);
            }
#pragma unroll
            for (int i = 0; i < BUFFERS; ++i) wgmma_wait(s[i]);
        }
        const bool partial = tiles > whole;
        look(0, partial, (tiles - 1) * TILE);
        if constexpr (BUFFERS == 1) {
            issue_scores(1, at.stage);
            wgmma_wait(s[0]);
        }
        look(1, partial, (tiles - 1) * TILE);
        shared.release(at.stage);
        at.next();
    }

    // Exponentials and products of tile j, whose scores are there and looked at; scores of the tile after it.
    template <bool LAST> DEVICE void tile(i32 j, i32 whole, Stage& at) {
        Stage next = at;
        next.next();
        if (!LAST) shared.wait_full(next);
        const u64 v = descriptor<128>(shared.v_tile(at.stage));
        typename Method::P codes[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            method.exponentials(s[half % BUFFERS], codes[half]);
            if ((LAST || CAUSAL) && j >= whole) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    method.keep(codes[half], i / 4, i % 4, seen_bytes(seen, j * TILE + half * HALF, i / 4, i % 4));
            }
            if constexpr (BUFFERS == 2) {
                if (!LAST) issue_scores(half, next.stage);
            } else {
                if (half == 0) issue_scores(1, at.stage);
                else if (!LAST) issue_scores(0, next.stage);
            }
            method.products(codes[half], v + half * 4);
            if (BUFFERS == 1 && !(LAST && half == 1)) wgmma_wait<ROW_SCALES ? 0 : 1>(s[0]);  // 1 would spill
        }
        if constexpr (!LAST && BUFFERS == 2) {
            // in flight: scores 0, products 0, scores 1, products 1. All are waited for in the iteration that issued
            // them: a partial wait for what an earlier one issued makes ptxas wait after every product
            wgmma_wait<3>(s[0]);
            if constexpr (Method::PASSES == 1) look(0, j + 1 >= whole, (j + 1) * TILE);
            wgmma_wait<1>(s[1]);
            if constexpr (Method::PASSES == 1) look(1, j + 1 >= whole, (j + 1) * TILE);
        }
        method.wait();
        if (!LAST) method.settle();
        shared.release(at.stage);
        at = next;
    }

    DEVICE void walk(i32 tiles, i32 whole, Stage& at) {
        first_scores(at);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if constexpr (Method::PASSES == 1) look(half, 0 >= whole, 0);
        method.settle();
        i32 j = 0;
#pragma unroll 1
        for (; j + 1 < tiles; ++j) tile<false>(j, whole, at);
        tile<true>(j, whole, at);
    }

    // Tiles that other warpgroups still need.
    DEVICE void skip(i32 tiles, Stage& at) {
        for (; tiles > 0; --tiles, at.next()) {
            shared.wait_full(at);
            shared.release(at.stage);
        }
    }

    DEVICE void run(u32 batch, u32 head, u32 kv_head, i32 first_row, i32 tiles_of_all) {
        // broadcast, so that the compiler knows it as uniform and keeps addresses of tiles in uniform registers
        const u32 group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
        const i32 first = first_row + (group - 1) * 64;
        const i32 row = first + threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
        const u32 query = shared.query + (group - 1) * 64 * K_WIDTH;
        load_query(p, p.q.ptr + head_offset(p.q, batch, head), first, query, group);
        q = descriptor<K_WIDTH>(query);
        const Walk mine = walk_of(p, first, 64);
        const Scaling scaling = output_scaling<OUT>(p, batch, head, kv_head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            i64 at = head_offset(p.score, batch, head) + min(row + 8 * h, p.nq - 1) * p.score.n;
            Score score = unpack_score(__ldg((const i64*)p.score.ptr + at));
            if (!ROW_SCALES) score = {__shfl_sync(~0u, score.C, 0), __shfl_sync(~0u, score.k, 0)};  // known as uniform
            method.start(h, score);
            seen[h] = CAUSAL ? min(p.nk, row + 8 * h + p.causal + 1) : p.nk;
        }
        method.start(descriptor<128>(shared.ones));
        Stage at;
        if constexpr (Method::PASSES == 2) {
            if (mine.count) first_pass(mine.count, mine.whole, at);
            skip(tiles_of_all - mine.count, at);
            method.between();
        }
        if (mine.count) walk(mine.count, mine.whole, at);
        skip(tiles_of_all - mine.count, at);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row + 8 * h >= p.nq) continue;
            typename Method::Accumulator acc[CHANNELS];
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) acc[i] = method.result(4 * (i / 2) + 2 * h + i % 2);
            i64 to = head_offset(p.out, batch, head) + (row + 8 * h) * p.out.n + threadIdx.x % 4 * CHANNELS;
            store_outputs<OUT>((u8*)element<OUT>(p.out.ptr, to), acc, method.l(h), scaling);
            if (p.l && threadIdx.x % 4 == 0) {
                i64 to = ((i64)batch * gridDim.y + head) * p.nq + row + 8 * h;
                p.t_max[to] = method.t_max(h);
                p.l[to] = method.l(h);
            }
        }
    }
};

template <class Method> DEVICE void attend(const Params& p) {
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared(shared_address(memory));
    const u32 head = blockIdx.y, batch = blockIdx.z, kv_head = key_head(p, head);
    // the last rows see most keys of a causal mask: first
    const i32 row = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full + 8 * i, GROUP);
            barrier_init(shared.empty + 8 * i, 4 * CONSUMERS);
        }
    }
    if (threadIdx.x < GROUP) {
        store_shared(shared.ones + 8 * threadIdx.x, 0x01010101);
        store_shared(shared.ones + 8 * threadIdx.x + 4, 0x01010101);
    }
    publish_shared();
    __syncthreads();
    const i32 tiles = walk_of(p, row, ROWS).count;
    if (threadIdx.x < GROUP) {
        give_registers<CONSUMERS == 3 ? 32 : 40>();
        produce<Method>(p, shared, p.k.ptr + head_offset(p.k, batch, kv_head),
                        p.v.ptr + head_offset(p.v, batch, kv_head), tiles);
    } else {
        take_registers<CONSUMERS == 3 ? 160 : 232>();
        Consumer<Method> consumer(p, shared);
        consumer.run(batch, head, kv_head, row, tiles);
    }
}
