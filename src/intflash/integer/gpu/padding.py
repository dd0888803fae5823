"""Attention with a padding mask on compute capability 9.0: the kept keys are gathered, and the kernel of long rows is
told how many each sequence has. The order of keys changes no bit, because sums are exact and the maximum is known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.backends.cuda import plans
from intflash.integer.gpu import hopper, kernels
from intflash.problem import Problem

LEAST_KEYS = 65  # the kernel for windows serves fewer


class KeyOrder(NamedTuple):
    """The keys that each sequence keeps, in order, and how many: int32 ``[B, N]`` and ``[B]``."""

    order: Tensor
    counts: Tensor


def serves(problem: Problem) -> bool:
    """Whether a problem is one of long rows with a padding mask, one bool for each key of a sequence."""
    keep = problem.keep
    if keep is None or problem.bias is not None or keep.shape[0] != problem.q.shape[0] or keep.shape[1:3] != (1, 1):
        return False
    keys = problem.k.shape[2]
    return (
        hopper.available(keep.device)
        and LEAST_KEYS <= keys <= kernels.MOST_KEYS
        and plans.find_kernel(replace(problem, keep=None), has_key_counts=True).kernel is not None
    )


def key_order(keep: Tensor) -> KeyOrder:
    """Of a mask ``[B, N]``."""
    batch, keys = keep.shape
    order = torch.empty(batch, keys, dtype=torch.int32, device=keep.device)
    found = KeyOrder(order, torch.empty(batch, dtype=torch.int32, device=keep.device))
    kernels.key_order_launch(keep.contiguous(), *found).run()
    return found


def without_masked_keys(problem: Problem, order: KeyOrder) -> Problem:
    """The problem with its kept keys side by side, V with contiguous keys, and no mask."""
    k, v = problem.k.data, problem.v.data
    batch, heads, keys, d = k.shape
    padded = -(-keys // kernels.KEY_BLOCK) * kernels.KEY_BLOCK
    k_out = torch.empty(batch, heads, keys, d, dtype=torch.int8, device=k.device)
    v_out = torch.empty(batch, heads, d, padded, dtype=torch.int8, device=k.device)
    kernels.gather_keys_launch(k, v, *order, k_out, v_out).run()
    values = replace(problem.v, data=v_out[..., :keys].mT)
    return replace(problem, k=replace(problem.k, data=k_out), v=values, keep=None)
