"""Quantizes float inputs on the device: absolute maxima, scales, and codes, with the keys of V contiguous.

The bits are those of `quant.quantizers.quantize`: one rounding of the exact product x * (1 / s).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu import scales
from intflash.backends.gpu.scales import (
    KEY_PADDING,
    DynamicScales,
    FloatInputs,
    Qkv,
    empty_codes,
    quantized_tensors,
)
from intflash.backends.gpu.tensors import View, data_view, is_dense, view
from intflash.backends.triton.device_functions import Views, head_base, load_rows, program_position
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.numerics.triton import quantize
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import TINY_AMAX

TINY = tl.constexpr(TINY_AMAX)
_ROWS = KEY_PADDING
_FEW = 1 << 22  # in elements of a tensor
# elements and warps of a program: below _FEW, and above it, where bandwidth limits
_BLOCK, _LARGE_BLOCK = (8192, 4), (32768, 8)


@triton.jit
def scale_of_amax(amax):
    """Returns s = amax / 127, and 1 where amax is below 2^-100, whose codes are then 0."""
    return tl.where(amax < TINY, 1.0, tl.div_rn(amax, amax * 0 + 127.0))


@triton.jit
def _add_to_slot(most, amax, finished, scales, slot, programs):
    """Adds a program's maximum to a slot. The last of the slot's programs computes the scale."""
    tl.atomic_max(amax + slot, most.to(tl.int32, bitcast=True), sem="relaxed")
    if tl.atomic_add(finished + slot, 1, sem="acq_rel") == programs - 1:
        whole = tl.atomic_max(amax + slot, 0, sem="acq_rel")
        tl.store(scales + slot, scale_of_amax(whole.to(tl.float32, bitcast=True)))


@triton.jit
def _head_amax(x: View, pos, count, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Returns max|x| over ROWS tokens of a head."""
    base = head_base(x, pos.b, pos.h, pos.q_start)
    tile = load_rows(x, base, pos.row + tl.arange(0, ROWS), count, D, BD, True)
    return tl.max(tl.max(tl.abs(tile.to(tl.float32)), 1), 0)


@triton.jit(do_not_specialize=("batches", "k_first", "v_first"))
def _amax_kernel(
    q: View, k: View, v: View, amax, finished, scales, nq, nk, hq, hk, batches, k_first, v_first,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, ROWS: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """Computes the scales of `DynamicScales`, of any layout: a program takes ROWS tokens of a head of Q, K and V."""
    pos = program_position(None, None, None, nq, nk, ROWS, BATCH_FIRST)
    if (pos.h < hq) & (pos.row < nq):
        slot = (pos.b * hq + pos.h) * Q_HEADS
        programs = tl.cdiv(nq, ROWS) * (1 if Q_HEADS else batches * hq)
        _add_to_slot(_head_amax(q, pos, nq, D, BD, ROWS), amax, finished, scales, slot, programs)
    if (pos.h < hk) & (pos.row < nk):
        tiles = tl.cdiv(nk, ROWS)
        slot = k_first + (pos.b * hk + pos.h) * K_HEADS
        programs = tiles * (1 if K_HEADS else batches * hk)
        _add_to_slot(_head_amax(k, pos, nk, D, BD, ROWS), amax, finished, scales, slot, programs)
        slot = v_first + (pos.b * hk + pos.h) * V_HEADS
        programs = tiles * (1 if V_HEADS else batches * hk)
        _add_to_slot(_head_amax(v, pos, nk, DV, BDV, ROWS), amax, finished, scales, slot, programs)


@triton.jit
def _flat_amax(x, count, i):
    tile = tl.load(x + i, mask=i < count, other=0)
    return tl.max(tl.abs(tile.to(tl.float32)), 0)


@triton.jit
def _flat_amax_kernel(q, k, v, amax, finished, scales, q_count, kv_counts, BLOCK: tl.constexpr):
    """Computes `_amax_kernel`, of one scale per tensor, for dense tensors in any order of axes. Adjacent programs take
    Q, K and V, so that the data that was read last, and is in L2 for the next kernel, belongs to the same heads of all
    three.
    """
    which = tl.program_id(0) % 3
    i = (tl.program_id(0) // 3).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    programs = tl.num_programs(0) // 3
    if which == 0:
        _add_to_slot(_flat_amax(q, q_count, i), amax, finished, scales, which, programs)
    elif which == 1:
        _add_to_slot(_flat_amax(k, kv_counts[0], i), amax, finished, scales, which, programs)
    else:
        _add_to_slot(_flat_amax(v, kv_counts[1], i), amax, finished, scales, which, programs)


@triton.jit
def head_inverse(scale, b, h):
    """Returns 1 / s of a head, rounded once."""
    s = tl.load(scale.ptr + b.to(tl.int64) * scale.b + h.to(tl.int64) * scale.h)
    return tl.div_rn(s * 0 + 1.0, s)


@triton.jit
def _quantize_tile(
    x, codes, scale, pos, count, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr
):
    """Quantizes a tile. PADDED: `codes` has room for all ROWS and receives zeros past `count`; with a bound on
    contiguous keys the compiler would store single bytes.
    """
    rows = pos.row + tl.arange(0, ROWS)
    channels = tl.arange(0, BD)
    tile = load_rows(x, head_base(x, pos.b, pos.h, pos.q_start), rows, count, D, BD, True)
    tile = quantize(tile, head_inverse(scale, pos.b, pos.h))
    ptrs = head_base(codes, pos.b, pos.h, pos.q_start) + rows[:, None] * codes.n + channels[None, :] * codes.d
    if not PADDED:
        tl.store(ptrs, tile, mask=(rows[:, None] < count) & (channels[None, :] < D))
    elif D == BD:
        tl.store(ptrs, tile)
    else:
        tl.store(ptrs, tile, mask=channels[None, :] < D)


@triton.jit
def _quantize_kernel(
    x: Views, codes: Views, scales: Views, nq, nk, hq, hk,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, ROWS: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes the codes of Q, K and V in the layout of each View. Programs take the last heads first, because the
    previous kernel has left those in L2; the codes of the first heads, written last, then stay there.
    """
    pos = program_position(None, None, None, nq, nk, ROWS, BATCH_FIRST, True)
    if (pos.h < hq) & (pos.row < nq):
        _quantize_tile(x.q, codes.q, scales.q, pos, nq, D, BD, ROWS, False)
    if (pos.h < hk) & (pos.row < nk):
        _quantize_tile(x.k, codes.k, scales.k, pos, nk, D, BD, ROWS, False)
        _quantize_tile(x.v, codes.v, scales.v, pos, nk, DV, BDV, ROWS, True)


@triton.jit
def _codes_kernel(
    x: View, codes: View, scale: View, count,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, BATCH_FIRST: tl.constexpr, PER_CHANNEL: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Codes of one tensor in any layout; its scale differs between channels, or between batches, heads and tokens.
    PADDING: `codes` has room for a multiple of as many tokens and receives zeros past `count`, so that whole words of
    contiguous tokens are stored.
    """
    pos = program_position(None, None, None, count, count, ROWS, BATCH_FIRST)
    rows, channels = pos.row + tl.arange(0, ROWS), tl.arange(0, BD)
    base = scale.ptr + pos.b.to(tl.int64) * scale.b + pos.h.to(tl.int64) * scale.h
    if PER_CHANNEL:
        s = tl.load(base + channels * scale.d, mask=channels < D, other=1.0)[None, :]
    else:
        s = tl.load(base + rows * scale.n, mask=rows < count, other=1.0)[:, None]
    inverse = tl.broadcast_to(tl.div_rn(s * 0 + 1.0, s), [ROWS, BD])
    tile = load_rows(x, head_base(x, pos.b, pos.h, pos.q_start), rows, count, D, BD, True)
    ptrs = head_base(codes, pos.b, pos.h, pos.q_start) + rows[:, None] * codes.n + channels[None, :] * codes.d
    end = (count + PADDING - 1) // PADDING * PADDING
    tl.store(ptrs, quantize(tile, inverse), mask=(rows[:, None] < end) & (channels[None, :] < D))


def codes_launch(x: Tensor, scale: Tensor, codes: Tensor, padding: int = 1) -> TritonLaunch:
    """The launch that writes the int8 codes of floats ``[B, H, N, D]`` by rule "exact", 8 bits.

    scale: float32, broadcasts to x, and does not differ between channels and tokens at once; codes: int8 of x's shape,
    with room behind the last token up to a multiple of `padding`, which receives zeros.
    """
    batch, heads, count, d = x.shape
    programs, batch_first = grid(batch, heads, triton.cdiv(count, _ROWS))
    arguments = dict(
        x=data_view(x), codes=data_view(codes), scale=view(scale), count=count, D=d, BD=triton.next_power_of_2(d),
        ROWS=_ROWS, BATCH_FIRST=batch_first, PER_CHANNEL=scale.shape[3] > 1, PADDING=padding,
    )  # fmt: skip
    return TritonLaunch(_codes_kernel, programs, arguments)


def with_scales(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe) -> FloatInputs:
    """Returns the inputs with their static scales, or with those of their absolute maxima, which takes a launch."""
    return scales.with_scales(q, k, v, recipe, amax_launch)


def amax_launch(tensors: Qkv, found: DynamicScales) -> TritonLaunch:
    """Returns the launch that computes `found.scales`."""
    (batch, hq, nq, d), (hk, nk, dv) = tensors.q.shape, tensors.v.shape[1:]
    to = dict(amax=found.amax, finished=found.finished, scales=found.scales)
    if not any(found.per_head) and all(map(is_dense, tensors)):
        counts = [x.numel() for x in tensors]
        block, warps = _BLOCK if max(counts) < _FEW else _LARGE_BLOCK
        arguments = dict(**tensors._asdict(), **to, q_count=counts[0], kv_counts=tuple(counts[1:]), BLOCK=block)
        return TritonLaunch(_flat_amax_kernel, (3 * triton.cdiv(max(counts), block),), arguments, warps)
    programs, batch_first = grid(batch, max(hq, hk), triton.cdiv(max(nq, nk), _ROWS))
    arguments = dict(
        **{name: data_view(x) for name, x in zip("qkv", tensors, strict=True)}, **to, nq=nq, nk=nk, hq=hq, hk=hk,
        batches=batch, k_first=found.first.k, v_first=found.first.v,
        D=d, DV=dv, BD=triton.next_power_of_2(d), BDV=triton.next_power_of_2(dv), ROWS=_ROWS,
        Q_HEADS=int(found.per_head.q), K_HEADS=int(found.per_head.k), V_HEADS=int(found.per_head.v),
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_amax_kernel, programs, arguments)


def quantize_launch(inputs: FloatInputs) -> tuple[TritonLaunch, dict[str, QTensor]]:
    """Returns the launch that writes the codes of Q, K and V, and the quantized tensors by name. V has
    contiguous keys, in rows padded with zeros to _ROWS.
    """
    q, k, v = inputs.tensors
    (batch, hq, nq, d), (hk, nk, dv) = q.shape, v.shape[1:]
    codes = empty_codes(inputs)
    programs, batch_first = grid(batch, max(hq, hk), triton.cdiv(max(nq, nk), _ROWS))
    arguments = dict(
        x=Views(*map(data_view, inputs.tensors)), codes=Views(*map(data_view, codes)),
        scales=Views(*map(view, inputs.scales)), nq=nq, nk=nk, hq=hq, hk=hk,
        D=d, DV=dv, BD=triton.next_power_of_2(d), BDV=triton.next_power_of_2(dv), ROWS=_ROWS,
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_quantize_kernel, programs, arguments), quantized_tensors(inputs, codes)
