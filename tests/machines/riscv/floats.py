"""The F extension for the RISC-V interpreter. Fused products are formed in float64 and rounded once to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from intflash.backends.vortex.errors import VortexError

if TYPE_CHECKING:
    from machines.riscv.decode import Step
    from machines.riscv.machine import Warp

Floats = np.ndarray  # float32, one per thread

_SIGN = np.uint32(0x80000000)


def _inject_sign(a: Floats, sign: np.ndarray) -> Floats:
    return ((a.view(np.uint32) & ~_SIGN) | (sign & _SIGN)).view(np.float32)


# funct7 -> result
_ARITHMETIC: dict[int, Callable[[Floats, Floats], Floats]] = {
    0x00: lambda a, b: a + b,
    0x04: lambda a, b: a - b,
    0x08: lambda a, b: a * b,
    0x0C: lambda a, b: a / b,
}
# (funct7, funct3) -> result
_SELECT: dict[tuple[int, int], Callable[[Floats, Floats], Floats]] = {
    (0x10, 0): lambda a, b: _inject_sign(a, b.view(np.uint32)),
    (0x10, 1): lambda a, b: _inject_sign(a, ~b.view(np.uint32)),
    (0x10, 2): lambda a, b: _inject_sign(a, a.view(np.uint32) ^ b.view(np.uint32)),
    (0x14, 0): np.fmin,
    (0x14, 1): np.fmax,
}
_COMPARE: dict[int, Callable[[Floats, Floats], np.ndarray]] = {
    0: lambda a, b: a <= b,
    1: lambda a, b: a < b,
    2: lambda a, b: a == b,
}
# opcode -> (sign of the product, sign of the addend)
_FUSED = {0x43: (1, 1), 0x47: (1, -1), 0x4B: (-1, 1), 0x4F: (-1, -1)}


def decode_float(word: int, pc: int) -> Step:
    """The function of one F instruction.

    Raises:
        VortexError: not one that our kernels' compiler writes.
    """
    opcode, rd, f3 = word & 127, word >> 7 & 31, word >> 12 & 7
    rs1, rs2, f7, rs3 = word >> 15 & 31, word >> 20 & 31, word >> 25, word >> 27
    if opcode == 0x07:
        return _load(rd, rs1, np.uint32((word >> 20) - (word >> 31 << 12) & 0xFFFFFFFF))
    if opcode == 0x27:
        return _store(rs2, rs1, np.uint32((f7 << 5 | rd) - (word >> 31 << 12) & 0xFFFFFFFF))
    if opcode in _FUSED:
        return _fused(*_FUSED[opcode], rd, rs1, rs2, rs3)
    if f7 in _ARITHMETIC:
        return _binary(_ARITHMETIC[f7], rd, rs1, rs2)
    if (f7, f3) in _SELECT:
        return _binary(_SELECT[f7, f3], rd, rs1, rs2)
    if f7 == 0x50:
        return _to_integer(lambda warp: _COMPARE[f3](warp.f[rs1], warp.f[rs2]).astype(np.uint32), rd)
    if f7 == 0x70 and f3 == 0:
        return _to_integer(lambda warp: warp.f[rs1].view(np.uint32), rd)
    if f7 == 0x60 and f3 == 1:  # toward zero, as C converts
        return _to_integer(lambda warp: warp.f[rs1].astype(np.int32).view(np.uint32), rd)
    if f7 == 0x78:
        return _from_integer(lambda x: x.view(np.float32), rd, rs1)
    if f7 == 0x68:
        return _from_integer(lambda x: (x if rs2 == 1 else x.view(np.int32)).astype(np.float32), rd, rs1)
    raise VortexError(f"the F instruction at {pc:#x} is not known to the interpreter: {word:#010x}")


def _load(rd: int, rs1: int, offset: np.uint32) -> Step:
    def step(warp: Warp) -> None:
        warp.f[rd] = warp.load(np.float32, warp.x[rs1] + offset)

    return step


def _store(rs2: int, rs1: int, offset: np.uint32) -> Step:
    def step(warp: Warp) -> None:
        warp.store(np.int32, warp.x[rs1] + offset, warp.f[rs2].view(np.uint32))

    return step


def _fused(product: int, addend: int, rd: int, rs1: int, rs2: int, rs3: int) -> Step:
    def step(warp: Warp) -> None:
        a, b, c = (warp.f[r].astype(np.float64) for r in (rs1, rs2, rs3))
        warp.f[rd] = (product * a * b + addend * c).astype(np.float32)

    return step


def _binary(function: Callable[[Floats, Floats], Floats], rd: int, rs1: int, rs2: int) -> Step:
    def step(warp: Warp) -> None:
        warp.f[rd] = function(warp.f[rs1], warp.f[rs2])

    return step


def _to_integer(function: Callable[[Warp], np.ndarray], rd: int) -> Step:
    def step(warp: Warp) -> None:
        if rd:
            warp.x[rd] = function(warp)

    return step


def _from_integer(function: Callable[[np.ndarray], Floats], rd: int, rs1: int) -> Step:
    def step(warp: Warp) -> None:
        warp.f[rd] = function(warp.x[rs1])

    return step
