"""What every tensor argument must be: dense."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.errors import InputError


def check_dense(x: Tensor, name: str) -> None:
    """A tensor whose elements are its own: not nested, not sparse."""
    if x.is_nested:
        raise InputError(f"{name} must be a dense tensor, got a nested one: pack its sequences, with cu_seqlens")
    if x.layout is not torch.strided:
        raise InputError(f"{name} must be a dense tensor, got one of layout {x.layout}")
