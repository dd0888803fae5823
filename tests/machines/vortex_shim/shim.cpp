// Runs a kernel on the host and refuses what Vortex would punish. It fails
//   - on a barrier or tensor-unit call that not all threads reach, or that they reach in different places;
//   - on a branch that splits a warp (kernels are compiled with -fsanitize-coverage=trace-pc: the threads of a warp must
//     have run the same basic blocks between two meeting points);
//   - on a grid that vx_spawn_threads spreads over cores wrongly;
//   - on local memory past the limits, on writes past what was asked for, and on __local_mem's missing parentheses.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#include "vx_spawn.h"
#undef main

namespace {

constexpr uint32_t WARP_THREADS = 8, CORE_WARPS = 2;               // the report's machine,
constexpr uint32_t CORES = 3;                                      // with cores that rarely divide a grid
constexpr uint64_t GROUP_BYTES = 2048, CORE_BYTES = 4096, CANARY_BYTES = 4096;
constexpr unsigned char CANARY = 0xA5;
constexpr size_t STACK_BYTES = 256 << 10;

enum class State { ready, at_barrier, at_warp, done };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  State state;
  int place;            // line of the barrier, or kind of tensor-unit call
  uint64_t path;        // hash of the basic blocks since the last meeting point
  dim3_t index;
};

ucontext_t scheduler;
std::vector<Fiber> fibers;
uint32_t current;
bool running, failed;
char message[256];
const void* arguments;
vx_kernel_func_cb kernel;
const void* kernel_argument;
alignas(64) unsigned char local_memory[GROUP_BYTES + CANARY_BYTES];
uint64_t local_bytes;

void fail(const char* format, ...) {
  if (!failed) {
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
  }
  failed = true;
  if (running) swapcontext(&fibers[current].context, &scheduler);   // never resumed
}

void meet(State state, int place) {
  fibers[current].state = state;
  fibers[current].place = place;
  swapcontext(&fibers[current].context, &scheduler);
}

void fiber_main() {
  kernel(const_cast<void*>(kernel_argument));
  fibers[current].state = State::done;
  swapcontext(&fibers[current].context, &scheduler);
}

// Threads [from, to) are about to go on together: same state, same place, same path.
bool agree(uint32_t from, uint32_t to) {
  for (uint32_t t = from + 1; t < to; ++t) {
    const Fiber &a = fibers[from], &b = fibers[t];
    if (a.state != b.state) return fail("threads %u and %u of group (%u, %u) diverge: one waits at %d, the other %s", from, t,
                                        blockIdx.x, blockIdx.y, a.state == State::done ? b.place : a.place,
                                        a.state == State::done || b.state == State::done ? "has ended" : "elsewhere"), false;
    if (a.state != State::done && a.place != b.place)
      return fail("threads %u and %u meet at different barriers (lines %d and %d)", from, t, a.place, b.place), false;
    if (t / WARP_THREADS == from / WARP_THREADS && a.path != b.path)
      return fail("threads %u and %u of one warp took different branches before line %d", from, t, a.place), false;
  }
  return true;
}

void run_group(uint32_t threads) {
  memset(local_memory, CANARY, sizeof local_memory);
  local_bytes = 0;
  for (uint32_t t = 0; t < threads; ++t) {
    Fiber& f = fibers[t];
    f.state = State::ready;
    f.path = 0;
    f.place = 0;
    f.index.x = t % blockDim.x, f.index.y = t / blockDim.x % blockDim.y, f.index.z = t / blockDim.x / blockDim.y;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
  }
  for (;;) {
    for (current = 0; current < threads && !failed; ++current) {
      if (fibers[current].state != State::ready) continue;
      threadIdx = fibers[current].index;
      running = true;
      swapcontext(&scheduler, &fibers[current].context);
      running = false;
    }
    if (failed) return;
    bool released = false;
    for (uint32_t w = 0; w < threads; w += WARP_THREADS) {           // warps meet by themselves at tensor-unit calls
      const uint32_t end = w + WARP_THREADS < threads ? w + WARP_THREADS : threads;
      if (!agree(w, end)) return;
      if (fibers[w].state != State::at_warp) continue;
      for (uint32_t t = w; t < end; ++t) fibers[t].state = State::ready, fibers[t].path = 0;
      released = true;
    }
    if (released) continue;
    if (!agree(0, threads)) return;
    if (fibers[0].state == State::done) break;
    for (uint32_t t = 0; t < threads; ++t) fibers[t].state = State::ready, fibers[t].path = 0;
  }
  for (uint64_t i = local_bytes; i < sizeof local_memory; ++i)
    if (local_memory[i] != CANARY)
      return fail("local memory overflow: byte %llu was written, %llu were asked for", (unsigned long long)i,
                  (unsigned long long)local_bytes);
}

}  // namespace

extern "C" {

dim3_t blockIdx, threadIdx, gridDim, blockDim;
uint32_t vx_shim_group = 2;

size_t vx_shim_arguments() { return reinterpret_cast<size_t>(arguments); }
int vx_thread_id() { return current % WARP_THREADS; }
int vx_hart_id() { return current; }
int vx_num_cores() { return CORES; }
int vx_num_warps() { return CORE_WARPS; }
int vx_num_threads() { return WARP_THREADS; }
void vx_shim_barrier(int line) { meet(State::at_barrier, line); }
void vx_shim_warp(int call) { meet(State::at_warp, call); }

void __sanitizer_cov_trace_pc() {
  if (!running) return;
  uint64_t& path = fibers[current].path;
  path = (path ^ reinterpret_cast<uintptr_t>(__builtin_return_address(0))) * 1099511628211ull;
}

void* vx_shim_local_mem(uint64_t bytes, uint64_t offset) {
  const uint64_t group_warps = (fibers.size() + WARP_THREADS - 1) / WARP_THREADS;
  if (offset != vx_shim_group * bytes) fail("__local_mem needs parentheses around its argument");
  if (bytes > GROUP_BYTES) fail("local memory overflow: %llu bytes asked for, a group has 2048", (unsigned long long)bytes);
  if (bytes * (CORE_WARPS / group_warps) > CORE_BYTES)
    fail("local memory overflow: %llu bytes for each of a core's groups, a core has 4096", (unsigned long long)bytes);
  local_bytes = bytes > local_bytes ? bytes : local_bytes;
  return local_memory;
}

void vx_shim_store_tile(void* to, const void* from, uint32_t rows, uint32_t columns, size_t stride) {
  if (current % WARP_THREADS == 0)                                  // once, not once per thread
    for (uint32_t i = 0; i < rows; ++i)
      memcpy(static_cast<uint32_t*>(to) + i * stride, static_cast<const uint32_t*>(from) + i * columns, columns * 4);
}

float vx_shim_half(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  float x = exponent ? __builtin_ldexpf(1024 + fraction, exponent - 25) : __builtin_ldexpf(fraction, -24);
  if (exponent == 31) x = fraction ? __builtin_nanf("") : __builtin_inff();
  return bits >> 15 ? -x : x;
}

int vx_spawn_threads(uint32_t dimension, const uint32_t* grid_dim, const uint32_t* block_dim, vx_kernel_func_cb callback,
                     const void* arg) {
  for (uint32_t i = 0; i < 3; ++i) {
    gridDim.m[i] = grid_dim && i < dimension ? grid_dim[i] : 1;
    blockDim.m[i] = block_dim && i < dimension ? block_dim[i] : 1;
  }
  const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
  if (threads == 0 || threads > WARP_THREADS * CORE_WARPS) return fail("a group of %u threads does not fit a core", threads), -1;
  const uint32_t groups = gridDim.x * gridDim.y * gridDim.z, warps = (threads + WARP_THREADS - 1) / WARP_THREADS;
  const uint32_t needed = (groups * warps + CORE_WARPS - 1) / CORE_WARPS, active = needed < CORES ? needed : CORES;
  if (groups % active > 1)                                          // its offsets then skip a group per core
    return fail("vx_spawn_threads leaves groups out: %u of %u cores have one more", groups % active, active), -1;
  kernel = callback;
  kernel_argument = arg;
  fibers.resize(threads);
  for (Fiber& f : fibers) f.stack.resize(STACK_BYTES);
  for (uint32_t g = 0; g < groups && !failed; ++g) {
    blockIdx.x = g % gridDim.x, blockIdx.y = g / gridDim.x % gridDim.y, blockIdx.z = g / gridDim.x / gridDim.y;
    run_group(threads);
  }
  fibers.clear();
  return failed ? -1 : 0;
}

// Runs the kernel on one argument block whose addresses are host addresses; null, or what went wrong.
const char* vx_shim_run(const void* argument_block) {
  arguments = argument_block;
  failed = running = false;
  const int code = vx_shim_main();
  if (!failed && code != 0) snprintf(message, sizeof message, "the kernel returned %d", code), failed = true;
  return failed ? message : nullptr;
}
}
