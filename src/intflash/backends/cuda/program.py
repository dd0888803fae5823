"""Compiles the CUDA C++ of csrc/cuda to machine code by NVRTC, caches it on disk, and launches it by the native module.

NVRTC and its Python bindings come with torch on CUDA machines. Compiling needs no GPU, so that the kernels can be
disassembled and tested for integer-only code on any machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intflash.backends import native
from intflash.backends.cache import cache_folder
from intflash.backends.cuda import wgmma
from intflash.backends.cuda.tensor_maps import TensorMap, encoded


def _source_folder() -> Path:
    """Returns csrc/cuda, inside an installed package or at the root of a checkout."""
    package = Path(__file__).parents[2]
    installed = package / "csrc" / "cuda"
    return installed if installed.is_dir() else package.parents[1] / "csrc" / "cuda"


SOURCES = _source_folder()
HOPPER = "sm_90a"  # the architecture that wgmma and TMA need
C_TYPES = {  # the names of dtypes in csrc/cuda
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat_t",
    torch.float32: "float",
    torch.float64: "double",
}


@dataclass(frozen=True)
class CudaProgram:
    """A file of csrc/cuda with values of its macros, which is compiled once.

    Attributes:
        file: its path relative to csrc/cuda.
        macros: (name, value) pairs.
        products: the warpgroup products that it uses.
        entry: the kernel's name.
    """

    file: str
    macros: tuple[tuple[str, str], ...]
    products: tuple[wgmma.Product, ...] = ()
    entry: str = "attention"

    @classmethod
    def of(
        cls, file: str, products: Iterable[wgmma.Product] = (), entry: str = "attention", **macros: object
    ) -> CudaProgram:
        return cls(file, tuple((name, str(value)) for name, value in macros.items()), tuple(products), entry)

    @classmethod
    def named(cls, file: str, entry: str, macros: tuple[tuple[str, str], ...]) -> CudaProgram:
        """A program of the native launcher, which knows its macros; the products follow from them."""
        return cls(file, macros, wgmma.products(file, dict(macros)), entry)

    def sources(self) -> dict[str, str]:
        """The text of every header by its path relative to csrc/cuda, as `#include` names it."""
        return _headers() | {"sm90/wgmma.cuh": wgmma.header(self.products)}

    def text(self) -> str:
        return (SOURCES / self.file).read_text()

    def options(self, architecture: str) -> tuple[str, ...]:
        macros = (f"-D{name}={value}" for name, value in self.macros)
        return (f"--gpu-architecture={architecture}", "--std=c++17", *macros)


@functools.cache
def _headers() -> dict[str, str]:
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in sorted(SOURCES.rglob("*.cuh"))}


def unavailable() -> str | None:
    """Returns why nothing can be compiled or launched here, or None."""
    if not SOURCES.is_dir():
        return f"the CUDA sources are not installed: {SOURCES} does not exist"
    if native.missing is not None:
        return native.missing
    if not native.module.reads_torch():
        return f"its native module does not find the C functions of torch {torch.__version__} that read tensors"
    try:
        from cuda.bindings import nvrtc  # noqa: F401
    except ImportError as error:
        return f"needs NVRTC through the package cuda-bindings (pip install 'intflash[cuda]'): {error}"
    return None


def checked(result: tuple, what: str) -> Any:
    """Returns the values of a CUDA call.

    Raises:
        RuntimeError: the call failed.
    """
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"{what} failed: {code!r}")
    return values[0] if len(values) == 1 else values


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; Hopper's where a kernel is only compiled."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The GPU's multiprocessors; those of an H200 (132) where a kernel is only compiled."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a CTA can have; those of an H200 where a kernel is only compiled."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def on_hopper(device: torch.device) -> bool:
    return capability(device) == (9, 0)


def architecture_of(capability: tuple[int, int]) -> str:
    """Returns NVRTC's name for GPUs of a compute capability."""
    return HOPPER if capability == (9, 0) else "sm_{}{}".format(*capability)


@functools.cache
def machine_code(program: CudaProgram, architecture: str) -> bytes:
    """Returns the cubin of a program, from the cache on disk where it has been compiled before.

    Raises:
        ImportError: NVRTC is missing (see `unavailable`).
        RuntimeError: NVRTC refused it; the message holds its log.
    """
    key = repr((program.text(), sorted(program.sources().items()), program.options(architecture), _compiler_version()))
    path = cache_folder(f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin")
    if path.exists():
        return path.read_bytes()
    code = compile_program(program, architecture).cubin
    _write_cache(path, code)
    return code


@functools.cache
def _compiler_version() -> object:
    """NVRTC's version, by its package where there is one, because loading NVRTC would take most of a first call."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    from cuda.bindings import nvrtc

    return checked(nvrtc.nvrtcVersion(), "nvrtcVersion")


def _write_cache(path: Path, code: bytes) -> None:
    """Writes a cache file atomically. Where the folder cannot be written, the next process compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass


class Compiled(NamedTuple):
    """The result of NVRTC; `log` is ptxas's log."""

    cubin: bytes
    ptx: bytes
    log: str


def compile_program(program: CudaProgram, architecture: str = HOPPER) -> Compiled:
    """Compiles a program, without the cache.

    Raises:
        RuntimeError: NVRTC refused it; the message holds its log.
    """
    from cuda.bindings import nvrtc

    headers = program.sources()
    handle = checked(
        nvrtc.nvrtcCreateProgram(
            program.text().encode(), program.file.encode(), len(headers),
            [text.encode() for text in headers.values()], [name.encode() for name in headers],
        ),
        "nvrtcCreateProgram",
    )  # fmt: skip
    options = [option.encode() for option in (*program.options(architecture), "--ptxas-options=-v")]
    (code,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(handle), "nvrtcGetProgramLogSize")
    checked(nvrtc.nvrtcGetProgramLog(handle, log), "nvrtcGetProgramLog")
    if int(code) != 0:
        raise RuntimeError(f"{program.file} for {architecture} with {dict(program.macros)}: {code!r}\n{log.decode()}")
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(handle), "nvrtcGetCUBINSize")
    checked(nvrtc.nvrtcGetCUBIN(handle, cubin), "nvrtcGetCUBIN")
    ptx = b" " * checked(nvrtc.nvrtcGetPTXSize(handle), "nvrtcGetPTXSize")
    checked(nvrtc.nvrtcGetPTX(handle, ptx), "nvrtcGetPTX")
    checked(nvrtc.nvrtcDestroyProgram(handle), "nvrtcDestroyProgram")
    return Compiled(cubin, ptx, log.decode())


@functools.cache
def _kernel(program: CudaProgram, device: torch.device, shared_bytes: int) -> int:
    """Returns the handle of the loaded kernel, with this much dynamic shared memory allowed."""
    code = machine_code(program, architecture_of(capability(device)))
    return native.module.load_kernel(device.index, code, program.entry, shared_bytes)


@dataclass(frozen=True)
class CudaLaunch:
    """One launch as a value. It can be run, or only its program compiled, which needs no GPU.

    Attributes:
        parameters: the kernel's parameters, bytes or an object with a buffer of them.
        tensors: those whose addresses the parameters hold. The launch keeps them alive.
        overlaps: the kernel may start before the previous one has ended, because its code waits (griddepcontrol)
            before it reads or writes memory. This hides the latency of a launch in a chain of kernels, from compute
            capability 9.0 on.
        maps: of tensors that the kernel loads by TMA: its second parameter begins with the driver's bytes of each,
            which need a driver.
        after_maps: the rest of the second parameter.
        workspace: (address, bytes) of the memory of `tensors` that several launches share, part by part.
    """

    program: CudaProgram
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    parameters: Any
    device: torch.device
    tensors: tuple[Tensor, ...]
    overlaps: bool = False
    maps: tuple[TensorMap, ...] = ()
    after_maps: bytes = b""
    workspace: tuple[tuple[int, int], ...] = ()

    def run(self) -> None:
        """Queues it on the current stream of its device."""
        structs = (self.parameters,)
        if self.maps:
            structs += (b"".join(encoded(x, self.device) for x in self.maps) + self.after_maps,)
        kernel = _kernel(self.program, self.device, self.shared_bytes)
        # as torch.compile's code asks: torch.cuda.current_stream takes 7 us
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        native.module.launch_kernel(
            self.device.index, kernel, self.grid, self.threads, self.shared_bytes, self.overlaps, structs, stream
        )
