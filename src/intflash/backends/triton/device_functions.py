"""Device functions that all attention kernels share: a program's position, loads, masks, and the order of keys.

Of every 16 keys, lane q of a quad holds keys 2q, 2q+1, 2q+8, 2q+9 in the score accumulators of a tensor-core product,
while the left operand of the next product needs keys 4q to 4q+3 there. So the rows of K are loaded in the order
`permuted_keys`, and `natural_order` restores the order of P's columns. For the compiler that is a reshape; the machine
code has no shuffle after_first_pass the two products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu.tensors import view
from intflash.numerics import groups

ROUNDED_KEYS = tl.constexpr(groups.ROUNDED_KEYS)
HALF_OF_P24 = tl.constexpr(1 << (groups.P_FRACTION_BITS - 1))


class Masks(NamedTuple):
    """Masks and bias, each in its own broadcast shape (stride 0 where it is 1).

    Attributes:
        bias: int32 View or None.
        keep: uint8 View or None.
        causal: key j is present for row i if j <= i + causal (used where the kernel is causal). For packed sequences of
            "bottom_right" each adds its number of keys less its number of queries, to `window_start` too.
        window_start: key j is present for row i only if j >= i + window_start; None without a window.
        bias_period, bias_inverse, keep_period, keep_inverse: where the mask repeats over the batch, the two numbers of
            `repeat_period`; None where it has one row or as many as the batch.
        end: None. Triton 3.6 drops the constants inside nested tuples, such as a stride of 1, once the tuple is passed
            to a function that branches, unless the last element of the outer tuple is a constant. So every tuple of
            Views that a kernel takes ends with None.
    """

    bias: object
    keep: object
    causal: object
    bias_period: object = None
    bias_inverse: object = None
    keep_period: object = None
    keep_inverse: object = None
    window_start: object = None
    end: None = None


class Views(NamedTuple):
    """Views of Q, K and V, or None. `end`: see `Masks`."""

    q: object
    k: object
    v: object
    end: None = None


def make_masks(
    bias: Tensor | None, keep: Tensor | None, causal: int | None, batch: int, window_start: int | None = None
) -> Masks:
    """Returns the masks of a problem of `batch` batches as kernels take them; bias ``[period, ...]``, keep bool."""
    views = (None if x is None else view(x) for x in (bias, None if keep is None else keep.view(torch.uint8)))
    periods = (repeat_period(1 if x is None else x.shape[0], batch) for x in (bias, keep))
    return Masks(*views, causal, *(number for pair in periods for number in pair), window_start)


def repeat_period(period: int, batch: int) -> tuple[int | None, int | None]:
    """Returns 2 * period + 1 and floor((2^63 - 1) / period) made odd, with which `batch_row` divides, or None where
    batch b uses row b or the only row. Both are odd because Triton compiles a kernel again for multiples of 16.
    """
    if period in (1, batch):
        return None, None
    return 2 * period + 1, ((1 << 63) - 1) // period | 1


class LaunchConstants(NamedTuple):
    """The compile-time constants of a launch.

    Attributes:
        group: query heads per key head.
        block: keys per score constant.
        channels: number of output constants per head.
        all_visible: every tile of keys is complete and visible to every row.
        v_padded: V may be read past its last key.
        bias_step: T of a bias of 1, of methods without `Hooks`.
    """

    group: int
    block: int
    channels: int
    all_visible: bool = False
    v_padded: bool = False
    bias_step: int = 0


class Position(NamedTuple):
    """A program's position in the problem: batch, head, first row, and the range of its sequence."""

    b: object
    h: object
    row: object
    q_start: object
    q_count: object
    k_start: object
    k_count: object


@triton.jit
def permuted_keys(BN: tl.constexpr):
    """Returns the keys of a score tile's columns: column i holds key i with bits 3, 2, 1 of its index rotated to 1,
    3, 2.
    """
    i = tl.arange(0, BN)
    return (i & ~14) | ((i & 6) << 1) | ((i & 8) >> 2)


@triton.jit
def natural_order(p):
    """Reorders the columns of a tile over `permuted_keys` into the order of the keys."""
    BM: tl.constexpr = p.shape[0]
    BN: tl.constexpr = p.shape[1]
    p = tl.reshape(p, [BM, BN // 16, 2, 4, 2])
    p = tl.permute(p, [0, 1, 3, 2, 4])
    return tl.reshape(p, [BM, BN])


@triton.jit
def load_rows(x, base, rows, count, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Loads [rows, BD] of a View from pointer `base`, with 0 past `count` rows or D channels."""
    channels = tl.arange(0, BD)
    ptrs = base + rows[:, None] * x.n + channels[None, :] * x.d
    if MASKED:
        if D == BD:
            return tl.load(ptrs, mask=rows[:, None] < count, other=0)
        else:
            return tl.load(ptrs, mask=(rows[:, None] < count) & (channels[None, :] < D), other=0)
    elif D == BD:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=channels[None, :] < D, other=0)


@triton.jit
def head_base(x, b, h, start):
    """Returns the pointer to the first token of a head, in 64-bit arithmetic."""
    return x.ptr + b.to(tl.int64) * x.b + h.to(tl.int64) * x.h + start.to(tl.int64) * x.n


@triton.jit
def batch_row(b, period, inverse):
    """Returns b modulo the period of `repeat_period`, int64, without a division instruction, which a GPU computes
    through floats.

    For b < 2^31 the product with the inverse is the quotient or one less.
    """
    b = b.to(tl.int64)
    if period is None:
        return b
    else:
        rows = (period >> 1).to(tl.int64)
        rest = b - tl.umulhi((2 * b).to(tl.uint64), inverse.to(tl.uint64)).to(tl.int64) * rows
        return tl.where(rest >= rows, rest - rows, rest)


@triton.jit
def bias_tile(masks: Masks, pos: Position, rows, keys, BOUNDED: tl.constexpr):
    """Loads a tile of the bias, or returns None where there is none."""
    bias = None
    if masks.bias is not None:
        batch = batch_row(pos.b, masks.bias_period, masks.bias_inverse)
        bias = mask_tile(masks.bias, batch, pos, rows, keys, BOUNDED)
    return bias


@triton.jit
def bias_exponents(bias, STEP: tl.constexpr):
    """Returns T of a tile of the bias, int64, or None where there is none. STEP: T of a bias of 1."""
    t = None
    if bias is not None:
        t = bias.to(tl.int64) * STEP
    return t


@triton.jit
def mask_tile(mask, batch, pos: Position, rows, keys, BOUNDED: tl.constexpr):
    """Loads a tile of a bias or keep mask from its row `batch` (int64). Rows and keys past their counts read 0."""
    base = mask.ptr + batch * mask.b + pos.h.to(tl.int64) * mask.h
    base += pos.q_start.to(tl.int64) * mask.n + pos.k_start.to(tl.int64) * mask.d
    ptrs = base + rows[:, None] * mask.n + keys[None, :] * mask.d
    if BOUNDED:
        inside = (rows[:, None] < pos.q_count) & (keys[None, :] < pos.k_count)
    else:
        inside = (rows[:, None] < pos.q_count) & (keys[None, :] >= 0)
    return tl.load(ptrs, mask=inside, other=0)


@triton.jit
def present_keys(
    masks: Masks, pos: Position, rows, keys, bias, causal, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr,
    window_start=None,
):  # fmt: skip
    """Returns which keys are present, bool [rows, keys], or None where all are. Only the masks that can remove a key
    are tested.
    """
    present = None
    if BOUNDED:
        present = (keys < pos.k_count)[None, :]
    if CAUSAL:
        seen = keys[None, :] <= rows[:, None] + causal
        present = seen if present is None else present & seen
    if window_start is not None:
        in_window = keys[None, :] >= rows[:, None] + window_start
        present = in_window if present is None else present & in_window
    if masks.keep is not None:
        batch = batch_row(pos.b, masks.keep_period, masks.keep_inverse)
        kept = mask_tile(masks.keep, batch, pos, rows, keys, BOUNDED) != 0
        present = kept if present is None else present & kept
    if bias is not None:
        there = bias != -2147483648
        present = there if present is None else present & there
    return present


@triton.jit
def valueless_keys(valueless, pos: Position, keys, BOUNDED: tl.constexpr, GROUP: tl.constexpr):
    """Returns 1 for keys whose V codes are all 0, else 0, int32 [keys]. Keys past their count have 0."""
    at = pos.k_start + keys
    words = valueless.ptr + pos.b.to(tl.int64) * valueless.b + (pos.h // GROUP).to(tl.int64) * valueless.h + (at >> 5)
    if BOUNDED:
        word = tl.load(words, mask=keys < pos.k_count, other=0)
    else:
        word = tl.load(words)
    return (word >> (at & 31)) & 1


@triton.jit
def value_groups(zero, present):
    """Returns the present keys with a value, those without (bool [rows or 1, keys]), and whether this tile has any
    without, present or not. zero: of `valueless_keys`.
    """
    without = (zero != 0)[None, :]
    with_value = (zero == 0)[None, :]
    if present is not None:
        without = without & present
        with_value = with_value & present
    return with_value, without, tl.max(zero, 0) != 0


@triton.jit
def _reversed_nibble(x):
    """Returns bits 0 to 3 of x in reverse order."""
    x = ((x & 5) << 1) | ((x >> 1) & 5)
    return ((x & 3) << 2) | ((x >> 2) & 3)


@triton.jit
def key_additions(first, count, BN: tl.constexpr):
    """Returns what is added to p24 of each column of a score tile over `permuted_keys` from key `first` on, a multiple
    of BN, of a sequence of `count` keys: int32 [1, BN], as `numerics.groups.additions`.

    BN is a power of two, at most 128, so that bits 7 to 10 are those of `first`. Bits 0 to 3 are the same in all tiles.
    """
    tl.static_assert(BN <= 128)
    dithered = count > ROUNDED_KEYS
    places = (_reversed_nibble(permuted_keys(BN)) << 4) & tl.where(dithered, 255, 0)
    return places[None, :] + tl.where(dithered, _reversed_nibble(first >> 7), HALF_OF_P24)


@triton.jit
def program_position(
    cu_q, cu_k, sequences, nq, nk, BM: tl.constexpr, BATCH_FIRST: tl.constexpr, REVERSE: tl.constexpr = False
):  # fmt: skip
    """Returns a program's position, without a division, which a GPU computes through floats.

    The grid is (row tiles, heads, batch), so that adjacent programs share keys, or (batch, heads, row tiles) with
    BATCH_FIRST. REVERSE: the first program takes the last position, whose data the previous kernel has left in L2.
    Packed sequences (cu_q not None): row tiles are counted sequence by sequence; past the last one, q_count is 0.
    """
    head = tl.program_id(1)
    zero = head * 0
    if cu_q is None:
        batch, tile = tl.program_id(2), tl.program_id(0)
        if REVERSE:
            head = tl.num_programs(1) - 1 - head
            batch, tile = tl.num_programs(2) - 1 - batch, tl.num_programs(0) - 1 - tile
        if BATCH_FIRST:
            batch, tile = tile, batch
        return Position(batch, head, tile * BM, zero, zero + nq, zero, zero + nk)
    else:
        tile = tl.program_id(0)
        row, q_start, q_count, k_start, k_count = zero, zero, zero, zero, zero
        for i in range(sequences):
            start, stop = tl.load(cu_q + i), tl.load(cu_q + i + 1)
            row_tiles = tl.cdiv(stop - start, BM)
            if (tile >= 0) & (tile < row_tiles):
                row, q_start, q_count = tile * BM, start, stop - start
                k_start = tl.load(cu_k + i)
                k_count = tl.load(cu_k + i + 1) - k_start
            tile -= row_tiles
        return Position(zero, head, row, q_start, q_count, k_start, k_count)
