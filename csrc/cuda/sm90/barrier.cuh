// Shared-memory barriers (mbarrier) between producer and consumer warps, setmaxnreg, which moves registers between
// them, and cp.async.
#pragma once
#include "ptx.cuh"

DEVICE void barrier_init(u32 at, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(u32 at, u32 count = 1) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0], %1;}" ::"r"(at), "r"(count) : "memory");
}

// Arrives if `arrives`, without a branch.
DEVICE void barrier_arrive_if(u32 at, bool arrives) {
  asm volatile(
      "{.reg .pred p; .reg .b64 t; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(at),
      "r"((u32)arrives)
      : "memory");
}

// Arrives, and keeps the phase incomplete until `bytes` bytes have been copied.
DEVICE void barrier_expect(u32 at, u32 bytes) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(at), "r"(bytes)
               : "memory");
}

DEVICE void barrier_wait(u32 at, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra AGAIN;}" ::"r"(at),
      "r"(parity)
      : "memory");
}

// Returns whether `barrier_wait` would return at once.
DEVICE bool barrier_test(u32 at, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(at), "r"(parity)
      : "memory");
  return done;
}

// The position in a ring buffer of SIZE stages. The parity flips in every round.
template <int SIZE>
struct RingPosition {
  u32 stage = 0, parity = 0;
  DEVICE void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
  // Advances by at most SIZE stages.
  DEVICE void advance(u32 count) {
    stage += count;
    if (stage >= SIZE) stage -= SIZE, parity ^= 1;
  }
  // Advances by any number of stages.
  DEVICE void skip(u32 count) {
    stage += count;
    parity ^= stage / SIZE % 2;
    stage %= SIZE;
  }
  // Tells the compiler that all lanes have the same position, so that it computes addresses in uniform registers.
  DEVICE void make_uniform() { stage = __shfl_sync(~0u, stage, 0), parity = __shfl_sync(~0u, parity, 0); }
  DEVICE void rewind(u32 count) {
    if (stage < count) stage += SIZE, parity ^= 1;
    stage -= count;
  }
};

template <int COUNT>
DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Copies 16 bytes, or writes zeros where the source does not exist.
DEVICE void cp_async_16_or_zeros(u32 to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}
DEVICE void cp_async_4_or_zero(u32 to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(present ? 4 : 0) : "memory");
}
