"""Microbenchmarks in registers: lite's int32 -> float32 conversions with their row maximum, and QFlash's three
divisions.

A program keeps a tile of numbers in registers and repeats one operation ROUNDS times, so that memory does not matter.
Every round also changes the numbers and uses the result (one addition, one FMA). The conversion "none" does only that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from intflash.backends.triton.launch import TritonLaunch
from intflash.backends.triton.online_softmax import MAGIC, MAGIC_BITS

CONVERSIONS = ("none", "convert", "magic", "dual", "integer")
DIVISIONS = ("none", "integer division", "multiply and shift", "float division")
ROWS, COLUMNS = 64, 128  # a score tile: 64 elements per thread
ROUNDS = 512
PROGRAMS = 132 * 3 * 4


@triton.jit
def _conversion_kernel(x, out, unit, rounds, CONVERSION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Computes row maxima and a sum of `rounds` tiles of int32 scores |s| < 2^22, converted as CONVERSION says.

    The first tile is an int8 product, so that it has the register layout of the attention kernel's scores.
    """
    channels = tl.arange(0, 32)
    q = tl.load(x + tl.arange(0, BM)[:, None] * 32 + channels[None, :])
    k = tl.load(x + tl.arange(0, BN)[:, None] * 32 + channels[None, :])
    s = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    top = tl.full([BM], -1e30, tl.float32)
    used = tl.zeros([BM, BN], tl.float32)
    for i in range(rounds):
        s = s ^ (i & 255)
        if CONVERSION == "none":
            used = s.to(tl.float32, bitcast=True) * unit + used
        elif CONVERSION == "convert":
            y = s.to(tl.float32)
            top = tl.maximum(top, tl.max(y, 1))
            used = y * unit + used
        elif CONVERSION == "magic":
            y = (s + MAGIC_BITS).to(tl.float32, bitcast=True)
            top = tl.maximum(top, tl.max(y, 1) - MAGIC)
            used = y * unit + used
        elif CONVERSION == "dual":
            even, odd = tl.split(tl.reshape(s, [BM, BN // 2, 2]))
            a = even.to(tl.float32)
            b = odd + MAGIC_BITS
            raised = tl.maximum(tl.max(a, 1), tl.max(b, 1).to(tl.float32, bitcast=True) - MAGIC)
            top = tl.maximum(top, raised)
            used = tl.reshape(tl.join(a, b.to(tl.float32, bitcast=True)), [BM, BN]) * unit + used
        else:
            top = tl.maximum(top, tl.max(s, 1).to(tl.float32))
            used = (s + MAGIC_BITS).to(tl.float32, bitcast=True) * unit + used
    total = tl.sum(used, 1) + top
    tl.store(out + tl.program_id(0) * BM + tl.arange(0, BM), total)


@triton.jit
def _division_kernel(x, out, rs, multiplier, rounds, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    """Computes `rounds` quotients of every element by the constant rs. multiplier = round(2^16 / rs)."""
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    total = value
    for j in range(rounds):
        value = value ^ j
        if WHICH == "none":
            total += value
        elif WHICH == "integer division":
            total += value // rs
        elif WHICH == "multiply and shift":
            total += (value * multiplier) >> 16
        else:
            quotient = tl.div_rn(value.to(tl.float32, bitcast=True), tl.full([BLOCK], 1.0, tl.float32) * rs)
            total += quotient.to(tl.int32, bitcast=True)
    tl.store(out + tl.program_id(0) * BLOCK + i, total)


def conversion_launch(form: str, device: str = "cpu") -> TritonLaunch:
    x = torch.randint(-127, 128, (COLUMNS, 32), dtype=torch.int8, device=device)
    out = torch.empty(PROGRAMS * ROWS, device=device)
    arguments = dict(x=x, out=out, unit=1.25e-4, rounds=ROUNDS, CONVERSION=form, BM=ROWS, BN=COLUMNS)
    return TritonLaunch(_conversion_kernel, (PROGRAMS,), arguments, 4, 1)


def division_launch(which: str, device: str = "cpu") -> TritonLaunch:
    block = 2048
    x = torch.randint(0, 1 << 15, (block,), dtype=torch.int32, device=device)
    if which == "float division":
        x |= 0x3F800000  # the bits of floats in [1, 2)
    out = torch.empty(PROGRAMS * block, dtype=torch.int32, device=device)
    rs = 771
    arguments = dict(x=x, out=out, rs=rs, multiplier=round(65536 / rs), rounds=ROUNDS, WHICH=which, BLOCK=block)
    return TritonLaunch(_division_kernel, (PROGRAMS,), arguments, 4, 1)


def elements(launch: TritonLaunch) -> int:
    """Returns the number of operations of one launch."""
    a = launch.arguments
    return PROGRAMS * ROUNDS * (a["BLOCK"] if "BLOCK" in a else ROWS * COLUMNS)


def calls(names: tuple[str, ...], launch: Callable[[str, str], TritonLaunch]) -> dict[str, Callable[[], None]]:
    return {name: partial(TritonLaunch.run, launch(name, "cuda")) for name in names}
