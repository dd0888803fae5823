"""An install whose native kernels did not compile succeeds without them: here that must not pass for a green run."""

import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from intflash.backends import cpu


def test_built_where_it_can_be():
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no Python headers")
    assert cpu.instruction_sets(), cpu.BACKEND.unavailable()


CMAKE = Path(__file__).parents[2] / "CMakeLists.txt"
SOURCES = CMAKE.parent / "csrc"


def units():
    """Sources of this processor's kind with their flags, as CMakeLists.txt has them."""
    text = CMAKE.read_text()
    for name, value in re.findall(r'set\((\w+) "(-m[^"]*)"\)', text):
        text = text.replace(f"${{{name}}}", value)
    flags = dict(re.findall(r'add_instruction_set\((\w+) "([^"]+)"\)', text))
    own = "-march" if platform.machine() in ("aarch64", "arm64") else "-mavx"
    sets = {name: value.split() for name, value in flags.items() if value.startswith(own)}
    definitions = [f"-DINTFLASH_{name.upper()}" for name in sets]
    units = {"cpu/dispatch": definitions, "cpu/thread_pool": [], "cpu/isa/generic": []}
    return units | {f"cpu/isa/{name}": flags for name, flags in sets.items()}


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
@pytest.mark.parametrize("unit", units())
def test_clang_takes_it_without_a_warning(unit):
    command = ["clang++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", SOURCES, *units()[unit]]
    run = subprocess.run([*command, SOURCES / f"{unit}.cpp"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
