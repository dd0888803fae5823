// The instruction sets that this processor and its operating system run, by the names that CMakeLists.txt gives them.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace intflash {

#if defined(__x86_64__)
inline unsigned cpuid_leaf7(unsigned subleaf, int reg) {
  unsigned r[4] = {0, 0, 0, 0};
  __get_cpuid_count(7, subleaf, &r[0], &r[1], &r[2], &r[3]);
  return r[reg];
}

inline bool has_f16c() {  // __builtin_cpu_supports of older Clangs does not know this name
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

inline bool has_avxvnni() { return has_avx2() && (cpuid_leaf7(1, 0) >> 4 & 1); }

inline bool has_avx512vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
}

// AMX with int8 products. Linux 5.16 and newer want to be asked once per process for the tiles' state.
inline bool has_amx() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;
  return has_avx512vnni() && (cpuid_leaf7(0, 3) >> 24 & 3) == 3 && __builtin_cpu_supports("avx512vbmi") &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
#if defined(__APPLE__)
inline bool has_feature(const char* name) {
  int32_t value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
inline bool has_neon() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_neoni8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
inline bool has_neon() { return getauxval(AT_HWCAP) >> 20 & 1; }                       // HWCAP_ASIMDDP
inline bool has_neoni8mm() { return has_neon() && (getauxval(AT_HWCAP2) >> 13 & 1); }  // HWCAP2_I8MM
#else
inline bool has_neon() { return false; }
inline bool has_neoni8mm() { return false; }
#endif
#endif

}  // namespace intflash
