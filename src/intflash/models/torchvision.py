"""torchvision: the shifted windows of Swin v1 and v2. Its ViT contains `nn.MultiheadAttention`, see `torch.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from intflash.models.base import Adapter


class _ShiftedWindowAttention(ShiftedWindowAttention):
    def forward(self, x: Tensor) -> Tensor:
        """``[B, H, W, C]``. v2's cosine attention is computed from normalized Q and K, with Q times the logit scale."""
        size = x.shape[1:3]
        padded = [-(-n // w) * w for n, w in zip(size, self.window_size, strict=True)]
        # a window as large as the feature map is not shifted
        shift = [s if w < n else 0 for s, w, n in zip(self.shift_size, self.window_size, padded, strict=True)]
        x = F.pad(x, (0, 0, 0, padded[1] - size[1], 0, padded[0] - size[0]))
        keep = None
        if any(shift):
            x = torch.roll(x, [-s for s in shift], dims=(1, 2))
            keep = _neighbours(padded, self.window_size, shift, x.device)
        windows = _to_windows(x, self.window_size)
        y = self._attend(windows, keep)
        y = _from_windows(y, padded, self.window_size)
        if any(shift):
            y = torch.roll(y, shift, dims=(1, 2))
        return y[:, : size[0], : size[1]].contiguous()

    def _attend(self, windows: Tensor, keep: Tensor | None) -> Tensor:
        qkv = F.linear(windows, self.qkv.weight, self._qkv_bias())
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, scale = self._scaled(q, k)
        core = self.intflash_attention
        y = core(q, k, v, keep, scale=scale, bias=core.bias)
        return F.linear(y.transpose(1, 2).flatten(2), self.proj.weight, self.proj.bias)

    def _qkv_bias(self) -> Tensor | None:
        return self.qkv.bias

    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        return q, k, q.shape[-1] ** -0.5

    @staticmethod
    def intflash_constants(module: ShiftedWindowAttention, parent: nn.Module | None) -> dict[str, Any]:
        return {"bias": module.get_relative_position_bias()}


class _ShiftedWindowAttentionV2(_ShiftedWindowAttention, ShiftedWindowAttentionV2):
    def _qkv_bias(self) -> Tensor | None:
        bias = self.qkv.bias
        if bias is None:
            return None
        third = bias.numel() // 3
        return torch.cat([bias[:third], torch.zeros_like(bias[:third]), bias[2 * third :]])

    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        logit_scale = self.logit_scale.clamp(max=math.log(100.0)).exp()
        return F.normalize(q, dim=-1) * logit_scale, F.normalize(k, dim=-1), 1.0


def _to_windows(x: Tensor, window: list[int]) -> Tensor:
    """Splits ``[B, H, W, C]`` into windows ``[B * windows, N, C]``."""
    x = x.unflatten(1, (-1, window[0])).unflatten(3, (-1, window[1]))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(0, 2)


def _from_windows(x: Tensor, size: list[int], window: list[int]) -> Tensor:
    """Inverts `_to_windows` for a map of this size."""
    x = x.unflatten(1, tuple(window)).unflatten(0, (-1, size[0] // window[0], size[1] // window[1]))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)


def _neighbours(size: list[int], window: list[int], shift: list[int], device: torch.device) -> Tensor:
    """Returns which tokens of a shifted window come from the same region, bool ``[windows, 1, N, N]``."""

    def region(n: int, w: int, s: int) -> Tensor:
        at = torch.arange(n, device=device)
        return (at >= n - w).long() + (at >= n - s).long()

    rows, columns = (region(n, w, s) for n, w, s in zip(size, window, shift, strict=True))
    label = _to_windows((3 * rows[:, None] + columns)[None, :, :, None], window)[..., 0]
    return (label[:, :, None] == label[:, None, :]).unsqueeze(1)


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    cls = type(module)
    if cls is ShiftedWindowAttention:
        return _ShiftedWindowAttention
    if cls is ShiftedWindowAttentionV2:
        return _ShiftedWindowAttentionV2
    return None


ADAPTER = Adapter(_patched_class)
