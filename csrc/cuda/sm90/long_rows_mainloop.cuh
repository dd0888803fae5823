// Long rows: one warpgroup loads tiles of 128 keys into a ring in shared memory (Loads), CONSUMERS warpgroups of 64
// rows each compute on them, for one piece of work after another (Turns); one without rows left goes on to the next. A
// method is a struct (stream_integer.cuh, stream_float.cuh); barriers, products and masks are here.
//
// Defined when this is compiled: HEAD_DIM (a multiple of 16), CONSUMERS, CAUSAL (0 or 1), KEY_SCALES (K's: 0 one for a
// head, 1 for each tile of 128 keys, 2 for each key), P_SHARED (1: P goes to the products through shared memory, as
// there are no registers left for it), P_TABLE (1: P is looked up in shared memory, table.cuh), STAGES (of the ring),
// RESIDENT (1: it holds all tiles of a head, which stay there until every row of it has been computed), QUERY (i8, or
// floats with p.q_scale), FLOATS (1: K and V are floats as Q is, with p.k_scale and p.v_scale; see stream_floats.cuh),
// WITHIN (1: no float is past its scale's range), VALUE (of the products: i8, half_t or bfloat_t), OUT.
//
// A tile's exponentials are computed in two halves of 64 keys, or (WHOLE_TILES) at once, in one of two forms; what they
// mean for the row sums and the rows' references then comes apart, in `add` and `decide`. With registers for both
// halves' scores (BUFFERS 2) one product gives both: Q K^T of tile j + 1 and P V of tile j run while other warpgroups
// compute. With registers for one, each half's scores take the other's place.
#pragma once
#include "epilogue.cuh"
#include "exp2_table.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/wgmma.cuh"

typedef i32 Scores[HALF / 2];
// Of a thread; 65,536 in all.
constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

// Tiles of keys that rows [first, end) see, and how many of them are seen whole by every row.
struct Walk {
    i32 count, whole;
    DEVICE Walk(const Params& p, i32 first, i32 end) {
        i32 keys = CAUSAL ? min(p.nk, end + p.causal) : p.nk;
        i32 seen = CAUSAL ? min(p.nk, first + p.causal + 1) : p.nk;
        count = keys > 0 ? (keys + TILE - 1) / TILE : 0;
        whole = seen > 0 ? seen / TILE : 0;
    }
};

// Tiles of keys that are loaded for a turn.
DEVICE i32 tiles_of(const Params& p, const Work& work) { return Walk(p, work.row, work.end).count; }

// --- a warpgroup's rows

// Codes of 64 rows. A warp loads the 16 that its products read, so it waits for no other warp. Copies of codes begin
// before the rows' turn; codes of floats are made when it comes.
struct Query {
    typedef Codes<QUERY, WITHIN> In;
    static constexpr u32 WIDE = K_WIDTH / 16, AT_ONCE = 32 / WIDE, ROUNDS = 16 / AT_ONCE;
    const Params& p;
    const Shared& shared;

    // What a thread loads: one chunk of 16 channels of each of several rows.
    struct Chunks {
        const u8* base;
        u32 to, row, chunk;
        i32 first, last;
        i64 stride;

        DEVICE Chunks(const Query& query, const Work& work, i32 tile) {
            const Params& p = query.p;
            const u32 thread = thread_anew();
            to = query.shared.query_rows(thread / GROUP - 1);
            row = thread % GROUP / 32 * 16 + thread % 32 / WIDE, chunk = thread % WIDE;
            first = work.row + tile * 64 + row, last = p.nq - 1, stride = p.q.n * SIZE<QUERY>;
            base = p.q.ptr + (head_offset(p.q, work.batch, work.head) + (exists() ? chunk * 16 : 0)) * SIZE<QUERY>;
        }
        DEVICE bool exists() const { return chunk < D_CHUNKS; }
        DEVICE const u8* from(u32 i) const { return base + min(first + (i32)(i * AT_ONCE), last) * stride; }
        DEVICE u32 place(u32 i) const { return to + swizzled<K_WIDTH>(row + i * AT_ONCE, chunk); }
    };

    DEVICE void begin(const Work& work, i32 tile) const {
        const Chunks chunks(*this, work, tile);
#pragma unroll
        for (u32 i = 0; i < ROUNDS; ++i) {
            if constexpr (SIZE<QUERY> == 1) copy_16_or_zeros(chunks.place(i), chunks.from(i), chunks.exists());
            else asm volatile("prefetch.global.L2 [%0];" ::"l"(chunks.from(i)));
        }
    }
    DEVICE void end(const Work& work, i32 tile) const {
        if constexpr (SIZE<QUERY> == 1) {
            copies_done();
        } else {
            const Chunks chunks(*this, work, tile);
            const float scale = *head_element<float>(p.q_scale, work.batch, work.head);
            In::Raw<4> raw[ROUNDS];
#pragma unroll
            for (u32 i = 0; i < ROUNDS; ++i) load_words(chunks.from(i), raw[i].word);
            const float inverse = In::usable(__frcp_rn(scale));
#pragma unroll
            for (u32 i = 0; i < ROUNDS; ++i) {
                if (In::far(inverse)) In::bring_near(raw[i], inverse);
                u32 w[4];
                In::codes(raw[i], inverse, w);
#pragma unroll
                for (u32& word : w) word = chunks.exists() ? word : 0;
                store_shared(chunks.place(i), w);
            }
        }
        publish_shared();
        __syncwarp();
    }
};

// The key of a thread's score i, as the products of P want it, from the thread's first one of a half on.
constexpr int LANE_KEYS = FLOAT_VALUES ? 2 : 4;  // neighbouring keys of a thread
DEVICE constexpr int key_of_score(int i) {
    return FLOAT_VALUES ? i / 4 * 8 + i % 2 : i / 8 * 16 + i / 4 % 2 * 2 + i % 2;
}

// Keys that a thread's two rows see, from the thread's first one of a half on; may be below 0.
struct Left {
    i32 keys[2];
    DEVICE bool has(int i) const { return key_of_score(i) < keys[i / 2 % 2]; }
};

// The largest scores of the two rows.
DEVICE void raise_peaks(i32 (&peak)[2], const Scores& s, bool partial, const Left& left) {
    if (partial) {
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], left.has(i) ? s[i] : NO_SCORE);
    } else {
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], s[i]);
    }
}

// How often a turn's keys are loaded.
template <class Method> constexpr int LOADS = RESIDENT ? 1 : Method::PASSES;

template <class Method> struct Consumer {
    static constexpr int BUFFERS = Method::BUFFERS;  // of scores of 64 keys
    const Params& p;
    const Shared& shared;
    Method method;
    Scores s[BUFFERS];
    const Query query;
    u64 q;
    i32 seen[2];
    bool lets_go;  // of tiles that it has walked over: no later walk needs them

    DEVICE Consumer(const Params& p, const Shared& shared) : p(p), shared(shared), query{p, shared} {}

    // Broadcast, so that the compiler knows it as uniform and keeps addresses of tiles in uniform registers.
    DEVICE static u32 group() { return __shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1; }

    DEVICE void release(u32 stage) const {
        if (!RESIDENT || lets_go) shared.release(stage);
    }

    // Of a tile, or of one of its halves where they share a buffer. One product writes all buffers: of two that write
    // them apart, here or there, ptxas waits for each.
    DEVICE void issue_scores(int half, u32 stage) {
        const u64 k = descriptor<K_WIDTH>(shared.k_tile(stage)) + half * (HALF * K_WIDTH >> 4);
        wgmma_order();
        wgmma_s8_new(scores(), q, k);
#pragma unroll
        for (int i = 1; i < D_STEPS; ++i) wgmma_s8(scores(), q + 2 * i, k + 2 * i);
        wgmma_commit();
    }
    typedef i32 Buffers[BUFFERS * HALF / 2];
    DEVICE Buffers& scores() { return *(Buffers*)s; }

    // Scores in flight are written by products only, or the compiler waits for each product: masks do not change them.
    DEVICE void look(int half, bool partial, i32 key) {
        method.look(s[half % BUFFERS], partial, keys_left(half, key));
    }
    DEVICE void look_at_tile(bool partial, i32 j) {
        look(0, partial, j * TILE);
        look(1, partial, j * TILE);
    }
    // Of the halves from `half` on that lie in buffers.
    DEVICE void settle(int half, bool partial, i32 key, u32 stage, float scale) {
        Left left[BUFFERS];
#pragma unroll
        for (int i = 0; i < BUFFERS; ++i) left[i] = keys_left(half + i, key);
        method.settle(s, partial, left, shared.k_scales(stage) + half * (SCALE_BYTES / 2), scale);
    }
    DEVICE void exponentials(int half, bool partial, i32 key, u32 stage, typename Method::P& codes) {
        const u32 scales = shared.k_scales(stage) + half * (SCALE_BYTES / 2);
        method.exponentials(s[half % BUFFERS], partial, keys_left(half, key), scales, codes);
    }
    DEVICE Left keys_left(int half, i32 key) const {
        const i32 first = key + half * HALF + threadIdx.x % 4 * LANE_KEYS;
        return {seen[0] - first, seen[1] - first};
    }

    DEVICE void first_scores(const Stage& at) {
        shared.wait_full(at);
        issue_scores(0, at.stage);
        wgmma_wait(scores());
    }

    // Pass 1: the scores' maxima.
    DEVICE void first_pass(i32 tiles, i32 whole, Stage& at) {
        first_scores(at);
#pragma unroll 1
        for (i32 j = 0; j + 1 < tiles; ++j) {
            const bool partial = CAUSAL && j >= whole;
            if constexpr (BUFFERS == 1) {
                look(0, partial, j * TILE);
                issue_scores(1, at.stage);
                wgmma_wait(scores());
            }
            release(at.stage);
            at.next();
            shared.wait_full(at);
            if constexpr (BUFFERS == 2) look(0, partial, j * TILE);
            look(1, partial, j * TILE);
            issue_scores(0, at.stage);
            wgmma_wait(scores());
        }
        const bool partial = tiles > whole;
        look(0, partial, (tiles - 1) * TILE);
        if constexpr (BUFFERS == 1) {
            issue_scores(1, at.stage);
            wgmma_wait(scores());
        }
        look(1, partial, (tiles - 1) * TILE);
        release(at.stage);
        at.next();
    }

    // Exponentials and products of tile j, whose scores are there (two buffers: looked at and settled too); scores of
    // the tile after it, of which rows see all keys unless EDGE says that they may not. FITS: of WHOLE_TILES, the form.
    template <bool LAST, bool EDGE, bool FITS> DEVICE void tile(i32 j, i32 whole, Stage& at) {
        Stage next = at;
        next.next();
        if (!LAST) shared.wait_full(next);
        // of the tile that will be settled here
        const float scale = method.tile_scale(shared.k_scales(BUFFERS == 2 && !LAST ? next.stage : at.stage));
        const u32 values = shared.v_tile(at.stage);
        const u64 v = FLOAT_VALUES ? columns_descriptor<V_BLOCK>(values) : descriptor<128>(values);
        const bool partial = (LAST || CAUSAL) && j >= whole;
        typename Method::P codes[2];
        if constexpr (BUFFERS == 2) {
            if constexpr (Method::WHOLE_TILES) {
                const Left left[2] = {keys_left(0, j * TILE), keys_left(1, j * TILE)};
                method.template exponentials<FITS>(s, partial, left, codes);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (!Method::WHOLE_TILES) exponentials(half, partial, j * TILE, at.stage, codes[half]);
                method.keep(codes[half], half);
            }
            if (!LAST) issue_scores(0, next.stage);
#pragma unroll
            for (int half = 0; half < 2; ++half) method.products(codes[half], half, v + half * V_HALF);
            if constexpr (Method::WHOLE_TILES) method.add(codes[0]), method.add(codes[1]);  // while they run
            if constexpr (!LAST) {
                // in flight: scores, products, products. All are waited for in the iteration that issued them: a
                // partial wait for what an earlier one issued makes ptxas wait after every product
                wgmma_wait<2>(scores());
                if constexpr (Method::SETTLES) look_at_tile(EDGE && j + 1 >= whole, j + 1);
                if constexpr (Method::WHOLE_TILES) method.decide();
            }
            method.wait();
            if constexpr (Method::SETTLES && !LAST)
                settle(0, EDGE && j + 1 >= whole, (j + 1) * TILE, next.stage, scale);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (Method::SETTLES) {
                    look(half, partial, j * TILE);
                    settle(half, partial, j * TILE, at.stage, scale);
                }
                exponentials(half, partial, j * TILE, at.stage, codes[half]);
                if (half == 0) issue_scores(1, at.stage);
                else if (!LAST) issue_scores(0, next.stage);
                method.products(codes[half], half, v + half * V_HALF);
                if (!(LAST && half == 1)) wgmma_wait<Method::IN_FLIGHT>(scores());
            }
            method.wait();
        }
        release(at.stage);
        at = next;
    }

    DEVICE void walk(i32 tiles, i32 whole, Stage& at) {
        if constexpr (Method::WHOLE_TILES)
            if (!method.fits) return walk_as<false>(tiles, whole, at);
        walk_as<true>(tiles, whole, at);
    }
    template <bool FITS> DEVICE void walk_as(i32 tiles, i32 whole, Stage& at) {
        first_scores(at);
        if constexpr (Method::SETTLES && BUFFERS == 2) {
            look_at_tile(0 >= whole, 0);
            if constexpr (Method::WHOLE_TILES) method.decide();
            settle(0, 0 >= whole, 0, at.stage, method.tile_scale(shared.k_scales(at.stage)));
        }
        i32 j = 0;
        // Where tiles are short, masks in the loop cost: instructions are fetched past them.
        constexpr bool EDGE = CAUSAL || !FITS || !Method::WHOLE_TILES;
#pragma unroll(FITS ? Method::UNROLL : 1)
        for (; j + 1 + !EDGE < tiles; ++j) tile<false, EDGE, FITS>(j, whole, at);
        if (!EDGE && j + 1 < tiles) tile<false, true, FITS>(j++, whole, at);
        tile<true, true, FITS>(j, whole, at);
    }

    // Tiles that other warpgroups still need.
    DEVICE void skip(i32 tiles, Stage& at) {
#pragma unroll 1
        for (; tiles > 0; --tiles, at.next()) {
            shared.wait_full(at);
            __syncwarp();  // a lane far behind could find the ring full again
            shared.release(at.stage);
        }
    }

    // All of 64 rows but their output. last: this warpgroup has no later ones in the turn.
    DEVICE void attend(const Work& work, i32 tile, bool last, Stage& at) {
        const i32 first = work.row + tile * 64, tiles = tiles_of(p, work);
        const Walk mine(p, first, min(first + 64, work.end));
        const Place place = work.place(threadIdx.x, tile);
        q = descriptor<K_WIDTH>(shared.query_rows(group()));
        query.end(work, tile);
#pragma unroll
        for (int h = 0; h < 2; ++h) seen[h] = CAUSAL ? min(p.nk, place.row + 8 * h + p.causal + 1) : p.nk;
        if (CAUSAL) wgmma_hold(seen);  // or it would be computed anew in every tile
        method.start(p, place, shared);
        if constexpr (Method::PASSES == 2) {
            lets_go = false;
            if (mine.count) first_pass(mine.count, mine.whole, at);
            if (RESIDENT) at.back(tiles);
            else skip(tiles - mine.count, at);
            method.between(shared);
        }
        lets_go = last;
        if (mine.count) walk(mine.count, mine.whole, at);
        if (!RESIDENT) skip(tiles - mine.count, at);
        else if (!last) at.back(tiles);
    }

    // The program's tiles of 64 rows, in turn with the other warpgroups: `tile` from the start of a turn on.
    DEVICE void run() {
        Stage at;
        Turns turn(p), next = turn;
        i32 tile = group();
        Work work = find(next, tile);
        while (true) {
#pragma unroll 1
            for (; turn.i != next.i; turn.next(p)) skip(LOADS<Method> * tiles_of(p, turn.work(p)), at);
            if (turn.done(p)) break;
            attend(work, tile, tile + CONSUMERS >= work.tiles(), at);
            const Work from = work;
            const i32 done = tile;
            tile += CONSUMERS;
            if (!CAUSAL) work = find(next, tile);
            method.store(p, from.place(thread_anew(), done));
            if (CAUSAL) break;  // a program has one piece
            if (turn.i != next.i) turn.next(p);
        }
    }
    // The turn in which a tile is; its Q is on the way.
    DEVICE Work find(Turns& turn, i32& tile) const {
        Work work = turn.work(p);
#pragma unroll 1
        while (!turn.done(p) && tile >= work.tiles()) {
            tile -= work.tiles();
            turn.next(p);
            work = turn.work(p);
        }
        if (!turn.done(p)) query.begin(work, tile);
        return work;
    }
};

template <class Method, class Loads> DEVICE void attend(const Params& p, Loads loads) {
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared(shared_address(memory));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full + 8 * i, Loads::ARRIVALS);
            barrier_init(shared.empty + 8 * i, 4 * CONSUMERS);
        }
    }
    static_assert(!P_TABLE || TABLE_BYTES == 256 * WORD_BYTES);
    if constexpr (P_TABLE) fill_table(shared.table);
    publish_shared();
    __syncthreads();
    await_previous();
    let_next_start();
    if (threadIdx.x < GROUP) {
        give_registers<LOADER_REGISTERS>();
        Stage at;
#pragma unroll 1
        for (Turns turn(p); !turn.done(p); turn.next(p)) {
            const Work work = turn.work(p);
            loads.template run<LOADS<Method>>(p, shared, work.batch, work.kv_head, tiles_of(p, work), at);
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        loads.help(p, shared);
        Consumer<Method>(p, shared).run();
    }
}
