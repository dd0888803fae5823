"""`intflash_bfp`: integer-only attention that no sink costs precision (docs/numerics.md).

P is relative to the largest weight of the row's keys with a value. Keys without one, whose V codes are all 0, have an
exponent of their own: they weigh in l and never decide how finely the others are held. p16 of long sequences is
dithered, so that what it loses below its last bit does not add up. All sums are exact integers: tiles, orders and
splits of the keys do not change a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods import arrays
from intflash.methods.base import Method
from intflash.methods.intflash import finish
from intflash.numerics import exp
from intflash.numerics.fixed_point import rounding_rshift
from intflash.numerics.groups import (
    BIAS_FRACTION_BITS,
    FAR,
    LEAST_HI,
    MAX_GAP,
    MAX_KEYS,
    OUTPUT_SHIFT,
    P_FRACTION_BITS,
    UNSET,
    additions,
    fraction_bits,
)
from intflash.problem import Problem, Result

NEVER = -(1 << 62)  # below every score exponent: the maximum of no keys


def _score_exponent(problem: Problem) -> tuple[Tensor, Tensor]:
    """T (int64, 2^-32 octave) of every score, and which keys are present."""
    S = arrays.scores(problem)
    C, k = exp.exponent_constants(problem.q.token_scale(), arrays.key_scale_row(problem), problem.sm_scale)
    T = arrays.within(S << k, 32, "shifted score") * C
    absent = None
    if problem.bias is not None:
        bias = arrays.spread_batch(problem.bias.to(torch.int64), problem)
        absent = bias == exp.ABSENT
        T = T + (torch.where(absent, 0, bias) << (32 - problem.bias_fraction_bits))
    return arrays.within(T, 61, "score exponent"), arrays.present_keys(problem, absent).expand(T.shape)


def _p16(depth: Tensor, present: Tensor) -> Tensor:
    """p16 of depths >= 0 below a group's octave (2^-32 octave): 65193 at 0, rounded or dithered; 0 where absent."""
    x = exp.K0 - depth
    hi, lo = x >> 32, x & 0xFFFFFFFF
    u = 256 + (lo >> 24)
    m = arrays.within(u * u + exp.QUADRATIC_OFFSET, 19, "quadratic", signed=False)
    p24 = torch.where(hi >= LEAST_HI, (m << (hi - LEAST_HI).clamp(0, 30)) >> (32 - P_FRACTION_BITS), 0)
    added = additions(depth.shape[3]).to(depth.device)
    return arrays.within(torch.where(present, (p24 + added) >> P_FRACTION_BITS, 0), 16, "p16", signed=False)


def _origin(T: Tensor, present: Tensor, valued: Tensor) -> Tensor:
    """The T from which octaves count: the maximum of the keys with a value, of all where none has one."""
    tops = [arrays.row_max(torch.where(here, T, NEVER), NEVER) for here in (present & valued, present)]
    origin = torch.where(tops[0] == NEVER, tops[1], tops[0])
    return torch.where(origin == NEVER, 0, origin)


def _octave(T: Tensor, here: Tensor) -> Tensor:
    """The octave of a group's maximum, rounded up; `UNSET` without keys."""
    top = arrays.row_max(torch.where(here, T, NEVER), NEVER)
    return torch.where(top == NEVER, UNSET, -((-top) >> 32))


def _reference(problem: Problem) -> Result:
    T, present = _score_exponent(problem)
    _, v = arrays.key_codes(problem)
    valued = (v != 0).any(-1)[:, :, None, :]
    origin = _origin(T, present, valued)
    T = T - origin
    groups = [present & valued, present & ~valued]
    octaves = [_octave(T, here) for here in groups]
    top = torch.maximum(*octaves)
    fraction = fraction_bits(T.shape[3])
    p = [_p16(torch.where(here, (e << 32) - T, 0), here) for here, e in zip(groups, octaves, strict=True)]
    acc = arrays.matmul(p[0], v, "acc", 44) << fraction
    l = torch.zeros_like(top)
    for weights, e in zip(p, octaves, strict=True):
        sums = arrays.within(weights.sum(-1, keepdim=True), 36, "l of a group", signed=False)
        depth = top - e
        l += torch.where(depth < FAR, (sums << fraction) >> depth.clamp(max=FAR), 0)
    gap = torch.where(octaves[0] == UNSET, 0, top - octaves[0]).clamp(max=MAX_GAP)
    acc = arrays.within(rounding_rshift(acc, OUTPUT_SHIFT), 40, "rounded acc")
    l = arrays.within(
        rounding_rshift(arrays.within(l, 57, "l", signed=False), OUTPUT_SHIFT), 32, "rounded l", signed=False
    )
    level = origin + ((top + OUTPUT_SHIFT - fraction) << 32)
    return finish(problem, acc, l, level, exp.P16_MAX, gap)


def _check_bounds(problem: Problem) -> None:
    nk, d = problem.k.shape[2], problem.q.shape[3]
    if nk > MAX_KEYS:
        raise InputError(f"{problem.method} needs at most {MAX_KEYS} keys (acc below 2^63), got {nk}")
    if d > exp.MAX_HEAD_DIM:
        raise InputError(f"{problem.method} needs head_dim at most {exp.MAX_HEAD_DIM}, got {d}")


METHODS = (
    Method(
        name="intflash_bfp",
        summary="integer-only, 16-bit P that attention sinks cost no precision, accurate for all scores",
        source="IntFlash, docs/numerics.md",
        reference=_reference,
        integer_only=True,
        granularities={
            "q": ("tensor", "head", "token", "block"),
            "k": ("tensor", "head", "block"),
            "v": ("tensor", "head", "channel"),
        },
        bias_fraction_bits=BIAS_FRACTION_BITS,
        check=_check_bounds,
    ),
)
