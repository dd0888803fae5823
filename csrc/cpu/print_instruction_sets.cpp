// Prints the instruction sets of this machine as a CMake list; CMakeLists.txt runs it for a build of these only.
#include <cstdio>

#include "cpu/features.h"

int main() {
#if defined(__x86_64__)
  if (intflash::has_amx()) std::printf("amx;");
  if (intflash::has_avx512vnni()) std::printf("avx512vnni;");
  if (intflash::has_avxvnni()) std::printf("avxvnni;");
  if (intflash::has_avx2()) std::printf("avx2;");
#elif defined(__aarch64__)
  if (intflash::has_neoni8mm()) std::printf("neoni8mm;");
  if (intflash::has_neon()) std::printf("neon;");
#endif
  std::printf("generic");
}
