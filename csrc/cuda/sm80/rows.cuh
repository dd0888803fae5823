// The rows of a warp: their codes, masks and softmax, and the products with tiles of keys.
//
// A Work knows where the rows are: place(row), the head and the row of the tensors; seen(row), the number of keys that
// the row sees; `batch`, `kv_head`, `keys` and `k_start`, its first key; valueless(p), where the words of its keys
// without a value are.
//
// Macros: QUERY, VALUES_IN_RANGE, BIAS, KEEP; see any_rows.cu. SCORES: where the score constants come from: 0, the
// default, p.score; 1 and 2 see few_rows.cu; 3 Work's `score`.
#pragma once
#include "quantize.cuh"
#include "sm80/two_groups_softmax.cuh"

#ifndef SCORES
#define SCORES 0
#endif

typedef Codes<QUERY, VALUES_IN_RANGE> In;

// The words of the keys without a value of a head, from its block `first` on: see two_groups.cuh.
DEVICE const u32* valueless_words(const Params& p, u32 batch, u32 kv_head, i32 first) {
  return (const u32*)p.valueless.ptr + head_offset(p.valueless, batch, kv_head) + 4 * first;
}

struct RowPlace {
  u32 head;
  i64 row;
};

// Stores four adjacent outputs of a row, without those past the last channel.
template <typename TO>
DEVICE void store_channels(const Params& p, u32 batch, const RowPlace& at, i32 channel, const u32 (&words)[SIZE<TO>]) {
  if (channel >= VALUE_DIM) return;
  u8* to = (u8*)element<TO>(p.out.ptr, head_offset(p.out, batch, at.head) + at.row * p.out.n + channel);
  if constexpr (VALUE_DIM % 4 == 0) {
    store_words(to, words);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int BYTES = SIZE<TO>;
      const u32 bits = words[i * BYTES / 4] >> (8 * (i * BYTES % 4));
      if (channel + i >= VALUE_DIM) continue;
      if constexpr (BYTES == 1)
        to[i] = bits;
      else if constexpr (BYTES == 2)
        ((u16*)to)[i] = bits;
      else
        ((u32*)to)[i] = bits;
    }
  }
}

template <class Method, class Work>
struct WarpRows {
  const Params& p;
  const Work& work;
  i32 row;  // this lane's first row: it has rows row + 16 m + 8 h, h < LANE_ROWS
  u32 q[ROW_TILES][K_STEPS][4];
  RowMasks masks;
  Method method;

  DEVICE WarpRows(const Params& p, const Work& work, i32 first) : p(p), work(work), row(first + threadIdx.x % 32 / 4) {}
  DEVICE i32 row_of(int m, int h) const { return row + 16 * m + 8 * h; }
  DEVICE RowPlace place(int m, int h) const { return work.place(row_of(m, h)); }

  DEVICE const u8* query(const RowPlace& at) const {
    return p.q.ptr + (head_offset(p.q, work.batch, at.head) + at.row * p.q.n) * SIZE<QUERY>;
  }
  // Q and its scales as memory has them.
  struct Inputs {
    typename In::template Raw<1> chunk[ROW_TILES][LANE_ROWS][2 * K_STEPS];  // of four channels
    OfRows<float> q_scale;
    float k_scale;
  };
  DEVICE Inputs load_inputs() const {
    Inputs inputs;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < LANE_ROWS; ++h) {
        const RowPlace at = place(m, h);
        const u8* from = query(at);
#pragma unroll
        for (int i = 0; i < 2 * K_STEPS; ++i) {
          const u32 channel = 16 * i + threadIdx.x % 4 * 4;
          load_words(from + min(channel, HEAD_DIM - 4) * SIZE<QUERY>, inputs.chunk[m][h][i].word);
        }
        if constexpr (SIZE<QUERY> > 1 && SCORES != 2)
          inputs.q_scale[m][h] = *head_element<float>(p.q_scale, work.batch, at.head);
      }
    if constexpr (SCORES == 1 || SCORES == 2)
      inputs.k_scale = *head_element<float>(p.k_scale, work.batch, work.kv_head);
    return inputs;
  }
  // The scale of a row of floats. With SCORES 2 the row is its head's only one, and has a scale of its own maximum.
  DEVICE float query_scale(const Inputs& inputs, int m, int h) const {
    if constexpr (SCORES != 2) {
      return inputs.q_scale[m][h];
    } else {
      u32 most = 0;
#pragma unroll
      for (int i = 0; i < 2 * K_STEPS; ++i) most = max_magnitudes(most, inputs.chunk[m][h][i].word, QUERY{});
      most = max_of_pair(most, QUERY{});
      for (int step = 1; step < 4; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
      return scale_of_magnitude<QUERY>(most);
    }
  }

  DEVICE void set_query(Inputs& inputs) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < LANE_ROWS; ++h) {
        float inverse = 1.0f;
        if constexpr (SIZE<QUERY> > 1) {
          inputs.q_scale[m][h] = query_scale(inputs, m, h);
          inverse = In::usable_inverse(__frcp_rn(inputs.q_scale[m][h]));
        }
#pragma unroll
        for (int i = 0; i < 2 * K_STEPS; ++i) {
          const u32 channel = 16 * i + threadIdx.x % 4 * 4;
          typename In::template Raw<1>& raw = inputs.chunk[m][h][i];
          if (In::has_far_values(inverse)) In::clamp_far_values(raw, inverse);
          u32 w[1];
          In::codes(raw, inverse, w);
          q[m][i / 2][2 * (i % 2) + h] = HEAD_DIM % 32 == 0 || channel < HEAD_DIM ? w[0] : 0;
        }
      }
  }
  DEVICE Score score_of(const Inputs& inputs, int m, int h) const {
    if constexpr (SCORES == 3) return work.score;
    if constexpr (SCORES) return score_constants(inputs.q_scale[m][h], inputs.k_scale, p.sm_scale);
    const RowPlace at = place(m, h);
    return unpack_score(((const i64*)p.score.ptr)[head_offset(p.score, work.batch, at.head) + at.row * p.score.n]);
  }
  DEVICE void init(u32 table) { init(table, load_inputs()); }
  // The same where they have been loaded early.
  DEVICE void init(u32 table, Inputs inputs) {
    set_query(inputs);
    const auto scores = [&](int m, int h) { return score_of(inputs, m, h); };
    if constexpr (Method::FINDS_ZEROS)
      method.init(scores, work.valueless(p), work.keys);
    else
      method.init(scores, table);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int h = 0; h < LANE_ROWS; ++h) {
        masks[m][h].seen = work.seen(row_of(m, h));
#if WINDOW
        masks[m][h].start = work.window_start(row_of(m, h));
#endif
        const RowPlace at = place(m, h);
#if BIAS
        masks[m][h].bias = {p.bias, work.batch, (u32)p.bias_batches, p.bias_reciprocal, at.head, at.row, work.k_start};
#endif
#if KEEP
        masks[m][h].keep = {p.keep, work.batch, (u32)p.keep_batches, p.keep_reciprocal, at.head, at.row, work.k_start};
#endif
      }
  }
  // maximum(kind, m, h): that of all of a row's keys of a kind.
  template <class Maximum>
  DEVICE void finish_row_max(Maximum maximum) {
    method.finish_row_max(maximum, [&](int m, int h) { return magnitude(m, h); });
  }
  // Of intflash_bfp: makes P of whole rows of scores.
  DEVICE void take(const Scores& s, const TileOperands& tile) {
    method.take(s, masks, tile, [&](int m, int h) { return magnitude(m, h); });
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
          const u32(&x)[4] = q[m][step];
          const OperandA a = {x[0], LANE_ROWS == 1 ? 0 : x[1], x[2], LANE_ROWS == 1 ? 0 : x[3]};
          mma_s8_s8(s[m][2 * group], a, k[0]);
          mma_s8_s8(s[m][2 * group + 1], a, k[1]);
        }
      }
  }

  // Makes P of the scores of a tile whose first key is `first`, and adds P V to the accumulators.
  template <int NOW, bool MASKED>
  DEVICE void add_values(const Scores& s, const TileOperands& tile, i32 first) {
    method.template begin_tile<NOW, MASKED>(s, masks, first, work.keys);
    constexpr int WHOLE = MASKED ? 0 : NOW;
    if constexpr (Method::FINDS_ZEROS && !MASKED)
      if (method.has_zeros()) return add_values_as<NOW, 0, false>(s, tile, first);
    if (!MASKED && !BIAS && method.fast)
      add_values_as<NOW, NOW, true>(s, tile, first);
    else
      add_values_as<NOW, WHOLE, false>(s, tile, first);
  }
  // The same where rows see the first WHOLE keys of the tile, and maybe not all of the others.
  template <int NOW, int WHOLE>
  DEVICE void add_values_of(const Scores& s, const TileOperands& tile, i32 first) {
    if (method.fast)
      add_values_as<NOW, WHOLE, true>(s, tile, first);
    else
      add_values_as<NOW, WHOLE, false>(s, tile, first);
  }
  template <int NOW, int WHOLE, bool FAST>
  DEVICE void add_values_as(const Scores& s, const TileOperands& tile, i32 first) {
#pragma unroll
    for (int step = 0; step < (NOW + 31) / 32; ++step) {
      OperandA weights[Method::OPERANDS][ROW_TILES] = {};
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 2 * LANE_ROWS; ++i) {
          const int half = i / LANE_ROWS, h = i % LANE_ROWS, group = 2 * step + half;
          u32 word[Method::DIGITS] = {};
          if (16 * group + 16 <= WHOLE)
            method.template p_words<false, FAST>(s, m, h, group, masks[m][h], first, work.keys, word);
          else if (16 * group < NOW)
            method.template p_words<true, FAST>(s, m, h, group, masks[m][h], first, work.keys, word);
#pragma unroll
          for (int digit = 0; digit < Method::DIGITS; ++digit)
            weights[Method::operand_of(digit)][m].word[2 * half + Method::half_of(digit, h)] = word[digit];
        }
#pragma unroll
      for (int chunk = 0; chunk < V_CHUNKS; ++chunk) {
        OperandB v[2];
        tile.values(step, chunk, v);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
          for (int i = 0; i < Method::OPERANDS; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) mma_u8_s8(method.acc[i][m][chunk][e], weights[i][m], v[e]);
      }
      if (KEYS > 128) __syncwarp();  // ptxas would compute all exponentials first, and spill
    }
  }

  // Of the rows of one head.
  DEVICE void store() const {
    typedef typename Method::Accumulator Accumulator;
    const OutputConstants constants = load_output_constants<OUT>(p, work.batch, work.head, work.kv_head);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      const typename Method::Row rows[2] = {method.row(m, 0), method.row(m, 1)};
      const typename Method::template OutputScales<OUT, 2> scales(rows, constants);
#pragma unroll(Method::CHUNKS_AT_ONCE)
      for (int chunk = 0; chunk < V_CHUNKS; ++chunk) {
        Accumulator mine[2][4];
        method.results(m, chunk, mine);
        u32 words[2][SIZE<OUT>];
        scales.outputs(mine, words);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (row_of(m, h) < work.rows)
            store_channels<OUT>(p, work.batch, place(m, h), 16 * (first_chunk() + chunk) + threadIdx.x % 4 * 4,
                                words[h]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (p.l && blockIdx.y == 0 && threadIdx.x % 4 == 0 && row_of(m, h) < work.rows) {
          const i64 at = row_index(p, work.batch, work.head, place(m, h).row);
          p.t_max[at] = method.t_max(m, h);
          p.l[at] = rows[h].l;
        }
    }
  }
};
