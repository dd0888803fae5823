"""The inputs of measurements: the papers' attention shapes, and named inputs made from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """One attention shape. `windows` multiplies the batch (Swin)."""

    name: str
    source: str
    heads: int
    n: int
    head_dim: int
    windows: int = 1
    batch: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch * self.windows, self.heads, self.n, self.head_dim)

    @property
    def operations(self) -> int:
        """Counts a multiplication and an addition as two operations: 4 B H N^2 D for both products."""
        b, h, n, d = self.shape
        return 4 * b * h * n * n * d

    def batched(self, batch: int) -> Workload:
        return replace(self, batch=batch)


# QFlash Table 1 (224 x 224 images).
QFLASH = {
    w.name: w
    for w in (
        Workload("A1", "ViT/DeiT-Tiny", 3, 197, 64),
        Workload("A2", "ViT/DeiT-Small", 6, 197, 64),
        Workload("A3", "ViT/DeiT-Base", 12, 197, 64),
        Workload("A4", "Swin-T/S stage 1", 3, 49, 32, windows=64),
        Workload("A5", "Swin-T/S stage 2", 6, 49, 32, windows=16),
        Workload("A6", "Swin-T/S stage 3", 12, 49, 32, windows=4),
        Workload("A7", "Swin-T/S stage 4", 24, 49, 32),
    )
}

# QFlash's best speedups over I-ViT on an RTX 5090 (Figure 3's text): batch -> (workloads, method) -> factor.
QFLASH_SPEEDUPS = {
    1: {("A1-A3", "qflash"): 4.54, ("A4-A7", "qflash"): 7.69},
    8: {("A1-A3", "qflash"): 6.73, ("A4-A7", "qflash"): 8.69},
}

# I-FlashAttention Figure 2.
IFLASH = {
    w.name: w
    for w in (
        Workload("DeiT-Tiny", "I-FlashAttention Figure 2", 3, 197, 64),
        Workload("ViT-L/16", "I-FlashAttention Figure 2", 16, 197, 64),
    )
}


def uniform(low: float, high: float) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, generator: torch.rand(shape, generator=generator) * (high - low) + low


def normal(scale: float = 1.0) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, generator: torch.randn(shape, generator=generator) * scale


@dataclass(frozen=True)
class InputCase:
    """Named inputs: one draw for each of q, k, v, then what `change` makes of them.

    Attributes:
        name: column of a table.
        shape: ``(B, H, N, D)`` of k and v.
        draw: distribution of the elements.
        change: (q, k, v, generator) -> (q, k, v), for structure that a distribution lacks.
        sm_scale: softmax scale, None for 1 / sqrt(D).
        rows: queries kept of N, where N queries would only repeat the statistics of fewer; the one
            with the largest element is among them, so that per-tensor and per-head scales are those of all.
        value: the case's place on a figure's x axis, if it has one.
    """

    name: str
    shape: tuple[int, int, int, int]
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]
    change: Callable[[Tensor, Tensor, Tensor, torch.Generator], Inputs] | None = None
    sm_scale: float | None = None
    rows: int | None = None
    value: float | None = None

    def inputs(self, seed: int = 0) -> Inputs:
        """Returns q ``[B, H, rows, D]``, k and v ``[B, H, N, D]``, float32, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (self.draw(self.shape, generator) for _ in range(3))
        if self.change is not None:
            q, k, v = self.change(q, k, v, generator)
        return (q if self.rows is None else _keep_rows(q, self.rows)), k, v


def _keep_rows(q: Tensor, rows: int) -> Tensor:
    largest = q.abs().amax(dim=3).argmax(dim=2)[:, :, None, None].expand(-1, -1, 1, q.shape[3])
    return torch.cat([q.gather(2, largest), q[:, :, 1:rows]], dim=2) if rows < q.shape[2] else q


def workload_case(workload: Workload, draw=None) -> InputCase:
    """Returns the QFlash benchmark's inputs, uniform in [-4, 4], for a workload."""
    return InputCase(workload.name, workload.shape, draw or uniform(-4, 4))


def random_case(name: str, n: int, draw, head_dim: int = 64, heads: int = 2, rows: int = 1024, **options) -> InputCase:
    return InputCase(name, (1, heads, n, head_dim), draw, rows=rows, value=n, **options)


def _value_offset(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> Inputs:
    return q, k, v + 1


def _scaled(factor: float):
    return lambda q, k, v, generator: (q * factor, k * factor, v)


def _outlier_key_channel(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> Inputs:
    """Makes one channel of K 20 times larger and shifts it for all keys, as in language models."""
    k = k.clone()
    k[..., 5] = 0.05 * k[..., 5] + 20
    q = q.clone()
    q[..., 5] *= 0.05
    return q, k, v


def _correlated(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> Inputs:
    """Makes queries and keys that share a strong common direction."""
    common = torch.randn((1, q.shape[1], 1, q.shape[3]), generator=generator)
    return q + 2 * common, k + 2 * common, v


def _sink(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> Inputs:
    """Gives key 0 2^10 times the weight of an average key and a value of 0, as an attention sink has.

    Queries share one direction, in which only key 0 is not 0: q . k_0 / sqrt(D) = 10 ln 2.
    """
    q, k, v = q.clone(), k.clone(), v.clone()
    q[..., 0] = 2.0
    k[..., 0] = 0.0
    k[:, :, 0] = 0.0
    k[:, :, 0, 0] = 10 * math.log(2) * q.shape[3] ** 0.5 / 2.0
    v[:, :, 0] = 0.0
    return q, k, v


def _sink_of(share: float):
    """Key 0 has that share of the mean row's weight and the value 0, as an attention sink's.

    Queries share a direction of 16 channels, in which only key 0 is not 0, so that it is no outlier among K's codes.
    """

    def change(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> Inputs:
        q, k, v = q.clone(), k.clone(), v.clone()
        q[..., :16], k[..., :16], k[:, :, 0], v[:, :, 0] = 2.0, 0.0, 0.0, 0.0
        rest = (q[:, :, :256] @ k[:, :, 1:].mT * q.shape[3] ** -0.5).logsumexp(-1).mean().item()
        score = rest + math.log(share / (1 - share)) if share else 0.0
        k[:, :, 0, :16] = score * q.shape[3] ** 0.5 / (16 * 2.0)
        return q, k, v

    return change


# Correlated queries and keys of head_dim 128 at this scale have 4.3e-6 octaves per score unit. exp_M = round(2^16 *
# that) of the qflash authors' program is then 0, and its P overflows int8.
TINY_SCALE = 5.88e-4

_NORMAL_AND_UNIFORM = (
    random_case("randn 197", 197, normal()),
    random_case("randn 1k", 1024, normal()),
    random_case("randn 4k", 4096, normal()),
    random_case("randn 16k", 16384, normal()),
    random_case("U(.5) 1k", 1024, uniform(-0.5, 0.5)),
    random_case("U(.5) 4k", 4096, uniform(-0.5, 0.5)),
)

# The columns of the table in docs/numerics.md, section 2.
COLUMNS = (
    workload_case(QFLASH["A2"]),
    workload_case(QFLASH["A7"]),
    *_NORMAL_AND_UNIFORM,
    random_case("outlier K", 1024, normal(), change=_outlier_key_channel),
    random_case("D128 corr", 1024, normal(), head_dim=128, change=_correlated, sm_scale=TINY_SCALE),
    random_case("x.02", 1024, normal(), change=_scaled(0.02)),
    random_case("sink 4k", 4096, normal(), change=_sink),
)

# The share in percent is the place on the x axis.
SINKS = tuple(
    InputCase(f"{share:g} %", (1, 2, 1024, 64), normal(), _sink_of(share / 100), rows=256, value=share)
    for share in (0, 1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.9)
)

# docs/numerics.md, section 3: inputs on which qflash breaks.
HARD = (
    *_NORMAL_AND_UNIFORM,
    random_case("U(.5) 16k", 16384, uniform(-0.5, 0.5)),
    random_case("D128 corr", 1024, normal(), head_dim=128, change=_correlated, sm_scale=TINY_SCALE),
    random_case("V + 1, N 197", 197, uniform(-0.5, 0.5), change=_value_offset),
    random_case("randn x .01", 1024, normal(), change=_scaled(0.01)),
    random_case("randn x 30", 1024, normal(), change=_scaled(30)),
    random_case("amax 500", 1024, uniform(-500, 500)),
    random_case("sink 4k", 4096, normal(), change=_sink),
)
