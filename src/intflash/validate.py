"""Checks of a call's arguments, before any work: each message shows what was expected and what came."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from intflash.dense import check_dense
from intflash.errors import InputError
from intflash.methods.base import Method
from intflash.numerics.exp import BIAS_LIMIT, bias_bound
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import FLOAT_DTYPES, LEAST_FLOAT, LEAST_SCALE, check_number

Input = QTensor | Tensor


def flag(x: object, name: str) -> bool | None:
    """A flag given as bool, None, number or tensor of one element, as a bool (None stays)."""
    if x is None or isinstance(x, bool):
        return x
    one = isinstance(x, Tensor) and not (x.is_nested or x.is_meta) and x.layout is torch.strided and x.numel() == 1
    if not (one or isinstance(x, (Integral, torch.SymBool)) or type(x).__name__ in ("bool", "bool_")):  # NumPy's
        got = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) and not x.is_nested else repr(x)
        raise InputError(f"{name} must be True or False, got {got}")
    return bool(x)


def check_dispatched(a: dict[str, Any]) -> None:
    """What torch's dispatcher would refuse by an error of its own, in a call that goes through the custom op."""
    q, k, v = a["q"], a["k"], a["v"]
    _check_kinds(q, k, v)
    check_recipe(q, k, v, a["recipe"])
    for name in ("attn_mask", "bias", "cu_seqlens_q", "cu_seqlens_k"):
        if a[name] is not None:
            check_tensor(a[name], name)
    if not isinstance(a["scale"], (float, int, torch.SymFloat, type(None))):
        a["scale"] = softmax_scale(a["scale"], 1)
    check_number(a["out_scale"] if not isinstance(a["out_scale"], str) else None, "out_scale")
    for name in ("method", "backend", "causal_align"):
        if not isinstance(a[name], (str, type(None))):
            raise InputError(f"{name} must be a name, got {type(a[name]).__name__}")
        if a[name] is not None and not a[name].isidentifier():  # they travel to the op in one string
            raise InputError(f"{name} must be a name of letters, digits and _, got {a[name]!r}")
    check_dtype(a["out_dtype"])


def check_inputs(q: Input, k: Input, v: Input, enable_gqa: bool) -> None:
    """Types, dtypes, devices and shapes of q, k and v that no backend could serve otherwise."""
    _check_kinds(q, k, v)
    of_codes = [x.data.dtype for x in (q, k, v) if isinstance(x, QTensor)]
    of_floats = [x.dtype for x in (q, k, v) if isinstance(x, Tensor)]
    if any(dtype != torch.int8 for dtype in of_codes):
        raise InputError(f"q, k, v codes must be int8, got {of_codes}")
    if of_floats and (of_floats[0] not in FLOAT_DTYPES or any(dtype != of_floats[0] for dtype in of_floats)):
        codes = "; int8 codes go in with their scale, as QTensor(codes, scale)" if torch.int8 in of_floats else ""
        named = "q beside codes of k and v must have a dtype" if of_codes else "q, k, v must share one dtype"
        raise InputError(f"{named} of {FLOAT_DTYPES}, got {of_floats}{codes}")
    devices = q.device, k.device, v.device
    if devices[1] != devices[0] or devices[2] != devices[0]:
        raise InputError(f"q, k, v must be on one device, got {[str(d) for d in devices]}")
    problem = _shape_problem(q.shape, k.shape, v.shape, enable_gqa)
    if problem is not None:
        raise InputError(f"{problem}; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")


def _check_kinds(q: Input, k: Input, v: Input) -> None:
    """All tensors, all QTensors, or a tensor q beside QTensors k and v; and dense."""
    of_keys = QTensor if isinstance(q, QTensor) or isinstance(k, QTensor) else Tensor
    if not (isinstance(q, (QTensor, Tensor)) and isinstance(k, of_keys) and isinstance(v, of_keys)):
        got = ", ".join(type(x).__name__ for x in (q, k, v))
        raise InputError(
            "q, k and v must be all float tensors, all QTensors, or a float tensor q beside QTensors k and v, "
            f"got {got}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor):  # a QTensor has looked at its own
            check_dense(x, name)


def check_recipe(q: Input, k: Input, v: Input, recipe: object) -> None:
    """A recipe of which nothing would be ignored: codes are quantized already."""
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a Recipe, got {type(recipe).__name__}")
    if isinstance(q, QTensor):
        raise InputError("a recipe says how floats are quantized; q, k, v are QTensors, quantized already")
    if not isinstance(k, QTensor):
        return
    said = "beside QTensors k and v a recipe says how q is quantized:"
    for name, x, scale in (("k", k, recipe.k_scale), ("v", v, recipe.v_scale)):
        kind = getattr(recipe, name)
        if scale is not None:
            raise InputError(f"{said} {name}_scale must be None, {name} has its own scale; got {_described(scale)}")
        if kind not in (x.granularity, Recipe().k):
            raise InputError(
                f"{said} {name} must be left out or be {x.granularity!r}, the granularity of its codes, got {kind!r}"
            )
    for name in ("smooth_k", "rotate"):
        if getattr(recipe, name):
            raise InputError(f"{said} {name} must be False, it changes k before k is quantized")


def _described(scale: Tensor | float) -> str:
    return f"a tensor of shape {list(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)


def _shape_problem(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], enable_gqa: bool) -> str | None:
    """What is wrong with these shapes, or None."""
    if len(q) < 2 or len(q) != len(k) or len(k) != len(v):
        return "q, k, v must have the same number of axes, at least 2"
    if 0 in q or 0 in k or 0 in v:
        return "q, k, v must not be empty"
    if q == k == v:
        return None
    if q[-1] != k[-1]:
        return "q and k must have the same head_dim"
    if k[-2] != v[-2]:
        return "k and v must have the same number of keys"
    if q[:-3] != k[:-3] or k[:-2] != v[:-2]:
        return "q, k, v must have the same batch, and k and v the same heads"
    if len(q) > 2 and q[-3] != k[-3] and not enable_gqa:
        return "q and k must have the same heads (or pass enable_gqa=True)"
    if len(q) > 2 and q[-3] % k[-3]:
        return "enable_gqa needs query heads to be a multiple of key heads"
    return None


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, by default 1 / sqrt(head_dim); finite and > 0."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        found = math.nan if isinstance(scale, (str, bytes, bytearray)) else float(scale)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of a tensor with two values or none
        found = math.nan
    if not 0 < found < math.inf:
        got = f"a {type(scale).__name__}" if isinstance(scale, Tensor) else repr(scale)
        raise InputError(f"scale must be finite and > 0, got {got}")
    return found


def check_granularities(method: Method, q: Input, k: Input, v: Input, recipe: Recipe) -> None:
    """Each of q, k, v has a granularity that the method can compute with."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        got = recipe.granularity_of(name, x)
        allowed = method.granularities.get(name, ("none",))
        if got not in allowed:
            raise InputError(f"method {method.name!r} takes {name} with granularity {allowed}, got {got!r}")


def check_dtype(out_dtype: object) -> None:
    if not isinstance(out_dtype, (torch.dtype, type(None))):
        raise InputError(f"out_dtype must be a torch.dtype, got {type(out_dtype).__name__}")


def check_out_dtype(method: Method, out_dtype: torch.dtype, out_scale: object) -> None:
    check_dtype(out_dtype)
    if out_dtype not in method.out_dtypes:
        raise InputError(f"method {method.name!r} gives {method.out_dtypes}, not out_dtype={out_dtype}")
    if out_scale is not None and out_dtype.is_floating_point:
        raise InputError(f"out_scale goes with an int8 or int16 out_dtype, got {out_dtype}")
    chosen = out_scale is not None and not (isinstance(out_scale, str) and out_scale == "bound")
    if method.writes_v_scale and chosen:
        got = "a tensor" if isinstance(out_scale, Tensor) else repr(out_scale)
        raise InputError(
            f"method {method.name!r} writes codes of V's own scale: out_scale must be None or 'bound', got {got}"
        )


def check_has_out_scale(method: Method, out_dtype: torch.dtype, out_scale: object) -> None:
    """int8 output has the scale that the caller chose, where the method does not fix it: none fits every input."""
    if out_scale is None and out_dtype == torch.int8 and not method.writes_v_scale:
        raise InputError(
            "int8 output, which is the default for QTensors, needs out_scale: a calibrated scale (intflash.calibrate), "
            "'dynamic' (the output's own maximum, for a second pass) or 'bound' (no output exceeds it, and where many "
            "values are averaged it is coarse); out_dtype=torch.int16 or float needs none"
        )


def check_tensor(x: object, name: str, device: torch.device | None = None) -> None:
    """A dense tensor, on the device of q where that is given."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
    check_dense(x, name)
    if device is not None and x.device != device:
        raise InputError(f"{name} must be on the device of q, {device}, got {x.device}")


def check_movable(scale: Tensor, name: str, device: torch.device) -> None:
    """A scale may come from another device, but not from none."""
    if scale.is_meta and device.type != "meta":
        raise InputError(f"{name} must have values, got a tensor on device meta")


def check_scales(q: Input, k: Input, v: Input, recipe: Recipe) -> None:
    """Positive finite scales of codes, or those that a recipe gives. Reads values: on a GPU it waits for the device."""
    for name, x, static in zip("qkv", (q, k, v), recipe.scales, strict=True):
        scale, least = (x.scale, LEAST_FLOAT) if isinstance(x, QTensor) else (static, LEAST_SCALE)
        if isinstance(scale, Tensor):
            check_scale(scale, f"{name}'s scale", least)


def check_finite(q: Input, k: Input, v: Input) -> None:
    """No NaN and no infinity in those that are floats. Reads values: on a GPU it waits for the device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, QTensor):
            check_finite_tensor(x, name)


def check_finite_tensor(x: Tensor, name: str) -> None:
    """No NaN and no infinity."""
    if math.isfinite(x.sum(dtype=torch.float32).item()):
        return  # one cheap reduction; an overflowing sum of finite values is looked at closely
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        raise InputError(f"{name} must be finite, got {int((~finite).sum())} non-finite of {x.numel()} values")


def check_scale(scale: Tensor, name: str, least: float = LEAST_SCALE) -> None:
    """Finite values of at least `least` > 0, by default those whose reciprocals are finite."""
    if not _in_range(scale, least):
        normal = " (as normal float32)" if least == LEAST_SCALE else ""
        raise InputError(f"{name} must be finite and > 0, got {scale.flatten()[:4].tolist()} ...{normal}")


def usable_scale(scale: Tensor, least: float = LEAST_SCALE) -> Tensor:
    """A scale in CPU memory with 1 for the values that `check_scale` refuses; itself where it refuses none."""
    if not scale.is_cpu or _in_range(scale, least):
        return scale
    used = scale.float()
    return torch.where((used >= least) & (used < math.inf), scale, torch.ones_like(scale))


def _in_range(scale: Tensor, least: float) -> bool:
    scale = scale.float()  # as it is used: a float64 may be past it
    low, high = (scale.item(),) * 2 if scale.numel() == 1 else (x.item() for x in scale.aminmax())
    return least <= low and high < math.inf  # with a NaN both are


def _shown_bound(bound: float) -> float:
    """A bound with two decimals, rounded down, so that it is within the bound."""
    return math.floor(bound * 100) / 100


def check_bias_values(bias: Tensor, name: str, fraction_bits: int | None) -> None:
    """No NaN and no +inf in an additive mask (-inf makes a key absent), and nothing that would saturate in a method's
    integer bias of so many fraction bits (None: it takes floats). Reads values: on a GPU it waits for the device."""
    if not bias.is_floating_point():
        if bool((bias.abs() == BIAS_LIMIT).any()):  # of ABSENT, -2^31, it is itself
            raise InputError(
                f"{name} holds saturated codes: quantize_bias takes magnitudes to {_shown_bound(bias_bound())}"
            )
        return
    least = torch.finfo(bias.dtype).min / 2
    high = bias.amax().item()  # with a NaN it is
    if not high < math.inf:
        raise InputError(f"{name} must not hold NaN or +inf")
    if fraction_bits is None:
        return
    bound, octaves = bias_bound(fraction_bits), 1 << (31 - fraction_bits)
    low = bias.amin().item()
    if low <= least:
        low = bias.masked_fill(bias <= least, 0).amin().item()
    if high > bound or low < -bound:
        raise InputError(
            f"{name} must lie within +-{_shown_bound(bound)} ({octaves} octaves), past which it would saturate, "
            f"got values from {low:.6g} to {high:.6g}; -inf, or finfo.min, makes a key absent"
        )


def check_cu_seqlens(cu: Tensor, total: int, name: str, *, read: bool) -> None:
    """Packed sequence offsets: int32 ``[sequences + 1]``; their values are looked at where `read`."""
    if isinstance(cu, Tensor):
        check_dense(cu, name)
    if not isinstance(cu, Tensor) or cu.ndim != 1 or cu.numel() < 2 or cu.dtype != torch.int32:
        got = f"{cu.dtype} {list(cu.shape)}" if isinstance(cu, Tensor) else type(cu).__name__
        raise InputError(f"{name} must be an int32 tensor [sequences + 1], got {got}")
    if read:
        ends = cu.tolist()
        if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
            raise InputError(f"{name} must rise from 0 to {total}, got {ends[:4]} ... {ends[-1]}")
