// Stand-in for Vortex's <vx_intrinsics.h>, declarations only: lets any RISC-V compiler check our kernels without Vortex.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define VX_CSR_MSCRATCH 0x340
#define VX_CSR_LOCAL_MEM_BASE 0xFC3

extern "C" {
size_t vx_stub_csr_read(int csr);
void vx_barrier(int barrier_id, int num_warps);
int vx_thread_id();
int vx_hart_id();
int vx_num_cores();
int vx_num_warps();
int vx_num_threads();
}
#define csr_read(csr) vx_stub_csr_read(csr)
