"""Counts the thread-instructions of our kernels without Vortex: compiled for RV32 by clang, run in lockstep by numpy.

No simulator of Vortex: no clock, caches or scheduler, and not the code of vx_spawn_threads. What it shares with Vortex
is what the instruction counter counts inside a kernel, and the rule that no branch may split a warp. The tensor-unit
programs are left out: their fragment code is the SDK's.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.launch import KERNELS, Launch
from intflash.backends.vortex.toolchain import CODE_FLAGS, RISCV_FLAGS, SIMT_FLAGS, march_flags
from machines.riscv.machine import Machine

HERE = Path(__file__).parent
SDK = HERE.parent / "vortex_sdk"
INCLUDES = (*CODE_FLAGS, *SIMT_FLAGS, f"-I{KERNELS}", f"-I{SDK}", "-std=c++17")


def riscv_clang() -> Path:
    """clang++ with a RISC-V target, and ld.lld.

    Raises:
        VortexError: one is missing; the message says which.
    """
    compiler = shutil.which("clang++")
    if compiler is None or shutil.which("ld.lld") is None:
        raise VortexError("counting instructions needs clang++ and ld.lld (Debian: apt-get install clang lld)")
    march_flags(Path(compiler))
    return Path(compiler)


def compile_object(
    compiler: Path, source: Path, defines: dict[str, int], march: tuple[str, ...] | None = None
) -> bytes:
    """A kernel compiled for RV32 against our stand-in SDK headers; the object file's bytes."""
    flags = [*RISCV_FLAGS, *(march or march_flags(compiler)), *INCLUDES]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.o"
        _run([str(compiler), *flags, *_defines(defines), "-c", str(source), "-o", str(out)])
        return out.read_bytes()


def link(compiler: Path, source: Path, defines: dict[str, int]) -> bytes:
    """A kernel linked with the interpreter's glue; the program's bytes."""
    flags = [*RISCV_FLAGS, *march_flags(compiler), *INCLUDES, "-Wno-main"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.elf"
        _run([str(compiler), *flags, *_defines(defines), str(source), str(HERE / "glue.cpp"), "-nostdlib", "-static",
              "-fuse-ld=lld", f"-Wl,-T,{HERE / 'link.ld'}", "-o", str(out)])  # fmt: skip
        return out.read_bytes()


@dataclass
class Interpreter:
    """Executor that interprets launches; `instructions` is the thread-instructions of the last one."""

    compiler: Path = field(default_factory=riscv_clang)
    instructions: int = 0

    def __call__(self, launch: Launch) -> int:
        """Runs every stage; results land in the launch's buffers. Returns the thread-instructions.

        Raises:
            VortexError: a branch splits a warp, or the program uses the tensor unit.
        """
        if launch.program.tensor_unit:
            raise VortexError("the interpreter has no tensor unit: its fragment code belongs to Vortex's SDK")
        elf = link(self.compiler, launch.program.path, launch.defines)
        size = sum(buffer.nbytes + 64 for buffer in launch.buffers.values()) + launch.group_scratch
        machine = Machine(elf, (size + (1 << 20)) // 4096 * 4096)
        addresses = {}
        for name, buffer in launch.buffers.items():
            addresses[name] = machine.memory.allocate(buffer.nbytes)
            machine.memory.place(buffer, addresses[name])
        if launch.group_scratch:
            addresses["scratch_addr"] = machine.memory.allocate(launch.group_scratch)
        self.instructions = 0
        for stage in range(launch.program.stages):
            block = bytes(launch.arguments(stage, addresses))
            at = machine.memory.allocate(len(block))
            machine.memory.place(block, at)
            with np.errstate(all="ignore"):  # wrapping is what registers do
                self.instructions += machine.run(at, launch.threads)
        for name in launch.outputs:
            buffer = launch.buffers[name]
            start = addresses[name] - 0x80000000
            buffer[...] = machine.memory.bytes[start : start + buffer.nbytes].view(buffer.dtype).reshape(buffer.shape)
        return self.instructions


def _defines(defines: dict[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise VortexError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
