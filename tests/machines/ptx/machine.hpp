// A block of CUDA threads on one host thread: each is a fiber that runs until it has to wait. The C++ that translate.py
// makes of a kernel includes this file after `struct Registers`.
//
// Everything asynchronous happens as late as allowed: copies take effect when they are waited for, and what a
// warpgroup's product reads in shared memory must still be there when the product is waited for.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "types.hpp"

constexpr u32 kSharedBase = 1024;  // where a block's shared memory begins, as on the GPU
constexpr size_t kStack = 64 << 10;

struct Range {
  u64 first, last;
};

struct Barrier {
  int arrived = 0;
  u64 generation = 0;
};

// Asynchronous operations: pending ones, and groups closed by a commit.
template <class T>
struct Groups {
  std::vector<T> open;
  std::vector<std::vector<T>> closed;

  void commit() {
    closed.push_back(std::move(open));
    open.clear();
  }
  template <class Each>
  void wait(size_t pending, Each each) {  // until so many groups are left
    while (closed.size() > pending) {
      for (const T& x : closed.front()) each(x);
      closed.erase(closed.begin());
    }
  }
};

struct Copy {  // to shared memory
  u32 to, bytes, present;
  const u8* from;
  const u64* map;  // of TMA, or null
  s32 at[5];
};

struct TransferBarrier {
  int count = 0, pending = 0;
  s64 bytes = 0;
  u32 parity = 0;
  std::vector<Copy> copies;
};

struct Operand {  // an operand of a product that has not been waited for: its address and its content
  u64 descriptor;
  int rows;
  std::vector<s8> codes;
};

struct Warp {
  Barrier barrier;
  u32 words[2][32][8];
};

struct Warpgroup {
  Barrier barrier;
  u32 a[2][128][4];
  std::vector<s8> left[2], right[2];
  Groups<Operand> operands;
};

struct Thread {
  u32 tid;
  bool started = false, done = false;
  u32 meetings = 0, products = 0;  // of the thread's warp and warpgroup; two exchanges in a row use different memory
  Groups<Copy> copies;
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

// What the last arriving thread does before the others continue.
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

#include "arithmetic.hpp"
#include "memory.hpp"
#include "warps.hpp"

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
    for (u32 i = threads; i > 1; --i) {  // a different order each time
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
