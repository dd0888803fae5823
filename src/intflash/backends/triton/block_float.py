"""The steps of `intflash_bfp`, whose P has an exponent per block of keys, and the kernel before them that finds the
keys without a value.

The first pass finds the octaves E and Ev of docs/numerics.md, "An exponent per block of keys", so that the second
merges each block once, with the shift that the definition names. A tile of keys is a block, but for a sequence that is
one block: its tiles share the octaves that the first pass finds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intflash.backends.gpu.constants import empty_valueless
from intflash.backends.gpu.tensors import View, data_view, view
from intflash.backends.triton.device_functions import natural_order
from intflash.backends.triton.intflash_steps import (
    add_value_sums,
    add_wide_sums,
    exp_offsets,
    make_steps,
    offset_row,
    row_sum,
    t_max,
    update_row_max,
)
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.numerics import exp, groups
from intflash.numerics.triton import (
    BLOCK_OCTAVES,
    FAR,
    INT32_MIN,
    K0,
    MAX_GAP,
    NEVER,
    OUTPUT_SHIFT,
    UNSET,
    block_p16,
    octave_above,
)
from intflash.problem import Problem

DIGIT = tl.constexpr(256)
DROPPED = tl.constexpr(-1 << block.ACC_SHIFT)  # clears the bits of acc that are dropped
ONE_BLOCK = tl.constexpr(block.ONE_BLOCK)
HALF = tl.constexpr(1 << (block.OUTPUT_SHIFT - 1))
MANY_KEYS = tl.constexpr(exp.MAX_KEYS)
FRACTION_BITS = tl.constexpr(block.fraction_bits(1))
FRACTION_BITS_OF_MANY_KEYS = tl.constexpr(block.fraction_bits(block.MAX_KEYS))


@triton.jit
def _no_maximum(BM: tl.constexpr):
    return tl.full([BM], NEVER, tl.int64), tl.full([BM], INT32_MIN, tl.int32)


@triton.jit
def _unsigned(x):
    """The int64 of a uint32 in int32."""
    return x.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _initial(BM: tl.constexpr, BDV: tl.constexpr, keys):
    """The maxima of keys with a value and of the others, T and S, whose S become octaves after the first pass; acc, l,
    the fraction bits of both, and the bits of a tile's acc that are kept. below: how far T of the row's origin is below
    a whole octave, a uint32 in int32.
    """
    fraction = tl.where(keys > MANY_KEYS, FRACTION_BITS_OF_MANY_KEYS, FRACTION_BITS)
    peak, score = _no_maximum(BM)
    kept = tl.where(keys <= ONE_BLOCK, -1, DROPPED)
    acc, l, below = tl.zeros([BM, BDV], tl.int64), tl.zeros([BM], tl.int64), tl.zeros([BM], tl.int32)
    return peak, score, peak, score, below, acc, l, fraction, kept


@triton.jit
def _row_max(state, s, C, bias, present, PLAIN: tl.constexpr):
    value_peak, value_score, peak, score, below, acc, l, fraction, kept = state
    with_value, without, some_without = present
    value_peak, value_score = update_row_max(value_peak, value_score, s, C, bias, with_value, PLAIN)
    if some_without:
        peak, score = update_row_max(peak, score, s, C, bias, without, PLAIN)
    return value_peak, value_score, peak, score, below, acc, l, fraction, kept


@triton.jit
def _after_first_pass(state, C, PLAIN: tl.constexpr):
    value_peak, value_score, peak, score, below, acc, l, fraction, kept = state
    value_peak, peak = t_max(value_peak, value_score, C, PLAIN), t_max(peak, score, C, PLAIN)
    origin = tl.where(value_peak == NEVER, peak, value_peak)
    below = tl.where((kept == -1) & (origin != NEVER), -origin, 0).to(tl.int32)
    up = _unsigned(below)
    return value_peak, octave_above(value_peak + up), peak, octave_above(peak + up), below, acc, l, fraction, kept


@triton.jit
def _weights(s, C, bias, keys, below, top, kept, PLAIN: tl.constexpr):
    """Returns the octave of a group of keys, its P in signed digits, in the keys' order, and its sums. top: the largest
    octave of such keys, which a sequence of one block has for all.
    """
    peak, score = _no_maximum(s.shape[0])
    peak, score = update_row_max(peak, score, s, C, bias, keys, PLAIN)
    e = tl.where(kept == -1, top, octave_above(t_max(peak, score, C, PLAIN)))
    base = K0 + BLOCK_OCTAVES + _unsigned(below) - (e.to(tl.int64) << 32)
    rounds = tl.where(kept == -1, 1, 0)
    high, low = block_p16(s, C, exp_offsets(base[:, None], bias, keys), rounds)
    high, low = natural_order(high), natural_order(low)
    sums = add_wide_sums(tl.zeros([s.shape[0], 16], tl.int32), high, low, None)
    return e, high, low, row_sum(sums) + (256 * 128) * s.shape[1]


@triton.jit
def _merged(sums, depth, fraction):
    """floor(sums * 2^fraction / 2^depth), int64, for sums below 2^30; 0 from FAR octaves on."""
    down = tl.minimum(tl.maximum(depth - fraction, 0), 31)
    unit = tl.full(depth.shape, 1, tl.int64) << tl.maximum(fraction - depth, 0).to(tl.int64)
    return (sums >> down).to(tl.int64) * tl.where(depth < FAR, unit, 0)


@triton.jit
def _step(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    value_peak, value_top, peak, other_top, below, acc, l, fraction, kept = state
    with_value, without, some_without = present
    top = tl.maximum(value_top, other_top)
    e, high, low, sums = _weights(s, C, bias, with_value, below, value_top, kept, PLAIN)
    l += _merged(sums, top - e, fraction)
    product = tl.dot(high, v, out_dtype=tl.int32)
    product += offset_row(add_value_sums(tl.zeros([16, v.shape[1]], tl.int32), v))
    product = tl.dot(low, v, product * DIGIT, out_dtype=tl.int32) & kept
    acc += _merged(product, (value_top - e)[:, None], fraction)
    if some_without:
        e, high, low, sums = _weights(s, C, bias, without, below, other_top, kept, PLAIN)
        l += _merged(sums, top - e, fraction)
    return value_peak, value_top, peak, other_top, below, acc, l, fraction, kept


@triton.jit
def _result(state):
    value_peak, value_top, peak, other_top, below, acc, l, fraction, kept = state
    top = tl.maximum(value_top, other_top)
    gap = tl.where(value_top == UNSET, 0, tl.minimum(top - value_top, MAX_GAP))
    level = ((top + OUTPUT_SHIFT - fraction).to(tl.int64) << 32) - _unsigned(below)
    return (acc + HALF) >> OUTPUT_SHIFT, ((l + HALF) >> OUTPUT_SHIFT).to(tl.int32), level, gap


STEPS = make_steps(_initial, _row_max, _after_first_pass, _step, _result, block.BLOCK, blocks=True)


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
