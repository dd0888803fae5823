// int8 products of a program (docs/numerics.md, section 4) with their epilogue: out = epilogue(x weight^T).
//
// A persistent CTA has one block of COLUMNS columns, and every gridDim.y-th tile of rows. One warp loads by TMA, and
// CONSUMERS warpgroups multiply 64 rows each:
//
//   RESIDENT 1: all the weights of the CTA's columns stay in shared memory, and only rows of x are loaded. The
//               warpgroups have the tiles in turn, and one at a time multiplies, while the others compute their
//               epilogues. Without turns all would multiply together, at a fraction of the speed, and then leave the
//               tensor cores idle together.
//   RESIDENT 0: the weights do not fit. Steps of 128 codes of both operands go through the ring buffer, and the
//               warpgroups work on the same tile of 64 CONSUMERS rows.
//
// Macros: COLUMNS (a multiple of 32, to 256), CONSUMERS, STAGES (of the ring buffer), RESIDENT, EPILOGUE (see
// linear_epilogue.cuh), OUT (i8, i16 or i32), WIDE_SHIFT (1: a shift below 32), TABLE_BITS, TABLE_COPIES, MAPPED (1:
// store_rows is given), CONSTANT_RESIDUAL (1: all images have the same residual).
//
// The rows of a weight tile are placed by TMA: row 8 i + 2 q + j of shared memory is column 32 (i / 4) + 8 q +
// 2 (i % 4) + j, so that lane q of a quad holds 8 adjacent columns of each 32.
#include "sm90/linear_epilogue.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int GROUP = 128, THREADS = (CONSUMERS + 1) * GROUP;
constexpr int STEP = 128;  // codes of a row at once
constexpr int X_ROWS = RESIDENT ? 64 : 64 * CONSUMERS;
constexpr int X_BYTES = X_ROWS * STEP, WEIGHT_BYTES = COLUMNS * STEP;
constexpr int STAGE_BYTES = X_BYTES + (RESIDENT ? 0 : WEIGHT_BYTES);
constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;

typedef RingPosition<STAGES> Stage;

struct LinearMaps {
  TensorMap x, weight;
};

// Weights (with RESIDENT, of all steps), the ring buffer, constants, the table, and barriers: of full and empty stages,
// of each warpgroup's turn to multiply, and of each step's resident weights.
struct SharedLayout {
  u32 weights, ring, constants, table, full, empty, turn, resident;
  DEVICE SharedLayout(u32 base, i32 steps)
      : weights(base),
        ring(base + (RESIDENT ? steps * WEIGHT_BYTES : 0)),
        constants(ring + STAGES * STAGE_BYTES),
        table(constants + (CONSTANT_BYTES + 127) / 128 * 128),
        full(table + TABLE_SHARED_BYTES),
        empty(full + 8 * STAGES),
        turn(empty + 8 * STAGES),
        resident(turn + 8 * CONSUMERS) {}
  DEVICE u32 x(u32 stage) const { return ring + stage * STAGE_BYTES; }
  DEVICE u32 weight(u32 stage, i32 step) const { return RESIDENT ? weights + step * WEIGHT_BYTES : x(stage) + X_BYTES; }
};

DEVICE void load_weights(const SharedLayout& shared, const LinearMaps& maps, i32 steps) {
#pragma unroll 1
  for (i32 step = 0; step < steps; ++step) {
    barrier_expect(shared.resident + 8 * step, WEIGHT_BYTES);
    tma_load_box(shared.weight(0, step), maps.weight, step * STEP, 0, 0, blockIdx.x * GROUPS,
                 shared.resident + 8 * step);
  }
}

DEVICE void load(const LinearParams& p, const SharedLayout& shared, const LinearMaps& maps) {
  Stage at;
#pragma unroll 1
  for (i32 row = blockIdx.y * X_ROWS; row < p.rows; row += gridDim.y * X_ROWS) {
#pragma unroll 1
    for (i32 step = 0; step < p.steps; ++step) {
      const u32 full = shared.full + 8 * at.stage;
      barrier_wait(shared.empty + 8 * at.stage, at.parity ^ 1);
      barrier_expect(full, STAGE_BYTES);
      tma_load_box(shared.x(at.stage), maps.x, step * STEP, row, 0, 0, full);
      if (!RESIDENT)
        tma_load_box(shared.weight(at.stage, step), maps.weight, step * STEP, 0, 0, blockIdx.x * GROUPS, full);
      at.next();
    }
  }
}

DEVICE void release(const SharedLayout& shared, u32 stage) {
  barrier_arrive_if(shared.empty + 8 * stage, threadIdx.x % 32 == 0);
}

// Waits until the warpgroup before has issued the products of its tile. The first tile of all has none before it.
DEVICE void wait_for_turn(const SharedLayout& shared, u32 group, u32 tile) {
  if (RESIDENT) barrier_wait(shared.turn + 8 * group, group ? tile % 2 : tile % 2 ^ 1);
}
DEVICE void pass_turn(const SharedLayout& shared, u32 group) {
  if (RESIDENT) barrier_arrive_if(shared.turn + 8 * (group + 1 < CONSUMERS ? group + 1 : 0), threadIdx.x % 32 == 0);
}

// acc = x weight^T of 64 rows. tile: how many the warpgroup has had before.
DEVICE void multiply(const LinearParams& p, const SharedLayout& shared, u32 group, u32 tile, Stage& at,
                     i32 (&acc)[COLUMNS / 2]) {
  u32 before = 0;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0;
  wait_for_turn(shared, group, tile);
#pragma unroll 1
  for (i32 step = 0; step < p.steps; ++step) {
    if (RESIDENT && tile == 0) barrier_wait(shared.resident + 8 * step, 0);
    barrier_wait(shared.full + 8 * at.stage, at.parity);
    const u64 x = descriptor<128>(shared.x(at.stage) + (RESIDENT ? 0 : group * 64 * STEP));
    const u64 weight = descriptor<128>(shared.weight(at.stage, step));
    wgmma_hold(acc);
    wgmma_order();
#pragma unroll
    for (int k = 0; k < STEP / 32; ++k) wgmma_s8(acc, x + 2 * k, weight + 2 * k);
    wgmma_commit();
    wgmma_wait<1>(acc);  // of the step before, whose stage is free
    if (step) release(shared, before);
    before = at.stage;
    at.next();
  }
  pass_turn(shared, group);
  wgmma_wait(acc);
  release(shared, before);
}

DEVICE void consume(const LinearParams& p, const SharedLayout& shared) {
  const u32 group = __shfl_sync(~0u, threadIdx.x / GROUP, 0) - 1;
  const i32 first_column = blockIdx.x * COLUMNS;
  EpilogueOfTile epilogue(p, shared.constants, shared.table, first_column);
  Stage at;
  const i32 turn = RESIDENT ? group : 0, turns = RESIDENT ? CONSUMERS : 1;
  const i32 row_of_thread = (RESIDENT ? 0 : group * 64) + threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
  at.skip(turn * p.steps);
  u32 tile = 0;
#pragma unroll 1
  for (i32 row = (blockIdx.y + turn * gridDim.y) * X_ROWS; row < p.rows; row += turns * gridDim.y * X_ROWS) {
    const OutputRows rows(p, row + row_of_thread, first_column);
    epilogue.prefetch(rows);
    i32 acc[COLUMNS / 2];
    multiply(p, shared, group, tile++, at, acc);
    at.skip((turns - 1) * p.steps);  // of the other warpgroups' tiles
    epilogue.store(rows, acc);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ LinearParams p, const __grid_constant__ LinearMaps maps) {
  extern __shared__ __align__(1024) u8 memory[];
  const SharedLayout shared(shared_address(memory), p.steps);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.full + 8 * i, 1);
      barrier_init(shared.empty + 8 * i, RESIDENT ? 4 : 4 * CONSUMERS);
    }
    for (int i = 0; i < CONSUMERS; ++i) barrier_init(shared.turn + 8 * i, 4);
    if (RESIDENT)
      for (i32 step = 0; step < p.steps; ++step) barrier_init(shared.resident + 8 * step, 1);
    fence_async_proxy();
    if (RESIDENT) load_weights(shared, maps, p.steps);  // no previous kernel writes them
  }
  fill_constants(p, shared.constants, blockIdx.x * COLUMNS, threadIdx.x, THREADS);
  fill_table(p, shared.table, threadIdx.x, THREADS);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < GROUP) {
    release_registers<LOADER_REGISTERS>();
    if (threadIdx.x == 0) load(p, shared, maps);
  } else {
    acquire_registers<CONSUMER_REGISTERS>();
    consume(p, shared);
  }
}
