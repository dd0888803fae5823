"""The steps of `intflash_bfp`, whose keys with and without a value have an exponent each, and the kernel before them
that finds the keys without a value.

The first pass finds the largest T of both groups of keys, and so the octaves of docs/numerics.md, "`intflash_bfp`: keys
without a value, and dither". The second sums each group by itself; the two sums l are merged once, at the end. To
65,536 keys all sums are those of `intflash`, int32; above, a tile's sums are added to int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intflash.backends.gpu.constants import empty_valueless
from intflash.backends.gpu.tensors import View, data_view, view
from intflash.backends.triton.device_functions import natural_order
from intflash.backends.triton.intflash_steps import (
    Steps,
    add_value_sums,
    exp_offsets,
    make_steps,
    t_max,
    update_row_max,
)
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.numerics import exp, groups
from intflash.numerics.triton import (
    FAR,
    GROUP_OCTAVES,
    INT32_MIN,
    K0,
    MAX_GAP,
    NEVER,
    OUTPUT_SHIFT,
    UNSET,
    group_p16,
    octave_above,
)
from intflash.problem import Problem

HALF = tl.constexpr(1 << (groups.OUTPUT_SHIFT - 1))
MANY_KEYS = tl.constexpr(exp.MAX_KEYS)
FRACTION_BITS = tl.constexpr(groups.fraction_bits(1))
FRACTION_BITS_OF_MANY_KEYS = tl.constexpr(groups.fraction_bits(groups.MAX_KEYS))


@triton.jit
def _no_maximum(BM: tl.constexpr):
    return tl.full([BM], NEVER, tl.int64), tl.full([BM], INT32_MIN, tl.int32)


@triton.jit
def _unsigned(x):
    """The int64 of a uint32 in int32."""
    return x.to(tl.uint32, bitcast=True).to(tl.int64)


# The state is (maxima, sums, counts, fraction).
#
# maxima: T and S of the keys with a value and of the others, in whose place the first pass leaves B of `group_p16` and
#     the octave of each group; then `below`, how far T of the row's origin is below a whole octave, a uint32 in int32.
# sums: the high and low digits of P times V (of many keys one int64), l, and the sums of V. l [BM, 16] has the sums of
#     P of keys with a value in its first eight columns, of the others in the last eight, less 2^15 for each key.
# counts: keys of all tiles, and how many of them have no value.
# fraction: fraction bits of the row's sums.


@triton.jit
def _initial_maxima(BM: tl.constexpr, keys):
    peak, score = _no_maximum(BM)
    return peak, score, peak, score, tl.zeros([BM], tl.int32)


@triton.jit
def _fraction(keys):
    return tl.where(keys > MANY_KEYS, FRACTION_BITS_OF_MANY_KEYS, FRACTION_BITS)


@triton.jit
def _initial(BM: tl.constexpr, BDV: tl.constexpr, keys):
    acc, l = tl.zeros([BM, BDV], tl.int32), tl.zeros([BM, 16], tl.int32)
    sums = acc, acc, l, tl.zeros([16, BDV], tl.int32)
    return _initial_maxima(BM, keys), sums, (keys * 0, keys * 0), _fraction(keys)


@triton.jit
def _initial_of_many(BM: tl.constexpr, BDV: tl.constexpr, keys):
    sums = tl.zeros([BM, BDV], tl.int64), tl.zeros([BM, 16], tl.int64), tl.zeros([16, BDV], tl.int32)
    return _initial_maxima(BM, keys), sums, (keys * 0, keys * 0), _fraction(keys)


@triton.jit
def _row_max(state, s, C, bias, present, PLAIN: tl.constexpr):
    maxima, sums, counts, fraction = state
    value_peak, value_score, peak, score, below = maxima
    with_value, without, some_without = present
    value_peak, value_score = update_row_max(value_peak, value_score, s, C, bias, with_value, PLAIN)
    if some_without:
        peak, score = update_row_max(peak, score, s, C, bias, without, PLAIN)
    return (value_peak, value_score, peak, score, below), sums, counts, fraction


@triton.jit
def _after_first_pass(state, C, PLAIN: tl.constexpr):
    maxima, sums, counts, fraction = state
    value_peak, value_score, peak, score, below = maxima
    value_peak, peak = t_max(value_peak, value_score, C, PLAIN), t_max(peak, score, C, PLAIN)
    origin = tl.where(value_peak == NEVER, peak, value_peak)
    below = tl.where(origin != NEVER, -origin, 0).to(tl.int32)
    up = _unsigned(below)
    value_top, top = octave_above(value_peak + up), octave_above(peak + up)
    base = up + (K0 + GROUP_OCTAVES)
    value_base, base = base - (value_top.to(tl.int64) << 32), base - (top.to(tl.int64) << 32)
    return (value_base, value_top, base, top, below), sums, counts, fraction


@triton.jit
def _weights(maxima, s, C, bias, present, valueless, added):
    """Returns P of a tile of keys in signed digits, in the keys' order, each key relative to its own group."""
    value_base, value_top, base, top, below = maxima
    base = tl.where(valueless[None, :] != 0, base[:, None], value_base[:, None])
    high, low = group_p16(s, C, exp_offsets(base, bias, present), added)
    return natural_order(high), natural_order(low)


@triton.jit
def _add_group_sums(l, high, low, valueless):
    """Adds P of the keys with a value to the first eight columns of l [BM, 16], and of the others to the last eight."""
    of_others = (tl.arange(0, 16) >= 8).to(tl.int32)
    group = (valueless[:, None] == of_others[None, :]).to(tl.int8)
    high_sums = tl.dot(high, group, out_dtype=tl.int32)
    return l + tl.dot(low, group, high_sums * 256, out_dtype=tl.int32)


@triton.jit
def _counted(counts, valueless):
    keys, without = counts
    return keys + valueless.shape[0], without + tl.sum(valueless, 0)


@triton.jit
def _step(state, s, C, bias, present, groups, v, PLAIN: tl.constexpr):
    maxima, sums, counts, fraction = state
    acc_high, acc_low, l, v_sums = sums
    of_columns, of_keys, added = groups
    high, low = _weights(maxima, s, C, bias, present, of_columns, added)
    l = _add_group_sums(l, high, low, of_keys)
    acc_high = tl.dot(high, v, acc_high, out_dtype=tl.int32)
    acc_low = tl.dot(low, v, acc_low, out_dtype=tl.int32)
    sums = acc_high, acc_low, l, add_value_sums(v_sums, v)
    return maxima, sums, _counted(counts, of_keys), fraction


@triton.jit
def _step_of_many(state, s, C, bias, present, groups, v, PLAIN: tl.constexpr):
    maxima, sums, counts, fraction = state
    acc, l, v_sums = sums
    of_columns, of_keys, added = groups
    high, low = _weights(maxima, s, C, bias, present, of_columns, added)
    l += _add_group_sums(tl.zeros(l.shape, tl.int32), high, low, of_keys).to(tl.int64)
    product = tl.dot(high, v, out_dtype=tl.int32) * 256
    acc += tl.dot(low, v, product, out_dtype=tl.int32).to(tl.int64)
    return maxima, (acc, l, add_value_sums(v_sums, v)), _counted(counts, of_keys), fraction


@triton.jit
def _merged(sums, depth, fraction):
    """floor(sums * 2^fraction / 2^depth), int64; 0 from FAR octaves on."""
    down = tl.minimum(depth, FAR).to(tl.int64)
    return tl.where(depth < FAR, (sums << fraction.to(tl.int64)) >> down, 0)


@triton.jit
def _rounded(maxima, acc, l, v_sums, fraction):
    """The result of rows. acc: less 2^15 * sum(V); l [BM, 16] with the sums of both groups, int64."""
    value_base, value_top, base, other_top, below = maxima
    top = tl.maximum(value_top, other_top)
    depth = tl.where(tl.arange(0, 16)[None, :] < 8, (top - value_top)[:, None], (top - other_top)[:, None])
    l = tl.sum(_merged(l, depth, fraction), 1) >> 3  # eight equal columns of either group
    gap = tl.where(value_top == UNSET, 0, tl.minimum(top - value_top, MAX_GAP))
    level = ((top + OUTPUT_SHIFT - fraction).to(tl.int64) << 32) - _unsigned(below)
    acc += (tl.max(v_sums, 0).to(tl.int64) << 15)[None, :]
    acc = ((acc << fraction.to(tl.int64)) + HALF) >> OUTPUT_SHIFT
    return acc, ((l + HALF) >> OUTPUT_SHIFT).to(tl.int32), level, gap


@triton.jit
def _keys_of_columns(counts):
    """Returns how many keys the columns of l have summed, [1, 16]."""
    keys, without = counts
    return tl.where(tl.arange(0, 16) < 8, keys - without, without)[None, :]


@triton.jit
def _result(state):
    maxima, sums, counts, fraction = state
    acc_high, acc_low, l, v_sums = sums
    l = _unsigned(l + (_keys_of_columns(counts) << 15))
    return _rounded(maxima, (acc_high.to(tl.int64) << 8) + acc_low.to(tl.int64), l, v_sums, fraction)


@triton.jit
def _result_of_many(state):
    maxima, sums, counts, fraction = state
    acc, l, v_sums = sums
    return _rounded(maxima, acc, l + (_keys_of_columns(counts).to(tl.int64) << 15), v_sums, fraction)


STEPS = make_steps(_initial, _row_max, _after_first_pass, _step, _result, None, groups=True)
STEPS_OF_MANY_KEYS = make_steps(
    _initial_of_many, _row_max, _after_first_pass, _step_of_many, _result_of_many, None, groups=True
)


def steps_for(problem: Problem) -> Steps:
    """Returns the steps whose sums hold the problem's keys."""
    return STEPS if problem.k.shape[2] <= exp.MAX_KEYS else STEPS_OF_MANY_KEYS


@triton.jit
def _valueless_kernel(v: View, words: View, keys, DV: tl.constexpr, BDV: tl.constexpr, BATCH_FIRST: tl.constexpr):
    """Finds the keys of 128 whose V codes are all 0."""
    batch, block_of_keys, head = tl.program_id(2), tl.program_id(0), tl.program_id(1)
    if BATCH_FIRST:
        batch, block_of_keys = block_of_keys, batch
    rows = block_of_keys * 128 + tl.arange(0, 128)
    channels = tl.arange(0, BDV)
    base = v.ptr + batch.to(tl.int64) * v.b + head.to(tl.int64) * v.h
    inside = (rows[:, None] < keys) & (channels[None, :] < DV)
    x = tl.load(base + rows[:, None] * v.n + channels[None, :] * v.d, mask=inside, other=0)
    zero = 1 - tl.max((x != 0).to(tl.int32), 1)
    bits = tl.sum(tl.reshape(zero, [4, 32]) << tl.arange(0, 32)[None, :], 1)
    to = words.ptr + batch.to(tl.int64) * words.b + head.to(tl.int64) * words.h
    tl.store(to + block_of_keys * 4 + tl.arange(0, 4), bits)


def valueless_launch(problem: Problem) -> tuple[TritonLaunch, View]:
    """Returns the launch that finds the keys without a value, and their bits."""
    v = problem.v.data
    batch, heads, keys, d = v.shape
    words = empty_valueless(v)
    programs, batch_first = grid(batch, heads, words.shape[3] // 4)
    arguments = dict(
        v=data_view(v), words=data_view(words), keys=keys, DV=d, BDV=triton.next_power_of_2(d), BATCH_FIRST=batch_first
    )
    return TritonLaunch(_valueless_kernel, programs, arguments), view(words)
