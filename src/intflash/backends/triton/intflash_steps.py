"""The steps of `intflash`, `intflash_p8` and `intflash_online`, which the tile loop calls for each tile of keys.

A method is a `Steps` value of device functions. `state` is a tuple of per-row tensors and accumulators:

    initial(BM, BDV)                     -> state
    row_max(state, s, C, bias, present)  -> state      first pass; None: the method has one pass
    after_first_pass(state, C)           -> state
    step(state, s, C, bias, present, v)  -> state      second pass, or the only pass
    result(state)                        -> (acc, l, t_max): acc int32 or int64, rows without keys l = 0

With `groups`, keys with and without a value have an exponent each (two_groups.py): `initial` takes the number of keys
too, `present` of `row_max` is what `value_groups` returns, and `step` has one argument more before v: `valueless_keys`
of the columns and of the keys in order, and what `key_additions` returns. `result` returns the gap of `requantize` too.

s: int32 scores S << k [BM, BN] over permuted keys; C: int32 scalar, rows [BM, 1] or tile; bias: int64 tile in units
of T or None; present: bool tile or None for all keys; v: int8 [BN, BDV].

P is unsigned and Triton's int8 products are signed, so the kernel multiplies p - 128 (of P16: the high digit - 128) and
adds 128 * sum(V) back, over every key that was multiplied, including absent ones (p = 0, code -128).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import triton
import triton.language as tl

from intflash.backends.triton.device_functions import natural_order
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


class Hooks(NamedTuple):
    """The device functions of methods whose scores, units or output differ from intflash's (mixed_precision_steps.py,
    qflash.py).

        order(BN)                                        -> key of each column of a score tile
        scores(q, k_tile)                                -> s, int32 or float32
        row_units(constants, pos, rows, CONSTS, KIND)    -> C: the value of a score, in octaves
        key_units(C, constants, pos, first, keys, CONSTS, KIND, BOUNDED) -> C of a tile of keys
        store(out, pos, rows, acc, l, constants, CONSTS, KIND, DV, BDV)
    """

    order: object
    scores: object
    row_units: object
    key_units: object
    store: object


class Steps(NamedTuple):
    initial: object
    row_max: object
    after_first_pass: object
    step: object
    result: object
    keys: int | None  # keys per tile where they are part of the method; None: any number
    # hash of the functions' source, because Triton's disk cache identifies a constexpr function by its name only
    digest: str
    hooks: Hooks | None = None  # device functions of other methods than intflash's
    groups: bool = False  # keys with and without a value have an exponent each
    visits_all_tiles: bool = False  # absent keys take part, so that no tile is skipped


def make_steps(
    initial: object, row_max: object, after_first_pass: object, step: object, result: object, keys: int | None,
    hooks: Hooks | None = None, groups: bool = False, visits_all_tiles: bool = False,
) -> Steps:  # fmt: skip
    functions = (initial, row_max, after_first_pass, step, result)
    keys_of = "".join(getattr(f, "cache_key", "") for f in (*functions, *(hooks or ())) if f is not None)
    return Steps(*functions, keys, hashlib.sha256(keys_of.encode()).hexdigest()[:16], hooks, groups, visits_all_tiles)


@triton.jit
def exponents(s, C, bias):
    """Returns T of a tile, int64. bias: in units of T."""
    t = s.to(tl.int64) * C.to(tl.int64)
    if bias is not None:
        t += bias
    return t


@triton.jit
def exp_offsets(base, bias, present):
    """Returns B of a tile: base [BM, 1] plus the bias, and NEVER where a key is absent."""
    b = base
    if bias is not None:
        b = b + bias
    if present is not None:
        b = tl.where(present, b, NEVER)
    return b


@triton.jit
def add_value_sums(sums, v):
    """Adds the column sums of v [BN, BDV] to every row of sums [16, BDV], by a small product with ones."""
    return tl.dot(tl.full([16, v.shape[0]], 1, tl.int8), v, sums, out_dtype=tl.int32)


@triton.jit
def add_row_sums(l, p, count):
    """Adds the row sums of codes p to every column of l [BM, 16], by a product with ones on the tensor cores.

    `count`, if not None: only the first `count` keys are summed, because the others do not exist.
    """
    if count is None:
        ones = tl.full([p.shape[1], 16], 1, tl.int8)
    else:
        ones = tl.broadcast_to((tl.arange(0, p.shape[1]) < count)[:, None], [p.shape[1], 16]).to(tl.int8)
    return tl.dot(p, ones, l, out_dtype=tl.int32)


@triton.jit
def add_wide_sums(l, high, low, count):
    """Adds the row sums of 256 * high + low to l."""
    zero = tl.zeros([high.shape[0], 16], tl.int32)
    return l + add_row_sums(zero, high, count) * 256 + add_row_sums(zero, low, count)


@triton.jit
def row_sum(l):
    """Returns l [BM] from equal columns. l is a uint32 in int32, and its sign does not matter to a maximum of equal
    values.
    """
    return tl.max(l, 1)


@triton.jit
def offset_row(sums):
    """Returns 128 * sum(V), int32 [1, BDV]."""
    return (tl.max(sums, 0) * 128)[None, :]


# --- exact maximum: the state is (peak, acc ..., l, sums). PLAIN: one C serves a row and there is no bias, so that the
# first pass takes the maximum of S. After `after_first_pass` peak is the int64 Tmax in either case.


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
def update_row_max(peak, s_peak, s, C, bias, present, PLAIN: tl.constexpr):
    if PLAIN:
        if present is not None:
            s = tl.where(present, s, INT32_MIN)
        s_peak = tl.maximum(s_peak, tl.max(s, 1))
    else:
        t = exponents(s, C, bias)
        if present is not None:
            t = tl.where(present, t, NEVER)
        peak = tl.maximum(peak, tl.max(t, 1))
    return peak, s_peak


@triton.jit
def _row_max_p8(state, s, C, bias, present, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums = state
    peak, s_peak = update_row_max(peak, s_peak, s, C, bias, present, PLAIN)
    return peak, s_peak, acc, l, sums


@triton.jit
def _row_max_p16(state, s, C, bias, present, PLAIN: tl.constexpr):
    peak, s_peak, acc, l, sums, low = state
    peak, s_peak = update_row_max(peak, s_peak, s, C, bias, present, PLAIN)
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
    b = exp_offsets((-peak + K0)[:, None], bias, present)
    p = natural_order(exp_p8(s, C, b))
    l = add_row_sums(l, p, None) + 128 * s.shape[1]
    acc = tl.dot(p, v, acc, out_dtype=tl.int32)
    return peak, s_peak, acc, l, add_value_sums(sums, v)


@triton.jit
def _step_p16(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    peak, s_peak, high, l, sums, low = state
    b = exp_offsets((-peak + K0)[:, None], bias, present)
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


# --- online: the state is (octave, acc, l), with acc the true accumulator.


@triton.jit
def _initial_online(BM: tl.constexpr, BDV: tl.constexpr):
    return tl.full([BM], NO_OCTAVE, tl.int32), tl.zeros([BM, BDV], tl.int32), tl.zeros([BM, 16], tl.int32)


@triton.jit
def granule(octave, s, C, bias, present, PLAIN: tl.constexpr):
    """Returns the rows' octaves after a tile of keys, and P8 of those keys in their natural order."""
    peak, s_peak = tl.full([s.shape[0]], NEVER, tl.int64), tl.full([s.shape[0]], INT32_MIN, tl.int32)
    peak, s_peak = update_row_max(peak, s_peak, s, C, bias, present, PLAIN)
    new_octave = tl.maximum(octave, table_octave(t_max(peak, s_peak, C, PLAIN)))
    b = exp_offsets((new_octave.to(tl.int64) * -TABLE_OCTAVE + TABLE_K0)[:, None], bias, present)
    return new_octave, natural_order(table_p8(s, C, b))


@triton.jit
def _step_online(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    octave, acc, l = state
    new_octave, p = granule(octave, s, C, bias, present, PLAIN)
    d = tl.minimum(new_octave - octave, 31)
    l = add_row_sums((l >> d[:, None]) + 128 * s.shape[1], p, None)
    product = tl.dot(p, v, out_dtype=tl.int32)
    sums = add_value_sums(tl.zeros([16, v.shape[1]], tl.int32), v)
    return new_octave, (acc >> d[:, None]) + (product + offset_row(sums)), l


@triton.jit
def _result_online(state):
    octave, acc, l = state
    return acc, row_sum(l), octave.to(tl.int64) << 32


P8 = make_steps(_initial_p8, _row_max_p8, _between_p8, _step_p8, _result_p8, None)
P16 = make_steps(_initial_p16, _row_max_p16, _between_p16, _step_p16, _result_p16, None)
ONLINE = make_steps(_initial_online, None, None, _step_online, _result_online, 128)
