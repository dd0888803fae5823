"""The steps of `intflash`, `intflash_p8` and `intflash_online`: what the tile loop calls for each tile.

A method is a `Steps` value of device functions. `state` is a tuple of per-row tensors and accumulators:

    initial(BM, BDV)                        -> state
    maximum(state, s, C, bias, present)  -> state      pass 1; None: the method has one pass
    between(state, C)                    -> state      after pass 1
    step(state, s, C, bias, present, v)  -> state      pass 2, or the only pass
    result(state)                           -> (acc, l, t_max): acc int32 or int64, rows without keys l = 0

s: int32 scores S << k [BM, BN] over permuted keys; C: int32 scalar, rows [BM, 1] or tile;
bias: int32 tile in 2^-20 octave or None; present: bool tile or None for all keys; v: int8 [BN, BDV].

P is unsigned and the tensor cores take signed codes, so p - 128 (of P16: its high digit - 128) is multiplied and
128 * sum(V) added back, over every key that was multiplied, absent ones included (p = 0, code -128).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import triton
import triton.language as tl

from intflash.backends.triton.tiles import natural_order
from intflash.numerics import exp
from intflash.numerics.triton import (
    INT32_MIN,
    K0,
    NEVER,
    NO_OCTAVE,
    TABLE_K0,
    TABLE_OCTAVE,
    exp_p8,
    exp_p16,
    table_octave,
    table_p8,
)

BIAS_STEP = tl.constexpr(exp.OCTAVES.bias_step)
TABLE_BIAS_STEP = tl.constexpr(exp.TABLE_STEPS.bias_step)


class Hooks(NamedTuple):
    """The tile loop's device functions of the methods with float scores (mixed_steps.py).

    order(BN)                                        -> key of each column of a score tile
    scores(q, k_tile)                                -> s, int32 or float32
    row_units(constants, place, rows, PERIODS, KIND) -> C: what a score is worth, in octaves
    key_units(C, constants, place, first, keys, PERIODS, KIND, BOUNDED) -> C of a tile of keys
    store(out, place, rows, acc, l, constants, PERIODS, KIND, DV, BDV)
    """

    order: object
    scores: object
    row_units: object
    key_units: object
    store: object


class Steps(NamedTuple):
    initial: object
    maximum: object
    between: object
    step: object
    result: object
    keys: int | None  # keys per tile where they are part of the method, None: any
    digest: str  # of the functions' source: Triton's cache on disk knows a constexpr function by its name only
    hooks: Hooks | None = None  # what methods with float scores do in another way
    whole: bool = False  # absent keys take part: no tile is skipped


def make_steps(
    initial: object, maximum: object, between: object, step: object, result: object, keys: int | None,
    hooks: Hooks | None = None, whole: bool = False,
) -> Steps:  # fmt: skip
    functions = (initial, maximum, between, step, result)
    keys_of = "".join(getattr(f, "cache_key", "") for f in (*functions, *(hooks or ())) if f is not None)
    return Steps(*functions, keys, hashlib.sha256(keys_of.encode()).hexdigest()[:16], hooks, whole)


@triton.jit
def exponents(s, C, bias, STEP: tl.constexpr = BIAS_STEP):
    """T of a tile, int64; STEP: a bias of 1 in it."""
    t = s.to(tl.int64) * C.to(tl.int64)
    if bias is not None:
        t += bias.to(tl.int64) * STEP
    return t


@triton.jit
def offsets(base, bias, present, STEP: tl.constexpr = BIAS_STEP):
    """B of a tile: base [BM, 1] plus the bias; NEVER where a key is absent."""
    b = base
    if bias is not None:
        b = b + bias.to(tl.int64) * STEP
    if present is not None:
        b = tl.where(present, b, NEVER)
    return b


@triton.jit
def add_value_sums(sums, v):
    """sums [16, BDV] += the column sums of v [BN, BDV] in every row: one small product by ones."""
    return tl.dot(tl.full([16, v.shape[0]], 1, tl.int8), v, sums, out_dtype=tl.int32)


@triton.jit
def add_row_sums(l, p, count):
    """l [BM, 16] += the row sums of codes p, in every column: a product by ones, so that the tensor cores add.

    `count`, if not None: only the first `count` keys are summed (those behind them do not exist).
    """
    if count is None:
        ones = tl.full([p.shape[1], 16], 1, tl.int8)
    else:
        ones = tl.broadcast_to((tl.arange(0, p.shape[1]) < count)[:, None], [p.shape[1], 16]).to(tl.int8)
    return tl.dot(p, ones, l, out_dtype=tl.int32)


@triton.jit
def add_wide_sums(l, high, low, count):
    """l += the row sums of 256 * high + low."""
    zero = tl.zeros([high.shape[0], 16], tl.int32)
    return l + add_row_sums(zero, high, count) * 256 + add_row_sums(zero, low, count)


@triton.jit
def row_sum(l):
    """[BM] of an l whose columns are equal (as uint32: its sign bit means nothing to a selection of equals)."""
    return tl.max(l, 1)


@triton.jit
def offset_row(sums):
    """128 * sum of V, int32 [1, BDV]."""
    return (tl.max(sums, 0) * 128)[None, :]


# --- exact maximum: the state is (peak, acc ..., l, sums); peak is Smax where one C serves a row and there is
# no bias, Tmax otherwise (PLAIN tells; both are kept as int64 Tmax after `between`).


@triton.jit
def _initial_p8(BM: tl.constexpr, BDV: tl.constexpr):
    peak = tl.full([BM], NEVER, tl.int64)
    s_peak = tl.full([BM], INT32_MIN, tl.int32)
    return peak, s_peak, tl.zeros([BM, BDV], tl.int32), tl.zeros([BM, 16], tl.int32), tl.zeros([16, BDV], tl.int32)


@triton.jit
def _initial_p16(BM: tl.constexpr, BDV: tl.constexpr):
    peak, s_peak, acc, l, sums = _initial_p8(BM, BDV)
    return peak, s_peak, acc, l, sums, tl.zeros([BM, BDV], tl.int32)


@triton.jit
def peaks(peak, s_peak, s, C, bias, present, PLAIN: tl.constexpr, STEP: tl.constexpr = BIAS_STEP):
    if PLAIN:
        if present is not None:
            s = tl.where(present, s, INT32_MIN)
        s_peak = tl.maximum(s_peak, tl.max(s, 1))
    else:
        t = exponents(s, C, bias, STEP)
        if present is not None:
            t = tl.where(present, t, NEVER)
        peak = tl.maximum(peak, tl.max(t, 1))
    return peak, s_peak


@triton.jit
def _maximum_p8(state, s, C, bias, present, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums = state
    peak, s_peak = peaks(peak, s_peak, s, C, bias, present, PLAIN)
    return peak, s_peak, acc, l, sums


@triton.jit
def _maximum_p16(state, s, C, bias, present, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums, low = state
    peak, s_peak = peaks(peak, s_peak, s, C, bias, present, PLAIN)
    return peak, s_peak, acc, l, sums, low


@triton.jit
def t_max(peak, s_peak, C, PLAIN: tl.constexpr):
    if PLAIN:
        t = exponents(s_peak[:, None], C, None)
        return tl.where(s_peak == INT32_MIN, NEVER, tl.max(t, 1))
    else:
        return peak


@triton.jit
def _between_p8(state, C, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums = state
    return t_max(peak, s_peak, C, PLAIN), s_peak, acc, l, sums


@triton.jit
def _between_p16(state, C, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums, low = state
    return t_max(peak, s_peak, C, PLAIN), s_peak, acc, l, sums, low


@triton.jit
def _step_p8(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums = state
    b = offsets((-peak + K0)[:, None], bias, present)
    p = natural_order(exp_p8(s, C, b))
    l = add_row_sums(l, p, None) + 128 * s.shape[1]
    acc = tl.dot(p, v, acc, out_dtype=tl.int32)
    return peak, s_peak, acc, l, add_value_sums(sums, v)


@triton.jit
def _step_p16(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    peak, s_peak, high, l, sums, low = state
    b = offsets((-peak + K0)[:, None], bias, present)
    p_high, p_low = exp_p16(s, C, b)
    p_high, p_low = natural_order(p_high), natural_order(p_low)
    l = add_wide_sums(l, p_high, p_low, None) + (256 * 128) * s.shape[1]
    high = tl.dot(p_high, v, high, out_dtype=tl.int32)
    low = tl.dot(p_low, v, low, out_dtype=tl.int32)
    return peak, s_peak, high, l, add_value_sums(sums, v), low


@triton.jit
def _result_p8(state):
    peak, s_peak, acc, l, sums = state
    return acc + offset_row(sums), row_sum(l), peak


@triton.jit
def _result_p16(state):
    peak, s_peak, high, l, sums, low = state
    return ((high + offset_row(sums)).to(tl.int64) << 8) + low.to(tl.int64), row_sum(l), peak


# --- online: the state is (octave, acc, l), acc the true accumulator.


@triton.jit
def _initial_online(BM: tl.constexpr, BDV: tl.constexpr):
    return tl.full([BM], NO_OCTAVE, tl.int32), tl.zeros([BM, BDV], tl.int32), tl.zeros([BM, 16], tl.int32)


@triton.jit
def granule(octave, s, C, bias, present, PLAIN: tl.constexpr):
    """The octaves that the keys of a tile raise, and P8 of those keys in their order."""
    peak, s_peak = tl.full([s.shape[0]], NEVER, tl.int64), tl.full([s.shape[0]], INT32_MIN, tl.int32)
    peak, s_peak = peaks(peak, s_peak, s, C, bias, present, PLAIN, TABLE_BIAS_STEP)
    raised = tl.maximum(octave, table_octave(t_max(peak, s_peak, C, PLAIN)))
    b = offsets((raised.to(tl.int64) * -TABLE_OCTAVE + TABLE_K0)[:, None], bias, present, TABLE_BIAS_STEP)
    return raised, natural_order(table_p8(s, C, b))


@triton.jit
def _step_online(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    octave, acc, l = state
    raised, p = granule(octave, s, C, bias, present, PLAIN)
    d = tl.minimum(raised - octave, 31)
    l = add_row_sums((l >> d[:, None]) + 128 * s.shape[1], p, None)
    product = tl.dot(p, v, out_dtype=tl.int32)
    sums = add_value_sums(tl.zeros([16, v.shape[1]], tl.int32), v)
    return raised, (acc >> d[:, None]) + (product + offset_row(sums)), l


@triton.jit
def _result_online(state):
    octave, acc, l = state
    return acc, row_sum(l), octave.to(tl.int64) << 32


P8 = make_steps(_initial_p8, _maximum_p8, _between_p8, _step_p8, _result_p8, None)
P16 = make_steps(_initial_p16, _maximum_p16, _between_p16, _step_p16, _result_p16, None)
ONLINE = make_steps(_initial_online, None, None, _step_online, _result_online, 128)
