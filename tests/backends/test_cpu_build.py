"""How the native module is built, and that a build that fails is no install without it."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from intflash.backends import cpu

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "No C++ compiler was found: intflash is installed without its native CPU kernels"

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
needs_headers = pytest.mark.skipif(
    not (Path(sysconfig.get_path("include")) / "Python.h").exists(), reason="no Python headers"
)
needs_cmake = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("ninja")), reason="no CMake or Ninja outside pip's build environments"
)


@needs_compiler
@needs_headers
def test_built_where_it_can_be():
    assert cpu.instruction_sets(), cpu.BACKEND.unavailable()


def units():
    """Sources of this processor's kind with their flags, as CMakeLists.txt has them."""
    text = (ROOT / "CMakeLists.txt").read_text()
    for name, value in re.findall(r'set\((\w+) "(-m[^"]*)"\)', text):
        text = text.replace(f"${{{name}}}", value)
    flags = dict(re.findall(r'add_instruction_set\((\w+) "([^"]+)"\)', text))
    own = "-march" if platform.machine() in ("aarch64", "arm64") else "-mavx"
    sets = {name: value.split() for name, value in flags.items() if value.startswith(own)}
    definitions = [f"-DINTFLASH_{name.upper()}" for name in sets]
    units = {
        "cpu/dispatch": definitions,
        "cpu/program": [],
        "cpu/quantize_inputs": [],
        "cpu/thread_pool": [],
        "cpu/print_instruction_sets": [],
        "cpu/isa/generic": [],
    }
    return units | {f"cpu/isa/{name}": flags for name, flags in sets.items()}


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
@pytest.mark.parametrize("unit", units())
def test_clang_takes_it_without_a_warning(unit):
    command = ["clang++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", SOURCES, *units()[unit]]
    run = subprocess.run([*command, SOURCES / f"{unit}.cpp"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@needs_compiler
def test_the_probe_lists_what_the_module_runs(tmp_path):
    """The instruction sets that an editable install is built for are those that the module finds at run time."""
    program = tmp_path / "print"
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    subprocess.run(
        [compiler, "-std=c++17", "-I", SOURCES, SOURCES / "cpu/print_instruction_sets.cpp", "-o", program], check=True
    )
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split(";")
    if cpu.instruction_sets():
        assert found == cpu.instruction_sets()


def environment_without_compilers(folder):
    """The environment with a PATH on which only CMake and Ninja are."""
    folder.mkdir()
    for name in ("cmake", "ninja"):
        (folder / name).symlink_to(shutil.which(name))
    return {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")} | {"PATH": str(folder)}


def configure(tmp_path, *definitions, **options):
    """CMake's run over the repository, its build folder under `tmp_path`."""
    command = [shutil.which("cmake"), "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", *definitions]
    return subprocess.run(command, capture_output=True, text=True, **options)


@needs_cmake
def test_without_a_compiler_there_is_nothing_to_build_and_that_is_said(tmp_path):
    run = configure(tmp_path, env=environment_without_compilers(tmp_path / "bin"))
    assert run.returncode == 0, run.stderr
    assert NO_COMPILER in " ".join(run.stderr.split())


@needs_cmake
def test_a_compiler_that_does_not_compile_is_an_error(tmp_path):
    environment = environment_without_compilers(tmp_path / "bin")
    broken = tmp_path / "bin" / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    run = configure(tmp_path, env=environment)
    assert run.returncode != 0 and NO_COMPILER not in " ".join(run.stderr.split())


@needs_cmake
@needs_compiler
def test_a_python_without_headers_is_an_error_with_the_way_out(tmp_path):
    bare = "-DPython_INCLUDE_DIR=" + str(tmp_path / "nowhere")
    run = configure(tmp_path, bare, f"-DPython_EXECUTABLE={sys.executable}")
    assert run.returncode != 0
    said = " ".join(run.stderr.split())
    assert "python3-dev" in said and "cmake.define.INTFLASH_NATIVE=OFF" in said


def copied(folder):
    """What a build reads of the repository, in a folder of its own."""
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "build", "dist", "docs", "tests", "results", "*.so")
    )
    return folder


def wheel(source, out, *settings, **options):
    """pip's build of a wheel; it fetches its own build environment."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", out, source]
    settings = [f"--config-settings=cmake.define.{setting}" for setting in settings]
    return subprocess.run([*command, *settings], capture_output=True, text=True, **options)


@pytest.mark.full
@needs_compiler
@needs_headers
def test_a_source_that_does_not_compile_fails_the_install(tmp_path):
    source = copied(tmp_path / "source")
    path = source / "csrc" / "cpu" / "thread_pool.cpp"
    path.write_text(path.read_text() + "\n#error broken on purpose\n")
    run = wheel(source, tmp_path / "out", "INTFLASH_INSTRUCTION_SETS=generic")
    assert run.returncode != 0
    assert "broken on purpose" in run.stdout + run.stderr
    assert not list(tmp_path.glob("out/*.whl"))


@pytest.mark.full
@needs_cmake
def test_a_wheel_without_a_compiler_has_no_native_module(tmp_path):
    environment = environment_without_compilers(tmp_path / "bin")
    run = wheel(copied(tmp_path / "source"), tmp_path / "out", env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = tmp_path.glob("out/*.whl")
    names = zipfile.ZipFile(built).namelist()
    assert {"intflash/backends/cpu.py", "intflash/py.typed"} <= set(names) and not [
        name for name in names if "_native" in name
    ]


def test_builds_share_no_folder():
    """Two virtual environments, or two Pythons, may build from one checkout at once."""
    assert "build-dir" not in re.sub("#.*", "", (ROOT / "pyproject.toml").read_text())
    assert "--config-settings=build-dir=$(abspath $(VENV))/build " in (ROOT / "Makefile").read_text()
