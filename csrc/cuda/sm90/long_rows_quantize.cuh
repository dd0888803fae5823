// The producer of long_rows.cu for float K and V: it quantizes them on the way into shared memory. It serves K/V
// resident in shared memory only, where a CTA loads each head once. With HEAD_AMAX_IN_KERNEL it finds the scales first.
// Macros: see long_rows_mainloop.cuh.
#pragma once
#include "sm90/tile_scheduler.cuh"

// Works in steps of KEYS keys. Each thread of the producer warpgroup copies its own chunks of 8 channels into staging
// slots that only it reads, up to STAGING_SLOTS steps ahead, and quantizes them once they have arrived. No thread waits
// for another, and few registers are used. All warpgroups load the CTA's first head, because none can compute before it
// is there.
struct QuantizingLoader {
  typedef Codes<QUERY, VALUES_IN_RANGE> In;
  typedef In::Raw<2> Chunk;
  // threads per row, and how many of them have channels
  static constexpr u32 LANES = K_WIDTH / 8, CHUNKS = TENSOR_DIM / 8;
  static constexpr u32 KEYS = 4 * GROUP / LANES, STEPS = TILE / KEYS, ROUND = KEYS / 4;
  static constexpr u32 ARRIVALS = STEPS * GROUP;
  static_assert(KV_RESIDENT && SIZE<QUERY> == 2 && STAGING_SLOT_BYTES == 8 * 16 * GROUP);

  // A thread's chunks of a step: 4 of K, of keys ROUND apart, then 4 of V, of adjacent keys.
  struct ThreadChunks {
    const Params& p;
    const SharedLayout& shared;
    const u8 *k, *v;
    u32 k_to, v_to;  // offsets in a tile, without the step's part
    float k_inverse, v_inverse;

    DEVICE ThreadChunks(const Params& p, const SharedLayout& shared, const Head& of) : p(p), shared(shared) {
      const u32 thread = reread_thread_index(), row = thread % GROUP / LANES, chunk = thread % LANES;
      const u32 channel = has_channels(chunk) ? chunk * 8 : 0;
      k = p.k.ptr + (head_offset(p.k, of.batch, of.kv_head) + row * p.k.n + channel) * SIZE<QUERY>;
      v = p.v.ptr + (head_offset(p.v, of.batch, of.kv_head) + 4 * row * p.v.n + channel) * SIZE<QUERY>;
      k_to = swizzled<K_WIDTH>(score_row(row), chunk / 2) + chunk % 2 * 8;
      v_to = value_place(row, channel);
      k_inverse = In::usable_inverse(__frcp_rn(*head_element<float>(p.k_scale, of.batch, of.kv_head)));
      v_inverse = In::usable_inverse(__frcp_rn(*head_element<float>(p.v_scale, of.batch, of.kv_head)));
    }
    DEVICE static bool has_channels(u32 thread) { return CHUNKS == LANES || thread % LANES < CHUNKS; }
    DEVICE static u32 value_place(u32 row, u32 channel) {
      return swizzled<128>(value_row<LANE_CHANNELS>(channel), row / 4) + row % 4 * 4;
    }
    // The address of chunk i of a step, and whether the chunk exists. Strides fit in 32 bits (long_rows.cpp checks
    // this).
    DEVICE const u8* from(u32 step, u32 i) const {
      const i32 stride = (i32)(i < 4 ? p.k.n : p.v.n) * SIZE<QUERY>;
      return (const u8*)multiply_add(key(step, i), stride, (i64)(i < 4 ? k : v));
    }
    DEVICE bool exists(u32 step, u32 i) const {
      const u32 thread = reread_thread_index();  // rereading saves the register of the thread index
      const i32 row = thread % GROUP / LANES;
      return has_channels(thread) && key(step, i) + (i < 4 ? row : 4 * row) < p.nk;
    }
    DEVICE static i32 key(u32 step, u32 i) { return step * KEYS + (i < 4 ? i * ROUND : i - 4); }

    // Lanes without channels write zeros to K, because the last product of 32 channels may have 16 that do not exist.
    // Keys 16 apart are 16 rows apart in shared memory; keys 8 apart are 4 rows apart, which flips a bit of the
    // swizzle.
    template <class FROM>
    DEVICE void quantize_keys(u32 step, u32 tile, const FROM& chunks) const {
      const u32 to = tile + step % STEPS * (KEYS * K_WIDTH) + k_to;
#pragma unroll
      for (u32 pair = 0; pair < 4; pair += 2) {
        Chunk raw[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) raw[i] = chunks.chunk_of(pair + i);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          if (In::has_far_values(k_inverse)) In::clamp_far_values(raw[i], k_inverse);
          u32 w[2];
          In::codes(raw[i], k_inverse, w);
          store_shared(ROUND % 16 ? (i ? (to ^ 64) + 4 * K_WIDTH : to) + pair * ROUND * K_WIDTH
                                  : to + (pair + i) * ROUND * K_WIDTH,
                       w);
        }
      }
    }
    // Returns the bits that are set in some of the thread's codes, in a byte for each of its four keys.
    template <class FROM>
    DEVICE u32 quantize_values(u32 step, u32 tile, const FROM& chunks) const {
      u32 bits = 0;
      if (!has_channels(threadIdx.x)) return bits;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        In::Raw<1> raw[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) raw[i] = chunks.half_chunk(4 + i, half);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
          if (In::has_far_values(v_inverse)) In::clamp_far_values(raw[i], v_inverse);
        u32 transposed[4];
        In::transposed(raw, v_inverse, transposed);
#pragma unroll
        for (u32 codes : transposed) bits |= codes;
        u32 place = v_to + half * 2048;  // where one lane gets both, channels 2 apart are 8 rows apart
        if (LANE_CHANNELS % 8 && half) {
          const u32 thread = reread_thread_index();
          place = value_place(thread % GROUP / LANES, thread % LANES * 8 + 4);
        }
        // the step's keys, and the second of two adjacent rows, flip bits of the swizzle
        const u32 even = tile + (place ^ step % STEPS * KEYS), odd = tile + (place ^ step % STEPS * KEYS ^ 144);
        store_shared(even, transposed[0]);
        store_shared(odd, transposed[1]);
        store_shared(even + 1024, transposed[2]);
        store_shared(odd + 1024, transposed[3]);
      }
      return bits;
    }
    // Marks the step's keys without a value, whose codes are all 0. A key's codes are those of LANES adjacent lanes.
    DEVICE void mark_valueless_keys(u32 step, u32 stage, u32 bits) const {
#pragma unroll
      for (u32 by = 1; by < LANES; by *= 2) bits |= __shfl_xor_sync(~0u, bits, by);
      const u32 thread = reread_thread_index(), key = 4 * (thread % GROUP / LANES);
      const u32 absent = shift_left(~0u, 8 * max(p.nk - (i32)(step * KEYS + key), 0));
      if (thread % LANES == 0)
        store_shared(shared.valueless_keys(stage) + step % STEPS * KEYS + key, __vcmpeq4(bits, 0) & ~absent);
    }
    template <class FROM>
    DEVICE void quantize(u32 step, u32 stage, const FROM& chunks) const {
      quantize_keys(step, shared.k_tile(stage), chunks);
      const u32 bits = quantize_values(step, shared.v_tile(stage), chunks);
      if constexpr (VALUELESS_BYTES) mark_valueless_keys(step, stage, bits);
    }
    DEVICE void signal_full(u32 stage, u32 steps) const {
      fence_async_proxy();
      barrier_arrive(shared.full + 8 * stage, steps);
    }
  };

  struct StagingSlot {  // a staging slot in shared memory
    u32 at;
    DEVICE StagingSlot(const SharedLayout& shared, u32 step)
        : at(shared.floats + step % STAGING_SLOTS * STAGING_SLOT_BYTES + threadIdx.x % GROUP * 16) {}
    DEVICE u32 chunk(u32 i) const { return at + i * (16 * GROUP); }
    DEVICE void begin_load(const ThreadChunks& mine, u32 step) const {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) cp_async_16_or_zeros(chunk(i), mine.from(step, i), mine.exists(step, i));
    }
    DEVICE Chunk chunk_of(u32 i) const {
      Chunk x;
      load_shared(chunk(i), x.word);
      return x;
    }
    DEVICE In::Raw<1> half_chunk(u32 i, u32 half) const {
      In::Raw<1> x;
      load_shared(chunk(i) + half * 8, x.word);
      return x;
    }
  };
  struct RegisterChunks {  // chunks in registers
    Chunk chunks[8];
    DEVICE void begin_load(const ThreadChunks& mine, u32 step) {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const bool exists = mine.exists(step, i);
        if (exists) load_words(mine.from(step, i), chunks[i].word);
#pragma unroll
        for (u32& word : chunks[i].word) word = exists ? word : 0;
      }
    }
    DEVICE Chunk chunk_of(u32 i) const { return chunks[i]; }
    DEVICE In::Raw<1> half_chunk(u32 i, u32 half) const {
      return {chunks[i].word[2 * half], chunks[i].word[2 * half + 1]};
    }
  };

  // With HEAD_AMAX_IN_KERNEL: the scales of a head of Q, K and V, from the maxima of their magnitudes. Each CTA finds
  // those of all of its heads: where two share a head, they write the same scales. The consumers read a head's scales
  // once its first tile of keys is full.
  struct HeadScales {
    static constexpr u32 TENSORS = 3, STEP_CHUNKS = 8 * GROUP;
    const Params& p;
    const SharedLayout& shared;
    const Head& of;

    DEVICE HeadScales(const Params& p, const SharedLayout& shared, const Head& of) : p(p), shared(shared), of(of) {}
    DEVICE const View& tensor(u32 which) const { return which == 0 ? p.q : which == 1 ? p.k : p.v; }
    DEVICE u32 head(u32 which) const { return which == 0 ? of.head : of.kv_head; }
    DEVICE const u8* base(u32 which) const {
      return tensor(which).ptr + head_offset(tensor(which), of.batch, head(which)) * SIZE<QUERY>;
    }
    DEVICE i32 stride(u32 which) const { return (i32)tensor(which).n * SIZE<QUERY>; }
    DEVICE i32 rows(u32 which) const { return which == 0 ? p.nq : p.nk; }
    DEVICE u32 chunks(u32 which) const { return rows(which) * CHUNKS; }

    // By all threads of the CTA.
    DEVICE void find() const {
#pragma unroll 1
      for (u32 which = 0; which < TENSORS; ++which)
        put(which,
            largest_magnitude<QUERY, TENSOR_DIM, THREADS, 8>(base(which), stride(which), rows(which), threadIdx.x));
      __syncthreads();
      store(WARPS);
      __syncthreads();
    }
    // By the producer warpgroup, through its staging slots, while the consumers compute the head before.
    DEVICE void find_behind_consumers() const {
      Position loaded;
#pragma unroll
      for (u32 i = 0; i < STAGING_SLOTS; ++i) begin_load(StagingSlot(shared, i), loaded);
      u32 slot = 0;
#pragma unroll 1
      for (u32 which = 0; which < TENSORS; ++which) {
        u32 most = 0;
#pragma unroll 1
        for (u32 first = 0; first < chunks(which); first += STEP_CHUNKS, ++slot) {
          cp_async_wait<STAGING_SLOTS - 1>();
          const StagingSlot from(shared, slot);
#pragma unroll
          for (u32 i = 0; i < 8; ++i) {
            const Chunk chunk = from.chunk_of(i);
            most = max_magnitudes(most, chunk.word, QUERY{});
          }
          begin_load(from, loaded);
        }
        put(which, max_of_pair(most, QUERY{}));
      }
      cp_async_wait<0>();
      sync_producer();
      store(GROUP / 32);
      sync_producer();
    }
    struct Position {  // a tensor and one of its chunks
      u32 which = 0, first = 0;
    };
    // Begins to load 8 chunks for each thread, zeros past a tensor's last, and goes on to the next ones.
    DEVICE void begin_load(const StagingSlot& slot, Position& at) const {
      if (at.which < TENSORS) {
        const u8* const from = base(at.which);
        const i32 stride = this->stride(at.which);
        const u32 end = chunks(at.which);
        u32 chunk = at.first + reread_thread_index();
#pragma unroll
        for (u32 i = 0; i < 8; ++i, chunk += GROUP) {
          const u32 row = chunk / CHUNKS;
          const u8* const source = (const u8*)multiply_add((i32)row, stride, (i64)from) + (chunk - row * CHUNKS) * 16;
          cp_async_16_or_zeros(slot.chunk(i), source, chunk < end);
        }
        at.first += STEP_CHUNKS;
        if (at.first >= end) at = {at.which + 1, 0};
      }
      cp_async_commit();
    }
    DEVICE void put(u32 which, u32 most) const {
      most = __reduce_max_sync(~0u, most);
      if (threadIdx.x % 32 == 0) store_shared(shared.maxima + (which * WARPS + threadIdx.x / 32) * 4, most);
    }
    DEVICE void store(u32 warps) const {
      const u32 which = threadIdx.x;
      if (which >= TENSORS) return;
      u32 most = 0;
#pragma unroll 1
      for (u32 i = 0; i < warps; ++i) most = max(most, load_shared(shared.maxima + (which * WARPS + i) * 4));
      const View& scale = which == 0 ? p.q_scale : which == 1 ? p.k_scale : p.v_scale;
      *(float*)head_element<float>(scale, of.batch, head(which)) = scale_of_magnitude<QUERY>(most);
    }
    DEVICE static void sync_producer() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
  };
  DEVICE void find_first_scales(const Params& p, const SharedLayout& shared) const {
    const TileScheduler scheduler(p);
    HeadScales(p, shared, scheduler.work(p)).find();
  }
  DEVICE void find_scales(const Params& p, const SharedLayout& shared, const TileScheduler& scheduler) const {
    if (every == 1) HeadScales(p, shared, scheduler.work(p)).find_behind_consumers();  // not of the first head
  }

  u32 every = CONSUMERS + 1;  // this warpgroup takes every `every`-th step

  template <int PASSES>
  DEVICE void run(const Params& p, const SharedLayout& shared, const Head& of, i32 tiles, Stage& at) {
    const ThreadChunks mine(p, shared, of);
    const u32 steps = tiles * STEPS;
#pragma unroll
    for (u32 i = 0; i < STAGING_SLOTS; ++i) {
      if (i * every < steps) StagingSlot(shared, i).begin_load(mine, i * every);
      cp_async_commit();
    }
#pragma unroll 1
    for (u32 step = 0, i = 0; step < steps; step += every, ++i) {
      Stage to = at;
      to.advance(step / STEPS);
      shared.wait_empty(to);
      cp_async_wait<STAGING_SLOTS - 1>();
      const StagingSlot slot(shared, i);
      mine.quantize(step, to.stage, slot);
      if (every > 1)
        mine.signal_full(to.stage, 1);
      else if (step % STEPS == STEPS - 1)
        mine.signal_full(to.stage, STEPS);
      if (step + STAGING_SLOTS * every < steps) slot.begin_load(mine, step + STAGING_SLOTS * every);
      cp_async_commit();
    }
    at.advance(tiles);
    cp_async_wait<0>();
    every = 1;
  }
  // Loads the steps of the CTA's first head that belong to a consumer warpgroup.
  DEVICE void load_first_head(const Params& p, const SharedLayout& shared) const {
    const TileScheduler scheduler(p);
    const WorkTile work = scheduler.work(p);
    const ThreadChunks mine(p, shared, work);
    const u32 steps = (KEY_MASK ? tiles_of(p, work) : (p.nk + TILE - 1) / TILE) * STEPS;
    RegisterChunks held;
    u32 step = threadIdx.x / GROUP;
    // uniform for the compiler: it would not take a warp for converged after a loop with shuffles otherwise
    if (TWO_GROUPS) step = __shfl_sync(~0u, step, 0);
    held.begin_load(mine, step);
#pragma unroll 1
    while (step < steps) {
      const RegisterChunks now = held;
      const u32 at = step;
      held.begin_load(mine, step += every);
      mine.quantize(at, at / STEPS, now);
      mine.signal_full(at / STEPS, 1);
    }
  }
};
