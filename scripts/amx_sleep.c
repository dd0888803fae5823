// How AMX's unit falls asleep: times 8 tile products and then n vector additions, with and without products among these.
// cc -O2 -mamx-tile -mamx-int8 -mavx512f scripts/amx_sleep.c -o amx_sleep && ./amx_sleep
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char memory[1 << 15] __attribute__((aligned(4096)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

static void eight_additions(void) {
  asm volatile(
      "vpaddd %%zmm0,%%zmm0,%%zmm0\n vpaddd %%zmm1,%%zmm1,%%zmm1\n vpaddd %%zmm2,%%zmm2,%%zmm2\n vpaddd %%zmm3,%%zmm3,%%zmm3\n"
      "vpaddd %%zmm4,%%zmm4,%%zmm4\n vpaddd %%zmm5,%%zmm5,%%zmm5\n vpaddd %%zmm6,%%zmm6,%%zmm6\n vpaddd %%zmm7,%%zmm7,%%zmm7" ::
          : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7");
}

static void eight_products(void) {
  for (int i = 0; i < 8; ++i) {
    const char* x = memory + 1024 * i;
    asm volatile("tileloadd (%0,%1,1), %%tmm6\n tdpbssd %%tmm6, %%tmm5, %%tmm0" ::"r"(x), "r"(64L));
  }
}

static int ascending(const void* a, const void* b) { return (*(const double*)a > *(const double*)b) - (*(const double*)a < *(const double*)b); }

// Median of 201 means of 200 turns; between each `each` additions a product whose sum is not read, 0: none.
static double turn(int additions, int each) {
  double times[201];
  for (int r = 0; r < 201; ++r) {
    const double start = now();
    for (int i = 0; i < 200; ++i) {
      eight_products();
      for (int left = additions; left > 0;) {
        const int run = each && each < left ? each : left;
        for (int n = 0; n < run; n += 8) eight_additions();
        left -= run;
        if (left > 0) asm volatile("tdpbssd %%tmm6, %%tmm5, %%tmm1" ::);
      }
    }
    times[r] = (now() - start) / 200;
  }
  qsort(times, 201, sizeof *times, ascending);
  return times[100];
}

int main(void) {
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return puts("no AMX here"), 1;  // asks Linux for the tile registers
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } __attribute__((aligned(64))) config = {.palette = 1};
  for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64, config.rows[t] = 16;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  const int additions[] = {800, 1600, 1760, 1920, 2400, 3200, 4800}, each[] = {0, 1600, 800, 400};
  printf("ns a turn of 8 products and the additions; a product after every\n%9s %8s %8s %8s %8s\n", "additions", "none", "1600", "800", "400");
  for (int a = 0; a < 7; ++a) {
    printf("%9d", additions[a]);
    for (int e = 0; e < 4; ++e) printf(" %8.0f", turn(additions[a], each[e]));
    puts("");
  }
  return 0;
}
