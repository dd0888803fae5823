"""Launches csrc/cuda/sm90/long_rows.cu, which streams tiles of keys through shared memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, reduce
from typing import NamedTuple

from torch import Tensor

from intflash.backends.cuda.parameters import Params, Share, has_row_scales, parameters, quotient_reciprocal
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram, multiprocessors
from intflash.backends.cuda.short_rows import key_width
from intflash.backends.cuda.tensor_maps import tensor_maps
from intflash.backends.cuda.wgmma import Product
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.tensors import Statistics, contiguous_keys
from intflash.problem import Problem

METHODS = {
    "intflash": "ExactP16",
    "intflash_p8": "ExactP8",
    "intflash_online": "Online",
    "intflash_bfp": "BlockFloat",
}
TILE = 128  # keys per tile
STAGES = 4  # of the ring buffer
_NO_MASKS = ("cu_seqlens_q", "window_start")  # fields of a problem that no method's kernel supports
_SHARED_BYTES = 227 * 1024  # available to a CTA
_TABLE_BYTES = 32 * 1024  # of the table of P of `intflash_online`
# a thread's accumulators of `intflash_bfp` that are in shared memory, by head_dim
_ACC_WORDS = {80: 12, 96: 16, 112: 24, 128: 34}
_STAGING_BYTES = 2 * 16 * 1024  # of floats that wait in shared memory to be quantized
_WARPGROUP_TIMES = {
    2: (0.8, 1.0),
    3: (0.57, 0.78, 1.0),
}  # time of 1, 2, ... warpgroups relative to that of all, measured
_OUTPUT_TIME = 0.1  # part of that time that 64 rows' output takes
_QUANTIZE_TILE_US = 0.6  # to quantize a tile of K and V with D = 64, by all warpgroups of a CTA or beside its consumers
_PASS_LEAST_US, _PASS_TB_S = (
    4.5,
    4.0,
)  # a separate quantization pass: its least time, and its rate at 3 bytes per element


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot serve the problem, or None."""
    if problem.method not in METHODS:
        return f"method {problem.method!r} has no kernel for long rows"
    if problem.method == "intflash_bfp":
        return shape_unsupported(problem)
    if problem.keep is not None and (reason := _key_mask_unsupported(problem)):
        return reason
    return shape_unsupported(problem, 8 if _pads_channels(problem) else 16, ("bias", *_NO_MASKS))


def shape_unsupported(
    problem: Problem, multiple: int = 16, refused: tuple[str, ...] = ("bias", "keep", *_NO_MASKS)
) -> str | None:
    """Returns why the mainloop cannot serve the problem's shape or masks, or None."""
    d, dv = problem.q.shape[3], problem.v.shape[3]
    if d != dv or d % multiple or d > 128:
        return f"needs one head_dim, a multiple of {multiple} up to 128, got {d} and {dv}"
    for what in refused:
        if getattr(problem, what) is not None:
            return f"long rows do not support {what}"
    return None


def _pads_channels(problem: Problem) -> bool:
    """Whether the kernel pads head_dim to a multiple of 16 itself. The quantization pass writes rows of codes that are
    padded, and a thread stores its channels of the output in words of at most 16 bytes.
    """
    return isinstance(problem.q, Tensor) and problem.out_dtype.is_floating_point and problem.q.shape[3] >= 40


def _padded_channels(d: int) -> int:
    return -(-d // 16) * 16


def _key_mask_unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot read the bool mask, or None: it reads four keys at once."""
    keep, keys = problem.keep, problem.k.shape[2]
    one_for_all = all(n == 1 or stride == 0 for n, stride in zip(keep.shape[1:3], keep.stride()[1:3], strict=True))
    if not one_for_all or keep.shape[3] != keys or problem.causal is not None:
        return f"long rows take bool masks of keys alone and without causal ones, got shape {list(keep.shape)}"
    if keys % 4 or keep.stride(3) != 1 or keep.data_ptr() % 4 or keep.shape[0] > 1 and keep.stride(0) % 4:
        return f"long rows read four keys of a bool mask at once, got {keys} keys and strides {keep.stride()}"
    if keep.shape[0] * keep.stride(0) >= 1 << 32:
        return f"masks of keys must lie within 4 GiB, got shape {list(keep.shape)} and strides {keep.stride()}"
    return None


def quantizes_kv(problem: Problem) -> bool:
    """Whether the kernel quantizes the problem's float K and V itself: 16-bit floats, with K/V resident in shared
    memory.
    """
    d = _padded_channels(problem.q.shape[3])
    if problem.method not in METHODS or problem.q.element_size() != 2 or d == 16:  # 16: registers would spill
        return False
    if problem.method == "intflash_bfp":  # it reads codes again where a row needs a second pass
        return False
    if not all(map(_offsets_fit_32_bits, (problem.k, problem.v))):
        return False
    consumers = _consumers(problem, d, _light_quantization(d), False)
    stages = _max_stages(d, consumers, _extra_shared_bytes(problem, consumers, True))
    return _fits_resident(problem, stages) and _quantizing_is_faster(problem)


def _quantizing_is_faster(problem: Problem) -> bool:
    """Whether every CTA quantizes its heads in less time than a separate pass over K and V takes. The times were
    measured.
    """
    batch, heads, nk, d = problem.k.shape
    _, share = schedule_resident_heads(problem, True)
    each, tiles = share.rest_tiles, share.whole
    in_step = share.first == 0 and (tiles % each == 0 or each % tiles == 0)  # heads begin where CTAs do
    loaded = -(-each // tiles) + (not in_step)
    return (
        loaded * -(-nk // TILE) * d / 64 * _QUANTIZE_TILE_US
        < _PASS_LEAST_US + 6e-6 * batch * heads * nk * d / _PASS_TB_S
    )


def _offsets_fit_32_bits(x: Tensor) -> bool:
    """Whether the byte offsets between a head's tokens fit in 32 bits."""
    return x.shape[2] * abs(x.stride(2)) * x.element_size() < 1 << 31


def long_rows_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    consumers: int | None = None, resident: bool | None = None, key_counts: Tensor | None = None,
) -> CudaLaunch:  # fmt: skip
    """Returns the launch for a problem of int8 codes, of float Q with its scale and codes of K and V, or of floats with
    all three scales.

    consumers: number of consumer warpgroups, by default as many as fit. resident: whether K/V are resident in shared
    memory, by default where that is faster. key_counts: how many of the keys each batch has, int32 ``[B]``; by default
    all of them.
    """
    floats = isinstance(problem.k, Tensor)
    if not floats:
        problem = replace(problem, v=replace(problem.v, data=contiguous_keys(problem.v.data)))
    q, k, v = (x if isinstance(x, Tensor) else x.data for x in (problem.q, problem.k, problem.v))
    d = _padded_channels(q.shape[3])
    if not floats and d != q.shape[3]:
        k, v = (x.as_strided((*x.shape[:3], d), x.stride()) for x in (k, v))  # see `empty_codes`
    rows = has_row_scales(constants, scales)
    maps = None if floats or k.shape[2] % 16 else tensor_maps(k, v, TILE // 16, key_width(d))
    light = _light_quantization(d) if floats else maps is not None and d == q.shape[3]
    consumers = consumers or _consumers(problem, d, light, rows)
    extra = _extra_shared_bytes(problem, consumers, floats)
    most = _max_stages(d, consumers, extra)
    if resident is None:
        resident = floats or _fits_resident(problem, most) and _resident_is_faster(problem)
    stages = most if resident else STAGES
    products = tuple(Product(*x) for x in ((64, "s8"), (128, "s8"), (_pv_channels(problem.method, d), "u8")))
    program = CudaProgram.of(
        "sm90/long_rows.cu", products, METHOD=METHODS[problem.method],
        BLOCK_FLOAT=int(problem.method == "intflash_bfp"), HEAD_DIM=d, CONSUMERS=consumers,
        CAUSAL=int(problem.causal is not None), ROW_SCALES=int(rows), KEY_SCALES=0, QUERY=C_TYPES[q.dtype],
        VALUE="i8", OUT=C_TYPES[out.dtype], TMA=int(maps is not None),
        P_SHARED=int(_p_in_shared(problem, consumers)),
        P_TABLE=int(_uses_p_table(problem)), SCRATCH_BYTES=_scratch_bytes(problem), STAGES=stages,
        KV_RESIDENT=int(resident), FLOAT_KV=int(floats),
        VALUES_IN_RANGE=int(scales is not None and problem.recipe.q_scale is None),
        **({} if d == q.shape[3] else {"TENSOR_DIM": q.shape[3]}),
        **({} if key_counts is None else {"KEY_COUNTS": 1}), **({} if problem.keep is None else {"KEY_MASK": 1}),
    )  # fmt: skip
    shared = shared_bytes(d, consumers, TILE * d, 0, stages, extra)
    ctas, ranges = schedule_resident_heads(problem, floats) if resident else schedule_ranges(problem, consumers)
    params, keeps = parameters(problem, (q, k, v), scales, constants, out, statistics, share=ranges)
    if key_counts is not None:
        params.keep.ptr = key_counts.data_ptr()
        keeps[Params.keep.offset] = key_counts
    return CudaLaunch(program, (ctas, 1, 1), 128 * (consumers + 1), shared, params, q.device, keeps, True, maps)


def schedule_ranges(problem: Problem, consumers: int) -> tuple[int, Share]:
    """Returns the number of CTAs and the ranges that the tile scheduler hands out: `consumers` tiles of 64 rows each,
    then the rows that remain of each head, in smaller ranges.

    The kernel is persistent: a CTA takes one range after another. With a causal mask, where ranges take different
    times, each range has its own CTA, the longest first.
    """
    batch, heads, nq, _ = problem.q.shape
    rows = 64 * consumers
    if problem.causal is None:
        split = _choose_range_split(nq, batch * heads, consumers, multiprocessors(problem.device))
    else:
        split = RangeSplit(-(-nq // rows), 1, 0)
    rest = -(-max(nq - rows * split.whole, 0) // (64 * split.tiles))
    whole_of_all, ranges = batch * heads * split.whole, batch * heads * (split.whole + rest)
    ctas = ranges if problem.causal is not None else min(ranges, multiprocessors(problem.device))
    return ctas, Share(
        split.whole, rest, split.tiles, whole_of_all, ranges, split.first,
        *map(quotient_reciprocal, (split.whole, rest, heads)),
    )  # fmt: skip


def schedule_resident_heads(problem: Problem, floats: bool = False) -> tuple[int, Share]:
    """Returns the number of CTAs with K/V resident in shared memory, and the tiles of 64 rows that each takes.

    A CTA takes consecutive tiles, so that it loads few heads. Where loading a head takes as long as computing a tile,
    as it does for floats, a CTA takes tiles of a single head if that costs it at most one more tile.
    """
    batch, heads, nq, _ = problem.q.shape
    tiles, processors = -(-nq // 64), multiprocessors(problem.device)
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
    """The number of whole ranges of a head, tiles of 64 rows in a smaller range, and the first CTA that takes smaller
    ones.
    """

    whole: int
    tiles: int
    first: int


@cache
def _choose_range_split(nq: int, heads: int, consumers: int, processors: int) -> RangeSplit:
    """Returns the split that finishes first when `processors` multiprocessors take ranges round robin."""
    rows, times = 64 * consumers, _WARPGROUP_TIMES[consumers]
    most = nq // rows

    def splits() -> Iterator[RangeSplit]:
        for whole in range(most, max(most - 4, -1), -1):
            for tiles in range(consumers, 0, -1):
                ranges = heads * (whole - (whole * rows - nq) // (64 * tiles))
                for first in (heads * whole % min(ranges, processors), 0):
                    yield RangeSplit(whole, tiles, first)

    def rests(split: RangeSplit) -> list[float]:
        full, last = divmod(nq - rows * split.whole, 64 * split.tiles)
        found = [times[split.tiles - 1]] * full
        if last:  # of several smaller ranges, a full one finishes last
            found.append(times[-(-last // 64) - 1] - _OUTPUT_TIME * max(64 - last, 0) / 64)
        return found

    def end(split: RangeSplit) -> float:
        rest = rests(split)
        ctas = min(heads * (split.whole + len(rest)), processors)
        rounds, more = divmod(heads * split.whole, ctas)
        ends = [rounds + 1.0] * more + [float(rounds)] * (ctas - more)
        for i, time in enumerate(rest * heads):
            ends[split.first + i % (ctas - split.first)] += time
        return max(ends)

    def total(split: RangeSplit) -> float:
        # added one by one, as the native launcher does: `sum` compensates for rounding since Python 3.12
        return split.whole + reduce(operator.add, rests(split), 0.0)

    if heads * (most + 1) > 32 * processors:  # with this much work the total decides, as it is shared evenly
        return min((split for split in splits() if split.first == 0), key=total)
    return min(splits(), key=end)


def shared_bytes(
    d: int, consumers: int, value_bytes: int, scale_bytes: int, stages: int = STAGES, extra: int = 0
) -> int:
    """Bytes of `SharedLayout` of long_rows_load.cuh: the stages with their scales and barriers, Q's rows, and
    `extra`.
    """
    stage = -(-(TILE * key_width(d) + value_bytes) // 1024) * 1024 + scale_bytes + 16
    return stages * stage + 64 * consumers * key_width(d) + extra


def _extra_shared_bytes(problem: Problem, consumers: int, floats: bool) -> int:
    """Bytes of P, where it goes through shared memory, of what has no registers, of floats that wait to be quantized,
    and of the table of P.
    """
    p = 64 * consumers * TILE * _p_in_shared(problem, consumers)
    p += consumers * _scratch_bytes(problem)
    return p + floats * _STAGING_BYTES + _uses_p_table(problem) * _TABLE_BYTES


def _scratch_bytes(problem: Problem) -> int:
    """Bytes for each consumer warpgroup of `Scratch` of block_float_softmax.cuh: 64-bit words of 128 threads."""
    if problem.method != "intflash_bfp":
        return 0
    return (7 + _ACC_WORDS.get(problem.q.shape[3], 0)) * 128 * 8


def _pv_channels(method: str, d: int) -> int:
    """Channels of one product of P V: PV_CHANNELS of block_float_softmax.cuh, or all."""
    if method != "intflash_bfp":
        return d
    return 16 if d % 32 else 32 if d > 64 else d


def _uses_p_table(problem: Problem) -> bool:
    """Whether P comes from a table (exp2_table.cuh)."""
    return problem.method == "intflash_online"


def _p_in_shared(problem: Problem, consumers: int) -> bool:
    return consumers == 3 and problem.q.shape[3] > 96 and _uses_p_table(problem)


def _max_stages(d: int, consumers: int, extra: int) -> int:
    """The number of ring stages that fit in shared memory."""
    one, two = (shared_bytes(d, consumers, TILE * d, 0, stages, extra) for stages in (1, 2))
    return 1 + (_SHARED_BYTES - one) // (two - one)


def _fits_resident(problem: Problem, stages: int) -> bool:
    """Whether K and V of a head can be resident in shared memory."""
    return problem.causal is None and -(-problem.k.shape[2] // TILE) <= stages


def _resident_is_faster(problem: Problem) -> bool:
    """Whether resident K/V are faster. They are for int8 Q, which is loaded during the previous output. Loading float Q
    takes more time than resident K/V save where there are at most two tiles of keys.
    """
    return not isinstance(problem.q, Tensor) or problem.k.shape[2] > 2 * TILE


def _light_quantization(d: int) -> bool:
    """Whether quantizing floats on the way leaves the consumers as many registers as TMA does."""
    return d == 64


def _consumers(problem: Problem, d: int, light_loads: bool, rows: bool) -> int:
    """The number of consumer warpgroups, as many as registers allow. light_loads: the producer needs few registers, as
    with TMA; row_scales: each row has its own scale.
    """
    if problem.method == "intflash_bfp":
        return 2
    if problem.method == "intflash":
        return 3 if 32 < d <= 64 and light_loads and not rows else 2
    if problem.method == "intflash_p8":
        return 3 if d <= 96 or d == 128 else 2
    if rows:
        return 3 if d <= (80 if problem.causal is None else 64) else 2
    return 3 if d <= 96 or problem.causal is None else 2
