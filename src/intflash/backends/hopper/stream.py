"""The launch of kernels/stream.cu: rows of any length, keys in tiles that run through shared memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from intflash.backends.hopper.parameters import has_row_scales, parameters
from intflash.backends.hopper.program import CudaLaunch, Program
from intflash.backends.hopper.rows import key_major, key_width
from intflash.backends.hopper.types import C_TYPES
from intflash.backends.hopper.wgmma import Product
from intflash.backends.triton.constants import Constants
from intflash.backends.triton.streaming import Statistics
from intflash.problem import Problem

METHODS = {"intflash": "ExactP16", "intflash_p8": "ExactP8", "intflash_online": "Online"}
_TILE = 128  # keys
_STAGES = 4


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot take the problem, or None."""
    d, dv = problem.q.shape[3], problem.v.shape[3]
    if d != dv or d % 16 or d > 128:
        return f"needs one head_dim, a multiple of 16 up to 128, got {d} and {dv}"
    if problem.q.shape[0] > 65535:
        return f"takes a batch of at most 65535, got {problem.q.shape[0]}"
    if problem.method not in METHODS:
        return f"method {problem.method!r} has no kernel for long rows"
    for what in ("bias", "keep", "cu_seqlens_q"):
        if getattr(problem, what) is not None:
            return f"long rows take no {what}"
    return None


def stream_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics, consumers: int | None = None
) -> CudaLaunch:
    """For a problem of int8 codes. consumers: warpgroups that compute, where not the number that fits best."""
    problem = replace(problem, v=replace(problem.v, data=with_contiguous_keys(problem.v.data)))
    q, k, v = (x.data for x in (problem.q, problem.k, problem.v))
    batch, heads, nq, d = q.shape
    consumers = consumers or _consumers(d, problem.method)
    products = tuple(Product(*x) for x in sorted({(64, "s8"), (8, "u8"), (d, "u8")}))
    program = Program.of(
        "stream.cu", products, METHOD=METHODS[problem.method], HEAD_DIM=d, CONSUMERS=consumers,
        CAUSAL=int(problem.causal is not None), ROW_SCALES=int(has_row_scales(constants, None)), OUT=C_TYPES[out.dtype],
    )  # fmt: skip
    width = key_width(d)
    shared = _STAGES * (-(-_TILE * (width + d) // 1024) * 1024 + 16) + 1024 + 64 * consumers * width
    params, keeps = parameters(problem, (q, k, v), None, constants, out, statistics)
    grid = (-(-nq // (64 * consumers)), heads, batch)
    return CudaLaunch(program, grid, 128 * (consumers + 1), shared, params, q.device, keeps)


def _consumers(d: int, method: str) -> int:
    """Warpgroups that compute: as many as the registers hold."""
    if method == "intflash":
        return 2
    return 3 if d <= 96 or d == 128 and method == "intflash_p8" else 2


def with_contiguous_keys(v: Tensor) -> Tensor:
    """V as 16-byte copies along its keys can read it: as it lies, or a copy with padded rows."""
    b, h, n, d = v.shape
    padded = -(-n // 16) * 16
    if key_major(v, padded):
        return v
    rows = torch.empty if padded == n else torch.zeros
    return rows(b, h, d, padded, dtype=torch.int8, device=v.device)[..., :n].copy_(v.mT).mT
