// The remainder rows of a head in long rows (577 = 9 * 64 + 1), for the methods with an exact maximum and K/V resident
// in shared memory. Each of the four warps of a warpgroup takes 32 keys of every key tile, from the scores to P V. The
// rows' maxima and sums are exchanged through the warpgroup's rows of Q in shared memory.
#pragma once
#include "sm90/integer_softmax.cuh"
#include "sm90/remainder_rows.cuh"

template <int DIGITS, class Form>
struct RemainderRows<ExactMaximum<DIGITS, Form>> {
  typedef ExactMaximum<DIGITS, Form> Method;
  typedef typename Method::Accumulator Accumulator;
  static_assert(KV_RESIDENT && !(CAUSAL || KEY_COUNTS || KEY_MASK));
  static constexpr int TILES = REMAINDER_KEY_TILES;
  // blocks of 16 channels: all of them, and those of a warp, which takes every fourth
  static constexpr int BLOCKS = HEAD_DIM / 16, OWN_BLOCKS = (BLOCKS + 3) / 4;
  static constexpr int BLOCK_BYTES = 32 * 16;               // of a warp's sums of a block, in one digit
  static constexpr int AT_ONCE = 2 / DIGITS;                // warps to which a warp sends sums at once
  static constexpr int WARP_BYTES = 16 * K_WIDTH;           // of a warp's own rows of Q, through which it sends
  static constexpr int MAXIMA = 0, ROW_SUMS = MAXIMA + 32;  // offsets there, of a word for each row
  static_assert(AT_ONCE * OWN_BLOCKS * DIGITS * BLOCK_BYTES <= WARP_BYTES);
  typedef i32 Scores[2 * TILES][4];       // 2 j + half: of row g with 16 of the warp's 32 keys of tile j
  typedef u32 PWords[2 * TILES][DIGITS];  // P of these keys
  typedef i32 Sums[DIGITS][BLOCKS][4];    // the warp's part of P V

  // A thread's place: it has row g of the scores, and row `row` of the output.
  struct Place {
    u32 lane, warp, g, quarter, row;
    u32 rows, own;  // addresses of the warpgroup's rows of Q and of the warp's
    u32 barrier;    // of the warpgroup; the producer uses 1

    // Reads threadIdx.x again, because the compiler would otherwise keep all of this in registers from tile to tile.
    DEVICE Place(const SharedLayout& shared) {
      const u32 thread = reread_thread_index();
      lane = thread % 32, warp = thread / 32 % 4, g = lane / 4, quarter = lane % 4, row = 2 * quarter + g % 2;
      rows = shared.query_rows(thread / GROUP - 1), own = rows + warp * WARP_BYTES;
      barrier = 1 + thread / GROUP;
    }
    DEVICE void sync() const { sync_warpgroup(barrier); }
    // The number of keys that exist from the thread's first one of the last tile on. May be negative.
    DEVICE i32 last_keys(const Params& p) const { return p.nk - ((TILES - 1) * TILE + (i32)(warp * 32 + quarter * 4)); }
    // Whether the warp has so many blocks.
    DEVICE bool has_block(int own_block) const { return 4 * own_block + 4 <= BLOCKS || 4 * own_block + warp < BLOCKS; }
  };

  i32 sums[DIGITS][OWN_BLOCKS][4];  // P V: for row `row`, 4 adjacent channels of each of the warp's blocks
  u32 l;                            // the row sum of row `row`
  i64 t_max;                        // the maximum of row g

  // Computes the rows up to P V. Each warp's rows of Q are the remainder rows. Releases the tiles of keys.
  DEVICE void attend(const Params& p, const SharedLayout& shared, const WorkTile& work, i32 tile, Stage& at) {
    const Place place(shared);
    const Score score = Method::score_of(p, {work, work.row + tile * 64 + (i32)place.g, p.nq}, 0);
    const i32 limit = exp_32bit_limit(score.C, score.k, row_magnitudes(shared, reread_thread_index()) & 0xFFFF);
    Scores s;
    i32 peak = scores(p, shared, place, score.k, at, s);
    __syncwarp();  // every lane has read Q
    if (place.quarter == 0) store_shared(place.own + MAXIMA + 4 * place.g, peak);
    place.sync();
#pragma unroll
    for (int i = 0; i < 4; ++i) peak = max(peak, (i32)load_shared(place.rows + i * WARP_BYTES + MAXIMA + 4 * place.g));
    t_max = (i64)peak * score.C;

    PWords words;
    if (__all_sync(~0u, octave_above(t_max) <= limit))
      powers<true>(s, score.C, words);
    else
      powers<false>(s, score.C, words);
    u32 sum[DIGITS] = {};
#pragma unroll
    for (int i = 0; i < 2 * TILES * DIGITS; ++i) {
      u32& word = words[i / DIGITS][i % DIGITS];
      const int half = i / DIGITS - (2 * TILES - 2);  // of the last tile
      if (half >= 0) word &= ~shift_left(~0u, 8 * max(place.last_keys(p) - 16 * half, 0));
      sum[i % DIGITS] = add_bytes(word, sum[i % DIGITS]);
    }
    l = quad_sum(combine_digits(sum));
    if (place.quarter == 0) store_shared(place.own + ROW_SUMS + 4 * place.g, l);

    Sums of_warp;
    products(shared, place, at, words, of_warp);
    place.sync();
    l = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) l += load_shared(place.rows + i * WARP_BYTES + ROW_SUMS + 4 * place.row);
    place.sync();
    add_sums_of_warps(place, of_warp);
    gather_channels(place);
  }

  // Computes the scores, shifted by k, and returns the largest one of row g.
  DEVICE static i32 scores(const Params& p, const SharedLayout& shared, const Place& place, i32 k, Stage at,
                           Scores& s) {
    u32 q[D_STEPS][4];
    const u32 from = place.own + swizzled<K_WIDTH>(place.lane % 16, place.lane / 16);
#pragma unroll
    for (int i = 0; i < D_STEPS; ++i) load_matrices(from ^ 32 * i, q[i]);
    const u32 keys = key_matrices<K_WIDTH>(place.lane, shared.k_tile(0) + place.warp * 32 * K_WIDTH);
    i32 peak = NO_SCORE;
#pragma unroll
    for (int j = 0; j < TILES; ++j, at.next()) {
      shared.wait_full(at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        i32(&x)[4] = s[2 * j + half];
        scores_of_16_keys(q, keys, at.stage * STAGE_BYTES + half * 16 * K_WIDTH, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] <<= k;
          if (j < TILES - 1 || 16 * half + i < place.last_keys(p)) peak = max(peak, x[i]);
        }
      }
    }
    return quad_max(peak);
  }

  template <bool EXP_32BIT>
  DEVICE void powers(const Scores& s, i32 C, PWords& words) const {
    const i64 B = Form::OFFSET - t_max;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      Form::template four<EXP_32BIT>(s[i][0], s[i][1], s[i][2], s[i][3], C, B, Form::added(0), words[i]);
  }

  // Computes P V of the warp's keys. V^T is the left operand, so that all rows of the products exist.
  DEVICE static void products(const SharedLayout& shared, const Place& place, Stage& at, const PWords& words,
                              Sums& acc) {
    const u32 values = shared.v_tile(0) + swizzled<128>(place.lane % 16, 2 * place.warp + place.lane / 16);
#pragma unroll
    for (int i = 0; i < DIGITS * BLOCKS * 4; ++i) acc[i / (BLOCKS * 4)][i / 4 % BLOCKS][i % 4] = 0;
#pragma unroll
    for (int j = 0; j < TILES; ++j, at.next()) {
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        OperandA v;
        load_matrices(values + at.stage * STAGE_BYTES + block * 16 * 128, v.word);
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit)
          mma_s8_u8(acc[digit][block], v, {words[2 * j][digit], words[2 * j + 1][digit]});
      }
      __syncwarp();
      shared.release(at.stage);
    }
  }

  // Adds the warps' sums. In round r each warp sends its sums of the blocks that the r-th warp after it takes.
  DEVICE void add_sums_of_warps(const Place& place, const Sums& of_warp) {
    const auto slot = [&](u32 warp, int round, int digit, int own_block) {
      const int i = ((round - 1) % AT_ONCE * OWN_BLOCKS + own_block) * DIGITS + digit;
      return place.rows + warp * WARP_BYTES + i * BLOCK_BYTES + place.lane * 16;
    };
    const auto sends = [&](int round, int block) { return place.warp == (block + 4 - round) % 4; };
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS * DIGITS * 4; ++i) sums[i / 4 % DIGITS][i / 4 / DIGITS][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS * DIGITS * 4; ++i) {
      const int digit = i / 4 % DIGITS, block = i / 4 / DIGITS;
      if (sends(0, block)) sums[digit][block / 4][i % 4] = of_warp[digit][block][i % 4];
    }
#pragma unroll
    for (int first = 1; first < 4; first += AT_ONCE) {
#pragma unroll
      for (int round = first; round < 4 && round < first + AT_ONCE; ++round)
#pragma unroll
        for (int i = 0; i < BLOCKS * DIGITS; ++i) {
          const int digit = i % DIGITS, block = i / DIGITS;
          const u32 to = slot(place.warp, round, digit, block / 4);
          if (sends(round, block)) store_shared(to, (const u32(&)[4])of_warp[digit][block]);
        }
      place.sync();
#pragma unroll
      for (int round = first; round < 4 && round < first + AT_ONCE; ++round)
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS * DIGITS; ++i) {
          const int digit = i % DIGITS, own_block = i / DIGITS;
          if (!place.has_block(own_block)) continue;
          u32 sent[4];
          load_shared(slot((place.warp + 4 - round) % 4, round, digit, own_block), sent);
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[digit][own_block][k] += (i32)sent[k];
        }
      place.sync();
    }
  }

  // A lane's sums are those of rows 2 quarter and 2 quarter + 1, with rows g and g + 8 of a block of V^T. Two lanes
  // with adjacent g exchange half of them: each then has one row, with four adjacent channels (see value_row).
  DEVICE void gather_channels(const Place& place) {
    const bool odd = place.g % 2;
#pragma unroll
    for (int i = 0; i < DIGITS * OWN_BLOCKS * 2; ++i) {
      i32* const pair = &sums[i / (OWN_BLOCKS * 2)][i / 2 % OWN_BLOCKS][i % 2 * 2];
      const i32 kept = odd ? pair[1] : pair[0], other = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 4);
      pair[0] = odd ? other : kept, pair[1] = odd ? kept : other;
    }
  }

  DEVICE void store(const Params& p, const SharedLayout& shared, const WorkTile& work, i32 tile) const {
    const Place place(shared);
    const OutputConstants output_constants = Method::output_constants(p, work);
    const RowScale<OUT, Accumulator> scale(l, output_constants);
    const i32 row = work.row + tile * 64 + (i32)place.row;
    if (row >= p.nq) return;
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; ++i) {
      const u32 channel = channel_of_row(16 * (4 * i + place.warp) + place.g / 2 * 2);
      if (!place.has_block(i) || channel >= TENSOR_DIM) continue;
      Accumulator mine[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (DIGITS == 1)
          mine[k] = sums[0][i][k];
        else
          mine[k] = {sums[0][i][k], sums[1][i][k]};
      }
      const i64 to = head_offset(p.out, work.batch, work.head) + row * p.out.n + channel;
      store_outputs<OUT>((u8*)element<OUT>(p.out.ptr, to), mine, scale, output_constants);
    }
    if (p.l && place.warp == 0 && place.row == place.g) {
      const i64 to = row_index(p, work.batch, work.head, row);
      p.t_max[to] = t_max;
      p.l[to] = l;
    }
  }
};

#if TWO_GROUPS
template <>
struct RemainderRows<TwoGroups> : RemainderRows<TwoGroups::Exact> {};
#endif
