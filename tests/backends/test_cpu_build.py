"""An install whose native kernels did not compile succeeds without them: here that must not pass for a green run."""

import shutil
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
