"""The launch of kernels/stream.cu: rows of any length, keys in tiles that run through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.backends.hopper.parameters import Share, has_row_scales, parameters, quotient_reciprocal
from intflash.backends.hopper.program import CudaLaunch, Program
from intflash.backends.hopper.rows import key_width
from intflash.backends.hopper.tensor_maps import key_map, tensor_maps, value_map
from intflash.backends.hopper.types import C_TYPES
from intflash.backends.hopper.wgmma import Product
from intflash.backends.triton.constants import Constants
from intflash.backends.triton.launch import contiguous_keys
from intflash.backends.triton.streaming import Statistics
from intflash.problem import Problem

METHODS = {"intflash": "ExactP16", "intflash_p8": "ExactP8", "intflash_online": "Online"}
TILE = 128  # keys
STAGES = 4  # of the ring that tiles run through
_SHARED_BYTES = 227 * 1024  # that a program can have
_TIMES = {2: (0.8, 1.0), 3: (0.57, 0.78, 1.0)}  # of one warpgroup and more over that of all, as measured
_OUTPUT = 0.1  # of that time: the output of 64 rows


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


def stream_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics, q_scale: Tensor | None = None,
    consumers: int | None = None, resident: bool | None = None,
) -> CudaLaunch:  # fmt: skip
    """For a problem of int8 codes, or of float Q with its scale, codes of K and V. consumers: warpgroups that compute,
    where not the number that fits best; resident: whether keys and values of a head stay in shared memory, where not
    as is faster."""
    problem = replace(problem, v=replace(problem.v, data=contiguous_keys(problem.v.data)))
    q = problem.q if isinstance(problem.q, Tensor) else problem.q.data
    k, v = problem.k.data, problem.v.data
    d = q.shape[3]
    rows = q_scale is None and has_row_scales(constants, None)
    key, value = key_map(k, TILE, key_width(d)), value_map(v, TILE)
    copies = key is not None and value is not None
    consumers = consumers or _consumers(problem, d, copies, rows)
    p_shared = consumers == 3 and d > 96 and problem.method == "intflash_online"
    most = _most_stages(d, consumers, p_shared)
    if resident is None:
        resident = _fits(problem, most) and _pays(problem)
    stages = most if resident else STAGES
    products = tuple(Product(*x) for x in ((64, "s8"), (128, "s8"), (d, "u8")))
    program = Program.of(
        "stream.cu", products, METHOD=METHODS[problem.method], HEAD_DIM=d, CONSUMERS=consumers,
        CAUSAL=int(problem.causal is not None), ROW_SCALES=int(rows), KEY_SCALES=0, QUERY=C_TYPES[q.dtype],
        VALUE="i8", OUT=C_TYPES[out.dtype], COPIES=int(copies), P_SHARED=int(p_shared), STAGES=stages,
        RESIDENT=int(resident),
    )  # fmt: skip
    shared = shared_bytes(d, consumers, TILE * d, 0, p_shared, stages)
    scales = None if q_scale is None else (q_scale, None, None)
    programs, pieces = share_of_heads(problem) if resident else share(problem, consumers)
    params, keeps = parameters(problem, (q, k, v), scales, constants, out, statistics, share=pieces)
    maps = partial(tensor_maps, key, value) if copies else None
    return CudaLaunch(program, (programs, 1, 1), 128 * (consumers + 1), shared, params, q.device, keeps, True, maps)


def share(problem: Problem, consumers: int) -> tuple[int, Share]:
    """How many programs run, and the pieces of work that they take in turn: 64 rows of a head for each of `consumers`
    warpgroups, then the rows that those leave of each head, in smaller pieces.

    A program stays on its multiprocessor and takes piece after piece. (Causal, where pieces differ: a program for each,
    the longest first, as multiprocessors are free.)
    """
    batch, heads, nq, _ = problem.q.shape
    rows = 64 * consumers
    if problem.causal is None:
        split = _split(nq, batch * heads, consumers, _multiprocessors(problem.device))
    else:
        split = Split(-(-nq // rows), 1, 0)
    rest = -(-max(nq - rows * split.whole, 0) // (64 * split.tiles))
    whole_of_all, pieces = batch * heads * split.whole, batch * heads * (split.whole + rest)
    programs = pieces if problem.causal is not None else min(pieces, _multiprocessors(problem.device))
    return programs, Share(
        split.whole, rest, split.tiles, whole_of_all, pieces, split.first,
        *map(quotient_reciprocal, (split.whole, rest, heads)),
    )  # fmt: skip


def share_of_heads(problem: Problem) -> tuple[int, Share]:
    """How many programs run where keys and values of a head stay in shared memory, and the tiles of 64 rows that each
    takes: neighbours, so that it loads few heads, all of them but the first and the last whole."""
    batch, heads, nq, _ = problem.q.shape
    tiles = -(-nq // 64)
    programs = min(batch * heads * tiles, _multiprocessors(problem.device))
    each, more = divmod(batch * heads * tiles, programs)
    return programs, Share(
        tiles, 0, each, batch * heads * tiles, batch * heads * tiles, more,
        quotient_reciprocal(tiles), 0, quotient_reciprocal(heads),
    )  # fmt: skip


class Split(NamedTuple):
    """Whole pieces of a head, tiles of 64 rows in each of its others, the first program that takes such."""

    whole: int
    tiles: int
    first: int


@cache
def _multiprocessors(device: torch.device) -> int:
    """An H200's where there is only something to compile."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _split(nq: int, heads: int, consumers: int, processors: int) -> Split:
    """What ends first where each of `processors` takes pieces in turn."""
    rows, times = 64 * consumers, _TIMES[consumers]
    most = nq // rows

    def splits() -> Iterator[Split]:
        for whole in range(most, max(most - 4, -1), -1):
            for tiles in range(consumers, 0, -1):
                pieces = heads * (whole - (whole * rows - nq) // (64 * tiles))
                for first in (heads * whole % min(pieces, processors), 0):
                    yield Split(whole, tiles, first)

    def rests(split: Split) -> list[float]:
        full, last = divmod(nq - rows * split.whole, 64 * split.tiles)
        found = [times[split.tiles - 1]] * full
        if last:  # where several tiles are left, a full one ends last
            found.append(times[-(-last // 64) - 1] - _OUTPUT * max(64 - last, 0) / 64)
        return found

    def end(split: Split) -> float:
        rest = rests(split)
        programs = min(heads * (split.whole + len(rest)), processors)
        turns, more = divmod(heads * split.whole, programs)
        ends = [turns + 1.0] * more + [float(turns)] * (programs - more)
        for i, time in enumerate(rest * heads):
            ends[split.first + i % (programs - split.first)] += time
        return max(ends)

    if heads * (most + 1) > 32 * processors:  # the work of all decides, shared out evenly
        return min((split for split in splits() if split.first == 0), key=lambda split: split.whole + sum(rests(split)))
    return min(splits(), key=end)


def shared_bytes(
    d: int, consumers: int, value_bytes: int, scale_bytes: int, p_shared: bool = False, stages: int = STAGES
) -> int:
    """`Shared` of stream_loads.cuh: the stages with their scales and barriers, Q's rows, P's where it lies there."""
    stage = -(-(TILE * key_width(d) + value_bytes) // 1024) * 1024 + scale_bytes + 16
    return stages * stage + 64 * consumers * (key_width(d) + p_shared * TILE)


def _most_stages(d: int, consumers: int, p_shared: bool) -> int:
    """Of a ring that holds a head's tiles, and what it has room for of the next heads'."""
    one, two = (shared_bytes(d, consumers, TILE * d, 0, p_shared, stages) for stages in (1, 2))
    return 1 + (_SHARED_BYTES - one) // (two - one)


def _fits(problem: Problem, stages: int) -> bool:
    """Whether keys and values of a head can stay in shared memory."""
    return problem.causal is None and -(-problem.k.shape[2] // TILE) <= stages


def _pays(problem: Problem) -> bool:
    """Whether that is faster (docs/gpu.md): for codes of Q, which are on their way under the output before; floats of Q
    are waited for, which takes more time than it gives where keys are two tiles."""
    return not isinstance(problem.q, Tensor) or problem.k.shape[2] > 2 * TILE


def _consumers(problem: Problem, d: int, copies: bool, rows: bool) -> int:
    """Warpgroups that compute: as many as the registers hold. copies: the copy engine loads; rows: rows have scales of
    their own."""
    if problem.method == "intflash":
        return 3 if 32 < d <= 64 and copies and not rows else 2
    if problem.method == "intflash_p8":
        return 3 if d <= 96 or d == 128 else 2
    return 3 if d <= 96 or not rows and problem.causal is None else 2
