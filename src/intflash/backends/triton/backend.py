"""From a validated problem to launches: choose the kernel, fill the constants, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from intflash.backends.triton import mixed, published, quantize, rowwise, steps, unfused
from intflash.backends.triton.constants import Constants, constants_launch, output_limit, score_unit
from intflash.backends.triton.launch import Launch, limits, view
from intflash.backends.triton.streaming import Statistics, streaming_launch
from intflash.numerics import exp
from intflash.problem import Problem, Result, empty_output

STEPS = {"intflash": steps.P16, "intflash_p8": steps.P8, "intflash_online": steps.ONLINE}
FAMILIES = {  # modules of their own
    **dict.fromkeys(mixed.STEPS, mixed),
    **dict.fromkeys(unfused.METHODS, unfused),
    **dict.fromkeys(published.STEPS, published),
}
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
    return limits(problem) or (None if family is None else family.unsupported(problem))


class Kernels(NamedTuple):
    """The attention kernels of a backend.

    fuses(problem): which of the problem's float q, k and v they quantize themselves, "", "q" or "qkv".
    launch(problem, constants, out, statistics, inputs): what computes the output; inputs where floats are fused.
    finds(problem): whether they also find the scales, one of each head.
    """

    fuses: Callable[[Problem], str]
    launch: Callable[..., Any]
    finds: Callable[[Problem], bool] = lambda problem: False


def run(problem: Problem) -> Result:
    if problem.method in FAMILIES:
        return FAMILIES[problem.method].run(problem)
    return run_integer(problem, Kernels(lambda p: "qkv" if _whole_row(p) else "", attention_launch))


def run_integer(problem: Problem, kernels: Kernels) -> Result:
    """Scales, constants, codes where the kernel wants them, the kernel."""
    q = problem.q if isinstance(problem.q, Tensor) else problem.q.data
    out = empty_output(q, (*q.shape[:3], problem.v.shape[3]), problem.out_dtype)
    statistics = row_statistics(problem)
    inputs = None
    if isinstance(problem.q, Tensor):
        if kernels.finds(problem):
            inputs = quantize.Inputs(quantize.Three(problem.q, problem.k, problem.v), None)
        elif quantize.serves(problem.recipe):
            inputs = quantize.with_scales(problem.q, problem.k, problem.v, problem.recipe)
        else:
            problem = problem.quantized()
    fused = "" if inputs is None else kernels.fuses(problem)
    constants, out_scale = _constants(problem, inputs, fused == "qkv")
    if inputs is not None and fused != "qkv":
        launch, codes = quantize.quantize_launch(inputs, query=not fused)
        launch.run()
        problem, inputs = replace(problem, **codes), inputs if fused else None
    kernels.launch(problem, constants, out, statistics, inputs).run()
    return Result(out, out_scale, _log_sum_exp(problem, statistics))


def _constants(problem: Problem, inputs: quantize.Inputs | None, fused: bool) -> tuple[Constants, Tensor | None]:
    """The call's constants; those that depend on numbers alone are made once."""

    def fill() -> tuple[Constants, Tensor | None]:
        launch, constants, out_scale = constants_launch(problem, None if inputs is None else inputs.scales)
        launch.run()
        return constants, out_scale

    if fused and not output_limit(problem.out_dtype):
        return Constants(None, None, inputs.scales and view(inputs.scales.v)), None  # the kernel makes them itself
    if inputs is None or inputs.numbers is None or problem.out_scale is not None:
        return fill()
    key = inputs.numbers, problem.sm_scale, problem.out_dtype, score_unit(problem.method)
    return quantize.remember(key, problem.q.device, fill)


def _whole_row(problem: Problem) -> bool:
    return problem.method in _ROW_BITS and rowwise.serves(problem)


def attention_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics, inputs: quantize.Inputs | None = None
) -> Launch:
    """The launch that computes the output; `inputs` where its kernel quantizes floats itself."""
    if not _whole_row(problem):
        return streaming_launch(problem, STEPS[problem.method], constants, out, statistics)
    scales = rowwise.NO_SCALES if inputs is None else quantize.Three(*map(view, inputs.scales))
    return rowwise.rowwise_launch(problem, _ROW_BITS[problem.method], constants, out, statistics, scales)


def row_statistics(problem: Problem) -> Statistics:
    if not problem.return_lse:
        return Statistics(None, None)
    shape = problem.q.shape[:3]
    return Statistics(*(torch.empty(shape, dtype=dtype, device=problem.device) for dtype in (torch.int64, torch.int32)))


def _log_sum_exp(problem: Problem, statistics: Statistics) -> Tensor | None:
    if statistics.l is None:
        return None
    l = statistics.l.to(torch.int64) & 0xFFFFFFFF  # a uint32 in int32
    return exp.log_sum_exp(statistics.t_max, l, _P_MAX[problem.method])
