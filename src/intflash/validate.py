"""Checks of a call's arguments, before any work: each message shows what was expected and what came."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods.base import FLOAT_DTYPES, Method
from intflash.quant import QTensor, Recipe

Input = QTensor | Tensor


def check_inputs(q: Input, k: Input, v: Input, enable_gqa: bool) -> None:
    """Types, dtypes, devices and shapes of q, k and v that no backend could serve otherwise."""
    kinds = {isinstance(x, QTensor) for x in (q, k, v)}
    if len(kinds) != 1:
        raise InputError("q, k and v must be all QTensors or all float tensors")
    if isinstance(q, Tensor):
        dtypes = [x.dtype for x in (q, k, v)]
        if len(set(dtypes)) != 1 or dtypes[0] not in FLOAT_DTYPES:
            raise InputError(f"q, k, v must share one dtype of {FLOAT_DTYPES}, got {dtypes}")
    elif any(x.data.dtype != torch.int8 for x in (q, k, v)):
        raise InputError(f"q, k, v codes must be int8, got {[x.data.dtype for x in (q, k, v)]}")
    devices = [x.device for x in (q, k, v)]
    if len(set(devices)) != 1:
        raise InputError(f"q, k, v must be on one device, got {[str(d) for d in devices]}")
    shapes = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if len(q.shape) < 2 or len(q.shape) != len(k.shape) or len(k.shape) != len(v.shape):
        raise InputError(f"q, k, v must have the same number of axes, at least 2; {shapes}")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise InputError(f"q, k, v must not be empty; {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"q and k must have the same head_dim; {shapes}")
    if k.shape[-2] != v.shape[-2]:
        raise InputError(f"k and v must have the same number of keys; {shapes}")
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-2] != v.shape[:-2]:
        raise InputError(f"q, k, v must have the same batch, and k and v the same heads; {shapes}")
    if len(q.shape) == 2:
        return
    hq, hk = q.shape[-3], k.shape[-3]
    if hq != hk and not enable_gqa:
        raise InputError(f"q and k must have the same heads (or pass enable_gqa=True); {shapes}")
    if hq % hk:
        raise InputError(f"enable_gqa needs query heads to be a multiple of key heads; {shapes}")


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, by default 1 / sqrt(head_dim); finite and > 0."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    scale = float(scale)
    if not (0 < scale < math.inf):
        raise InputError(f"scale must be finite and > 0, got {scale}")
    return scale


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


def check_values(x: Input, name: str) -> None:
    """Finite floats, positive finite scales. Reads values: on a GPU it waits for the device."""
    if isinstance(x, QTensor):
        if not bool((torch.isfinite(x.scale) & (x.scale > 0)).all()):
            raise InputError(f"{name}'s scale must be finite and > 0, got {x.scale.flatten()[:4].tolist()} ...")
        return
    if math.isfinite(x.sum(dtype=torch.float32).item()):
        return  # one cheap reduction; an overflowing sum of finite values is looked at closely
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        raise InputError(f"{name} must be finite, got {int((~finite).sum())} non-finite of {x.numel()} values")


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
