"""From a call's arguments to its result: validate, quantize, choose a backend, run. One straight way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from intflash import gradients, masks, plans, repeats, validate
from intflash.backends import select
from intflash.backends.base import Backend
from intflash.errors import InputError
from intflash.methods import get_method
from intflash.methods.base import Method
from intflash.numerics.exp import dequantize_bias, quantize_bias
from intflash.problem import Problem, Result
from intflash.quant import QTensor, Recipe, hadamard_rotate, key_mean, quantize
from intflash.quant.quantizers import check_number

Output = Tensor | QTensor
_NO_GPU = nullcontext()


def run(arguments: dict[str, Any]) -> tuple[Output, Tensor | None]:
    """Output and log-sum-exp of a call with all arguments of `attention`, by its plan once it repeats."""
    q = arguments["q"]
    if under_autocast(q):  # exact products are not for it to round
        with torch.autocast(q.device.type, enabled=False):
            return run(arguments)
    wanting = gradients.wanting(arguments)
    if not wanting:
        return plans.run(_run, arguments)
    with torch.no_grad():
        out, lse = plans.run(_run, arguments)
    return gradients.refused(out, wanting), gradients.refused(lse, wanting)


def under_autocast(q: object) -> bool:
    """Whether autocast is on for the device of q."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device = q.device.type if isinstance(q, Tensor | QTensor) else "cpu"
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _run(arguments: dict[str, Any]) -> tuple[Output, Tensor | None]:
    """Prepare the problem, run it on its backend, and give the output the caller's shape."""
    if is_dynamic(arguments["out_scale"]):
        arguments = arguments | dict(out_scale=_dynamic_out_scale(arguments))
    problem, lse_shift, backend = _decide(arguments)
    result = _compute(problem, backend)
    shape, out, lse = arguments["q"].shape, result.out, result.lse
    if len(shape) != 4:
        out = out.reshape(*shape[:-1], -1)
    if lse is not None:
        lse = (lse if lse_shift is None else lse + lse_shift).reshape(shape[:-1])
    if result.out_scale is not None:
        out = integer_output(result.out, result.out_scale)
    return out, lse


def _decide(arguments: dict[str, Any]) -> tuple[Problem, Tensor | None, Backend]:
    """The problem of a call, what to add to its log-sum-exp, and its backend."""
    key = repeats.signature(arguments)
    known = None if key is None else repeats.find(key, arguments)
    if known is not None:
        return known
    name = arguments["backend"]
    problem, lse_shift = prepare(**{name: x for name, x in arguments.items() if name != "backend"})
    with on_device(problem):
        backend = select(problem, name)
    if key is not None and lse_shift is None:
        repeats.keep(key, arguments, problem, backend)
    return problem, lse_shift, backend


def _compute(problem: Problem, backend: Backend) -> Result:
    with on_device(problem):
        if problem.check_finite and not backend.looks and isinstance(problem.q, Tensor):
            validate.check_finite(problem.q, problem.k, problem.v)
        return backend.run(problem)


def on_device(problem: Problem) -> AbstractContextManager:
    """Its GPU as the current one, which is the one that backends ask about and launch on."""
    q = problem.q.data if isinstance(problem.q, QTensor) else problem.q
    return torch.cuda.device(q.device) if q.is_cuda else _NO_GPU


def prepare(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    v: Tensor | QTensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    method: str = "intflash",
    enable_gqa: bool = False,
    bias: Tensor | None = None,
    causal_align: str = "top_left",
    recipe: Recipe | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    check_finite: bool | None = None,
) -> tuple[Problem, Tensor | None]:
    """The validated problem of a call, and what to add to its log-sum-exp (K smoothing)."""
    chosen = get_method(method)
    validate.check_inputs(q, k, v, enable_gqa)
    sm_scale = validate.softmax_scale(scale, q.shape[-1])
    quantized = isinstance(q, QTensor)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a Recipe, got {type(recipe).__name__}")
    if recipe is not None and quantized:
        raise InputError("a recipe says how floats are quantized; q, k, v are QTensors, quantized already")
    recipe = chosen.recipe if recipe is None else recipe
    validate.check_granularities(chosen, q, k, v, recipe)
    if out_dtype is None:
        out_dtype = torch.int8 if quantized else q.dtype
    validate.check_out_dtype(chosen, out_dtype, out_scale)
    read = q.device.type == "cpu" if check_finite is None else bool(check_finite)
    if read:
        validate.check_scales(q, k, v, recipe)
    batch = tuple(q.shape[:-3]) or (1,)
    if not quantized:
        q, k, v = (_four_axes(x) for x in (q, k, v))
    hq, nq, nk = q.shape[1], q.shape[2], k.shape[2]
    for name, x in dict(attn_mask=attn_mask, bias=bias, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k).items():
        if x is not None:
            validate.check_tensor(x, name, q.device)
    keep, additive = _masks(attn_mask, bias, batch, hq, nq, nk, read)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise InputError("cu_seqlens_q and cu_seqlens_k go together")
    if cu_seqlens_q is not None:
        _check_packed((q, k, v), cu_seqlens_q, cu_seqlens_k, recipe, read)
    lse_shift = None
    if read and not quantized and (recipe.rotate or recipe.smooth_k or recipe.bits != 8):  # changed or quantized here
        validate.check_finite(q, k, v)
    if not quantized and (recipe.rotate or recipe.smooth_k):
        q, k, lse_shift = _rotate_and_smooth(q.float(), k.float(), recipe, sm_scale if return_lse else None)
        v = v.float()  # a problem's tensors share one dtype
    integer_bias, float_bias = _bias_of(chosen, additive)
    problem = Problem(
        method=method, q=q, k=k, v=v, sm_scale=sm_scale, recipe=recipe, bias=integer_bias, bias_float=float_bias,
        keep=keep, causal=masks.causal_offset(is_causal, causal_align, nq, nk), causal_align=causal_align,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, out_dtype=out_dtype,
        out_scale=_out_scale(out_scale, q, v, read), return_lse=return_lse, check_finite=read,
    )  # fmt: skip
    if chosen.check is not None:
        chosen.check(problem)
    return _four_bit_output(problem) if chosen.integer_bias else problem, lse_shift


def _four_axes(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def _masks(
    attn_mask: Tensor | None, bias: Tensor | None, batch: tuple[int, ...], hq: int, nq: int, nk: int, read: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The bool mask and the additive one, in a problem's shapes."""
    keep = additive = None
    name = "attn_mask"
    if attn_mask is not None:
        mask = masks.normalize_mask(attn_mask, batch, hq, nq, nk, name)
        keep, additive = (mask, None) if mask.dtype == torch.bool else (None, mask)
    if bias is not None:
        if additive is not None:
            raise InputError("beside a bias, attn_mask must be bool; add a float attn_mask to the bias instead")
        name = "bias"
        additive = masks.normalize_mask(bias, batch, hq, nq, nk, name)
    if additive is not None:
        masks.check_bias(additive, name)
        if read:
            validate.check_bias_values(additive, name)
    return keep, additive


def _bias_of(method: Method, additive: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(integer, float) bias, the one that the method computes with."""
    if additive is None:
        return None, None
    if method.integer_bias:
        return (additive if additive.dtype == torch.int32 else quantize_bias(additive)), None
    return None, (dequantize_bias(additive) if additive.dtype == torch.int32 else additive)


def _check_packed(
    tensors: tuple[Tensor | QTensor, ...], cu_q: Tensor, cu_k: Tensor, recipe: Recipe, read: bool
) -> None:
    q, k, _ = tensors
    if q.shape[0] != 1:
        raise InputError(f"packed sequences (cu_seqlens) need a batch of 1, got {q.shape[0]}")
    validate.check_cu_seqlens(cu_q, q.shape[2], "cu_seqlens_q", read=read)
    validate.check_cu_seqlens(cu_k, k.shape[2], "cu_seqlens_k", read=read)
    if cu_q.shape != cu_k.shape:
        raise InputError(f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(cu_q)} and {len(cu_k)}")
    kinds = [x.granularity for x in tensors] if isinstance(q, QTensor) else [recipe.q, recipe.k, recipe.v]
    if "block" in kinds:
        raise InputError("packed sequences cannot have 'block' scales: blocks would straddle sequences")


def _rotate_and_smooth(
    q: Tensor, k: Tensor, recipe: Recipe, sm_scale: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """float32 Q and K rotated and K centred as the recipe asks; the lse shift where `sm_scale` is given."""
    if recipe.rotate:
        q, k = hadamard_rotate(q), hadamard_rotate(k)
    if not recipe.smooth_k:
        return q, k, None
    mean = key_mean(k)
    shift = None
    if sm_scale is not None:
        per_head = mean.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        shift = (q * per_head).sum(-1) * sm_scale
    return q, k - mean, shift


def _out_scale(out_scale: Tensor | float | None, q: Tensor | QTensor, v: Tensor | QTensor, read: bool) -> Tensor | None:
    if out_scale is None:
        return None
    check_number(out_scale, "out_scale")
    if not isinstance(out_scale, Tensor):
        return torch.full((1, 1, 1, 1), float(out_scale), dtype=torch.float32, device=q.device)
    if out_scale.numel() == 1:
        out_scale = out_scale.reshape(1, 1, 1, 1)
    full = (*q.shape[:2], 1, v.shape[3])
    if out_scale.ndim != 4 or any(n not in (1, want) for n, want in zip(out_scale.shape, full, strict=True)):
        raise InputError(f"out_scale must be one value or broadcast to {list(full)}, got {list(out_scale.shape)}")
    if read:
        validate.check_scale(out_scale, "out_scale")
    return out_scale.to(device=q.device, dtype=torch.float32)


def _four_bit_output(problem: Problem) -> Problem:
    """4-bit V bounds the output by 7 s_V: the default scale of integer output, of our methods, is taken from that."""
    bits = problem.v.bits if isinstance(problem.v, QTensor) else problem.recipe.bits
    if bits != 4 or problem.out_scale is not None or problem.out_dtype.is_floating_point:
        return problem
    problem = problem.quantized()
    s_v = problem.v.scale
    per_head = s_v if s_v.shape[1] == 1 else s_v.repeat_interleave(problem.group, dim=1)
    return replace(problem, out_scale=per_head * 7 / torch.iinfo(problem.out_dtype).max)


def is_dynamic(out_scale: Tensor | float | str | None) -> bool:
    """Whether the caller asks for the output's own scale; any other word is refused."""
    if isinstance(out_scale, str) and out_scale != "dynamic":
        raise InputError(f"out_scale must be a number, a tensor or 'dynamic', got {out_scale!r}")
    return isinstance(out_scale, str)


def _dynamic_out_scale(arguments: dict[str, Any]) -> Tensor:
    """The scale at which the output's absolute maximum is the largest code: a launch of its own."""
    default = torch.int8 if isinstance(arguments["q"], QTensor) else arguments["q"].dtype
    out_dtype = arguments["out_dtype"] or default
    validate.check_out_dtype(get_method(arguments["method"]), out_dtype, "dynamic")
    problem, _, backend = _decide(arguments | dict(out_dtype=torch.float32, out_scale=None))
    out = _compute(problem, backend).out
    return quantize(out).scale * (127 / torch.iinfo(out_dtype).max)


def integer_output(out: Tensor, scale: Tensor) -> QTensor:
    """Codes ``[B, Hq, Nq, Dv]`` with their scale; its shape tells the granularity."""
    bits = 8 if out.dtype == torch.int8 else 16
    if scale.numel() == 1:
        return QTensor.unchecked(out, scale, "tensor", bits)
    granularity = "head" if scale.shape[3] == 1 else "channel"
    return QTensor.unchecked(out, scale.expand(scale.shape[0], out.shape[1], 1, scale.shape[3]), granularity, bits)
