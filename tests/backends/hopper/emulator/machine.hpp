// A block of CUDA threads on one host thread: each is a fiber that runs until it has to wait. Included after
// `struct Registers`, by what translate.py makes of a kernel.
//
// Everything asynchronous is as late as it may be: copies land when they are waited for, and what a warpgroup's
// product reads in shared memory must still be there when it is waited for.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

using i8 = int8_t;
using u8 = uint8_t;
using s8 = int8_t;
using u16 = uint16_t;
using s16 = int16_t;
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;
using f16 = _Float16;
using pred = bool;

constexpr u32 kSharedBase = 1024;  // where a block's shared memory begins, as on the GPU
constexpr size_t kStack = 64 << 10;

struct Range {
  u64 first, last;
};

struct Barrier {
  int arrived = 0;
  u64 generation = 0;
};

struct Copy {  // to shared memory
  u32 to, bytes, present;
  const u8* from;
  const u64* map;  // of the copy engine, or null
  s32 at[5];
};

struct TransferBarrier {
  int count = 0, pending = 0;
  s64 bytes = 0;
  u32 parity = 0;
  std::vector<Copy> copies;
};

struct Operand {  // of a product that has not been waited for: where it lies, and what it was
  u64 descriptor;
  int rows;
  std::vector<i8> codes;
};

struct Warp {
  Barrier barrier;
  u32 words[2][32][8];
};

struct Warpgroup {
  Barrier barrier;
  u32 a[2][128][4];
  std::vector<i8> left[2], right[2];
  std::vector<Operand> open;
  std::vector<std::vector<Operand>> groups;
};

struct Thread {
  u32 tid;
  bool started = false, done = false;
  u32 meetings = 0, products = 0;  // of its warp and warpgroup: what two in a row exchange lies apart
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  jmp_buf context;
  ucontext_t first;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Registers registers;
};

struct Block {
  u32 threads, shared_bytes;
  u32 grid[3], index[3];
  std::unique_ptr<u8[]> storage;
  u8* shared;
  std::vector<std::unique_ptr<Thread>> all;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::map<u32, Barrier> barriers;
  std::map<u32, TransferBarrier> transfers;
  bool previous_done;
};

static Block* block;
static Thread* self;
static jmp_buf scheduler, failure;
static u64 progress;
static std::string message;
static std::vector<Range> ranges;

[[noreturn]] static void fail(int line, const char* format, ...) {
  char text[300];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  message = "PTX line " + std::to_string(line) + ", block " + std::to_string(block->index[0]) + ", thread " +
            std::to_string(self->tid) + ": " + text;
  _longjmp(failure, 1);
}

static void yield() {
  if (!_setjmp(self->context)) _longjmp(scheduler, 1);
}

// What the last one does before the others go on.
template <class Last>
static void meet(Barrier& barrier, int count, Last last) {
  const u64 generation = barrier.generation;
  if (++barrier.arrived == count) {
    last();
    barrier.arrived = 0, ++barrier.generation, ++progress;
  } else {
    while (barrier.generation == generation) yield();
  }
}
static void meet(Barrier& barrier, int count) { meet(barrier, count, [] {}); }

// ---- memory ----

static u8* shared_at(u32 address, u32 bytes, int line, u32 align) {
  const u64 at = u64(address) - kSharedBase;
  if (at + bytes > block->shared_bytes) fail(line, "%u bytes at %lld of %u of shared memory", bytes, (long long)at, block->shared_bytes);
  if (address % align) fail(line, "shared address %u is no multiple of %u", address, align);
  return block->shared + at;
}

static u8* global_at(u64 address, u32 bytes, int line, u32 align) {
  if (!block->previous_done) fail(line, "global memory before griddepcontrol.wait");
  if (address % align) fail(line, "address %llx is no multiple of %u", (unsigned long long)address, align);
  for (const Range& range : ranges)
    if (address >= range.first && address + bytes <= range.last) return reinterpret_cast<u8*>(address);
  fail(line, "%u bytes at %llx: outside of every tensor", bytes, (unsigned long long)address);
}

static u8* generic_at(u64 address, u32 bytes, int line, u32 align) {
  const u64 at = address - reinterpret_cast<u64>(block->shared);
  return at < block->shared_bytes ? shared_at(u32(at) + kSharedBase, bytes, line, align) : global_at(address, bytes, line, align);
}

static u64 generic_of_shared(u64 address) { return reinterpret_cast<u64>(block->shared) + address - kSharedBase; }
static u64 shared_of_generic(u64 address) { return address - reinterpret_cast<u64>(block->shared) + kSharedBase; }

template <class T>
static T read(const u8* from) {
  T x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
static void write(u8* to, T x) { memcpy(to, &x, sizeof x); }

// Bits as another type of the same size; integers also of another size.
template <class To, class From>
static To as(From x) {
  if constexpr (sizeof(To) == sizeof(From)) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
  } else {
    return To(x);
  }
}
template <class D, class V>
static void put(D& to, V x) { to = as<D>(x); }

// ---- copies ----

static u32 swizzled(u32 address, int width) {
  if (width == 128) return address ^ (address >> 3 & 0x70);
  if (width == 64) return address ^ (address >> 3 & 0x30);
  return address ^ (address >> 3 & 0x10);
}

// The map's words: address, 5 sizes, 4 strides in bytes, 5 of the box, the swizzle's width (emulate.py).
static u32 box_bytes(const u64* map) { return u32(map[10] * map[11] * map[12] * map[13] * map[14]); }

static void perform(const Copy& copy, int line) {
  if (!copy.map) {
    u8* to = shared_at(copy.to, copy.bytes, line, copy.bytes);
    memset(to, 0, copy.bytes);
    if (copy.present) memcpy(to, global_at(reinterpret_cast<u64>(copy.from), copy.present, line, copy.bytes), copy.present);
    return;
  }
  const u64 *size = copy.map + 1, *stride = copy.map + 6, *box = copy.map + 10;
  if (copy.to % 128) fail(line, "the copy engine writes to shared address %u", copy.to);
  for (u32 i = 0; i < box_bytes(copy.map); ++i) {
    u64 rest = i, from = copy.map[0];
    bool inside = true;
    for (int d = 0; d < 5; ++d) {
      const s64 at = copy.at[d] + s64(rest % box[d]);
      rest /= box[d];
      inside = inside && at >= 0 && at < s64(size[d]);
      from += u64(at) * (d ? stride[d - 1] : 1);
    }
    *shared_at(swizzled(copy.to + i, int(copy.map[15])), 1, line, 1) = inside ? *global_at(from, 1, line, 1) : 0;
  }
}

static void copies_wait(size_t pending, int line) {
  auto& groups = self->groups;
  while (groups.size() > pending) {
    for (const Copy& copy : groups.front()) perform(copy, line);
    groups.erase(groups.begin());
  }
}
static void copies_commit() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}
static void copies_wait_all(int line) {
  copies_commit();
  copies_wait(0, line);
}

static TransferBarrier& transfer(u32 address, int line) {
  const auto found = block->transfers.find(address);
  if (found == block->transfers.end()) fail(line, "no mbarrier at shared address %u", address);
  return found->second;
}
static void settle(TransferBarrier& b) {
  if (b.pending || b.bytes) return;
  b.parity ^= 1, b.pending = b.count, ++progress;
}
static void transfer_init(u32 address, u32 count, int line) {
  shared_at(address, 8, line, 8);
  TransferBarrier& b = block->transfers[address] = {};
  b.count = b.pending = int(count);
}
static void transfer_arrive(u32 address, u32 bytes, int line) {
  TransferBarrier& b = transfer(address, line);
  if (b.pending == 0) fail(line, "one arrival too many at an mbarrier");
  b.bytes += bytes, --b.pending;
  settle(b);
}
static bool transfer_done(u32 address, u32 parity, bool waits, int line) {
  TransferBarrier& b = transfer(address, line);
  if (b.parity == parity) {
    const std::vector<Copy> copies = std::move(b.copies);
    b.copies.clear();
    for (const Copy& copy : copies) perform(copy, line), b.bytes -= box_bytes(copy.map), ++progress;
    settle(b);
    if (waits && b.parity == parity) yield();
  }
  return b.parity != parity;
}

// ---- a warp ----

// What each lane gave, after all have.
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
template <class T, class Op>
static T warp_reduce(T x, Op op) {
  const auto& words = exchange({as<u32>(x)});
  x = as<T>(words[0][0]);
  for (int lane = 1; lane < 32; ++lane) x = op(x, as<T>(words[lane][0]));
  return x;
}

static void load_matrices(u32 (&out)[4], u32 address, int line) {
  const auto& addresses = exchange({address});
  const u32 lane = self->tid % 32;
  for (u32 i = 0; i < 4; ++i) out[i] = read<u32>(shared_at(addresses[8 * i + lane / 4][0], 16, line, 16) + 4 * (lane % 4));
}
static void store_matrices(const u32 (&x)[4], u32 address, int line) {
  const auto& addresses = exchange({address});
  const u32 lane = self->tid % 32;
  for (u32 i = 0; i < 4; ++i) write(shared_at(addresses[8 * i + lane / 4][0], 16, line, 16) + 4 * (lane % 4), x[i]);
}

// Both operands' codes of 32 steps.
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

// ---- a warpgroup ----

// 32 bytes of each of `rows` rows of a K-major tile.
static std::vector<i8> tile(u64 descriptor, int rows, int line) {
  const int kinds[] = {0, 128, 64, 32}, width = kinds[descriptor >> 62];
  if (!width) fail(line, "a product's tile has no swizzle");
  const u32 start = u32(descriptor & 0x3FFF) << 4, step = u32(descriptor >> 32 & 0x3FFF) << 4;
  std::vector<i8> codes(size_t(rows) * 32);
  for (int r = 0; r < rows; ++r)
    for (u32 k = 0; k < 32; k += 16)
      memcpy(&codes[size_t(r) * 32 + k], shared_at(swizzled(start + r / 8 * step + r % 8 * width + k, width), 16, line, 16), 16);
  return codes;
}

// d (+)= a b; a from registers, or from shared memory where `a` is null.
template <class A, int COLUMNS>
static void group_product(u32* const (&d)[COLUMNS / 2], const u32* a, u64 a_descriptor, u64 b_descriptor, bool add, int line) {
  Warpgroup& group = block->warpgroups[self->tid / 128];
  const int slot = self->products++ & 1;
  const u32 lane = self->tid % 128;
  if (a) memcpy(group.a[slot][lane], a, 16);
  meet(group.barrier, 128, [&] {
    group.right[slot] = tile(b_descriptor, COLUMNS, line);
    group.open.push_back({b_descriptor, COLUMNS, group.right[slot]});
    if (!a) {
      group.left[slot] = tile(a_descriptor, 64, line);
      group.open.push_back({a_descriptor, 64, group.left[slot]});
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
  meet(group.barrier, 128, [&] {
    group.groups.push_back(std::move(group.open));
    group.open.clear();
  });
}
static void products_wait(size_t pending, int line) {
  Warpgroup& group = block->warpgroups[self->tid / 128];
  meet(group.barrier, 128, [&] {
    while (group.groups.size() > pending) {
      for (const Operand& x : group.groups.front())
        if (tile(x.descriptor, x.rows, line) != x.codes) fail(line, "a product's operand was overwritten before it was waited for");
      group.groups.erase(group.groups.begin());
    }
  });
}

// ---- arithmetic ----

static u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 s = selector >> 4 * i & 15, byte = u32(bytes >> 8 * (s & 7)) & 255;
    out |= (s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return out;
}
template <class A, class B>
static u32 dp4a(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; ++i) c += u32(s32(A(a >> 8 * i)) * s32(B(b >> 8 * i)));
  return c;
}
template <class T>
static T bfi(T a, T b, u32 at, u32 length) {
  at &= 255, length &= 255;
  for (u32 i = 0; i < length && at + i < 8 * sizeof(T); ++i) b = (b & ~(T(1) << (at + i))) | (a >> i & 1) << (at + i);
  return b;
}
template <class T>
static T shift_left(T x, u32 by) { return by >= 8 * sizeof(T) ? 0 : T(x << by); }
template <class T>
static T shift_right(T x, u32 by) { return x >> (by >= 8 * sizeof(T) ? 8 * sizeof(T) - 1 : by) >> (by >= 8 * sizeof(T) && T(-1) > 0); }
static u32 clz(u32 x) { return x ? u32(__builtin_clz(x)) : 32; }
static u32 pack_sat_s8(s32 a, s32 b, u32 c) {
  const auto clamp = [](s32 x) { return u32(std::min(std::max(x, -128), 127)) & 255; };
  return c << 16 | clamp(a) << 8 | clamp(b);
}
static u32 bf16_of(float x) {
  const u32 bits = as<u32>(x);
  return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float bf16_to(u32 x) { return as<float>(x << 16); }
static u32 f16_of(float x) { return as<u16>(f16(x)); }
static float f16_to(u32 x) { return float(as<f16>(u16(x))); }
static float u16_to(u32 x) { return float(x); }  // exact
static u32 u16_of(float x) { return u32(x); }
template <float (*TO)(u32), u32 (*OF)(float)>
static u32 max_halves(u32 a, u32 b) {
  return OF(std::fmax(TO(a & 0xFFFF), TO(b & 0xFFFF))) | OF(std::fmax(TO(a >> 16), TO(b >> 16))) << 16;
}

// ---- a launch ----

static const u8* parameters[4];
static void kernel();

static void enter() {
  kernel();
  self->done = true, ++progress;
  _longjmp(scheduler, 1);
}

static void run_block(u64& random) {
  const u32 threads = block->threads;
  std::vector<u32> order(threads);
  for (u32 i = 0; i < threads; ++i) {
    block->all.emplace_back(new Thread());
    block->all[i]->tid = order[i] = i;
    memset(static_cast<void*>(&block->all[i]->registers), 0xCD, sizeof(Registers));
  }
  for (u32 left = threads; left;) {
    const u64 before = progress;
    for (u32 i = threads; i > 1; --i) {  // another order each time
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[i - 1], order[(random >> 33) % i]);
    }
    for (u32 i : order) {
      self = block->all[i].get();
      if (self->done) continue;
      if (!_setjmp(scheduler)) {
        if (self->started) _longjmp(self->context, 1);
        self->started = true, ++progress;
        getcontext(&self->first);
        self->first.uc_stack.ss_sp = self->stack.get();
        self->first.uc_stack.ss_size = kStack;
        makecontext(&self->first, enter, 0);
        setcontext(&self->first);
      }
      left -= self->done;
    }
    if (progress == before) fail(0, "deadlock: %u threads wait", left);
  }
}

extern "C" const char* launch(const u32* grid, u32 threads, u32 shared_bytes, const u8* const* structs, const u64* tensors, u32 count,
                              bool overlaps, u64 seed) {
  for (int i = 0; i < 4; ++i) parameters[i] = structs[i];
  ranges.clear();
  for (u32 i = 0; i < count; ++i) ranges.push_back({tensors[2 * i], tensors[2 * i + 1]});
  if (_setjmp(failure)) return message.c_str();
  for (u32 z = 0; z < grid[2]; ++z)
    for (u32 y = 0; y < grid[1]; ++y)
      for (u32 x = 0; x < grid[0]; ++x) {
        static std::unique_ptr<Block> held;
        held.reset(new Block{threads, shared_bytes, {grid[0], grid[1], grid[2]}, {x, y, z}, {}, nullptr, {}, std::vector<Warp>(threads / 32),
                             std::vector<Warpgroup>((threads + 127) / 128), {}, {}, !overlaps});
        block = held.get();
        block->storage.reset(new u8[shared_bytes + 1024]);
        block->shared = reinterpret_cast<u8*>((reinterpret_cast<u64>(block->storage.get()) + 1023) / 1024 * 1024);
        memset(block->shared, 0xCD, shared_bytes);
        run_block(seed);
      }
  return nullptr;
}
