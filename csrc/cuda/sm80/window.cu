// The window attention kernel, for at most 64 queries and keys (Swin's windows). One warp computes a head of a window
// or, while there are few windows, some of its row tiles. Q, K, V, P and the output stay in registers; only the warps
// that share a window of floats exchange their codes through shared memory.
//
// Macros:
//   NQ, NK               number of queries and keys, 1 to 64
//   HEAD_DIM             16, 32, 48 or 64
//   BITS                 of p, 8 or 16
//   TWO_GROUPS          1: intflash_bfp, with BITS 16
//   IN, OUT              the types of Q, K, V and of the output
//   KEY_MAJOR            1: V has contiguous keys
//   PACKED               1: Q, K, V and the output have rows of HEAD_DIM elements without gaps
//   ROW_SCALES           1: Q has a scale for each token
//   HEAD_AMAX_IN_KERNEL  1: the kernel computes the scales of floats from each head's own maxima
//   BIAS, KEEP           0: none, 1: with contiguous keys, 2: one value for all keys
//   BIAS_FRACTION_BITS   of the bias, an int32 number of octaves, where there is one
//   WARPS_PER_WINDOW     warps that share a window
//   TILE_ROWS            rows of a warp's tile: 16, or 8 where many warps share a window
//   WINDOWS_PER_CTA      windows of a CTA; 1 where WARPS_PER_WINDOW > 1
//   CTAS_PER_SM          CTAs per multiprocessor, which bounds the registers of a thread
#include "epilogue.cuh"
#include "exp2.cuh"
#include "mma.cuh"
#include "quantize.cuh"
#include "sm80/window_mask.cuh"
#include "two_groups.cuh"

// --- K and V of a window as operands of a warp's products

typedef Codes<IN> In;

// Keys are processed in groups of 16: a word of four p for each lane of a quad, which is half a step of P V. A group
// has two tiles of scores; the first alone is enough for a last group of one or two keys (49 = 3 * 16 + 1).
constexpr int GROUPS = (NK + 15) / 16, STEPS = (GROUPS + 1) / 2, LAST = NK - 16 * (GROUPS - 1);
constexpr bool ODD_TILES = LAST <= 2;
constexpr int KEY_TILES = 2 * GROUPS - ODD_TILES;  // tiles of 8 keys in Q K^T
// words of four codes: the channels of a row of Q or K that one lane of a quad holds
constexpr int WORDS = HEAD_DIM / 16;
constexpr int BLOCKS = (HEAD_DIM + 31) / 32;  // blocks of 32 channels of V, four channels for each g
constexpr int DIGITS = BITS / 8;
// A single row in the last tile, as in 49 = 3 * 16 + 1, is computed by other products (`remainder_row`), by the last
// warp of the window.
constexpr bool REMAINDER_ROWS = NQ % 16 == 1;
constexpr int HALVES = TILE_ROWS / 8;
constexpr int ROW_TILES = (NQ - REMAINDER_ROWS + TILE_ROWS - 1) / TILE_ROWS;
constexpr int ROW_PARTS = WARPS_PER_WINDOW > ROW_TILES ? WARPS_PER_WINDOW - REMAINDER_ROWS
                                                       : WARPS_PER_WINDOW;  // the remainder row may have its own warp
constexpr int TILES = ROW_PARTS ? (ROW_TILES + ROW_PARTS - 1) / ROW_PARTS : 0;  // tiles of a warp
// each warp quantizes some keys for all warps of the window
constexpr bool SHARE_CODES = WARPS_PER_WINDOW > 1 && SIZE<IN> > 1;

// Number of slots (bytes of a word) of a group in which any lane has a key.
DEVICE constexpr int used_slots(int group) { return group < GROUPS - 1 || LAST > 4 ? 4 : LAST; }
DEVICE u32 slot_key(int group, u32 quarter, int slot) { return 16 * group + 4 * quarter + slot; }
// Returns the key of column `column` of a score tile. The order lets accumulators become P's words in place.
DEVICE u32 score_key(int tile, u32 column) { return tile / 2 * 16 + tile % 2 * 2 + column / 2 * 4 + column % 2; }
// Keys past the last one repeat it.
DEVICE u32 clamped_key(u32 key, int group) { return group < GROUPS - 1 ? key : min(key, NK - 1); }
// Returns a mask of the bytes of the last group's word whose keys exist.
DEVICE u32 present_bytes(u32 quarter) {
  u32 bytes = 0;
#pragma unroll
  for (int i = 0; i < used_slots(GROUPS - 1); ++i)
    if (slot_key(GROUPS - 1, quarter, i) < NK) bytes |= 0xFFu << (8 * i);
  return bytes;
}

DEVICE u32 row_stride(const View& x) { return PACKED ? HEAD_DIM : (u32)x.n; }
DEVICE const u8* head_base(const View& x, u32 batch, u32 head) {
  const u8* base = (const u8*)element<IN>(x.ptr, (u64)batch * (u32)x.b + (u64)head * (u32)x.h);
  asm("" : "+l"(base));  // keeps the offsets within a window in 32 bits
  return base;
}

// A row of Q or K: this lane's quarter of the channels. Their order does not matter as long as it is the same in Q and
// K.
struct RowFragment {
  In::Raw<WORDS> raw;

  DEVICE void load(const u8* base, u32 stride, u32 row) {
    load_words(base + (row * stride + threadIdx.x % 4 * (HEAD_DIM / 4)) * SIZE<IN>, raw.word);
  }
};

template <int COUNT>
struct alignas(COUNT % 4 == 0   ? 16
               : COUNT % 2 == 0 ? 8
                                : 4) Words {
  u32 word[COUNT];
};

// Four keys of V by four channels: the keys of lane quarter `quarter` of a group, and the channels from 4 g on of a
// block.
struct ValueFragment {
  In::Raw<1> raw[4];

  static DEVICE constexpr int slots(int group) { return SHARE_CODES ? 4 : used_slots(group); }

  DEVICE void load(const u8* base, u32 stride, int group, int block, u32 g, u32 quarter) {
    const u32 channel = HEAD_DIM % 32 ? min(32 * block + 4 * g, HEAD_DIM - 4) : 32 * block + 4 * g;
#pragma unroll
    for (int i = 0; i < slots(group); ++i)
      load_words(base + (clamped_key(slot_key(group, quarter, i), group) * stride + channel) * SIZE<IN>, raw[i].word);
  }
  // Word j of `w` receives the keys of channel j. P is 0 for slots without keys, so that their bytes may hold anything.
  // In::transposed, which does without this transposition, takes longer here with HEAD_AMAX_IN_KERNEL.
  DEVICE void transpose(int group, float inv, u32 (&w)[4]) const {
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

// K and V as operands. Each tile of 8 keys, and each fragment of V, has one set of words.
struct KvOperands {
  u32 k[KEY_TILES][WORDS], v[GROUPS * BLOCKS][4];

  // Words 2i and 2i + 1 of a tile. Channels past the last one are 0.
  DEVICE OperandB keys(int tile, int i) const { return {k[tile][2 * i], 2 * i + 1 < WORDS ? k[tile][2 * i + 1] : 0}; }
  DEVICE u32 at(int group, int block, int j) const { return group < GROUPS ? v[group * BLOCKS + block][j] : 0; }
  DEVICE OperandB values(int step, int b, int j) const { return {at(2 * step, b, j), at(2 * step + 1, b, j)}; }
  DEVICE OperandA channels(int step, int b, int j) const {  // channels of j and j + 1 as rows
    return {at(2 * step, b, j), at(2 * step, b, j + 1), at(2 * step + 1, b, j), at(2 * step + 1, b, j + 1)};
  }
};

// Loads and quantizes the part of K and V that one of SHARES warps has: every SHARES-th tile of K and fragment of V.
template <int SHARES>
struct WindowLoader {
  static constexpr int K_MOST = (KEY_TILES + SHARES - 1) / SHARES, V_MOST = (GROUPS * BLOCKS + SHARES - 1) / SHARES;
  RowFragment row[K_MOST];
  ValueFragment fragment[V_MOST];

  // the warps with the first fragments of V have the last tiles of K
  static DEVICE int tile(u32 share, int i) { return i * SHARES + (SHARES - 1 - share); }
  static DEVICE int block(u32 share, int i) { return i * SHARES + share; }
  static DEVICE bool has_tile(u32 share, int i) { return SHARES == 1 || tile(share, i) < KEY_TILES; }
  static DEVICE bool has_block(u32 share, int i) { return SHARES == 1 || block(share, i) < GROUPS * BLOCKS; }

  DEVICE void load_keys(const u8* base, u32 stride, u32 g, u32 share) {
#pragma unroll
    for (int i = 0; i < K_MOST; ++i) {
      const int t = tile(share, i);
      const u32 key = SHARES > 1 ? min(8 * t + g, NK - 1) : clamped_key(score_key(t, g), t / 2);
      if (has_tile(share, i)) row[i].load(base, stride, key);
    }
  }
  DEVICE void load_values(const u8* base, u32 stride, u32 g, u32 quarter, u32 share) {
#pragma unroll
    for (int i = 0; i < V_MOST; ++i) {
      const int b = block(share, i);
      if (has_block(share, i)) fragment[i].load(base, stride, b / BLOCKS, b % BLOCKS, g, quarter);
    }
  }
  DEVICE void codes(float k_inverse, float v_inverse, KvOperands& to) const {
#pragma unroll
    for (int i = 0; i < KEY_TILES; ++i) In::codes(row[i].raw, k_inverse, to.k[i]);
#pragma unroll
    for (int i = 0; i < GROUPS * BLOCKS; ++i)
      if (!KEY_MAJOR) fragment[i].transpose(i / BLOCKS, v_inverse, to.v[i]);
  }
  // Returns where row 8 t + lane / 4 of K belongs: 32 times the tile of its scores, plus the lane of its column there.
  static DEVICE u32 tile_place(u32 t, u32 lane) {
    const u32 g = lane / 4;
    if (ODD_TILES && t == KEY_TILES - 1) return 32 * t + lane;
    return 32 * (t / 2 * 2 + g / 2 % 2) + 4 * (t % 2 * 4 + g / 4 * 2 + g % 2) + lane % 4;
  }
  DEVICE void clamp_far_values(float k_inverse, float v_inverse) {
    if (In::has_far_values(k_inverse)) {
#pragma unroll
      for (RowFragment& x : row) In::clamp_far_values(x.raw, k_inverse);
    }
    if (In::has_far_values(v_inverse)) {
#pragma unroll
      for (ValueFragment& x : fragment)
#pragma unroll
        for (auto& raw : x.raw) In::clamp_far_values(raw, v_inverse);
    }
  }
  DEVICE void exchange(float k_inverse, float v_inverse, u32 share, KvOperands& to) const {
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
      fragment[i].transpose(block(share, i) / BLOCKS, v_inverse, w.word);
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
DEVICE void load_key_major(const View& x, const u8* base, u32 g, u32 quarter, KvOperands& to) {
#pragma unroll
  for (int i = 0; i < GROUPS * BLOCKS; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 channel = min(i % BLOCKS * 32 + 4 * g, HEAD_DIM - 4) + j;
      const u8* from = base + channel * (u32)x.d + slot_key(i / BLOCKS, quarter, 0);
      to.v[i][j] = load_volatile((const u32*)from);
    }
}
#endif

// --- the output of rows of at most 64 keys: 32-bit accumulators, and a row sum below 2^22

// Stores adjacent outputs of one row. `OutputPacker` distinguishes three forms of integers, this function two, and it
// clamps to -QMAX without a test: with int8 output, large batches take 2% less time this way.
template <typename TO, int COUNT>
DEVICE void store_window(u8* to, const i32 (&acc)[COUNT], const RowScale<TO, i32>& row, const OutputConstants& s) {
  if constexpr (!IsInteger<TO>::value) {
    store_outputs<TO>(to, acc, row, s);
  } else {
    constexpr int QMAX = sizeof(TO) == 1 ? 127 : 32767;
    i32 o[COUNT];
    if (high_word_suffices(s.packed)) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) o[i] = scaled_by_high_word(acc[i], row.n);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) o[i] = clamped<QMAX>(scaled(acc[i], row.n));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      o[i] = sizeof(TO) == 1 ? max(o[i], -QMAX) : clamped<QMAX>(o[i]);  // pack_bytes saturates
    u32 w[COUNT * sizeof(TO) / 4];
    OutputPacker<TO, i32, COUNT>::pack(o, w);
    store_words(to, w);
  }
}

// --- the kernel

#if TWO_GROUPS
// Computes p of four slots from their T, or from their scores.
DEVICE void four_p_of(const i64 (&t)[4], i32, i64 B, u32 (&w)[2]) {
  four_group_p(t, B + (GROUP_K0 - K0), Rounding(), w);
}
DEVICE void four_p_of(const i32 (&s)[4], i32 C, i64 B, u32 (&w)[2]) {
  four_group_p(s[0], s[1], s[2], s[3], C, B + (GROUP_K0 - K0), Rounding(), w);
}
#else
DEVICE void four_p_of(const Exponent (&x)[4], i32 C, i64 B, u32 (&w)[DIGITS]) {
  four_p({power(depth_of(x[0], C, B)), power(depth_of(x[1], C, B)), power(depth_of(x[2], C, B)),
          power(depth_of(x[3], C, B))},
         w);
}
#endif

// Computes p of up to four slots, one word for each digit. The contents of slots from SLOT_COUNT on are undefined.
template <int SLOT_COUNT>
DEVICE void p_words(const Exponent (&x)[4], i32 C, i64 B, u32 (&w)[DIGITS]) {
  four_p_of({x[0], x[SLOT_COUNT > 1], x[SLOT_COUNT > 2 ? 2 : 0], x[SLOT_COUNT > 3 ? 3 : 0]}, C, B, w);
}
// The same of a group's slots that have keys.
DEVICE void group_words(int group, const Exponent (&x)[4], i32 C, i64 B, u32 (&w)[DIGITS]) {
  if (group < GROUPS - 1)
    p_words<4>(x, C, B, w);
  else
    p_words<used_slots(GROUPS - 1)>(x, C, B, w);
}

struct Window {
  const Params& p;
  u32 batch, head, kv_head, g, quarter;
  Scales<IN, HEAD_AMAX_IN_KERNEL> scales;
  KvOperands kv;
  OutputConstants output_constants;
  Score score;

#if HEAD_AMAX_IN_KERNEL
  // The scales from the head's own maxima. Each warp of the window computes them.
  DEVICE void find_scales() {
    const u32 most[3] = {largest<NQ>(p.q, head), largest<NK>(p.k, kv_head), largest<NK>(p.v, kv_head)};
    scales.q = scale_of_magnitude<IN>(__reduce_max_sync(~0u, most[0]));
    scales.k = scale_of_magnitude<IN>(__reduce_max_sync(~0u, most[1]));
    scales.v = scale_of_magnitude<IN>(__reduce_max_sync(~0u, most[2]));
  }
  template <int COUNT>
  DEVICE u32 largest(const View& x, u32 its_head) const {
    constexpr int ROUNDS = (COUNT * HEAD_DIM * SIZE<IN> / 16 + 31) / 32, AT_ONCE = ROUNDS < 8 ? ROUNDS : 8;
    return largest_magnitude<IN, HEAD_DIM, 32, AT_ONCE>(head_base(x, batch, its_head), row_stride(x) * SIZE<IN>, COUNT,
                                                        threadIdx.x % 32);
  }
#endif
  DEVICE Score row_score(u32 row) const { return ROW_SCALES ? head_score(row) : score; }
  DEVICE Score head_score(u32 row) const {
    if constexpr (SIZE<IN> == 1)
      return unpack_score(((const i64*)p.score.ptr)[head_offset(p.score, batch, head) + row * p.score.n]);
    else
      return score_constants(scales.q, scales.k, p.sm_scale);
  }

  // Returns the bytes of this lane's keys of a group whose codes are 0 in the channels that this lane has or, with
  // ALL_CHANNELS, in all.
  template <bool ALL_CHANNELS>
  DEVICE u32 zeros_of(int group) const {
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4 * BLOCKS; ++i) codes |= kv.v[group * BLOCKS + i / 4][i % 4];
    if constexpr (ALL_CHANNELS) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) codes |= __shfl_xor_sync(~0u, codes, step);
    }
    return __vcmpeq4(codes, 0) & present_bytes_of(group);
  }
  template <bool ALL_CHANNELS>
  DEVICE bool has_zeros() const {
    u32 some = 0;
#pragma unroll
    for (int t = 0; t < GROUPS; ++t) some |= zeros_of<ALL_CHANNELS>(t);
    return __any_sync(~0u, some);
  }
  DEVICE u32 present_bytes_of(int group) const { return group < GROUPS - 1 ? ~0u : present_bytes(quarter); }

  // Makes P of a row's keys with a value, where others have none, and the sum of theirs.
  DEVICE SplitRow split_row(const Exponent (&x)[GROUPS][4], i32 C, u32 (&words)[GROUPS][DIGITS]) const {
    u32 zeros[GROUPS];  // computed again for each row, because no registers are left for them in other windows
#pragma unroll
    for (int t = 0; t < GROUPS; ++t) zeros[t] = zeros_of<true>(t);
    Exponent value = NO_KEY, other = NO_KEY;  // the maxima of keys with a value, and of those without
#pragma unroll
    for (int t = 0; t < GROUPS; ++t)
#pragma unroll
      for (int i = 0; i < used_slots(t); ++i) {
        const u32 bit = 1u << (8 * i);
        const Exponent of_value = present_bytes_of(t) & ~zeros[t] & bit ? x[t][i] : NO_KEY;
        const Exponent of_other = zeros[t] & bit ? x[t][i] : NO_KEY;
        value = value > of_value ? value : of_value, other = other > of_other ? other : of_other;
      }
    value = quad_max(value), other = quad_max(other);
    const auto exponent = [&](Exponent x) { return x == NO_KEY ? ABSENT_T : row_max_exponent(x, C); };
    SplitRow row = SplitRow::of_maxima(exponent(value), exponent(other));
    u32 l[DIGITS] = {};
#pragma unroll
    for (int t = 0; t < GROUPS; ++t) {
      u32 w[DIGITS];
      group_words(t, x[t], C, exp_offset(row.origin) - ((i64)row.other << 32), w);
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) l[digit] = add_bytes(w[digit] & zeros[t], l[digit]);
      group_words(t, x[t], C, exp_offset(row.origin), w);
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) words[t][digit] = w[digit] & present_bytes_of(t) & ~zeros[t];
    }
    const u32 other_l = quad_sum((l[0] << 8) + l[DIGITS - 1]);  // of all lanes, whichever rows have such keys
    row.other_l = other == NO_KEY ? 0 : other_l;
    return row;
  }
  // Stores a row of such a window. value_l: the sum of P of its keys with a value.
  DEVICE void store_split(const SplitRow& split, u32 value_l, const i32 (&acc)[BLOCKS][8], u32 row) const {
    const i32 fraction = fraction_bits(NK);
    const RowSum all = split.sum(value_l, fraction);
    const GapScale<OUT> scale(all.l, all.gap, output_constants);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      P16Accumulator mine[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) mine[i] = {acc[b][i] >> 8, acc[b][i] & 255};
      u32 w[8 * sizeof(OUT) / 4];
      scale.outputs(mine, w);
      if (HEAD_DIM % 32 == 0 || 32 * b + 8 * quarter < HEAD_DIM) store_words(output(row, 32 * b + 8 * quarter), w);
    }
    if (p.l && quarter == 0) store_statistics(row, split.origin + all.level(fraction), all.l);
  }

  // Computes row `row` of this lane and, where a tile has 16 rows, row + 8. SPLIT: in a window where some keys have no
  // value.
  template <bool SPLIT>
  DEVICE void tile(RowFragment (&q)[HALVES], u32 row) const {
    u32 codes[2][WORDS] = {};
    if (In::has_far_values(scales.q_inverse)) {
#pragma unroll
      for (RowFragment& x : q) In::clamp_far_values(x.raw, scales.q_inverse);
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) In::codes(q[h].raw, scales.q_inverse, codes[h]);
    i32 s[KEY_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < (WORDS + 1) / 2; ++i) {
      const bool both = 2 * i + 1 < WORDS;
      const u32 upper[2] = {both ? codes[0][2 * i + 1] : 0, both ? codes[1][2 * i + 1] : 0};
      const OperandA a = {codes[0][2 * i], codes[1][2 * i], upper[0], upper[1]};
#pragma unroll
      for (int t = 0; t < KEY_TILES; ++t) mma_s8_s8(s[t], a, kv.keys(t, i));
    }
    OperandA steps[DIGITS][STEPS] = {};
    i64 top[HALVES];
    SplitRow split[HALVES];
    Score units[HALVES];  // first, so that no branch stands between the loads of both rows' biases
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const Score unit = units[h] = row_score(min(row + 8 * h, NQ - 1));
      if (unit.k) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) s[i][2 * h] <<= unit.k, s[i][2 * h + 1] <<= unit.k;
      }
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const u32 r = min(row + 8 * h, NQ - 1);
      const Score unit = units[h];
      const Masks masks(p, batch, head, r);
      Exponent x[GROUPS][4], peak;  // keys past the last one repeat it
#pragma unroll
      for (int t = 0; t < GROUPS; ++t)
#pragma unroll
        for (int i = 0; i < used_slots(t); ++i) {
          const u32 key = clamped_key(slot_key(t, quarter, i), t);
          x[t][i] = masks.exponent_of(s[2 * t + i / 2][2 * h + i % 2], unit.C, key);
          peak = t + i && peak > x[t][i] ? peak : x[t][i];
        }
      if constexpr (SPLIT) {
        u32 words[GROUPS][DIGITS];
        split[h] = split_row(x, unit.C, words);
#pragma unroll
        for (int t = 0; t < GROUPS; ++t)
#pragma unroll
          for (int digit = 0; digit < DIGITS; ++digit) steps[digit][t / 2].word[t % 2 * 2 + h] = words[t][digit];
        continue;
      }
      top[h] = row_max_exponent(quad_max(peak), unit.C);
      const i64 B = exp_offset(top[h]);
#pragma unroll
      for (int t = 0; t < GROUPS; ++t) {
        u32 w[DIGITS];
        group_words(t, x[t], unit.C, B, w);
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit)
          steps[digit][t / 2].word[t % 2 * 2 + h] =
              t < GROUPS - 1 || LAST == 16 ? w[digit] : w[digit] & present_bytes(quarter);
      }
    }
    let_next_kernel_start();  // before the exponentials it would take longer
    i32 sums[DIGITS][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) mma_u8_s8(sums[digit], steps[digit][i], {0x01010101, 0x01010101});
    i32 out[2][BLOCKS][8];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        i32 acc[DIGITS][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
          for (int digit = 0; digit < DIGITS; ++digit) mma_u8_s8(acc[digit], steps[digit][i], kv.values(i, b, j));
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i / 2][b][i % 2 * 4 + j] = combine_digits(acc, i);
      }
    u32 l[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) l[h] = combine_digits(sums, 2 * h);
    if constexpr (SPLIT) {
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
        if (row + 8 * h < NQ) store_split(split[h], l[h], out[h], row + 8 * h);
      return;
    }
    RowScale<OUT, i32> scale[HALVES];
    row_scales(l[computes_second_row() ? HALVES - 1 : 0], output_constants, scale);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      if (row + 8 * h >= NQ - REMAINDER_ROWS) continue;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        if (HEAD_DIM % 32 == 0 || 32 * b + 8 * quarter < HEAD_DIM)
          store_window<OUT>(output(row + 8 * h, 32 * b + 8 * quarter), out[h][b], scale[h], output_constants);
      if (p.l && quarter == 0) store_statistics(row + 8 * h, top[h], l[h]);
    }
  }

  // Returns 256 high + low, below 2^31 for at most 64 keys.
  static DEVICE i32 combine_digits(const i32 (&x)[DIGITS][4], int i) {
    return DIGITS == 1 ? x[0][i] : (x[0][i] << 8) + x[DIGITS - 1][i];
  }

  DEVICE u8* output(u32 row, u32 channel) const {
    const u64 first = (u64)batch * (u32)p.out.b + (u64)head * (u32)p.out.h;
    return (u8*)element<OUT>(p.out.ptr, first + row * row_stride(p.out) + channel);
  }

  DEVICE void store_statistics(u32 row, i64 top, u32 l) const {
    i64 at = (i64)(batch * p.heads + head) * NQ + row;
    p.t_max[at] = top;
    p.l[at] = l;
  }

  // Computes the last row alone. K and V are the left operands here, so that the row's keys are distributed over all
  // lanes: lane (g, q) has the keys of column g in both tiles of group q, and then channels 4 g + 0..3 of each block.
  DEVICE void remainder_row(RowFragment& q) const {
    constexpr u32 row = NQ - 1;
    u32 codes[WORDS];
    if (In::has_far_values(scales.q_inverse)) In::clamp_far_values(q.raw, scales.q_inverse);
    In::codes(q.raw, scales.q_inverse, codes);
    i32 x[2];
#pragma unroll
    for (int t = 0; t < GROUPS; ++t) {
      i32 s[4] = {};
#pragma unroll
      for (int i = 0; i < (WORDS + 1) / 2; ++i) {
        const OperandB even = kv.keys(2 * t, i), odd = kv.keys(min(2 * t + 1, KEY_TILES - 1), i);
        const OperandB query = {codes[2 * i], 2 * i + 1 < WORDS ? codes[2 * i + 1] : 0};
        mma_s8_s8(s, {even.word[0], odd.word[0], even.word[1], odd.word[1]}, query);
      }
      if (t == 0 || quarter >= t) x[0] = s[0], x[1] = s[2];
    }
    const Score unit = row_score(row);
    if (unit.k) x[0] <<= unit.k, x[1] <<= unit.k;
    const Masks masks(p, batch, head, row);
    Exponent weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool last = quarter >= GROUPS - 1;
      const u32 key = score_key(i == 1 && !(ODD_TILES && last), g) + 16 * (last ? GROUPS - 1 : quarter);
      weight[i] = masks.exponent_of(x[i], unit.C, min(key, NK - 1));
    }
    const i64 top = row_max_exponent(warp_max(weight[0] > weight[1] ? weight[0] : weight[1]), unit.C);
    const i64 B = exp_offset(top);
    // p of slots 0 and 2, or 1 and 3, of the word that lanes 2j and 2j + 1 of g share
    u32 mask = g % 2 ? 0xFF00FF00 : 0x00FF00FF;
    if (quarter >= GROUPS - 1) mask &= quarter == GROUPS - 1 ? present_bytes(g / 2) : 0;
    u32 w[DIGITS], l = 0;
    const Exponent four[4] = {weight[0], weight[0], weight[1], weight[1]};
    p_words<4>(four, unit.C, B, w);
    u32 groups[DIGITS][2 * STEPS] = {};
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) {
      w[digit] &= mask;
      l = add_bytes(w[digit], l << 8);
      w[digit] |= __shfl_xor_sync(~0u, w[digit], 4);
#pragma unroll
      for (int t = 0; t < GROUPS; ++t) groups[digit][t] = __shfl_sync(~0u, w[digit], 8 * quarter + t);
    }
    l = __reduce_add_sync(~0u, l);
    let_next_kernel_start();
    const RowScale<OUT, i32> scale(l, output_constants);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      i32 out[4];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        i32 acc[DIGITS][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
          for (int digit = 0; digit < DIGITS; ++digit)
            mma_s8_u8(acc[digit], kv.channels(i, b, j), {groups[digit][2 * i], groups[digit][2 * i + 1]});
        out[j] = combine_digits(acc, 0), out[j + 1] = combine_digits(acc, 2);
      }
      const u32 channel = 32 * b + 4 * g;
      if (quarter == 0 && (HEAD_DIM % 32 == 0 || channel < HEAD_DIM))
        store_window<OUT>(output(row, channel), out, scale, output_constants);
    }
    if (p.l && threadIdx.x % 32 == 0) store_statistics(row, top, l);
  }
};

// Computes the rows of part `part` of a window. SPLIT: see `Window::tile`. Both forms take the rows of Q that `q`
// already has, else the compiler would load them late. load_queries: loads row `row` on.
template <bool SPLIT, class LoadQueries>
DEVICE void attend(const Window& w, RowFragment (&q)[HALVES], u32& row, u32 part, bool has_remainder,
                   const LoadQueries& load_queries) {
#pragma unroll 1
  for (int i = 0; i < TILES && part * TILES + i < ROW_TILES; ++i) {
    RowFragment now[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) now[h] = q[h];
    const u32 first = row;
    row += TILE_ROWS;
    if (i + 1 < TILES || REMAINDER_ROWS && ROW_PARTS == WARPS_PER_WINDOW) load_queries();
    w.tile<SPLIT>(now, first);
  }
  if (!has_remainder) return;
  if constexpr (SPLIT)
    w.tile<true>(q, NQ - 1 + w.g);  // lanes with g = 0 have the row, the others none
  else
    w.remainder_row(q[0]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_PER_WINDOW * WINDOWS_PER_CTA, CTAS_PER_SM)
    attention(const __grid_constant__ Params p) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 part = WARPS_PER_WINDOW > 1 ? warp : 0,
            place = WARPS_PER_WINDOW > 1 ? blockIdx.x : blockIdx.x * WINDOWS_PER_CTA + warp;
  if (WINDOWS_PER_CTA > 1 && place >= p.count) return;
  const u32 batch = p.head_reciprocal ? __umulhi(place, p.head_reciprocal) : place, head = place - batch * p.heads;
  const u32 kv_head = key_head(p, head), g = lane / 4, quarter = lane % 4;
  Window w = {p, batch, head, kv_head, g, quarter, {p, batch, head, kv_head}};
  wait_for_previous_kernel();
  const u32 share = SHARE_CODES ? part : 0;
  WindowLoader<SHARE_CODES ? WARPS_PER_WINDOW : 1> loader;
  loader.load_keys(head_base(p.k, batch, kv_head), row_stride(p.k), g, share);
#if HEAD_AMAX_IN_KERNEL
  w.find_scales();
#endif
  w.scales.load();
  const u8 *q_base = head_base(p.q, batch, head), *v_base = head_base(p.v, batch, kv_head);
  const u32 q_stride = row_stride(p.q);
  u32 row = part * TILES * TILE_ROWS + g;
  RowFragment q[HALVES];
  const auto load_queries = [&] {
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      q[h].load(q_base, q_stride, min(row + 8 * h, NQ - 1));  // after the last tile, the remainder row
  };
  load_queries();
#if KEY_MAJOR
  load_key_major(p.v, v_base, g, quarter, w.kv);
#else
  loader.load_values(v_base, row_stride(p.v), g, quarter, share);
#endif
  w.scales.divide();
  if constexpr (!ROW_SCALES) w.score = w.head_score(0);
  if constexpr (IsInteger<OUT>::value)
    w.output_constants.packed = ((const i64*)p.output.ptr)[head_offset(p.output, batch, head)];
  else
    w.output_constants.v_scale = SIZE<IN> == 1 ? *w.scales.v_at : w.scales.v;
  loader.clamp_far_values(w.scales.k_inverse, w.scales.v_inverse);
  if constexpr (SHARE_CODES)
    loader.exchange(w.scales.k_inverse, w.scales.v_inverse, share, w.kv);
  else
    loader.codes(w.scales.k_inverse, w.scales.v_inverse, w.kv);

  const bool has_remainder = REMAINDER_ROWS && part == WARPS_PER_WINDOW - 1;
  if constexpr (TWO_GROUPS) {
    if (w.has_zeros<false>() && w.has_zeros<true>()) return attend<true>(w, q, row, part, has_remainder, load_queries);
    w.output_constants = without_gap(w.output_constants);
  }
  attend<false>(w, q, row, part, has_remainder, load_queries);
}
