// Attention for every NVIDIA GPU from compute capability 8.0 on, by mma.sync and cp.async: any number of queries and
// keys, head_dim to 256, masks, bias and packed sequences.
//
// A CTA computes WARPS * ROW_TILES * 16 rows of a head. Tiles of K and V are copied to a ring of stages in shared
// memory; Q, scores, P and accumulators stay in registers.
//
// Macros:
//   METHOD            ExactP16, ExactP8 or Online
//   HEAD_DIM          channels of Q and K, a multiple of 8 to 256
//   VALUE_DIM         channels of V and of the output
//   SLICES            CTAs that share the channels of V, where the registers of one do not suffice
//   QUERY, OUT        the types of Q (i8, or a float type with p.q_scale) and of the output
//   KEY_MAJOR         1: V has contiguous keys
//   ROW_SCALES        1: Q has a scale for each token
//   CAUSAL            0 none, 1 key j is present for row i if j <= i + p.causal, 2 the same with each packed sequence's
//                     number of keys less its number of queries
//   PACKED            1: the batch of one holds p.count sequences, whose ends are p.q_ends and p.k_ends
//   BIAS, KEEP        see sm80/masks.cuh
//   WARPS, ROW_TILES  warps of a CTA, and tiles of 16 rows of a warp
//   KEYS, STAGES      keys of a tile, a multiple of 32, and stages of the ring
//   CTAS_PER_SM       CTAs per multiprocessor, which bounds the registers of a thread
//   VALUES_IN_RANGE   1: no float of Q is outside its scale's range
#include "quantize.cuh"
#include "sm80/softmax.cuh"

typedef Codes<QUERY, VALUES_IN_RANGE> In;
constexpr u32 TABLE_BYTES = METHOD::PASSES == 1 ? 256 * WORD_BYTES : 0;  // of the table of P, before the stages
constexpr int SMALL = 32;  // keys of the last tile that are computed, if it has no more

// The rows of a CTA, and where they and their keys are in the tensors.
struct Work {
  u32 batch, head, kv_head;
  i32 row;               // the CTA's first row
  i32 rows, keys;        // of the sequence
  i64 q_start, k_start;  // the sequence's first row and key
  i32 causal;

  DEVICE Work(const Params& p) {
    const u32 tiles = p.tiles, of = quotient(blockIdx.x, tiles, p.share.whole_reciprocal);
    i32 tile = blockIdx.x - of * tiles;
    batch = quotient(of, p.heads, p.share.heads_reciprocal), head = of - batch * p.heads;
    kv_head = key_head(p, head);
    rows = p.nq, keys = p.nk, q_start = 0, k_start = 0, causal = p.causal;
#if PACKED
    // `tiles` is a bound: CTAs beyond the last sequence's tiles find none
    rows = 0;
    for (i32 i = 0; i < p.count; ++i) {
      const i32 first = p.q_ends[i], count = p.q_ends[i + 1] - first, its_tiles = (count + CTA_ROWS - 1) / CTA_ROWS;
      if (tile < its_tiles) {
        q_start = first, rows = count, k_start = p.k_ends[i], keys = p.k_ends[i + 1] - (i32)k_start;
        break;
      }
      tile -= its_tiles;
    }
    if (CAUSAL == 2) causal = keys - rows;
#else
    if (CAUSAL) tile = tiles - 1 - tile;  // the CTAs with most keys first
#endif
    row = tile * CTA_ROWS;
  }
  // The number of keys that a row sees.
  DEVICE i32 seen(i32 row) const { return CAUSAL ? max(min(keys, min(row, rows - 1) + causal + 1), 0) : keys; }
};

template <class Method>
struct Warp {
  const Params& p;
  const Work& work;
  i32 row;  // this lane's first row: rows row + 16 m + 8 h
  u32 q[ROW_TILES][K_STEPS][4];
  RowMasks masks;
  Method method;
  i32 first_seen, last_seen;  // the number of keys that the warp's first and last row see

  DEVICE Warp(const Params& p, const Work& work) : p(p), work(work) {
    const i32 first = work.row + threadIdx.x / 32 * WARP_ROWS;
    row = first + threadIdx.x % 32 / 4;
    first_seen = work.seen(first), last_seen = first < work.rows ? work.seen(first + WARP_ROWS - 1) : 0;
  }
  DEVICE i32 row_of(int m, int h) const { return row + 16 * m + 8 * h; }
  // A row of the sequence: past the last one, the last.
  DEVICE i64 tensor_row(int m, int h) const { return work.q_start + min(row_of(m, h), work.rows - 1); }

  DEVICE void load_query() {
    float inverse = 1.0f;
    if constexpr (SIZE<QUERY> > 1)
      inverse = In::usable_inverse(__frcp_rn(*head_element<float>(p.q_scale, work.batch, work.head)));
    const u8* base = p.q.ptr + head_offset(p.q, work.batch, work.head) * SIZE<QUERY>;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u8* from = base + tensor_row(m, h) * p.q.n * SIZE<QUERY>;
#pragma unroll
        for (int i = 0; i < 2 * K_STEPS; ++i) {
          const u32 channel = 16 * i + threadIdx.x % 4 * 4;
          typename In::Raw<1> raw;
          load_words(from + min(channel, HEAD_DIM - 4) * SIZE<QUERY>, raw.word);
          if (In::has_far_values(inverse)) In::clamp_far_values(raw, inverse);
          u32 w[1];
          In::codes(raw, inverse, w);
          q[m][i / 2][2 * (i % 2) + h] = HEAD_DIM % 32 == 0 || channel < HEAD_DIM ? w[0] : 0;
        }
      }
  }
  DEVICE Score score_of(int m, int h) const {
    const i64 at = head_offset(p.score, work.batch, work.head) + tensor_row(m, h) * p.score.n;
    return unpack_score(((const i64*)p.score.ptr)[at]);
  }
  DEVICE void init(u32 table) {
    load_query();
    method.init([&](int m, int h) { return score_of(m, h); }, table);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        masks[m][h].seen = work.seen(row_of(m, h));
#if BIAS
        masks[m][h].bias = {p.bias,    work.batch,       (u32)p.bias_batches, p.bias_reciprocal,
                            work.head, tensor_row(m, h), work.k_start};
#endif
#if KEEP
        masks[m][h].keep = {p.keep,    work.batch,       (u32)p.keep_batches, p.keep_reciprocal,
                            work.head, tensor_row(m, h), work.k_start};
#endif
      }
  }
  DEVICE u32 magnitude(int m, int h) const {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; ++i) sum = add_magnitudes(q[m][i / 2][2 * (i % 2) + h], sum);
    return quad_sum(sum);
  }

  template <int NOW>
  DEVICE void compute_scores(const TileOperands& tile, Scores& s) const {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int i = 0; i < NOW / 2; ++i) s[m][i / 4][i % 4] = 0;
#pragma unroll
    for (int group = 0; group < NOW / 16; ++group)
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) {
        OperandB k[2];
        tile.keys(group, step, k);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          const OperandA a = {q[m][step][0], q[m][step][1], q[m][step][2], q[m][step][3]};
          mma_s8_s8(s[m][2 * group], a, k[0]);
          mma_s8_s8(s[m][2 * group + 1], a, k[1]);
        }
      }
  }

  template <int NOW, bool MASKED>
  DEVICE void find_maximum(const TileOperands& tile, i32 first) {
    Scores s;
    compute_scores<NOW>(tile, s);
    method.template update_row_max<NOW, MASKED>(s, masks, first, work.keys);
  }

  template <int NOW, bool MASKED>
  DEVICE void attend(const TileOperands& tile, i32 first) {
    Scores s;
    compute_scores<NOW>(tile, s);
    method.template begin_tile<NOW, MASKED>(s, masks, first, work.keys);
#pragma unroll
    for (int step = 0; step < NOW / 32; ++step) {
      OperandA weights[Method::DIGITS][ROW_TILES];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 word[Method::DIGITS];
          method.template p_words<MASKED>(s, m, i % 2, 2 * step + i / 2, masks[m][i % 2], first, work.keys, word);
#pragma unroll
          for (int digit = 0; digit < Method::DIGITS; ++digit) weights[digit][m].word[i] = word[digit];
        }
#pragma unroll
      for (int chunk = 0; chunk < V_CHUNKS; ++chunk) {
        OperandB v[2];
        tile.values(step, chunk, v);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
          for (int digit = 0; digit < Method::DIGITS; ++digit)
#pragma unroll
            for (int e = 0; e < 2; ++e) mma_u8_s8(method.acc[digit][m][chunk][e], weights[digit][m], v[e]);
      }
    }
  }

  // Computes a tile in one of its forms.
  template <bool LAST_PASS>
  DEVICE void tile(u32 stage, i32 first) {
    if (first >= last_seen) return;  // for no row of this warp
    if (first + KEYS <= first_seen)
      tile_as<LAST_PASS, KEYS, false>({stage}, first);
    else if (first + SMALL < last_seen)
      tile_as<LAST_PASS, KEYS, true>({stage}, first);
    else
      tile_as<LAST_PASS, SMALL, true>({stage}, first);
  }
  template <bool LAST_PASS, int NOW, bool MASKED>
  DEVICE void tile_as(const TileOperands& tile, i32 first) {
    if constexpr (LAST_PASS)
      attend<NOW, MASKED>(tile, first);
    else
      find_maximum<NOW, MASKED>(tile, first);
  }

  // next_tile(i) returns the stage that holds the tile of step i.
  template <class NextTile>
  DEVICE void run(i32 tiles, NextTile next_tile) {
    if constexpr (Method::PASSES == 2) {
#pragma unroll 1
      for (i32 i = 0; i < tiles; ++i) tile<false>(next_tile(i), i * KEYS);
      method.finish_row_max([&](int m, int h) { return magnitude(m, h); });
    }
#pragma unroll 1
    for (i32 i = 0; i < tiles; ++i) tile<true>(next_tile((Method::PASSES - 1) * tiles + i), i * KEYS);
  }

  DEVICE void store() const {
    typedef typename Method::Accumulator Accumulator;
    const OutputConstants constants = load_output_constants<OUT>(p, work.batch, work.head, work.kv_head);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      const u32 l[2] = {method.l(m, 0), method.l(m, 1)};
      RowScale<OUT, Accumulator> scales[2];
      row_scales(computes_second_row() ? l[1] : l[0], constants, scales);
      const i64 base = head_offset(p.out, work.batch, work.head) + 16 * first_chunk() + threadIdx.x % 4 * 4;
#pragma unroll
      for (int chunk = 0; chunk < V_CHUNKS; ++chunk) {
        Accumulator mine[2][4];
        method.result(m, 0, chunk, mine[0]), method.result(m, 1, chunk, mine[1]);
        u32 words[2][SIZE<OUT>];
        output_words<OUT>(mine, scales, constants, words);
        const i32 left = VALUE_DIM - 16 * (first_chunk() + chunk) -
                         (i32)(threadIdx.x % 4 * 4);  // channels from this lane's first on
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (row_of(m, h) >= work.rows || left <= 0) continue;
          u8* to = (u8*)element<OUT>(p.out.ptr, base + tensor_row(m, h) * p.out.n + 16 * chunk);
          if constexpr (VALUE_DIM % 4 == 0) {
            store_words(to, words[h]);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (i < left) ((OUT*)to)[i] = ((const OUT*)words[h])[i];
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (p.l && blockIdx.y == 0 && threadIdx.x % 4 == 0 && row_of(m, h) < work.rows) {
          const i64 at = ((i64)work.batch * p.heads + work.head) * p.nq + tensor_row(m, h);
          p.t_max[at] = method.t_max(m, h);
          p.l[at] = l[h];
        }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 memory[];
  const u32 shared = shared_address(memory);
  if constexpr (TABLE_BYTES) fill_table(shared);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Work work(p);
  if (work.row >= work.rows) return;
  const TileLoader loader = {p.k.ptr + head_offset(p.k, work.batch, work.kv_head) + work.k_start * p.k.n,
                             p.v.ptr + head_offset(p.v, work.batch, work.kv_head) + work.k_start * p.v.n,
                             (u32)p.k.n,
                             (u32)(KEY_MAJOR ? p.v.d : p.v.n),
                             work.keys,
                             shared + TABLE_BYTES};
  const i32 tiles = (work.seen(work.row + CTA_ROWS - 1) + KEYS - 1) / KEYS, steps = METHOD::PASSES * tiles;
  // Step i computes tile i of the first pass, or tile i - tiles of the last one.
  const auto load = [&](i32 i, u32 stage) {
    if (i < steps) {
      const bool last_pass = METHOD::PASSES == 1 || i >= tiles;
      const i32 first = (i >= tiles ? i - tiles : i) * KEYS;
      loader.load_k({stage}, first);
      if (last_pass) loader.load_v({stage}, first);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (i32 i = 0; i < STAGES - 1; ++i) load(i, i);
  Warp<METHOD> warp(p, work);
  warp.init(shared);
  u32 stage = 0, free = STAGES - 1;
  const auto next_tile = [&](i32 i) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the copies of all threads have arrived, and all warps have left the stage that is free now
    load(i + STAGES - 1, free);
    const u32 at = loader.shared + stage * STAGE_BYTES;
    free = stage, stage = stage + 1 < STAGES ? stage + 1 : 0;
    return at;
  };
  warp.run(tiles, next_tile);
  warp.store();
}
