"""Launches csrc/cuda/sm90/long_rows_float.cu: int8 Q Kᵀ, a float32 softmax, and 16-bit P and V."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.backends.cuda import long_rows
from intflash.backends.cuda.parameters import parameters
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram
from intflash.backends.cuda.wgmma import Product
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.float_softmax import Operand
from intflash.backends.gpu.tensors import Statistics
from intflash.problem import Problem

METHODS = {"lite": torch.bfloat16, "int_flash_half": torch.float16}  # the type of P and V
_PRODUCTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_CONSUMERS = 3  # consumer warpgroups
_NO_CONSTANTS = Constants(None, None, None)


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel should not serve the problem, or None."""
    d, nk = problem.q.shape[3], problem.k.shape[2]
    if nk < (least := 2048 if d <= 64 else 1024):
        return f"rows of less than {least} keys are faster on backend 'triton', got {nk}"
    return kernel_unsupported(problem)


def kernel_unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot serve the problem, or None."""
    if not problem.out_dtype.is_floating_point:
        return f"{problem.method} has float output, got {problem.out_dtype}"
    return long_rows.shape_unsupported(problem)


def float_launch(
    problem: Problem, operands: tuple[Operand, Operand, Operand], out: Tensor, statistics: Statistics,
) -> CudaLaunch:  # fmt: skip
    """Returns the launch. `operands` come from `gpu.float_softmax.operands`."""
    q, k, v = operands
    d = q.data.shape[3]
    k_scale, per = _key_scales(k)
    products = (Product(64, "s8"), Product(128, "s8"), Product(d, _PRODUCTS[v.data.dtype]))
    program = CudaProgram.of(
        "sm90/long_rows_float.cu", products, HEAD_DIM=d, CONSUMERS=_CONSUMERS, CAUSAL=int(problem.causal is not None),
        KEY_SCALES=per, P_SHARED=0, P_TABLE=0, SCRATCH_BYTES=0, QUERY="i8", VALUE=C_TYPES[v.data.dtype],
        OUT=C_TYPES[out.dtype], STAGES=long_rows.STAGES, KV_RESIDENT=0, FLOAT_KV=0, VALUES_IN_RANGE=0,
    )  # fmt: skip
    scales = (q.scale, k_scale, None)
    ctas, ranges = long_rows.schedule_ranges(problem, _CONSUMERS)
    params, keeps = parameters(problem, (q.data, k.data, v.data), scales, _NO_CONSTANTS, out, statistics, share=ranges)
    shared = long_rows.shared_bytes(d, _CONSUMERS, 128 * -(-d // 64) * 128, (0, 16, 512)[per])
    return CudaLaunch(program, (ctas, 1, 1), 128 * (_CONSUMERS + 1), shared, params, q.data.device, keeps, True)


def _key_scales(k: Operand) -> tuple[Tensor, int]:
    """Returns K's scales with contiguous tokens, and KEY_SCALES: 0 one per head, 1 one per tile of keys, 2 one per
    key.
    """
    if k.scale.shape[2] == 1:
        return k.scale, 0
    if k.granularity == "block" and k.block_size == long_rows.TILE:
        return k.scale.contiguous(), 1
    scale = k.scale.repeat_interleave(k.block_size, dim=2) if k.granularity == "block" else k.scale
    return scale.contiguous(), 2
