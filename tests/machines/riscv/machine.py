"""A warp-lockstep machine for linked RV32 kernels: one instruction at a time for all eight threads of a warp.

It has Vortex's rule for branches (all threads of a warp go one way) and no clock: it counts thread-instructions,
nothing else. A group's warps run one after another from barrier to barrier.
"""

from __future__ import annotations

import struct

import numpy as np

from intflash.backends.vortex.errors import VortexError
from machines.riscv.decode import Step, decode

WARP = 8
BASE = 0x80000000
STACK_BYTES, TLS_BYTES, LOCAL_BYTES = 8192, 256, 4096
MSCRATCH, LOCAL_MEM_BASE = 0x340, 0xFC3
CSR_READ, SPAWN, INDEX, BEGIN, BARRIER, END = range(1, 7)  # glue.cpp
A0, A1, A7, SP, TP, RA = 10, 11, 17, 2, 4, 1


class Memory:
    """Flat device memory from BASE on, with a bump allocator."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self._views = {k: self.bytes.view(k) for k in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.float32)}
        self._next = 0

    def view(self, kind: type) -> np.ndarray:
        return self._views[kind]

    def place(self, data: bytes | np.ndarray, address: int) -> None:
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        self.bytes[address - BASE : address - BASE + raw.size] = raw
        self._next = max(self._next, address - BASE + raw.size)

    def allocate(self, size: int) -> int:
        start = (self._next + 63) // 64 * 64
        self._next = start + size
        if self._next > self.bytes.size:
            raise VortexError(f"the interpreter's {self.bytes.size} bytes of memory are too few")
        return BASE + start


class Warp:
    """Registers of eight threads and one program counter."""

    def __init__(self, machine: Machine, pc: int, threads: np.ndarray) -> None:
        self.machine = machine
        self.pc = pc
        self.threads = threads
        self.x = np.zeros((32, WARP), np.uint32)
        self.f = np.zeros((32, WARP), np.float32)
        self.counting = False
        self.waiting: int | None = None  # the call that stopped it: BARRIER, END or SPAWN

    def load(self, kind: type, address: np.ndarray) -> np.ndarray:
        return self.machine.memory.view(kind)[self._index(kind, address)]

    def store(self, kind: type, address: np.ndarray, value: np.ndarray) -> None:
        self.machine.memory.view(kind)[self._index(kind, address)] = (
            value.astype(kind) if kind is not np.int32 else (value.view(np.int32))
        )

    def _index(self, kind: type, address: np.ndarray) -> np.ndarray:
        size = np.dtype(kind).itemsize
        if (address % np.uint32(size)).any() or (address < BASE).any():
            raise VortexError(f"a bad address near {self.pc:#x}: {[hex(a) for a in address]}")
        return (address - np.uint32(BASE)) // np.uint32(size)

    def call(self, pc: int) -> int | None:
        """An environment call of glue.cpp."""
        number, a0, a1 = int(self.x[A7][0]), self.x[A0], int(self.x[A1][0])
        if number == CSR_READ:
            self.x[A0] = {MSCRATCH: self.machine.arguments, LOCAL_MEM_BASE: self.machine.local_memory}[int(a0[0])]
        elif number == INDEX:
            self.x[A0] = self.machine.block[a1] if a0[0] == 0 else (self.threads if a1 == 0 else 0)
        elif number == BEGIN:
            self.counting = True
        else:
            self.waiting = number
        return pc + 4

    def run(self) -> int:
        """Runs to the next barrier, spawn or end; returns the warp-instructions that count."""
        self.waiting = None
        executed = 0
        steps = self.machine.steps
        while self.waiting is None:
            step = steps.get(self.pc)
            if step is None:
                step = steps[self.pc] = self.machine.decode(self.pc)
            executed += self.counting
            self.pc = step(self) or self.pc + 4
        return executed


class Machine:
    """A linked kernel in memory.

    Args:
        elf: a static RV32 program linked with glue.cpp and link.ld.
        memory_bytes: size of the device memory.
    """

    def __init__(self, elf: bytes, memory_bytes: int = 16 << 20) -> None:
        self.memory = Memory(memory_bytes)
        self.steps: dict[int, Step] = {}
        self.entry = struct.unpack_from("<I", elf, 24)[0]
        table, size, count = struct.unpack_from("<I", elf, 28)[0], *struct.unpack_from("<HH", elf, 42)
        for i in range(count):
            kind, offset, address, _, in_file, in_memory, _, _ = struct.unpack_from("<8I", elf, table + i * size)
            if kind == 1:
                self.memory.place(elf[offset : offset + in_file] + bytes(in_memory - in_file), address)
        self.thread_entry = _symbol(elf, "lockstep_thread")
        self.local_memory = self.memory.allocate(LOCAL_BYTES)
        self._stacks = self.memory.allocate(2 * WARP * STACK_BYTES)
        self._tls = self.memory.allocate(2 * WARP * TLS_BYTES)
        self.arguments = 0
        self.block = [0, 0, 0]

    def decode(self, pc: int) -> Step:
        return decode(int(self.memory.view(np.int32)[(pc - BASE) // 4]) & 0xFFFFFFFF, pc)

    def run(self, arguments: int, threads: int) -> int:
        """Runs main() and the one group that it spawns on a core of 16 threads, the argument block at an address.

        Returns:
            Thread-instructions between the kernel's entry and its return, over all threads.

        Raises:
            VortexError: a branch splits a warp, a group's warps do not meet, or an instruction is not known.
        """
        self.arguments = arguments
        main = self._warp(self.entry, 0)
        main.run()
        if main.waiting != SPAWN:
            raise VortexError("the kernel's main() spawned nothing")
        kernel, argument = main.x[A0].copy(), main.x[A1].copy()
        return self._run_group(kernel, argument, threads)

    def _run_group(self, kernel: np.ndarray, argument: np.ndarray, threads: int) -> int:
        warps = [self._warp(self.thread_entry, w) for w in range(threads // WARP)]
        for warp in warps:
            warp.x[A0], warp.x[A1] = kernel, argument
        executed = 0
        while True:
            executed += sum(warp.run() for warp in warps) * WARP
            states = {warp.waiting for warp in warps}
            if len(states) > 1:
                raise VortexError("a barrier is not reached by every warp of a group")
            if states == {END}:
                return executed

    def _warp(self, pc: int, number: int) -> Warp:
        threads = np.arange(number * WARP, (number + 1) * WARP, dtype=np.uint32)
        warp = Warp(self, pc, threads)
        warp.x[SP] = self._stacks + (threads + 1) * STACK_BYTES
        warp.x[TP] = self._tls + threads * TLS_BYTES
        return warp


def _symbol(elf: bytes, name: str) -> int:
    """Address of a symbol by the section header's symbol table."""
    for section in _sections(elf):
        if section[1] == 2:  # SHT_SYMTAB
            strings = _sections(elf)[section[6]][4]
            for at in range(section[4], section[4] + section[5], 16):
                label, value = struct.unpack_from("<II", elf, at)
                if elf[strings + label : elf.index(b"\0", strings + label)] == name.encode():
                    return value
    raise VortexError(f"the program has no symbol {name}")


def _sections(elf: bytes) -> list[tuple[int, ...]]:
    table = struct.unpack_from("<I", elf, 32)[0]
    size, count = struct.unpack_from("<HH", elf, 46)
    return [struct.unpack_from("<10I", elf, table + i * size) for i in range(count)]


def executable_words(elf: bytes) -> list[int]:
    """Every instruction word of the executable sections of an object or program (no compressed instructions)."""
    words: list[int] = []
    for section in _sections(elf):
        if section[1] == 1 and section[2] & 4:  # SHT_PROGBITS, SHF_EXECINSTR
            words += struct.unpack_from(f"<{section[5] // 4}I", elf, section[4])
    return words


def undefined_symbols(elf: bytes) -> set[str]:
    """Names that an object file leaves to the linker."""
    names = set()
    for section in _sections(elf):
        if section[1] == 2:
            strings = _sections(elf)[section[6]][4]
            for at in range(section[4] + 16, section[4] + section[5], 16):
                label, _, _, _, _, where = struct.unpack_from("<IIIBBH", elf, at)
                if where == 0:
                    names.add(elf[strings + label : elf.index(b"\0", strings + label)].decode())
    return names
