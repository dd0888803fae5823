"""Builds simx for the report's machine at a memory clock ratio, with the tensor unit and counters, in our cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from intflash.backends.cache import cache_folder
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.toolchain import Install

# The report's machine: 4 cores, 2 warps a core, 8 threads a warp. Newer trees prefix their settings.
_SETTINGS = {"NUM_CORES": 4, "NUM_WARPS": 2, "NUM_THREADS": 8}


def build_simulator(install: Install, memory_clock_ratio: int) -> Path:
    """The folder of a libvortex-simx.so built with that MEM_CLOCK_RATIO; built once per tree and ratio.

    Raises:
        VortexError: make failed, or wrote no library; the message holds the command and its output.
    """
    makefile = install.runtime / "simx"
    if not makefile.is_dir():
        raise VortexError(f"{makefile} is missing: the memory clock ratio is a setting of the simulator's build")
    prefix = "VX_CFG_" if install.runtime.parent.name == "sw" else ""
    configs = [f"-D{prefix}{name}={value}" for name, value in _SETTINGS.items()]
    configs += [f"-D{prefix}EXT_TCU_ENABLE", f"-DMEM_CLOCK_RATIO={memory_clock_ratio}", "-DPERF_ENABLE"]
    key = hashlib.sha256(f"{install.build}\0{configs}".encode()).hexdigest()[:16]
    folder = cache_folder("vortex", f"simx-{key}")
    library = folder / "libvortex-simx.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        jobs = f"-j{os.cpu_count() or 1}"
        command = ["make", jobs, "-C", str(makefile), f"DESTDIR={folder}", f"CONFIGS={' '.join(configs)}"]
        env = os.environ | {"VORTEX_HOME": str(install.home)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode != 0 or not library.exists():
            raise VortexError(f"building simx failed:\n{' '.join(command)}\n{(done.stderr or done.stdout)[-2000:]}")
    return folder
