"""The attention of a program as a `Problem`, which every backend of this library computes with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from intflash.integer.program import Attention, Program
from intflash.problem import Problem
from intflash.quant import QTensor


def attention_problem(
    program: Program, op: Attention, q: Tensor, k: Tensor, v: Tensor, inputs: Mapping[str, Tensor]
) -> Problem:
    """The validated call that an attention operation stands for.

    Args:
        q, k, v: int8 codes ``[B * S, heads, N, D]``.
        inputs: the program's, for a mask of padding.
    """
    bias = None if op.bias is None else program.tensors[op.bias]
    keep = None
    if op.mask in program.tensors:
        keep = program.tensors[op.mask]  # its S windows repeat over the batch
    elif op.mask is not None:
        keep = inputs[op.mask][:, None, None, :]
    return Problem(
        method=op.method, q=_codes(q, op.q_scale), k=_codes(k, op.k_scale), v=_codes(v, op.v_scale),
        sm_scale=op.sm_scale, bias=bias, keep=keep, out_dtype=torch.int8, out_scale=_scale(op.out_scale, q.device),
    )  # fmt: skip


def _codes(x: Tensor, scale: tuple[float, ...]) -> QTensor:
    return QTensor(x, _scale(scale, x.device), "tensor" if len(scale) == 1 else "head")


@functools.lru_cache(maxsize=4096)  # a copy from the host, which no captured graph may contain
def _scale(scale: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32, device=device).view(1, -1, 1, 1)
