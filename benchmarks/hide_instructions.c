// Hides AVX-512, AMX and AVX-VNNI from a process, so that every library in it takes its AVX2 code: a library for
// LD_PRELOAD that answers CPUID itself, by CPUID faulting (arch_prctl; the flag cpuid_fault in /proc/cpuinfo). What
// reads /proc/cpuinfo is not deceived. Linux on x86-64.
//
//   cc -O1 -shared -fPIC -o hide_instructions.so benchmarks/hide_instructions.c
//   LD_PRELOAD=$PWD/hide_instructions.so python -m benchmarks run -e integer_cpu --device cpu
//
// torch.compile needs a compiler without it, as a script that unsets LD_PRELOAD and replaces -march=native.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static struct sigaction before;

// By the instruction itself: the handler must not touch errno.
static long allow_cpuid(long allowed) {
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(SYS_arch_prctl), "D"((long)ARCH_SET_CPUID), "S"(allowed)
                   : "rcx", "r11", "memory");
  return result;
}

static void answer(int signal, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)registers[REG_RIP];
  if (info->si_code != SI_KERNEL || code[0] != 0x0F || code[1] != 0xA2) {  // no CPUID: the fault repeats
    sigaction(signal, &before, NULL);
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX];
  unsigned a, b, c, d;
  allow_cpuid(1);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
  allow_cpuid(0);
  if (leaf == 7 && part == 0) {
    b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);  // AVX-512
    c &= ~(1u << 1 | 1u << 6 | 1u << 8 | 1u << 11 | 1u << 12 | 1u << 14);             // AVX-512 VBMI to VPOPCNTDQ, GFNI
    d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);  // AVX-512, AMX
  }
  if ((leaf == 7 && part == 1) || leaf == 0x1D || leaf == 0x1E || leaf == 0x24)
    a = b = c = d = 0;  // AVX-VNNI and later
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
  struct sigaction action = {0};
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
  if (allow_cpuid(0)) fprintf(stderr, "hide_instructions: this processor has no CPUID faulting\n");
}
