// Wrappers of the PTX instructions that the kernels write themselves: copies, byte permutations, reductions.
#pragma once
#include "types.cuh"

#define DEVICE __device__ __forceinline__

// The registers that a thread can have with so many threads on a multiprocessor.
DEVICE constexpr int registers_per_thread(int threads) { return 65536 / threads < 255 ? 65536 / threads : 255; }

// Keeps a value that was computed before a loop in its register. Without this the compiler computes it again in every
// iteration.
DEVICE void keep_in_register(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE void keep_in_register(i32& x) { asm volatile("" : "+r"(x)); }
DEVICE void keep_in_register(i64& x) { asm volatile("" : "+l"(x)); }
DEVICE void keep_in_register(u8*& x) { asm volatile("" : "+l"(x)); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void cp_async_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Policies of L2 for data that nobody reads again, and for data that should stay until it is read again.
DEVICE u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE u64 evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void cp_async_16(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}
DEVICE int4 load_global_16(const void* from, u64 policy) {
  int4 x;
  asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "l"(policy)
               : "memory");
  return x;
}
DEVICE void store_global_16(void* to, const int4& x, u64 policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w), "l"(policy)
               : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING committed groups of this thread's copies have not arrived.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Makes ordinary stores to shared memory visible to wgmma and TMA (the async proxy).
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A kernel that is launched with `overlaps` may start while the previous one still runs. It must not read or write
// memory before `wait_for_previous_kernel`, and it must not use read-only loads, which the compiler could move ahead of
// the wait. Before compute capability 9.0 kernels do not overlap.
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Waits after `known` has been computed, which ptxas would otherwise move behind the wait. `known` must not be 0;
// addresses never are.
DEVICE void wait_for_previous_kernel(u64 known) {
  asm volatile("{.reg .pred p; setp.ne.u64 p, %0, 0; @p griddepcontrol.wait;}" ::"l"(known) : "memory");
}
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_start() {}
#endif

// Fetches the line of an address to L2.
DEVICE void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// Returns x << by, and 0 for by < 0 and by > 31, because PTX's shl clamps.
DEVICE u32 shift_left(u32 x, i32 by) {
  u32 r;
  asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(by));
  return r;
}

// Returns x >> by, and 0 for by > 31, because PTX's shr clamps.
DEVICE u32 shift_right(u32 x, u32 by) {
  u32 r;
  asm("shr.u32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(by));
  return r;
}

// Saturates four integers to int8 and packs them into the bytes of a word.
DEVICE u32 pack_bytes(i32 a, i32 b, i32 c, i32 d) {
  u32 w;
  asm("{.reg .b32 t; cvt.pack.sat.s8.s32.b32 t, %4, %3, 0; cvt.pack.sat.s8.s32.b32 %0, %2, %1, t;}"
      : "=r"(w)
      : "r"(a), "r"(b), "r"(c), "r"(d));
  return w;
}

// Saturates four integers to uint8 and packs them into the bytes of a word.
DEVICE u32 pack_unsigned_bytes(u32 a, u32 b, u32 c, u32 d) {
  u32 w;
  asm("{.reg .b32 t; cvt.pack.sat.u8.s32.b32 t, %4, %3, 0; cvt.pack.sat.u8.s32.b32 %0, %2, %1, t;}"
      : "=r"(w)
      : "r"(a), "r"(b), "r"(c), "r"(d));
  return w;
}

// Transposes 4 x 4 bytes: word i of `r` holds byte i of a, b, c and d.
DEVICE void transpose_bytes(u32 a, u32 b, u32 c, u32 d, u32 (&r)[4]) {
  u32 ab = permute(a, b, 0x5140), cd = permute(c, d, 0x5140);
  r[0] = permute(ab, cd, 0x5410);
  r[1] = permute(ab, cd, 0x7632);
  ab = permute(a, b, 0x7362), cd = permute(c, d, 0x7362);
  r[2] = permute(ab, cd, 0x5410);
  r[3] = permute(ab, cd, 0x7632);
}

// Saturates two integers to int16 and packs them into the halves of a word.
DEVICE u32 pack_halves(i32 low, i32 high) {
  u32 w;
  asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(w) : "r"(high), "r"(low));
  return w;
}

// Loads and stores of 8 bytes or of multiples of 16 bytes.
template <int COUNT>
DEVICE void load_global(const void* from, u32 (&w)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                 : "l"((const u8*)from + 4 * i)
                 : "memory");
}
template <int COUNT>
DEVICE void store_global(void* to, const u32 (&w)[COUNT]) {
  if constexpr (COUNT == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((u8*)to + 4 * i), "r"(w[i]), "r"(w[i + 1]),
                   "r"(w[i + 2]), "r"(w[i + 3])
                   : "memory");
  }
}

// Read-only loads, of memory that no kernel writes. They are allowed before `wait_for_previous_kernel`.
DEVICE u32 load_constant(const void* from) {
  u32 word;
  asm("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}
template <int COUNT>
DEVICE void load_constants(const void* from, u32 (&w)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
        : "l"((const u8*)from + 4 * i));
}

DEVICE void store_shared(u32 to, u32 word) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory"); }

DEVICE u32 load_shared(u32 from) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

DEVICE void load_shared(u32 from, u32 (&w)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(from) : "memory");
}
DEVICE void load_shared(u32 from, u32 (&w)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(from)
               : "memory");
}

DEVICE void store_shared(u32 to, const u32 (&w)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(w[0]), "r"(w[1]) : "memory");
}
DEVICE void store_shared(u32 to, const u32 (&w)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// Loads four matrices of 8 x 16 bytes into the words of an operand of mma.sync, in lane order. Lanes 8 i + 0..7 give
// the addresses of matrix i's rows.
DEVICE void load_matrices(u32 from, u32 (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(from)
               : "memory");
}

template <typename T>
DEVICE T quad_max(T x) {
  T y = __shfl_xor_sync(~0u, x, 1);
  x = x > y ? x : y;
  y = __shfl_xor_sync(~0u, x, 2);
  return x > y ? x : y;
}

template <typename T>
DEVICE T quad_sum(T x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Returns a * b + c as one IMAD.WIDE. ptxas fuses only this pair of instructions: C++ widens the operands first, and
// mad.wide is compiled to a product and a separate addition.
DEVICE i64 multiply_add(i32 a, i32 b, i64 c) {
  i64 d;
  asm("{.reg .u32 l, h; mov.b64 {l, h}, %3; mad.lo.cc.s32 l, %1, %2, l; madc.hi.s32 h, %1, %2, h;\n"
      "mov.b64 %0, {l, h};}"
      : "=l"(d)
      : "r"(a), "r"(b), "l"(c));
  return d;
}
