"""The native launcher's calls of the driver, by a libcuda that only notes them (fake_cuda.c)."""

from __future__ import annotations

import ast
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

# Prints (scenario, what was compiled, the error) of each; the driver's log is a file of the scenario's name.
SCRIPT = """
import ctypes, os, sys
import torch, intflash
from intflash import call
from intflash.backends import cpu
from intflash.backends.cuda import program, tensor_maps

def launch(*tensors, **options):
    arguments = call.complete(tensors, options | dict(method="intflash", check_finite=False))
    return cpu._native.gpu_launches(0, tuple(arguments[name] for name in call.NAMES))

def scenario(name, work, fails="", compiled=b"machine code"):
    os.environ["FAKE_CUDA_LOG"] = os.path.join(sys.argv[1], name)
    os.environ["FAKE_CUDA_FAIL"] = fails
    asked, error = [], None
    cpu.use_compiler(lambda *program: asked.append(program[0]) or (compiled() if callable(compiled) else compiled))
    try:
        served = work() is not None
    except Exception as raised:
        served, error = False, f"{type(raised).__name__}: {raised}"
    print((name, served, asked, error))

q = torch.zeros(1, 6, 197, 64, dtype=torch.float16)
static = intflash.Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.05)
if sys.argv[2:] == ["as imported"]:
    program.machine_code = lambda program, architecture: print(("compiled", program.file, architecture)) or b"code"
    print(("served", launch(q, q, q, recipe=static) is not None))
    sys.exit()
long = intflash.quantize(torch.ones(1, 4, 2048, 64))
scenario("no context", lambda: launch(q, q, q), fails="cuDevicePrimaryCtxRetain")
scenario("not loaded", lambda: launch(q, q, q), fails="cuLibraryLoadData")
scenario("no compiler", lambda: launch(q, q, q), compiled=None)
scenario("refused", lambda: launch(q, q, q), compiled=lambda: 1 / 0)
tensors = intflash.Recipe("tensor", "tensor", "tensor")
scenario("dynamic", lambda: launch(q, q, q, recipe=tensors))
scenario("not launched", lambda: launch(q, q, q), fails="cuLaunchKernelEx")
scenario("static", lambda: launch(q, q, q, recipe=static))
scenario("static again", lambda: launch(q, q, q, recipe=static))
scenario("long", lambda: launch(long, long, long, out_scale="bound"))

class Parameters(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64)]

def python():
    tensor_maps.encoded.cache_clear()
    gpu = torch.device("cuda", 0)
    box = (64, 100, 4, 2, 6), (64, 256, 128, 1024), (64, 2, 4, 2, 6), 64
    maps = tuple(tensor_maps.TensorMap(*box, address) for address in (64, 128))
    made = program.CudaProgram.of("sm80/window.cu"), (3, 2, 1), 64, 512
    program.CudaLaunch(*made, Parameters(7), gpu, ()).run()
    program.CudaLaunch(*made, bytes(64), gpu, (), overlaps=True, maps=maps, after_maps=bytes(64)).run()
    return True

program.machine_code = lambda program, architecture: b"of Python"
program.capability = lambda device: (9, 0)
torch._C._cuda_getCurrentRawStream = lambda index: 0x77
scenario("python", python)
scenario("python, not launched", python, fails="cuLaunchKernelEx")
scenario("python, no map", python, fails="cuTensorMapEncodeTiled")
"""


def printed(folder: Path, *arguments: str) -> list[tuple]:
    """What the script prints with the libcuda of a folder."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def run(folder: Path, logs: Path) -> dict[str, tuple]:
    """Each scenario's (whether it was served, what was compiled, error, lines of the log)."""
    found = printed(folder, str(logs))
    lines = {path.name: path.read_text().splitlines() for path in logs.iterdir()}
    return {name: (*rest, lines.get(name, [])) for name, *rest in found}


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


@pytest.fixture(scope="module")
def scenarios(fake, tmp_path_factory):
    return run(fake, tmp_path_factory.mktemp("logs"))


def names(lines):
    return [line.split()[0] for line in lines]


def test_the_compiler_is_known_from_import_on(fake, tmp_path):
    found = printed(fake, str(tmp_path), "as imported")
    assert found == [("compiled", "sm90/short_rows.cu", "sm_90a"), ("served", True)]


def test_a_call_is_one_launch(scenarios):
    served, compiled, _, lines = scenarios["static"]
    assert served and compiled == ["sm90/short_rows.cu"]
    (launch,) = [line for line in lines if line.startswith("cuLaunchKernelEx")]
    # few tiles: one of 64 rows in each CTA, and programmatic dependent launch
    assert re.search(r"grid 6 1 4 block \d+ 1 1 shared \d+ stream \(nil\) attributes 1: 6 1 ", launch)
    queued = ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    assert names(lines)[-4:] == queued
    assert names(scenarios["static again"][3]) == queued and not scenarios["static again"][1]


def test_numbers_are_written_once_outside_of_captures(scenarios):
    lines = scenarios["static"][3]
    written = [line for line in lines if line.startswith("cuMemsetD32Async")]
    assert written[::2] == ["cuMemsetD32Async 3cf5c28f 1 0x5000", "cuMemsetD32Async 3d4ccccd 1 0x5000"]
    modes = [line for line in lines if line.startswith("cuThreadExchange")]
    assert modes == ["cuThreadExchangeStreamCaptureMode 2", "cuThreadExchangeStreamCaptureMode 0"] * 3
    assert names(lines).count("cuStreamSynchronize") == 2


def test_dynamic_scales_are_found_on_the_device(scenarios):
    served, compiled, _, lines = scenarios["dynamic"]
    assert served and compiled == ["absmax.cu", "sm90/short_rows.cu"]
    queued = [name for name in names(lines) if name in ("cuMemsetD8Async", "cuLaunchKernelEx")]
    assert queued == ["cuMemsetD8Async", "cuLaunchKernelEx", "cuLaunchKernelEx"]


def test_long_rows_are_loaded_by_tma(scenarios):
    served, compiled, _, lines = scenarios["long"]
    assert served and compiled == ["constants.cu", "quantize_inputs.cu", "sm90/long_rows.cu"]
    assert [line for line in lines if "TensorMap" in line] == [
        "cuTensorMapEncodeTiled 0 5 1 sizes 128 strides 1024 box 8 steps 1 0 2 3 0",
        "cuTensorMapEncodeTiled 0 5 1 sizes 4 strides 131072 box 1 steps 1 0 3 3 0",
    ]


@pytest.mark.parametrize(
    "scenario, function",
    [("no context", "cuDevicePrimaryCtxRetain"), ("not loaded", "cuLibraryLoadData"),
     ("not launched", "cuLaunchKernelEx"), ("python, not launched", "cuLaunchKernelEx"),
     ("python, no map", "cuTensorMapEncodeTiled")],
)  # fmt: skip
def test_errors_of_the_driver_are_exceptions(scenarios, scenario, function):
    error = scenarios[scenario][2]
    assert error == f"RuntimeError: {function} failed: CUDA_ERROR_ILLEGAL_ADDRESS, a made-up error"


def test_python_launches_by_the_same_driver(scenarios):
    served, _, error, lines = scenarios["python"]
    assert served, error
    assert [line for line in lines if line.startswith("cuLibraryLoadData")] == ["cuLibraryLoadData of Python"]
    plain, overlapping = (line for line in lines if line.startswith("cuLaunchKernelEx"))
    assert "grid 3 2 1 block 64 1 1 shared 512 stream 0x77 attributes 0:" in plain and plain.endswith("first 7")
    assert "attributes 1: 6 1 " in overlapping
    assert sum("TensorMap" in line for line in lines) == 2


def test_errors_of_the_compiler_are_exceptions(scenarios):
    assert scenarios["refused"][2] == "ZeroDivisionError: division by zero"


def test_without_a_compiler_python_serves(scenarios):
    served, _, error, lines = scenarios["no compiler"]
    assert not served and error is None and "cuLaunchKernelEx" not in names(lines)


@pytest.mark.full
def test_without_a_driver_python_serves(tmp_path):
    (logs := tmp_path / "logs").mkdir()
    for name, (served, compiled, error, lines) in run(tmp_path, logs).items():
        assert not served and not compiled and not lines
        assert error is None or name.startswith("python") and "libcuda.so.1 of NVIDIA's driver was not found" in error
