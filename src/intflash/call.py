"""One call of `attention`: the list of its arguments, and the straight way from them to a result.

`ARGUMENTS` is the only list of them. The custom op, its fake kernel and the refused gradients (op.py) derive from it,
and a test compares it with the signature of `intflash.attention`, which is spelled out for readers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import Parameter
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intflash import masks, methods, validate
from intflash.backends import cpu, select
from intflash.backends.base import Backend
from intflash.backends.bias import bias_codes
from intflash.errors import InputError
from intflash.methods import AUTO, get_method, resolve
from intflash.methods.base import Method
from intflash.numerics import exp
from intflash.numerics.exp import dequantize_bias, log_sum_exp
from intflash.problem import Problem, Result
from intflash.quant import QTensor, Recipe, hadamard_rotate, key_mean, quantize
from intflash.quant.qtensor import shaped_scale
from intflash.quant.quantizers import LEAST_FLOAT, check_number

Output = Tensor | QTensor
REQUIRED = Parameter.empty
_NO_GPU = nullcontext()


class Argument(NamedTuple):
    """One argument of `attention`.

    Attributes:
        name: its name.
        schema: its type in the custom op's schema. op.py lays out what is more than one value there: the scales and
            granularities of `QTensor` and `Recipe`, a word as `out_scale`, and the two numbers of `window_size`.
        default: its default, or `REQUIRED`.
        by_position: whether it may be given by position.
        differentiable: whether autograd would follow it.
    """

    name: str
    schema: str
    default: Any = None
    by_position: bool = False
    differentiable: bool = False


ARGUMENTS = (
    Argument("q", "Tensor", REQUIRED, by_position=True, differentiable=True),
    Argument("k", "Tensor", REQUIRED, by_position=True, differentiable=True),
    Argument("v", "Tensor", REQUIRED, by_position=True, differentiable=True),
    Argument("attn_mask", "Tensor?", by_position=True, differentiable=True),
    Argument("is_causal", "bool", False, by_position=True),
    Argument("scale", "float?", by_position=True),
    Argument("method", "str", "auto"),
    Argument("backend", "str?"),
    Argument("enable_gqa", "bool", False),
    Argument("bias", "Tensor?", differentiable=True),
    Argument("causal_align", "str", "top_left"),
    Argument("window_size", "int[2]?"),
    Argument("recipe", "Recipe?", differentiable=True),
    Argument("out_dtype", "ScalarType?"),
    Argument("out_scale", "Tensor?", differentiable=True),
    Argument("return_lse", "bool", False),
    Argument("cu_seqlens_q", "Tensor?"),
    Argument("cu_seqlens_k", "Tensor?"),
    Argument("check_finite", "bool?"),
)
NAMES = tuple(a.name for a in ARGUMENTS)
POSITIONAL = tuple(a.name for a in ARGUMENTS if a.by_position)
DEFAULTS = {a.name: a.default for a in ARGUMENTS if a.default is not REQUIRED}
TENSORS = tuple(a.name for a in ARGUMENTS if a.schema.startswith("Tensor"))
FLAGS = tuple(a.name for a in ARGUMENTS if a.schema.startswith("bool"))
_flags_of = itemgetter(*FLAGS)
_BOOLS = {bool, type(None)}


def complete(args: tuple, given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name, from those that were given.

    Raises:
        TypeError: as Python does for a call that does not fit the signature.
    """
    if len(args) > len(POSITIONAL):
        raise TypeError(f"at most {len(POSITIONAL)} arguments by position, {', '.join(POSITIONAL)}; got {len(args)}")
    first = dict(zip(POSITIONAL, args, strict=False))
    if twice := first.keys() & given.keys():
        raise TypeError(f"{', '.join(sorted(twice))} came by position and by name")
    arguments = DEFAULTS | first | given
    if unknown := arguments.keys() - set(NAMES):
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    if missing := set(NAMES) - arguments.keys():
        raise TypeError(f"missing arguments: {', '.join(sorted(missing))}")
    return arguments


def normalize(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with bools for flags, plain causality for torch's `CausalBias`, a window as `masks.window` returns
    it, and a method for "auto". Every call passes here."""
    # torch.compile traces no itemgetter
    if torch.compiler.is_compiling() or not _BOOLS.issuperset(map(type, _flags_of(arguments))):
        arguments = {**arguments, **{name: validate.flag(arguments[name], name) for name in FLAGS}}
    if arguments["method"] == AUTO:
        arguments = {**arguments, "method": resolve_auto(arguments["k"])}
    mask = arguments["attn_mask"]
    if mask is not None and type(mask) is not Tensor and masks.is_causal_bias(mask):
        arguments = {**arguments, **masks.causality(arguments)}
    bias = arguments["bias"]
    if bias is not None and type(bias) is not Tensor and masks.is_causal_bias(bias):
        raise InputError("bias is a CausalBias, whose memory holds no mask: give it as attn_mask")
    if arguments["window_size"] is not None:
        arguments = {**arguments, "window_size": masks.window(arguments["window_size"])}
    return arguments


def resolve_auto(k: object) -> str:
    """The method that "auto" is for these keys. Keys that are refused later count as none."""
    if len(methods.AUTO_RULES) == 1:  # to read a shape takes longer
        return methods.AUTO_RULES[0].method
    return resolve(AUTO, k.shape[-2] if isinstance(k, (Tensor, QTensor)) and len(k.shape) > 1 else 0)


def compute(arguments: dict[str, Any]) -> tuple[Output, Tensor | None]:
    """Output and log-sum-exp of a call: prepare the problem, run it on its backend, give the output its shape."""
    if is_dynamic(arguments["out_scale"]):
        arguments = arguments | dict(out_scale=_dynamic_out_scale(arguments))
    problem, lse_shift, backend = _decide(arguments)
    result = _run(problem, backend)
    shape, out, lse = arguments["q"].shape, result.out, result.lse
    if len(shape) != 4:
        out = out.reshape(*shape[:-1], -1)
    if lse is not None:
        lse = (lse if lse_shift is None else lse + lse_shift).reshape(shape[:-1])
    if result.out_scale is not None:
        out = integer_output(result.out, result.out_scale)
    return out, lse


def finish(method: str, found: Any) -> tuple[Output, Tensor | None]:
    """Output and log-sum-exp of what the native call path returned: the output, or (output, its scale, Tmax, l)."""
    if isinstance(found, Tensor):
        return found, None
    out, scale, t_max, l_sum = found
    lse = log_sum_exp_of(method, t_max, l_sum)
    return (out if scale is None else integer_output(out, scale)), lse


def log_sum_exp_of(method: str, t_max: Tensor | None, l_sum: Tensor | None) -> Tensor | None:
    """Log-sum-exp from what the native call path returned. On a GPU l is uint32, stored in int32."""
    if t_max is None:
        return None
    if l_sum.dtype == torch.int32:
        l_sum = l_sum.to(torch.int64) & 0xFFFFFFFF
    return log_sum_exp(t_max, l_sum, cpu.P_MAX[method])


def _decide(arguments: dict[str, Any]) -> tuple[Problem, Tensor | None, Backend]:
    """The problem of a call, what to add to its log-sum-exp, and its backend."""
    if arguments["check_finite"] is False:
        arguments = with_usable_scales(arguments)
    problem, lse_shift = prepare_call(arguments)
    with on_device(problem):
        backend = select(problem, arguments["backend"])
    return problem, lse_shift, backend


def _run(problem: Problem, backend: Backend) -> Result:
    with on_device(problem):
        if problem.check_finite and not backend.looks:
            validate.check_finite(problem.q, problem.k, problem.v)
        return backend.run(problem)


def on_device(problem: Problem) -> AbstractContextManager:
    """Its GPU as the current one, which is the one that backends ask about and launch on."""
    q = problem.q.data if isinstance(problem.q, QTensor) else problem.q
    return torch.cuda.device(q.device) if q.is_cuda else _NO_GPU


def with_usable_scales(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an unchecked call, with 1 for each scale in CPU memory that a check would refuse.

    docs/numerics.md, "Unchecked calls".
    """
    changes: dict[str, Any] = {}
    for name in ("q", "k", "v"):
        x = arguments[name]
        if isinstance(x, QTensor) and (scale := validate.usable_scale(x.scale, LEAST_FLOAT)) is not x.scale:
            changes[name] = replace(x, scale=scale)
    recipe, out_scale = arguments["recipe"], arguments["out_scale"]
    if isinstance(recipe, Recipe):
        scales = {f"{name}_scale": x for name, x in zip("qkv", recipe.scales, strict=True) if isinstance(x, Tensor)}
        usable = {name: validate.usable_scale(x) for name, x in scales.items()}
        if any(x is not scales[name] for name, x in usable.items()):
            changes["recipe"] = replace(recipe, **usable)
    if isinstance(out_scale, Tensor):
        check_number(out_scale, "out_scale")
        changes["out_scale"] = validate.usable_scale(out_scale)
    return arguments | changes if changes else arguments


def prepare(*args: Any, **given: Any) -> tuple[Problem, Tensor | None]:
    """The validated problem of a call of `attention` with these arguments, and what to add to its log-sum-exp (K
    smoothing)."""
    return prepare_call(normalize(complete(args, given)))


def prepare_call(a: dict[str, Any], *, values: bool = True) -> tuple[Problem, Tensor | None]:
    """As `prepare`, from all arguments by name. Without `values` none is read, as of fake tensors, which have none."""
    q, k, v, attn_mask, bias, recipe = a["q"], a["k"], a["v"], a["attn_mask"], a["bias"], a["recipe"]
    out_dtype, out_scale, return_lse = a["out_dtype"], a["out_scale"], a["return_lse"]
    cu_seqlens_q, cu_seqlens_k = a["cu_seqlens_q"], a["cu_seqlens_k"]
    chosen = get_method(a["method"])
    validate.check_inputs(q, k, v, a["enable_gqa"])
    sm_scale = validate.softmax_scale(a["scale"], q.shape[-1])
    validate.check_recipe(q, k, v, recipe)
    recipe = chosen.recipe if recipe is None else recipe
    validate.check_granularities(chosen, q, k, v, recipe)
    if out_dtype is None:
        out_dtype = default_out_dtype(q)
    validate.check_out_dtype(chosen, out_dtype, out_scale)
    check = a["check_finite"]
    values = values and q.device.type != "meta"
    read = values and (q.device.type == "cpu" if check is None else check)
    for name, x in zip("qkv", recipe.scales, strict=True):
        if isinstance(x, Tensor):
            validate.check_movable(x, f"{name}'s scale", q.device)
    if read:
        validate.check_scales(q, k, v, recipe)
    batch = tuple(q.shape[:-3]) or (1,)
    q, k, v = (_four_axes(x) if isinstance(x, Tensor) else x for x in (q, k, v))
    for name, x, scale in zip("qkv", (q, k, v), recipe.scales, strict=True):
        if isinstance(x, Tensor) and isinstance(scale, Tensor) and (kind := getattr(recipe, name)) != "none":
            shaped_scale(scale, x.shape, kind, recipe.block_size)
    hq, nq, nk = q.shape[1], q.shape[2], k.shape[2]
    for name in ("attn_mask", "bias", "cu_seqlens_q", "cu_seqlens_k"):
        if a[name] is not None:
            validate.check_tensor(a[name], name, q.device)
    keep, additive = _masks(attn_mask, bias, batch, hq, nq, nk, read, chosen)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise InputError("cu_seqlens_q and cu_seqlens_k go together")
    if cu_seqlens_q is not None:
        _check_packed((q, k, v), cu_seqlens_q, cu_seqlens_k, recipe, values and (read or cu_seqlens_q.is_cpu))
    lse_shift = None
    floats = isinstance(k, Tensor)
    if read and floats and (recipe.rotate or recipe.smooth_k or recipe.bits != 8):  # changed or quantized here
        validate.check_finite(q, k, v)
    if floats and (recipe.rotate or recipe.smooth_k):
        q, k, lse_shift = rotate_and_smooth(q.float(), k.float(), recipe, sm_scale if return_lse else None)
        v = v.float()  # a problem's tensors share one dtype
        if read and not (bool(q.isfinite().all()) and bool(k.isfinite().all())):
            raise InputError("q or k are too large to be rotated or smoothed by the recipe: they leave float32")
    validate.check_has_out_scale(chosen, out_dtype, out_scale)
    causal, window_start = masks.key_range(
        a["is_causal"], a["causal_align"], a["window_size"], nq, nk, packed=cu_seqlens_q is not None
    )
    problem = Problem(
        method=chosen.name, q=q, k=k, v=v, sm_scale=sm_scale, recipe=recipe, **_bias_of(chosen, additive, values),
        keep=keep, causal=causal, causal_align=a["causal_align"], window_start=window_start,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, out_dtype=out_dtype,
        out_scale=_out_scale(out_scale, q, v, read), return_lse=return_lse, check_finite=read,
    )  # fmt: skip
    if chosen.check is not None:
        chosen.check(problem)
    return _four_bit_output(problem) if chosen.integer_bias else problem, lse_shift


def flags(**named: object) -> tuple[bool | None, ...]:
    """The flags as bools, in their order."""
    return tuple([validate.flag(x, name) for name, x in named.items()])


def default_out_dtype(q: Tensor | QTensor) -> torch.dtype:
    """The output's dtype where the caller names none."""
    return torch.int8 if isinstance(q, QTensor) else q.dtype


def _four_axes(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def _masks(
    attn_mask: Tensor | None,
    bias: Tensor | None,
    batch: tuple[int, ...],
    hq: int,
    nq: int,
    nk: int,
    read: bool,
    method: Method,
) -> tuple[Tensor | None, Tensor | None]:
    """The bool mask and the additive one, in a problem's shapes."""
    keep = additive = None
    name = "attn_mask"
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            masks.check_bias(attn_mask, name)
        mask = masks.normalize_mask(attn_mask, batch, hq, nq, nk, name)
        keep, additive = (mask, None) if mask.dtype == torch.bool else (None, mask)
    if bias is not None:
        if additive is not None:
            raise InputError("beside a bias, attn_mask must be bool; add a float attn_mask to the bias instead")
        name = "bias"
        masks.check_bias(bias, name)
        additive = masks.normalize_mask(bias, batch, hq, nq, nk, name)
    if additive is not None and read:
        validate.check_bias_values(additive, name, method.bias_fraction_bits)
    return keep, additive


def _bias_of(method: Method, additive: Tensor | None, values: bool) -> dict[str, Any]:
    """The fields of a problem for its bias. values: whether the tensor has some."""
    if additive is None:
        return {}
    is_codes, bits = additive.dtype == torch.int32, method.bias_fraction_bits
    if bits is None:
        return {"bias_float": dequantize_bias(additive) if is_codes else additive}
    if is_codes:  # of quantize_bias: the method adds them with their own fraction bits
        return {"bias": additive}
    return {"bias": (bias_codes if values else exp.bias_codes)(additive, bits), "bias_fraction_bits": bits}


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
    if "block" in [recipe.granularity_of(name, x) for name, x in zip("qkv", tensors, strict=True)]:
        raise InputError("packed sequences cannot have 'block' scales: blocks would straddle sequences")


def rotate_and_smooth(
    q: Tensor, k: Tensor, recipe: Recipe, sm_scale: float | None, mean_of: Callable[[Tensor], Tensor] = key_mean
) -> tuple[Tensor, Tensor, Tensor | None]:
    """float32 Q and K rotated and K centred as the recipe asks; the lse shift where `sm_scale` is given."""
    if recipe.rotate:
        q, k = hadamard_rotate(q), hadamard_rotate(k)
    if not recipe.smooth_k:
        return q, k, None
    mean = mean_of(k)
    shift = None
    if sm_scale is not None:
        per_head = mean.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        shift = (q * per_head).sum(-1) * sm_scale
    return q, k - mean, shift


def _out_scale(out_scale: Tensor | float | None, q: Tensor | QTensor, v: Tensor | QTensor, read: bool) -> Tensor | None:
    if out_scale is None or is_bound(out_scale) or is_dynamic(out_scale):
        return None
    check_number(out_scale, "out_scale")
    if isinstance(out_scale, Tensor):
        validate.check_movable(out_scale, "out_scale", q.device)
    else:
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
    if isinstance(problem.v, Tensor):
        problem = problem.quantized()
    s_v = problem.v.scale
    per_head = s_v if s_v.shape[1] == 1 else s_v.repeat_interleave(problem.group, dim=1)
    return replace(problem, out_scale=per_head * 7 / torch.iinfo(problem.out_dtype).max)


def is_dynamic(out_scale: Tensor | float | str | None) -> bool:
    """Whether the caller asks for the output's own scale; words other than "dynamic" and "bound" are refused."""
    if isinstance(out_scale, str) and out_scale not in ("dynamic", "bound"):
        raise InputError(f"out_scale must be a number, a tensor, 'dynamic' or 'bound', got {out_scale!r}")
    return isinstance(out_scale, str) and out_scale == "dynamic"


def is_bound(out_scale: Tensor | float | str | None) -> bool:
    """Whether the caller asks for the scale that no output exceeds."""
    return isinstance(out_scale, str) and out_scale == "bound"


def _dynamic_out_scale(arguments: dict[str, Any]) -> Tensor:
    """The scale at which the output's absolute maximum is the largest code: a launch of its own."""
    q = arguments["q"]
    method = get_method(arguments["method"])
    validate.check_inputs(q, arguments["k"], arguments["v"], arguments["enable_gqa"])
    out_dtype = arguments["out_dtype"]
    if out_dtype is None:
        out_dtype = default_out_dtype(q)
    validate.check_out_dtype(method, out_dtype, "dynamic")
    problem, _, backend = _decide(arguments | dict(out_dtype=torch.float32, out_scale=None))
    out = _run(problem, backend).out
    return quantize(out).scale * (127 / torch.iinfo(out_dtype).max)


def integer_output(out: Tensor, scale: Tensor) -> QTensor:
    """Codes ``[B, Hq, Nq, Dv]`` with their scale; its shape tells the granularity."""
    bits = 8 if out.dtype == torch.int8 else 16
    if scale.numel() == 1:
        return QTensor.unchecked(out, scale, "tensor", bits)
    granularity = "head" if scale.shape[3] == 1 else "channel"
    return QTensor.unchecked(out, scale.expand(scale.shape[0], out.shape[1], 1, scale.shape[3]), granularity, bits)
