"""Attention here is for inference: what would need its gradient says so, instead of going without."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from intflash.quant import QTensor, Recipe

_tensors_of = itemgetter("q", "k", "v", "attn_mask", "bias", "out_scale")
REASON = "IntFlash is for inference and has no gradients: call it under torch.no_grad() or torch.inference_mode()"
FORWARD_REASON = "IntFlash is for inference and has no forward-mode derivatives: give it tensors without tangents"


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *wanting: Tensor) -> Tensor:
        return out.new_empty(0).set_(out)  # of its own, not a view: the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(REASON)


def wanting(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call that autograd follows.

    Raises:
        RuntimeError: forward-mode differentiation follows one.
    """
    forward, backward = forward_ad._current_level >= 0, torch.is_grad_enabled()
    if not (forward or backward):
        return []
    tensors = []
    for x in _tensors_of(arguments):  # each call asks: to be quick
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, QTensor):
            tensors.append(x.scale)
    recipe = arguments["recipe"]
    if isinstance(recipe, Recipe):
        tensors += [x for x in recipe.scales if isinstance(x, Tensor)]
    if forward and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(FORWARD_REASON)
    return [x for x in tensors if x.requires_grad] if backward else []


def refused(out: Tensor | QTensor | None, of: list[Tensor]) -> Tensor | QTensor | None:
    """`out`, whose backward pass raises RuntimeError."""
    return _Refused.apply(out, *of) if isinstance(out, Tensor) else out
