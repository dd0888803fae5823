// Operations that the threads of a warp or a warpgroup perform together.
#pragma once
#include "memory.hpp"

// Returns each lane's value, after all lanes have given theirs.
template <int COUNT>
static u32 (&exchange(const u32 (&mine)[COUNT]))[32][8] {
  Warp& warp = block->warps[self->tid / 32];
  auto& words = warp.words[self->meetings++ & 1];
  memcpy(words[self->tid % 32], mine, sizeof mine);
  meet(warp.barrier, 32);
  return words;
}

static u32 shuffle(bool by_xor, u32 x, u32 b, u32 clamp, bool& valid) {
  const auto& words = exchange({x});
  const u32 lane = self->tid % 32, segment = clamp >> 8 & 31, last = (lane & segment) | (clamp & 31 & ~segment);
  u32 from = by_xor ? lane ^ b : (lane & segment) | (b & ~segment & 31);
  valid = from <= last;
  return words[valid ? from : lane][0];
}
static bool vote(bool all, bool x) {
  int count = 0;
  for (const auto& lane : exchange({u32(x)})) count += lane[0];
  return all ? count == 32 : count > 0;
}
static u32 ballot(bool x) {
  const auto& words = exchange({u32(x)});
  u32 lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= words[lane][0] << lane;
  return lanes;
}
template <class T, class Op>
static T warp_reduce(T x, Op op) {
  const auto& words = exchange({as<u32>(x)});
  x = as<T>(words[0][0]);
  for (int lane = 1; lane < 32; ++lane) x = op(x, as<T>(words[lane][0]));
  return x;
}

// TRANSPOSED: of 16-bit elements.
template <bool TRANSPOSED>
static void load_matrices(u32 (&out)[4], u32 address, int line) {
  const auto& addresses = exchange({address});
  const u32 lane = self->tid % 32;
  for (u32 i = 0; i < 4; ++i) {
    const auto row = [&](u32 r) { return shared_at(addresses[8 * i + r][0], 16, line, 16); };
    if (TRANSPOSED)
      out[i] = read<u16>(row(2 * (lane % 4)) + 2 * (lane / 4)) | read<u16>(row(2 * (lane % 4) + 1) + 2 * (lane / 4)) << 16;
    else
      out[i] = read<u32>(row(lane / 4) + 4 * (lane % 4));
  }
}
static void store_matrices(const u32 (&x)[4], u32 address, int line) {
  const auto& addresses = exchange({address});
  const u32 lane = self->tid % 32;
  for (u32 i = 0; i < 4; ++i) write(shared_at(addresses[8 * i + lane / 4][0], 16, line, 16) + 4 * (lane % 4), x[i]);
}

// The codes of both operands over 32 steps.
template <class A, class B>
static s32 dot(const u8* a, const u8* b) {
  s32 sum = 0;
  for (int k = 0; k < 32; ++k) sum += s32(A(a[k])) * s32(B(b[k]));
  return sum;
}

template <class A, class B>
static void warp_product(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const u32 (&c)[4]) {
  const auto& words = exchange({a[0], a[1], a[2], a[3], b[0], b[1]});
  const u32 g = self->tid % 32 / 4, q = self->tid % 4;
  for (u32 i = 0; i < 4; ++i) {
    u32 left[8], right[8];
    const u32 column = 2 * q + i % 2;
    for (u32 w = 0; w < 8; ++w) {
      left[w] = words[4 * g + w % 4][(i / 2) + 2 * (w / 4)];
      right[w] = words[4 * column + w % 4][4 + w / 4];
    }
    d[i] = c[i] + u32(dot<A, B>(reinterpret_cast<u8*>(left), reinterpret_cast<u8*>(right)));
  }
}

// Products of a warpgroup.

// Reads 32 bytes of each of `rows` rows of a K-major tile.
static std::vector<s8> tile(u64 descriptor, int rows, int line) {
  const int kinds[] = {0, 128, 64, 32}, width = kinds[descriptor >> 62];
  if (!width) fail(line, "a product's tile has no swizzle");
  const u32 start = u32(descriptor & 0x3FFF) << 4, step = u32(descriptor >> 32 & 0x3FFF) << 4;
  std::vector<s8> codes(size_t(rows) * 32);
  for (int r = 0; r < rows; ++r)
    for (u32 k = 0; k < 32; k += 16)
      memcpy(&codes[size_t(r) * 32 + k], shared_at(swizzled(start + r / 8 * step + r % 8 * width + k, width), 16, line, 16), 16);
  return codes;
}

// Computes d (+)= a b, with a from registers, or from shared memory where `a` is null.
template <class A, int COLUMNS>
static void group_product(u32* const (&d)[COLUMNS / 2], const u32* a, u64 a_descriptor, u64 b_descriptor, bool add, int line) {
  Warpgroup& group = block->warpgroups[self->tid / 128];
  const int slot = self->products++ & 1;
  const u32 lane = self->tid % 128;
  if (a) memcpy(group.a[slot][lane], a, 16);
  meet(group.barrier, 128, [&] {
    group.right[slot] = tile(b_descriptor, COLUMNS, line);
    group.operands.open.push_back({b_descriptor, COLUMNS, group.right[slot]});
    if (!a) {
      group.left[slot] = tile(a_descriptor, 64, line);
      group.operands.open.push_back({a_descriptor, 64, group.left[slot]});
    }
  });
  const u32 g = lane % 32 / 4, q = lane % 4;
  for (u32 half = 0; half < 2; ++half) {
    u32 left[8];
    for (u32 w = 0; w < 8; ++w)
      left[w] = a ? group.a[slot][lane - q + w % 4][half + 2 * (w / 4)]
                  : read<u32>(reinterpret_cast<u8*>(&group.left[slot][(lane / 32 * 16 + g + 8 * half) * 32 + 4 * w]));
    for (u32 i = 0; i < COLUMNS / 8; ++i)
      for (u32 j = 0; j < 2; ++j) {
        u32& to = *d[4 * i + 2 * half + j];
        to = (add ? to : 0) + u32(dot<A, s8>(reinterpret_cast<u8*>(left), reinterpret_cast<u8*>(&group.right[slot][(8 * i + 2 * q + j) * 32])));
      }
  }
}
static void products_commit() {
  Warpgroup& group = block->warpgroups[self->tid / 128];
  meet(group.barrier, 128, [&] { group.operands.commit(); });
}
static void products_wait(size_t pending, int line) {
  Warpgroup& group = block->warpgroups[self->tid / 128];
  meet(group.barrier, 128, [&] {
    group.operands.wait(pending, [&](const Operand& x) {
      if (tile(x.descriptor, x.rows, line) != x.codes) fail(line, "a product's operand was overwritten before it was waited for");
    });
  });
}
