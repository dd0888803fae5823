"""A small Swin transformer for the digits: 7x7 windows (N = 49), shifted windows, relative-position bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intflash.digits.layers import Attention, Block, float_attention

WINDOW = 7
SHIFT = WINDOW // 2


def to_windows(x: Tensor) -> Tensor:
    """``[B, S, S, C]`` as ``[B * windows, 49, C]``, the windows of one image next to each other."""
    x = x.unflatten(1, (-1, WINDOW)).unflatten(3, (-1, WINDOW))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(0, 2).flatten(1, 2)


def from_windows(windows: Tensor, size: int) -> Tensor:
    """The inverse of `to_windows` for an image of `size` tokens a side."""
    per_side = size // WINDOW
    x = windows.unflatten(1, (WINDOW, WINDOW)).unflatten(0, (-1, per_side, per_side))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(1, 2).flatten(2, 3)


def relative_index() -> Tensor:
    """Which of the 13 x 13 offsets lies between two tokens of a window, int64 ``[49, 49]``."""
    at = torch.stack(torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")).flatten(1)
    offset = at[:, :, None] - at[:, None, :] + WINDOW - 1
    return offset[0] * (2 * WINDOW - 1) + offset[1]


def shift_mask(size: int) -> Tensor:
    """Which tokens of a shifted window were neighbours before the shift, bool ``[windows, 1, 49, 49]``."""
    side = torch.zeros(size, dtype=torch.long)
    side[size - WINDOW : size - SHIFT] = 1
    side[size - SHIFT :] = 2
    regions = to_windows((3 * side[:, None] + side[None, :])[None, :, :, None])[:, :, 0]
    return (regions[:, None, :] == regions[:, :, None])[:, None]


class WindowBlock(Block):
    """A block on ``[B, S, S, C]`` whose attention stays inside windows, shifted or not."""

    def __init__(self, dim: int, heads: int, size: int, shifted: bool) -> None:
        super().__init__(dim, heads)
        self.size, self.shift = size, SHIFT if shifted else 0
        self.bias_table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, heads) * 0.02)
        self.register_buffer("index", relative_index(), persistent=False)
        self.register_buffer("keep", shift_mask(size) if shifted else None, persistent=False)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        bias = self.bias_table[self.index].permute(2, 0, 1)[None]
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), dims=(1, 2))
        y = from_windows(self.attend(to_windows(y), attention, bias, self.keep), self.size)
        x = x + torch.roll(y, (self.shift, self.shift), dims=(1, 2))
        return x + self.mlp(self.norm2(x))


class DigitsSwin(nn.Module):
    """28x28 images, 14x14 tokens in four windows, merged to 7x7 in one; two blocks each, head_dim 16.

    Example:
        >>> import torch
    >>> from intflash.digits import DigitsSwin
        >>> DigitsSwin()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    SIZE = 28

    def __init__(self, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        size = self.SIZE // 2
        self.patches = nn.Conv2d(1, dim, kernel_size=4, stride=2, padding=1)
        self.stage1 = nn.ModuleList(WindowBlock(dim, heads, size, shifted) for shifted in (False, True))
        self.merge = nn.Sequential(nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False))
        self.stage2 = nn.ModuleList(WindowBlock(2 * dim, 2 * heads, size // 2, False) for _ in range(2))
        self.norm = nn.LayerNorm(2 * dim)
        self.head = nn.Linear(2 * dim, 10)

    def forward(self, images: Tensor, attention: Attention = float_attention) -> Tensor:
        """Logits ``[B, 10]`` of images ``[B, 1, 8, 8]`` (or already 28x28), in [0, 1]."""
        if images.shape[-1] != self.SIZE:
            images = F.interpolate(images, size=(self.SIZE, self.SIZE), mode="bilinear")
        x = self.patches(images - 0.5).permute(0, 2, 3, 1)
        for block in self.stage1:
            x = block(x, attention)
        x = self.merge(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=-1))
        for block in self.stage2:
            x = block(x, attention)
        return self.head(self.norm(x).mean(dim=(1, 2)))
