"""Fixtures of the Vortex tests: what this machine has of compilers, and a made-up Vortex install."""

import shutil
import stat
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from intflash.backends.vortex import toolchain
from intflash.backends.vortex.errors import VortexError
from machines import riscv, vortex_shim

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def host_compiler() -> str:
    compiler = vortex_shim.host_compiler()
    if compiler is None:
        pytest.skip("no host C++ compiler ($CXX, g++ or clang++)")
    return compiler


@pytest.fixture(scope="session")
def riscv_compiler() -> Path:
    found = shutil.which("clang++")
    if found is None:
        pytest.skip("no clang++ (Debian: apt-get install clang lld)")
    try:
        toolchain.march_flags(Path(found))
    except VortexError as error:
        pytest.skip(f"this clang++ has no RISC-V target: {error}")
    return Path(found)


@pytest.fixture(scope="session")
def riscv_linker() -> str:
    found = shutil.which("ld.lld")
    if found is None:
        pytest.skip("no ld.lld (Debian: apt-get install lld)")
    return found


@dataclass
class FakeInstall:
    """A folder tree with the parts that the driver looks for, and the variables that name it."""

    home: Path
    build: Path
    env: dict[str, str]


@pytest.fixture
def fake_install(tmp_path, host_compiler) -> FakeInstall:
    """All parts there: SDK headers are our stubs, the compiler writes a fixed image, the runtime is fake_vortex.c."""
    home, build, bin_ = tmp_path / "home", tmp_path / "build", tmp_path / "bin"
    for folder in ("kernel/include", "kernel/scripts", "runtime/include"):
        (home / folder).mkdir(parents=True)
    for folder in ("hw", "kernel", "runtime"):
        (build / folder).mkdir(parents=True)
    bin_.mkdir()
    for header in riscv.SDK.glob("*.h"):
        shutil.copy(header, home / "kernel/include")
    (home / "kernel/scripts/link32.ld").write_text("ENTRY(_start)\n")
    (home / "runtime/include/vortex.h").write_text(
        "int vx_mpm_query(vx_device_h hdevice, uint32_t addr, uint32_t core_id, uint64_t* value);\n"
    )
    (build / "hw/VX_config.h").write_text("")
    (build / "hw/VX_types.h").write_text("#define VX_CSR_MPM_MEM_READS 0xB18\n#define VX_CSR_MPM_MEM_LT 0xB1A\n")
    (build / "kernel/libvortex.a").write_bytes(b"!<arch>\n")
    (build / "runtime/libvortex-simx.so").write_bytes(b"")
    (build / "config.mk").write_text(f"XLEN ?= 32\nTOOLDIR ?= {tmp_path}/tools\n")
    command = [host_compiler, "-x", "c", "-shared", "-fPIC", "-w", str(HERE / "fake_vortex.c"), "-ldl"]
    subprocess.run([*command, "-o", str(build / "runtime/libvortex.so")], check=True)
    compiler = bin_ / "riscv-clang++"
    compiler.write_text(_FAKE_COMPILER.format(python=sys.executable, log=bin_ / "compiler.log"))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    env = {
        "VORTEX_HOME": str(home),
        "VORTEX_BUILD": str(build),
        "VORTEX_CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return FakeInstall(home, build, env)


_FAKE_COMPILER = textwrap.dedent(
    """\
    #!{python}
    import struct, sys
    arguments = sys.argv[1:]
    open({str_log}, "a").write(" ".join(arguments) + "\\n")
    code = b"\\x13\\x00\\x00\\x00" * 4
    header = b"\\x7fELF\\x01\\x01\\x01" + bytes(9)
    header += struct.pack("<HHIIIIIHHHHHH", 2, 243, 1, 0x80000000, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    header += struct.pack("<8I", 1, 84, 0x80000000, 0x80000000, len(code), 64, 5, 4)
    if "-o" not in arguments:  # a check of headers
        sys.exit()
    open(arguments[arguments.index("-o") + 1], "wb").write(header + code)
    """
).replace("{str_log}", "'{log}'")
