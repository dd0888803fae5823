"""Compares the device functions of `numerics.triton` in the interpreter with Python integers and prints the number
of differences as JSON.
"""

from __future__ import annotations

import json

import interpreter  # noqa: F401  sets TRITON_INTERPRET before Triton is imported
import torch
import triton
import triton.language as tl

from intflash.backends.triton.device_functions import key_additions, permuted_keys
from intflash.numerics import exp, groups
from intflash.numerics.triton import (
    GROUP_OCTAVES,
    NEVER,
    NO_OCTAVE,
    TABLE_K0,
    clz32,
    exp_p8,
    exp_p16,
    group_p16,
    reciprocal_2_55,
    table_octave,
    table_p8,
)

SIZE = 8192


@triton.jit
def _reciprocal_kernel(d_ptr, r_ptr, z_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    d = tl.load(d_ptr + i).to(tl.uint32)
    tl.store(r_ptr + i, reciprocal_2_55(d).to(tl.int64))
    tl.store(z_ptr + i, clz32(d >> (i % 32).to(tl.uint32) | 1))


@triton.jit
def _exp_kernel(s_ptr, c_ptr, p8_ptr, high_ptr, low_ptr, b, SIZE: tl.constexpr):
    i = tl.arange(0, 16)[:, None] * (SIZE // 16) + tl.arange(0, SIZE // 16)[None, :]
    s, c = tl.load(s_ptr + i), tl.load(c_ptr)
    offset = tl.full([16, 1], 0, tl.int64) + b
    high, low = exp_p16(s, c, offset)
    tl.store(p8_ptr + i, exp_p8(s, c, offset))
    tl.store(high_ptr + i, high)
    tl.store(low_ptr + i, low)


@triton.jit
def _group_kernel(s_ptr, c_ptr, keys_ptr, added_ptr, p16_ptr, b, first, count, BN: tl.constexpr, ROWS: tl.constexpr):
    column = tl.arange(0, BN)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, added = tl.load(s_ptr + row)[:, None], key_additions(first, count, BN)
    high, low = group_p16(s, tl.load(c_ptr), tl.full([ROWS, 1], 0, tl.int64) + b, added)
    tl.store(keys_ptr + column, first + permuted_keys(BN))
    tl.store(added_ptr + column[None, :], added)
    p16 = 256 * (high.to(tl.int32) + 128) + low.to(tl.int32)
    tl.store(p16_ptr + row[:, None] * BN + column[None, :], p16)


@triton.jit
def _table_kernel(s_ptr, c_ptr, b_ptr, t_ptr, p8_ptr, octave_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(p8_ptr + i, table_p8(tl.load(s_ptr + i), tl.load(c_ptr), tl.load(b_ptr + i)))
    tl.store(octave_ptr + i, table_octave(tl.load(t_ptr + i)))


def reciprocals() -> int:
    edges = [1 << 31, (1 << 31) + 1, (1 << 32) - 1, (1 << 32) - 2, 3 << 30, (3 << 30) - 1, (3 << 30) + 1]
    d = torch.randint(1 << 31, 1 << 32, (SIZE,))
    d[: len(edges)] = torch.tensor(edges)
    r, z = torch.empty_like(d), torch.empty(SIZE, dtype=torch.int32)
    _reciprocal_kernel[(1,)](d, r, z, SIZE)
    shifted = [(x >> i % 32) | 1 for i, x in enumerate(d.tolist())]
    wrong = sum(a != (1 << 55) // b for a, b in zip(r.tolist(), d.tolist(), strict=True))
    return wrong + sum(a != 32 - b.bit_length() for a, b in zip(z.tolist(), shifted, strict=True))


def exponentials() -> int:
    """Every depth from 0 to beyond the last one with p > 0, in steps of 1/512 octave, and far below."""
    c = 1 << 23
    s = -torch.arange(SIZE, dtype=torch.int32)
    s[-2:] = torch.tensor([-(1 << 22), -(1 << 23)], dtype=torch.int32)
    out = [torch.empty(SIZE, dtype=torch.int8) for _ in range(3)]
    _exp_kernel[(1,)](s, torch.tensor([c], dtype=torch.int32), *out, exp.K0, SIZE)
    wrong = 0
    for score, p8, high, low in zip(s.tolist(), *(x.tolist() for x in out), strict=True):
        t = score * c + exp.K0
        hi, u = t >> 32, 256 + (t >> 24 & 255)
        p32 = (u * u + exp.QUADRATIC_OFFSET << hi) if hi >= 0 else 0
        wrong += (p32 + (1 << 23)) >> 24 != p8 + 128
        wrong += (p32 + (1 << 15)) >> 16 != 256 * (high + 128) + low
    return wrong


def group_weights() -> int:
    """Every depth of `exponentials` in several tiles of keys of a rounded and of a dithered sequence."""
    c, rows, wrong = 1 << 23, 1024, 0
    s = -torch.arange(SIZE, dtype=torch.int32)
    s[-2:] = torch.tensor([-(1 << 22), -(1 << 23)], dtype=torch.int32)
    t = s.to(torch.int64) * c + exp.K0
    hi, u = t >> 32, 256 + (t >> 24 & 255)
    m = u * u + exp.QUADRATIC_OFFSET
    p24 = torch.where(hi >= -16, (m << (hi + 16).clamp(0, 30)) >> 24, 0)[:, None]
    for count, first, width in ((768, 0, 64), (769, 0, 64), (9000, 1984, 64), (9000, 3712, 128), (9000, 8160, 32)):
        keys, added = torch.empty(width, dtype=torch.int32), torch.empty(width, dtype=torch.int32)
        p16 = torch.empty(SIZE, width, dtype=torch.int32)
        multiplier = torch.tensor([c], dtype=torch.int32)
        offset = exp.K0 + GROUP_OCTAVES.value
        _group_kernel[(SIZE // rows,)](s, multiplier, keys, added, p16, offset, first, count, width, rows)
        expected = groups.additions(count)[keys.long()]
        wrong += int((added != expected).sum()) + int((p16 != (p24 + expected) >> 8).sum())
        wrong += sorted(keys.tolist()) != list(range(first, first + width))
    return wrong


def tables() -> int:
    """T at each border of the table's steps, below octaves near 0 and far from it, and far below; absent keys."""
    octave, c = exp.TABLE_STEPS.octave, (1 << 31) - (1 << 8)
    steps = torch.arange(1025)[:, None] << 24
    depth = torch.cat((steps, steps + 2**23 - 1, steps + 2**23, steps + 2**24 - 1), dim=1).flatten()
    depth = torch.nn.functional.pad(depth, (0, SIZE - len(depth)), value=1 << 40)
    depth[-2:] = torch.tensor([octave - 1, 1 << 58])
    s = torch.randint(-(1 << 22), 1 << 22, (SIZE,), dtype=torch.int32)
    absent = torch.rand(SIZE) < 0.1
    wrong = 0
    for e in (0, 3, -5, 1 << 27, -(1 << 27)):
        t = torch.where(absent, NEVER.value, e * octave - depth)
        b = torch.where(absent, NEVER.value, t + (TABLE_K0.value - e * octave) - s.to(torch.int64) * c)
        p8, found = torch.empty(SIZE, dtype=torch.int8), torch.empty(SIZE, dtype=torch.int32)
        _table_kernel[(1,)](s, torch.tensor([c], dtype=torch.int32), b, t, p8, found, SIZE)
        for x, below, gone, p, o in zip(*(z.tolist() for z in (t, depth, absent, p8, found)), strict=True):
            y = 3686 - 16 * min((below + (1 << 23)) >> 24, exp.LAST_STEP) // 7
            p32 = 0 if gone else (256 + y % 256) ** 2 + exp.QUADRATIC_OFFSET << (y >> 8)
            wrong += (p32 + (1 << 23)) >> 24 != p + 128
            wrong += o != (NO_OCTAVE.value if gone else -(-x // octave))
    return wrong


if __name__ == "__main__":
    torch.manual_seed(0)
    found = {
        "reciprocals": reciprocals(),
        "exponentials": exponentials(),
        "groups": group_weights(),
        "tables": tables(),
    }
    print(json.dumps(found))
