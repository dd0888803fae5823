"""Turns a problem of an integer method into launches: scales, launch constants, codes, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intflash.backends.gpu import scales
from intflash.backends.gpu.constants import Constants, output_limit, score_unit
from intflash.backends.gpu.scales import DynamicScales, FloatInputs, Qkv
from intflash.backends.gpu.tensors import Statistics, View, view
from intflash.numerics import exp
from intflash.problem import Problem, Result, empty_output
from intflash.quant import QTensor

_P_MAX = {
    "intflash": exp.P16_MAX,
    "intflash_p8": exp.P8_MAX,
    "intflash_online": exp.P8_MAX,
    "intflash_bfp": exp.P16_MAX,
}


class Kernels(NamedTuple):
    """The launches of a backend. A launch is a value with a method `run`.

    Attributes:
        fuses_inputs(problem): whether the attention kernel quantizes float q, k and v itself.
        attention(problem, constants, out, statistics, inputs): computes the output; `inputs` where floats are fused.
        amax(tensors, found): the launch that computes the scales of floats from their maxima (`DynamicScales`).
        quantize(inputs): the launch that writes the codes of Q, K and V, and these by name.
        constants(problem, scales): the launch that fills the launch constants, these, and the output's scale.
        valueless(problem): the launch that finds the keys without a value, and `Constants.valueless`.
    """

    fuses_inputs: Callable[[Problem], bool]
    attention: Callable[..., Any]
    amax: Callable[[Qkv, DynamicScales], Any]
    quantize: Callable[[FloatInputs], tuple[Any, dict[str, QTensor]]]
    constants: Callable[[Problem, Qkv | None], tuple[Any, Constants, Tensor | None]]
    valueless: Callable[[Problem], tuple[Any, View]]


def run(problem: Problem, kernels: Kernels) -> Result:
    """Computes a problem: scales, constants, codes where the attention kernel needs them, and the output."""
    q = problem.q if isinstance(problem.q, Tensor) else problem.q.data
    out = empty_output(q, (*q.shape[:3], problem.v.shape[3]), problem.out_dtype)
    statistics = row_statistics(problem)
    inputs = None
    if isinstance(problem.q, Tensor):
        if scales.serves(problem):
            inputs = scales.with_scales(problem.q, problem.k, problem.v, problem.recipe, kernels.amax)
        else:
            problem = problem.quantized()
    fused = inputs is not None and kernels.fuses_inputs(problem)
    constants, out_scale = _constants(problem, inputs, fused, kernels)
    if inputs is not None and not fused:
        launch, codes = kernels.quantize(inputs)
        launch.run()
        problem, inputs = replace(problem, **codes), None
    if problem.method == "intflash_bfp":
        launch, valueless = kernels.valueless(problem)
        launch.run()
        constants = constants._replace(valueless=valueless)
    kernels.attention(problem, constants, out, statistics, inputs).run()
    return Result(out, out_scale, log_sum_exp(problem.method, statistics))


def _constants(
    problem: Problem, inputs: FloatInputs | None, fused: bool, kernels: Kernels
) -> tuple[Constants, Tensor | None]:
    """Returns the launch constants and the output's scale. Those that depend on numbers alone are computed once."""

    def fill() -> tuple[Constants, Tensor | None]:
        launch, constants, out_scale = kernels.constants(problem, None if inputs is None else inputs.scales)
        launch.run()
        return constants, out_scale

    if fused and not output_limit(problem.out_dtype):
        # the attention kernel computes them
        return Constants(None, None, view(inputs.scales.v)), None
    if inputs is None or inputs.numbers is None or problem.out_scale is not None:
        return fill()
    key = inputs.numbers, problem.sm_scale, problem.out_dtype, score_unit(problem.method)
    return scales.cache_per_stream(key, problem.q.device, fill)


def row_statistics(problem: Problem) -> Statistics:
    """Returns buffers for every row's Tmax and l where the problem returns log-sum-exp."""
    if not problem.return_lse:
        return Statistics(None, None)
    shape = problem.q.shape[:3]
    return Statistics(*(torch.empty(shape, dtype=dtype, device=problem.device) for dtype in (torch.int64, torch.int32)))


def log_sum_exp(method: str, statistics: Statistics) -> Tensor | None:
    """Returns log-sum-exp of a method's statistics, or None where there are none."""
    if statistics.l is None:
        return None
    l = statistics.l.to(torch.int64) & 0xFFFFFFFF  # uint32 values stored in int32
    return exp.log_sum_exp(statistics.t_max, l, _P_MAX[method])
