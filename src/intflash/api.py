"""The public functions: `attention`, `sdpa` and `which_backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from intflash import call, op
from intflash.backends import cpu, cuda, select
from intflash.call import Output
from intflash.errors import InputError
from intflash.methods import AUTO, get_method
from intflash.op import compiled_inference
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import FLOAT_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Unpack

cpu.use_compiler(cuda.machine_code)


class Options(TypedDict, total=False):
    """The arguments by name of `attention` on which the type of its result does not depend."""

    method: str
    backend: str | None
    enable_gqa: bool
    bias: Tensor | None
    causal_align: str
    window_size: tuple[int | None, int | None] | None
    recipe: Recipe | None
    out_scale: Tensor | float | str | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    check_finite: bool | None


# What type checkers know: the output is of q's kind unless out_dtype is given, and return_lse makes it a pair.
@overload
def attention(
    q: Tensor, k: Tensor | QTensor, v: Tensor | QTensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, out_dtype: None = None, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor | QTensor, v: Tensor | QTensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, out_dtype: None = None, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: QTensor, k: QTensor, v: QTensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, out_dtype: None = None, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> QTensor: ...  # fmt: skip
@overload
def attention(
    q: QTensor, k: QTensor, v: QTensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, *, out_dtype: None = None, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[QTensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor | QTensor, k: Tensor | QTensor, v: Tensor | QTensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, *, out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False, **options: Unpack[Options],
) -> Output: ...  # fmt: skip
@overload
def attention(
    q: Tensor | QTensor, k: Tensor | QTensor, v: Tensor | QTensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, *, out_dtype: torch.dtype | None = None,
    return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Output, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor | QTensor, k: Tensor | QTensor, v: Tensor | QTensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, *, out_dtype: torch.dtype | None = None,
    return_lse: bool = False, **options: Unpack[Options],
) -> Output | tuple[Output, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    v: Tensor | QTensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    method: str = "auto",
    backend: str | None = None,
    enable_gqa: bool = False,
    bias: Tensor | None = None,
    causal_align: str = "top_left",
    window_size: tuple[int | None, int | None] | None = None,
    recipe: Recipe | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | float | str | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    check_finite: bool | None = None,
) -> Output | tuple[Output, Tensor]:
    """Compute attention, softmax(scale * q k^T + bias) v, with quantized, by default integer-only, arithmetic.

    For inference: no gradient flows through it, and a backward pass raises RuntimeError.

    Args:
        q, k, v: float32, float16 or bfloat16 tensors ``[..., Hq, Nq, D]``, ``[..., Hk, Nk, D]``,
            ``[..., Hk, Nk, Dv]`` with any strides, or int8 `QTensor`s of four axes; also floats for q and `QTensor`s
            for k and v, as a KV cache holds them. Never changed.
        attn_mask: bool (False: the key takes no part) or additive float, broadcastable to
            ``[..., Hq, Nq, Nk]``; the first axis of a 4-D mask may also be a divisor of the batch and
            repeats over it (Swin windows). -inf or <= finfo.min / 2 makes a key absent. Methods with an integer bias
            (``intflash...``) refuse other values past +-1419.56 ("auto" and `intflash_bfp`: +-363,408) where
            they are read (`check_finite`), and saturate them where not. Torch's `CausalBias` is taken as the causality
            it stands for.
        is_causal: hide keys after the query's position.
        scale: softmax scale, > 0; default 1 / sqrt(D).
        method: a name from ``intflash.info()["methods"]``, or "auto", the default, for one of them that is accurate for
            all scores, chosen by the number of keys alone (`which_method` returns its name).
        backend: a name from ``intflash.info()["backends"]``; None takes the fastest that serves the call
            (`which_backend` returns its name).
        enable_gqa: allow Hq to be a multiple of Hk.
        bias: additive float bias beside a bool `attn_mask` (relative-position bias), or int32 from
            `quantize_bias`, which holds +-1419.56; broadcast like `attn_mask`, with the same bounds, and never
            expanded.
        causal_align: "top_left" as torch's SDPA (key j <= query i), or "bottom_right" as
            FlashAttention (j <= i + Nk - Nq). It also says which key is a query's own in `window_size`.
        window_size: (left, right), a sliding window as FlashAttention's: of a query's own key, i or with "bottom_right"
            i + Nk - Nq, keys from `left` before to `right` after it take part; -1 or None: no bound. With `is_causal`
            `right` is 0. A layer of transformers with ``sliding_window=w`` has ``is_causal`` and ``(w - 1, 0)``.
        recipe: how float tensors are quantized (granularity, static scales, smoothing, rotation);
            default: the method's own. Beside codes of k and v only what it says of q may be given.
        out_dtype: float32, float16, bfloat16, or int8 / int16 to get a `QTensor`. Default: the dtype
            of q, int8 where q is a QTensor.
        out_scale: scale of integer output: a float or tensor (calibrated), "dynamic" (from the output's maximum, which
            takes a second pass), or "bound" for s_V * 127 / qmax, which no output can exceed. int16 output takes
            "bound" where none is given; int8 output, for which it may be coarse, needs one. `qflash` and `iflash` write
            codes of V's own scale: None or "bound".
        return_lse: also return log-sum-exp of the scores, float32 ``[..., Hq, Nq]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[sequences + 1]``: q, k, v are sequences packed along N
            with a batch of one, each attending to itself only.
        check_finite: read values, and refuse NaN, infinity, scales <= 0 and additive masks that would saturate.
            Default: True on a CPU; False on a GPU, where reading would wait for the device. What a call without the
            check computes is defined in docs/numerics.md section 1. `cu_seqlens` in CPU memory are always read.

    Returns:
        The output ``[..., Hq, Nq, Dv]``, or with `return_lse` the pair (output, lse). A `QTensor` has four axes, the
        leading ones as one. A query whose keys are all absent gives 0 and an lse of -inf
        (`qflash`, `iflash`: as their papers', docs/numerics.md section 3).

    Raises:
        InputError: an argument is wrong; the message shows what was expected and what came.
        BackendError: the backend that was asked for, or every backend, cannot serve this call; the message says why.

    Source: docs/numerics.md for the methods ``intflash...``; each other method names its paper in
    ``intflash.info()``.

    Example:
        >>> import torch, intflash
        >>> q, k, v = (torch.randn(1, 6, 197, 64) for _ in range(3))
        >>> intflash.attention(q, k, v).shape
        torch.Size([1, 6, 197, 64])
        >>> intflash.attention(q, k, v, out_dtype=torch.int16).data.dtype
        torch.int16
    """
    if is_compiling():  # what is read of globals here is guarded at every call
        if method == "auto":
            method = call.resolve_auto(k)
        if return_lse is False:
            output = compiled_inference(
                q, k, v, attn_mask, bias, is_causal, enable_gqa, causal_align, check_finite, backend, method,
                scale, recipe, out_dtype, window_size, out_scale, cu_seqlens_q, cu_seqlens_k,
            )  # fmt: skip
            if output is not None:
                return output
    else:
        if method == AUTO:
            method = call.resolve_auto(k)
        found = cpu.attend(
            q, k, v, attn_mask, is_causal, scale, method, backend, enable_gqa, bias, causal_align, window_size, recipe,
            out_dtype, out_scale, return_lse, cu_seqlens_q, cu_seqlens_k, check_finite,
        )  # fmt: skip
        if found is not None:
            if type(found) is Tensor:
                return found
            out, lse = call.finish(method, found)
            return out if lse is None else (out, lse)
    arguments = {
        "q": q, "k": k, "v": v, "attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "method": method,
        "backend": backend, "enable_gqa": enable_gqa, "bias": bias, "causal_align": causal_align,
        "window_size": window_size, "recipe": recipe, "out_dtype": out_dtype, "out_scale": out_scale,
        "return_lse": return_lse, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "check_finite": check_finite,
    }  # dict(q=q, ...) takes twice as long  # fmt: skip
    out, lse = op.attention(arguments)
    return out if lse is None else (out, lse)


def sdpa(
    query: Tensor,
    key: Tensor | QTensor,
    value: Tensor | QTensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by method "auto", with the signature of `torch.nn.functional.scaled_dot_product_attention`.

    Args and shapes as `attention`; float32, float16 and bfloat16, for inference (a backward pass raises). As in torch,
    leading axes of 1 broadcast, autocast chooses the dtype, and `attn_mask` and `is_causal` exclude each other. An
    additive `attn_mask` is refused past +-363,408 where values are read, on a CPU; -inf or <= finfo.min / 2 makes a key
    absent. `key` and `value` may be int8 `QTensor`s, as a KV cache holds them.

    Returns:
        The output ``[..., Hq, Nq, Dv]`` in the query's dtype.

    Raises:
        InputError: dropout_p is not 0, or an argument is wrong.
        BackendError: no backend can serve this call.

    Example:
        >>> import torch, intflash
        >>> q = torch.randn(2, 3, 49, 32)
        >>> intflash.sdpa(q, q, q).shape
        torch.Size([2, 3, 49, 32])
    """
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0.0:
        raise InputError(f"dropout_p must be 0, IntFlash is for inference; got {dropout_p}")
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        is_causal, enable_gqa = call.flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise InputError("attn_mask and is_causal exclude each other in sdpa; use intflash.attention for both")
    if not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()):
        found = cpu.attend(
            query, key, value, attn_mask, is_causal, scale, call.resolve_auto(key), None, enable_gqa, None, "top_left",
            None, None, None, None, False, None, None, None,
        )  # fmt: skip
        if found is not None:
            return found
    query, key, value = _broadcast(*_autocast(query, key, value), axes=3 if enable_gqa else 2)
    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa=enable_gqa)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """In autocast's dtype where that is on, as torch's own attention casts."""
    if not isinstance(tensors[0], Tensor) or not op.under_autocast(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in FLOAT_DTYPES else x for x in tensors)


def _broadcast(*tensors: Any, axes: int) -> tuple[Any, ...]:
    """With the same axes before the last `axes`, where those that differ are 1."""
    if not all(isinstance(x, Tensor) and x.ndim >= axes for x in tensors):
        return tensors
    leads = [x.shape[:-axes] for x in tensors]
    if all(lead == leads[0] for lead in leads):  # compared, not hashed: sizes may be symbolic
        return tensors
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError:
        return tensors  # `attention` says what differs
    return tuple(x.expand(*lead, *x.shape[-axes:]) for x in tensors)


def which_method(*args: Any, **kwargs: Any) -> str:
    """Return the name of the method that `attention` would compute for these arguments: what "auto" is.

    Args:
        args, kwargs: as `attention`.

    Returns:
        A name from ``intflash.info()["methods"]``.

    Raises:
        InputError: there is no such method.

    Example:
        >>> import torch, intflash
        >>> q = torch.randn(1, 1, 8, 16)
        >>> intflash.which_method(q, q, q), intflash.which_method(q, q, q, method="intflash")
        ('intflash_bfp', 'intflash')
    """
    return get_method(call.normalize(call.complete(args, kwargs))["method"]).name


def which_backend(*args: Any, **kwargs: Any) -> str:
    """Return the name of the backend that `attention` would use for these arguments.

    Args:
        args, kwargs: as `attention`.

    Returns:
        A name from ``intflash.info()["backends"]``.

    Raises:
        InputError, BackendError: as `attention` with these arguments, but the values of q, k and v are not checked.

    Example:
        >>> import torch, intflash
        >>> q = torch.randn(1, 1, 8, 16)
        >>> intflash.which_backend(q, q, q, backend="reference")
        'reference'
    """
    arguments = call.normalize(call.complete(args, kwargs))
    problem, _ = call.prepare_call(arguments)
    with call.on_device(problem):
        return select(problem, arguments["backend"]).name
