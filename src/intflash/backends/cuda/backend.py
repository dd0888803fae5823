"""Serves a problem by the native module's plan of its launches: refusals, copies of tensors, the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from intflash.backends.cuda import long_rows_float, plans
from intflash.backends.cuda.plans import Plan
from intflash.backends.gpu import float_softmax
from intflash.backends.gpu.integer import log_sum_exp
from intflash.backends.gpu.scales import serves as serves_recipe
from intflash.backends.gpu.tensors import Statistics, limits
from intflash.problem import Problem, Result

METHODS = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp")
_ROW = 16  # codes, or floats, that rows of copies are padded to


def unsupported(problem: Problem) -> str | None:
    if problem.method not in METHODS and problem.method not in long_rows_float.METHODS:
        return f"method {problem.method!r} has no CUDA kernel"
    if problem.device.type != "cuda":
        return f"tensors are on {problem.device}, the CUDA backend needs a CUDA device"
    if problem.method in long_rows_float.METHODS:
        return limits(problem) or long_rows_float.unsupported(problem)
    return plans.find_kernel(problem).refusal


def planned(problem: Problem, **options: Any) -> Plan:
    """Returns the plan of a supported problem. options: those of `plans.plan`."""
    if isinstance(problem.q, Tensor) and (problem.cu_seqlens_q is not None or not serves_recipe(problem)):
        problem = problem.quantized()
    copies = plans.find_kernel(problem, options.get("key_counts") is not None).copies
    return plans.plan(with_copies(problem, copies), has_copies=bool(copies), **options)


def run(problem: Problem) -> Result:
    if problem.method in long_rows_float.METHODS:
        return float_softmax.run(problem, long_rows_float.float_launch)
    plan = planned(problem)
    plan.run()
    return Result(plan.out, plan.out_scale, log_sum_exp(problem.method, Statistics(plan.t_max, plan.l)))


def with_copies(problem: Problem, names: tuple[str, ...]) -> Problem:
    """The problem with copies of some tensors: masks with contiguous keys, others with contiguous channels in rows that
    are padded with zeros. Their shapes stay.
    """
    changes: dict[str, Any] = {}
    for name in names:
        x = getattr(problem, name)
        if name in ("bias", "keep"):
            changes[name] = x.contiguous()
        else:
            changes[name] = _padded_copy(x) if isinstance(x, Tensor) else replace(x, data=_padded_copy(x.data))
    return replace(problem, **changes) if changes else problem


def _padded_copy(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    padded = -(-d // _ROW) * _ROW
    if x.stride(1) < x.stride(2):  # the output has Q's order of axes
        return x.new_zeros(b, n, h, padded).transpose(1, 2)[..., :d].copy_(x)
    return x.new_zeros(b, h, n, padded)[..., :d].copy_(x)
