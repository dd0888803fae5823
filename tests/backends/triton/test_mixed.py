"""The float-softmax and unfused Triton kernels: compared with the reference in the interpreter, and compiled without
a GPU.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

HERE = pathlib.Path(__file__).parent
FLOATS = ("int_flash_full", "int_flash_half", "lite", "qattn", "fp16", "bf16", "fp32", "fp8", "fp8_head")
UNFUSED = ("ivit", "ibert", "fqvit")


def interpreted(argument: str) -> dict:
    """Returns the report of `mixed_cases.py`, run in a separate process, because Triton decides at import whether it
    interprets.
    """
    command = [sys.executable, "-W", "ignore", str(HERE / "mixed_cases.py"), argument]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# the others differ from one of these in tables and types only, or take long
IN_EVERY_RUN = ("int_flash_half", "lite")


@pytest.mark.parametrize(
    "method", [x if x in IN_EVERY_RUN else pytest.param(x, marks=pytest.mark.full) for x in FLOATS + UNFUSED]
)
def test_kernel_matches_reference(method):
    found = interpreted(method)
    assert len(found) >= 9
    assert {name: text for name, text in found.items() if text} == {}


def test_integer_maximum_of_key_scaled_scores():
    """The form of `int_flash_half` for long rows and large head_dim, on short rows."""
    found = interpreted("int_flash_half, integer maximum")
    assert found and {name: text for name, text in found.items() if text} == {}


def test_int_flash_agrees_with_the_authors_kernels():
    """Outputs of the authors' programs on an H200: half up to float16's rounding, full up to single codes of P."""
    found = interpreted("golden")
    assert len(found) == 5
    assert min(db for case, db in found.items() if case.endswith("half")) > 70
    assert min(db for case, db in found.items() if case.endswith("full")) > 48


def _mixed_launch(method, head_dim, conversion=None):
    import torch

    from intflash.backends.gpu.float_softmax import operands
    from intflash.backends.gpu.tensors import Statistics
    from intflash.backends.triton import mixed_precision
    from intflash.methods import get_method
    from intflash.problem import Problem

    x = torch.zeros(1, 1, 2048, head_dim)
    problem = Problem(method, x, x, x, head_dim**-0.5, recipe=get_method(method).recipe, out_dtype=torch.float16)
    problem, out = problem.quantized(), x.half()
    return mixed_precision.mixed_launch(problem, operands(problem), out, Statistics(None, None), conversion=conversion)


def _check(machine):
    assert machine.spills == 0, f"{machine.name} for sm_{machine.arch} spills: {machine.opcodes}"
    assert any("MMA" in name for name in machine.opcodes), "no tensor-core product"


@pytest.mark.parametrize("method", [m for m in FLOATS if m not in ("fp32", "fp8_head")])
def test_compiles_for_hopper_without_spills(method):
    from benchmarks.sass import compile_launch

    _check(compile_launch(_mixed_launch(method, 128), 90))


@pytest.mark.full
@pytest.mark.parametrize("arch", (80, 89, 90, 100, 120))
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("method", [m for m in FLOATS if m not in ("fp32", "fp8_head")])
def test_compiles_for_every_architecture(method, head_dim, arch):
    from benchmarks.sass import compile_launch

    if arch == 80 and method == "fp8":
        pytest.skip("sm_80 has no float8")
    machine = compile_launch(_mixed_launch(method, head_dim), arch)
    assert any("MMA" in name for name in machine.opcodes)


@pytest.mark.parametrize("method", UNFUSED)
@pytest.mark.parametrize(
    "arch", (90, pytest.param(80, marks=pytest.mark.full), pytest.param(120, marks=pytest.mark.full))
)
def test_unfused_operators_compile(method, arch):
    import torch

    from benchmarks.sass import compile_launch
    from intflash.backends.triton import unfused
    from intflash.methods import get_method
    from intflash.problem import Problem

    x = torch.zeros(1, 2, 197, 64)
    problem = Problem(method, x, x, x, 0.125, recipe=get_method(method).recipe, out_dtype=torch.int8).quantized()
    launches, _, _ = unfused.unfused_launches(problem, x.to(torch.int8), [None, None, None])
    assert len(launches) == (3 if method == "ibert" else 4)
    for launch in launches:
        machine = compile_launch(launch, arch)
        assert machine.spills == 0 or arch == 120  # sm_120: two accesses to 8 bytes of stack in the scores' maximum


def test_conversions_of_lite_use_their_instructions():
    """I2F and float maximum, or integer addition and integer maximum, as LiteAttention's article shows in SASS."""
    from benchmarks.conversion import tile_loop
    from benchmarks.sass import compile_launch

    def counts(conversion):
        launch = _mixed_launch("lite", 64, conversion)
        names = [i.opcode for i in tile_loop(compile_launch(launch, 90))]
        scores = launch.arguments["BM"] * launch.arguments["BN"] / (32 * launch.warps)  # per thread
        conversions = sum(n in ("I2F", "I2FP") for n in names) / scores
        float_maxima = names.count("FMNMX") / scores
        integer_maxima = sum(n.startswith("VIMNMX") for n in names) / scores
        return conversions, float_maxima, integer_maxima

    conversions, float_maxima, integer_maxima = counts("convert")
    assert conversions >= 1 and float_maxima >= 1 and integer_maxima < 0.1
    conversions, float_maxima, integer_maxima = counts("magic")
    assert conversions < 0.1 and float_maxima >= 1 and integer_maxima < 0.1
    conversions, float_maxima, integer_maxima = counts("dual")
    assert 0.4 <= conversions <= 0.6 and 0.4 <= float_maxima <= 0.7 and 0.2 <= integer_maxima <= 0.6
    conversions, float_maxima, integer_maxima = counts("integer")
    assert conversions < 0.1 and float_maxima < 0.1 and integer_maxima >= 0.5
