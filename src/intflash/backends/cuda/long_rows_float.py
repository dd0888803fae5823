"""Launches csrc/cuda/sm90/long_rows_float.cu: int8 Q Kᵀ, a float32 softmax, and 16-bit P and V."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.backends import native
from intflash.backends.cuda import plans
from intflash.backends.cuda.program import CudaLaunch
from intflash.backends.gpu.float_softmax import Operand
from intflash.backends.gpu.tensors import Statistics
from intflash.problem import Problem

METHODS = {"lite": torch.bfloat16, "int_flash_half": torch.float16}  # the type of P and V
_TILE = 128  # keys
_NO_MASKS = ("bias", "keep", "cu_seqlens_q", "window_start")  # fields of a problem that the kernel does not support


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel should not serve the problem, or None."""
    d, nk = problem.q.shape[3], problem.k.shape[2]
    if reason := kernel_unsupported(problem):
        return reason
    if nk < (least := 2048 if d <= 64 else 1024):
        return f"rows of less than {least} keys are faster on backend 'triton', got {nk}"
    return None


def kernel_unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot serve the problem, or None."""
    if not problem.out_dtype.is_floating_point:
        return f"{problem.method} has float output, got {problem.out_dtype}"
    for what in _NO_MASKS:
        if getattr(problem, what) is not None:
            return f"long rows do not support {what}"
    q, k, v = (x if isinstance(x, Tensor) else x.data for x in (problem.q, problem.k, problem.v))
    return native.module.float_refusal(q, k, v, plans.gpu_of(problem.device), problem.out_dtype)


def float_launch(
    problem: Problem, operands: tuple[Operand, Operand, Operand], out: Tensor, statistics: Statistics,
) -> CudaLaunch:  # fmt: skip
    """Returns the launch. `operands` come from `gpu.float_softmax.operands`."""
    q, k, v = operands
    k_scale, per = _key_scales(k)
    (note,) = native.module.plan_float(
        q.data, k.data, v.data, q.scale, k_scale, per, problem.sm_scale, problem.causal, plans.gpu_of(q.data.device),
        out, out.dtype, *statistics,
    )  # fmt: skip
    tensors = tuple(x for x in (q.data, k.data, v.data, q.scale, k_scale, out, *statistics) if x is not None)
    return plans.launch_of(note, q.data.device, tensors)


def _key_scales(k: Operand) -> tuple[Tensor, int]:
    """Returns K's scales with contiguous tokens, and KEY_SCALES: 0 one per head, 1 one per tile of keys, 2 one per
    key.
    """
    if k.scale.shape[2] == 1:
        return k.scale, 0
    if k.granularity == "block" and k.block_size == _TILE:
        return k.scale.contiguous(), 1
    scale = k.scale.repeat_interleave(k.block_size, dim=2) if k.granularity == "block" else k.scale
    return scale.contiguous(), 2
