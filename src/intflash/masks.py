"""Attention masks: from what a user gives to the small tensors a problem carries, never expanded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.numerics.exp import BIAS_DTYPES

CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
UNBOUNDED = -1  # of a side of a window, as FlashAttention has it
WIDEST = (1 << 31) - 1  # of a side: more keys than a call may have, and a number that operations of torch take


def is_causal_bias(mask: object) -> bool:
    """Whether this is torch's `CausalBias`, by its name: importing its module takes more than a second."""
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def causality(arguments: dict[str, Any]) -> dict[str, Any]:
    """`is_causal` and `causal_align` in place of a `CausalBias`, whose own memory holds no mask.

    Raises:
        InputError: its sizes are not those of the call, or it comes beside is_causal or packed sequences.
    """
    mask, q, k = (arguments[name] for name in ("attn_mask", "q", "k"))
    if arguments["is_causal"]:
        raise InputError("attn_mask is a CausalBias, which says what is_causal says: give one of them")
    if arguments["cu_seqlens_q"] is not None or arguments["cu_seqlens_k"] is not None:
        raise InputError("packed sequences take is_causal with causal_align in place of a CausalBias")
    sizes, found = [mask.seq_len_q, mask.seq_len_kv], [x.shape[-2] for x in (q, k) if len(getattr(x, "shape", ())) > 1]
    if len(found) == 2 and sizes != found:  # what else is wrong with q and k is refused later
        raise InputError(f"attn_mask is a CausalBias of {sizes} queries and keys, the call has {found}")
    align = "top_left" if mask.variant.name == "UPPER_LEFT" else "bottom_right"
    if align == "top_left" and arguments["causal_align"] == "bottom_right":
        raise InputError("attn_mask is a CausalBias of the upper left corner, got causal_align='bottom_right'")
    return dict(attn_mask=None, is_causal=True, causal_align=align)


def normalize_mask(mask: Tensor, batch: tuple[int, ...], heads: int, nq: int, nk: int, name: str) -> Tensor:
    """A mask broadcastable to ``[*batch, heads, nq, nk]`` as ``[period, 1|heads, 1|nq, 1|nk]``.

    Batch b of the flattened batch uses row ``b % period``. Besides torch's broadcasting, the first
    axis of a 4-D mask may be a divisor of the batch (Swin: one mask per window of an image).

    Raises:
        InputError: the shape does not broadcast.
    """
    full = (*batch, heads, nq, nk)
    shape = (1,) * (len(full) - mask.ndim) + tuple(mask.shape)
    if 0 in shape or len(shape) > len(full) or any(m not in (1, n) for m, n in zip(shape[-3:], full[-3:], strict=True)):
        raise _shape_error(mask, full, name)
    lead, total = shape[:-3], math.prod(batch)
    mask = mask.reshape(shape)
    if len(batch) == 1:
        if total % lead[0]:
            raise _shape_error(mask, full, name)
        return mask
    if any(m not in (1, n) for m, n in zip(lead, batch, strict=True)):
        raise _shape_error(mask, full, name)
    first = next((i for i, m in enumerate(lead) if m != 1), len(lead))
    if lead[first:] != tuple(batch[first:]):  # a broadcast axis inside the batch has no period
        mask, first = mask.expand(*batch, *shape[-3:]), 0
    return mask.reshape(math.prod(batch[first:]), *shape[-3:])


def window(size: object) -> tuple[int, int] | None:
    """A window as (left, right) with `UNBOUNDED` for None; None where neither side is bounded.

    Raises:
        InputError: it is no pair of ints >= -1 or None.
    """
    pair = tuple(size) if isinstance(size, (tuple, list)) else ()
    pair = tuple(UNBOUNDED if x is None else x for x in pair)
    if len(pair) != 2 or not all(isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool) for x in pair):
        raise InputError(f"window_size must be (left, right), two ints or None, got {size!r}")
    if pair[0] < UNBOUNDED or pair[1] < UNBOUNDED:
        raise InputError(f"window_size must hold numbers of keys >= 0, or -1 or None for no bound, got {size!r}")
    pair = tuple(min(x, WIDEST) if isinstance(x, int) else x for x in pair)
    return None if pair == (UNBOUNDED, UNBOUNDED) else pair


def key_range(
    is_causal: bool, align: str, size: tuple[int, int] | None, nq: int, nk: int, *, packed: bool
) -> tuple[int | None, int | None]:
    """(a, b) with "key j is present for query i iff i + b <= j <= i + a"; None where that side is unbounded.

    The query's own key is j = i + o: "top_left" is torch's `is_causal` (o = 0), "bottom_right" FlashAttention's
    (o = nk - nq). Of packed sequences o is left out: each has its own. b is given only with a.
    """
    if align not in CAUSAL_ALIGNMENTS:
        raise InputError(f"causal_align must be one of {CAUSAL_ALIGNMENTS}, got {align!r}")
    own = 0 if packed or align == "top_left" else nk - nq
    if size is None:
        return (own if is_causal else None), None
    left, right = size
    far = nq + nk  # no key is further from a query's own
    if left > far or (not packed and own - left <= 1 - nq):  # the last query sees the first key
        left = UNBOUNDED
    if is_causal:
        right = 0
    elif right > far or (not packed and own + right >= nk - 1):  # the first query sees the last key
        right = UNBOUNDED
    if left == UNBOUNDED:
        return (None if right == UNBOUNDED else own + right), None
    return own + (far if right == UNBOUNDED else right), own - left


def check_bias(bias: Tensor, name: str) -> None:
    """An additive mask is floating point, a bias also int32 from `quantize_bias`; NaN is refused by value checks."""
    dtype, served = bias.dtype, bias.dtype in BIAS_DTYPES
    widths = " (of 16, 32 or 64 bits)" if dtype.is_floating_point else ""
    if name == "attn_mask" and not served:
        hint = " (quantize_bias's is a bias)" if dtype == torch.int32 else ""
        raise InputError(f"attn_mask must be bool or floating point, got {dtype}{widths}{hint}")
    if not served and dtype != torch.int32:
        raise InputError(f"{name} must be floating point, or int32 from quantize_bias, got {dtype}{widths}")


def _shape_error(mask: Tensor, full: tuple[int, ...], name: str) -> InputError:
    return InputError(f"{name} must broadcast to {list(full)}, got shape {list(mask.shape)}")
