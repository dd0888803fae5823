"""Attention here is for inference: what would need its gradient says so, instead of going without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intflash.quant import QTensor

_NAMES = ("q", "k", "v", "attn_mask", "bias")
REASON = "IntFlash is for inference and has no gradients: call it under torch.no_grad() or torch.inference_mode()"


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *wanting: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(REASON)


def wanting(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call that autograd follows."""
    if not torch.is_grad_enabled():
        return []
    return [x for name in _NAMES if isinstance(x := arguments[name], Tensor) and x.requires_grad]


def refused(out: Tensor | QTensor | None, of: list[Tensor]) -> Tensor | QTensor | None:
    """`out`, whose backward pass raises RuntimeError."""
    return _Refused.apply(out, *of) if isinstance(out, Tensor) else out
