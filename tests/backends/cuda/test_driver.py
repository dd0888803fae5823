"""The native launcher's calls of the driver, by a libcuda that only notes them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from intflash.backends import cpu

pytestmark = [
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native module was not built"),
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"),
]

CALL = """
import torch, intflash
from intflash import call
from intflash.backends import cpu

asked = []
cpu.use_compiler(lambda *program: asked.append(program[:2]) or COMPILED)

def launch(*tensors, **options):
    arguments = call.complete(tensors, options | dict(check_finite=False))
    return cpu._native.gpu_launches(0, tuple(arguments[name] for name in call.NAMES))

q = torch.zeros(1, 6, 197, 64, dtype=torch.float16)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


def run(library, tmp_path, code, compiled='b"machine code"', **environment):
    """The driver's log of a script, and what it printed."""
    log = tmp_path / "log"
    more = {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_LOG": str(log), **environment}
    done = subprocess.run(
        [sys.executable, "-c", CALL.replace("COMPILED", compiled) + code],
        env=os.environ | more, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines() if log.exists() else [], done.stdout.strip()


def names(lines):
    return [line.split()[0] for line in lines]


def test_a_call_is_one_launch(library, tmp_path):
    lines, printed = run(
        library, tmp_path,
        "recipe = intflash.Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.05)\n"
        "for _ in range(3):\n    launch(q, q, q, recipe=recipe)\n"
        "print(asked)",
    )  # fmt: skip
    assert printed == "[('sm90/short_rows.cu', 'attention')]"
    launches = [line for line in lines if line.startswith("cuLaunchKernelEx")]
    assert len(launches) == 3 and len(set(launches)) == 1
    # few tiles: one of 64 rows in each CTA, and programmatic dependent launch
    assert re.search(r"grid 6 1 4 block \d+ 1 1 shared \d+ stream \(nil\) attributes 1: 6 1 ", launches[0] + " ")
    assert names(lines).count("cuLibraryLoadData") == 1
    assert [line for line in lines if line.startswith("cuMemsetD32Async")][::2] == [
        "cuMemsetD32Async 3cf5c28f 1 0x5000", "cuMemsetD32Async 3d4ccccd 1 0x5000"
    ]  # fmt: skip
    assert names(lines)[-4:] == ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]


def test_dynamic_scales_are_found_on_the_device(library, tmp_path):
    lines, printed = run(library, tmp_path, "launch(q, q, q)\nprint(asked)")
    assert printed == "[('absmax.cu', 'absmax'), ('sm90/short_rows.cu', 'attention')]"
    queued = [name for name in names(lines) if name in ("cuMemsetD8Async", "cuLaunchKernelEx")]
    assert queued == ["cuMemsetD8Async", "cuLaunchKernelEx", "cuLaunchKernelEx"]


def test_long_rows_are_loaded_by_tma(library, tmp_path):
    lines, printed = run(
        library, tmp_path,
        "x = intflash.quantize(torch.randn(1, 4, 2048, 64))\nout = launch(x, x, x)\nprint(asked[-1][0])",
    )  # fmt: skip
    assert printed == "sm90/long_rows.cu"
    assert [line for line in lines if "TensorMap" in line] == [
        "cuTensorMapEncodeTiled 0 5 1 sizes 128 strides 1024 box 8 steps 1 0 2 3 0",
        "cuTensorMapEncodeTiled 0 5 1 sizes 4 strides 131072 box 1 steps 1 0 3 3 0",
    ]


def test_without_a_compiler_python_serves(library, tmp_path):
    lines, printed = run(library, tmp_path, "print(launch(q, q, q))", compiled="None")
    assert printed == "None" and "cuLaunchKernelEx" not in names(lines)


@pytest.mark.parametrize("fails", ["cuLaunchKernelEx", "cuLibraryLoadData", "cuDevicePrimaryCtxRetain"])
def test_errors_of_the_driver_are_exceptions(library, tmp_path, fails):
    code = "try:\n    launch(q, q, q)\nexcept RuntimeError as error:\n    print(error)"
    _, printed = run(library, tmp_path, code, FAKE_CUDA_FAIL=fails)
    assert printed == f"{fails} failed: CUDA_ERROR_ILLEGAL_ADDRESS, a made-up error"


def test_errors_of_the_compiler_are_exceptions(library, tmp_path):
    code = "try:\n    launch(q, q, q)\nexcept ZeroDivisionError as error:\n    print('refused')"
    assert run(library, tmp_path, code, compiled="1 / 0")[1] == "refused"


def test_without_a_driver_python_serves(tmp_path):
    assert run(tmp_path, tmp_path, "print(launch(q, q, q))") == ([], "None")
