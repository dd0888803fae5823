// Integer matrix products of a warp (mma.sync): accumulators of 16 x 8, over 32 codes.
#pragma once
#include "ptx.cuh"

// The fragments of lane (g, q) = (lane / 4, lane % 4): of A it holds rows g and g + 8 (words 0 and 1: codes from 4q on;
// words 2 and 3: codes from 16 + 4q on), of B column g (codes from 4q and from 16 + 4q on), and of the accumulators D
// rows g (0, 1) and g + 8 (2, 3) in columns 2q and 2q + 1.
struct OperandA {
  u32 word[4];
};
struct OperandB {
  u32 word[2];
};

#define INTFLASH_MMA(NAME, TYPES)                                                                          \
  DEVICE void NAME(i32(&d)[4], const OperandA& a, const OperandB& b) {                                     \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPES                                                     \
        ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                              \
        "{%0, %1, %2, %3};"                                                                                \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                   \
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1])); \
  }
INTFLASH_MMA(mma_s8_s8, "s8.s8")
INTFLASH_MMA(mma_u8_s8, "u8.s8")
INTFLASH_MMA(mma_s8_u8, "s8.u8")
#undef INTFLASH_MMA
