"""`intflash_bfp`: integer-only attention whose P has an exponent per block of keys (docs/numerics.md).

P is relative to the octave of its block's own maximum, so that no key outside a block costs a block precision. A block
is 128 keys, or a whole sequence of at most 768. Keys without value, whose V codes are all 0, have an exponent of their
own: they weigh in l and never decide how finely the others are held. Blocks are merged in 64-bit fixed point below the
row's largest exponent, which is exact or rounded by that exponent alone: tiles, orders and splits of whole blocks do
not change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.methods import arrays
from intflash.methods.base import Method
from intflash.methods.intflash import finish
from intflash.numerics import exp
from intflash.numerics.block import (
    BIAS_FRACTION_BITS,
    FAR,
    LEAST_HI,
    MAX_GAP,
    MAX_KEYS,
    ONE_BLOCK,
    OUTPUT_SHIFT,
    UNSET,
    block_keys,
    dropped_bits,
    fraction_bits,
    rounds,
)
from intflash.numerics.fixed_point import rounding_rshift
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


def _p16(depth: Tensor, present: Tensor, rounded: bool) -> Tensor:
    """p16 of depths >= 0 below a block's octave (2^-32 octave): 65193 at 0, rounded or floored; 0 where absent."""
    x = exp.K0 - depth
    hi, lo = x >> 32, x & 0xFFFFFFFF
    u = 256 + (lo >> 24)
    m = arrays.within(u * u + exp.QUADRATIC_OFFSET, 19, "quadratic", signed=False)
    scaled = m << (hi - LEAST_HI).clamp(0, 30)
    p = torch.where(present & (hi >= LEAST_HI), rounding_rshift(scaled, 32) if rounded else scaled >> 32, 0)
    return arrays.within(p, 16, "p16", signed=False)


def _groups(valued: Tensor, present: Tensor) -> Iterator[tuple[slice, Tensor, bool]]:
    """The groups of keys: of each block those with a value, then those without; (keys, present, whether of value)."""
    count = block_keys(present.shape[3])
    for start in range(0, present.shape[3], count):
        keys = slice(start, start + count)
        yield keys, present[..., keys] & valued[..., keys], True
        yield keys, present[..., keys] & ~valued[..., keys], False


def _origin(T: Tensor, present: Tensor, valued: Tensor) -> Tensor:
    """The T from which octaves count: of one block the maximum of the keys with a value, of all where none has one."""
    if T.shape[3] > ONE_BLOCK:
        return T.new_zeros((*T.shape[:3], 1))
    tops = [arrays.row_max(torch.where(here, T, NEVER), NEVER) for here in (present & valued, present)]
    origin = torch.where(tops[0] == NEVER, tops[1], tops[0])
    return torch.where(origin == NEVER, 0, origin)


def _octave(T: Tensor, here: Tensor) -> Tensor:
    """The octave of a group's maximum, rounded up; `UNSET` without keys."""
    top = arrays.row_max(torch.where(here, T, NEVER), NEVER)
    return torch.where(top == NEVER, UNSET, -((-top) >> 32))


def _merged(sums: Tensor, depth: Tensor, fraction: int) -> Tensor:
    """Sums of a block `depth` octaves below its row in the row's unit, floored; 0 from `FAR` octaves on."""
    return torch.where(depth < FAR, (sums << fraction) >> depth.clamp(max=FAR), 0)


def _reference(problem: Problem) -> Result:
    T, present = _score_exponent(problem)
    _, v = arrays.key_codes(problem)
    valued = (v != 0).any(-1)[:, :, None, :]
    origin = _origin(T, present, valued)
    T = T - origin
    groups = [(keys, here, of_value, _octave(T[..., keys], here)) for keys, here, of_value in _groups(valued, present)]
    unset = T.new_full((*T.shape[:3], 1), UNSET)
    top = torch.stack([unset, *(e for *_, e in groups)]).amax(0)
    value_top = torch.stack([unset, *(e for _, _, of_value, e in groups if of_value)]).amax(0)
    fraction = fraction_bits(T.shape[3])
    dropped = dropped_bits(T.shape[3])
    l_bits = (exp.P16_MAX * block_keys(T.shape[3])).bit_length()
    l, acc = torch.zeros_like(top), T.new_zeros((*T.shape[:3], v.shape[3]))
    for keys, here, of_value, e in groups:
        p = _p16(torch.where(here, (e << 32) - T[..., keys], 0), here, rounds(T.shape[3]))
        l_group = arrays.within(p.sum(-1, keepdim=True), l_bits, "l of a block", signed=False)
        l = arrays.within(l + _merged(l_group, top - e, fraction), 57, "l", signed=False)
        if of_value:
            acc_group = (arrays.matmul(p, v[:, :, keys], "acc of a block", l_bits + 8) >> dropped) << dropped
            acc = arrays.within(acc + _merged(acc_group, value_top - e, fraction), 64, "acc")
    gap = torch.where(value_top == UNSET, 0, top - value_top).clamp(max=MAX_GAP)
    acc = arrays.within(rounding_rshift(acc, OUTPUT_SHIFT), 40, "rounded acc")
    l = arrays.within(rounding_rshift(l, OUTPUT_SHIFT), 32, "rounded l", signed=False)
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
        summary="integer-only, 16-bit P with an exponent per block of keys, accurate for all scores",
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
