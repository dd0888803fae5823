// Native shim of Vortex's intrinsics: kernels run on the host, one fiber per thread. See shim.cpp for what it checks.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define VX_CSR_MSCRATCH 0x340

extern "C" {
size_t vx_shim_arguments();   // address of the argument block
void vx_shim_barrier(int line);
int vx_shim_main();            // the kernel's main()
int vx_thread_id();
int vx_hart_id();
int vx_num_cores();
int vx_num_warps();
int vx_num_threads();
}
#define csr_read(csr) vx_shim_arguments()
#define main vx_shim_main
