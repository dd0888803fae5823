"""`intflash`, `intflash_p8` and `intflash_online`: our own integer-only attention (docs/numerics.md).

The exponent is T = (S << k) * C in units of 2^-32 octave; p is a quadratic of its 8 leading fraction
bits, shifted by its octaves. With the exact row maximum p depends only on (T, Tmax) and every sum is
an exact integer, so tiles, orders and splits of the keys do not change a bit. `intflash_online` counts T
in 2^-32 of 16/7 octaves and takes p8 at 1,024 depths only, so that a table can hold them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods import arrays
from intflash.methods.base import Method
from intflash.numerics.exp import (
    ABSENT,
    BIAS_FRACTION_BITS,
    K0,
    LAST_STEP,
    MAX_HEAD_DIM,
    MAX_KEYS,
    OCTAVES,
    P8_MAX,
    P16_MAX,
    QUADRATIC_OFFSET,
    TABLE_STEPS,
    ScoreUnit,
    exponent_constants,
    log_sum_exp,
    output_multiplier,
)
from intflash.numerics.fixed_point import clz32, floor_div, rounding_rshift, saturate
from intflash.problem import Problem, Result
from intflash.quant.quantizers import divided

GRANULE = 128  # keys per granule of `intflash_online`: semantics, not tuning
NEVER = -(1 << 62)  # below every score exponent: the maximum of a row without keys


def _score_exponent(problem: Problem, unit: ScoreUnit = OCTAVES) -> tuple[Tensor, Tensor]:
    """Returns T (int64, 2^-32 unit) of every score, and which keys are present."""
    S = arrays.scores(problem)
    C, k = exponent_constants(problem.q.token_scale(), arrays.key_scale_row(problem), problem.sm_scale, unit)
    T = arrays.within(S << k, 32, "shifted score") * C
    absent = None
    if problem.bias is not None:
        bias = arrays.spread_batch(problem.bias.to(torch.int64), problem)
        absent = bias == ABSENT
        T = T + torch.where(absent, 0, bias) * unit.bias_step(problem.bias_fraction_bits)
    present = arrays.present_keys(problem, absent).expand(T.shape)
    return arrays.within(T, 63, "score exponent"), present


def _exp2(x: Tensor, present: Tensor) -> Tensor:
    """3.018 * 2^16 * 2^(x / 2^32) for x <= K0 (Q30.32), its 8 leading fraction bits; 0 where absent."""
    hi, lo = x >> 32, x & 0xFFFFFFFF
    u = 256 + (lo >> 24)
    m = arrays.within(u * u + QUADRATIC_OFFSET, 19, "quadratic", signed=False)
    shifted = m << hi.clamp(0, 31)
    alive = present & (hi >= 0) & (hi <= 31)
    return arrays.within(torch.where(alive, shifted, 0), 32, "p32", signed=False)


def _p16(x: Tensor, present: Tensor) -> Tensor:
    return arrays.within(rounding_rshift(_exp2(x, present), 16), 16, "p16", signed=False)


def _p8(x: Tensor, present: Tensor) -> Tensor:
    return arrays.within(rounding_rshift(_exp2(x, present), 24), 8, "p8", signed=False)


def _p8_of_table(depth: Tensor, present: Tensor) -> Tensor:
    """Returns p8 of depths >= 0 in 2^-24 step, rounded half up to one of 1,024 steps of 1/112 octave."""
    step = ((depth + (1 << 23)) >> 24).clamp(max=LAST_STEP)
    return _p8(K0 - ((16 * step // 7) << 24), present)  # in 2^-8 octave, floored


def _row_max(T: Tensor, present: Tensor) -> Tensor:
    return arrays.row_max(torch.where(present, T, NEVER), NEVER)


def finish(problem: Problem, acc: Tensor, l: Tensor, t_max: Tensor, p_max: int, gap: Tensor | None = None) -> Result:
    """Normalizes acc (int64 ``[B, Hq, Nq, Dv]``) by l (``[B, Hq, Nq, 1]``). Rows without keys give 0.

    gap: octaves, 0 to 96, by which the unit of l is above that of acc.
    """
    s_v = arrays.value_scale(problem)
    empty = l == 0
    divisor = torch.where(empty, 1, l)
    out_scale = None
    if problem.out_dtype in (torch.int8, torch.int16):
        bits = torch.iinfo(problem.out_dtype).bits
        out_scale = problem.out_scale
        if out_scale is None:
            out_scale = divided(s_v * 127, (1 << (bits - 1)) - 1)
        gap = torch.zeros_like(l) if gap is None else gap
        multiplier, exponent = output_multiplier(s_v, out_scale, gap)
        lz = clz32(divisor)
        reciprocal = floor_div(torch.full_like(divisor, 1 << 55), divisor << lz)  # (2^23, 2^24]
        factor = arrays.within(rounding_rshift(reciprocal * multiplier, 24), 25, "factor", signed=False)
        shift = (55 - lz - exponent + gap).clamp(max=64)  # from 64 on the output is 0
        out = saturate(((acc * factor >> (shift - 1)) + 1) >> 1, bits)  # rounded half up
    else:
        scale = s_v / divisor.float()
        out = acc.float() * (scale if gap is None else scale * torch.exp2(-gap.float()))
    out = torch.where(empty, 0, out).to(problem.out_dtype)
    lse = log_sum_exp(t_max, l, p_max)[..., 0] if problem.return_lse else None
    return Result(out, out_scale, lse)


def partial_maxima(problem: Problem) -> Tensor:
    """Tmax of each row over the problem's keys, which may be some of all; `NEVER` without keys."""
    return _row_max(*_score_exponent(problem))


def partial_sums(problem: Problem, t_max: Tensor) -> Tensor:
    """acc and l (last) of the problem's keys below a maximum over these keys and others, ``[B, Hq, Nq, Dv + 1]``."""
    T, present = _score_exponent(problem)
    x = T + (K0 - t_max)
    _, v = arrays.key_codes(problem)
    if problem.method == "intflash":
        p = _p16(x, present)
        acc = 256 * arrays.matmul(p >> 8, v, "accH") + arrays.matmul(p & 255, v, "accL")
    else:
        p = _p8(x, present)
        acc = arrays.matmul(p, v, "acc")
    return torch.cat((acc, p.sum(-1, keepdim=True)), dim=-1)


def finish_sums(problem: Problem, t_max: Tensor, sums: Tensor) -> Result:
    """The result of the maxima and sums over all keys."""
    l = arrays.within(sums[..., -1:], 32, "l", signed=False)
    return finish(problem, sums[..., :-1], l, t_max, P16_MAX if problem.method == "intflash" else P8_MAX)


def _reference_exact(problem: Problem) -> Result:
    t_max = partial_maxima(problem)
    return finish_sums(problem, t_max, partial_sums(problem, t_max))


def _reference_online(problem: Problem) -> Result:
    T, present = _score_exponent(problem, TABLE_STEPS)
    _, v = arrays.key_codes(problem)
    unit = TABLE_STEPS.octave
    octave = torch.full((*T.shape[:3], 1), NEVER >> 32, dtype=torch.int64, device=T.device)
    l = torch.zeros_like(octave)
    acc = torch.zeros((*T.shape[:3], v.shape[3]), dtype=torch.int64, device=T.device)
    for start in range(0, T.shape[3], GRANULE):
        keys = slice(start, start + GRANULE)
        t, here = T[..., keys], present[..., keys]
        rise = -((-_row_max(t, here)) // unit)  # ceil; far below any octave without keys
        raised = torch.maximum(octave, rise)
        d = (raised - octave).clamp(max=31)
        l, acc, octave = l >> d, acc >> d, raised
        p = _p8_of_table((octave * unit - t).clamp(min=0), here)  # of an absent key it may be below 0
        l = arrays.within(l + p.sum(-1, keepdim=True), 32, "l", signed=False)
        acc = arrays.within(acc + arrays.matmul(p, v[:, :, keys], "acc"), 32, "acc")
    return finish(problem, acc, l, octave << 32, P8_MAX)


def _check_bounds(problem: Problem) -> None:
    nk, d = problem.k.shape[2], problem.q.shape[3]
    if nk > MAX_KEYS:
        raise InputError(f"{problem.method} needs at most {MAX_KEYS} keys (65,193 * N < 2^32), got {nk}")
    if d > MAX_HEAD_DIM:
        raise InputError(f"{problem.method} needs head_dim at most {MAX_HEAD_DIM}, got {d}")


_GRANULARITIES = {
    "q": ("tensor", "head", "token", "block"),
    "k": ("tensor", "head", "block"),
    "v": ("tensor", "head", "channel"),
}


def _method(name: str, summary: str, reference) -> Method:
    return Method(
        name=name,
        summary=summary,
        source="IntFlash, docs/numerics.md",
        reference=reference,
        integer_only=True,
        granularities=_GRANULARITIES,
        bias_fraction_bits=BIAS_FRACTION_BITS,
        check=_check_bounds,
    )


METHODS = (
    _method("intflash", "integer-only, exact maximum, 16-bit P", _reference_exact),
    _method("intflash_p8", "integer-only, exact maximum, 8-bit P", _reference_exact),
    _method("intflash_online", "integer-only, one pass in groups of 128 keys, 8-bit P", _reference_online),
)
