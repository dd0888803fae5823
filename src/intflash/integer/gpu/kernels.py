"""The operations of a program but attention as Triton kernels, with the bits of docs/numerics.md, section 4.

Sizes of one image are compile-time constants, so that divisions by them are products; the batch is not. A kernel
stands above the function that makes its launch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.cuda.program import multiprocessors
from intflash.backends.triton.launch import TritonLaunch
from intflash.integer.program import Buffer, Linear
from intflash.numerics import rsqrt
from intflash.numerics.triton import PTX, ROUND_BITS

ROOT_BITS = tl.constexpr(rsqrt.TABLE_BITS)
LARGEST_ROOT = tl.constexpr(rsqrt.LARGEST)
# The upper word of $1 * $2 + $3. ptxas fuses this pair, and no other form, into one IMAD.WIDE.
_HIGH_PTX = tl.constexpr(
    "{.reg .u32 lo, bl, bh; mov.b64 {bl, bh}, $3; mad.lo.cc.s32 lo, $1, $2, bl; madc.hi.s32 $0, $1, $2, bh;}"
)
_CODE_BLOCK = 4096  # elements of a program of the elementwise kernels


@triton.jit
def requantized(acc, multiplier, offset, SHIFT: tl.constexpr):
    """(acc * multiplier + offset) >> SHIFT: int32 where SHIFT >= 32, else int64. |acc * multiplier + offset| < 2^63."""
    if SHIFT >= 32:
        if PTX:
            acc, multiplier = tl.broadcast(acc, multiplier)
            acc, offset = tl.broadcast(acc, offset)
            high = tl.inline_asm_elementwise(
                _HIGH_PTX, "=r,r,r,l", [acc, multiplier, offset], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            high = ((acc.to(tl.int64) * multiplier.to(tl.int64) + offset) >> 32).to(tl.int32)
        return high >> (SHIFT - 32)
    else:
        return (acc.to(tl.int64) * multiplier.to(tl.int64) + offset) >> SHIFT


@triton.jit
def multiply_high(a, b):
    """floor(a * b / 2^32) of int32 values, int32."""
    return ((a.to(tl.int64) * b.to(tl.int64)) >> 32).to(tl.int32)


@triton.jit
def floor_div(x, D: tl.constexpr):
    """(floor(x / D), the remainder) for D > 0; `//` may truncate."""
    q = x // D
    r = x - q * D
    q = tl.where(r < 0, q - 1, q)
    return q, tl.where(r < 0, r + D, r)


@triton.jit
def leading_zeros(x):
    """Of int64 values x >= 1, int32."""
    if PTX:
        return tl.inline_asm_elementwise("clz.b64 $0, $1;", "=r,l", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        n = tl.zeros_like(x).to(tl.int32)
        for i in tl.static_range(6):
            small = (x >> (64 - (32 >> i))) == 0
            n = tl.where(small, n + (32 >> i), n)
            x = tl.where(small, x << (32 >> i), x)
        return n


# --- Patches


@triton.jit
def _pixel_codes(x, inverse, zero_point):
    """clamp(round_half_even(x * inverse) + zero_point, -128, 127) of floats; NaN is 127, or -128 with a sign bit."""
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    if PTX:
        # 1.5 * 2^23 moves the rounded integer into the low bits; larger values stay ordered as integers
        y = tl.fma(x, inverse, tl.full(x.shape, 12582912.0, tl.float32)).to(tl.int32, bitcast=True)
        y = tl.minimum(tl.maximum(y, ROUND_BITS - 1024), ROUND_BITS + 1024) - ROUND_BITS
    else:  # the interpreter's fma rounds twice; 24 x 24 bits are exact in float64
        y = x.to(tl.float64) * inverse
        y = tl.minimum(tl.maximum(y, -1024.0), 1024.0) + 6755399441055744.0
        y = y.to(tl.int64, bitcast=True).to(tl.int32)
    y += zero_point
    y = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, tl.where(bits < 0, -128, 127), y)
    return tl.minimum(tl.maximum(y, -128), 127).to(tl.int8)


@triton.jit
def _patches_kernel(
    image, out, inverse, zero_point, count,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    SIZE: tl.constexpr = CHANNELS * HEIGHT * WIDTH
    COLUMNS: tl.constexpr = CHANNELS * PH * PW
    ACROSS: tl.constexpr = WIDTH // PW
    keep = at < count
    batch = at // SIZE
    rest = (at - batch * SIZE).to(tl.int32)
    row = rest // COLUMNS
    column = rest - row * COLUMNS
    i = row // ACROSS
    j = row - i * ACROSS
    c = column // (PH * PW)
    pixel = column - c * (PH * PW)
    a = pixel // PW
    b = pixel - a * PW
    x = tl.load(image + batch * SIZE + (c * HEIGHT + i * PH + a) * WIDTH + j * PW + b, mask=keep, other=0)
    if x.dtype == tl.uint8:
        code = (x.to(tl.int32) - 128).to(tl.int8)
    else:
        code = _pixel_codes(x, inverse, zero_point)
    tl.store(out + at, code, mask=keep)


def patches_launch(image: Tensor, out: Tensor, patch: tuple[int, int], inverse: float, zero_point: int) -> TritonLaunch:
    """Codes of the patches of images ``[B, channels, H, W]``, contiguous; inverse: float32(1) / the codes' scale."""
    _, channels, height, width = image.shape
    count = out.numel()
    arguments = dict(
        image=image, out=out, inverse=inverse, zero_point=zero_point, count=count, CHANNELS=channels, HEIGHT=height,
        WIDTH=width, PH=patch[0], PW=patch[1], BLOCK=_CODE_BLOCK // 4,
    )  # fmt: skip
    return TritonLaunch(_patches_kernel, (triton.cdiv(count, _CODE_BLOCK // 4),), arguments)


# --- Embedding


@triton.jit
def _embedding_kernel(
    indices, tables, rows, out, count, ROWS: tl.constexpr, CHANNELS: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDE)
    keep = (m < count)[:, None] & (c < CHANNELS)[None, :]
    total = tl.zeros([BLOCK, WIDE], tl.int32)  # at most 16 summands of 24 bits
    for i in tl.static_range(len(tables)):
        index = tl.load(indices[i] + m, mask=m < count, other=0).to(tl.int64)
        total += tl.load(tables[i] + index[:, None] * CHANNELS + c[None, :], mask=keep, other=0).to(tl.int32)
    if rows is not None:
        row = m - m // ROWS * ROWS
        total += tl.load(rows + row[:, None] * CHANNELS + c[None, :], mask=keep, other=0).to(tl.int32)
    total = tl.minimum(tl.maximum(total, LOW), HIGH)
    tl.store(out + m[:, None] * CHANNELS + c[None, :], total.to(out.dtype.element_ty), mask=keep)


def embedding_launch(
    indices: tuple[Tensor, ...], tables: tuple[Tensor, ...], rows: Tensor | None, out: Tensor, limits: tuple[int, int]
) -> TritonLaunch:
    """The saturated sum of a row of each table and of constant rows; out ``[B, rows, channels]``."""
    batch, count, channels = out.shape
    wide = triton.next_power_of_2(channels)
    block = max(1, _CODE_BLOCK // wide)
    arguments = dict(
        indices=indices, tables=tables, rows=rows, out=out, count=batch * count, ROWS=count, CHANNELS=channels,
        LOW=limits[0], HIGH=limits[1], BLOCK=block, WIDE=wide,
    )  # fmt: skip
    return TritonLaunch(_embedding_kernel, (triton.cdiv(batch * count, block),), arguments)


# --- LayerNorm


@triton.jit
def newton_step(root, n):
    u = (((root * root) >> 32) * n) >> 32  # 2^28 at the root
    return (root * ((3 << 28) - u)) >> 29


@triton.jit
def _layer_norm_kernel(
    x, multiplier, bias, out, load_rows, roots, count, eps,
    SHIFT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, IN_ROWS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of CHANNELS = PARTS * the channels of x."""
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDE)
    keep = (m < count)[:, None] & (c < CHANNELS)[None, :]
    if load_rows is None:
        at = m[:, None] * CHANNELS + c[None, :]
    else:
        OF_PART: tl.constexpr = CHANNELS // PARTS
        batch = m // ROWS
        row = (m - batch * ROWS).to(tl.int32)
        part = c // OF_PART
        source = tl.load(load_rows + row[:, None] * PARTS + part[None, :], mask=keep, other=0)
        at = (batch[:, None] * IN_ROWS + source) * OF_PART + (c - part * OF_PART)[None, :]
    value = tl.load(x + at, mask=keep, other=0)
    NARROW: tl.constexpr = value.dtype != tl.int32
    value = value.to(tl.int32)
    if NARROW:
        total = tl.sum(value, 1).to(tl.int64)  # 2^15 * 2^14
        squares = tl.sum((value * value).to(tl.int64), 1)
    else:
        total = tl.sum(value.to(tl.int64), 1)
        squares = tl.sum(value.to(tl.int64) * value.to(tl.int64), 1)
    q, r = floor_div(total, CHANNELS)
    e = squares - 2 * q * total + CHANNELS * q * q - (r * r) // CHANNELS + eps
    h = leading_zeros(e) >> 1
    n = ((e << (2 * h).to(tl.int64)) >> 32) & 0xFFFFFFFF
    root = tl.load(roots + ((n >> ROOT_BITS) - 64))
    root = newton_step(newton_step(root, n), n)
    root = tl.minimum(root, LARGEST_ROOT).to(tl.int32)
    f = h - 1
    p = ((r << f.to(tl.int64)) // CHANNELS).to(tl.int32)
    t = ((value - q.to(tl.int32)[:, None]) << f[:, None]) - p[:, None]
    z = multiply_high(t, root[:, None])
    factor = tl.load(multiplier + c, mask=c < CHANNELS, other=0)
    offset = tl.load(bias + c, mask=c < CHANNELS, other=0)
    y = (multiply_high(z, factor[None, :]) + offset[None, :]) >> SHIFT
    y = tl.minimum(tl.maximum(y, LOW), HIGH)
    tl.store(out + m[:, None] * CHANNELS + c[None, :], y.to(out.dtype.element_ty), mask=keep)


@functools.cache
def roots(device: torch.device) -> Tensor:
    """The table of the reciprocal square root."""
    return torch.tensor(rsqrt.TABLE, dtype=torch.int64, device=device)


def layer_norm_launch(
    x: Tensor, multiplier: Tensor, bias: Tensor, out: Tensor, load_rows: Tensor | None, shift: int, eps: int,
    limits: tuple[int, int],
) -> TritonLaunch:  # fmt: skip
    """LayerNorm of x ``[B, rows, channels]`` to out ``[B, rows of out, parts * channels]``."""
    batch, rows, channels = out.shape
    wide = triton.next_power_of_2(channels)
    block = max(1, 2048 // wide)
    arguments = dict(
        x=x, multiplier=multiplier, bias=bias, out=out, load_rows=load_rows, roots=roots(x.device),
        count=batch * rows, eps=eps, SHIFT=shift, LOW=limits[0], HIGH=limits[1], IN_ROWS=x.shape[1], ROWS=rows,
        PARTS=1 if load_rows is None else load_rows.shape[1], CHANNELS=channels, BLOCK=block, WIDE=wide,
    )  # fmt: skip
    return TritonLaunch(
        _layer_norm_kernel, (triton.cdiv(batch * rows, block),), arguments, warps=4 if wide <= 4096 else 8
    )


# --- Linear


@triton.jit
def _linear_kernel(
    x, weight, bias, multiplier, table, residual, store_rows, out, count,
    N: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, OUT_ROWS: tl.constexpr, CONSTANT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of BM x BN of x weight^T and its epilogue.

    multiplier: None for accumulators. table: of an activation, whose index is clamped to [LOW, HIGH].
    store_rows: where the ROWS rows of an image are among OUT_ROWS. CONSTANT: all images have the same residual.
    """
    NN: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    m = (tile // NN).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tile % NN) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + tl.where(m < count, m, 0)[:, None] * K + k[None, :]
    w_at = weight + tl.where(n < N, n, 0)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.int32)
    for first in range(0, K, BK):
        if K % BK == 0:
            a, b = tl.load(x_at), tl.load(w_at)
        else:
            present = k < K - first
            a = tl.load(x_at, mask=present[None, :], other=0)
            b = tl.load(w_at, mask=present[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        x_at += BK
        w_at += BK
    offset = tl.load(bias + n, mask=n < N, other=0)
    keep = (m < count)[:, None] & (n < N)[None, :]
    row = m
    if store_rows is not None or CONSTANT:
        image = m // ROWS
        row = m - image * ROWS
        if store_rows is not None:
            row = tl.load(store_rows + row, mask=m < count, other=0).to(tl.int64)
        fixed = row[:, None] * N + n[None, :]
        row += image * OUT_ROWS
    at = row[:, None] * N + n[None, :]
    if multiplier is None:
        y = acc + offset[None, :]
    else:
        factor = tl.load(multiplier + n, mask=n < N, other=0)
        wide = offset.to(tl.int64) * factor.to(tl.int64) + (1 << (SHIFT - 1))
        y = requantized(acc, factor[None, :], wide[None, :], SHIFT)
        if residual is not None:
            y += tl.load(residual + (fixed if CONSTANT else at), mask=keep, other=0)
        y = tl.minimum(tl.maximum(y, LOW), HIGH)
        if table is not None:
            y = tl.load(table + (y.to(tl.int32) - LOW))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=keep)


class Tile(NamedTuple):
    """A CTA's part of a product: rows, columns, depth of a step, warps, stages of loads in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(count: int, n: int, k: int, epilogue: str, processors: int) -> Tile:
    """The tile of a product of `count` rows: as large as keeps all multiprocessors busy and the registers hold."""
    depth = 128 if k >= 128 else max(32, triton.next_power_of_2(k))
    if triton.knobs.runtime.interpret:
        return Tile(64, 64, depth, 4, 2)
    largest = Tile(128, 256, depth, 8, 3) if epilogue == "codes" else Tile(128, 128, depth, 8, 4)
    for tile in (largest, Tile(128, 128, depth, 8, 4), Tile(64, 128, depth, 4, 4)):
        if triton.cdiv(count, tile.rows) * triton.cdiv(n, tile.columns) >= processors:
            return tile
    return Tile(64, 64, depth, 4, 4) if count > 32 else Tile(32, 32, depth, 4, 4)


def linear_launch(
    op: Linear, x: Tensor, weight: Tensor, bias: Tensor, multiplier: Tensor | None, table: Tensor | None,
    residual: Tensor | None, store_rows: Tensor | None, out: Tensor, buffer: Buffer, tile: Tile | None = None,
) -> TritonLaunch:  # fmt: skip
    """A linear of x ``[M, K]`` to out ``[images, rows, N]``, whose buffer of one image is given.

    A constant residual has no batch axis.
    """
    (n, k), m = weight.shape, len(x)
    tile = tile or tile_of(m, n, k, op.epilogue, multiprocessors(x.device))
    low, high = buffer.limits
    if op.epilogue == "table":
        low, high = -(1 << (op.bits - 1)), (1 << (op.bits - 1)) - 1
    images = len(out)
    constant = residual is not None and residual.dim() == 2
    arguments = dict(
        x=x, weight=weight, bias=bias, multiplier=multiplier, table=table, residual=residual, store_rows=store_rows,
        out=out, count=m, N=n, K=k, SHIFT=op.shift, LOW=low + op.symmetric, HIGH=high, ROWS=m // images,
        OUT_ROWS=out[0].numel() // n, CONSTANT=constant, BM=tile.rows, BN=tile.columns, BK=tile.depth,
    )  # fmt: skip
    grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
    return TritonLaunch(_linear_kernel, grid, arguments, tile.warps, tile.stages)


# --- Pool


@triton.jit
def _pool_kernel(
    x, out, multiplier, ROWS: tl.constexpr, FIRST: tl.constexpr, STOP: tl.constexpr, CHANNELS: tl.constexpr,
    SHIFT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros([WIDE], tl.int32)
    for first in range(FIRST, STOP, BLOCK):
        row = first + tl.arange(0, BLOCK)
        keep = (row < STOP)[:, None] & (c < CHANNELS)[None, :]
        values = tl.load(x + (batch * ROWS + row[:, None]) * CHANNELS + c[None, :], mask=keep, other=0)
        total += tl.sum(values.to(tl.int32), 0)
    y = (total.to(tl.int64) * tl.load(multiplier).to(tl.int64) + (1 << (SHIFT - 1))) >> SHIFT
    y = tl.minimum(tl.maximum(y, LOW), HIGH)
    tl.store(out + batch * CHANNELS + c, y.to(out.dtype.element_ty), mask=c < CHANNELS)


def pool_launch(
    x: Tensor, out: Tensor, first: int, stop: int, multiplier: Tensor, shift: int, limits: tuple[int, int]
) -> TritonLaunch:
    """The requantized sum of rows of x ``[B, rows, channels]``; multiplier: an int32 tensor of one element."""
    batch, rows, channels = x.shape
    wide = min(64, triton.next_power_of_2(channels))
    arguments = dict(
        x=x, out=out, multiplier=multiplier, ROWS=rows, FIRST=first, STOP=stop, CHANNELS=channels, SHIFT=shift,
        LOW=limits[0], HIGH=limits[1], BLOCK=64, WIDE=wide,
    )  # fmt: skip
    return TritonLaunch(_pool_kernel, (batch, triton.cdiv(channels, wide)), arguments)


# --- Keys that a padding mask leaves


@triton.jit
def _key_order_kernel(keep, order, counts, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    present = tl.load(keep + batch * KEYS + at, mask=at < KEYS, other=0).to(tl.int32)
    place = tl.cumsum(present, 0) - present
    tl.store(order + batch * KEYS + place, at, mask=present != 0)
    tl.store(counts + batch, tl.sum(present, 0))


MOST_KEYS = 8192  # of one program
KEY_BLOCK = 128  # keys that a program gathers


def key_order_launch(keep: Tensor, order: Tensor, counts: Tensor) -> TritonLaunch:
    """The keys of each sequence that a mask ``[B, N]`` keeps, in order, and how many: int32 ``[B, N]`` and ``[B]``."""
    batch, keys = keep.shape
    arguments = dict(
        keep=keep.view(torch.uint8), order=order, counts=counts, KEYS=keys, BLOCK=triton.next_power_of_2(keys)
    )
    return TritonLaunch(_key_order_kernel, (batch,), arguments)


@triton.jit
def _gather_keys_kernel(
    k, v, order, counts, k_out, v_out, batch_stride, token_stride, head_stride,
    KEYS: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDE)
    exists = j < tl.load(counts + batch)
    source = tl.load(order + batch * KEYS + j, mask=exists, other=0)
    keep = exists[:, None] & (d < D)[None, :]
    at = batch * batch_stride + head * head_stride + source[:, None] * token_stride + d[None, :]
    row = (batch * HEADS + head) * KEYS + j
    tl.store(k_out + row[:, None] * D + d[None, :], tl.load(k + at, mask=keep, other=0), mask=keep)
    column = ((batch * HEADS + head) * D + d) * PADDED
    values = tl.trans(tl.load(v + at, mask=keep, other=0))
    tl.store(v_out + column[:, None] + j[None, :], values, mask=(d < D)[:, None])  # PADDED is a multiple of BLOCK


def gather_keys_launch(
    k: Tensor, v: Tensor, order: Tensor, counts: Tensor, k_out: Tensor, v_out: Tensor
) -> TritonLaunch:
    """The kept keys and values side by side.

    Args:
        k, v: codes ``[B, heads, N, D]`` of the same strides, contiguous along D.
        k_out: ``[B, heads, N, D]``. What follows a sequence's last key is not written.
        v_out: ``[B, heads, D, N padded to a multiple of KEY_BLOCK]``, zeros after the last key.
    """
    batch, heads, keys, d = k.shape
    arguments = dict(
        k=k, v=v, order=order, counts=counts, k_out=k_out, v_out=v_out, batch_stride=k.stride(0),
        token_stride=k.stride(2), head_stride=k.stride(1), KEYS=keys, PADDED=v_out.shape[3], HEADS=heads, D=d,
        BLOCK=KEY_BLOCK, WIDE=triton.next_power_of_2(d),
    )  # fmt: skip
    return TritonLaunch(_gather_keys_kernel, (batch, heads, triton.cdiv(keys, KEY_BLOCK)), arguments, warps=8)
