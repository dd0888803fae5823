"""The tile loop: a program takes a tile of rows and loops over tiles of keys. A method's `Steps` define the
computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu.constants import Constants, score_unit
from intflash.backends.gpu.tensors import Statistics, View, data_view, readable
from intflash.backends.triton import tile_sizes
from intflash.backends.triton.constants import KernelConstants
from intflash.backends.triton.device_functions import (
    LaunchConstants,
    Masks,
    Position,
    bias_exponents,
    bias_tile,
    head_base,
    key_additions,
    load_rows,
    make_masks,
    permuted_keys,
    present_keys,
    program_position,
    value_groups,
    valueless_keys,
)
from intflash.backends.triton.intflash_steps import P16, Steps
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.numerics.triton import dequantize, requantize
from intflash.problem import Problem


@triton.jit
def unpack(packed):
    """Returns (low 32 bits, high 32 bits) of a packed constant."""
    return packed.to(tl.int32), (packed >> 32).to(tl.int32)


@triton.jit
def score_constants(view, BLOCK: tl.constexpr, pos: Position, rows, keys, KIND: tl.constexpr):
    """Loads (C, k): scalars, columns [BM, 1] or tiles [BM, BN] for KIND "head", "row" or "block"."""
    base = view.ptr + pos.b.to(tl.int64) * view.b + pos.h.to(tl.int64) * view.h
    if KIND == "head":
        packed = tl.load(base)
    elif KIND == "row":
        inside = rows < pos.q_count
        packed = tl.load(base + (pos.q_start + rows) * view.n, mask=inside, other=0)[:, None]
    else:
        inside = (rows < pos.q_count)[:, None] & (keys < pos.k_count)[None, :]
        at = (pos.q_start + rows)[:, None] * view.n + ((pos.k_start + keys) // BLOCK)[None, :] * view.d
        packed = tl.load(base + at, mask=inside, other=0)
    return unpack(packed)


@triton.jit
def shift_scores(s, shift):
    """Returns S << k, which fits int32 (head_dim <= 256, k <= 8). A shift of None stands for 0."""
    if shift is None:
        return s
    else:
        return s << shift


@triton.jit
def one_pass(
    state, q, k, v, k_base, v_base, masks: Masks, pos: Position, rows, C, shift, constants: Constants, causal,
    window_start, start, stop, STEPS: tl.constexpr, PASS: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr, PLAIN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, CONSTS: tl.constexpr,
):  # fmt: skip
    """One pass over the key tiles of [start, stop)."""
    for first in tl.range(start, stop, BN):
        keys = first + (permuted_keys(BN) if STEPS.hooks is None else STEPS.hooks.order(BN))
        k_tile = load_rows(k, k_base, keys, pos.k_count, D, BD, BOUNDED)
        s = tl.dot(q, tl.trans(k_tile), out_dtype=tl.int32) if STEPS.hooks is None else STEPS.hooks.scores(q, k_tile)
        bias = bias_tile(masks, pos, rows, keys, BOUNDED)
        present = present_keys(masks, pos, rows, keys, bias, causal, BOUNDED, CAUSAL, window_start)
        if STEPS.hooks is None:
            bias = bias_exponents(bias, CONSTS.bias_step)
        unit, by = C, shift
        if STEPS.hooks is not None:
            unit = STEPS.hooks.key_units(C, constants, pos, first, keys, CONSTS, KIND, BOUNDED)
        elif KIND == "block":
            unit, by = score_constants(constants.score, CONSTS.block, pos, rows, keys, KIND)
        s = shift_scores(s, by)
        if PASS == 1:
            if STEPS.groups:
                zero = valueless_keys(constants.valueless, pos, keys, BOUNDED, CONSTS.group)
                present = value_groups(zero, present)
            state = STEPS.row_max(state, s, unit, bias, present, PLAIN)
        else:
            value_keys = first + tl.arange(0, BN)
            v_tile = load_rows(v, v_base, value_keys, pos.k_count, DV, BDV, BOUNDED and not CONSTS.v_padded)
            if STEPS.groups:
                of_columns = valueless_keys(constants.valueless, pos, keys, BOUNDED, CONSTS.group)
                of_keys = valueless_keys(constants.valueless, pos, value_keys, BOUNDED, CONSTS.group)
                groups = of_columns, of_keys, key_additions(first, pos.k_count, BN)
                state = STEPS.step(state, s, unit, bias, present, groups, v_tile, PLAIN)
            else:
                state = STEPS.step(state, s, unit, bias, present, v_tile, PLAIN)
    return state


@triton.jit
def all_passes(
    state, q, k, v, k_base, v_base, masks: Masks, pos: Position, rows, C, shift, constants: Constants, causal,
    window_start, start, whole, full, stop, STEPS: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr,
    PLAIN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CONSTS: tl.constexpr,
):  # fmt: skip
    """All passes of a method over the key tiles of [start, stop). Those of [whole, full) need no bound or causal test,
    and none of the window; those before `whole`, which only a window leaves, and from `full` on do.
    """
    for which in tl.static_range(1 if STEPS.row_max is not None else 2, 3):
        if window_start is not None:
            state = one_pass(state, q, k, v, k_base, v_base, masks, pos, rows, C, shift, constants, causal,
                         window_start, start, whole, STEPS, which, KIND, CAUSAL, True, PLAIN, D, DV, BN, BD, BDV,
                         CONSTS)  # fmt: skip
        state = one_pass(state, q, k, v, k_base, v_base, masks, pos, rows, C, shift, constants, causal, None, whole,
                     full, STEPS, which, KIND, False, False, PLAIN, D, DV, BN, BD, BDV, CONSTS)  # fmt: skip
        if not CONSTS.all_visible:
            state = one_pass(state, q, k, v, k_base, v_base, masks, pos, rows, C, shift, constants, causal,
                         window_start, full, stop, STEPS, which, KIND, CAUSAL, True, PLAIN, D, DV, BN, BD, BDV,
                         CONSTS)  # fmt: skip
        if which == 1:
            state = STEPS.after_first_pass(state, C, PLAIN)
    return state


@triton.jit
def store_output(
    out, pos: Position, rows, acc, l, constants: Constants, CONSTS: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    gap=None,
):  # fmt: skip
    """Normalizes acc by l and stores rows < q_count. gap: see `requantize`."""
    channels = tl.arange(0, BDV)
    inside = channels[None, :] < DV
    ptrs = head_base(out, pos.b, pos.h, pos.q_start) + rows[:, None] * out.n + channels[None, :] * out.d
    kept = (rows[:, None] < pos.q_count) & inside
    if constants.output is not None:
        x = constants.output
        base = x.ptr + pos.b.to(tl.int64) * x.b + pos.h.to(tl.int64) * x.h
        QMAX: tl.constexpr = 127 if out.ptr.dtype.element_ty == tl.int8 else 32767
        if CONSTS.channels == 1:
            Mr, e = unpack(tl.load(base))
            if gap is not None:
                o = requantize(acc, l, Mr, e, QMAX, True, gap)
                tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=kept)
            elif e <= 23:  # each branch has its own store, or the compiler would compute both and select
                o = requantize(acc, l, Mr, e, QMAX, False)
                tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=kept)
            else:
                o = requantize(acc, l, Mr, e, QMAX, True)
                tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=kept)
        else:
            Mr, e = unpack(tl.load(base + channels[None, :] * x.d, mask=inside, other=1 << 23))
            o = requantize(acc, l, Mr, e, QMAX, True, gap)
            tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=kept)
    else:
        x = constants.v_scale
        base = x.ptr + pos.b.to(tl.int64) * x.b + (pos.h // CONSTS.group).to(tl.int64) * x.h
        if CONSTS.channels == 1:
            o = dequantize(acc, l, tl.load(base), gap)
        else:
            o = dequantize(acc, l, tl.load(base + channels[None, :] * x.d, mask=inside, other=0.0), gap)
        tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=kept)


@triton.jit
def _tile_loop_kernel(
    q: View, k: View, v: View, out: View, constants: Constants, masks: Masks, statistics: Statistics,
    cu_q, cu_k, sequences, nq, nk,
    STEPS: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    CONSTS: tl.constexpr, BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows. CAUSAL: "" none, "offset" by masks.causal, "bottom_right" by that and each sequence's
    number of keys less its number of queries. A window comes with CAUSAL.
    """
    pos = program_position(cu_q, cu_k, sequences, nq, nk, BM, BATCH_FIRST)
    if pos.q_count > 0:
        rows = pos.row + tl.arange(0, BM)
        causal, stop, start, window_start = 0, pos.k_count, 0, None
        full = (pos.k_count // BN) * BN
        if CAUSAL != "":
            causal = masks.causal
            if masks.window_start is not None:
                window_start = masks.window_start
            if CAUSAL == "bottom_right":
                causal += pos.k_count - pos.q_count
                if masks.window_start is not None:
                    window_start += pos.k_count - pos.q_count
            # the last row's visible keys end the loop; tiles that the first row sees whole need no test
            last = tl.minimum(pos.row + BM, pos.q_count) + causal
            if not STEPS.visits_all_tiles:
                stop = tl.maximum(tl.minimum(stop, last), 0)
            full = tl.minimum(full, tl.maximum((pos.row + causal + 1) // BN, 0) * BN)
        whole = 0
        if window_start is not None:
            # the first row's window begins the loop; tiles that the last row's window includes need no test of it
            if not STEPS.visits_all_tiles:
                start = tl.minimum(tl.maximum(pos.row + window_start, 0) // BN * BN, tl.cdiv(stop, BN) * BN)
            whole = tl.cdiv(tl.maximum(tl.minimum(pos.row + BM, pos.q_count) - 1 + window_start, 0), BN) * BN
            whole = tl.maximum(tl.minimum(whole, tl.cdiv(stop, BN) * BN), start)
            full = tl.maximum(full, whole)
        q_tile = load_rows(q, head_base(q, pos.b, pos.h, pos.q_start), rows, pos.q_count, D, BD, True)
        k_base = head_base(k, pos.b, pos.h // CONSTS.group, pos.k_start)
        v_base = head_base(v, pos.b, pos.h // CONSTS.group, pos.k_start)
        if STEPS.groups:
            state = STEPS.initial(BM, BDV, pos.k_count)
        else:
            state = STEPS.initial(BM, BDV)
        C, shift = 0, None
        if STEPS.hooks is not None:
            C = STEPS.hooks.row_units(constants, pos, rows, CONSTS, KIND)
        elif KIND != "block":
            C, shift = score_constants(constants.score, 1, pos, rows, rows, KIND)
        if STEPS.hooks is None and KIND == "head":  # a shift of 0, the usual one, costs nothing in its own loop
            if shift == 0:
                state = all_passes(state, q_tile, k, v, k_base, v_base, masks, pos, rows, C, None, constants, causal,
                               window_start, start, whole, full, stop, STEPS, KIND, CAUSAL != "", PLAIN, D, DV, BN, BD,
                               BDV, CONSTS)  # fmt: skip
            else:
                state = all_passes(state, q_tile, k, v, k_base, v_base, masks, pos, rows, C, shift, constants, causal,
                               window_start, start, whole, full, stop, STEPS, KIND, CAUSAL != "", PLAIN, D, DV, BN, BD,
                               BDV, CONSTS)  # fmt: skip
        else:
            state = all_passes(state, q_tile, k, v, k_base, v_base, masks, pos, rows, C, shift, constants, causal,
                           window_start, start, whole, full, stop, STEPS, KIND, CAUSAL != "", PLAIN, D, DV, BN, BD,
                           BDV, CONSTS)  # fmt: skip
        gap = None
        if STEPS.groups:
            acc, l, t_max, gap = STEPS.result(state)
        else:
            acc, l, t_max = STEPS.result(state)
        if STEPS.hooks is None:
            store_output(out, pos, rows, acc, l, constants, CONSTS, DV, BDV, gap)
        else:
            STEPS.hooks.store(out, pos, rows, acc, l, constants, CONSTS, KIND, DV, BDV)
        if statistics.l is not None:
            at = (pos.b.to(tl.int64) * tl.num_programs(1) + pos.h) * nq + pos.q_start + rows
            tl.store(statistics.t_max + at, t_max, mask=rows < pos.q_count)
            tl.store(statistics.l + at, l, mask=rows < pos.q_count)


@dataclass(frozen=True)
class TileShape:
    """Rows and keys of a tile, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def default_tile(problem: Problem, steps: Steps) -> TileShape:
    """Returns the tile from the measured table. Masks, partial tiles, large head_dim and the two groups of
    `intflash_bfp` take eight warps, because registers would spill.
    """
    d, bits = problem.q.shape[3], 16 if steps.groups or steps.initial is P16.initial else 8
    wide = max(d, problem.v.shape[3]) > 128
    read = problem.bias is not None or problem.keep is not None
    packed, of_blocks = problem.cu_seqlens_q is not None, problem.k.granularity == "block"
    tested = read or packed or of_blocks or problem.causal is not None or problem.k.shape[2] % 128 != 0
    if steps.groups:
        few = max(d, problem.v.shape[3]) > 64 or tested
        return TileShape(32 if few else 64, 32 if wide else 64, 8, 2)
    if steps.keys is not None and (wide or read):
        return TileShape(32, steps.keys, 8, 1)
    if wide:
        return TileShape(64, 32 if bits == 16 else 64, 8, 1)
    if tested:
        name = "rows of a masked online stream" if steps.keys else "rows of a masked stream"
        rows = tile_sizes.choose(problem.device, name, (64,))[0]
        return TileShape(rows, steps.keys or 64, 8, 2)
    name = tile_sizes.tile_loop_class(steps.keys, d, bits)
    return TileShape(*tile_sizes.choose(problem.device, name, (64, steps.keys or 64, 4, 2)))


def tile_loop_launch(
    problem: Problem,
    steps: Steps,
    constants: Constants,
    out: Tensor,
    statistics: Statistics,
    tile: TileShape | None = None,
) -> TritonLaunch:
    """Returns the tile loop's launch for a quantized problem."""
    (batch, heads, nq, d), (nk, dv) = problem.q.shape, problem.v.shape[2:]
    tile = tile or default_tile(problem, steps)
    packed = problem.cu_seqlens_q is not None
    sequences = len(problem.cu_seqlens_q) - 1 if packed else None
    row_tiles = triton.cdiv(nq, tile.rows) + (sequences or 0)
    programs, batch_first = grid(batch, heads, row_tiles)
    causal = ""
    if problem.causal is not None:
        causal = "bottom_right" if packed and problem.causal_align == "bottom_right" else "offset"
    score = constants.score.ptr.shape
    kind = "block" if score[3] > 1 else "row" if score[2] > 1 else "head"
    arguments = dict(
        q=data_view(problem.q.data), k=data_view(problem.k.data), v=data_view(problem.v.data), out=data_view(out),
        constants=KernelConstants(*constants), statistics=statistics,
        masks=make_masks(problem.bias, problem.keep, problem.causal, batch, problem.window_start),
        cu_q=problem.cu_seqlens_q, cu_k=problem.cu_seqlens_k, sequences=sequences, nq=nq, nk=nk,
        STEPS=steps, KIND=kind, CAUSAL=causal, PLAIN=problem.bias is None and kind != "block", D=d, DV=dv,
        BM=tile.rows, BN=tile.keys, BD=block_dim(d, 32), BDV=block_dim(dv, 16),
        CONSTS=LaunchConstants(
            problem.group, problem.k.block_size or 1, output_channels(constants),
            not packed and not causal and nk % tile.keys == 0,
            not packed and readable(problem.v.data, triton.cdiv(nk, tile.keys) * tile.keys),
            bias_step(problem),
        ),
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_tile_loop_kernel, programs, arguments, tile.warps, tile.stages)


def bias_step(problem: Problem) -> int:
    """Returns T of a bias of 1."""
    return score_unit(problem.method).bias_step(problem.bias_fraction_bits)


def output_channels(constants: Constants) -> int:
    """Returns the number of output constants of a head: 1, or one per channel."""
    return (constants.output or constants.v_scale).ptr.shape[3]


def block_dim(size: int, least: int) -> int:
    return max(least, triton.next_power_of_2(size))
