"""The short-rows kernel, for at most 256 keys (ViT, Swin): a whole row of scores on chip, one pass over K, the exact
maximum, no rescaling.

The keys are split into blocks of decreasing widths (197 = 128 + 64 + 5 of 32), so that little is computed for keys that
do not exist. A program holds K and V of one head and computes several tiles of rows. Float inputs with static or
device-side scales are quantized in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu.constants import Constants, float_bits, score_unit
from intflash.backends.gpu.scales import Qkv
from intflash.backends.gpu.tensors import Statistics, View, data_view, readable
from intflash.backends.triton import tile_sizes
from intflash.backends.triton.constants import KernelConstants, pack_score
from intflash.backends.triton.device_functions import (
    LaunchConstants,
    Masks,
    Position,
    Views,
    bias_exponents,
    bias_tile,
    head_base,
    load_rows,
    make_masks,
    natural_order,
    permuted_keys,
    present_keys,
)
from intflash.backends.triton.intflash_steps import (
    add_row_sums,
    add_value_sums,
    add_wide_sums,
    exp_offsets,
    offset_row,
    row_sum,
    t_max,
    update_row_max,
)
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.backends.triton.quantize import head_inverse
from intflash.backends.triton.tile_loop import (
    bias_step,
    block_dim,
    output_channels,
    score_constants,
    shift_scores,
    store_output,
    unpack,
)
from intflash.numerics.triton import INT32_MIN, K0, NEVER, exp_p8, exp_p16, quantize
from intflash.problem import Problem

MAX_KEYS = 256
NO_SCALES = Qkv(None, None, None)


@triton.jit
def _codes(x, scale, b, h):
    """Returns the int8 codes of a loaded tile: the tile itself, or its floats times the head's 1 / s, rounded."""
    if scale is None:
        return x
    else:
        return quantize(x, head_inverse(scale, b, h))


@triton.jit
def _keys(FIRST: tl.constexpr, WIDTH: tl.constexpr):
    return FIRST + permuted_keys(WIDTH)


@triton.jit
def _attend_rows(
    q_tile, k_tiles, v_tiles, offset, masks: Masks, pos: Position, rows, causal, C, shift,
    KEY_BLOCKS: tl.constexpr, CONSTS: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, BITS: tl.constexpr,
    BDV: tl.constexpr,
):  # fmt: skip
    """Computes (acc, l, t_max) of one tile of rows. KEY_BLOCKS: (first key, width, complete) of each block of keys.

    Masks and biases are read a second time for the exponentials, from the cache, to save registers.
    """
    BM: tl.constexpr = q_tile.shape[0]
    SIMPLE: tl.constexpr = masks.bias is None and masks.keep is None and not CAUSAL
    scores = ()
    peak = tl.full([BM], NEVER, tl.int64)
    s_peak = tl.full([BM], INT32_MIN, tl.int32)
    for i in tl.static_range(len(KEY_BLOCKS)):
        keys = _keys(KEY_BLOCKS[i][0], KEY_BLOCKS[i][1])
        s = shift_scores(tl.dot(q_tile, tl.trans(k_tiles[i]), out_dtype=tl.int32), shift)
        bias = bias_tile(masks, pos, rows, keys, not KEY_BLOCKS[i][2])
        present = present_keys(masks, pos, rows, keys, bias, causal, not KEY_BLOCKS[i][2], CAUSAL)
        bias = bias_exponents(bias, CONSTS.bias_step)
        peak, s_peak = update_row_max(peak, s_peak, s, C, bias, present, PLAIN)
        scores = scores + (s,)
    top = t_max(peak, s_peak, C, PLAIN)
    base = (-top + K0)[:, None]
    acc = tl.zeros([BM, BDV], tl.int32)
    low_acc = tl.zeros([BM, BDV], tl.int32)
    l = tl.zeros([BM, 16], tl.int32)
    for i in tl.static_range(len(KEY_BLOCKS)):
        if SIMPLE:
            # Keys past the last one have V = 0 and are not counted in l, so that their p does not matter.
            b = base
            count = None if KEY_BLOCKS[i][2] else pos.k_count - KEY_BLOCKS[i][0]
            counted = KEY_BLOCKS[i][1] if KEY_BLOCKS[i][2] else pos.k_count - KEY_BLOCKS[i][0]
        else:
            keys = _keys(KEY_BLOCKS[i][0], KEY_BLOCKS[i][1])
            bias = bias_tile(masks, pos, rows, keys, not KEY_BLOCKS[i][2])
            present = present_keys(masks, pos, rows, keys, bias, causal, not KEY_BLOCKS[i][2], CAUSAL)
            b = exp_offsets(base, bias_exponents(bias, CONSTS.bias_step), present)
            count = None
            counted = KEY_BLOCKS[i][1]
        if BITS == 8:
            p = natural_order(exp_p8(scores[i], C, b))
            l = add_row_sums(l, p, count) + 128 * counted
            acc = tl.dot(p, v_tiles[i], acc, out_dtype=tl.int32)
        else:
            high, low = exp_p16(scores[i], C, b)
            high, low = natural_order(high), natural_order(low)
            l = add_wide_sums(l, high, low, count) + (256 * 128) * counted
            acc = tl.dot(high, v_tiles[i], acc, out_dtype=tl.int32)
            low_acc = tl.dot(low, v_tiles[i], low_acc, out_dtype=tl.int32)
    acc += offset
    if BITS == 8:
        return acc, row_sum(l), top
    else:
        return (acc.to(tl.int64) << 8) + low_acc.to(tl.int64), row_sum(l), top


@triton.jit
def _score_scalars(scales: Views, pos: Position, key_head, sm_bits, UNIT: tl.constexpr):
    """Computes (C, k) from the scales of float inputs: a few scalar operations, which save a launch."""
    s_q = tl.load(scales.q.ptr + pos.b.to(tl.int64) * scales.q.b + pos.h.to(tl.int64) * scales.q.h)
    s_k = tl.load(scales.k.ptr + pos.b.to(tl.int64) * scales.k.b + key_head.to(tl.int64) * scales.k.h)
    return unpack(pack_score(s_q, s_k, sm_bits.to(tl.int64).to(tl.float64, bitcast=True), UNIT))


@triton.jit
def _compute_tile(
    q, k_tiles, v_tiles, offset, out, constants: Constants, masks: Masks, statistics: Statistics, scales: Views,
    pos: Position, first_row, sm_bits,
    UNIT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, KEY_BLOCKS: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CONSTS: tl.constexpr,
):  # fmt: skip
    """Computes BM rows, from Q to the output."""
    rows = first_row + tl.arange(0, BM)
    q_tile = load_rows(q, head_base(q, pos.b, pos.h, pos.q_start), rows, pos.q_count, D, BD, True)
    q_tile = _codes(q_tile, scales.q, pos.b, pos.h)
    if constants.score is None:
        C, shift = _score_scalars(scales, pos, pos.h // CONSTS.group, sm_bits, UNIT)
    else:
        C, shift = score_constants(constants.score, 1, pos, rows, rows, KIND)
    if KIND == "head":  # a shift of 0, the usual one, costs nothing in its own branch
        if shift == 0:
            acc, l, top = _attend_rows(
                q_tile, k_tiles, v_tiles, offset, masks, pos, rows, masks.causal, C, None,
                KEY_BLOCKS, CONSTS, CAUSAL, PLAIN, BITS, BDV,
            )  # fmt: skip
        else:
            acc, l, top = _attend_rows(
                q_tile, k_tiles, v_tiles, offset, masks, pos, rows, masks.causal, C, shift,
                KEY_BLOCKS, CONSTS, CAUSAL, PLAIN, BITS, BDV,
            )  # fmt: skip
    else:
        acc, l, top = _attend_rows(
            q_tile, k_tiles, v_tiles, offset, masks, pos, rows, masks.causal, C, shift,
            KEY_BLOCKS, CONSTS, CAUSAL, PLAIN, BITS, BDV,
        )  # fmt: skip
    store_output(out, pos, rows, acc, l, constants, CONSTS, DV, BDV)
    if statistics.l is not None:
        at = (pos.b.to(tl.int64) * tl.num_programs(1) + pos.h) * pos.q_count + rows
        tl.store(statistics.t_max + at, top, mask=rows < pos.q_count)
        tl.store(statistics.l + at, l, mask=rows < pos.q_count)


@triton.jit
def _short_rows_kernel(
    q: View, k: View, v: View, out: View, constants: Constants, masks: Masks, statistics: Statistics,
    scales: Views, nq, nk, sm_bits,
    UNIT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, REMAINDER: tl.constexpr,
    KEY_BLOCKS: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, CONSTS: tl.constexpr, BATCH_FIRST: tl.constexpr,
    V_PADDED: tl.constexpr,
):  # fmt: skip
    """Computes TILES tiles of BM rows, and one of REMAINDER rows if that is not 0, in each program."""
    batch, first_tile, head = tl.program_id(2), tl.program_id(0), tl.program_id(1)
    if BATCH_FIRST:
        batch, first_tile = first_tile, batch
    zero = head * 0
    pos = Position(batch, head, zero, zero, zero + nq, zero, zero + nk)
    key_head = head // CONSTS.group
    k_base, v_base = head_base(k, batch, key_head, zero), head_base(v, batch, key_head, zero)
    k_tiles = ()
    v_tiles = ()
    sums = tl.zeros([16, BDV], tl.int32)
    for i in tl.static_range(len(KEY_BLOCKS)):
        keys = _keys(KEY_BLOCKS[i][0], KEY_BLOCKS[i][1])
        k_tile = _codes(load_rows(k, k_base, keys, nk, D, BD, not KEY_BLOCKS[i][2]), scales.k, batch, key_head)
        keys = KEY_BLOCKS[i][0] + tl.arange(0, KEY_BLOCKS[i][1])
        v_tile = load_rows(v, v_base, keys, nk, DV, BDV, not KEY_BLOCKS[i][2] and not V_PADDED)
        v_tile = _codes(v_tile, scales.v, batch, key_head)
        if V_PADDED and not KEY_BLOCKS[i][2]:
            v_tile = tl.where((keys < nk)[:, None], v_tile, 0).to(tl.int8)
        k_tiles = k_tiles + (k_tile,)
        v_tiles = v_tiles + (v_tile,)
        sums = add_value_sums(sums, v_tile)
    offset = offset_row(sums)
    first_row = first_tile * (TILES * BM + REMAINDER)
    for tile in tl.range(0, TILES):
        _compute_tile(
            q, k_tiles, v_tiles, offset, out, constants, masks, statistics, scales, pos, first_row + tile * BM, sm_bits,
            UNIT, BITS, KIND, CAUSAL, PLAIN, D, DV, BM, KEY_BLOCKS, BD, BDV, CONSTS,
        )  # fmt: skip
    if REMAINDER > 0:
        _compute_tile(
            q, k_tiles, v_tiles, offset, out, constants, masks, statistics, scales, pos, first_row + TILES * BM,
            sm_bits,
            UNIT, BITS, KIND, CAUSAL, PLAIN, D, DV, REMAINDER, KEY_BLOCKS, BD, BDV, CONSTS,
        )  # fmt: skip


@dataclass(frozen=True)
class RowTile:
    """Rows per tile, tiles per program, warps, and rows of a smaller last tile (197 = 3 * 64 + 5 of 16)."""

    rows: int
    tiles: int
    warps: int
    remainder: int = 0


def key_blocks(nk: int, most: int = 128) -> tuple[tuple[int, int, bool], ...]:
    """Splits nk keys into widths of powers of two, at least 32: (first key, width, whether all its keys exist).

    >>> key_blocks(197)
    ((0, 128, True), (128, 64, True), (192, 32, False))
    >>> key_blocks(49)
    ((0, 32, True), (32, 32, False))
    """
    cut = []
    first = 0
    while first < nk:
        left = nk - first
        width = min(most, max(32, 1 << (left.bit_length() - 1)))
        cut.append((first, width, left >= width))
        first += width
    return tuple(cut)


def serves(problem: Problem) -> bool:
    """Whether the short-rows kernel serves the problem."""
    per_block = problem.k.granularity == "block" if hasattr(problem.k, "granularity") else problem.recipe.k == "block"
    plain = problem.cu_seqlens_q is None and problem.window_start is None
    return problem.k.shape[2] <= MAX_KEYS and plain and not per_block


def default_tile(problem: Problem, bits: int, fused: bool) -> RowTile:
    """Returns the tile from the measured table. Large head_dim takes eight warps, because registers would spill."""
    (batch, heads, nq, d), (nk, dv) = problem.q.shape, problem.v.shape[2:]
    if max(d, dv) > 64 and (nk > 128 or max(d, dv) > 128):
        return RowTile(16, 1, 4) if fused or bits == 16 else RowTile(64, 1, 8)
    name = tile_sizes.short_rows_class(batch * heads, nq, nk, d, bits, fused)
    return RowTile(*tile_sizes.choose(problem.q.device, name, (32, 1, 4) if fused else (64, 1, 4)))


def short_rows_launch(
    problem: Problem, bits: int, constants: Constants, out: Tensor, statistics: Statistics, scales: Qkv = NO_SCALES,
    tile: RowTile | None = None,
) -> TritonLaunch:  # fmt: skip
    """Returns the launch for a problem of int8 codes, or of floats with their `scales`."""
    q, k, v = (x.data if scales.q is None else x for x in (problem.q, problem.k, problem.v))
    (batch, heads, nq, d), (nk, dv) = q.shape, v.shape[2:]
    tile = tile or default_tile(problem, bits, scales.q is not None)
    programs = triton.cdiv(nq, tile.rows * tile.tiles + tile.remainder)
    axes, batch_first = grid(batch, heads, programs, programs == 1)
    per_row = constants.score is not None and constants.score.ptr.shape[2] > 1
    arguments = dict(
        q=data_view(q), k=data_view(k), v=data_view(v), out=data_view(out), constants=KernelConstants(*constants),
        masks=make_masks(problem.bias, problem.keep, problem.causal, batch),
        statistics=statistics, scales=Views(*scales), nq=nq, nk=nk, sm_bits=float_bits(problem.sm_scale),
        UNIT=score_unit(problem.method), BITS=bits, KIND="row" if per_row else "head",
        CAUSAL=problem.causal is not None, PLAIN=problem.bias is None,
        D=d, DV=dv, BM=tile.rows, TILES=tile.tiles, REMAINDER=tile.remainder, KEY_BLOCKS=key_blocks(nk),
        BD=block_dim(d, 32), BDV=block_dim(dv, 16),
        CONSTS=LaunchConstants(heads // k.shape[1], 1, output_channels(constants), bias_step=bias_step(problem)),
        BATCH_FIRST=batch_first,
        V_PADDED=scales.q is None and readable(v, key_blocks(nk)[-1][0] + key_blocks(nk)[-1][1]),
    )  # fmt: skip
    return TritonLaunch(_short_rows_kernel, axes, arguments, tile.warps, 1)
