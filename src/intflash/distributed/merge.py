"""Few queries that every rank has, over keys that lie on all ranks: exact partial results are merged.

A row's maximum over all keys is the maximum of the ranks' maxima, and its sums are the sums of theirs: integers, so
that the result has the bits of one process. Nothing of K and V travels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from intflash import call
from intflash.backends import select
from intflash.distributed.codes import Operand
from intflash.distributed.plan import Plan


def attend(
    plan: Plan, operands: tuple[Operand, Operand, Operand], a: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, its scale where it is integer, log-sum-exp."""
    q, k, v = (x.tensor(x.codes()) for x in operands)
    shards, rank = plan.k_shards, plan.ranks.rank
    here = shards.positions(rank).to(q.device)
    changes: dict[str, Any] = dict(q=q, k=k, v=v, recipe=None, is_causal=False, out_dtype=plan.problem.out_dtype)
    for name in ("attn_mask", "bias"):
        if a[name] is not None and a[name].shape[-1] > 1:
            changes[name] = torch.cat([a[name][..., s] for s in shards.segments(rank)], dim=-1)
    problem, _ = call.prepare_call(a | changes)
    if plan.problem.causal is not None:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        seen = (here <= rows + plan.problem.causal)[None, None]
        problem = replace(problem, keep=seen if problem.keep is None else problem.keep & seen)
    partial = select(problem, a["backend"] or "torch").partial  # refused where it does not serve all of the problem
    t_max = plan.ranks.reduce(partial.maxima(problem), dist.ReduceOp.MAX)
    total = plan.ranks.reduce(partial.sums(problem, t_max), dist.ReduceOp.SUM)
    result = partial.finish(problem, t_max, total)
    return result.out, result.out_scale, result.lse
