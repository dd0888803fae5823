"""What tests compare with: float64 attention and the signal-to-noise ratio, written independently of the library."""

from __future__ import annotations

import torch
from torch import Tensor


def float64_attention(q, k, v, scale=None, bias=None, keep=None) -> Tensor:
    """Returns softmax(scale q k^T + bias) v in float64. Rows without keys give 0; key heads repeat for query heads."""
    q, k, v = (x.double() for x in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + bias.double()
    if keep is not None:
        s = s.masked_fill(~keep, float("-inf"))
    return torch.softmax(s, -1).nan_to_num(0.0) @ v


def sqnr(reference: Tensor, out: Tensor) -> float:
    """Returns 20 log10(||ref|| / ||out - ref||) in dB; infinite for equal tensors."""
    noise = (out.double() - reference.double()).norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(reference.double().norm() / noise))


def fake_quantize(x: Tensor) -> Tensor:
    """Returns x quantized to int8, one scale for each head of each image, and dequantized, in float64."""
    scale = x.abs().amax(dim=(-2, -1), keepdim=True).float() / 127
    return torch.round(x.double() / scale.double()).clamp(-127, 127) * scale.double()


def ceiling(q, k, v, **options) -> Tensor:
    """Returns exact softmax attention on the same int8 inputs, which no int8 method can exceed in accuracy."""
    return float64_attention(*(fake_quantize(x) for x in (q, k, v)), **options)


def randn(*shape: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g) for _ in range(3)]


def uniform(limit: float, *shape: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.rand(*shape, generator=g) * 2 - 1) * limit for _ in range(3)]
