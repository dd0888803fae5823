// The C library functions that libvortex.a calls at start and exit, for a compiler without a RISC-V C library.
// Weak: a toolchain that brings its own keeps them. Byte loops, since a library memcpy may branch per thread on alignment.
#include <stddef.h>
#include <stdint.h>

#define WEAK __attribute__((weak))
#define KEEP_LOOP() __asm__ volatile("" ::: "memory") /* or the loop becomes a call of itself */

WEAK void* memcpy(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    ((char*)to)[i] = ((const char*)from)[i];
    KEEP_LOOP();
  }
  return to;
}

WEAK void* memset(void* to, int value, size_t n) {
  // Words where all is whole words: the data cache writes through, so every store is a memory access of its own. The
  // threads of a warp agree: their thread-local blocks lie whole blocks apart.
  if (value == 0 && (((uintptr_t)to | n) & 3) == 0) {
    for (size_t i = 0; i < n / 4; ++i) {
      ((uint32_t*)to)[i] = 0;
      KEEP_LOOP();
    }
    return to;
  }
  for (size_t i = 0; i < n; ++i) {
    ((char*)to)[i] = (char)value;
    KEEP_LOOP();
  }
  return to;
}

WEAK size_t strlen(const char* s) {
  size_t n = 0;
  while (s[n]) {
    ++n;
    KEEP_LOOP();
  }
  return n;
}

extern void _Exit(int code);
WEAK void exit(int code) {
  _Exit(code);
  __builtin_unreachable();
}

WEAK int atexit(void (*function)(void)) {
  (void)function;
  return 0;
}
// vx_spawn.o names vx_printf for its error message. The library's own brings in float formatting, which needs 14
// soft-float functions of a C library; the driver checks the group's size before it starts a kernel.
WEAK int vx_printf(const char* format, ...) {
  (void)format;
  return 0;
}
WEAK void __libc_init_array(void) {}
WEAK void __libc_fini_array(void) {}

// Thread-local storage of this thread at tp, from the image of Vortex's linker script.
extern char __tdata_start[], __tdata_size[], __tbss_offset[], __tbss_size[];
WEAK void __init_tls(void) {
  char* tls;
  __asm__ volatile("mv %0, tp" : "=r"(tls));
  memcpy(tls, __tdata_start, (size_t)(uintptr_t)__tdata_size);
  memset(tls + (size_t)(uintptr_t)__tbss_offset, 0, (size_t)(uintptr_t)__tbss_size);
}
