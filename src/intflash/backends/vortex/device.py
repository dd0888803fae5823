"""Runs launches on the user's Vortex: compile, hand the job to a process of its own, read results and counters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from intflash.backends.vortex import runtime
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.launch import WARP_ROWS, KernelArgs, Launch
from intflash.backends.vortex.toolchain import Install, compile_kernel

TENSOR_THREADS = 8  # threads a warp that the tensor tile's shape of the kernels is made for
TIMEOUT_S = 3600

# Counters by name; the addresses of the tree's own headers replace these where found.
_COUNTERS = {
    "cycles": ("VX_CSR_MCYCLE", 0xB00),
    "instructions": ("VX_CSR_MINSTRET", 0xB02),
    "memory_reads": ("VX_CSR_MPM_MEM_READS", 0xB18),
    "memory_latency": ("VX_CSR_MPM_MEM_LT", 0xB1A),
}
_MEMORY_CLASS = ("VX_DCR_MPM_CLASS_MEM", 2)


@dataclass(frozen=True)
class Counters:
    """What Vortex counted in one kernel run.

    Attributes:
        instructions: thread-instructions, over all cores.
        cycles: of the slowest core.
        memory_reads: of the memory, over all cores.
        memory_latency_total: cycles, over all memory reads.
    """

    instructions: int
    cycles: int
    memory_reads: int
    memory_latency_total: int

    @property
    def ipc(self) -> float:
        return self.instructions / self.cycles if self.cycles else 0.0

    @property
    def memory_latency(self) -> float:
        """Mean cycles per memory read."""
        return self.memory_latency_total / self.memory_reads if self.memory_reads else 0.0

    def __add__(self, other: Counters) -> Counters:
        """Runs one after the other (the three kernels of standard attention)."""
        return Counters(
            self.instructions + other.instructions,
            self.cycles + other.cycles,
            self.memory_reads + other.memory_reads,
            self.memory_latency_total + other.memory_latency_total,
        )


@dataclass(frozen=True)
class VortexDevice:
    """Executor on an install.

    Attributes:
        install: from `toolchain.find_install`.
        driver_folder: where libvortex-<driver>.so lies, when not beside libvortex.so (a simx built otherwise).
    """

    install: Install
    driver_folder: Path | None = None

    def __call__(self, launch: Launch) -> Counters:
        """Runs every stage; results land in the launch's buffers.

        Returns:
            The counters, summed over the stages.

        Raises:
            VortexError: the build failed, the library refused, or the simulator aborted.
        """
        image = compile_kernel(self.install, launch.program, launch.defines)
        with tempfile.TemporaryDirectory(prefix="intflash-vortex-") as name:
            folder = Path(name)
            headers = _read_headers(self.install)
            self._write_job(folder, launch, image, headers)
            self._run_process(folder, launch.program.name, headers.memory_class)
            result = json.loads((folder / "result.json").read_text())
            for output in launch.outputs:
                buffer = launch.buffers[output]
                buffer[...] = np.frombuffer((folder / output).read_bytes(), buffer.dtype).reshape(buffer.shape)
        stages = [_counters(stage) for stage in result["counters"]]
        return sum(stages[1:], start=stages[0])

    def has_tensor_unit(self) -> bool:
        """Whether the device has a tensor unit and the shape that its kernels need; asked once per install.

        Raises:
            VortexError: the library or the driver did not start.
        """
        return _has_tensor_unit(self)

    def _write_job(self, folder: Path, launch: Launch, image: Path, headers: _Headers) -> None:
        offsets = {field: getattr(KernelArgs, field).offset for field in launch.buffers}
        stages = [bytes(launch.arguments(stage, {})).hex() for stage in range(launch.program.stages)]
        job = {
            "library": str(self.install.runtime / "libvortex.so"),
            "classed_counters": headers.classed,
            "counters": headers.counters,
            "image": str(image),
            "driver": self.install.driver,
            "threads_per_warp": TENSOR_THREADS if launch.program.tensor_unit else None,
            "group_threads": launch.threads,
            "buffers": {field: buffer.nbytes for field, buffer in launch.buffers.items()},
            "address_fields": offsets,
            "outputs": launch.outputs,
            "group_scratch": launch.group_scratch,
            "scratch_field": KernelArgs.scratch_addr.offset,
            "stages": stages,
            "timeout_ms": TIMEOUT_S * 1000,
        }
        (folder / "job.json").write_text(json.dumps(job))
        for field, buffer in launch.buffers.items():
            (folder / field).write_bytes(buffer.tobytes())

    def _run_process(self, folder: Path, program: str, memory_class: int) -> None:
        folders = [str(f) for f in (self.driver_folder, self.install.runtime) if f is not None]
        searched = os.environ.get("LD_LIBRARY_PATH")
        env = os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join([*folders, *([searched] if searched else [])]),
            "VORTEX_DRIVER": self.install.driver,
            "VORTEX_PROFILING": str(memory_class),  # which counters share the CSR addresses: those of the memory
        }
        command = [sys.executable, str(Path(runtime.__file__).resolve()), str(folder)]
        try:
            # simx writes traces and statistics into its working folder
            done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S + 60)
        except subprocess.TimeoutExpired:
            raise VortexError(f"{program} did not end on {self.install.driver} within {TIMEOUT_S} s") from None
        if done.returncode < 0:
            raise VortexError(
                f"{self.install.driver} died of signal {-done.returncode} while it ran {program} (simx aborts on a "
                f"branch that splits a warp, and on an unknown instruction):\n{(done.stdout + done.stderr)[-2000:]}"
            )
        if done.returncode != 0:
            raise VortexError(f"{program} on {self.install.driver}: {done.stderr.strip()[-2000:]}")


@cache
def _has_tensor_unit(device: VortexDevice) -> bool:
    headers = _read_headers(device.install)
    with tempfile.TemporaryDirectory(prefix="intflash-vortex-") as name:
        folder = Path(name)
        job = {"library": str(device.install.runtime / "libvortex.so"), "classed_counters": headers.classed}
        (folder / "job.json").write_text(json.dumps(job))
        device._run_process(folder, "the query of the device", headers.memory_class)
        caps = json.loads((folder / "result.json").read_text())["caps"]
    if not caps["isa"] >> (32 + headers.tensor_unit_bit) & 1:
        return False
    try:
        runtime.check_shape(caps, device.install.driver, TENSOR_THREADS, WARP_ROWS)
    except runtime.DeviceError:
        return False
    return True


def _counters(stage: dict[str, list[int]]) -> Counters:
    # memory counters belong to the processor: every core reports the same ones
    return Counters(
        instructions=sum(stage["instructions"]),
        cycles=max(stage["cycles"]),
        memory_reads=stage["memory_reads"][0],
        memory_latency_total=stage["memory_latency"][0],
    )


@dataclass(frozen=True)
class _Headers:
    """What the tree's headers say of the performance counters: (class, address) by name."""

    counters: dict[str, tuple[int, int]]
    memory_class: int
    classed: bool  # queries name the class
    tensor_unit_bit: int  # of the upper word of VX_CAPS_ISA_FLAGS


def _read_headers(install: Install) -> _Headers:
    names = ("hw/VX_config.h", "sw/VX_config.h", "hw/VX_types.h", "sw/VX_types.h")
    types = [*(install.build / name for name in names), install.home / "hw/rtl/VX_types.vh"]
    text = "".join(path.read_text(errors="replace") for path in types if path.exists())

    def value(name: str, default: int) -> int:
        found = re.search(rf"define\s+{name}\s+(\d+'h|0x)?([0-9a-fA-F]+)", text)
        return int(found[2], 16 if found[1] else 10) if found else default

    headers = (install.home / "runtime/include/vortex.h", install.home / "sw/runtime/include/vortex.h")
    prototype = next((re.search(r"vx_mpm_query\s*\(([^)]*)\)", p.read_text()) for p in headers if p.exists()), None)
    memory_class = value(*_MEMORY_CLASS)
    counters = {
        name: (memory_class if name.startswith("memory") else 0, value(macro, default))
        for name, (macro, default) in _COUNTERS.items()
    }
    classed = bool(prototype and "mpm_class" in prototype[1])
    return _Headers(counters, memory_class, classed, value("(?:VX_CFG_)?ISA_EXT_TCU", 6))
