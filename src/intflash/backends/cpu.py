"""The native CPU backend: C++ kernels per instruction set, chosen once by what the processor has.

`csrc/cpu` holds the kernels; this module turns a `Problem` into their call. Where intflash was installed without a
compiler, and so without the native module, the backend is unavailable and says so.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from intflash import validate
from intflash.backends.base import Backend
from intflash.backends.features import (
    CODES,
    FLOAT_INPUTS,
    FLOAT_OUTPUT,
    FLOAT_QUERY,
    INTEGER_OUTPUT,
    MASKS,
    QUANTIZATION,
    per,
)  # fmt: skip
from intflash.backends.native import missing as _missing
from intflash.backends.native import module as _native
from intflash.errors import InputError
from intflash.methods import get_method
from intflash.numerics.exp import BIAS_LIMIT as BIAS_CODE_LIMIT
from intflash.numerics.exp import LOG2_E, MAX_HEAD_DIM, MAX_KEYS, P8_MAX, P16_MAX, log_sum_exp, makes_absent
from intflash.problem import Problem, Result
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import LEAST_FLOAT, LEAST_SCALE

# In the order of the native enumerations.
METHODS = {"intflash": 0, "intflash_p8": 1, "intflash_online": 2, "intflash_bfp": 3, "qflash": 4, "iflash": 5}
OUT_TYPES = {torch.int8: 0, torch.int16: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FLASH = ("qflash", "iflash")
P_MAX = {"intflash": P16_MAX, "intflash_p8": P8_MAX, "intflash_online": P8_MAX, "intflash_bfp": P16_MAX}
MAX_VALUE_DIM = 256  # the epilogue keeps one multiplier per channel
BIAS_LIMIT = 1 << 30  # of a bias in score units, so that bias + score stays inside int32
ABSENT = -(1 << 31)


def use_native(module: Any, *, find_torch: bool = True) -> None:
    """Tell a native module of Python and torch. Without `find_torch` it uses tensors by their Python methods only."""
    module.set_main_thread(threading.main_thread().ident)
    module.use_torch(torch.empty_strided, tuple(OUT_TYPES), torch.int32, torch.int64, find_torch)
    module.use_calls(
        (Tensor, nn.Parameter, QTensor, Recipe),
        (torch.is_grad_enabled, torch.get_num_threads),
        forward_ad,
        (torch._C._is_tracing, torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack,
         torch._C._functorch.peek_interpreter_stack),
        tuple((m.name, METHODS[m.name], m.recipe) for m in map(get_method, METHODS) if m.name not in FLASH),
        (MAX_KEYS, MAX_HEAD_DIM, MAX_VALUE_DIM, LEAST_SCALE, LEAST_FLOAT, BIAS_CODE_LIMIT),
    )  # fmt: skip


if _native is not None:
    use_native(_native)


def use_compiler(machine_code: Callable[[str, str, tuple[tuple[str, str], ...]], bytes | None] | None) -> None:
    """Tell the native call path what compiles its programs for GPUs, `backends.cuda.machine_code`; without, with None,
    it serves no call on a GPU."""
    if _native is not None:
        _native.use_compiler(machine_code)


# The call of `attention` with all its arguments by position, straight to the kernels. It returns the output; (output,
# its scale or None, Tmax or None, l or None) where these are wanted; None where the call is wrong or has anything that
# the native way does not know: the general way then says why, or serves it.
attend: Callable[..., Any] = (lambda *arguments: None) if _native is None else _native.attend
# The same for the custom op: op.py.
attend_flat: Callable[..., Any] = (lambda *arguments: None) if _native is None else _native.attend_flat


def add_inference_kernel(
    overload: str, serve: Callable[..., Tensor], options_of: Callable[[int], tuple[Any, ...]]
) -> list[str]:
    """Register the kernel of the custom op's overload `inference` or `inference_scaled` in C++: the dispatch keys that
    have it, none without the native module or where this torch has no such interface. It calls `serve`, with the same
    arguments, for what it declines; `options_of`: see op.py."""
    return [] if _native is None else _native.add_inference_kernel(overload, serve, options_of)


def inference_function(overload: str) -> Callable[..., Tensor]:
    """The native function of an overload that `add_inference_kernel` has registered, with the op's own arguments."""
    return getattr(_native, overload.split(".")[1])


def instruction_sets() -> list[str]:
    """Names of the kernels that run on this machine, best first; empty without the native module.

    Example:
        >>> from intflash.backends.cpu import instruction_sets
        >>> instruction_sets()[-1:] in (["generic"], [])
        True
    """
    return [] if _native is None else list(_native.instruction_sets())


def run(problem: Problem, *, isa: str | None = None, threads: int | None = None) -> Result:
    """Compute a supported problem.

    Args:
        problem: see `SERVES` and `limits`.
        isa: one of `instruction_sets()`; None takes the first. The bits do not depend on it.
        threads: at most so many, the caller among them; None takes `torch.get_num_threads()`.

    Returns:
        Output, its scale where it is integer, log-sum-exp where the problem asks for it.

    Raises:
        InputError: `isa` is none that runs here, scales of qflash and iflash leave its score unit, or there are values
            that are not finite where the problem asks for them.
    """
    method, bias, keep, out_scale = problem.method, problem.bias, problem.keep, problem.out_scale
    causal = packed = t_max = l_sum = None
    scales = _scales(problem)
    if scales is None:
        if problem.check_finite:
            validate.check_finite(problem.q, problem.k, problem.v)
        problem = problem.quantized()
        scales = _scales(problem)
    if method in FLASH:
        if out_scale is None and not problem.out_dtype.is_floating_point:
            out_scale = _repeated(problem.v.scale, problem)  # intflash...: the native module takes s_V * 127 / qmax
        unit = _served_unit(problem)
        if problem.bias_float is not None:
            bias = _score_bias(problem, unit)
    blocks = tuple(x.block_size or 1 if isinstance(x, QTensor) else 1 for x in (problem.q, problem.k))
    q, k, v = (x.data if isinstance(x, QTensor) else x for x in (problem.q, problem.k, problem.v))
    if problem.causal is not None:
        causal = (problem.causal, problem.causal_align == "bottom_right", problem.window_start)
    if problem.cu_seqlens_q is not None:
        cu_q, cu_k = problem.cu_seqlens_q.contiguous(), problem.cu_seqlens_k.contiguous()
        for cu, x, name in ((cu_q, q, "cu_seqlens_q"), (cu_k, k, "cu_seqlens_k")):
            validate.check_cu_seqlens(cu, x.shape[2], name, read=True)  # the kernels follow them into memory
        packed = (cu_q, cu_k)
    if problem.return_lse:
        t_max, l_sum = torch.empty((2, *q.shape[:3]), dtype=torch.int64, device="cpu")
    outputs = _native.attention(
        isa or "", threads or torch.get_num_threads(), METHODS[method], OUT_TYPES[problem.out_dtype],
        problem.sm_scale, q, k, v, scales, out_scale, blocks, causal, bias, problem.bias_fraction_bits, keep, packed,
        t_max, l_sum, problem.check_finite,
    )  # fmt: skip
    if outputs is None:
        validate.check_finite(problem.q, problem.k, problem.v)
    out, out_scale = outputs
    lse = None if t_max is None else log_sum_exp(t_max, l_sum, P_MAX[method])
    return Result(out, out_scale, lse)


def _served_unit(problem: Problem) -> Tensor:
    """The score unit of qflash and iflash, float64: they divide by round(1 / octaves per score unit), an int32.

    In an unchecked call the nearest one for which that is in [1, 2^31), as the kernels take it.

    Raises:
        InputError: it leaves this range and values may be read.
    """
    unit = (problem.q.scale.double() * _repeated(problem.k.scale, problem).double()) * problem.sm_scale
    octaves = unit * LOG2_E
    rs = torch.round(1 / octaves)
    coarse, fine = ~(rs >= 1), rs >= 2.0**31
    if not bool((coarse | fine).any()):
        return unit
    if problem.check_finite:
        raise InputError(
            f"{problem.method} needs round(1 / (s_Q * s_K * scale * log2(e))) in [1, 2^31), "
            f"got s_Q * s_K * scale * log2(e) from {octaves.min():.3g} to {octaves.max():.3g}"
        )
    return unit.masked_fill(coarse, 1 / LOG2_E).masked_fill(fine, 1 / ((2**31 - 1) * LOG2_E))


# Scales of q, k and v of all methods; those of single tokens and blocks of `intflash...`.
_SERVED = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, INTEGER_OUTPUT, FLOAT_OUTPUT, MASKS,
    per("tensor head", "tensor head", "tensor head"), {"grouped heads", "packed sequences", "sliding window"},
)  # fmt: skip
_INTFLASH = _SERVED | per("token block", "block", "channel") | {"out_scale per channel", "log-sum-exp"}
SERVES = {method: _SERVED if method in FLASH else _INTFLASH for method in METHODS}


def limits(problem: Problem) -> str | None:
    """Why these kernels cannot serve a problem of features that they serve, or None."""
    if problem.device.type != "cpu":
        return f"it takes CPU tensors, got {problem.device}"
    if problem.v.shape[3] > MAX_VALUE_DIM:
        return f"it takes value head dims to {MAX_VALUE_DIM}, got {problem.v.shape[3]}"
    if problem.method in FLASH and problem.q.shape[3] > MAX_VALUE_DIM:
        return f"it takes head dims to {MAX_VALUE_DIM}, got {problem.q.shape[3]}"
    return None


def _repeated(scale: Tensor, problem: Problem) -> Tensor:
    """A key head's scale for the query heads of its group."""
    return scale if scale.shape[1] == 1 or problem.group == 1 else scale.repeat_interleave(problem.group, dim=1)


def _score_bias(problem: Problem, unit: Tensor) -> Tensor:
    """The bias of qflash and iflash in score units, int32, `ABSENT` where it makes a key absent."""
    bias = problem.bias_float
    if bias.shape[0] != problem.q.shape[0] and unit.shape[0] > 1:
        bias = bias.repeat(problem.q.shape[0] // bias.shape[0], 1, 1, 1)
    rounded = torch.round(bias.double() / unit).clamp(-BIAS_LIMIT, BIAS_LIMIT)
    absent = makes_absent(bias)
    return torch.where(absent, float(ABSENT), rounded).to(torch.int32)


def _scales(problem: Problem) -> tuple[tuple | Tensor, ...] | None:
    """The scales of codes, and how the kernels quantize floats, of q, k and v; None where they do not: other rules,
    integer output of float v.

    Of floats (float type, per head, qmax, scale: None where it is the call's own, a number, or a tensor).
    """
    recipe, tensors = problem.recipe, (problem.q, problem.k, problem.v)
    floats = isinstance(problem.q, Tensor)
    if floats and (recipe.rule != "exact" or problem.method in FLASH):
        return None
    if isinstance(problem.v, Tensor) and not problem.out_dtype.is_floating_point:
        return None
    found: list[tuple | Tensor] = []
    for name, x, scale in zip("qkv", tensors, recipe.scales, strict=True):
        if isinstance(x, QTensor):
            found.append(x.scale)
            continue
        granularity = recipe.granularity_of(name, x)
        per_head = granularity == "head"
        if not (per_head or granularity == "tensor") or x.stride(3) != 1:
            return None
        if scale is not None and not _is_taken(scale, x, per_head):
            return None
        found.append((FLOAT_TYPES[x.dtype], per_head, (1 << (recipe.bits - 1)) - 1, scale))
    return tuple(found)


def _is_taken(scale: Tensor | float, x: Tensor, per_head: bool) -> bool:
    """Whether the kernels take a static scale as it is."""
    if not isinstance(scale, Tensor):
        return True
    if scale.dtype != torch.float32 or scale.device != x.device:
        return False
    heads = x.shape[1]
    return scale.shape in ((heads,), (1, heads, 1, 1), (x.shape[0], heads, 1, 1)) if per_head else scale.numel() == 1


BACKEND = Backend(
    name="cpu",
    unavailable=functools.partial(lambda reason: reason, _missing),
    serves=SERVES,
    limits=limits,
    run=run,
    native=lambda: True,
    looks=True,
)
