"""The launch of csrc/cuda/sm90/long_rows.cu: tiles of keys are streamed through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.backends.cuda.parameters import Share, has_row_scales, parameters, quotient_reciprocal
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, Program
from intflash.backends.cuda.short_rows import key_width
from intflash.backends.cuda.tensor_maps import tensor_maps
from intflash.backends.cuda.wgmma import Product
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.tensors import Statistics, contiguous_keys
from intflash.problem import Problem

METHODS = {"intflash": "ExactP16", "intflash_p8": "ExactP8", "intflash_online": "Online"}
TILE = 128  # keys
STAGES = 4  # of the ring that tiles run through
_SHARED_BYTES = 227 * 1024  # that a CTA can have
_TABLE_BYTES = 32 * 1024  # of P of `intflash_online`
_FLOAT_BYTES = 2 * 16 * 1024  # of floats on their way to codes
_TIMES = {2: (0.8, 1.0), 3: (0.57, 0.78, 1.0)}  # of one warpgroup and more over that of all, as measured
_OUTPUT = 0.1  # of that time: the output of 64 rows
_TILE_US = 0.6  # codes of a tile of K and V, D = 64, by all warpgroups of a CTA or beside its consumers
_PASS_US, _PASS_TB_S = 4.5, 4.0  # a pass that makes codes: a small one; 3 bytes an element


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot take the problem, or None."""
    if problem.method not in METHODS:
        return f"method {problem.method!r} has no kernel for long rows"
    return shape_unsupported(problem)


def shape_unsupported(problem: Problem) -> str | None:
    """Why the tile loop cannot take a problem of this shape and these masks, or None."""
    d, dv = problem.q.shape[3], problem.v.shape[3]
    if d != dv or d % 16 or d > 128:
        return f"needs one head_dim, a multiple of 16 up to 128, got {d} and {dv}"
    for what in ("bias", "keep", "cu_seqlens_q"):
        if getattr(problem, what) is not None:
            return f"long rows take no {what}"
    return None


def quantizes(problem: Problem) -> bool:
    """Whether the kernel makes the codes of a problem's float K and V itself: of heads that stay in shared memory, from
    16-bit floats."""
    d = problem.q.shape[3]
    if problem.method not in METHODS or problem.q.element_size() != 2 or d == 16:  # 16: registers spill
        return False
    if not all(map(_near, (problem.k, problem.v))):
        return False
    consumers = _consumers(problem, d, _lean(d), False)
    stages = _most_stages(d, consumers, _beside(problem, consumers, True))
    return _fits(problem, stages) and _quantizing_is_faster(problem)


def _quantizing_is_faster(problem: Problem) -> bool:
    """Whether every CTA can make the codes of its heads in less time than a pass over all of K and V takes, as
    measured."""
    batch, heads, nk, d = problem.k.shape
    _, share = schedule_resident_heads(problem, True)
    each, tiles = share.rest_tiles, share.whole
    in_step = share.first == 0 and (tiles % each == 0 or each % tiles == 0)  # heads end where CTAs do
    loaded = -(-each // tiles) + (not in_step)
    return loaded * -(-nk // TILE) * d / 64 * _TILE_US < _PASS_US + 6e-6 * batch * heads * nk * d / _PASS_TB_S


def _near(x: Tensor) -> bool:
    """Whether 32 bits hold the bytes between a head's tokens."""
    return x.shape[2] * abs(x.stride(2)) * x.element_size() < 1 << 31


def long_rows_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    consumers: int | None = None, resident: bool | None = None,
) -> CudaLaunch:  # fmt: skip
    """For a problem of int8 codes, of float Q with its scale and codes of K and V, or of floats with all three scales.
    consumers: warpgroups that compute, where not the number that fits best; resident: whether keys and values of a head
    stay in shared memory, where not as is faster."""
    floats = isinstance(problem.k, Tensor)
    if not floats:
        problem = replace(problem, v=replace(problem.v, data=contiguous_keys(problem.v.data)))
    q, k, v = (x if isinstance(x, Tensor) else x.data for x in (problem.q, problem.k, problem.v))
    d = q.shape[3]
    rows = has_row_scales(constants, scales)
    maps = None if floats or k.shape[2] % 16 else tensor_maps(k, v, TILE // 16, key_width(d))
    consumers = consumers or _consumers(problem, d, _lean(d) if floats else maps is not None, rows)
    beside = _beside(problem, consumers, floats)
    most = _most_stages(d, consumers, beside)
    if resident is None:
        resident = floats or _fits(problem, most) and _resident_is_faster(problem)
    stages = most if resident else STAGES
    products = tuple(Product(*x) for x in ((64, "s8"), (128, "s8"), (d, "u8")))
    program = Program.of(
        "sm90/long_rows.cu", products, METHOD=METHODS[problem.method], HEAD_DIM=d, CONSUMERS=consumers,
        CAUSAL=int(problem.causal is not None), ROW_SCALES=int(rows), KEY_SCALES=0, QUERY=C_TYPES[q.dtype],
        VALUE="i8", OUT=C_TYPES[out.dtype], TMA=int(maps is not None),
        P_SHARED=int(_p_in_shared(problem, consumers)),
        P_TABLE=int(_looks_up(problem)), STAGES=stages, KV_RESIDENT=int(resident), FLOAT_KV=int(floats),
        VALUES_IN_RANGE=int(scales is not None and problem.recipe.q_scale is None),
    )  # fmt: skip
    shared = shared_bytes(d, consumers, TILE * d, 0, stages, beside)
    ctas, pieces = schedule_resident_heads(problem, floats) if resident else schedule_ranges(problem, consumers)
    params, keeps = parameters(problem, (q, k, v), scales, constants, out, statistics, share=pieces)
    return CudaLaunch(program, (ctas, 1, 1), 128 * (consumers + 1), shared, params, q.device, keeps, True, maps)


def schedule_ranges(problem: Problem, consumers: int) -> tuple[int, Share]:
    """How many CTAs run, and the pieces that the tile scheduler hands to them: 64 rows of a head for each of
    `consumers` warpgroups, then the rows that those leave of each head, in smaller pieces.

    The kernel is persistent: a CTA takes piece after piece. (Causal, where pieces differ in length, has a CTA for each,
    the longest first.)
    """
    batch, heads, nq, _ = problem.q.shape
    rows = 64 * consumers
    if problem.causal is None:
        split = _split(nq, batch * heads, consumers, _multiprocessors(problem.device))
    else:
        split = RangeSplit(-(-nq // rows), 1, 0)
    rest = -(-max(nq - rows * split.whole, 0) // (64 * split.tiles))
    whole_of_all, pieces = batch * heads * split.whole, batch * heads * (split.whole + rest)
    ctas = pieces if problem.causal is not None else min(pieces, _multiprocessors(problem.device))
    return ctas, Share(
        split.whole, rest, split.tiles, whole_of_all, pieces, split.first,
        *map(quotient_reciprocal, (split.whole, rest, heads)),
    )  # fmt: skip


def schedule_resident_heads(problem: Problem, floats: bool = False) -> tuple[int, Share]:
    """How many CTAs run with K/V resident in shared memory, and the tiles of 64 rows that each takes: neighbours, so
    that it loads few heads, all of them but the first and the last whole. Where loading a head takes as long as
    computing a tile, as it does for floats, a CTA takes tiles of one head alone if it takes few more of them."""
    batch, heads, nq, _ = problem.q.shape
    tiles, processors = -(-nq // 64), _multiprocessors(problem.device)
    ctas = min(batch * heads * tiles, processors)
    each, more = divmod(batch * heads * tiles, ctas)
    if floats and batch * heads <= processors:
        parts = processors // (batch * heads)
        of_one = -(-tiles // parts)
        if of_one <= each + 1:
            parts = -(-tiles // of_one)
            ctas, tiles, each, more = batch * heads * parts, parts * of_one, of_one, 0
    return ctas, Share(
        tiles, 0, each, batch * heads * tiles, batch * heads * tiles, more,
        quotient_reciprocal(tiles), 0, quotient_reciprocal(heads),
    )  # fmt: skip


class RangeSplit(NamedTuple):
    """Whole pieces of a head, tiles of 64 rows in each smaller one, the first CTA that takes smaller ones."""

    whole: int
    tiles: int
    first: int


@cache
def _multiprocessors(device: torch.device) -> int:
    """An H200's where there is only something to compile."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _split(nq: int, heads: int, consumers: int, processors: int) -> RangeSplit:
    """The split that ends first where `processors` take pieces round robin."""
    rows, times = 64 * consumers, _TIMES[consumers]
    most = nq // rows

    def splits() -> Iterator[RangeSplit]:
        for whole in range(most, max(most - 4, -1), -1):
            for tiles in range(consumers, 0, -1):
                pieces = heads * (whole - (whole * rows - nq) // (64 * tiles))
                for first in (heads * whole % min(pieces, processors), 0):
                    yield RangeSplit(whole, tiles, first)

    def rests(split: RangeSplit) -> list[float]:
        full, last = divmod(nq - rows * split.whole, 64 * split.tiles)
        found = [times[split.tiles - 1]] * full
        if last:  # where several tiles are left, a full one ends last
            found.append(times[-(-last // 64) - 1] - _OUTPUT * max(64 - last, 0) / 64)
        return found

    def end(split: RangeSplit) -> float:
        rest = rests(split)
        ctas = min(heads * (split.whole + len(rest)), processors)
        rounds, more = divmod(heads * split.whole, ctas)
        ends = [rounds + 1.0] * more + [float(rounds)] * (ctas - more)
        for i, time in enumerate(rest * heads):
            ends[split.first + i % (ctas - split.first)] += time
        return max(ends)

    if heads * (most + 1) > 32 * processors:  # the work of all decides, shared out evenly
        return min((split for split in splits() if split.first == 0), key=lambda split: split.whole + sum(rests(split)))
    return min(splits(), key=end)


def shared_bytes(
    d: int, consumers: int, value_bytes: int, scale_bytes: int, stages: int = STAGES, beside: int = 0
) -> int:
    """`Shared` of stream_loads.cuh: the stages with their scales and barriers, Q's rows, and what else there is."""
    stage = -(-(TILE * key_width(d) + value_bytes) // 1024) * 1024 + scale_bytes + 16
    return stages * stage + 64 * consumers * key_width(d) + beside


def _beside(problem: Problem, consumers: int, floats: bool) -> int:
    """Bytes of P, where it lies in shared memory, of floats on their way to codes, and of the table that P is from."""
    p = 64 * consumers * TILE * _p_in_shared(problem, consumers)
    return p + floats * _FLOAT_BYTES + _looks_up(problem) * _TABLE_BYTES


def _looks_up(problem: Problem) -> bool:
    """Whether P is looked up (exp2_table.cuh)."""
    return problem.method == "intflash_online"


def _p_in_shared(problem: Problem, consumers: int) -> bool:
    return consumers == 3 and problem.q.shape[3] > 96 and _looks_up(problem)


def _most_stages(d: int, consumers: int, beside: int) -> int:
    """Of a ring that holds a head's tiles, and what it has room for of the next heads'."""
    one, two = (shared_bytes(d, consumers, TILE * d, 0, stages, beside) for stages in (1, 2))
    return 1 + (_SHARED_BYTES - one) // (two - one)


def _fits(problem: Problem, stages: int) -> bool:
    """Whether keys and values of a head can stay in shared memory."""
    return problem.causal is None and -(-problem.k.shape[2] // TILE) <= stages


def _resident_is_faster(problem: Problem) -> bool:
    """Whether that is faster: for codes of Q, which are on their way under the output before; floats of Q
    are waited for, which takes more time than it gives where keys are two tiles."""
    return not isinstance(problem.q, Tensor) or problem.k.shape[2] > 2 * TILE


def _lean(d: int) -> bool:
    """Whether the loads of floats leave the registers of a warpgroup more."""
    return d == 64


def _consumers(problem: Problem, d: int, lean: bool, rows: bool) -> int:
    """Warpgroups that compute: as many as the registers hold. lean: the loads take few registers, as TMA's do; rows:
    rows have scales of their own."""
    if problem.method == "intflash":
        return 3 if 32 < d <= 64 and lean and not rows else 2
    if problem.method == "intflash_p8":
        return 3 if d <= 96 or d == 128 else 2
    if rows:
        return 3 if d <= (80 if problem.causal is None else 64) else 2
    return 3 if d <= 96 or problem.causal is None else 2
