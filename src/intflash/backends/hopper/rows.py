"""The launch of kernels/rows.cu: at most 256 keys, whole rows on chip."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.backends.hopper.parameters import parameters
from intflash.backends.hopper.program import CudaLaunch, Program
from intflash.backends.hopper.types import C_TYPES
from intflash.backends.hopper.wgmma import Product
from intflash.backends.triton.constants import Constants
from intflash.backends.triton.launch import readable
from intflash.backends.triton.streaming import Statistics
from intflash.problem import Problem

MAX_KEYS = 256
THREADS = 128


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot take the problem, or None."""
    (d, dv), nk = (problem.q.shape[3], problem.v.shape[3]), problem.k.shape[2]
    if nk > MAX_KEYS:
        return f"whole rows hold at most {MAX_KEYS} keys, got {nk}"
    if d != dv or d % 16 or d > 128:
        return f"needs one head_dim, a multiple of 16 up to 128, got {d} and {dv}"
    return None


def key_major(v: Tensor, keys: int) -> bool:
    """Whether 16-byte copies can take V's keys as they lie."""
    return v.stride(2) == 1 and v.stride(3) % 16 == 0 and v.data_ptr() % 16 == 0 and readable(v, keys)


def rows_launch(
    problem: Problem, bits: int, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor, Tensor, Tensor] | None, tiles: int | None = None,
) -> CudaLaunch:  # fmt: skip
    """For a problem of int8 codes, or of floats with the scales of Q, K and V."""
    q, k, v = (x.data if scales is None else x for x in (problem.q, problem.k, problem.v))
    (batch, heads, nq, d), nk = q.shape, k.shape[2]
    keys = max(-(-nk // 16) * 16, 16)
    keys = keys if keys <= 32 or keys % 16 == 0 else keys
    row_tiles = -(-nq // 64)
    tiles = tiles or _tiles(batch * heads, row_tiles)
    wide = d > 64 or bits == 16 and keys > 128
    macros = dict(
        KEYS=keys, HEAD_DIM=d, BITS=bits, IN=C_TYPES[q.dtype], OUT=C_TYPES[out.dtype],
        KEY_MAJOR=int(scales is None and key_major(v, keys)), RESIDENT=2 if wide else 3,
    )  # fmt: skip
    products = (Product(keys, "s8"), Product(d, "u8"))
    program = Program("rows.cu", tuple((name, str(value)) for name, value in macros.items()), products)
    width = 32 if d <= 32 else 64 if d <= 64 else 128
    shared = -(-keys * width // 1024) * 1024 + -(-keys // 128) * d * 128
    params, keeps = parameters(problem, (q, k, v), scales, constants, out, statistics, tiles)
    return CudaLaunch(program, (batch, heads, -(-row_tiles // tiles)), THREADS, shared, params, q.device, keeps)


def _tiles(heads: int, row_tiles: int) -> int:
    """Row tiles of a program: one while there are few heads, then more, so that K and V are loaded less often."""
    if heads * row_tiles <= 3 * 132:
        return 1
    return row_tiles if heads >= 3 * 132 else -(-row_tiles // 2)
