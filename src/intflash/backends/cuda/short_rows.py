"""Launches csrc/cuda/sm90/short_rows.cu, for at most 224 keys: whole rows of scores stay in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from intflash.backends.cuda.parameters import HEAD_AMAX_IN_KERNEL, Params, has_row_scales, parameters
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram
from intflash.backends.cuda.tensor_maps import TensorMaps, tensor_maps
from intflash.backends.cuda.wgmma import Product
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.tensors import GRID_LIMIT, Statistics, key_major
from intflash.problem import Problem

MAX_KEYS = 224
_FEW_TILES = 264  # two for each multiprocessor of an H200


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot serve the problem, or None."""
    (d, dv), nk = (problem.q.shape[3], problem.v.shape[3]), problem.k.shape[2]
    if nk > MAX_KEYS:
        return f"short rows hold at most {MAX_KEYS} keys, got {nk}"
    if problem.q.shape[2] > 64 * GRID_LIMIT:
        return f"takes at most {64 * GRID_LIMIT} queries, got {problem.q.shape[2]}"
    for name in "qkv":
        x = getattr(problem, name)
        x = x if isinstance(x, Tensor) else x.data
        if x.shape[2] * x.stride(2) * x.element_size() >= 1 << 31:
            return f"tokens of {name} must lie within 2 GiB, got strides {x.stride()}"
    bits, itemsize = (16 if problem.method == "intflash" else 8), problem.q.data.element_size()
    if ctas_per_sm(-(-nk // 16) * 16, d, bits, itemsize) == 0:
        return f"the registers do not hold rows of {nk} keys with {bits}-bit p and head_dim {d}"
    v = problem.v if isinstance(problem.v, Tensor) else problem.v.data
    if v.stride(3) != 1 and not key_major(v, -(-nk // 16) * 16):
        return f"V needs contiguous channels, or keys at multiples of 16 bytes, got strides {v.stride()}"
    if d != dv or d % 16 or d > 128:
        return f"needs one head_dim, a multiple of 16 up to 128, got {d} and {dv}"
    return bias_unsupported(problem)


def bias_unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot add the problem's bias, or None."""
    bias, nk = problem.bias, problem.k.shape[2]
    if bias is not None and (bias.shape[3] != nk or bias.stride(3) != 1 or nk < 4):
        return (
            f"short rows need a bias of at least 4 keys in contiguous memory, got {list(bias.shape)}, {bias.stride()}"
        )
    return None


def _keys_at_once(bias: Tensor) -> int:
    """The macro BIAS: the number of keys of the bias that one load may read."""
    strides = (s for s, n in zip(bias.stride()[:3], bias.shape, strict=False) if n > 1)
    return 1 if bias.shape[3] % 4 or bias.data_ptr() % 16 or any(s % 4 for s in strides) else 4


@dataclass(frozen=True)
class RowSplit:
    """How the work is split: warpgroups per CTA, tiles of 64 rows per CTA, CTAs per multiprocessor."""

    warpgroups: int
    tiles: int
    ctas_per_sm: int


def short_rows_launch(
    problem: Problem, bits: int, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor, ...] | None, split: RowSplit | None = None,
) -> CudaLaunch:  # fmt: skip
    """Returns the launch for a problem of int8 codes, or of floats with the scales of Q, K and V or
    HEAD_AMAX_IN_KERNEL.
    """
    q, k, v = (x.data if scales is None else x for x in (problem.q, problem.k, problem.v))
    (batch, heads, nq, d), nk = q.shape, k.shape[2]
    keys = -(-nk // 16) * 16
    row_tiles = -(-nq // 64)
    max_ctas = min(ctas_per_sm(keys, d, bits, q.element_size()), 2 if problem.bias is not None else 4)
    split = split or choose_split(batch * heads, row_tiles, max_ctas, q.dtype == torch.int8)
    products = (*(Product(n, "s8") for n in sorted(key_parts(keys))), Product(d, "u8"))
    biased = problem.bias is not None
    exp_32bit = biased or uses_exp_32bit(batch * heads * row_tiles)
    remainder = has_remainder_rows(nq, d)
    heads_first, in_kernel = batch <= GRID_LIMIT, scales == HEAD_AMAX_IN_KERNEL
    maps = _maps(k, v) if exp_32bit and scales is None else None
    dynamic = scales is not None and problem.recipe.q_scale is None  # scales of the values' own maxima
    program = CudaProgram.of(
        "sm90/short_rows.cu", products, KEYS=keys, HEAD_DIM=d, BITS=bits, IN=C_TYPES[q.dtype], OUT=C_TYPES[out.dtype],
        KEY_MAJOR=int(scales is None and key_major(v, keys)), EXP_32BIT=int(exp_32bit),
        ROW_SCALES=int(has_row_scales(constants, scales)), HEAD_AMAX_IN_KERNEL=int(in_kernel),
        VALUES_IN_RANGE=int(dynamic), TMA=int(maps is not None), REMAINDER_ROWS=int(remainder),
        STATISTICS=int(statistics.l is not None),
        HEADS_FIRST=int(heads_first), REVERSE_HEADS=int(dynamic and not in_kernel),
        ALL_ROWS=int(split.tiles >= row_tiles), WARPGROUPS=split.warpgroups, CTAS_PER_SM=split.ctas_per_sm,
        **({"BIAS": _keys_at_once(problem.bias)} if biased else {}),
    )  # fmt: skip
    params, keeps = parameters(problem, (q, k, v), scales, constants, out, statistics, split.tiles)
    grid = (*((heads, batch) if heads_first else (batch, heads)), -(-row_tiles // split.tiles))
    shared = sum(head_bytes(keys, d)) + 16 * (maps is not None) + remainder * remainder_bytes(keys, bits)
    shared += biased * (split.warpgroups * 64 * keys * 4 + remainder * 128)
    return CudaLaunch(program, grid, 128 * split.warpgroups, shared, params, q.device, keeps, True, maps)


def _maps(k: Tensor, v: Tensor) -> Callable[[Params, torch.device], TensorMaps] | None:
    """Makes the tensor maps of K without its last 16 keys and of V, where TMA can load them."""
    nk, d = k.shape[2:]
    if nk <= 16 or key_width(d) != d or not key_major(v, -(-nk // 16) * 16):
        return None
    return tensor_maps(k, v, (nk - 1) // 16, d)


def key_width(d: int) -> int:
    """Bytes per row of K in shared memory: K_WIDTH of the kernels."""
    return 32 if d <= 32 else 64 if d <= 64 else 128


def head_bytes(keys: int, d: int) -> tuple[int, int]:
    """Bytes of K and of V^T in shared memory."""
    return -(-keys * key_width(d) // 1024) * 1024, -(-keys // 128) * d * 128


def has_remainder_rows(nq: int, d: int) -> bool:
    """Whether the last rows of a head are few enough for remainder_rows.cuh, and head_dim is one that it supports."""
    return 1 <= nq % 64 <= 8 and d in (64, 128)


def uses_exp_32bit(tiles: int) -> bool:
    """Whether 32-bit exponentials pay for the fetch of their additional instructions, which takes 0.5 us in small
    batches.
    """
    return tiles > _FEW_TILES


def remainder_bytes(keys: int, bits: int) -> int:
    """Bytes of RemainderRows::Shared, the maxima and p of 8 rows in shared memory."""
    return 128 + 8 * (-(-keys // 32) | 1) * 64 * bits // 8


def key_parts(keys: int) -> set[int]:
    """The number of keys of the parts in which a row's scores are computed (short_rows_mainloop.cuh)."""
    first = 0 if keys < 64 else keys // 64 * 32
    return {first, keys - first} - {0}


def ctas_per_sm(keys: int, d: int, bits: int, itemsize: int) -> int:
    """The number of warpgroups per multiprocessor whose scores, accumulators and Q fit the registers; 0 if none fits.

    Qkv warpgroups leave 168 registers per thread, and for odd widths ptxas needs more than the sum.
    """
    query = d // 8 * (itemsize if itemsize < 4 else 1)
    registers = keys // 2 + d // 2 * (bits // 8) + query + (16 if bits == 8 else 40) + (8 if d > 80 else 0)
    if registers <= 88:
        return 4
    max_registers = (168 if bits == 8 else 160) - (8 if d > 96 and itemsize == 2 else 0)
    if registers <= max_registers and (keys <= 128 or bits == 8 and 192 <= keys <= 208):
        return 3
    return 2 if registers <= 232 else 0


def choose_split(heads: int, row_tiles: int, max_ctas: int, codes: bool) -> RowSplit:
    """Chooses the split, by measurements on an H200 (132 multiprocessors) with N = 197. max_ctas: see `ctas_per_sm`.

    While there are few tiles, each CTA has one, and for floats it has warpgroups that only help to quantize. With more
    tiles, K and V are loaded once for several.
    """
    tiles = heads * row_tiles
    if tiles <= 132:
        return RowSplit(1, 1, max_ctas) if codes else RowSplit(min(max_ctas, 3), 1, 1)
    if tiles <= _FEW_TILES:
        return RowSplit(2 if codes else min(max_ctas, 3), 2, 1)
    if heads <= 132:
        return RowSplit(1, 1, max_ctas) if codes else RowSplit(2, -(-row_tiles // (132 // heads)), 1)
    return RowSplit(1, row_tiles, max_ctas)
