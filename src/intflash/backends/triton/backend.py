"""Chooses the Triton kernel that serves a problem. `backends.gpu` turns the problem into launches."""

from __future__ import annotations

import torch
import triton

from intflash.backends.gpu import integer
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.integer import Kernels
from intflash.backends.gpu.scales import FloatInputs, Qkv
from intflash.backends.gpu.tensors import Statistics, limits, view
from intflash.backends.triton import intflash_steps, mixed_precision, qflash, quantize, short_rows, two_groups, unfused
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.launch import TritonLaunch
from intflash.backends.triton.tile_loop import tile_loop_launch
from intflash.problem import Problem, Result
from intflash.quant import QTensor

STEPS = {
    "intflash": intflash_steps.P16,
    "intflash_p8": intflash_steps.P8,
    "intflash_online": intflash_steps.ONLINE,
    "intflash_bfp": two_groups.STEPS,
}
FAMILIES = {  # modules with a `run` of their own
    **dict.fromkeys(mixed_precision.STEPS, mixed_precision),
    **dict.fromkeys(unfused.METHODS, unfused),
    **dict.fromkeys(qflash.STEPS, qflash),
}
_ROW_BITS = {"intflash": 16, "intflash_p8": 8}


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


def run(problem: Problem) -> Result:
    if problem.method in FAMILIES:
        return FAMILIES[problem.method].run(problem)
    if isinstance(problem.k, QTensor):
        problem = problem.quantized()  # no kernel here takes float Q beside codes
    return integer.run(problem, KERNELS)


def _is_short_rows(problem: Problem) -> bool:
    return problem.method in _ROW_BITS and short_rows.serves(problem)


def attention_launch(
    problem: Problem, constants: Constants, out: torch.Tensor, statistics: Statistics, inputs: FloatInputs | None = None
) -> TritonLaunch:
    """Returns the attention launch. `inputs` is given where the kernel quantizes floats itself."""
    if not _is_short_rows(problem):
        steps = two_groups.steps_for(problem) if problem.method == "intflash_bfp" else STEPS[problem.method]
        return tile_loop_launch(problem, steps, constants, out, statistics)
    scales = short_rows.NO_SCALES if inputs is None else Qkv(*map(view, inputs.scales))
    return short_rows.short_rows_launch(problem, _ROW_BITS[problem.method], constants, out, statistics, scales)


KERNELS = Kernels(
    fuses_inputs=_is_short_rows,
    attention=attention_launch,
    amax=quantize.amax_launch,
    quantize=quantize.quantize_launch,
    constants=constants_launch,
    valueless=two_groups.valueless_launch,
)
