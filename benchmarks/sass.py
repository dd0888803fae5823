"""The machine code of a compiled kernel: instructions, registers, spills, instructions per score.

Kernels compile for any NVIDIA GPU without one present; `cuobjdump` comes with Triton. Tests use this module to check
the integer-only claim: between int8 inputs and integer output no opcode of `FLOAT_OPCODES` may appear.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

ARCHITECTURES = (80, 89, 90, 100, 120)

# Every floating-point arithmetic, comparison, selection or conversion opcode of sm_80 to sm_120 (SASS names up to
# the first dot). Conversions: I2F, F2I, F2F, FRND and their packed forms; MUFU holds rcp, ex2, sqrt; HMMA, QMMA,
# HGMMA, QGMMA, OMMA, DMMA and UTC?MMA's float kinds are float tensor products. IMMA, IGMMA, UTCIMMA are integer ones.
FLOAT_OPCODES = frozenset(
    "FADD FADD2 FADD32I FMUL FMUL2 FMUL32I FFMA FFMA2 FFMA32I FMNMX FMNMX3 FSEL FSET FSETP FCHK "
    "FSWZADD FSWZ FHADD FHFMA "
    "HADD2 HADD2_32 HADD2_32I HMUL2 HMUL2_32I HFMA2 HFMA2_32I HFMA2_MMA HMNMX2 HSET2 HSETP2 HSEL2 "
    "DADD DMUL DFMA DMNMX DSET DSETP MUFU RRO "
    "I2F I2FP I2F_RZ F2I F2IP F2F F2FP FRND UF2FP UI2F UI2FP UF2I UFADD UFMUL UFFMA UFSETP UFSEL UFSET UFMNMX UFRND "
    "HMMA BMMA DMMA QMMA OMMA HGMMA QGMMA UTCHMMA UTCQMMA UTCOMMA UTCMXQMMA".split()
)

_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,6})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)(?P<rest>[^;]*);"
)


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # up to the first dot
    text: str


@dataclass(frozen=True)
class Machine:
    """A kernel as machine code."""

    name: str
    arch: int
    instructions: tuple[Instruction, ...]
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int

    @property
    def opcodes(self) -> collections.Counter[str]:
        return collections.Counter(i.opcode for i in self.instructions)

    @property
    def float_instructions(self) -> list[str]:
        """The floating-point instructions, as text; empty for an integer-only kernel.

        HFMA2 with -RZ factors ("HFMA2.MMA R1, -RZ, RZ, 0, 0") is how ptxas moves a constant. It computes nothing and is
        not counted.
        """
        return [i.text for i in self.instructions if i.opcode in FLOAT_OPCODES and not _moves_constant(i)]

    @property
    def spills(self) -> int:
        """The number of loads and stores of local memory."""
        return sum(self.opcodes[name] for name in ("LDL", "STL"))

    def loops(self) -> Iterator[tuple[Instruction, ...]]:
        """Yields the bodies of the innermost loops, which are backward branches without another inside."""
        spans = []
        for i in self.instructions:
            target = re.search(r"0x([0-9a-f]+)\s*$", i.text.rstrip(" ;"))
            if i.opcode == "BRA" and target and int(target.group(1), 16) < i.address:
                spans.append((int(target.group(1), 16), i.address))
        for start, stop in spans:
            if not any((a, b) != (start, stop) and start <= a and b <= stop for a, b in spans):
                yield tuple(i for i in self.instructions if start <= i.address <= stop)


def _moves_constant(instruction: Instruction) -> bool:
    return instruction.opcode in ("HFMA2", "HFMA2_MMA") and "-RZ, RZ," in instruction.text


def disassemble(kernel: Any, arch: int) -> Machine:
    """Returns the machine code of a `triton.compile` result."""
    metadata = kernel.metadata
    return machine(kernel.asm["cubin"], metadata.name, arch, metadata.shared, metadata.num_warps)


def machine(cubin: bytes, name: str, arch: int, shared_bytes: int, warps: int) -> Machine:
    """Returns the machine code of a cubin with one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _cuobjdump("--dump-sass", file.name)
        usage = _cuobjdump("-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    instructions = tuple(
        Instruction(int(m["address"], 16), m["opcode"], f"{m['opcode']}{m['rest']}".strip())
        for m in _INSTRUCTION.finditer(sass)
    )
    return Machine(name, arch, instructions, int(found.group(1)), int(found.group(2)), shared_bytes, warps)


def _cuobjdump(option: str, path: str) -> str:
    import triton.backends.nvidia as nvidia

    tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def compile_launch(launch: Any, arch: int) -> Machine:
    """Compiles a `TritonLaunch` (backends.triton.launch) for an architecture, as the runtime would for its
    arguments.
    """
    return disassemble(compiled(launch, arch), arch)


def compiled(launch: Any, arch: int) -> Any:
    """Returns the `triton.compile` result of a `TritonLaunch`; its `asm` has every stage's text."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(ast_source(launch), target=GPUTarget("cuda", arch, 32), options=options)


_PTX = re.compile(r"(?:@!?%\w+\s+)?(?P<opcode>[a-z][a-z0-9]*(?:[.:]+\w+)+)\s+(?P<operands>[^;]*);")
_FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def narrow_float_stores(ptx: str) -> list[str]:
    """Returns, as text, the stores of fewer bits than a float's register holds, for which ptxas stores another value.

    "st.b8 [a], %r" stores the low byte of %r. Where an instruction of a float type wrote %r, ptxas of CUDA 12.8 to 13.0
    converts that float to an integer instead (F2I in the machine code).
    """
    bits: dict[str, int] = {}
    stores = []
    for found in _PTX.finditer(re.sub(r"//[^\n]*", "", ptx)):
        name, *parts = re.split(r"[.:]+", found["opcode"])
        registers = re.findall(r"%\w+", found["operands"])
        if name == "st":
            stores.append((int(re.sub(r"\D", "", parts[-1])), registers, found[0]))
        elif registers and name != "setp":
            kind = parts[-2] if name == "cvt" and len(parts) > 1 else parts[-1]
            bits[registers[0]] = max(bits.get(registers[0], 0), _FLOAT_BITS.get(kind, 0))
    return [text for width, registers, text in stores if any(width < bits.get(r, 0) for r in registers)]


def ast_source(launch: Any) -> Any:
    """Returns signature, constants and attributes of a launch, as Triton's runtime derives them from the arguments."""
    from triton.compiler import ASTSource

    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    parameters = launch.kernel.params
    signature = {}
    for i, parameter in enumerate(parameters):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        else:
            signature[parameter.name] = _specialize(value, (i,), constants, attributes)
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


_POINTERS = {
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip


def _specialize(value: Any, path: tuple[int, ...], constants: dict, attributes: dict) -> Any:
    if isinstance(value, tuple):
        parts = [_specialize(x, (*path, j), constants, attributes) for j, x in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        if value.data_ptr() % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
