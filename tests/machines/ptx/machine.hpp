// A block of CUDA threads on one host thread, or a cluster of blocks: each thread is a fiber that runs until it has to
// wait. The C++ that translate.py makes of a kernel includes this file after `struct Registers`.
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
  u64 early;  // whether it may be read before griddepcontrol.wait
};

struct Barrier {
  int arrived = 0;
  u64 generation = 0;
  bool any = false, any_before = false;  // of the conditions of the threads: of this generation and of the last one
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
  u64 generation;                  // of the cluster's barrier at the thread's arrival
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
  u32 left;  // threads that have not ended
};

static std::vector<std::unique_ptr<Block>> cluster;
static Barrier of_cluster;
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
static bool meet_any(Barrier& barrier, int count, bool condition) {
  barrier.any |= condition;
  meet(barrier, count, [&] { barrier.any_before = barrier.any, barrier.any = false; });
  return barrier.any_before;
}

static void cluster_arrive() {
  self->generation = of_cluster.generation;
  if (++of_cluster.arrived == int(block->threads * cluster.size())) of_cluster.arrived = 0, ++of_cluster.generation, ++progress;
}
static void cluster_wait() {
  while (of_cluster.generation == self->generation) yield();
}

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

static void run_cluster(u64& random) {
  std::vector<std::pair<Block*, Thread*>> order;
  of_cluster = {};
  for (const auto& of : cluster)
    for (u32 i = 0; i < of->threads; ++i) {
      of->all.emplace_back(new Thread());
      of->all[i]->tid = i;
      order.emplace_back(of.get(), of->all[i].get());
      memset(static_cast<void*>(&of->all[i]->registers), 0xCD, sizeof(Registers));
    }
  for (size_t left = order.size(); left;) {
    const u64 before = progress;
    for (size_t i = order.size(); i > 1; --i) {  // a different order each time
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[i - 1], order[(random >> 33) % i]);
    }
    for (const auto& [of, thread] : order) {
      block = of, self = thread;
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
      left -= self->done, block->left -= self->done;
    }
    if (progress == before) fail(0, "deadlock: %u threads wait", u32(left));
  }
}

// size: blocks of a cluster along each axis.
extern "C" const char* launch(const u32* grid, const u32* size, u32 threads, u32 shared_bytes, const u8* const* structs, const u64* tensors, u32 count,
                              bool overlaps, u64 seed) {
  for (int i = 0; i < 4; ++i) parameters[i] = structs[i];
  ranges.clear();
  for (u32 i = 0; i < count; ++i) ranges.push_back({tensors[3 * i], tensors[3 * i + 1], tensors[3 * i + 2]});
  if (_setjmp(failure)) return message.c_str();
  for (u32 i = 0; i < 3; ++i)
    if (grid[i] % size[i]) return "the grid is no multiple of the cluster";
  const u32 clusters[3] = {grid[0] / size[0], grid[1] / size[1], grid[2] / size[2]}, blocks = size[0] * size[1] * size[2];
  for (u32 c = 0; c < clusters[0] * clusters[1] * clusters[2]; ++c) {
    cluster.clear();
    for (u32 b = 0; b < blocks; ++b) {
      const u32 x = c % clusters[0] * size[0] + b % size[0], y = c / clusters[0] % clusters[1] * size[1] + b / size[0] % size[1];
      const u32 z = c / clusters[0] / clusters[1] * size[2] + b / size[0] / size[1];
      cluster.emplace_back(new Block{threads, shared_bytes, {grid[0], grid[1], grid[2]}, {x, y, z}, {}, nullptr, {}, std::vector<Warp>(threads / 32),
                                     std::vector<Warpgroup>((threads + 127) / 128), {}, {}, !overlaps, threads});
      block = cluster.back().get();
      block->storage.reset(new u8[shared_bytes + 1024]);
      block->shared = reinterpret_cast<u8*>((reinterpret_cast<u64>(block->storage.get()) + 1023) / 1024 * 1024);
      memset(block->shared, 0xCD, shared_bytes);
    }
    run_cluster(seed);
  }
  return nullptr;
}
