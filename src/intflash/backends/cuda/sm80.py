"""Launches csrc/cuda/sm80/attention.cu, which serves any number of queries and keys, head_dim to 256, every mask and
packed sequences on each GPU from compute capability 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.backends.cuda.parameters import Params, Share, SplitKv, has_row_scales, parameters, quotient_reciprocal
from intflash.backends.cuda.program import (
    C_TYPES,
    CudaLaunch,
    CudaProgram,
    capability,
    multiprocessors,
    shared_memory,
)
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.tensors import Statistics, key_major
from intflash.numerics.block import BLOCK
from intflash.problem import Problem
from intflash.quant import QTensor

METHODS = {
    "intflash": "ExactP16",
    "intflash_p8": "ExactP8",
    "intflash_online": "Online",
    "intflash_bfp": "BlockFloat",
}
_CHUNK = 16  # bytes of a copy, and channels that a row is padded to
_CHANNELS = 8  # that the quantizer takes at once
_FEW_ROWS = 16  # of the tile of few_rows.cu
_MANY_KEYS = 512  # from which on it is taken
_CTAS_PER_MULTIPROCESSOR = 2  # of few_rows.cu, at least, where there are enough keys
_TABLE_BYTES = 32 * 1024  # of the table of P of `intflash_online`


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot serve the problem, or None."""
    d, dv, rows = problem.q.shape[3], problem.v.shape[3], problem.q.shape[2]
    if problem.method == "intflash_online" and problem.bias is not None:
        return "intflash_online has no bias"
    if (
        problem.method == "intflash_bfp"
        and not takes_few_rows(problem)
        and (problem.bias is not None or problem.keep is not None)
    ):
        # the registers do not hold masks beside the sums of 64 bits
        return (
            f"{problem.method} takes a bias or a bool mask for at most {_FEW_ROWS} rows and from {_MANY_KEYS} keys on"
        )
    if max(d, dv) > 256:
        return f"takes at most 256 channels, got {d} and {dv}"
    if problem.q.shape[0] * problem.q.shape[1] * -(-rows // 16) >= 1 << 31:
        return f"takes at most 2^31 tiles of 16 rows, got {list(problem.q.shape)}"
    needed, there = _shared_bytes(problem, choose_tile(problem)), shared_memory(problem.device)
    if needed > there:
        return f"head_dim {d} needs {needed} bytes of shared memory, this GPU has {there}"
    for mask in (problem.bias, problem.keep):
        # beyond, the quotient by the reciprocal is not exact
        if mask is not None and mask.shape[0] < problem.q.shape[0] and problem.q.shape[0] * mask.shape[0] >= 1 << 32:
            return f"a mask of {mask.shape[0]} batches repeats over at most 2^32 in all, got {problem.q.shape[0]}"
    return None


# --- tensors as the kernels read them


def aligned(problem: Problem) -> Problem:
    """The problem with copies of those tensors that 16-byte accesses cannot read.

    Copies are padded with zeros to whole chunks of channels. Their shapes stay.
    """
    packed = problem.cu_seqlens_q is not None
    if packed and isinstance(problem.q, Tensor):
        problem = problem.quantized()
    changes: dict[str, QTensor | Tensor] = {}
    for name in "qkv":
        x = getattr(problem, name)
        data = x if isinstance(x, Tensor) else x.data
        of_keys = name == "v" and not packed and data.element_size() == 1 and key_major(data, _padded(data.shape[2]))
        if not of_keys and (made := _aligned(data)) is not data:
            changes[name] = made if isinstance(x, Tensor) else replace(x, data=made)
    for name in ("bias", "keep"):
        mask = getattr(problem, name)
        if mask is not None and mask.shape[3] > 1 and mask.stride(3) != 1:
            changes[name] = mask.contiguous()
    return replace(problem, **changes) if changes else problem


def _aligned(x: Tensor) -> Tensor:
    size, d = x.element_size(), x.shape[3]
    strides = [s * size for s, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
    whole = _CHUNK if size == 1 else _CHANNELS
    if x.stride(3) == 1 and d % whole == 0 and not (x.data_ptr() % 16 or any(s % 16 for s in strides)):
        return x
    b, h, n, _ = x.shape
    if x.stride(1) < x.stride(2):  # the output has Q's order of axes
        return x.new_zeros(b, n, h, _padded(d)).transpose(1, 2)[..., :d].copy_(x)
    return x.new_zeros(b, h, n, _padded(d))[..., :d].copy_(x)


def _padded(count: int) -> int:
    return -(-count // _CHUNK) * _CHUNK


# --- the launch


@dataclass(frozen=True)
class Tile:
    """How the work is split: warps of a CTA, tiles of 16 rows of a warp, keys of a tile, stages, CTAs per
    multiprocessor, CTAs that share the channels of V.
    """

    warps: int = 4
    row_tiles: int = 1
    keys: int = 64
    stages: int = 3
    ctas_per_sm: int = 3
    slices: int = 1


def choose_tile(problem: Problem) -> Tile:
    """Chooses the tile, by measurements on an H100, whose registers and shared memory suffice on the problem's GPU.

    Two tiles of rows share what a warp reads of K and V; one leaves registers for masks and for P16's two digits.
    """
    d = max(problem.q.shape[3], problem.v.shape[3])
    masked = problem.bias is not None or problem.keep is not None
    # three CTAs where ptxas does not spill registers
    three = 2 if problem.causal is not None or capability(problem.device) >= (12, 0) else 3
    if problem.method == "intflash_online":
        tile = Tile(keys=128, stages=2, ctas_per_sm=1 if d > 96 else 2, slices=1 + (d > 128))
        fits = d <= 96 or _shared_bytes(problem, tile) <= shared_memory(problem.device)
        return tile if fits else replace(tile, slices=2 * tile.slices)
    if problem.method == "intflash_bfp":
        # tiles are blocks of keys, and a row's sums have 64 bits
        return Tile(keys=BLOCK, stages=2, ctas_per_sm=2, slices=-(-problem.v.shape[3] // 64))
    if problem.method == "intflash_p8":
        if d > 128:
            return Tile(keys=32, ctas_per_sm=2)
        if problem.bias is not None or masked and d > 64:
            return Tile(ctas_per_sm=three if d <= 64 else 2)
        if d > 64 and problem.k.shape[2] <= _MANY_KEYS:
            return Tile(keys=32, ctas_per_sm=three)
        return Tile(row_tiles=2, keys=32, ctas_per_sm=three if d <= 64 else 2)
    if d > 128:
        return Tile(keys=32, ctas_per_sm=2, slices=2)
    return Tile(keys=32 if d > 96 else 64, ctas_per_sm=2 if d > 64 or problem.bias is not None else three)


class Launches(NamedTuple):
    """Launches that run in order."""

    launches: tuple[CudaLaunch, ...]

    def run(self) -> None:
        for launch in self.launches:
            launch.run()


def attention_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None, tile: Tile | None = None,
) -> CudaLaunch | Launches:  # fmt: skip
    """Returns the launch for a problem of `aligned` int8 codes, or of float Q with its scale and codes of K and V."""
    if tile is None and takes_few_rows(problem):
        return few_rows_launches(problem, constants, out, statistics, scales)
    q = problem.q
    batch, heads, nq, _ = q.shape
    tile = tile or choose_tile(problem)
    packed = problem.cu_seqlens_q is not None
    causal = 0 if problem.causal is None else 2 if packed and problem.causal_align == "bottom_right" else 1
    program = CudaProgram.of(
        "sm80/attention.cu", **_macros(problem, constants, out, scales, tile), CAUSAL=causal, PACKED=int(packed),
        WINDOW=int(problem.window_start is not None), ROW_TILES=tile.row_tiles,
    )  # fmt: skip
    rows = 16 * tile.row_tiles * tile.warps
    tiles, sequences = -(-nq // rows), 0
    if packed:
        sequences = problem.cu_seqlens_q.numel() - 1
        tiles += sequences  # each may end within a tile
    share = Share(whole_reciprocal=quotient_reciprocal(tiles), heads_reciprocal=quotient_reciprocal(heads))
    params, keeps = parameters(
        problem, _tensors(problem), scales, constants, out, statistics, tiles, share, sequences or None
    )
    grid = (batch * heads * tiles, tile.slices, 1)
    shared = _shared_bytes(problem, tile)
    return CudaLaunch(program, grid, 32 * tile.warps, shared, params, q.device, keeps, overlaps=True)


def _tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x if isinstance(x, Tensor) else x.data for x in (problem.q, problem.k, problem.v))


def _macros(
    problem: Problem, constants: Constants, out: Tensor, scales: tuple[Tensor | None, ...] | None, tile: Tile
) -> dict[str, object]:
    """The macros that attention.cu and few_rows.cu share."""
    q, _, v = _tensors(problem)
    packed = problem.cu_seqlens_q is not None
    return dict(
        METHOD=METHODS[problem.method], HEAD_DIM=-(-q.shape[3] // _CHANNELS) * _CHANNELS, VALUE_DIM=v.shape[3],
        QUERY=C_TYPES[q.dtype], OUT=C_TYPES[out.dtype],
        KEY_MAJOR=int(not packed and key_major(v, _padded(v.shape[2]))),
        ROW_SCALES=int(has_row_scales(constants, scales)),
        BIAS=_mask_kind(problem.bias, packed), KEEP=_mask_kind(problem.keep, packed), WARPS=tile.warps, KEYS=tile.keys,
        STAGES=tile.stages, SLICES=tile.slices, CTAS_PER_SM=tile.ctas_per_sm,
        VALUES_IN_RANGE=int(scales is not None and problem.recipe.q_scale is None),
    )  # fmt: skip


# --- few rows


def takes_few_rows(problem: Problem) -> bool:
    """Whether the rows that share a key head are one tile, and the keys are many: few_rows.cu is then faster."""
    return (
        problem.group * problem.q.shape[2] <= _FEW_ROWS
        and problem.k.shape[2] >= _MANY_KEYS
        and problem.method != "intflash_online"
        and problem.cu_seqlens_q is None
        and problem.window_start is None
    )


def few_rows_launches(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None, splits: int | None = None,
) -> Launches:  # fmt: skip
    """Returns the three launches of few_rows.cu. splits: ranges that the keys of a head are split into.

    Without score constants the kernels compute them from the scales of Q and K; without Q's scale that too.
    """
    tensors = q, k, v = _tensors(problem)
    (batch, _, nq, _), (kv_heads, nk), dv = q.shape, k.shape[1:3], v.shape[3]
    digits, blocks = 2 if problem.method == "intflash" else 1, problem.method == "intflash_bfp"
    slices = 1 if blocks else 1 + (digits * dv > 256)  # with blocks, each warp has a part of the channels
    tile = Tile(keys=128, stages=4 if max(k.shape[3], dv) <= 128 else 2, ctas_per_sm=2, slices=slices)
    tiles = -(-nk // tile.keys)
    if splits is None:
        splits = max(1, min(tiles, _CTAS_PER_MULTIPROCESSOR * multiprocessors(q.device) // (batch * kv_heads)))
    keys = -(-tiles // splits) * tile.keys
    splits, pitch, group = -(-nk // keys), _padded(nk), problem.group
    row_sums = 2 * (_padded(dv) + 2) if blocks else digits * (_padded(dv) + 1)
    of_cuda = dict(device=q.device)
    scores = torch.empty(batch * kv_heads, group * nq, pitch, dtype=torch.int32, **of_cuda)
    maxima = torch.empty(batch * kv_heads, splits, _FEW_ROWS, dtype=torch.int64, **of_cuda)
    sums = torch.empty(batch * kv_heads, _FEW_ROWS, row_sums, dtype=torch.int32, **of_cuda)
    split = SplitKv(
        splits, keys, group, kv_heads, *map(quotient_reciprocal, (splits, kv_heads, nq)), pitch,
        *(x.data_ptr() for x in (scores, maxima, sums)),
    )  # fmt: skip
    params, keeps = parameters(problem, tensors, scales, constants, out, statistics)
    params.split = split
    keeps |= {
        Params.split.offset + getattr(SplitKv, name).offset: x
        for name, x in (("scores", scores), ("maxima", maxima), ("sums", sums))
    }
    in_kernel = 0 if constants.score is not None else 2 if scales[0] is None else 1
    macros = _macros(problem, constants, out, scales, tile) | dict(
        CAUSAL=int(problem.causal is not None), BLOCK_FLOAT=int(blocks), SCORES=in_kernel
    )
    if group * nq > 8 and (in_kernel or constants.score.ptr.shape[1] > 1):
        macros["ROW_SCALES"] = 1  # rows i and i + 8, which a lane has, may be of two heads
    of_keys = tile.stages * _k_bytes(k.shape[3], tile)
    of_values = max(tile.stages * _v_bytes(dv, tile), 4 * _FEW_ROWS * row_sums)
    ctas = batch * kv_heads
    steps = ((ctas * splits, 1), of_keys), ((ctas * splits, tile.slices), of_values), ((ctas, 1), 0)
    return Launches(
        tuple(
            CudaLaunch(
                CudaProgram.of("sm80/few_rows.cu", **macros, STEP=step), (*grid, 1), 32 * tile.warps, shared, params,
                q.device, keeps, overlaps=True,
            )
            for step, (grid, shared) in enumerate(steps)
        )
    )  # fmt: skip


def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of the table of P and the stages: TABLE_BYTES + STAGES * STAGE_BYTES of the kernel, for any layout of V."""
    stage = _k_bytes(problem.q.shape[3], tile) + _v_bytes(problem.v.shape[3], tile)
    return _TABLE_BYTES * (problem.method == "intflash_online") + tile.stages * stage


def _k_bytes(d: int, tile: Tile) -> int:
    return tile.keys * 16 * (2 * -(-d // 32) + 1)


def _v_bytes(dv: int, tile: Tile) -> int:
    chunks = -(-dv // (16 * tile.slices))
    return max(16 * chunks * (tile.keys + 16), tile.keys * 16 * (chunks | 1))


def _mask_kind(mask: Tensor | None, packed: bool) -> int:
    """How a mask is read: 0 none, 1 by keys, 2 one value for all keys, 4 four keys at once (sm80/masks.cuh)."""
    if mask is None:
        return 0
    if mask.shape[3] == 1:
        return 2
    four = 4 * mask.element_size()
    strides = (s * mask.element_size() for s, n in zip(mask.stride()[:3], mask.shape, strict=False) if n > 1)
    whole = mask.shape[3] % 4 == 0 and mask.data_ptr() % four == 0 and not any(s % four for s in strides)
    return 4 if whole and not packed else 1
