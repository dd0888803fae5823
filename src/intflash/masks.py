"""Attention masks: from what a user gives to the small tensors a problem carries, never expanded."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intflash.errors import InputError

CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")


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


def causal_offset(is_causal: bool, align: str, nq: int, nk: int) -> int | None:
    """o with "key j is present for query i iff j <= i + o", or None.

    "top_left" is torch's `is_causal` (o = 0); "bottom_right" is FlashAttention's (o = nk - nq).
    """
    if align not in CAUSAL_ALIGNMENTS:
        raise InputError(f"causal_align must be one of {CAUSAL_ALIGNMENTS}, got {align!r}")
    if not is_causal:
        return None
    return 0 if align == "top_left" else nk - nq


def check_bias(bias: Tensor, name: str) -> None:
    """An additive mask is floating point, a bias also int32 from `quantize_bias`; NaN is refused by value checks."""
    if name == "attn_mask" and not bias.is_floating_point():
        raise InputError(f"attn_mask must be bool or floating point, got {bias.dtype} (quantize_bias's is a bias)")
    if not (bias.is_floating_point() or bias.dtype == torch.int32):
        raise InputError(f"{name} must be floating point, or int32 from quantize_bias, got {bias.dtype}")


def _shape_error(mask: Tensor, full: tuple[int, ...], name: str) -> InputError:
    return InputError(f"{name} must broadcast to {list(full)}, got shape {list(mask.shape)}")
