"""RV32IM, Zicond and F: instruction words to functions of a warp's registers (numpy, one lane per thread)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from intflash.backends.vortex.errors import VortexError

if TYPE_CHECKING:
    from machines.riscv.machine import Warp

Step = Callable[["Warp"], int | None]  # None: go on to the next word; else the next pc
Lanes = np.ndarray  # uint32, one per thread

# Major opcodes of the F extension: loads, stores, arithmetic and the four fused forms.
F_OPCODES = {0x07, 0x27, 0x53, 0x43, 0x47, 0x4B, 0x4F}


def _signed(x: Lanes) -> Lanes:
    return x.view(np.int32)


def _wide(x: Lanes) -> np.ndarray:
    return _signed(x).astype(np.int64)


def _high(product: np.ndarray) -> Lanes:
    return (product.view(np.uint64) >> np.uint64(32)).astype(np.uint32)


def _divide(a: Lanes, b: Lanes, signed: bool) -> tuple[Lanes, Lanes]:
    """Quotient (toward zero; all ones for b = 0) and remainder."""
    x, y = (_wide(a), _wide(b)) if signed else (a.astype(np.int64), b.astype(np.int64))
    zero = y == 0
    safe = np.where(zero, 1, y)
    quotient = np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe))
    remainder = np.where(zero, x, x - quotient * safe)
    quotient = np.where(zero, -1, quotient)
    return (quotient & 0xFFFFFFFF).astype(np.uint32), (remainder & 0xFFFFFFFF).astype(np.uint32)


# (funct7, funct3) -> result; the immediate forms use the same with funct7 0 except for shifts
ALU: dict[tuple[int, int], Callable[[Lanes, Lanes], Lanes]] = {
    (0x00, 0): lambda a, b: a + b,
    (0x20, 0): lambda a, b: a - b,
    (0x00, 1): lambda a, b: a << (b & 31),
    (0x00, 2): lambda a, b: (_signed(a) < _signed(b)).astype(np.uint32),
    (0x00, 3): lambda a, b: (a < b).astype(np.uint32),
    (0x00, 4): lambda a, b: a ^ b,
    (0x00, 5): lambda a, b: a >> (b & 31),
    (0x20, 5): lambda a, b: (_signed(a) >> (b & 31).view(np.int32)).view(np.uint32),
    (0x00, 6): lambda a, b: a | b,
    (0x00, 7): lambda a, b: a & b,
    (0x01, 0): lambda a, b: a * b,
    (0x01, 1): lambda a, b: _high(_wide(a) * _wide(b)),
    (0x01, 2): lambda a, b: _high(_wide(a) * b.astype(np.int64)),
    (0x01, 3): lambda a, b: ((a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32),
    (0x01, 4): lambda a, b: _divide(a, b, True)[0],
    (0x01, 5): lambda a, b: _divide(a, b, False)[0],
    (0x01, 6): lambda a, b: _divide(a, b, True)[1],
    (0x01, 7): lambda a, b: _divide(a, b, False)[1],
    (0x07, 5): lambda a, b: np.where(b == 0, np.uint32(0), a),  # czero.eqz
    (0x07, 7): lambda a, b: np.where(b != 0, np.uint32(0), a),  # czero.nez
}
BRANCH: dict[int, Callable[[Lanes, Lanes], np.ndarray]] = {
    0: lambda a, b: a == b,
    1: lambda a, b: a != b,
    4: lambda a, b: _signed(a) < _signed(b),
    5: lambda a, b: _signed(a) >= _signed(b),
    6: lambda a, b: a < b,
    7: lambda a, b: a >= b,
}
# funct3 -> numpy type of a load or store
WIDTH = {0: np.int8, 1: np.int16, 2: np.int32, 4: np.uint8, 5: np.uint16}


def decode(word: int, pc: int) -> Step:
    """The function of one instruction word at `pc`.

    Raises:
        VortexError: no such instruction in RV32IMF + Zicond.
    """
    opcode, rd, f3 = word & 127, word >> 7 & 31, word >> 12 & 7
    rs1, rs2, f7 = word >> 15 & 31, word >> 20 & 31, word >> 25
    i_imm = _sign(word >> 20, 12)
    if opcode == 0x37:
        return _constant(rd, word & 0xFFFFF000)
    if opcode == 0x17:
        return _constant(rd, pc + (word & 0xFFFFF000))
    if opcode == 0x13:
        f7 = f7 if f3 in (1, 5) else 0
        operand = np.uint32((rs2 if f3 in (1, 5) else i_imm) & 0xFFFFFFFF)
        return _immediate(ALU[f7, f3], rd, rs1, operand)
    if opcode == 0x33 and (f7, f3) in ALU:
        return _register(ALU[f7, f3], rd, rs1, rs2)
    if opcode == 0x03 and f3 in WIDTH:
        return _load(WIDTH[f3], rd, rs1, i_imm)
    if opcode == 0x23 and f3 in (0, 1, 2):
        return _store(WIDTH[f3], rs2, rs1, _sign(f7 << 5 | rd, 12))
    if opcode == 0x63 and f3 in BRANCH:
        offset = (word >> 31) << 12 | (word >> 7 & 1) << 11 | (word >> 25 & 63) << 5 | (word >> 8 & 15) << 1
        return _branch(BRANCH[f3], rs1, rs2, pc, pc + _sign(offset, 13))
    if opcode == 0x6F:
        offset = (word >> 31) << 20 | (word >> 12 & 255) << 12 | (word >> 20 & 1) << 11 | (word >> 21 & 1023) << 1
        return _jump(rd, pc, pc + _sign(offset, 21))
    if opcode == 0x67:
        return _jump_register(rd, rs1, i_imm, pc)
    if word == 0x73:
        return lambda warp: warp.call(pc)
    if opcode == 0x0F:
        return lambda warp: None
    if opcode in F_OPCODES:
        from machines.riscv.floats import decode_float

        return decode_float(word, pc)
    raise VortexError(f"no instruction of RV32IMF or Zicond at {pc:#x}: {word:#010x}")


def _sign(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def _constant(rd: int, value: int) -> Step:
    lanes = np.uint32(value & 0xFFFFFFFF)

    def step(warp: Warp) -> None:
        warp.x[rd] = lanes

    return step


def _immediate(function: Callable[[Lanes, Lanes], Lanes], rd: int, rs1: int, operand: np.uint32) -> Step:
    vector = np.full(8, operand, np.uint32)

    def step(warp: Warp) -> None:
        warp.x[rd] = function(warp.x[rs1], vector)

    return step if rd else lambda warp: None


def _register(function: Callable[[Lanes, Lanes], Lanes], rd: int, rs1: int, rs2: int) -> Step:
    def step(warp: Warp) -> None:
        warp.x[rd] = function(warp.x[rs1], warp.x[rs2])

    return step if rd else lambda warp: None


def _load(kind: type, rd: int, rs1: int, offset: int) -> Step:
    offset = np.uint32(offset & 0xFFFFFFFF)

    def step(warp: Warp) -> None:
        warp.x[rd] = warp.load(kind, warp.x[rs1] + offset).astype(np.int32).view(np.uint32)

    return step


def _store(kind: type, rs2: int, rs1: int, offset: int) -> Step:
    offset = np.uint32(offset & 0xFFFFFFFF)

    def step(warp: Warp) -> None:
        warp.store(kind, warp.x[rs1] + offset, warp.x[rs2])

    return step


def _branch(condition: Callable[[Lanes, Lanes], np.ndarray], rs1: int, rs2: int, pc: int, target: int) -> Step:
    def step(warp: Warp) -> int | None:
        taken = condition(warp.x[rs1], warp.x[rs2])
        if taken.all():
            return target
        if taken.any():
            raise VortexError(f"the branch at {pc:#x} splits a warp")
        return None

    return step


def _jump(rd: int, pc: int, target: int) -> Step:
    def step(warp: Warp) -> int:
        if rd:
            warp.x[rd] = pc + 4
        return target

    return step


def _jump_register(rd: int, rs1: int, offset: int, pc: int) -> Step:
    def step(warp: Warp) -> int:
        targets = warp.x[rs1]
        if (targets != targets[0]).any():
            raise VortexError(f"the jump at {pc:#x} splits a warp")
        target = int(targets[0]) + offset & 0xFFFFFFFE
        if rd:
            warp.x[rd] = pc + 4
        return target

    return step
