// Which keys a row sees, and its bias. A word of keys is the four keys 16 t + 4 q to 16 t + 4 q + 3 of a group t of 16
// that lane q of a quad holds.
//
// Macros: BIAS (int32, in octaves of BIAS_FRACTION_BITS) and KEEP (bool): 0 none, 1 with contiguous keys, 2 one value
// for all keys, 4 with contiguous keys that are read four at a time. WINDOW: 1: rows see no keys before their window.
#pragma once
#include "params.cuh"

template <typename T, int KIND>
struct MaskRow {
  const T* row;

  MaskRow() = default;
  DEVICE MaskRow(const View& x, u32 batch, u32 batches, u32 reciprocal, u32 head, i64 at, i64 first_key) {
    const u32 b = mask_batch(batch, batches, reciprocal);
    row = (const T*)x.ptr + head_offset(x, b, head) + at * x.n + (KIND == 2 ? 0 : first_key);
  }
  // Reads the four keys from `key` on. Keys past the last one repeat others.
  DEVICE void read(i32 key, i32 keys, T (&x)[4]) const {
    struct alignas(4 * sizeof(T)) Four {
      T x[4];
    };
    if constexpr (KIND == 4) {
      const Four four = *(const Four*)(row + min(key, keys - 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = four.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = row[KIND == 2 ? 0 : min(key + i, keys - 1)];
    }
  }
};

struct RowMask {
  i32 seen;  // keys from this one on are beyond a causal mask or the end
#if WINDOW
  i32 start;  // keys before this one are before the window
#endif
#if BIAS
  MaskRow<i32, BIAS> bias;
#endif
#if KEEP
  MaskRow<u8, KEEP> keep;
#endif

  // Returns a mask of the bytes of present keys, but for those that the bias makes absent. PARTIAL: the row may not see
  // all keys of the word.
  template <bool PARTIAL>
  DEVICE u32 present(i32 key, i32 keys) const {
    u32 bytes = PARTIAL ? ~shift_left(~0u, 8 * max(seen - key, 0)) : ~0u;
#if WINDOW
    if (PARTIAL) bytes &= shift_left(~0u, 8 * max(start - key, 0));
#endif
#if KEEP
    u8 x[4];
    keep.read(key, keys, x);
    bytes &= (x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24) * 255u;
#endif
    return bytes;
  }
};
