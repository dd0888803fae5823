"""A small vision transformer for the digits: 16x16 images, 64 patches and a class token (N = 65)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intflash.digits.layers import Attention, Block, float_attention


class DigitsViT(nn.Module):
    """Four blocks of four heads, head_dim 16; images ``[B, 1, 8, 8]`` are upscaled to 16x16.

    Example:
        >>> import torch
    >>> from intflash.digits import DigitsViT
        >>> DigitsViT()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    SIZE = 16

    def __init__(self, dim: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, kernel_size=4, stride=2, padding=1)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (self.SIZE // 2) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor, attention: Attention = float_attention) -> Tensor:
        """Logits ``[B, 10]`` of images ``[B, 1, 8, 8]`` (or already 16x16), in [0, 1]."""
        if images.shape[-1] != self.SIZE:
            images = F.interpolate(images, size=(self.SIZE, self.SIZE), mode="bilinear")
        x = self.patches(images - 0.5).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x, attention)
        return self.head(self.norm(x[:, 0]))
