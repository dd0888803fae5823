"""The algorithmic variants that the papers study, for experiments. They are not methods of the library.

Each is a plain function from a quantized problem to float outputs ``[B, Hq, Nq, Dv]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from intflash.methods import arrays, iflash, int_flash, integers, qflash
from intflash.numerics.fixed_point import floor_div, wrap_int8, wrap_int32
from intflash.problem import Problem
from intflash.quant import Recipe

Variant = Callable[[Problem], Tensor]


def requantize_as_printed(y: Tensor, c: qflash.PipelineConstants) -> Tensor:
    """QFlash Eq. 9 and 10: a normalized multiplier, round(sX / sY * 2^r) in [2^8, 2^9], and a flooring shift.

    It keeps bits where the program's 2^16 leaves none (randn x 0.01), but it floors: an exponential that the inexact
    quotient shifted to -1 becomes p = -1, which padded keys get on some scales.
    """
    ratio = 127 * c.sm_scale  # s_X / s_Y: the value of y = 1 in units of 1 / 127
    r = 8 - torch.floor(torch.log2(ratio)).to(torch.int64)
    multiplier = torch.round(torch.ldexp(ratio, r)).to(torch.int64)
    return wrap_int8(wrap_int32(y * multiplier) >> r)


QFLASH_PIPELINES: dict[str, qflash.Pipeline] = {
    "as published": qflash.PIPELINE,
    "as printed": qflash.Pipeline(requantize=requantize_as_printed, m_start=-(1 << 21), l_start=0),
    "quotient divided": replace(qflash.PIPELINE, quotient=iflash.divide_quotient),
    "requantization divided": replace(qflash.PIPELINE, requantize=iflash.requantize_by_division),
    "release divided": replace(qflash.PIPELINE, release=iflash.release_by_division),
    "all divided (iflash)": iflash.PIPELINE,
}

GRANULARITIES: dict[str, Recipe] = {
    "per tensor": Recipe("tensor", "tensor", "tensor", rule="divide"),
    "per head": Recipe(q="head", k="head", v="head", rule="divide"),
}


def qflash_variant(pipeline: qflash.Pipeline) -> Variant:
    """Computes QFlash with other steps."""
    return lambda problem: qflash.run(replace(problem, out_dtype=torch.float32), pipeline).out


def scale_release(problem: Problem, tile: int = qflash.TILE) -> Tensor:
    """QFlash Eq. 14: every tile divides alpha's scale out again, so that acc keeps one scale."""
    return qflash_variant(replace(qflash.PIPELINE, tile=tile))(problem)


def scale_accumulation(problem: Problem, tile: int = qflash.TILE, bits: int = 32) -> Tensor:
    """QFlash Eq. 13: acc takes alpha's scale 1 / rs with every tile, and so does l, in `bits` wrapping bits.

    Tile j adds p V rs^j, so that acc needs log2(rs) more bits per tile (12.4 on A2): 32 bits serve two tiles, 64 four.
    """
    wrap = {32: wrap_int32, 64: lambda x: x}[bits]  # int64 tensors wrap
    c = qflash.constants(problem)
    S, present = integers.biased_scores(problem)
    _, v = arrays.key_codes(problem)
    S = torch.where(present, S, qflash.MASKED)
    m = S.new_full((*S.shape[:3], 1), qflash.MASKED)
    l, acc = torch.zeros_like(m), S.new_zeros((*S.shape[:3], v.shape[3]))
    unit = torch.ones_like(c.rs)
    for start in range(0, S.shape[3], tile):
        s = S[..., start : start + tile]
        raised = torch.maximum(m, s.amax(dim=-1, keepdim=True))
        alpha = qflash.shift_exp2(m - raised, c)
        p = qflash.requantize_by_shift(qflash.shift_exp2(s - raised, c), c)
        l = wrap(l * alpha + p.sum(-1, keepdim=True) * unit)
        acc = wrap(acc * alpha + arrays.matmul(p, v[:, :, start : start + tile], "PV") * unit)
        m, unit = raised, wrap(unit * c.rs)
    return qflash.finish(replace(problem, out_dtype=torch.float32), acc, l, m.float()).out


def iflash_as_printed(problem: Problem) -> Tensor:
    """I-FlashAttention Algorithm 2: key by key, then a second pass to a normalized int8 P, and O = P V / 127.

    m starts at the first score, because the printed -2^31 overflows int32 in the first difference. d starts at 1.
    """
    c = qflash.constants(problem)
    S, present = integers.biased_scores(problem)
    _, v = arrays.key_codes(problem)
    S = torch.where(present, S, qflash.MASKED)
    m, d = S[..., :1], S.new_ones((*S.shape[:3], 1))
    for j in range(S.shape[3]):
        raised = torch.maximum(m, S[..., j : j + 1])
        alpha = qflash.shift_exp2(m - raised, c, iflash.divide_quotient)
        one = qflash.shift_exp2(S[..., j : j + 1] - raised, c, iflash.divide_quotient)
        d, m = floor_div(d * alpha, c.rs) + one, raised
    p = floor_div(127 * qflash.shift_exp2(S - m, c, iflash.divide_quotient), d)
    return arrays.matmul(p.clamp(max=127), v, "PV").float() * (arrays.value_scale(problem) / 127)


def int_flash_as_printed(problem: Problem) -> Tensor:
    """INT-FlashAttention Algorithm 1: P is rounded half to even in float32, and l sums the quantized P (line 12)."""

    def codes(p: Tensor) -> Tensor:
        return torch.round(p * int_flash.R) / int_flash.R

    return int_flash.online(
        replace(problem, out_dtype=torch.float32), codes, problem.v.dequantize(), int_flash.TILE_FULL, sum_rounded=True
    ).out


QFLASH_VARIANTS: dict[str, Variant] = {
    **{name: qflash_variant(pipeline) for name, pipeline in QFLASH_PIPELINES.items()},
    "I-FlashAttention as printed": iflash_as_printed,
}
