// The softmax of lite and int_flash_half in the mainloop of long rows: int8 Q K^T, a float32 softmax in octaves, and
// 16-bit P and V.
#pragma once
#include "sm90/long_rows_mainloop.cuh"

constexpr float MAX_OVERSHOOT = 8.0f;   // octaves by which x may exceed 0 before a row's reference is raised
constexpr float NO_REFERENCE = -1e30f;  // of a row without keys so far

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float load_shared_float(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
  return x;
}
DEVICE float2 load_shared_pair(u32 from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
  return x;
}
DEVICE uint4 load_shared_words(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}
// Returns the largest of 128 floats, none below 0, computed by a warp. The bits of such floats are ordered as the
// floats are.
DEVICE float largest_scale(u32 from) {
  const uint4 x = load_shared_words(from + threadIdx.x % 32 * 16);
  return __uint_as_float(__reduce_max_sync(~0u, max(max(x.x, x.y), max(x.z, x.w))));
}

// p of a row is 2^x with x = score * scale of the key * unit - reference. The reference is one of the row's running
// maxima. It is raised only when x exceeds MAX_OVERSHOOT, which floats can represent, so that accumulators are rescaled
// rarely.
struct FloatSoftmax {
  // One buffer of scores leaves registers for a third warpgroup. At 48 and 64 channels there are enough registers for
  // two.
  static constexpr int PASSES = 1, BUFFERS = HEAD_DIM == 48 || HEAD_DIM == 64 ? 2 : 1, IN_FLIGHT = 0;
  static constexpr bool RESCALES = true, WHOLE_TILES = false;
  static constexpr int UNROLL = 1;
  struct P {  // of 64 keys: left operands of four products over 16 keys each
    u32 word[4][4];
  };
  float acc[HEAD_DIM / 2];
  float row_unit[2], unit[2];  // octaves per score; includes the tile's scale where tiles have one
  float reference[2], sum[2];
  static constexpr i32 INITIAL_PEAK = KEY_SCALES == 2 ? 0 : NO_SCORE;
  i32 peak[2];  // of the scores since the last rescaling

  DEVICE void init(const Params& p, const ThreadRows& at, const SharedLayout&) {
    const float octaves = (float)(p.sm_scale * 1.4426950408889634);
    const float* q_scale = (const float*)p.q_scale.ptr + head_offset(p.q_scale, at.batch, at.head);
    const float* k_scale = (const float*)p.k_scale.ptr + head_offset(p.k_scale, at.batch, at.kv_head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_unit[h] = q_scale[min(at.row + 8 * h, p.nq - 1) * p.q_scale.n] * octaves;
      if (KEY_SCALES == 0) row_unit[h] *= *k_scale;
      unit[h] = row_unit[h];
      reference[h] = NO_REFERENCE, peak[h] = INITIAL_PEAK;
    }
  }
  DEVICE void clear_sums() {
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] = 0.0f;
    wgmma_hold(acc);  // before any product is issued
  }
  DEVICE void update_row_max(const Scores& s, bool partial, const VisibleKeys& visible) {
    update_maxima(peak, s, partial, visible);
  }
  // Returns the tile's scale, or the largest scale of its keys.
  DEVICE float tile_scale(u32 scales) const {
    if constexpr (KEY_SCALES == 2) return largest_scale(scales);
    if constexpr (KEY_SCALES == 1) return load_shared_float(scales);
    return 1.0f;
  }
  template <int HALVES>
  DEVICE void rescale_acc(const Scores (&s)[HALVES], bool partial, const VisibleKeys (&visible)[HALVES], u32 scales,
                          float scale) {
    if constexpr (KEY_SCALES == 1) unit[0] = row_unit[0] * scale, unit[1] = row_unit[1] * scale;
    float top[2];
    bool above = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // with a scale for each key, a bound of the largest x above 0
      top[h] = (float)peak[h];
      above |= __fmaf_rn(top[h], KEY_SCALES == 2 ? unit[h] * scale : unit[h], -reference[h]) > MAX_OVERSHOOT;
    }
    if (__any_sync(~0u, above)) {
      if constexpr (KEY_SCALES == 2) {
        top[0] = top[1] = (float)NO_SCORE;
#pragma unroll
        for (int i = 0; i < HALVES; ++i) scaled_maxima(s[i], partial, visible[i], scales + i * (SCALE_BYTES / 2), top);
      }
      raise_reference(top);
    }
    peak[0] = peak[1] = INITIAL_PEAK;
  }
  // Returns the scales of the keys of scores i to i + 3: those of the first and of the second key, in both rows.
  static DEVICE float2 key_scales(int i, u32 scales) {
    if constexpr (KEY_SCALES == 2) return load_shared_pair(scales + threadIdx.x % 4 * 8 + 4 * key_of_score(i));
    return {1.0f, 1.0f};
  }
  static DEVICE void scaled_maxima(const Scores& s, bool partial, const VisibleKeys& visible, u32 scales,
                                   float (&top)[2]) {
#pragma unroll
    for (int i = 0; i < HALF / 2; i += 4) {
      const float2 scale = key_scales(i, scales);
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        const float x = __int2float_rn(s[j]) * (j % 2 ? scale.y : scale.x);
        if (!partial || visible.has(j)) top[j / 2 % 2] = fmaxf(top[j / 2 % 2], x);
      }
    }
  }
  DEVICE void raise_reference(const float (&top)[2]) {
    wait();  // products of the previous half may be in flight
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float raised = fmaxf(reference[h], quad_max(top[h]) * unit[h]);
      by[h] = exp2_approx(reference[h] - raised);
      reference[h] = raised;
      sum[h] *= by[h];
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] *= by[i / 2 % 2];
    wgmma_hold(acc);  // before the next product is issued
  }
  template <bool PARTIAL>
  DEVICE void exponentials(const Scores& s, const VisibleKeys& visible, u32 scales, P& p) {
#pragma unroll
    for (int i = 0; i < HALF / 2; i += 4) {
      const float2 scale = key_scales(i, scales);
      float e[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = __int2float_rn(s[i + j]) * (j % 2 ? scale.y : scale.x);
        e[j] = exp2_approx(__fmaf_rn(x, unit[j / 2], -reference[j / 2]));
        if (PARTIAL && !visible.has(i + j)) e[j] = 0.0f;
        sum[j / 2] += e[j];
      }
      p.word[i / 8][i / 2 % 4] = pack_pair(e[0], e[1], VALUE{});
      p.word[i / 8][i / 2 % 4 + 1] = pack_pair(e[2], e[3], VALUE{});
    }
  }
  template <bool LAST>
  DEVICE void exponentials(const Scores& s, bool partial, const VisibleKeys& visible, u32 scales, i32, P& p) {
    if (partial)
      exponentials<true>(s, visible, scales, p);
    else
      exponentials<false>(s, visible, scales, p);
  }
  DEVICE void store_p(const P&, int) const {}  // P stays in registers
  DEVICE void issue_pv(const P& p, int, u64 v) {
    wgmma_order();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_values(acc, p.word[i], v + 128 * i);
    wgmma_commit();
  }
  DEVICE void wait() { wgmma_wait(acc); }

  // A thread holds channels 2q and 2q + 1 of every eight.
  DEVICE void store(const Params& p, const ThreadRows& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float l = sum[h];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      const i32 row = at.row + 8 * h;
      if (row >= at.end) continue;
      const float factor = l > 0.0f ? 1.0f / l : 0.0f;
      const i64 to = head_offset(p.out, at.batch, at.head) + row * p.out.n + threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i)
        store_pair((u8*)element<OUT>(p.out.ptr, to + 8 * i), acc[4 * i + 2 * h] * factor,
                   acc[4 * i + 2 * h + 1] * factor, OUT{});
      if (p.l && threadIdx.x % 4 == 0) {
        const i64 to = row_index(p, at.batch, at.head, row);
        ((float*)p.t_max)[to] = reference[h];
        ((float*)p.l)[to] = l;
      }
    }
  }
  template <typename T>
  static DEVICE void store_pair(u8* to, float a, float b, T type) {
    if constexpr (sizeof(T) == 4)
      *(float2*)to = make_float2(a, b);
    else
      *(u32*)to = pack_pair(a, b, type);
  }
};
