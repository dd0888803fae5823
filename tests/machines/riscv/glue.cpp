// What the interpreter puts under a kernel in place of libvortex.a: the SDK's functions as environment calls.
#include <vx_spawn.h>

enum Call { CSR_READ = 1, SPAWN, INDEX, BEGIN, BARRIER, END };

extern "C" {
__thread dim3_t blockIdx, threadIdx;
__thread uint32_t __local_group_id;
dim3_t gridDim, blockDim;
uint32_t __warps_per_group = 2;

static inline uint32_t call(uint32_t number, uint32_t a0 = 0, uint32_t a1 = 0) {
  register uint32_t r0 __asm__("a0") = a0;
  register uint32_t r1 __asm__("a1") = a1;
  register uint32_t r7 __asm__("a7") = number;
  __asm__ volatile("ecall" : "+r"(r0) : "r"(r1), "r"(r7) : "memory");
  return r0;
}

int vx_hart_id() { return call(INDEX, 1, 0); }
int vx_num_cores() { return 1; }
int vx_num_warps() { return 2; }
int vx_num_threads() { return 8; }
size_t vx_stub_csr_read(int csr) { return call(CSR_READ, csr); }
void vx_barrier(int, int) { call(BARRIER); }
int vx_spawn_threads(uint32_t, const uint32_t*, const uint32_t*, vx_kernel_func_cb kernel, const void* arg) {
  call(SPAWN, reinterpret_cast<uintptr_t>(kernel), reinterpret_cast<uintptr_t>(arg));
  return 0;
}

// Every thread of a group starts here; instructions are counted between BEGIN and END.
void lockstep_thread(vx_kernel_func_cb kernel, void* arg) {
  for (uint32_t i = 0; i < 3; ++i) {
    blockIdx.m[i] = call(INDEX, 0, i);
    threadIdx.m[i] = call(INDEX, 1, i);
  }
  call(BEGIN);
  kernel(arg);
  call(END);
}

int main();
void _start() {
  main();
  call(END);
}
}
