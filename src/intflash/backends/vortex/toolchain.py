"""The user's Vortex install, found by environment variables, and its compiler.

VORTEX_HOME   the Vortex source tree (required)
VORTEX_BUILD  its configured build tree (required; may be the same folder)
VORTEX_DRIVER simx (default), rtlsim, opae or xrt: which runtime library runs the kernel
VORTEX_CXX    the RISC-V C++ compiler; else Vortex's own clang ($LLVM_VORTEX or $TOOLDIR), else clang++ of the PATH
VORTEX_CXXFLAGS  more compiler flags
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from intflash.backends.cache import cache_folder
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.image import pack_image
from intflash.backends.vortex.launch import KERNELS, Program

INSTALL_GUIDE = "https://github.com/vortexgpgpu/vortex/blob/master/docs/install_vortex.md"
STARTUP_ADDRESS = 0x80000000
RISCV_FLAGS = ("--target=riscv32-unknown-elf", "-mabi=ilp32f", "-mcmodel=medany")
CODE_FLAGS = (
    "-O3", "-fno-builtin", "-fno-exceptions", "-fno-rtti", "-fdata-sections", "-ffunction-sections",
    "-fno-strict-aliasing", "-ftls-model=local-exec", "-DNDEBUG",
)  # fmt: skip
# The SDK's names of the 32-bit device: older trees, and trees that keep their software under sw/.
OLDER_SDK = ("-DXLEN_32",)
NEWER_SDK = ("-DVX_CFG_XLEN=32", "-DVX_CFG_XLEN_32", "-D__VORTEX__")
# The SIMT programs need no C++ library; libc++ beside clang would refuse a target without threads.
SIMT_FLAGS = ("-nostdinc++",)
# Zicond makes selects of ternaries; its name changed while it was experimental. The last always compiles.
MARCH = (
    ("-march=rv32imaf_zicond",),
    ("-menable-experimental-extensions", "-march=rv32imaf_zicond1p0"),
    ("-march=rv32imaf",),
)


@dataclass(frozen=True)
class Install:
    """The parts of a Vortex tree that a kernel needs; `find_install` checks that they exist."""

    home: Path
    build: Path
    compiler: Path
    defines: tuple[str, ...]
    includes: tuple[Path, ...]
    kernel_library: Path
    linker_script: Path
    runtime: Path
    driver: str
    toolchain_flags: tuple[str, ...] = ()
    extra_libraries: tuple[Path, ...] = ()


def find_install(environment: Mapping[str, str] | None = None) -> Install:
    """The install named by the environment.

    Raises:
        VortexError: a variable or a part is missing; the message names it and the step that makes it.
    """
    env = os.environ if environment is None else environment
    home = _folder(env, "VORTEX_HOME", "the Vortex source tree")
    build = _folder(env, "VORTEX_BUILD", "Vortex's configured build tree")
    # newer trees keep the software under sw/
    kernel_include = _part(home, ("kernel/include/vx_spawn.h", "sw/kernel/include/vx_spawn.h"), "VORTEX_HOME").parent
    script = _part(home, ("kernel/scripts/link32.ld", "sw/kernel/scripts/link32.ld"), "VORTEX_HOME")
    config = _part(build, ("hw/VX_config.h", "sw/VX_config.h"), "VORTEX_BUILD", "configure the tree and run make -C hw")
    library = _part(
        build, ("kernel/libvortex.a", "sw/kernel/libvortex.a"), "VORTEX_BUILD", "run make -C kernel in the build tree"
    )
    runtime = _part(
        build, ("runtime/libvortex.so", "sw/runtime/libvortex.so"), "VORTEX_BUILD", "run make -C runtime/stub there"
    ).parent
    driver = env.get("VORTEX_DRIVER", "simx")
    if not (runtime / f"libvortex-{driver}.so").exists():
        raise VortexError(
            f"{runtime} has no libvortex-{driver}.so (VORTEX_DRIVER={driver}): "
            f"run make -C runtime/{driver} in the build tree"
        )
    settings = _settings(build / "config.mk")
    if settings.get("XLEN", "32") != "32":
        raise VortexError(f"{build} is configured with XLEN={settings['XLEN']}: the kernels are for the 32-bit device")
    tools = Path(env.get("TOOLDIR") or settings.get("TOOLDIR") or "/opt")
    gnu = tools / "riscv32-gnu-toolchain"
    flags = [f"--sysroot={gnu / 'riscv32-unknown-elf'}", f"--gcc-toolchain={gnu}"] if gnu.is_dir() else []
    libraries = (
        tools / "libc32/lib/libm.a",
        tools / "libc32/lib/libc.a",
        tools / "libcrt32/lib/baremetal/libclang_rt.builtins-riscv32.a",
    )
    includes = [kernel_include, config.parent, home / "hw", home / "sim/common", home / "sw/common"]
    return Install(
        home=home,
        build=build,
        compiler=_compiler(env, tools),
        defines=NEWER_SDK if (home / "sw").is_dir() else OLDER_SDK,
        includes=tuple(folder for folder in includes if folder.is_dir()),
        kernel_library=library,
        linker_script=script,
        runtime=runtime,
        driver=driver,
        toolchain_flags=(*flags, *shlex.split(env.get("VORTEX_CXXFLAGS", ""))),
        extra_libraries=tuple(path for path in libraries if path.exists()),
    )


def compile_kernel(install: Install, program: Program, defines: Mapping[str, int]) -> Path:
    """The packed image of a program, compiled once per source, defines and install; a path in the cache.

    Raises:
        VortexError: the compiler or linker failed; the message holds the command and its output.
    """
    command = [
        str(install.compiler), *RISCV_FLAGS, *march_flags(install.compiler), *install.toolchain_flags, *CODE_FLAGS,
        *install.defines, *(library_flags(install) if program.tensor_unit else SIMT_FLAGS),
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
        *(f"-I{folder}" for folder in (KERNELS, *install.includes)),
    ]  # fmt: skip
    digest = hashlib.sha256("\0".join(command).encode())
    for path in (*sorted(KERNELS.glob("*.[ch]")), program.path, install.kernel_library, install.linker_script):
        digest.update(path.read_bytes())
    image = _cache_folder() / f"{program.name}-{digest.hexdigest()[:20]}.vxbin"
    if not image.exists():
        with tempfile.TemporaryDirectory(dir=image.parent) as name:
            folder = Path(name)
            runtime, kernel, linked = folder / "runtime.o", folder / "kernel.o", folder / "kernel.elf"
            _run([*command, "-x", "c", "-std=gnu11", "-ffreestanding", "-c", str(KERNELS / "runtime.c"),
                  "-o", str(runtime)])  # fmt: skip
            _run([*command, "-std=c++17", "-c", str(program.path), "-o", str(kernel)])
            _run([*command, *_link_arguments(install), str(kernel), str(runtime), "-Wl,--start-group",
                  str(install.kernel_library), *map(str, install.extra_libraries), "-Wl,--end-group",
                  "-o", str(linked)])  # fmt: skip
            packed = folder / "kernel.vxbin"
            packed.write_bytes(pack_image(linked.read_bytes()))
            os.replace(packed, image)
    return image


@cache
def library_flags(install: Install) -> tuple[str, ...]:
    """Flags that give the tensor-unit programs the C++ headers of the SDK's <vx_tensor.h>.

    Empty where the compiler finds them by itself (Vortex's toolchain); else libc++ beside the compiler, without
    threads and clocks, over picolibc's C headers.

    Raises:
        VortexError: neither is there; the message says what to install.
    """
    c_library = Path("/usr/lib/picolibc/riscv64-unknown-elf/include")
    root = install.compiler.resolve().parent.parent
    found = [
        ("-D_LIBCPP_HAS_NO_THREADS", "-D_LIBCPP_HAS_NO_MONOTONIC_CLOCK", f"-stdlib++-isystem{folder}",
         "-idirafter", str(c_library))
        for folder in (root / "include/c++/v1", Path("/usr/include/c++/v1")) if folder.is_dir()
    ]  # fmt: skip
    output = ""
    for flags in ((), *found):
        command = [str(install.compiler), *RISCV_FLAGS, *march_flags(install.compiler), *install.toolchain_flags]
        command += [*flags, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"]
        names = ("algorithm", "array", "cassert", "type_traits", "utility")
        headers = "".join(f"#include <{name}>\n" for name in names)
        done = subprocess.run(command, input=headers, capture_output=True, text=True)
        if done.returncode == 0:
            return flags
        output = done.stderr
    raise VortexError(
        "the tensor-unit programs include <array>: the compiler needs a C++ library's headers for RISC-V. Use "
        "Vortex's toolchain, or install libc++ for this clang and picolibc (Debian: libc++-19-dev and "
        f"picolibc-riscv64-unknown-elf), or name them in VORTEX_CXXFLAGS: {output.strip()[-500:]}"
    )


@cache
def march_flags(compiler: Path) -> tuple[str, ...]:
    """The first of `MARCH` that the compiler accepts.

    Raises:
        VortexError: it compiles for no RISC-V at all.
    """
    output = ""
    for flags in MARCH:
        target = [*RISCV_FLAGS, *flags, "-ffreestanding"]
        command = [str(compiler), *target, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return flags
        output = done.stderr
    raise VortexError(f"{compiler} does not compile for riscv32 (name another in VORTEX_CXX): {output.strip()[-500:]}")


def _link_arguments(install: Install) -> list[str]:
    lld = shutil.which("ld.lld", path=f"{install.compiler.parent}{os.pathsep}{os.environ.get('PATH', '')}")
    return [
        *(["-fuse-ld=lld"] if lld else []),
        "-nostartfiles", "-nostdlib", "-static", "-Wl,-Bstatic,--gc-sections",
        f"-Wl,-T,{install.linker_script}", f"-Wl,--defsym=STARTUP_ADDR={STARTUP_ADDRESS:#x}",
    ]  # fmt: skip


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise VortexError(f"building the kernel failed:\n{shlex.join(command)}\n{(done.stderr or done.stdout)[-3000:]}")


def _folder(env: Mapping[str, str], variable: str, meaning: str) -> Path:
    value = env.get(variable)
    if not value:
        raise VortexError(f"{variable} is not set: it names {meaning}. Vortex's install guide: {INSTALL_GUIDE}")
    if not Path(value).is_dir():
        raise VortexError(f"{variable}={value} is not a folder: it names {meaning}")
    return Path(value).resolve()  # a job runs in a working folder of its own


def _part(root: Path, candidates: tuple[str, ...], variable: str, remedy: str | None = None) -> Path:
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    hint = remedy or f"is {variable} a Vortex tree? See {INSTALL_GUIDE}"
    raise VortexError(f"{root} ({variable}) has no {candidates[0]}: {hint}")


def _compiler(env: Mapping[str, str], tools: Path) -> Path:
    if named := env.get("VORTEX_CXX"):
        found = shutil.which(named)
        if found is None:
            raise VortexError(f"VORTEX_CXX={named} is not an executable file")
        return Path(found)
    candidates = [Path(env["LLVM_VORTEX"]) / "bin/clang++"] if env.get("LLVM_VORTEX") else []
    candidates.append(tools / "llvm-vortex/bin/clang++")
    for candidate in candidates:
        if candidate.exists():
            return candidate
    found = shutil.which("clang++", path=env.get("PATH"))
    if found is None:
        raise VortexError(
            "no RISC-V compiler: name one in VORTEX_CXX, or set TOOLDIR to Vortex's toolchain, or install clang and lld"
        )
    return Path(found)


def _settings(config: Path) -> dict[str, str]:
    """The simple assignments of Vortex's generated config.mk."""
    if not config.exists():
        return {}
    return dict(re.findall(r"^(?:export\s+)?(\w+)\s*[?:]?=\s*(\S+)\s*$", config.read_text(), re.MULTILINE))


def _cache_folder() -> Path:
    folder = cache_folder("vortex")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
