"""What the integer methods of other papers share: scores with their bias in integer units, and fixed-point output."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods import arrays
from intflash.numerics.exp import output_multiplier
from intflash.numerics.fixed_point import floor_div, rounding_rshift, saturate
from intflash.problem import Problem, Result
from intflash.quant.quantizers import divided

BIAS_LIMIT = 1 << 30  # bias values are clamped to this, so that bias + score fits int32
MIN_UNIT = 2.0**-30  # of the exponentials of ivit, ibert and fqvit: with a smaller unit they exceed int64
NO_SCORE = -(1 << 40)  # below every score: the maximum of a row without keys


def score_unit(problem: Problem) -> Tensor:
    """Returns the value of an integer score of 1: s_Q * s_K * scale, float64 ``[B|1, Hq|1, 1, 1]``."""
    q_scale, k_scale = problem.q.scale.double(), arrays.per_query_head(problem.k.scale.double(), problem)
    return (q_scale * k_scale) * problem.sm_scale


def biased_scores(problem: Problem, unit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the int32 scores with the bias rounded to their unit (default: `score_unit`), and which keys are
    present.
    """
    S = arrays.scores(problem)
    bias, absent = arrays.split_bias(problem)
    if bias is not None:
        # equals round(bias * log2(e) / sm_scale): log2(e) is in both
        codes = torch.round(bias.double() / (score_unit(problem) if unit is None else unit))
        S = arrays.within(S + codes.clamp(-BIAS_LIMIT, BIAS_LIMIT).to(torch.int64), 32, "biased score")
    return S, arrays.present_keys(problem, absent).expand(S.shape)


def int8_scores(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scores requantized to int8 by their own maximum, as the unfused methods store them.

    Returns:
        codes ``[B, Hq, Nq, Nk]``, their scale (float64, one per tensor) and which keys are present.
    """
    S, present = biased_scores(problem)
    S = torch.where(present, S, 0)
    amax = S.abs().amax().clamp(min=1) if S.numel() else S.new_ones(())
    codes = floor_div(2 * 127 * S + amax, 2 * amax)  # 127 S / amax, half up
    return codes, divided(score_unit(problem) * amax, 127), present


def served_unit(problem: Problem, unit: Tensor) -> Tensor:
    """Returns the unit of the exponentials of ivit, ibert and fqvit. In an unchecked call it is at least `MIN_UNIT`.

    Raises:
        InputError: it is below that and values may be read.
    """
    if problem.check_finite and bool((unit < MIN_UNIT).any()):
        raise InputError(f"{problem.method} needs a score unit of at least 2^-30, got {unit.min():.3g}")
    return unit.clamp(min=MIN_UNIT)


def depth(scores: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Returns score - m <= 0 of the present keys (0 for the others) and m, the maximum of the row's present keys."""
    m = arrays.row_max(torch.where(present, scores, NO_SCORE), NO_SCORE)
    return torch.where(present, scores - m, 0), m


def log_sum_exp(m: Tensor, l: Tensor, p_max: Tensor, unit: Tensor) -> Tensor:
    """Returns ln(sum exp(score)) from the maximum m in score units and the sum of p relative to the p of the maximum.

    It is -inf where l = 0 (no keys) and NaN where a method's l has wrapped below 0. Float32 ``[B, Hq, Nq]``.
    """
    return (m * unit + torch.log(l.double()) - torch.log(p_max.double())).float()[..., 0]


def fixed_point_output(problem: Problem, acc: Tensor, fraction_bits: int, lse: Tensor) -> Result:
    """Returns acc * s_V / 2^fraction_bits as floats, or as codes by one fixed-point multiplication."""
    s_v = arrays.value_scale(problem)
    lse = lse if problem.return_lse else None
    if problem.out_dtype.is_floating_point:
        return Result((acc.float() * (s_v / (1 << fraction_bits))).to(problem.out_dtype), lse=lse)
    out_scale = arrays.output_scale(problem)
    multiplier, exponent = output_multiplier(s_v, out_scale)
    out = rounding_rshift(acc * multiplier, 24 + fraction_bits - exponent)
    return Result(saturate(out, torch.iinfo(problem.out_dtype).bits).to(problem.out_dtype), out_scale, lse)
