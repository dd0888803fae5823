"""Array arithmetic of the reference: exact integers in int64, with every declared width asserted.

Only `methods/*.py` and the reference backend use this. The other backends are written independently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.numerics.exp import makes_absent
from intflash.problem import Problem
from intflash.quant import QTensor
from intflash.quant.quantizers import TINY_AMAX, divided


class WidthError(AssertionError):
    """A value of the reference exceeds the width that docs/numerics.md declares for it."""


def within(x: Tensor, bits: int, what: str, *, signed: bool = True) -> Tensor:
    """Returns x, after checking that it fits a register of `bits` bits."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if x.numel() and (int(x.min()) < low or int(x.max()) > high):
        kind = "int" if signed else "uint"
        raise WidthError(f"{what} leaves {kind}{bits}: [{int(x.min())}, {int(x.max())}]")
    return x


def matmul(a: Tensor, b: Tensor, what: str, bits: int = 32) -> Tensor:
    """Returns a @ b of int64 arrays. The result is exact, because sums below 2^53 are exact in float64."""
    product = torch.matmul(a.double(), b.double())
    if product.numel() and product.abs().max() >= 2.0**53:
        raise WidthError(f"{what} leaves the exact range of the reference")
    return within(product.to(torch.int64), bits, what)


def per_query_head(x: Tensor, problem: Problem) -> Tensor:
    """Repeats key heads for the query heads of their group (GQA). A broadcast head axis stays as it is."""
    return x if x.shape[1] == 1 else x.repeat_interleave(problem.group, dim=1)


def codes(x: QTensor) -> Tensor:
    return x.data.to(torch.int64)


def key_codes(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns the codes of K and V in int64, with heads repeated for the query heads."""
    return per_query_head(codes(problem.k), problem), per_query_head(codes(problem.v), problem)


def scores(problem: Problem) -> Tensor:
    """Returns S = Q K^T, int32 values, ``[B, Hq, Nq, Nk]``."""
    k, _ = key_codes(problem)
    return matmul(codes(problem.q), k.transpose(-1, -2), "score")


def key_scale_row(problem: Problem) -> Tensor:
    """Returns K's scale on the score's axes: ``[B|1, Hq|1, 1, Nk|1]``."""
    return per_query_head(problem.k.token_scale(), problem).transpose(-1, -2)


def value_scale(problem: Problem) -> Tensor:
    """Returns V's scale on the output's axes: ``[B|1, Hq|1, 1, Dv|1]``."""
    return per_query_head(problem.v.scale, problem)


def spread_batch(mask: Tensor, problem: Problem) -> Tensor:
    """Expands a mask whose batch axis is periodic to every batch of the problem: batch b takes row b % period."""
    return mask.repeat(problem.q.shape[0] // mask.shape[0], 1, 1, 1)


def present_keys(problem: Problem, absent_bias: Tensor | None = None) -> Tensor:
    """Returns which keys are present, bool ``[B|1, Hq|1, Nq|1, Nk]``. `absent_bias` marks further absent keys."""
    nq, nk = problem.q.shape[2], problem.k.shape[2]
    device = problem.device
    present = torch.ones(1, 1, 1, nk, dtype=torch.bool, device=device)
    if problem.causal is not None:
        rows, keys = torch.arange(nq, device=device)[:, None], torch.arange(nk, device=device)
        present = present & (keys <= rows + problem.causal)
        if problem.window_start is not None:
            present = present & (keys >= rows + problem.window_start)
    if problem.keep is not None:
        present = present & spread_batch(problem.keep, problem)
    if absent_bias is not None:
        present = present & ~absent_bias
    return present


def split_bias(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Splits the given bias, for every batch, into its finite part (0 for absent keys) and the mask of keys that it
    makes absent.
    """
    if problem.bias_float is None:
        if problem.bias is not None:
            raise InputError(f"{problem.method} needs the bias as floats (Problem.bias_float), got only Problem.bias")
        return None, None
    bias = spread_batch(problem.bias_float, problem)
    absent = makes_absent(bias)
    return torch.where(absent, 0, bias), absent


def row_max(x: Tensor, start: float | int) -> Tensor:
    """Returns the maximum over the keys, at least `start`; `start` itself where there are no keys."""
    if x.shape[-1] == 0:
        return x.new_full((*x.shape[:-1], 1), start)
    return x.amax(dim=-1, keepdim=True).clamp(min=start)


def scale_of_maximum(x: Tensor, dims: tuple[int, ...], top: float) -> Tensor:
    """Returns max|x| / top over `dims` (kept), float32, and 1 where x is empty or zero, as the quantizers do."""
    if x.numel() == 0:
        return torch.ones([1 if d in dims else n for d, n in enumerate(x.shape)], device=x.device)
    amax = x.float().abs().amax(dim=dims, keepdim=True)
    return torch.where(amax < TINY_AMAX, torch.ones_like(amax), divided(amax, top))


def output_scale(problem: Problem) -> Tensor:
    """Returns the scale of integer output: the caller's, or the one for which max|V|, which no average exceeds, is
    the largest code.
    """
    if problem.out_scale is not None:
        return problem.out_scale
    qmax = torch.iinfo(problem.out_dtype).max
    if isinstance(problem.v, Tensor):
        return scale_of_maximum(problem.v, (0, 1, 2, 3), qmax)
    s_v = value_scale(problem)
    if problem.v.granularity in ("token", "block"):
        s_v = s_v.amax(dim=2, keepdim=True)
    return divided(s_v * ((1 << (problem.v.bits - 1)) - 1), qmax)
