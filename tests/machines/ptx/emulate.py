"""Runs launches of the CUDA kernels on the CPU: NVRTC compiles CUDA C++ to PTX, translate.py converts PTX to C++, and
g++ compiles that.

For the integer kernels the results have the GPU's bits; times mean nothing. The emulator also finds accesses outside of
tensors and of shared memory, misaligned accesses, deadlocks, missing waits for copies, operands that are overwritten
during a product, and memory accesses before the previous kernel has ended.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ptx
import translate
from torch import Tensor

from intflash.backends.cache import cache_folder
from intflash.backends.cuda import program
from intflash.backends.cuda.tensor_maps import TensorMap

HERE = Path(__file__).parent
_CXX = "-std=c++17 -O1 -shared -fPIC -fwrapv -ffp-contract=off -fno-math-errno -U_FORTIFY_SOURCE -w".split()


class EmulationError(RuntimeError):
    """What a kernel did that is forbidden."""


@dataclass(frozen=True)
class _Launched:
    """A launch that has run: its plan's workspace, and what of its memory it has not changed. All kernels wait for the
    previous one and only then let the next one start, so that the next launch of the plan may read that at once.
    """

    workspace: tuple[tuple[int, int], ...] = ()
    unchanged: frozenset[tuple[int, int]] = frozenset()


_previous = _Launched()


def unavailable() -> str | None:
    """Returns why nothing can be emulated here, or None."""
    if shutil.which("g++") is None:
        return "no g++"
    return program.unavailable()


@functools.cache
def ptx_of(kernel: program.CudaProgram) -> str:
    return program.compile_program(kernel).ptx.decode().rstrip("\0")


@functools.cache
def _library(text: str) -> tuple[ctypes.CDLL, int, tuple[int, ...]]:
    """Compiles PTX to a library. Returns it, the bytes of static shared memory, and the CTAs of a cluster by axis."""
    parsed = ptx.parse(text)
    source = translate.cpp(parsed)
    machine = "".join(path.read_text() for path in sorted(HERE.glob("*.hpp")))
    path = cache_folder(f"emulated-{hashlib.sha256((source + machine).encode()).hexdigest()[:32]}.so")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}.so")
        subprocess.run(["g++", *_CXX, f"-I{HERE}", "-x", "c++", "-", "-o", own], input=source, text=True, check=True)
        own.replace(path)
    library = ctypes.CDLL(str(path))
    library.launch.restype = ctypes.c_char_p
    return library, parsed.shared_bytes, parsed.cluster


def run(launch: program.CudaLaunch, seed: int = 0) -> None:
    """Runs a launch on tensors of the CPU. seed: of the order in which threads run.

    Raises:
        EmulationError: the kernel did something forbidden.
    """
    structs = [_buffer(launch.parameters)]
    if launch.maps:
        structs.append(_buffer(b"".join(map(_plain, launch.maps)) + launch.after_maps))
    parts = {(start, start + size) for start, size in launch.workspace}
    bounds = {_bounds(x) for x in launch.tensors}
    # a workspace is one tensor: only its parts may be accessed
    bounds = {b for b in bounds if not any(b[0] <= start < b[1] for start, _ in parts)} | parts
    text, shared = ptx_of(launch.program), launch.shared_bytes
    global _previous
    early = _previous.unchanged if launch.workspace and launch.workspace is _previous.workspace else frozenset()
    before = {part: _content(part) for part in bounds if launch.workspace}
    _run(text, launch.grid, launch.threads, shared, structs, bounds, launch.overlaps, seed, early)
    unchanged = frozenset(part for part, content in before.items() if _content(part) == content)
    _previous = _Launched(launch.workspace, unchanged)


def run_ptx(
    text: str, grid: tuple[int, int, int], threads: int, shared_bytes: int,
    structs: Sequence[ctypes.Structure | ctypes.Array], tensors: Iterable[Tensor], overlaps: bool = False,
    seed: int = 0, early: Iterable[Tensor] = (),
) -> None:  # fmt: skip
    """Runs the kernel `attention` of a module, which may access these tensors. structs: its parameters; early: tensors
    that it may read before the previous kernel has ended.
    """
    bounds = map(_bounds, tensors)
    _run(text, grid, threads, shared_bytes, structs, bounds, overlaps, seed, set(map(_bounds, early)))


def _run(
    text: str, grid: tuple[int, int, int], threads: int, shared_bytes: int,
    structs: Sequence[ctypes.Structure | ctypes.Array], memory: Iterable[tuple[int, int]], overlaps: bool, seed: int,
    early: Collection[tuple[int, int]] = (),
) -> None:  # fmt: skip
    """memory: (first byte, byte past the last) of what the kernel may access. early: what of it the kernel may read
    before the previous one has ended.
    """
    library, static, cluster = _library(text)
    pointers = (ctypes.c_void_p * 4)(*map(ctypes.addressof, structs))
    bounds = [x for part in memory for x in (*part, part in early)]
    failed = library.launch(
        (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*cluster), threads, shared_bytes + static, pointers,
        (ctypes.c_uint64 * len(bounds))(*bounds), len(bounds) // 3, overlaps, ctypes.c_uint64(seed),
    )  # fmt: skip
    if failed:
        raise EmulationError(failed.decode())


def run_source(source: str, grid: int, threads: int, tensors: Sequence[Tensor], **macros: object) -> None:
    """Runs CUDA C++ that may include the kernels' headers. Its `attention` takes a struct of the tensors' addresses."""

    class Source(program.CudaProgram):
        def text(self) -> str:
            return source

    addresses = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
    run_ptx(ptx_of(Source.of("source.cu", (), **macros)), (grid, 1, 1), threads, 0, [addresses], tensors)


def _bounds(x: Tensor) -> tuple[int, int]:
    """Returns the bounds of a tensor's storage, because kernels may read padding."""
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _content(bounds: tuple[int, int]) -> bytes:
    return ctypes.string_at(bounds[0], bounds[1] - bounds[0])


def _buffer(parameters: bytes | ctypes.Structure) -> ctypes.Array | ctypes.Structure:
    return ctypes.create_string_buffer(parameters, len(parameters)) if isinstance(parameters, bytes) else parameters


def _plain(tensor_map: TensorMap) -> bytes:
    """A tensor map in the form that machine.hpp reads instead of the driver's."""
    words = tensor_map.address, *tensor_map.sizes, *tensor_map.strides, *tensor_map.box, tensor_map.swizzle
    return bytes((ctypes.c_uint64 * 16)(*words))
