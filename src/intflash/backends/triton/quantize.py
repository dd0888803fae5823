"""Quantizes float inputs on the device: absolute maxima, scales, and codes, with the keys of V contiguous.

The bits are those of `quant.quantizers.quantize`: one rounding of the exact product x * (1 / s).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu import scales
from intflash.backends.gpu.scales import KEY_PADDING, FloatInputs, Qkv, empty_codes, quantized_tensors
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
def _head_amax(x: View, pos, head, count, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Returns max|x| over ROWS tokens of a head."""
    base = head_base(x, pos.b, head, pos.q_start)
    tile = load_rows(x, base, pos.row + tl.arange(0, ROWS), count, D, BD, True)
    return tl.max(tl.max(tl.abs(tile.to(tl.float32)), 1), 0).to(tl.int32, bitcast=True)


@triton.jit
def _amax_kernel(
    q: View, k: View, v: View, amax, nq, nk, hq, hk,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, ROWS: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """Computes amax[0..2]: max|Q|, max|K|, max|V| as the bits of floats >= 0, which are ordered as integers are.
    They must be zero at launch.
    """
    pos = program_position(None, None, None, nq, nk, ROWS, BATCH_FIRST)
    tl.atomic_max(amax, _head_amax(q, pos, tl.minimum(pos.h, hq - 1), nq, D, BD, ROWS), sem="relaxed")
    if pos.h < hk:
        tl.atomic_max(amax + 1, _head_amax(k, pos, pos.h, nk, D, BD, ROWS), sem="relaxed")
        tl.atomic_max(amax + 2, _head_amax(v, pos, pos.h, nk, DV, BDV, ROWS), sem="relaxed")


@triton.jit
def _flat_amax(x, count, i):
    tile = tl.load(x + i, mask=i < count, other=0)
    return tl.max(tl.abs(tile.to(tl.float32)), 0).to(tl.int32, bitcast=True)


@triton.jit
def _flat_amax_kernel(q, k, v, amax, q_count, kv_counts, BLOCK: tl.constexpr):
    """Computes `_amax_kernel` for dense tensors in any order of axes. Adjacent programs take Q, K and V, so that the
    data that was read last, and is in L2 for the next kernel, belongs to the same heads of all three.
    """
    which = tl.program_id(0) % 3
    i = (tl.program_id(0) // 3).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if which == 0:
        tl.atomic_max(amax, _flat_amax(q, q_count, i), sem="relaxed")
    elif which == 1:
        tl.atomic_max(amax + 1, _flat_amax(k, kv_counts[0], i), sem="relaxed")
    else:
        tl.atomic_max(amax + 2, _flat_amax(v, kv_counts[1], i), sem="relaxed")


@triton.jit
def _scales_kernel(amax, scales, COUNT: tl.constexpr):
    """Computes s = amax / 127, and 1 where amax is below 2^-100, whose codes are then 0."""
    i = tl.arange(0, 4)
    a = tl.load(amax + i, mask=i < COUNT, other=0).to(tl.float32, bitcast=True)
    s = tl.where(a < TINY, 1.0, tl.div_rn(a, tl.full([4], 127.0, tl.float32)))
    tl.store(scales + i, s, mask=i < COUNT)


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
    """Writes the codes of K, V and, where `codes` has room for them, of Q, in the layout of each View. Programs
    take the last heads first, because the previous kernel has left those in L2; the codes of the first heads,
    written last, then stay there.
    """
    pos = program_position(None, None, None, nq, nk, ROWS, BATCH_FIRST, True)
    if codes.q is not None:
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
    """Returns the inputs with their static scales, or with those of their absolute maxima, which takes two small
    launches.
    """
    return scales.with_scales(q, k, v, recipe, amax_launches)


def amax_launches(tensors: Qkv, amax: Tensor, scales: Tensor) -> tuple[TritonLaunch, TritonLaunch]:
    (batch, hq, nq, d), (hk, nk, dv) = tensors.q.shape, tensors.v.shape[1:]
    scale = TritonLaunch(_scales_kernel, (1,), dict(amax=amax, scales=scales, COUNT=3))
    if all(map(is_dense, tensors)):
        counts = [x.numel() for x in tensors]
        block, warps = _BLOCK if max(counts) < _FEW else _LARGE_BLOCK
        arguments = dict(**tensors._asdict(), amax=amax, q_count=counts[0], kv_counts=tuple(counts[1:]), BLOCK=block)
        return TritonLaunch(_flat_amax_kernel, (3 * triton.cdiv(max(counts), block),), arguments, warps), scale
    programs, batch_first = grid(batch, max(hq, hk), triton.cdiv(max(nq, nk), _ROWS))
    arguments = dict(
        **{name: data_view(x) for name, x in zip("qkv", tensors, strict=True)}, amax=amax, nq=nq, nk=nk, hq=hq, hk=hk,
        D=d, DV=dv, BD=triton.next_power_of_2(d), BDV=triton.next_power_of_2(dv), ROWS=_ROWS,
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_amax_kernel, programs, arguments), scale


def quantize_launch(inputs: FloatInputs, query: bool = True) -> tuple[TritonLaunch, dict[str, QTensor]]:
    """Returns the launch that writes the codes of K, V and, if `query`, Q, and the quantized tensors by name. V has
    contiguous keys, in rows padded with zeros to _ROWS.
    """
    q, k, v = inputs.tensors
    (batch, hq, nq, d), (hk, nk, dv) = q.shape, v.shape[1:]
    codes = empty_codes(inputs, query)
    tokens, heads = (max(nq, nk), max(hq, hk)) if query else (nk, hk)
    programs, batch_first = grid(batch, heads, triton.cdiv(tokens, _ROWS))
    arguments = dict(
        x=Views(*map(data_view, inputs.tensors)), codes=Views(*(None if x is None else data_view(x) for x in codes)),
        scales=Views(*map(view, inputs.scales)), nq=nq, nk=nk, hq=hq, hk=hk,
        D=d, DV=dv, BD=triton.next_power_of_2(d), BDV=triton.next_power_of_2(dv), ROWS=_ROWS,
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_quantize_kernel, programs, arguments), quantized_tensors(inputs, codes)
