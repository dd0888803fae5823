"""What integer output loses by its scale: "bound", which no output exceeds, and "dynamic", the output's own maximum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

import intflash
from intflash import QTensor
from intflash.bench.experiments import Figure, Row, Setting, untimed
from intflash.bench.measure import exact_attention, sqnr


class Case(NamedTuple):
    """Query, key and batch counts of normal inputs; causal: aligned at the last query."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int
    head_dim: int
    causal: bool = False


CASES = (
    Case("ViT-S, N 197", 1, 6, 6, 197, 197, 64), Case("Swin-T stage 1, 16 windows", 16, 3, 3, 49, 49, 32),
    Case("N 2048", 1, 8, 8, 2048, 2048, 128), Case("causal, N 2048", 1, 8, 2, 2048, 2048, 128, True),
    Case("decode, 8192 keys", 1, 8, 2, 1, 8192, 128),
)  # fmt: skip
SERIES = {
    "float": dict(out_dtype=torch.float32),
    "int16, bound": dict(out_dtype=torch.int16, out_scale="bound"),
    "int8, dynamic": dict(out_dtype=torch.int8, out_scale="dynamic"),
    "int8, bound": dict(out_dtype=torch.int8, out_scale="bound"),
}


def _measure(setting: Setting) -> Iterator[Row]:
    for case in CASES[:2] if setting.quick else CASES:
        setting.log(case.name)
        g = torch.Generator().manual_seed(setting.seed)
        sizes = ((case.heads, case.nq), (case.kv_heads, case.nk), (case.kv_heads, case.nk))
        q, k, v = (torch.randn(case.batch, h, n, case.head_dim, generator=g).to(setting.device) for h, n in sizes)
        shared = case.heads // case.kv_heads
        keep = None
        if case.causal:
            keep = torch.ones(1, 1, case.nq, case.nk, dtype=torch.bool, device=q.device).tril(case.nk - case.nq)
        exact = exact_attention(q, *(x.repeat_interleave(shared, 1) for x in (k, v)), keep=keep)
        options = dict(is_causal=case.causal, enable_gqa=shared > 1, backend=setting.backend)
        for series, output in SERIES.items():
            out = intflash.attention(q, k, v, method="intflash", **options, **output)
            out = out.dequantize(torch.float64) if isinstance(out, QTensor) else out
            yield Row(series, case.name, "SQNR dB", sqnr(exact, out))


EXPERIMENTS = (
    untimed(
        name="output_scales",
        title="Integer output: the scale of the bound and the output's own",
        source="docs/guide/choose.md",
        measure=_measure,
        figures=(Figure("SQNR dB"),),
        notes="intflash, normal inputs, one scale of Q, K and V for each head, found in the call; one head of K and V "
        "for four of Q in the last two cases.",
    ),
)
