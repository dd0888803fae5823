"""Checks of a call's arguments, before any work: each message shows what was expected and what came."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods.base import Method
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import FLOAT_DTYPES, LEAST_SCALE

Input = QTensor | Tensor


def check_inputs(q: Input, k: Input, v: Input, enable_gqa: bool) -> None:
    """Types, dtypes, devices and shapes of q, k and v that no backend could serve otherwise."""
    quantized = isinstance(q, QTensor)
    kind = QTensor if quantized else Tensor
    if not (isinstance(q, kind) and isinstance(k, kind) and isinstance(v, kind)):
        got = ", ".join(type(x).__name__ for x in (q, k, v))
        raise InputError(f"q, k and v must be all QTensors or all float tensors, got {got}")
    dtypes = [x.data.dtype for x in (q, k, v)] if quantized else [q.dtype, k.dtype, v.dtype]
    if quantized and dtypes != [torch.int8] * 3:
        raise InputError(f"q, k, v codes must be int8, got {dtypes}")
    if not quantized and (dtypes[0] not in FLOAT_DTYPES or dtypes[1] != dtypes[0] or dtypes[2] != dtypes[0]):
        codes = "; int8 codes go in with their scale, as QTensor(codes, scale)" if torch.int8 in dtypes else ""
        raise InputError(f"q, k, v must share one dtype of {FLOAT_DTYPES}, got {dtypes}{codes}")
    devices = q.device, k.device, v.device
    if devices[1] != devices[0] or devices[2] != devices[0]:
        raise InputError(f"q, k, v must be on one device, got {[str(d) for d in devices]}")
    problem = _shape_problem(q.shape, k.shape, v.shape, enable_gqa)
    if problem is not None:
        raise InputError(f"{problem}; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")


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
        found = float(scale)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 < found < math.inf:
        raise InputError(f"scale must be finite and > 0, got {scale!r}")
    return found


def check_granularities(method: Method, q: Input, k: Input, v: Input, recipe: Recipe) -> None:
    """Each of q, k, v has a granularity that the method can compute with."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        got = x.granularity if isinstance(x, QTensor) else getattr(recipe, name)
        allowed = method.granularities.get(name, ("none",))
        if got not in allowed:
            raise InputError(f"method {method.name!r} takes {name} with granularity {allowed}, got {got!r}")


def check_out_dtype(method: Method, out_dtype: torch.dtype, out_scale: object) -> None:
    if out_dtype not in method.out_dtypes:
        raise InputError(f"method {method.name!r} gives {method.out_dtypes}, not out_dtype={out_dtype}")
    if out_scale is not None and out_dtype.is_floating_point:
        raise InputError(f"out_scale goes with an int8 or int16 out_dtype, got {out_dtype}")


def check_tensor(x: object, name: str, device: torch.device) -> None:
    """A tensor on the device of q."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.device != device:
        raise InputError(f"{name} must be on the device of q, {device}, got {x.device}")


def check_scales(q: Input, k: Input, v: Input, recipe: Recipe) -> None:
    """Positive finite scales of codes, or those that a recipe gives. Reads values: on a GPU it waits for the device."""
    if isinstance(q, QTensor):
        of, least = (q.scale, k.scale, v.scale), 2.0**-149  # the smallest float32
    else:
        of, least = recipe.scales, LEAST_SCALE
    for name, scale in zip("qkv", of, strict=True):
        if isinstance(scale, Tensor):
            check_scale(scale, f"{name}'s scale", least)


def check_finite(q: Tensor, k: Tensor, v: Tensor) -> None:
    """No NaN and no infinity. Reads values: on a GPU it waits for the device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if math.isfinite(x.sum(dtype=torch.float32).item()):
            continue  # one cheap reduction; an overflowing sum of finite values is looked at closely
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            raise InputError(f"{name} must be finite, got {int((~finite).sum())} non-finite of {x.numel()} values")


def check_scale(scale: Tensor, name: str, least: float = LEAST_SCALE) -> None:
    """Finite values of at least `least` > 0, by default those whose reciprocals are finite."""
    low, high = (scale.item(),) * 2 if scale.numel() == 1 else (x.item() for x in scale.aminmax())
    if not (least <= low and high < math.inf):  # with a NaN both are
        normal = " (as normal float32)" if least == LEAST_SCALE else ""
        raise InputError(f"{name} must be finite and > 0, got {scale.flatten()[:4].tolist()} ...{normal}")


def check_bias_values(bias: Tensor, name: str) -> None:
    """No NaN and no +inf in an additive mask (-inf makes a key absent)."""
    if bias.is_floating_point() and bool((bias.isnan() | (bias == math.inf)).any()):
        raise InputError(f"{name} must not hold NaN or +inf")


def check_cu_seqlens(cu: Tensor, total: int, name: str, *, read: bool) -> None:
    """Packed sequence offsets: int32 ``[sequences + 1]``; their values are looked at where `read`."""
    if not isinstance(cu, Tensor) or cu.ndim != 1 or cu.numel() < 2 or cu.dtype != torch.int32:
        got = f"{cu.dtype} {list(cu.shape)}" if isinstance(cu, Tensor) else type(cu).__name__
        raise InputError(f"{name} must be an int32 tensor [sequences + 1], got {got}")
    if read:
        ends = cu.tolist()
        if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
            raise InputError(f"{name} must rise from 0 to {total}, got {ends[:4]} ... {ends[-1]}")
