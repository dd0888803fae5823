"""From a validated problem to launches: choose the kernel, fill the constants, run."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from intflash.backends.triton import mixed, rowwise, steps, unfused
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.streaming import Statistics, streaming_launch
from intflash.numerics import exp
from intflash.problem import Problem, Result

STEPS = {"intflash": steps.P16, "intflash_p8": steps.P8, "intflash_online": steps.ONLINE}
FAMILIES = {**dict.fromkeys(mixed.STEPS, mixed), **dict.fromkeys(unfused.METHODS, unfused)}  # modules of their own
_ROW_BITS = {"intflash": 16, "intflash_p8": 8}
_P_MAX = {"intflash": exp.P16_MAX, "intflash_p8": exp.P8_MAX, "intflash_online": exp.P8_MAX}


def unavailable() -> str | None:
    if triton.knobs.runtime.interpret:
        return None
    if not torch.cuda.is_available():
        return "no CUDA device (set TRITON_INTERPRET=1 before importing triton to run it in the interpreter)"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs a GPU of compute capability 8.0 or newer, this one has {major}.{minor}"
    return None


def unsupported(problem: Problem) -> str | None:
    if problem.method not in STEPS and problem.method not in FAMILIES:
        return f"method {problem.method!r} has no Triton kernel"
    if problem.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"tensors are on {problem.device}, the Triton backend needs a CUDA device"
    family = FAMILIES.get(problem.method)
    return None if family is None else family.unsupported(problem)


def run(problem: Problem) -> Result:
    if problem.method in FAMILIES:
        return FAMILIES[problem.method].run(problem)
    problem = problem.quantized()
    batch, heads, nq, _ = problem.q.shape
    out = torch.empty(batch, heads, nq, problem.v.shape[3], dtype=problem.out_dtype, device=problem.device)
    launch, constants, out_scale = constants_launch(problem)
    launch.run()
    statistics = _statistics(problem)
    if problem.method in _ROW_BITS and rowwise.serves(problem):
        bits = _ROW_BITS[problem.method]
        rowwise.rowwise_launch(problem, bits, constants, out, statistics, rowwise.InputScales(None, None, None)).run()
    else:
        streaming_launch(problem, STEPS[problem.method], constants, out, statistics).run()
    return Result(out, out_scale, _log_sum_exp(problem, statistics))


def _statistics(problem: Problem) -> Statistics:
    if not problem.return_lse:
        return Statistics(None, None)
    shape = problem.q.shape[:3]
    return Statistics(*(torch.empty(shape, dtype=dtype, device=problem.device) for dtype in (torch.int64, torch.int32)))


def _log_sum_exp(problem: Problem, statistics: Statistics) -> Tensor | None:
    if statistics.l is None:
        return None
    l = statistics.l.to(torch.int64) & 0xFFFFFFFF  # a uint32 in int32
    return exp.log_sum_exp(statistics.t_max, l, _P_MAX[problem.method])


