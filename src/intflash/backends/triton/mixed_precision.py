"""Launches the tile loop for the methods with a float softmax."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from intflash.backends.gpu import float_softmax
from intflash.backends.gpu.float_softmax import FP8_DIMS, Operand
from intflash.backends.gpu.tensors import Statistics, data_view, view
from intflash.backends.triton import mixed_precision_steps
from intflash.backends.triton.device_functions import LaunchConstants, make_masks
from intflash.backends.triton.intflash_steps import Steps
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.backends.triton.mixed_precision_steps import MixedConstants, ScaleKinds
from intflash.backends.triton.tile_loop import TileShape, _tile_loop_kernel, block_dim
from intflash.numerics.exp import ABSENT, LOG2_E, makes_absent
from intflash.problem import Problem, Result
from intflash.quant import QTensor

STEPS: dict[str, Steps] = {
    "int_flash_full": mixed_precision_steps.FULL,
    "int_flash_half": mixed_precision_steps.FLOAT16_P,
    "lite": mixed_precision_steps.BFLOAT16_P,
    "qattn": mixed_precision_steps.BFLOAT16_P,
    "fp16": mixed_precision_steps.FLOAT,
    "bf16": mixed_precision_steps.FLOAT,
    "fp32": mixed_precision_steps.FLOAT,
    "fp8": mixed_precision_steps.FP8,
    "fp8_head": mixed_precision_steps.FP8,
}
CONVERSION = {"int_flash_half": "integer", "lite": "integer"}  # of `online_softmax`; "convert" for the other methods
_LEAST_KEYS = 32  # keys of a tile: int8 products take 32 keys at once


def unsupported(problem: Problem) -> str | None:
    if problem.method in FP8_DIMS and problem.cu_seqlens_q is not None:
        return f"{problem.method} on Triton does not support packed sequences, because each would have its own scale"
    if problem.method != "int_flash_full":
        return None
    quantized = isinstance(problem.v, QTensor)
    granularity = problem.v.granularity if quantized else problem.recipe.v
    block = problem.v.block_size if quantized else problem.recipe.block_size
    if granularity in ("none", "token"):
        return f"int_flash_full on Triton multiplies int8 V, whose scale must not be per {granularity!r}"
    if granularity == "block" and block % _LEAST_KEYS:
        return f"int_flash_full on Triton needs V blocks of a multiple of {_LEAST_KEYS} keys, got {block}"
    return None


def run(problem: Problem) -> Result:
    return float_softmax.run(problem, mixed_launch)


def default_tile(method: str, head_dim: int, nq: int, nk: int) -> TileShape:
    """Returns the fastest tile of scripts/tune_mixed_tiles.py on an H200; 64 rows where there are few rows."""
    if method == "fp32":
        return TileShape(64, 32, 4, 2)
    if head_dim > 128:
        return TileShape(64, 64, 4, 2)
    if method in FP8_DIMS and nk > 64:
        return TileShape(64, 128, 4, 3) if head_dim <= 64 or nq <= 1024 else TileShape(128, 128, 8, 3)
    if head_dim > 64 and nq > 1024 and method in ("int_flash_half", "lite", "qattn"):
        return TileShape(128, 64, 4, 3)
    return TileShape(64, 64, 4, 3)


def mixed_launch(
    problem: Problem, parts: tuple[Operand, Operand, Operand], out: Tensor, statistics: Statistics,
    tile: TileShape | None = None, conversion: str | None = None,
) -> TritonLaunch:  # fmt: skip
    """Returns the launch. parts: from `float_softmax.operands`. tile and conversion: the method's own by default."""
    q, k, v = parts
    (batch, heads, nq, d), (nk, dv) = q.data.shape, v.data.shape[2:]
    tile = tile or default_tile(problem.method, d, nq, nk)
    if v.granularity == "block":
        tile = replace(tile, keys=min(tile.keys, v.block_size & -v.block_size))
    per_block = k.granularity == "block" and k.block_size % tile.keys == 0
    scale_kinds = ScaleKinds(
        k="none" if k.scale is None else "tile" if per_block else "key" if k.scale.shape[2] > 1 else "head",
        v="none" if v.scale is None else "tile" if v.granularity == "block" else "end",
        k_block=k.block_size,
        v_block=v.block_size,
        v_channels=1 if v.scale is None else v.scale.shape[3],
        out_channels=1 if problem.out_scale is None else problem.out_scale.shape[3],
        conversion=conversion or CONVERSION.get(problem.method, "convert"),
    )
    score_bounds = (
        view(_score_bounds(k.scale, k.block_size, nk, tile.keys, block_dim(d, 32))) if scale_kinds.k == "key" else None
    )
    integer_out = not problem.out_dtype.is_floating_point
    scales = [None if x is None else view(x.contiguous()) for x in (q.scale, k.scale, v.scale)]
    packed = problem.cu_seqlens_q is not None
    sequences = len(problem.cu_seqlens_q) - 1 if packed else None
    causal = ""
    if problem.causal is not None:
        causal = "bottom_right" if packed and problem.causal_align == "bottom_right" else "offset"
    programs, batch_first = grid(batch, heads, triton.cdiv(nq, tile.rows) + (sequences or 0))
    arguments = dict(
        q=data_view(q.data), k=data_view(k.data), v=data_view(v.data), out=data_view(out),
        constants=MixedConstants(
            *scales, view(problem.out_scale) if integer_out else None, score_bounds, float(problem.sm_scale * LOG2_E)
        ),
        statistics=statistics,
        masks=make_masks(
            _octaves(problem.bias_float), problem.keep, problem.causal, batch, problem.window_start
        ),
        cu_q=problem.cu_seqlens_q, cu_k=problem.cu_seqlens_k, sequences=sequences, nq=nq, nk=nk,
        STEPS=STEPS[problem.method], KIND=scale_kinds, CAUSAL=causal, PLAIN=scale_kinds, D=d, DV=dv,
        BM=tile.rows, BN=tile.keys, BD=block_dim(d, 32), BDV=block_dim(dv, 16),
        CONSTS=LaunchConstants(
            problem.group, 1, 1, all_visible=not packed and problem.causal is None and nk % tile.keys == 0
        ),
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_tile_loop_kernel, programs, arguments, tile.warps, tile.stages)


def _score_bounds(scale: Tensor, block_size: int, nk: int, keys: int, head_dim: int) -> Tensor:
    """Returns 1.25 times the largest possible |score * scale| of each tile of keys, float32 ``[B|1, Hk, tiles, 1]``."""
    scale = scale.repeat_interleave(block_size, dim=2)[:, :, :nk] if block_size > 1 else scale
    padded = torch.nn.functional.pad(scale[..., 0], (0, -nk % keys))
    return padded.unflatten(2, (-1, keys)).amax(dim=3)[..., None] * (1.25 * 127**2 * head_dim)


def _octaves(bias: Tensor | None) -> Tensor | None:
    """Returns the float bias in octaves in its own broadcast shape, with ABSENT (as a float) where it removes a key."""
    if bias is None:
        return None
    absent = makes_absent(bias)
    return torch.where(absent, float(ABSENT), bias.float() * LOG2_E)
