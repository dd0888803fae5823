// The parameters of the attention kernels and of those before them, which the host fills in (csrc/host/cuda/), and how
// a kernel finds its batch and head from them.
#pragma once
#include "types.cuh"
#ifdef __CUDACC__
#include "ptx.cuh"

constexpr int NO_SCORE = -2147483647 - 1;  // the score of an absent key
#endif

// A 4-D tensor with strides in elements. The stride is 0 along a broadcast axis. `ptr` is null where there is no
// tensor.
struct View {
  const u8* ptr;
  i64 b, h, n, d;
};

// The work that the tile scheduler of long rows hands out (sm90/tile_scheduler.cuh). The host computes the reciprocals
// for `quotient`. With K/V resident in shared memory a range is a tile of 64 rows, all ranges are whole, and each CTA
// takes `rest_tiles` adjacent ones; the CTAs before `first` take one more. Of short rows `whole` heads have a CTA each,
// and `rest` ones are divided into `pieces` parts.
struct Share {
  i32 whole, rest;           // ranges of a head: those with a CTA's full number of rows, and the smaller ones
  i32 rest_tiles;            // tiles of 64 rows in a smaller range
  u32 whole_of_all, pieces;  // whole ranges of all heads; all ranges of all heads
  u32 first;                 // CTAs from this one on take the smaller ranges
  u32 whole_reciprocal, rest_reciprocal, heads_reciprocal;
};

// How the rows and keys of few rows are split, and the memory that their kernels share (sm80/few_rows.cu). The host
// computes the reciprocals for `quotient`.
struct SplitKv {
  i32 splits, keys;      // of a key head; keys of a split
  i32 group, kv_heads;   // query heads per key head; key heads
  i32 row_tiles, pitch;  // tiles of 8 or 16 rows of a key head; elements between rows of scores
  u32 splits_reciprocal, heads_reciprocal, queries_reciprocal, row_tiles_reciprocal;
  i32* scores;  // [B * Hk, group * Nq, pitch]
  i64* maxima;  // [B * Hk * row_tiles, splits, kinds of keys, rows of a tile]
  void* sums;   // [B * Hk * row_tiles, copies] of TileSums (sm80/few_rows.cu)
};

// One struct for all attention kernels.
struct Params {
  View q, k, v, out;
  View score;             // int64 k << 32 | C; null where the kernel computes it from q_scale, k_scale and sm_scale
  View output;            // int64 e << 32 | Mr, for integer output
  View q_scale, k_scale;  // float32, for float inputs
  View v_scale;           // float32, for float inputs and for float output
  View bias;              // int32, in octaves of Problem's bias_fraction_bits
  View keep;              // uint8, 0 for an absent key; with KEY_COUNTS int32 counts of keys, one for each batch
  View valueless;         // words of the keys without a value: see `key_of_bit`
  i64* t_max;             // [B, H, Nq], or null
  i32* l;
  double sm_scale;
  u32 group_reciprocal;  // ceil(2^32 / (query heads per key head)); 0 for one query head per key head
  i32 nq, nk;
  i32 bias_batches, keep_batches;        // the mask's batch axis repeats with this period
  i32 causal, window_start;              // key j is present for row i if i + window_start <= j <= i + causal
  i32 tiles;                             // row tiles (or windows) per CTA
  i32 count;                             // number of all windows, where a CTA takes several
  i32 heads;                             // heads of Q
  u32 head_reciprocal;                   // ceil(2^32 / heads); 0 for one head
  u32 bias_reciprocal, keep_reciprocal;  // ceil(2^32 / batches); 0 for one batch and for as many as Q has
  Share share;
  // Of packed sequences: the first row or key of each, and the end of the last; or null.
  const i32 *cu_seqlens_q, *cu_seqlens_k;
  SplitKv split;
  u32 heads_at_once;  // of short rows: CTAs that run at once, where each takes a head
  u32 padding;
};

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Adjacent channels of the output that a lane of long rows holds. With 8 a quad stores whole sectors of memory at once.
#ifdef __CUDACC__
DEVICE
#endif
constexpr int lane_channels(int head_dim) { return head_dim % 32 ? head_dim / 4 : 8; }

// The second parameter of attention kernels that load K and V by TMA (sm90/tma.cuh).
struct TensorMaps {
  TensorMap k, v;
  i32 k_batch, k_head, v_batch, v_head;  // distance to the next batch and head: in rows of K, in matrices of V^T
};

// The memory of a tensor in chunks of 16 bytes: `count` chunks in contiguous runs of `run` chunks, which lie along up
// to three axes. Axes of stride 0 are left out, because their elements repeat. The reciprocals are for `quotient`.
struct Runs {
  const u8* ptr;
  i64 strides[3];  // in bytes, innermost axis first
  u32 count, run;
  u32 sizes[2];  // of the two inner axes
  u32 run_reciprocal, size_reciprocals[2], padding;
};

// Of absmax.cu.
struct AbsmaxParams {
  Runs x[3];
  // zeros at launch: three maxima as bits of float32, which are ordered as the maxima are, and the number of finished
  // CTAs
  u32* amax;
  float* scales;  // of Q, K and V
};

// Of head_absmax.cu: tensors in the order Q, K, V.
struct HeadAbsmaxParams {
  View x[3];
  u32 *amax, *finished;  // zeros at launch, for each scale: its maximum as bits of float32, and its finished CTAs
  float* scales;         // those of Q, then those of K and V
  u32 tokens[3], heads[3], all_heads[3];                  // heads of a batch, and of all batches
  u32 first[3], per_head[3];                              // the first scale of a tensor, and whether each head has one
  u32 tile_reciprocals[3], head_reciprocals[3], padding;  // for `quotient`
};

// Of quantize_inputs.cu.
struct QuantizeParams {
  View x[3], codes[2], scales[3];  // of K, V and, where it finds the scales, Q
  u32* valueless;                  // as ValuelessParams::words
  u32 tokens, heads, batches;      // of K and V
  u32 queries, query_heads, padding;
};

// Of constants.cu.
struct ConstantsParams {
  View q_scale, k_scale, v_scale, given;
  i64* score;        // k << 32 | C
  i64* output;       // e << 32 | Mr
  float* out_scale;  // s_V * 127 / QMAX, written where the caller gave no scale
  double sm_scale;
  u32 score_shape[4], output_shape[4];
  u32 score_count, output_count;
  u32 group, padding;  // query heads per key head
};

// Of valueless.cu.
struct ValuelessParams {
  View v;
  u32* words;               // [B, Hk, blocks, 4]: see `key_of_bit`
  const i32* cu_seqlens_k;  // of packed sequences, each of which has its own blocks; or null
  u32 keys, blocks, heads, count;
  u32 blocks_reciprocal, heads_reciprocal;
};

#ifdef __CUDACC__
DEVICE u32 key_head(const Params& p, u32 head) {
  return p.group_reciprocal ? __umulhi(head, p.group_reciprocal) : head;
}

// Returns x / by. `reciprocal` is floor((2^32 - 1) / by), whose product with x is at most one too small.
DEVICE u32 quotient(u32 x, u32 by, u32 reciprocal) {
  const u32 q = __umulhi(x, reciprocal);
  return q + (x - q * by >= by);
}

// Returns the first block of keys of packed sequence i, whose first key is `k_start`: no sequence's blocks reach the
// next one's.
DEVICE u32 first_block_of_sequence(u32 i, u32 k_start) { return k_start / 128 + i; }

// Returns the key of a block that a bit of the block's word `word` stands for. A block of 128 keys has four words: word
// q those keys that lane q of a quad holds, a bit for each, which is set where V's codes of the key are all 0.
DEVICE u32 key_of_bit(u32 word, u32 bit) { return bit / 4 * 16 + word * 4 + bit % 4; }

DEVICE i64 head_offset(const View& x, i64 batch, i64 head) { return batch * x.b + head * x.h; }
// The batch of a mask whose batch axis repeats: see Params::bias_batches.
DEVICE u32 mask_batch(u32 batch, u32 batches, u32 reciprocal) {
  return reciprocal ? batch - __umulhi(batch, reciprocal) * batches : batch;
}
// The index of a row in t_max and l.
DEVICE i64 row_index(const Params& p, u32 batch, u32 head, i64 row) {
  return ((i64)batch * p.heads + head) * p.nq + row;
}
#endif
