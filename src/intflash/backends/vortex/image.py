"""The kernel image that Vortex loads: lowest and end address (64-bit little-endian words), then the bytes between."""

from __future__ import annotations

import struct

from intflash.backends.vortex.errors import VortexError

_PT_LOAD = 1
_MACHINE_RISCV = 243


def pack_image(elf: bytes) -> bytes:
    """The image of a linked RISC-V program.

    The end address counts memory that the file does not hold (.bss); the bytes end with the last one it does.

    Args:
        elf: the contents of an ELF file, 32 or 64 bits.

    Returns:
        The image for ``vx_upload_kernel_bytes``.

    Raises:
        VortexError: not a linked little-endian RISC-V ELF file.
    """
    if elf[:4] != b"\x7fELF" or len(elf) < 52:
        raise VortexError("the kernel's linker did not write an ELF file")
    wide, little = elf[4] == 2, elf[5] == 1
    machine = struct.unpack_from("<H", elf, 18)[0]
    if not little or machine != _MACHINE_RISCV:
        raise VortexError(f"the kernel was linked for machine {machine}, not for RISC-V ({_MACHINE_RISCV})")
    segments = [s for s in _load_segments(elf, wide) if s[3]]
    if not segments:
        raise VortexError("the kernel has no loadable segment: was it compiled but not linked?")
    start = min(address for _, address, _, _ in segments)
    end = max(address + memory for _, address, _, memory in segments)
    body = bytearray(max(address + size for _, address, size, _ in segments) - start)
    for offset, address, size, _ in segments:
        if offset + size > len(elf):
            raise VortexError("the kernel's ELF file is cut short")
        body[address - start : address - start + size] = elf[offset : offset + size]
    return struct.pack("<QQ", start, end) + bytes(body)


def _load_segments(elf: bytes, wide: bool) -> list[tuple[int, int, int, int]]:
    """(file offset, virtual address, bytes in the file, bytes in memory) of each PT_LOAD segment."""
    table = struct.unpack_from("<Q" if wide else "<I", elf, 32 if wide else 28)[0]
    size, count = struct.unpack_from("<HH", elf, 54 if wide else 42)
    segments = []
    for i in range(count):
        at = table + i * size
        if wide:
            kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", elf, at)
        else:
            kind, offset, address, _, in_file, in_memory, _, _ = struct.unpack_from("<8I", elf, at)
        if kind == _PT_LOAD:
            segments.append((offset, address, in_file, in_memory))
    return segments
