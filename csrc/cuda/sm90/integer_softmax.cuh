// The softmax of intflash, intflash_p8 and intflash_online in the mainloop of long rows. Further macros: METHOD, and
// ROW_SCALES (0: one score constant serves all rows of a head).
#pragma once
#include "exp2.cuh"
#include "sm90/long_rows_mainloop.cuh"

struct PCodes {  // of 64 keys: left operands of two products over 32 keys each
  u32 word[2][4];
};

// P of a warpgroup's rows in shared memory: 64 bytes per row for each half of a tile. A warp's products read only the
// warp's own 16 rows, so that no warp waits for another.
struct SharedP {
  static constexpr u32 HALF_BYTES = 64 * HALF;
  u32 mine;  // address of this thread's first matrix row, in matrices of 8 rows and 16 keys
  u64 operand_0;

  SharedP() = default;
  DEVICE SharedP(u32 codes) {
    // the broadcast makes the value uniform for the compiler
    const u32 base = codes + (__shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1) * 2 * HALF_BYTES;
    const u32 row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 8;
    mine = base + swizzled<HALF>(row, threadIdx.x % 32 / 8);
    operand_0 = descriptor<HALF>(base);
  }
  DEVICE u64 operand(int half) const { return operand_0 + half * (HALF_BYTES >> 4); }
  DEVICE void store(const PCodes& p, int half) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mine + half * HALF_BYTES +
                                                                                            8 * h * HALF),
                   "r"(p.word[0][h]), "r"(p.word[0][2 + h]), "r"(p.word[1][h]), "r"(p.word[1][2 + h])
                   : "memory");
  }
  DEVICE static void publish() {
    fence_async_proxy();
    __syncwarp();
  }
};

// Returns a mask of the bytes of p whose keys are visible to the row. `word` holds keys 4q .. 4q + 3 of 16.
DEVICE u32 visible_bytes(const VisibleKeys& visible, int step, int word) {
  const i32 key = step * 32 + word / 2 * 16;
#if KEY_MASK
  return visible.mask_word(key / 16) * 255;
#endif
  return ~shift_left(~0u, 8 * max(visible.keys[word % 2] - key, 0));
}

// The running maxima of the scores of this thread's two rows. T is (S << shift) * C.
struct RowMaxima {
  i32 C[2], shift[2], peak[2];
  bool fast_exp;  // whether the faster form of the exponential is exact for all rows of the warp

  DEVICE void update_row_max(const Scores& s, bool partial, const VisibleKeys& visible) {
    update_maxima(peak, s, partial, visible);
  }
  DEVICE i64 exponent(int h, i32 score) const { return (i64)(score << shift[h]) * C[h]; }
};

// Which 16 keys of a half tile a word of P is of.
DEVICE constexpr int sixteen_of_word(int word) { return word / 4 * 2 + word % 4 / 2; }
// Returns the first of the four scores of a word of P, which are two pairs of adjacent scores. The lowest bit of `word`
// is the row.
DEVICE const i32* scores_of_word(const Scores& s, int word) {
  return &s[16 * (word / 4) + 8 * (word % 4 / 2) + 2 * (word % 2)];
}

// P in one digit (P8) or two (P16: 256 high + low), each with its own accumulator. Unit is the unit of T.
template <int DIGITS, class Unit = Octaves>
struct PDigits : RowMaxima {
  typedef typename AccumulatorOf<DIGITS>::Type Accumulator;
  struct P {
    PCodes digit[DIGITS];
  };
  i32 acc[DIGITS][HEAD_DIM / 2];
  u32 sums[DIGITS][2];  // of the p that this thread holds
#if MANY_KEYS
  volatile i64 wide_acc[HEAD_DIM / 2];  // in local memory, because the registers hold no more
  u64 wide_sums[2];
#endif
  SharedP shared_p;  // used where P_SHARED is 1

  DEVICE void init(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
    if (P_SHARED) shared_p = SharedP(shared.codes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!ROW_SCALES && h == 1) {
        C[1] = C[0], shift[1] = shift[0], peak[1] = NO_SCORE;
        continue;
      }
      Score score = score_of(p, at, h);
      // uniform for the compiler
      if (!ROW_SCALES) score = {__shfl_sync(~0u, score.C, 0), __shfl_sync(~0u, score.k, 0)};
      C[h] = score.C, shift[h] = score.k, peak[h] = NO_SCORE;
    }
  }
  DEVICE void clear_sums() {
#pragma unroll
    for (int i = 0; i < DIGITS * HEAD_DIM / 2; ++i) acc[i / (HEAD_DIM / 2)][i % (HEAD_DIM / 2)] = 0;
#pragma unroll
    for (int i = 0; i < DIGITS * 2; ++i) sums[i / 2][i % 2] = 0;
#if MANY_KEYS
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) wide_acc[i] = 0;
    wide_sums[0] = wide_sums[1] = 0;
#endif
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) wgmma_hold(acc[digit]);  // before any product is issued
  }
#if MANY_KEYS
  DEVICE void widen_sums() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) {
      wide_acc[i] = wide_acc[i] + ((i64)acc[0][i] << 8) + acc[1][i];
      acc[0][i] = acc[1][i] = 0;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) wide_sums[h] += ((u64)sums[0][h] << 8) + sums[1][h], sums[0][h] = sums[1][h] = 0;
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) wgmma_hold(acc[digit]);  // before the next product is issued
  }
#endif
  DEVICE static Score score_of(const Params& p, const ThreadRows& at, int h) {
    if (FLOAT_KV || (SIZE<QUERY> > 1 && !p.score.ptr))
      return score_constants<Unit>(*head_element<float>(p.q_scale, at.batch, at.head),
                                   *head_element<float>(p.k_scale, at.batch, at.kv_head), p.sm_scale);
    const i64 row = head_offset(p.score, at.batch, at.head) + min(at.row + 8 * h, p.nq - 1) * p.score.n;
    return unpack_score(((const i64*)p.score.ptr)[row]);
  }
  DEVICE void add_row_sums(const P& p) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit)
        sums[digit][i % 2] = add_bytes(p.digit[digit].word[i / 4][i % 4], sums[digit][i % 2]);
  }
  DEVICE void mask_p(P& p, const VisibleKeys& visible) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 bytes = visible_bytes(visible, i / 4, i % 4);
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) p.digit[digit].word[i / 4][i % 4] &= bytes;
    }
  }
  DEVICE void store_p(const P& p, int half) const {
    static_assert(DIGITS == 1 || !P_SHARED);
    if constexpr (P_SHARED) {
      shared_p.store(p.digit[0], half);
      if (half == 1) shared_p.publish();
    }
  }
  DEVICE void issue_pv(const P& p, int half, u64 v) {
    wgmma_order();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit)
        if constexpr (P_SHARED)
          wgmma_u8(acc[digit], shared_p.operand(half) + 2 * i, v + 2 * i);
        else
          wgmma_u8(acc[digit], p.digit[digit].word[i], v + 2 * i);
    wgmma_commit();
  }
  DEVICE float tile_scale(u32) const { return 1.0f; }
  DEVICE void wait() {
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) wgmma_wait(acc[digit]);
  }
  DEVICE u32 l(int h) const { return quad_sum(DIGITS == 1 ? sums[0][h] : (sums[0][h] << 8) + sums[DIGITS - 1][h]); }
  template <class ACC = Accumulator>
  DEVICE ACC result(int h, int channel) const {
    const int i = channel / 2 * 4 + 2 * h + channel % 2;
    if constexpr (DIGITS == 1)
      return acc[0][i];
    else
      return {acc[0][i], acc[1][i]};
  }
  DEVICE void store(const Params& p, const ThreadRows& at, const i64 (&t_max)[2],
                    const OutputConstants& output_constants) const {
    // where float32 holds the sums, their conversion takes fewer instructions
    if (DIGITS == 2 && !IsInteger<OUT>::value && has_small_sums())
      store_as<typename AccumulatorOf<DIGITS, true>::Type>(p, at, t_max, output_constants);
    else
      store_as<Accumulator>(p, at, t_max, output_constants);
  }
  template <class ACC>
  DEVICE void store_as(const Params& p, const ThreadRows& at, const i64 (&t_max)[2],
                       const OutputConstants& output_constants) const {
    const u32 l[2] = {this->l(0), this->l(1)};
    RowScale<OUT, ACC> scales[2];
    row_scales(computes_second_row() ? l[1] : l[0], output_constants, scales);
    ACC mine[2][CHANNELS];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) mine[h][i] = this->template result<ACC>(h, i);
    u32 words[2][OUTPUT_WORDS];
    output_words<OUT>(mine, scales, output_constants, words);
#pragma unroll
    for (int h = 0; h < 2; ++h) store_row(p, at, h, words[h], t_max[h], l[h]);
  }
  // Whether no sum of P V of any digit and row of the warp can exceed 2^24, which float32 holds: V's codes are at most
  // 128 in magnitude, and a quad has the sums of a row.
  DEVICE bool has_small_sums() const {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 2 * DIGITS; ++i) most = max(most, sums[i / 2][i % 2]);
    return __all_sync(~0u, most <= 1 << 15);
  }
  static constexpr int OUTPUT_WORDS = CHANNELS * SIZE<OUT> / 4;
  DEVICE static void store_row(const Params& p, const ThreadRows& at, int h, const u32 (&words)[OUTPUT_WORDS],
                               i64 t_max, u32 l) {
    const i32 row = at.row + 8 * h;
    if (row >= at.end) return;
    const i64 to = head_offset(p.out, at.batch, at.head) + row * p.out.n + threadIdx.x % 4 * LANE_CHANNELS;
    store_channels((u8*)element<OUT>(p.out.ptr, to), words);
    if (p.l && threadIdx.x % 4 == 0) {
      const i64 to = row_index(p, at.batch, at.head, row);
      p.t_max[to] = t_max;
      p.l[to] = l;
    }
  }
};

// How the scores of a row become P of intflash and intflash_p8, rounded.
template <int DIGITS>
struct RoundedP {
  struct Added {};                                  // to P of a thread's keys: nothing that depends on the key
  static constexpr i64 OFFSET = K0;                 // T + B where T is the row's maximum
  static constexpr int DOTS = DIGITS == 2 ? 0 : 2;  // see four_p

  template <bool EXP_32BIT>
  DEVICE static void four(i32 a, i32 b, i32 c, i32 d, i32 C, i64 B, Added, u32 (&p)[DIGITS]) {
    if constexpr (EXP_32BIT)
      four_p<DOTS>(a, b, c, d, C >> 8, (u32)(B >> 8), p);
    else
      four_p(a, b, c, d, C, B, p);
  }
  DEVICE static Added added(i32) { return {}; }
  DEVICE static OutputConstants output_constants(const OutputConstants& s) { return s; }
};

// The softmax with the exact maximum, which a first pass over the keys finds. Form: how scores become P.
template <int DIGITS, class Form = RoundedP<DIGITS>>
struct ExactMaximum : PDigits<DIGITS> {
  typedef Form PForm;
  typedef typename Form::Added Added;
  typedef typename PDigits<DIGITS>::P P;
  static constexpr int PASSES = 2, IN_FLIGHT = ROW_SCALES ? 0 : 1;  // with ROW_SCALES, 1 would spill registers
  static constexpr int BUFFERS = DIGITS * HEAD_DIM / 2 > (CONSUMERS == 3 ? 48 : 64) ? 1 : 2;
  static constexpr bool RESCALES = false,
                        WHOLE_TILES = false;  // the row maximum is known before the second pass
  // In the first pass there are registers for the scores of two tiles, because the sums are not there yet. With one
  // digit this was measured to be slower; beside the code path of remainder rows it would spill registers.
  static constexpr bool MAXIMA_OF_TWO_TILES = DIGITS == 2 && BUFFERS == 1 && !REMAINDER_KEY_TILES;
  static constexpr int UNROLL = 1;
  // Whether warps without rows compute no exponentials. The check breaks up the schedule of the main loop: where many
  // tiles of keys are streamed it takes more time than it saves. With KEY_COUNTS all registers are taken.
  static constexpr bool SKIPS_ROWS = KV_RESIDENT && !KEY_COUNTS;
  i64 B[2];
  bool active;  // whether the warp has rows; in the last tile of a head it may have none

  DEVICE void init(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
    PDigits<DIGITS>::init(p, at, shared);
    active = !SKIPS_ROWS || __any_sync(~0u, at.row < at.end);
  }
  DEVICE void update_row_max(const Scores& s, bool partial, const VisibleKeys& visible) {
    if (!SKIPS_ROWS || active) RowMaxima::update_row_max(s, partial, visible);
  }

  // Returns the largest octave of either row's maximum at which 32 bits hold T + B of both rows.
  DEVICE i32 limit(const SharedLayout& shared) const {
    const u32 magnitudes = row_magnitudes(shared, threadIdx.x), a = magnitudes & 0xFFFF, b = magnitudes >> 16;
    if (!ROW_SCALES) return exp_32bit_limit(this->C[0], this->shift[0], max(a, b));
    return min(exp_32bit_limit(this->C[0], this->shift[0], a), exp_32bit_limit(this->C[1], this->shift[1], b));
  }
  DEVICE void finish_first_pass(const SharedLayout& shared) {
    const i32 limit = this->limit(shared);
    bool fast_exp = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 top = this->exponent(h, quad_max(this->peak[h]));
      fast_exp &= octave_above(top) <= limit;
      B[h] = Form::OFFSET - top;
    }
    this->fast_exp = __all_sync(~0u, fast_exp);
  }
  // SKIPS: computes no more of a half tile's keys than the warp's rows see.
  template <bool EXP_32BIT, bool SKIPS>
  DEVICE void powers(const Scores& s, const VisibleKeys& visible, Added added, P& p) const {
    if constexpr (SKIPS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (visible.any_of_16(i))
          powers_of<EXP_32BIT>(s, 2 * i, 2 * i + 2, added, p);
        else
          clear(2 * i, 2 * i + 2, p);
      }
    } else {
      powers_of<EXP_32BIT>(s, 0, 8, added, p);
    }
  }
  DEVICE static void clear(int first, int end, P& p) {
#pragma unroll
    for (int i = first; i < end; ++i)
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) p.digit[digit].word[i / 4][i % 4] = 0;
  }
  template <bool EXP_32BIT>
  DEVICE void powers_of(const Scores& s, int first, int end, Added added, P& p) const {
#pragma unroll
    for (int i = first; i < end; ++i) {
      const i32* x = scores_of_word(s, i);
      const int h = i % 2, by = EXP_32BIT ? 0 : this->shift[h];
      const i32 a = x[0] << by, b = x[1] << by, c = x[4] << by, d = x[5] << by;
      u32 four[DIGITS];
      Form::template four<EXP_32BIT>(a, b, c, d, this->C[h], B[h], added, four);
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) p.digit[digit].word[i / 4][i % 4] = four[digit];
    }
  }
  template <bool LAST>
  DEVICE void exponentials(const Scores& s, bool partial, const VisibleKeys& visible, u32, i32 first, P& p) {
    const Added added = Form::added(first);
    if (SKIPS_ROWS && !active) return clear(0, 8, p);
    constexpr bool SKIPS = LAST && !KEY_COUNTS;
    if (this->fast_exp)
      powers<true, SKIPS>(s, visible, added, p);
    else
      powers<false, SKIPS>(s, visible, added, p);
    if (partial) this->mask_p(p, visible);
    this->add_row_sums(p);
  }
  DEVICE void store(const Params& p, const ThreadRows& at) const {
    PDigits<DIGITS>::store(p, at, {Form::OFFSET - B[0], Form::OFFSET - B[1]}, output_constants(p, at));
  }
  DEVICE static OutputConstants output_constants(const Params& p, const Head& of) {
    return Form::output_constants(load_output_constants<OUT>(p, of.batch, of.head, of.kv_head));
  }
};

typedef ExactMaximum<1> ExactP8;
typedef ExactMaximum<2> ExactP16;

// Online softmax over granules of 128 keys. A row's accumulators are shifted when a granule raises the row's octave. P
// comes from the table.
struct Online : PDigits<1, TableSteps> {
  static constexpr int PASSES = 1, BUFFERS = 2;
  static constexpr bool RESCALES = true, WHOLE_TILES = true;
  // 2 would spill registers in these cases
  static constexpr int UNROLL = P_SHARED || ROW_SCALES || HEAD_DIM <= 32 ? 1 : 2;
  TableUnit units[ROW_SCALES ? 2 : 1];
  TableRow rows[2];
  u32 lane;       // address of this lane's first word of the table
  i32 by[2];      // octaves by which each row rises
  bool rises[2];  // whether any row of the warp rises

  DEVICE const TableUnit& unit(int h) const { return units[ROW_SCALES ? h : 0]; }
  DEVICE void init(const Params& p, const ThreadRows& at, const SharedLayout& shared) {
    PDigits::init(p, at, shared);
    lane = shared.table + threadIdx.x % 32 * 4;
    units[0] = TableUnit({C[0], shift[0]});
    if (ROW_SCALES) units[ROW_SCALES] = TableUnit({C[1], shift[1]});
    fast_exp = unit(0).clamps();
    if (ROW_SCALES) fast_exp = __all_sync(~0u, fast_exp && unit(1).clamps());
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h].init();
  }
  // Computes both halves at once, so that scores of the second half are converted to entries while bytes of the first
  // are loaded.
  template <bool CLAMPS, bool LAST>
  DEVICE void exponentials(const Scores (&s)[2], bool partial, const VisibleKeys (&visible)[2], P (&p)[2]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (LAST && !visible[i / 8].any_of_16(i % 8 / 2)) {
        p[i / 8].digit[0].word[i % 8 / 4][i % 4] = 0;
        continue;
      }
      const i32* x = scores_of_word(s[i / 8], i % 8);
      const auto p_of = [&](i32 score) { return lookup(rows[i % 2].entry<CLAMPS>(score, unit(i % 2)), lane); };
      u32& word = p[i / 8].digit[0].word[i % 8 / 4][i % 4];
      word = pack_unsigned_bytes(p_of(x[0]), p_of(x[1]), p_of(x[4]), p_of(x[5]));
    }
    if (partial) mask_p(p[0], visible[0]), mask_p(p[1], visible[1]);
  }
  // Raises the rows' octaves for the next tile's scores and rescales the row sums. `rescale_acc` shifts the
  // accumulators once their products have finished.
  DEVICE void raise_row_octaves() {
#pragma unroll
    for (int h = 0; h < 2; ++h) rises[h] = __any_sync(~0u, peak[h] > rows[h].limit);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rises[h]) raise(h);
      peak[h] = NO_SCORE;
    }
  }
  DEVICE void raise(int h) {
    TableRow& row = rows[h];
    const bool needs_64_bits = __any_sync(~0u, row.needs_64_bits(peak[h], unit(h)));
    const i32 score = quad_max(peak[h]);
    const u32 l = quad_sum(sums[0][h]);
    by[h] = needs_64_bits ? row.raise_64bit(score, unit(h)) : row.raise_32bit(score, unit(h));
    // the shift rounds, so it applies to the quad's sum and not to its parts
    sums[0][h] = threadIdx.x % 4 ? 0 : l >> by[h];
  }
  DEVICE void rescale_acc(const Scores (&)[2], bool, const VisibleKeys (&)[2], u32, float) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (rises[h])
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 4; ++i) acc[0][4 * (i / 2) + 2 * h + i % 2] >>= by[h];
    wgmma_hold(acc[0]);  // before the next product is issued
  }
  DEVICE void store(const Params& p, const ThreadRows& at) const {
    PDigits::store(p, at, {(i64)rows[0].octave(unit(0)) << 32, (i64)rows[1].octave(unit(1)) << 32},
                   load_output_constants<OUT>(p, at.batch, at.head, at.kv_head));
  }
};
