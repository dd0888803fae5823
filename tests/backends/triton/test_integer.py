"""The integer-only Triton kernels: the reference's bits in the interpreter, and their machine code."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import sass  # noqa: E402
from intflash.backends.triton import specializations  # noqa: E402

HERE = pathlib.Path(__file__).parent
SLOW = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp", "iflash")  # up to a minute and a half each
METHODS = ["qflash", *(pytest.param(method, marks=pytest.mark.full) for method in SLOW)]


@pytest.mark.parametrize("method", METHODS)
def test_bits_in_the_interpreter(method):
    found = _interpreted("report", method)
    assert len(found) > 10
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "report, count", [("report_few_sinks", 18), pytest.param("report_sinks", 37, marks=pytest.mark.full)]
)
def test_bits_of_sinks_in_the_interpreter(report, count):
    found = _interpreted(report, "intflash_bfp")
    assert len(found) == count
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def _interpreted(report: str, method: str) -> dict[str, str | None]:
    """In a separate process, because Triton decides at import whether it interprets."""
    command = [sys.executable, "-W", "ignore", str(HERE / "integer_cases.py"), report, method]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _check(name: str, arch: int) -> None:
    machine = sass.compile_launch(specializations.launch(name, arch), arch)
    assert machine.float_instructions == []
    assert machine.spills == 0, f"{machine.registers} registers, {machine.spills} local loads and stores"
    products = sum(machine.opcodes[x] for x in ("IMMA", "IGMMA", "UTCIMMA"))
    assert products > 0, "no integer tensor-core product"


@pytest.mark.parametrize("name", specializations.names(quick=True))
def test_integer_only(name):
    """No floating-point opcode between int8 input and integer output, and no spills (sm_90)."""
    _check(name, 90)


@pytest.mark.full
@pytest.mark.parametrize("arch", sass.ARCHITECTURES)
@pytest.mark.parametrize("name", specializations.names())
def test_integer_only_on_every_architecture(name, arch):
    """The same for every specialization and every architecture."""
    _check(name, arch)


@pytest.mark.parametrize("arch", [a for a in sass.ARCHITECTURES if a != 90])
def test_integer_only_on_other_architectures(arch):
    """A short-rows kernel and one of each tile loop for the architectures that `test_integer_only` leaves out."""
    for name in ("intflash_p8 row n197 d64", "intflash_p8 stream n4096 d64", "intflash_online stream n4096 d64"):
        _check(name, arch)


@pytest.mark.parametrize("kinds", (("token", "head", "channel"), ("head", "head", "head")), ids=str)
@pytest.mark.parametrize("keys", (197, 1000))
def test_float_output_with_scales_of_heads_and_channels_compiles(keys, kinds):
    """Triton's compiler loses constants in tuples where its interpreter does not (`device_functions.Masks`)."""
    more = dict(kinds=kinds, out_dtype=torch.float32)
    assert sass.compile_launch(specializations.attention_launch("intflash", keys, keys, 64, **more), 90).spills == 0


def test_float_output_has_float_instructions():
    """The negative control: with float output the same kernel has float instructions, and the check finds them."""
    launch = specializations.attention_launch("intflash_p8", 64, 64, 32, out_dtype=torch.float16)
    found = sass.compile_launch(launch, 90).float_instructions
    assert any(text.startswith("FMUL") for text in found)
    assert any(text.startswith(("I2F", "MUFU")) for text in found)


def test_integer_division_has_float_instructions():
    """The second control: an integer division instruction is computed through floats."""
    import triton
    import triton.language as tl

    from intflash.backends.triton.launch import TritonLaunch

    @triton.jit
    def _divide_kernel(x, n):
        i = tl.arange(0, 32)
        tl.store(x + i, tl.load(x + i) // n)

    launch = TritonLaunch(_divide_kernel, (1,), dict(x=torch.zeros(32, dtype=torch.int32), n=7), 1, 1)
    assert sass.compile_launch(launch, 90).float_instructions


def test_device_functions():
    """The reciprocal, leading zeros, the exponentials, the dither and the table's p and octaves equal Python's
    integers.
    """
    command = [sys.executable, "-W", "ignore", str(HERE / "numerics_cases.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"reciprocals": 0, "exponentials": 0, "groups": 0, "tables": 0}
