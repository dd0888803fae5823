"""What both digit models share: their attention's signature, its float form, and the block around it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(Protocol):
    """How a digit model asks for attention: q, k, v ``[B, H, N, D]``, softmax scale ``D ** -0.5``.

    Args:
        bias: float ``[1, H, N, N]`` added to the scaled scores, or None.
        keep: bool ``[W, 1, N, N]``, False where a key takes no part, or None; batch b uses
            row ``b % W`` (W windows per image).
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor: ...


def float_attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, keep: Tensor | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention in the inputs' own dtype; shapes as in `Attention`."""
    mask = bias
    if keep is not None:
        keep = keep.repeat(q.shape[0] // keep.shape[0], 1, 1, 1)
        mask = keep if bias is None else torch.where(keep, bias, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Block(nn.Module):
    """Pre-norm transformer block on ``[B, N, C]``; subclasses may window the tokens around `attend`."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim))

    def attend(self, x: Tensor, attention: Attention, bias: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(attention(q, k, v, bias=bias, keep=keep).to(x.dtype).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        x = x + self.attend(self.norm1(x), attention)
        return x + self.mlp(self.norm2(x))
