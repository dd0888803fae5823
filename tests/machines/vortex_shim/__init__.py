"""Runs the Vortex kernels natively, without Vortex: a host compiler, fibers for threads, and Vortex's rules checked.

This is a test instrument (no counters, no clock): see shim.cpp for what it refuses.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from intflash.backends.cache import cache_folder
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.launch import KERNELS, Launch

SHIM = Path(__file__).parent
GROUPS = 6  # at most that many run at once: CORES * CORE_WARPS of shim.cpp
FLAGS = ["-std=c++17", "-O2", "-g0", "-fPIC", "-fno-strict-aliasing", "-fvisibility=default", "-fno-gnu-unique"]
TRACE = "-fsanitize-coverage=trace-pc"  # lets the shim compare the branches of a warp's threads


def host_compiler() -> str | None:
    """The host C++ compiler ($CXX, g++ or clang++), or None."""
    named = os.environ.get("CXX")
    return next((found for name in (named, "g++", "clang++") if name and (found := shutil.which(name))), None)


def run(launch: Launch) -> None:
    """Executor: runs every stage of the launch in this process; results land in its buffers.

    Raises:
        VortexError: the kernel broke a rule of the machine, or there is no host compiler.
    """
    defines = tuple(f"-D{name}={value}" for name, value in sorted(launch.defines.items()))
    library = load(launch.program.path, defines)
    addresses = {name: buffer.ctypes.data for name, buffer in launch.buffers.items()}
    scratch = np.zeros(GROUPS * launch.group_scratch, np.uint8)
    if scratch.size:
        addresses["scratch_addr"] = scratch.ctypes.data
    for stage in range(launch.program.stages):
        error = library.vx_shim_run(ctypes.byref(launch.arguments(stage, addresses)))
        if error is not None:
            raise VortexError(f"{launch.program.name} in the shim: {error.decode()}")


@cache
def load(source: Path, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The kernel of `source` as a native library with `vx_shim_run`, built once per source, flags and compiler."""
    compiler = host_compiler()
    if compiler is None:
        raise VortexError("the shim needs a host C++ compiler: none of $CXX, g++ and clang++ was found")
    flags = [*FLAGS, *defines, f"-I{SHIM}", f"-I{KERNELS}"]
    if "clang" in Path(compiler).name:
        flags.remove("-fno-gnu-unique")
    digest = hashlib.sha256("\0".join([compiler, *flags]).encode())
    for file in sorted([source, *KERNELS.glob("*.h"), *SHIM.glob("*.h"), SHIM / "shim.cpp"]):
        digest.update(file.read_bytes())
    library = _cache_folder() / f"{source.stem}-{digest.hexdigest()[:20]}.so"
    if not library.exists():
        _build(compiler, flags, source, library)
    loaded = ctypes.CDLL(str(library))
    loaded.vx_shim_run.argtypes, loaded.vx_shim_run.restype = [ctypes.c_void_p], ctypes.c_char_p
    return loaded


def _build(compiler: str, flags: list[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        kernel, shim, linked = (str(Path(folder) / name) for name in ("kernel.o", "shim.o", "linked.so"))
        for command in (
            [compiler, *flags, TRACE, "-c", str(source), "-o", kernel],
            [compiler, *flags, "-c", str(SHIM / "shim.cpp"), "-o", shim],
            [compiler, "-shared", "-Wl,-Bsymbolic", kernel, shim, "-o", linked],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise VortexError(f"the host compiler failed:\n{' '.join(command)}\n{done.stderr[-2000:]}")
        os.replace(linked, library)  # whole or not at all, for tests in parallel


@cache
def _cache_folder() -> Path:
    folder = cache_folder("vortex-shim")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
