// The kernel of long rows: streams tiles of 128 keys through a ring buffer in shared memory.
//
// One producer warpgroup loads the tiles (long_rows_load.cuh). CONSUMERS warpgroups compute 64 rows each, for one work
// tile of the tile scheduler after another. A warpgroup that has no rows left goes on to the next work tile. This file
// holds barriers, products and masks; a method is a struct with its softmax (integer_softmax.cuh, float_softmax.cuh).
//
// Macros:
//   HEAD_DIM         a multiple of 16
//   TENSOR_DIM       channels of the tensors: HEAD_DIM (the default), or HEAD_DIM - 8, for float Q and codes of K and V
//                    in rows of HEAD_DIM channels; Q's codes of the other 8 channels are zeros
//   CONSUMERS        number of consumer warpgroups
//   CAUSAL           0 or 1
//   TWO_GROUPS       of intflash_bfp: 1 where P is rounded, 2 where it is dithered; else 0 (the default)
//   MANY_KEYS        of intflash_bfp: 1: there are more keys than 32 bits hold the sums of; 0 (the default)
//   KEY_SCALES       K's scales: 0 one per head, 1 one per tile of 128 keys, 2 one per key
//   P_SHARED         1: P goes to the products through shared memory, because registers do not suffice
//   P_TABLE          1: P comes from a table in shared memory (exp2_table.cuh)
//   STAGES           stages of the ring buffer
//   KV_RESIDENT      1: the ring holds all K/V tiles of a head until all rows of the head are computed
//   QUERY            the type of Q: i8, or a float type with p.q_scale
//   FLOAT_KV         1: K and V are floats as Q is, with p.k_scale and p.v_scale (long_rows_quantize.cuh)
//   HEAD_AMAX_IN_KERNEL  1: with FLOAT_KV, the kernel finds the scales of each head of Q, K and V
//   VALUES_IN_RANGE  1: no float is outside its scale's range
//   VALUE            the type of V in the products: i8, half_t or bfloat_t
//   OUT              the type of the output
//   KEY_COUNTS       1: batch b has only its first ((const i32*)p.keep.ptr)[b] keys
//   KEY_MASK         1: p.keep has a byte for each key of a batch, 0 for an absent one; without CAUSAL
//   REMAINDER_KEY_TILES  key tiles of a head whose last row tile has at most 8 rows: these have a code path of their
//                    own (long_rows_remainder.cuh). 0: none has (the default)
//
// The exponentials of a tile are computed in two halves of 64 keys, or at once where the method sets WHOLE_TILES;
// `add_row_sums` and `raise_row_octaves` then update the row sums and octaves. With BUFFERS = 2 there are registers for
// the scores of both halves, and one product computes both: Q K^T of tile j + 1 and P V of tile j run while other
// warpgroups compute. With BUFFERS = 1 the scores of one half overwrite those of the other.
#pragma once
#include "epilogue.cuh"
#include "exp2_table.cuh"
#include "sm90/tile_scheduler.cuh"
#include "sm90/wgmma.cuh"
#include "two_groups.cuh"

#ifndef KEY_COUNTS
#define KEY_COUNTS 0
#endif
#ifndef KEY_MASK
#define KEY_MASK 0
#endif
static_assert(!KEY_MASK || !(CAUSAL || KEY_COUNTS || FLOAT_VALUES));

typedef i32 Scores[HALF / 2];
constexpr int CHANNELS = HEAD_DIM / 4;  // channels per thread
constexpr i32 MOST_SUM_TILES = MOST_SUMS / TILE;
// Registers per thread. A multiprocessor has 65,536.
constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

// Stores a thread's channels of a row, LANE_CHANNELS of every 4 LANE_CHANNELS, of which `to` has the first. Leaves out
// the last lane's last 8 where the output has HEAD_DIM - 8.
template <int WORDS, int ADJACENT = LANE_CHANNELS * SIZE<OUT> / 4>
DEVICE void store_channels(u8* to, const u32 (&words)[WORDS]) {
  constexpr int ABSENT = (HEAD_DIM - TENSOR_DIM) * SIZE<OUT> / 4;
#pragma unroll
  for (int i = 0; i < WORDS; i += ADJACENT, to += 16 * ADJACENT) {
    const u32(&adjacent)[ADJACENT] = (const u32(&)[ADJACENT])words[i];
    if (!ABSENT || i + ADJACENT < WORDS || threadIdx.x % 4 < 3)
      store_words(to, adjacent);
    else if constexpr (ADJACENT > ABSENT)
      store_words(to, (const u32(&)[ADJACENT - ABSENT]) adjacent);
  }
}

// The offset of the mask of a batch's keys. long_rows.cpp checks that it fits.
DEVICE u32 key_mask(const Params& p, u32 batch) {
  return mask_batch(batch, p.keep_batches, p.keep_reciprocal) * (u32)p.keep.b;
}

// A batch's keys: none is present from `count` on, and none is absent before `unmasked`.
struct BatchKeys {
  i32 count, unmasked;

  // All threads of a warp must call this together.
  DEVICE BatchKeys(const Params& p, u32 batch) {
    count = unmasked = KEY_COUNTS ? ((const i32*)p.keep.ptr)[batch] : p.nk;
    if constexpr (KEY_MASK) {
      const u8* mask = p.keep.ptr + key_mask(p, batch);
      count = 0;
#pragma unroll 4
      for (i32 key = threadIdx.x % 32 * 4; key < p.nk; key += TILE) {
        const u32 present = *(const u32*)(mask + key), absent = present ^ 0x01010101;
        if (present) count = key + 4 - leading_zeros(present) / 8;
        if (absent) unmasked = min(unmasked, key + (31 - leading_zeros(absent & (0 - absent))) / 8);
      }
      count = __reduce_max_sync(~0u, count), unmasked = __reduce_min_sync(~0u, unmasked);
    }
  }
};

// The number of key tiles that rows [first, end) see, and how many of them all rows see whole.
struct KeyTileRange {
  i32 count, whole;
  DEVICE KeyTileRange(const Params& p, const BatchKeys& of_batch, i32 first, i32 end) {
    i32 keys = CAUSAL ? min(of_batch.count, end + p.causal) : of_batch.count;
    i32 seen = CAUSAL ? min(of_batch.count, first + p.causal + 1) : of_batch.unmasked;
    // consumers wait for a head's scales by its first tile, so that a head without keys has one too
    count = keys > 0 ? (keys + TILE - 1) / TILE : HEAD_AMAX_IN_KERNEL;
    whole = seen > 0 ? seen / TILE : 0;
  }
};

// Returns the number of key tiles that are loaded for a work tile.
DEVICE i32 tiles_of(const Params& p, const WorkTile& work) {
  return KeyTileRange(p, BatchKeys(p, work.batch), work.row, work.end).count;
}

// --- a warpgroup's rows

// Loads the codes of 64 rows of Q. A warp loads the 16 rows that its own products read, so that it waits for no other
// warp; of remainder rows each warp loads all. While the rows before are stored, int8 codes are copied to shared
// memory, 16-bit floats are loaded to registers, and float32 is prefetched to L2. Floats are quantized just before use.
struct QueryLoader {
  typedef Codes<QUERY, VALUES_IN_RANGE> In;
  static constexpr u32 WIDE = K_WIDTH / 16, AT_ONCE = 32 / WIDE, ROUNDS = 16 / AT_ONCE;
  static constexpr bool HOLDS_FLOATS = SIZE<QUERY> == 2;
  const Params& p;
  const SharedLayout& shared;
  In::Raw<4> raw[ROUNDS];

  DEVICE QueryLoader(const Params& p, const SharedLayout& shared) : p(p), shared(shared) {}

  // The part of Q that a thread loads: one chunk of 16 channels of each of several rows.
  struct Chunks {
    const u8* base;
    u32 to, row, chunk;
    i32 first, last;
    i64 stride;

    DEVICE Chunks(const QueryLoader& query, const WorkTile& work, i32 tile) {
      const Params& p = query.p;
      const u32 thread = reread_thread_index();
      to = query.shared.query_rows(thread / GROUP - 1);
      row = thread % GROUP / 32 * 16 + thread % 32 / WIDE, chunk = thread % WIDE;
      first = work.row + tile * 64 + (work.is_remainder(p, tile) ? row % 16 : row);
      last = p.nq - 1, stride = p.q.n * SIZE<QUERY>;
      base = p.q.ptr + (head_offset(p.q, work.batch, work.head) + (exists() ? chunk * 16 : 0)) * SIZE<QUERY>;
    }
    DEVICE bool exists() const { return chunk < D_CHUNKS; }
    // Whether the tensors have the channels of word i of the codes.
    DEVICE bool has_word(u32 i) const { return TENSOR_DIM == HEAD_DIM ? exists() : chunk * 16 + i * 4 < TENSOR_DIM; }
    // Loads floats. Where the second half of a chunk does not exist, it repeats the first.
    DEVICE void load(u32 i, In::Raw<4>& raw) const {
      if constexpr (TENSOR_DIM == HEAD_DIM) {
        load_words(from(i), raw.word);
      } else {
        typedef u32 Half[2 * SIZE<QUERY>];
        load_words(from(i), (Half&)raw.word[0]);
        load_words(from(i) + (has_word(2) ? 8 * SIZE<QUERY> : 0), (Half&)raw.word[2 * SIZE<QUERY>]);
      }
    }
    DEVICE const u8* from(u32 i) const { return base + min(first + (i32)(i * AT_ONCE), last) * stride; }
    DEVICE u32 place(u32 i) const { return to + swizzled<K_WIDTH>(row + i * AT_ONCE, chunk); }
  };

  DEVICE void begin_load(const WorkTile& work, i32 tile) {
    const Chunks chunks(*this, work, tile);
#pragma unroll
    for (u32 i = 0; i < ROUNDS; ++i) {
      if constexpr (SIZE<QUERY> == 1)
        cp_async_16_or_zeros(chunks.place(i), chunks.from(i), chunks.exists());
      else if constexpr (HOLDS_FLOATS)
        chunks.load(i, raw[i]);
      else
        prefetch_line(chunks.from(i));
    }
  }
  DEVICE void clear() {
#pragma unroll
    for (In::Raw<4>& chunk : raw) chunk = {};
  }
  DEVICE void finish_load(const WorkTile& work, i32 tile) {
    if constexpr (SIZE<QUERY> == 1) {
      cp_async_wait_all();
    } else {
      const Chunks chunks(*this, work, tile);
      const float scale = *head_element<float>(p.q_scale, work.batch, work.head);
      if constexpr (!HOLDS_FLOATS) {
#pragma unroll
        for (u32 i = 0; i < ROUNDS; ++i) chunks.load(i, raw[i]);
      }
      const float inverse = In::usable_inverse(__frcp_rn(scale));
#pragma unroll
      for (u32 i = 0; i < ROUNDS; ++i) {
        if (In::has_far_values(inverse)) In::clamp_far_values(raw[i], inverse);
        u32 w[4];
        In::codes(raw[i], inverse, w);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) w[j] = chunks.has_word(j) ? w[j] : 0;
        store_shared(chunks.place(i), w);
      }
    }
    fence_async_proxy();
    __syncwarp();
  }
};

// Returns the key of a thread's score i, relative to the thread's first key of a half, in the order that the products
// with P need.
constexpr int LANE_KEYS = FLOAT_VALUES ? 2 : 4;  // adjacent keys per thread
DEVICE constexpr int key_of_score(int i) {
  return FLOAT_VALUES ? i / 4 * 8 + i % 2 : i / 8 * 16 + i / 4 % 2 * 2 + i % 2;
}

// The number of keys that each of a thread's two rows sees, from the thread's first key of a half on. May be negative.
// With KEY_MASK those of them that are absent are not seen.
struct VisibleKeys {
  i32 keys[2];
#if KEY_MASK
  const u8* mask;  // from the thread's first key on

  // Returns the bytes of the mask of the four keys that the thread has of 16, which are 1 where a key is present.
  DEVICE u32 mask_word(int sixteen) const { return 16 * sixteen < keys[0] ? *(const u32*)(mask + 16 * sixteen) : 0; }
#endif
  // Whether a row of the warp sees any of the `i`-th 16 keys.
  DEVICE bool any_of_16(int i) const { return __any_sync(~0u, 16 * i < max(keys[0], keys[1])); }
  DEVICE bool has(int i) const {
#if KEY_MASK
    return mask_word(key_of_score(i) / 16) >> key_of_score(i) % 16 * 8 & 1;
#else
    return key_of_score(i) < keys[i / 2 % 2];
#endif
  }
};

// Updates the running maxima of the two rows.
DEVICE void update_maxima(i32 (&peak)[2], const Scores& s, bool partial, const VisibleKeys& visible) {
  if (partial) {
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], visible.has(i) ? s[i] : NO_SCORE);
  } else {
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) peak[i / 2 % 2] = max(peak[i / 2 % 2], s[i]);
  }
}

// Returns the sums of |q| over this thread's two rows, computed by the quad, in the halves of one word.
DEVICE u32 row_magnitudes(const SharedLayout& shared, u32 thread) {
  const u32 warp = thread / 32 - 4, row = warp * 16 + thread % 32 / 4;
  u32 sum[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2 * D_CHUNKS; ++i) {
    const u32 from = shared.query + swizzled<K_WIDTH>(row + i % 2 * 8, i / 2) + thread % 4 * 4;
    sum[i % 2] = add_magnitudes(load_shared(from), sum[i % 2]);
  }
  return quad_sum(sum[1] << 16 | sum[0]);
}

// The remainder rows of a head. long_rows_remainder.cuh computes them, for the methods that have a path for them.
template <class Method>
struct RemainderRows {
  DEVICE void attend(const Params&, const SharedLayout&, const WorkTile&, i32, Stage&) {}
  DEVICE void store(const Params&, const SharedLayout&, const WorkTile&, i32) const {}
};

// --- intflash_bfp (two_groups_softmax.cuh)

// Whether rows begin before it is known which keys have no value, which floats tell when they are quantized. Beside the
// code path of remainder rows the compiler would take later products for divergent.
constexpr bool BEGINS_UNSPLIT = TWO_GROUPS && FLOAT_KV && !REMAINDER_KEY_TILES;
// Whether a method is the one for heads some of whose keys have no value.
template <class Method>
constexpr bool IS_SPLIT = false;

// Which of a thread's keys of a tile have no value.
struct ValuelessKeys {
  u32 keys;  // a bit for each key; with FLOAT_KV, the address of a word of bytes for the thread's first four

  DEVICE ValuelessKeys(const Params& p, const SharedLayout& shared, const Head& of, i32 tile, u32 stage) {
    if constexpr (FLOAT_KV)
      keys = shared.valueless_keys(stage) + threadIdx.x % 4 * 4;
    else
      keys = words_of_head(p, of)[4 * tile + threadIdx.x % 4];
  }
  DEVICE static const u32* words_of_head(const Params& p, const Head& of) {
    return (const u32*)p.valueless.ptr + head_offset(p.valueless, of.batch, of.kv_head);
  }
};

DEVICE u32 valueless_keys_of_head(const Params& p, const Head& of) {
  return valueless_keys(ValuelessKeys::words_of_head(p, of), p.nk);
}
DEVICE bool some_lane(u32 x) { return __any_sync(~0u, x != 0); }

// How many times the keys of a work tile are loaded.
template <class Method>
constexpr int KEY_PASSES = KV_RESIDENT ? 1 : Method::PASSES;

template <class Method>
struct Consumer {
  static constexpr int BUFFERS = Method::BUFFERS;  // buffers for the scores of 64 keys
  const Params& p;
  const SharedLayout& shared;
  Method method;
  Scores s[BUFFERS];
  QueryLoader query;
  u64 q;
  i32 seen[2];
  u32 mask;             // with KEY_MASK: offset of the mask of the batch's keys
  bool releases_tiles;  // whether tiles may be released after use, because no later pass needs them

  DEVICE Consumer(const Params& p, const SharedLayout& shared) : p(p), shared(shared), query(p, shared) {}

  // Returns the index of the consumer warpgroup. The broadcast makes it uniform for the compiler, which then keeps tile
  // addresses in uniform registers.
  DEVICE static u32 group() { return __shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1; }

  DEVICE void release(u32 stage) const {
    if (!KV_RESIDENT || releases_tiles) shared.release(stage);
  }

  // Issues Q K^T of a tile, or of one half where the halves share a buffer. One product writes all buffers. With two
  // products that write them separately, ptxas would wait for each product.
  DEVICE void issue_scores(int half, u32 stage) {
    issue_products(scores(), shared.k_tile(stage) + half * HALF * K_WIDTH);
  }
  // keys: the address of their codes.
  template <int COUNT>
  DEVICE void issue_products(i32 (&s)[COUNT], u32 keys) {
    const u64 k = descriptor<K_WIDTH>(keys);
    wgmma_order();
    wgmma_s8_new(s, q, k);
#pragma unroll
    for (int i = 1; i < D_STEPS; ++i) wgmma_s8(s, q + 2 * i, k + 2 * i);
    wgmma_commit();
  }
  typedef i32 Buffers[BUFFERS * HALF / 2];
  DEVICE Buffers& scores() { return *(Buffers*)s; }

  // Only products write scores that are in flight, so masks must not modify them. Otherwise the compiler waits for each
  // product.
  DEVICE void update_row_max(int half, bool partial, i32 key) {
    method.update_row_max(s[half % BUFFERS], partial, visible_keys(half, key));
  }
  DEVICE void update_row_max_of_tile(bool partial, i32 j) {
    update_row_max(0, partial, j * TILE);
    update_row_max(1, partial, j * TILE);
  }
  // Rescales for the halves from `half` on that are in buffers.
  DEVICE void rescale_acc(int half, bool partial, i32 key, u32 stage, float scale) {
    VisibleKeys visible[BUFFERS];
#pragma unroll
    for (int i = 0; i < BUFFERS; ++i) visible[i] = visible_keys(half + i, key);
    method.rescale_acc(s, partial, visible, shared.k_scales(stage) + half * (SCALE_BYTES / 2), scale);
  }
  template <bool LAST>
  DEVICE void exponentials(int half, bool partial, i32 key, u32 stage, typename Method::P& codes) {
    const u32 scales = shared.k_scales(stage) + half * (SCALE_BYTES / 2);
    method.template exponentials<LAST>(s[half % BUFFERS], partial, visible_keys(half, key), scales,
                                       first_key(half, key), codes);
  }
  // This thread's first key of half a tile.
  DEVICE static i32 first_key(int half, i32 key) { return key + half * HALF + threadIdx.x % 4 * LANE_KEYS; }
  DEVICE VisibleKeys visible_keys(int half, i32 key) const {
    const i32 first = first_key(half, key);
#if KEY_MASK
    return {seen[0] - first, seen[1] - first, p.keep.ptr + (mask + first)};
#else
    return {seen[0] - first, seen[1] - first};
#endif
  }

  DEVICE void first_scores(const Stage& at) {
    shared.wait_full(at);
    issue_scores(0, at.stage);
    wgmma_wait(scores());
  }

  // The first pass, which computes the row maxima.
  DEVICE void first_pass(i32 tiles, i32 whole, Stage& at) {
    if constexpr (Method::MAXIMA_OF_TWO_TILES) return first_pass_by_two_tiles(tiles, whole, at);
    first_scores(at);
#pragma unroll 1
    for (i32 j = 0; j + 1 < tiles; ++j) {
      const bool partial = (CAUSAL || KEY_MASK) && j >= whole;
      if constexpr (BUFFERS == 1) {
        update_row_max(0, partial, j * TILE);
        issue_scores(1, at.stage);
        wgmma_wait(scores());
      }
      release(at.stage);
      at.next();
      shared.wait_full(at);
      if constexpr (BUFFERS == 2) update_row_max(0, partial, j * TILE);
      update_row_max(1, partial, j * TILE);
      issue_scores(0, at.stage);
      wgmma_wait(scores());
    }
    const bool partial = tiles > whole;
    update_row_max(0, partial, (tiles - 1) * TILE);
    if constexpr (BUFFERS == 1) {
      issue_scores(1, at.stage);
      wgmma_wait(scores());
    }
    update_row_max(1, partial, (tiles - 1) * TILE);
    release(at.stage);
    at.next();
  }

  // The same with the scores of two tiles, in registers that later hold the sums.
  DEVICE void first_pass_by_two_tiles(i32 tiles, i32 whole, Stage& at) {
    i32 j = 0;
#pragma unroll 1
    for (; j + 2 < tiles; j += 2) maxima_of_two_tiles<false>(j, tiles, whole, at);
    maxima_of_two_tiles<true>(j, tiles, whole, at);
  }
  // Products with tile j + 1 run while the maxima of tile j are taken. LAST: there are no tiles after these two, and
  // perhaps only the first.
  template <bool LAST>
  DEVICE void maxima_of_two_tiles(i32 j, i32 tiles, i32 whole, Stage& at) {
    constexpr bool MAY_MASK = LAST || CAUSAL || KEY_MASK;
    const auto issue = [&](i32(&s)[TILE / 2]) {
      shared.wait_full(at);
      issue_products(s, shared.k_tile(at.stage));
    };
    const auto finish = [&](const i32(&s)[TILE / 2], i32 j, u32 stage) {
      release(stage);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        method.update_row_max((const Scores&)s[half * HALF / 2], MAY_MASK && j >= whole, visible_keys(half, j * TILE));
    };
    i32 first[TILE / 2], second[TILE / 2];
    const u32 stage = at.stage;
    issue(first);
    at.next();
    if (LAST && j + 1 == tiles) {
      wgmma_wait(first);
      finish(first, j, stage);
    } else {
      issue(second);
      wgmma_wait<1>(first);
      finish(first, j, stage);
      wgmma_wait(second);
      finish(second, j + 1, at.stage);
      at.next();
    }
  }

  // Computes exponentials and P V of tile j, whose scores are available (with two buffers, their row maxima and
  // rescaling are done as well), and issues Q K^T of the next tile. MAY_MASK: a row may not see all keys of the next
  // tile. FAST_EXP: the form of the exponential for WHOLE_TILES.
  template <bool LAST, bool MAY_MASK, bool FAST_EXP>
  DEVICE void tile(i32 j, i32 whole, Stage& at) {
    Stage next = at;
    next.next();
    if (!LAST) shared.wait_full(next);
    // of the tile for which the accumulators are rescaled here
    const float scale = method.tile_scale(shared.k_scales(BUFFERS == 2 && !LAST ? next.stage : at.stage));
    const u32 values = shared.v_tile(at.stage);
    const u64 v = FLOAT_VALUES ? columns_descriptor<V_BLOCK>(values) : descriptor<128>(values);
    const bool partial = (LAST || CAUSAL || KEY_MASK) && j >= whole;
    typename Method::P codes[2];
    if constexpr (BUFFERS == 2) {
      if constexpr (Method::WHOLE_TILES) {
        const VisibleKeys visible[2] = {visible_keys(0, j * TILE), visible_keys(1, j * TILE)};
        method.template exponentials<FAST_EXP, LAST>(s, partial, visible, codes);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (!Method::WHOLE_TILES) exponentials<LAST>(half, partial, j * TILE, at.stage, codes[half]);
        method.store_p(codes[half], half);
      }
      if (!LAST) issue_scores(0, next.stage);
#pragma unroll
      for (int half = 0; half < 2; ++half) method.issue_pv(codes[half], half, v + half * V_HALF);
      if constexpr (Method::WHOLE_TILES)
        method.add_row_sums(codes[0]), method.add_row_sums(codes[1]);  // while the products run
      if constexpr (!LAST) {
        // In flight are Q K^T and two P V. All of them are waited for in the iteration that issued them. A partial wait
        // for products of an earlier iteration would make ptxas wait after every product.
        wgmma_wait<2>(scores());
        if constexpr (Method::RESCALES) update_row_max_of_tile(MAY_MASK && j + 1 >= whole, j + 1);
        if constexpr (Method::WHOLE_TILES) method.raise_row_octaves();
      }
      method.wait();
      if constexpr (Method::RESCALES && !LAST)
        rescale_acc(0, MAY_MASK && j + 1 >= whole, (j + 1) * TILE, next.stage, scale);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (Method::RESCALES) {
          update_row_max(half, partial, j * TILE);
          rescale_acc(half, partial, j * TILE, at.stage, scale);
        }
        exponentials<LAST>(half, partial, j * TILE, at.stage, codes[half]);
        if (half == 0)
          issue_scores(1, at.stage);
        else if (!LAST)
          issue_scores(0, next.stage);
        method.issue_pv(codes[half], half, v + half * V_HALF);
        if (!(LAST && half == 1)) wgmma_wait<Method::IN_FLIGHT>(scores());
      }
      method.wait();
    }
    release(at.stage);
    at = next;
  }

  // Moves the sums to 64 bits where more tiles than the first j + 1 could overflow 32.
  DEVICE void widen_sums(i32 j) {
    if constexpr (MANY_KEYS)
      if (j % MOST_SUM_TILES == MOST_SUM_TILES - 1) method.widen_sums();
  }

  // The passes over the keys for a method that IS_SPLIT: the first finds the row maxima, the second computes
  // exponentials and P V. Such heads are few, so that nothing overlaps here.
  template <bool FIRST>
  DEVICE void split_pass(const Head& of, i32 tiles, Stage& at) {
#pragma unroll 1
    for (i32 j = 0; j < tiles; ++j, at.next()) {
      shared.wait_full(at);
      const ValuelessKeys valueless(p, shared, of, j, at.stage);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        issue_scores(half, at.stage);
        wgmma_wait(scores());
        const VisibleKeys visible = visible_keys(half, j * TILE);
        if constexpr (FIRST) {
          method.update_row_max(s[0], visible, valueless, half);
        } else {
          typename Method::P codes;
          method.exponentials(s[0], visible, valueless, half, first_key(half, j * TILE), codes);
          method.issue_pv(codes, half, descriptor<128>(shared.v_tile(at.stage)) + half * V_HALF);
          method.wait();
        }
      }
      release(at.stage);
      if (!FIRST) widen_sums(j);
    }
  }

  DEVICE void run_mainloop(i32 tiles, i32 whole, Stage& at) {
    if constexpr (Method::WHOLE_TILES)
      if (!method.fast_exp) return run_mainloop_as<false>(tiles, whole, at);
    run_mainloop_as<true>(tiles, whole, at);
  }
  template <bool FAST_EXP>
  DEVICE void run_mainloop_as(i32 tiles, i32 whole, Stage& at) {
    first_scores(at);
    if constexpr (Method::RESCALES && BUFFERS == 2) {
      update_row_max_of_tile(0 >= whole, 0);
      if constexpr (Method::WHOLE_TILES) method.raise_row_octaves();
      rescale_acc(0, 0 >= whole, 0, at.stage, method.tile_scale(shared.k_scales(at.stage)));
    }
    i32 j = 0;
    // For methods with short tiles, mask code in the loop costs time, because instructions are fetched past it.
    constexpr bool MAY_MASK = CAUSAL || KEY_MASK || !FAST_EXP || !Method::WHOLE_TILES;
#pragma unroll(FAST_EXP ? Method::UNROLL : 1)
    for (; j + 1 + !MAY_MASK < tiles; ++j) {
      tile<false, MAY_MASK, FAST_EXP>(j, whole, at);
      widen_sums(j);
    }
    if (!MAY_MASK && j + 1 < tiles) tile<false, true, FAST_EXP>(j++, whole, at);
    tile<true, true, FAST_EXP>(j, whole, at);
  }

  // Skips tiles that only other warpgroups need.
  DEVICE void skip_tiles(i32 tiles, Stage& at) {
#pragma unroll 1
    for (; tiles > 0; --tiles, at.next()) {
      shared.wait_full(at);
      __syncwarp();  // a lane that is far behind could otherwise find the ring full again
      shared.release(at.stage);
    }
  }

  DEVICE void load_query(const WorkTile& work, i32 tile, const Stage& at) {
    if (HEAD_AMAX_IN_KERNEL) shared.wait_full(at);  // the scales of the head are in memory then
    query.finish_load(work, tile);
  }

  // Computes 64 rows up to their output. last: this warpgroup has no later rows in the work tile. Returns false, with
  // nothing computed, where keys of the head turn out to have no value, of floats after the first pass over them.
  DEVICE bool attend(const WorkTile& work, i32 tile, bool last, Stage& at) {
    const BatchKeys keys(p, work.batch);
    const i32 first = work.row + tile * 64, tiles = KeyTileRange(p, keys, work.row, work.end).count;
    const KeyTileRange mine(p, keys, first, min(first + 64, work.end));
    const ThreadRows place = work.place(threadIdx.x, tile);
    q = descriptor<K_WIDTH>(shared.query_rows(group()));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      seen[h] = keys.count;
      if (CAUSAL) seen[h] = min(seen[h], place.row + 8 * h + p.causal + 1);
    }
    if (CAUSAL) wgmma_hold(seen);  // otherwise the compiler recomputes it in every tile
    if (KEY_MASK) mask = key_mask(p, work.batch);
    method.init(p, place, shared);
    if constexpr (Method::PASSES == 2) {
      releases_tiles = false;
      if (mine.count) {
        if constexpr (IS_SPLIT<Method>)
          split_pass<true>(place, mine.count, at);
        else
          first_pass(mine.count, mine.whole, at);
      }
      if (KV_RESIDENT)
        at.rewind(tiles);
      else
        skip_tiles(tiles - mine.count, at);
      if constexpr (BEGINS_UNSPLIT && !IS_SPLIT<Method>)
        if (some_lane(valueless_keys_of_floats(work, at))) return false;
      method.finish_first_pass(shared);
    }
    method.clear_sums();
    releases_tiles = last;
    if (mine.count) {
      if constexpr (IS_SPLIT<Method>)
        split_pass<false>(place, mine.count, at);
      else
        run_mainloop(mine.count, mine.whole, at);
    }
    if (!KV_RESIDENT)
      skip_tiles(tiles - mine.count, at);
    else if (!last)
      at.rewind(tiles);
    return true;
  }

  // Computes the CTA's tiles of 64 rows in turn with the other warpgroups. `tile` counts from the start of a work tile.
  DEVICE void run() {
    Stage at;
    TileScheduler scheduler(p), next = scheduler;
    i32 tile = group();
    WorkTile work = find_tile(next, tile);
    while (true) {
#pragma unroll 1
      for (; scheduler.i != next.i; scheduler.next(p))
        skip_tiles(KEY_PASSES<Method> * tiles_of(p, scheduler.work(p)), at);
      if (scheduler.done(p)) break;
      u32 valueless = 0;  // loaded before Q is waited for
      if constexpr (TWO_GROUPS && !FLOAT_KV) valueless = valueless_keys_of_head(p, work);
      load_query(work, tile, at);
      if constexpr (TWO_GROUPS && FLOAT_KV && !BEGINS_UNSPLIT) valueless = valueless_keys_of_floats(work, at);
      bool is_split = false;
      if constexpr (TWO_GROUPS) is_split = some_lane(valueless);
      bool is_remainder = work.is_remainder(p, tile) & !is_split;
      // the broadcast makes the value uniform for the compiler, which otherwise waits for each product
      if constexpr (TWO_GROUPS && REMAINDER_KEY_TILES) is_remainder = __shfl_sync(~0u, is_remainder, 0);
      // without this the compiler computes for all rows what both branches need, and keeps it in registers for long
      if (is_remainder) work.keep_in_registers();
      const WorkTile from = work;
      const i32 done = tile;
      const auto find_next = [&] {
        tile += CONSUMERS;
        if (!CAUSAL) work = find_tile(next, tile);
      };
      if (is_remainder) {
        RemainderRows<Method> remainder;
        remainder.attend(p, shared, work, tile, at);
        find_next();
        remainder.store(p, shared, from, done);
      } else {
        if (REMAINDER_KEY_TILES) at.make_uniform();
        const bool last = tile + CONSUMERS >= work.tiles();
        if (!is_split) {
          const bool is_done = attend(work, tile, last, at);
          if constexpr (BEGINS_UNSPLIT) is_split = !is_done;
        }
        if constexpr (TWO_GROUPS) {
          if (is_split) {
            Consumer<typename Method::Split> split(p, shared);
            split.attend(work, tile, last, at);
            split.method.store(p, work.place(reread_thread_index(), tile));
            method = Method();  // otherwise its registers, which are not read, would keep their values until here
          }
        }
        find_next();
        if (!is_split) method.store(p, from.place(reread_thread_index(), done));
      }
      if (CAUSAL) break;  // with CAUSAL, a CTA has one work tile
      if (scheduler.i != next.i) scheduler.next(p);
    }
  }
  // The same as `valueless_keys_of_head` of floats. Waits for all tiles of the head. In one loop the compiler would
  // take what follows for divergent.
  DEVICE u32 valueless_keys_of_floats(const WorkTile& of, const Stage& at) const {
    constexpr i32 MOST_TILES = TWO_GROUPS == 1 && STAGES > 6 ? 6 : STAGES;  // 6 hold ROUNDED_KEYS
    const i32 tiles = tiles_of(p, of);
    if (!BEGINS_UNSPLIT) {
      Stage s = at;
#pragma unroll 1
      for (i32 j = 0; j < tiles; ++j, s.next()) shared.wait_full(s);
    }
    u32 some = 0;
#pragma unroll
    for (i32 first = 0; first < MOST_TILES; first += 4) {  // 8 lanes take a tile
      const i32 tile = first + threadIdx.x % 32 / 8;
      if (tile >= tiles) continue;
      Stage s = at;
      s.advance(tile);
      u32 keys[4];
      load_shared(shared.valueless_keys(s.stage) + threadIdx.x % 8 * 16, keys);
      some |= keys[0] | keys[1] | keys[2] | keys[3];
    }
    return some;
  }
  // Advances the scheduler to the work tile that contains row tile `tile`, and begins to load its Q.
  DEVICE WorkTile find_tile(TileScheduler& scheduler, i32& tile) {
    WorkTile work = scheduler.work(p);
#pragma unroll 1
    while (!scheduler.done(p) && tile >= work.tiles()) {
      tile -= work.tiles();
      scheduler.next(p);
      work = scheduler.work(p);
    }
    if (!scheduler.done(p))
      query.begin_load(work, tile);
    else
      query.clear();  // otherwise its registers, which are not read, would keep their values until here
    return work;
  }
};

template <class Method, class Loader>
DEVICE void attend(const Params& p, Loader loader) {
  extern __shared__ __align__(1024) u8 memory[];
  const SharedLayout shared(shared_address(memory));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full + 8 * i, Loader::ARRIVALS);
      barrier_init(shared.empty + 8 * i, 4 * CONSUMERS);
    }
  }
  static_assert(!P_TABLE || TABLE_BYTES == 256 * WORD_BYTES);
  if constexpr (P_TABLE) fill_table(shared.table);
  fence_async_proxy();
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if constexpr (HEAD_AMAX_IN_KERNEL) loader.find_first_scales(p, shared);
  if (threadIdx.x < GROUP) {
    release_registers<LOADER_REGISTERS>();
    Stage at;
#pragma unroll 1
    for (TileScheduler scheduler(p); !scheduler.done(p); scheduler.next(p)) {
      if constexpr (HEAD_AMAX_IN_KERNEL) loader.find_scales(p, shared, scheduler);
      const WorkTile work = scheduler.work(p);
      loader.template run<KEY_PASSES<Method>>(p, shared, work, tiles_of(p, work), at);
    }
  } else {
    acquire_registers<CONSUMER_REGISTERS>();
    loader.load_first_head(p, shared);
    Consumer<Method>(p, shared).run();
  }
}
