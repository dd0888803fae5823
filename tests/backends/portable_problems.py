"""Random problems as a backend receives them, with adversarial codes, scales and masks."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from intflash.methods import METHODS
from intflash.numerics.exp import ABSENT
from intflash.problem import Problem
from intflash.quant import QTensor

MAX_SCORES = 150_000
HEAD_DIMS = (1, 17, 49, 64, 80, 256)
TOKENS = (1, 2, 31, 49, 130, 197)
CODES = ("random", "all 127", "all -127", "ties", "last key largest", "narrow")
SCALES = (1e-12, 3e-4, 0.03, 0.5, 3e3)  # from C = 0 to saturated C


def codes(kind: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    x = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)
    if kind == "all 127":
        x.fill_(127)
    elif kind == "all -127":
        x.fill_(-127)
    elif kind == "ties":
        x = x.sign()
    elif kind == "narrow":
        x //= 16
    elif kind == "last key largest":
        x[:, :, :-1] //= 4
    return x


def qtensor(kind: str, granularity: str, scale: float, shape: tuple[int, ...], g: torch.Generator) -> QTensor:
    """Returns codes in [B, N, H, D] memory, as a projection writes them, with scales around `scale`."""
    b, h, n, d = shape
    block = 32 if granularity == "block" else None
    tail = {"tensor": (1, 1), "head": (1, 1), "token": (n, 1), "block": (-(-n // 32), 1), "channel": (1, d)}
    heads = 1 if granularity == "tensor" else h
    batches = 1 if granularity == "tensor" else b
    spread = torch.rand(batches, heads, *tail[granularity], generator=g) + 0.5
    data = codes(kind, shape, g).transpose(1, 2).contiguous().transpose(1, 2)
    return QTensor(data, scale * spread, granularity, block)


@st.composite
def problems(draw: st.DrawFn, method: str) -> Problem:
    allowed = METHODS[method].granularities
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, hk, group = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    nq, nk = draw(st.sampled_from(TOKENS)), draw(st.sampled_from(TOKENS))
    packed = draw(st.booleans())
    batch = 1 if packed else max(1, min(batch, MAX_SCORES // (hk * group * nq * nk)))
    batch = {3: 2}.get(batch, batch)
    d, dv = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS))
    sizes = {"q": (batch, hk * group, nq, d), "k": (batch, hk, nk, d), "v": (batch, hk, nk, dv)}
    tensors = {}
    for name, shape in sizes.items():
        kinds = [x for x in allowed[name] if x != "none" and not (packed and x == "block")]
        tensors[name] = qtensor(
            draw(st.sampled_from(CODES)), draw(st.sampled_from(kinds)), draw(st.sampled_from(SCALES)), shape, g
        )
    options = dict(
        out_dtype=draw(st.sampled_from(METHODS[method].out_dtypes)), return_lse=True, check_finite=draw(st.booleans())
    )
    mask_shape = (
        draw(st.sampled_from([p for p in (1, 2, 4) if batch % p == 0])),
        draw(st.sampled_from((1, hk * group))),
        draw(st.sampled_from((1, nq))),
        draw(st.sampled_from((1, nk))),
    )
    if draw(st.booleans()):
        options["keep"] = torch.rand(mask_shape, generator=g) > draw(st.sampled_from((0.0, 0.3, 0.9)))
    if draw(st.booleans()):
        bias = torch.randn(mask_shape, generator=g) * draw(st.sampled_from((1.0, 30.0, 1e4)))
        absent = torch.rand(mask_shape, generator=g) < draw(st.sampled_from((0.0, 0.2)))
        if METHODS[method].integer_bias:
            bits = draw(st.sampled_from((20, METHODS[method].bias_fraction_bits)))
            steps = (bias * 2**bits).clamp(-(2.0**31) + 256, 2.0**31 - 256)
            options["bias"] = steps.to(torch.int32).masked_fill(absent, ABSENT)
            options["bias_fraction_bits"] = bits
        else:
            options["bias_float"] = bias.masked_fill(absent, float("-inf"))
    if packed:
        cuts_q = sorted(draw(st.lists(st.integers(0, nq), min_size=2, max_size=2)))
        cuts_k = sorted(draw(st.lists(st.integers(0, nk), min_size=2, max_size=2)))
        options["cu_seqlens_q"] = torch.tensor([0, *cuts_q, nq], dtype=torch.int32)
        options["cu_seqlens_k"] = torch.tensor([0, *cuts_k, nk], dtype=torch.int32)
    align = draw(st.sampled_from((None, "top_left", "bottom_right")))
    if align:
        options |= dict(causal=0 if align == "top_left" else nk - nq, causal_align=align)
    if not options["out_dtype"].is_floating_point and not method.endswith("flash") and draw(st.booleans()):
        options["out_scale"] = torch.full((1, 1, 1, 1), draw(st.sampled_from((1e-9, 0.01, 0.7, 1e5))))
    return Problem(method=method, sm_scale=draw(st.sampled_from((1.0, 0.125, 4e-6))), **tensors, **options)
