"""Chooses the CUDA kernel that serves a problem. `backends.gpu` turns the problem into launches."""

from __future__ import annotations

from torch import Tensor

from intflash.backends.cuda import long_rows, long_rows_float, short_rows, sm80, window
from intflash.backends.cuda.parameters import HEAD_AMAX_IN_KERNEL
from intflash.backends.cuda.program import CudaLaunch, on_hopper
from intflash.backends.cuda.quantization import amax_launch, constants_launch, quantize_launch, valueless_launch
from intflash.backends.gpu import float_softmax, integer
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.integer import Kernels
from intflash.backends.gpu.scales import FloatInputs
from intflash.backends.gpu.scales import serves as serves_recipe
from intflash.backends.gpu.tensors import Statistics, limits
from intflash.problem import Problem, Result
from intflash.quant import QTensor

BITS = {"intflash": 16, "intflash_p8": 8}


def unsupported(problem: Problem) -> str | None:
    if problem.method not in sm80.METHODS and problem.method not in long_rows_float.METHODS:
        return f"method {problem.method!r} has no CUDA kernel"
    if problem.device.type != "cuda":
        return f"tensors are on {problem.device}, the CUDA backend needs a CUDA device"
    if reason := limits(problem):
        return reason
    if problem.method in long_rows_float.METHODS:
        return _hopper_only(problem) or _alignment(problem) or long_rows_float.unsupported(problem)
    if reason := _scales(problem):
        return reason
    particular = particular_unsupported(problem)
    reason = particular and sm80.unsupported(problem)
    return reason and f"{particular}; {reason}"


def has_float_query(problem: Problem) -> bool:
    """Whether Q is floats beside codes of K and V."""
    return isinstance(problem.q, Tensor) and isinstance(problem.k, QTensor)


def particular_unsupported(problem: Problem) -> str | None:
    """Returns why none of the kernels for particular shapes serves the problem, or None; sm80's serves the others."""
    if has_float_query(problem) and (reason := _float_query_unsupported(problem)):
        return reason
    if problem.cu_seqlens_q is not None:
        return "its kernels for particular shapes do not support packed sequences"
    if problem.window_start is not None:
        return "its kernels for particular shapes do not support sliding windows"
    return _alignment(problem) or (_short_rows_unsupported(problem) and _long_rows_unsupported(problem))


def _float_query_unsupported(problem: Problem) -> str | None:
    if problem.q.shape[3] % 16:
        return f"beside float Q the codes of K and V need a head_dim that is a multiple of 16, got {problem.q.shape[3]}"
    if sm80.takes_few_rows(problem):  # long rows would read K and V for each query head, and a copy of V
        return "few rows over many codes of keys have a kernel of their own"
    return None


def _hopper_only(problem: Problem) -> str | None:
    return None if on_hopper(problem.device) else "the kernels of short and long rows need compute capability 9.0"


def _short_rows_unsupported(problem: Problem) -> str | None:
    """Returns why neither the window kernel nor short rows serve the problem, or None. Both quantize floats
    themselves.
    """
    if problem.method not in BITS:
        return f"method {problem.method!r} has kernels for long rows only"
    if has_float_query(problem):
        return "short rows quantize all of Q, K and V or nothing"
    return window.unsupported(problem) and _rows_unsupported(problem)


def _rows_unsupported(problem: Problem) -> str | None:
    for what in ("keep", "causal"):
        if getattr(problem, what) is not None:
            return f"short rows do not support {what}"
    return _hopper_only(problem) or short_rows.unsupported(problem)


def _long_rows_unsupported(problem: Problem) -> str | None:
    return _hopper_only(problem) or long_rows.unsupported(problem)


def _scales(problem: Problem) -> str | None:
    """Returns why the scales are left to Triton's kernels, as per-channel V and per-block K are, or None."""
    kinds = tuple(problem.recipe.granularity_of(name, getattr(problem, name)) for name in "kv")
    if not set(kinds) <= {"tensor", "head"}:
        return f"K and V need one scale per tensor or head, got {kinds[0]!r} and {kinds[1]!r}"
    if problem.out_scale is not None and problem.out_scale.shape[3] > 1:
        return "out_scale must not differ between channels"
    return None


def _alignment(problem: Problem) -> str | None:
    for name in "qkv":
        x = getattr(problem, name)
        x = x if isinstance(x, Tensor) else x.data
        strides = [s * x.element_size() for s, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1]
        if name == "v" and x.element_size() == 1 and x.stride(2) == 1:
            continue  # contiguous keys
        if x.stride(3) != 1 or x.data_ptr() % 16 or any(s % 16 for s in strides):
            return f"{name} needs contiguous channels and tokens at multiples of 16 bytes, got strides {x.stride()}"
    return None


def fused_inputs(problem: Problem) -> str:
    """Returns which floats the attention kernel quantizes itself. Long rows quantize Q only, which is read once,
    unless K and V are resident in shared memory.
    """
    if has_float_query(problem) or particular_unsupported(problem):
        return "q"
    return "q" if _short_rows_unsupported(problem) and not long_rows.quantizes_kv(problem) else "qkv"


def head_amax_in_kernel(problem: Problem) -> bool:
    """Whether the attention kernel computes the scales of floats itself: one per head, for float output."""
    recipe = problem.recipe
    if has_float_query(problem):
        return scores_in_kernel(problem) and problem.q.shape[2] == 1 and recipe.q == "head" and recipe.q_scale is None
    return (
        isinstance(problem.k, Tensor)
        and {recipe.q, recipe.k, recipe.v} == {"head"}
        and recipe.q_scale is recipe.k_scale is recipe.v_scale is None
        and recipe.bits == 8
        and recipe.rule == "exact"
        and problem.out_dtype.is_floating_point
        and particular_unsupported(problem) is None
        and _short_rows_unsupported(problem) is None
    )


def scores_in_kernel(problem: Problem) -> bool:
    """Whether the attention kernel computes the score constants of float Q beside codes: few rows, for float output."""
    return (
        has_float_query(problem)
        and sm80.takes_few_rows(problem)
        and serves_recipe(problem)
        and problem.out_dtype.is_floating_point
    )


def attention_launch(
    problem: Problem, constants: Constants, out: Tensor, statistics: Statistics, inputs: FloatInputs | None = None
) -> CudaLaunch:
    """Returns the attention launch. `inputs` is given where the kernel quantizes floats itself."""
    if inputs is not None and isinstance(problem.k, QTensor):
        of_call = particular_unsupported if isinstance(inputs.tensors.k, QTensor) else _long_rows_unsupported
        launch = sm80.attention_launch if of_call(problem) else long_rows.long_rows_launch
        k_scale = inputs.scales.k if constants.score is None else None
        return launch(problem, constants, out, statistics, (inputs.scales.q, k_scale, None))
    if particular_unsupported(problem):
        return sm80.attention_launch(problem, constants, out, statistics)
    scales = None if inputs is None else HEAD_AMAX_IN_KERNEL if inputs.scales is None else tuple(inputs.scales)
    if _short_rows_unsupported(problem):
        return long_rows.long_rows_launch(problem, constants, out, statistics, scales)
    launch = short_rows.short_rows_launch if window.unsupported(problem) else window.window_launch
    return launch(problem, BITS[problem.method], constants, out, statistics, scales)


KERNELS = Kernels(
    fused_inputs, attention_launch, amax_launch, quantize_launch, constants_launch, valueless_launch,
    head_amax_in_kernel, scores_in_kernel,
)  # fmt: skip


def run(problem: Problem) -> Result:
    if problem.method in long_rows_float.METHODS:
        return float_softmax.run(problem, long_rows_float.float_launch)
    floats = isinstance(problem.q, Tensor)
    if floats and not head_amax_in_kernel(problem) and not serves_recipe(problem):
        problem = problem.quantized()
    if particular_unsupported(problem):
        problem = sm80.aligned(problem)
    return integer.run(problem, KERNELS)
