"""From a validated problem to launches: choose the kernel, fill the constants, run."""

from __future__ import annotations

import torch
import triton

from intflash.backends.gpu import integer
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.integer import Kernels
from intflash.backends.gpu.scales import FloatInputs, Qkv
from intflash.backends.gpu.tensors import Statistics, limits, view
from intflash.backends.triton import mixed, published, quantize, rowwise, steps, unfused
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.launch import Launch
from intflash.backends.triton.streaming import streaming_launch
from intflash.problem import Problem, Result

STEPS = {"intflash": steps.P16, "intflash_p8": steps.P8, "intflash_online": steps.ONLINE}
FAMILIES = {  # modules of their own
    **dict.fromkeys(mixed.STEPS, mixed),
    **dict.fromkeys(unfused.METHODS, unfused),
    **dict.fromkeys(published.STEPS, published),
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
    return integer.run(problem, _KERNELS)


def _whole_row(problem: Problem) -> bool:
    return problem.method in _ROW_BITS and rowwise.serves(problem)


def attention_launch(
    problem: Problem, constants: Constants, out: torch.Tensor, statistics: Statistics, inputs: FloatInputs | None = None
) -> Launch:
    """The launch that computes the output; `inputs` where its kernel quantizes floats itself."""
    if not _whole_row(problem):
        return streaming_launch(problem, STEPS[problem.method], constants, out, statistics)
    scales = rowwise.NO_SCALES if inputs is None else Qkv(*map(view, inputs.scales))
    return rowwise.rowwise_launch(problem, _ROW_BITS[problem.method], constants, out, statistics, scales)


_KERNELS = Kernels(
    fused_inputs=lambda problem: "qkv" if _whole_row(problem) else "",
    attention=attention_launch,
    amax=quantize.amax_launches,
    quantize=quantize.quantize_launch,
    constants=constants_launch,
)
