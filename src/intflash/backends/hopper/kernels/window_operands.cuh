// K and V of a window as operands of a warp's products. Compile-time constants: see windows.cu.
#pragma once
#include "mma.cuh"
#include "quantize.cuh"

typedef Codes<IN> In;

// Keys in groups of 16, a word of four p for each lane of a quad: half a step of P V. Two tiles of scores make a group;
// the first of them is enough for a last group of one or two keys (49 = 3 * 16 + 1).
constexpr int GROUPS = (NK + 15) / 16, STEPS = (GROUPS + 1) / 2, LAST = NK - 16 * (GROUPS - 1);
constexpr bool ODD_TILES = LAST <= 2;
constexpr int KEY_TILES = 2 * GROUPS - ODD_TILES;  // of Q K^T: 8 keys
constexpr int WORDS = HEAD_DIM / 16;          // of four codes: channels of a row of Q or K in one lane of a quad
constexpr int BLOCKS = (HEAD_DIM + 31) / 32;  // of 32 channels of V: four for each lane's g
constexpr int DIGITS = BITS / 8;
// The one row of a last tile, as 49 = 3 * 16 + 1 has it, is computed by other products (`tail`), by the last part.
constexpr bool TAIL = NQ % 16 == 1;
constexpr int HALVES = ROWS / 8;
constexpr int ROW_TILES = (NQ - TAIL + ROWS - 1) / ROWS;
constexpr int ROW_PARTS = PARTS > ROW_TILES ? PARTS - TAIL : PARTS;  // the tail may be a part of its own
constexpr int TILES = ROW_PARTS ? (ROW_TILES + ROW_PARTS - 1) / ROW_PARTS : 0;  // of a part
constexpr bool SHARED = PARTS > 1 && SIZE<IN> > 1;  // floats: each warp makes the codes of some keys for all

// Slots (bytes of a word) of a group in which some lane has a key.
DEVICE constexpr int live(int group) { return group < GROUPS - 1 || LAST > 4 ? 4 : LAST; }
DEVICE u32 slot_key(int group, u32 quarter, int slot) { return 16 * group + 4 * quarter + slot; }
// The key that column `column` of a tile of scores stands for: accumulators become P's words in place.
DEVICE u32 score_key(int tile, u32 column) { return tile / 2 * 16 + tile % 2 * 2 + column / 2 * 4 + column % 2; }
// Keys that do not exist repeat the last one.
DEVICE u32 existing(u32 key, int group) { return group < GROUPS - 1 ? key : min(key, NK - 1); }
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
    const u8* base = (const u8*)element<IN>(x.ptr, (u64)batch * (u32)x.b + (u64)head * (u32)x.h);
    asm("" : "+l"(base));  // so that no offset in a window is computed in 64 bits
    return base;
}

// A row of Q or K: this lane's quarter of its channels, in any order as long as Q and K have the same.
struct Row {
    In::Raw<WORDS> raw;

    DEVICE void load(const u8* base, u32 stride, u32 row) {
        load_words(base + (row * stride + threadIdx.x % 4 * (HEAD_DIM / 4)) * SIZE<IN>, raw.word);
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
            load_words(base + (existing(slot_key(group, quarter, i), group) * stride + channel) * SIZE<IN>,
                              raw[i].word);
    }
    // Word j: the keys of channel j. What the bytes of missing slots hold is multiplied by 0. (In::turned, without the
    // transposition, was slower here where the scales are the heads' own.)
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
            const u32 key = SHARES > 1 ? min(8 * t + g, NK - 1) : existing(score_key(t, g), t / 2);
            if (has_tile(share, i)) row[i].load(base, stride, key);
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
    // Where row 8 t + lane / 4 of K belongs: 32 times the tile of its scores, and the lane of its column there.
    static DEVICE u32 tile_place(u32 t, u32 lane) {
        const u32 g = lane / 4;
        if (ODD_TILES && t == KEY_TILES - 1) return 32 * t + lane;
        return 32 * (t / 2 * 2 + g / 2 % 2) + 4 * (t % 2 * 4 + g / 4 * 2 + g % 2) + lane % 4;
    }
    DEVICE void bring_near(float k_inverse, float v_inverse) {
        if (In::far(k_inverse)) {
#pragma unroll
            for (Row& x : row) In::bring_near(x.raw, k_inverse);
        }
        if (In::far(v_inverse)) {
#pragma unroll
            for (Square& x : square)
#pragma unroll
                for (auto& raw : x.raw) In::bring_near(raw, v_inverse);
        }
    }
    DEVICE void exchange(float k_inverse, float v_inverse, u32 share, KeysValues& to) const {
        __shared__ Words<WORDS> k[KEY_TILES][32];
        __shared__ Words<4> v[GROUPS * BLOCKS][32];
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < K_MOST; ++i) {
            Words<WORDS> w;
            In::codes(row[i].raw, k_inverse, w.word);
            if (has_tile(share, i)) k[0][tile_place(tile(share, i), lane)] = w;
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
            to.v[i][j] = load_late((const u32*)from);
        }
}
#endif
