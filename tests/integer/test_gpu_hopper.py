"""The CUDA C++ kernels of integer models without a GPU: the reference's bits in the PTX emulator, and machine code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "machines" / "ptx")]

import emulate  # noqa: E402

from benchmarks import sass  # noqa: E402
from integer import gpu_cases  # noqa: E402
from integer.programs import integers, linear_program, seeded  # noqa: E402
from intflash.backends.cuda import backend  # noqa: E402
from intflash.backends.cuda.program import CudaLaunch, compile_program  # noqa: E402
from intflash.integer import reference  # noqa: E402
from intflash.integer.gpu import hopper  # noqa: E402
from intflash.integer.gpu.hopper import Split  # noqa: E402
from intflash.problem import Problem  # noqa: E402
from intflash.quant import QTensor  # noqa: E402

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(emulate.unavailable() is not None, reason=str(emulate.unavailable()))
full = pytest.mark.full

# rows, K, N, epilogue, split; two images
LINEARS = {
    "codes": (150, 272, 96, dict(epilogue="codes", symmetric=True), Split(64, 2, True, 2)),
    "table": (70, 80, 72, dict(epilogue="table", bits=10), Split(32, 2, True, 1)),
    "mapped residual": (70, 80, 96, dict(epilogue="residual", out_bits=16, mapped=True), Split(64, 2, True, 2)),
    "streamed residual of 24 bits": (
        70, 80, 48, dict(epilogue="residual", out_bits=24, shift=20), Split(32, 2, False, 1),
    ),
    "accumulators": (3, 64, 40, dict(epilogue="accumulator"), Split(32, 2, True, 1)),
    "codes of 16 bits": (150, 144, 64, dict(epilogue="codes", out_bits=16), Split(32, 2, False, 1)),
    "table of 12 bits": (70, 80, 40, dict(epilogue="table", bits=12, out_bits=16), Split(32, 1, False, 1)),
    "turns of three": (200, 272, 32, dict(epilogue="codes"), Split(32, 3, True, 1)),
    "three warpgroups": (100, 48, 128, dict(epilogue="residual", out_bits=16), Split(128, 3, False, 1)),
    "many steps": (70, 1664, 40, dict(epilogue="codes"), Split(32, 2, True, 1)),
    "many streamed steps": (70, 1664, 40, dict(epilogue="codes"), Split(64, 2, False, 1)),
}  # fmt: skip
QUICK_LINEARS = ("codes", "turns of three", "mapped residual")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_LINEARS else pytest.param(name, marks=full) for name in LINEARS]
)
def test_linear(name):
    m, k, n, options, split = LINEARS[name]
    shift = options.get("shift", 40)
    top = min((1 << 31) - 1, (1 << shift) // (int(74 * 74 * k**0.5) >> 7))  # some products saturate
    program = linear_program(seeded(1), m, k, n, **(dict(shift=shift, top_multiplier=top) | options))
    op, t, buffer = program.operations[1], program.tensors, program.buffers["y"]
    image = integers(seeded(2), 0, 255, 2, *program.inputs[0].shape, dtype=torch.uint8)
    expected = reference.run(program, {"image": image})["y"]
    codes = (image.to(torch.int16) - 128).to(torch.int8).view(-1, k)
    out = torch.full((2, *buffer.shape), 77, dtype=buffer.dtype)
    constants = (t.get(x) for x in ("b", "m", "t", "r", "at"))
    emulate.run(hopper.linear_launch(op, codes, hopper.padded(t["w"]), *constants, out, buffer, split))
    rows = t["at"].long() if "at" in t else slice(None)
    assert torch.equal(out[:, rows], expected[:, rows])
    if "at" in t:
        out[:, rows] = 77
        assert bool((out == 77).all())  # nothing else was written


def _norms() -> dict[str, tuple]:
    found = {}
    for name, (program, inputs) in gpu_cases.norms(large=True):
        if name.startswith("two"):
            continue
        op, t = program.operations[1], program.tensors
        x = t["table"][inputs["index"]]
        out = torch.full((2, *program.buffers[op.out].shape), 77, dtype=program.buffers[op.out].dtype)
        parts = t["at"].shape[1] if "at" in t else 1
        if out.shape[-1] % (8 * parts) == 0 and out.shape[-1] <= hopper.MOST_CHANNELS[x.dtype]:
            found[name] = program, inputs, x, out
    return found


NORMS = _norms()
QUICK_NORMS = ("norm 16 bits 96 parts 4", "norm 24 bits 192 parts None")


@pytest.mark.parametrize("name", [name if name in QUICK_NORMS else pytest.param(name, marks=full) for name in NORMS])
def test_layer_norm(name):
    program, inputs, x, out = NORMS[name]
    op, t = program.operations[1], program.tensors
    limits = program.buffers[op.out].limits
    emulate.run(hopper.layer_norm_launch(x, t["m"], t["b"], out, t.get("at"), op.shift, op.eps, limits))
    assert torch.equal(out, reference.run(program, inputs)["y"])


@pytest.mark.parametrize("bits, channels, mapped", [(16, 96, True), pytest.param(24, 768, False, marks=full)])
def test_layer_norm_of_two_outputs(bits, channels, mapped):
    program, inputs = gpu_cases.two_norms(seeded(3), bits, channels, mapped)
    _, a, b = program.operations
    x = program.tensors[program.operations[0].tables[0]][inputs["index0"]]

    def scaled(op):
        buffer = program.buffers[op.out]
        out = torch.full((2, *buffer.shape), 77, dtype=buffer.dtype)
        return hopper.Scaled(program.tensors[op.multiplier], program.tensors[op.bias], out, op.shift, buffer.limits)

    first, second = scaled(a), scaled(b)
    load_rows = program.tensors.get(a.load_rows)
    emulate.run(
        hopper.layer_norm_launch(
            x, first.multiplier, first.bias, first.out, load_rows, a.shift, a.eps, first.limits, second
        )
    )
    expected = reference.run(program, inputs)
    assert torch.equal(first.out, expected[a.out]) and torch.equal(second.out, expected[b.out])


def linear_launch(m: int, n: int, k: int, epilogue: str, bits: int, shift: int = 44) -> CudaLaunch:
    """A launch on tensors without data."""
    program = linear_program(seeded(1), 1, k, n, epilogue, bits=10, out_bits=bits, shift=shift)
    op, t, buffer = program.operations[1], program.tensors, program.buffers["y"]
    constants = (t.get(x) for x in ("b", "m", "t"))
    codes = torch.empty(1, dtype=torch.int8).expand(m, k)
    out = torch.empty(1, dtype=buffer.dtype).expand(1, m, n)
    residual = out if epilogue == "residual" else None
    return hopper.linear_launch(op, codes, hopper.padded(t["w"]), *constants, residual, None, out, buffer)


COMPILED = {
    "qkv of ViT-B": (50432, 2304, 768, "codes", 8),
    "fc1 of ViT-B": (50432, 3072, 768, "table", 8),
    "fc2 of ViT-B": (50432, 768, 3072, "residual", 16),
    "proj of ViT-B": (50432, 768, 768, "residual", 16),
    "wide shift": (50432, 768, 768, "residual", 24, 20),
    "head": (8, 1000, 768, "accumulator", 32),
    "fc2 of one image": (197, 768, 3072, "residual", 16),
}
QUICK_COMPILED = ("fc1 of ViT-B", "fc2 of ViT-B")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_COMPILED else pytest.param(name, marks=full) for name in COMPILED]
)
def test_linear_is_integer_only(name):
    machine = _machine(linear_launch(*COMPILED[name]))
    assert machine.opcodes["IGMMA"] > 0


@pytest.mark.parametrize(
    "channels, dtype",
    [(768, torch.int16), *(pytest.param(most, dtype, marks=full) for dtype, most in hopper.MOST_CHANNELS.items())],
)
def test_layer_norm_is_integer_only(channels, dtype):
    x = torch.empty(1, 4, channels, dtype=dtype)
    constants = torch.empty(channels, dtype=torch.int32)
    out = torch.empty(1, 4, channels, dtype=torch.int8)
    _machine(hopper.layer_norm_launch(x, constants, constants, out, None, 20, 1, (-128, 127)))
    if channels <= hopper.MOST_CHANNELS_OF_TWO:
        second = hopper.Scaled(constants, constants, torch.empty_like(x), 20, (-9, 9))
        _machine(hopper.layer_norm_launch(x, constants, constants, out, None, 20, 1, (-128, 127), second))


def _machine(launch: CudaLaunch) -> sass.Machine:
    compiled = compile_program(launch.program)
    machine = sass.machine(compiled.cubin, launch.program.entry, 90, launch.shared_bytes, launch.threads // 32)
    assert machine.float_instructions == []
    assert machine.spills == 0, f"{machine.registers} registers, {machine.spills} local loads and stores"
    assert "serializ" not in compiled.log  # ptxas would wait after each warpgroup product
    assert launch.shared_bytes <= hopper.SHARED_BYTES
    return machine


@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize("m", [1, 49, 197, 197 * 8, 197 * 256, 3136 * 64])
@pytest.mark.parametrize("n, k", [(32, 16), (288, 96), (768, 16384), (30528, 768), *hopper._MEASURED])
def test_splits_cover_the_product_and_fit(m, n, k, processors):
    for epilogue, table_bytes in (("codes", 0), ("table", 32 << 10), ("residual", 0)):
        split = hopper.choose_split(m, n, k, epilogue, table_bytes, processors)
        assert 1 <= split.parts <= -(-m // split.rows)
        assert split.parts == 1 or split.parts * -(-n // split.columns) <= processors  # all run at once
        stages = hopper.stages_of(split, k, table_bytes)
        ring = stages * split.stage_bytes
        assert stages >= hopper.LEAST_STAGES
        fixed = hopper.fixed_bytes(split.columns, k, table_bytes, split.resident)
        assert fixed + ring <= hopper.SHARED_BYTES


EMULATED = ("two norms",)
MORE_EMULATED = (
    "intflash 300", "intflash_p8 272", "intflash 130 32", "intflash streamed 300", "block with a padding mask",
    "block of windows",
)  # fmt: skip


@pytest.mark.parametrize("name", [*EMULATED, *(pytest.param(name, marks=full) for name in MORE_EMULATED)])
def test_the_executor_on_an_emulated_gpu(name):
    """In a separate process, because Triton decides at import whether it interprets."""
    here = Path(__file__).parent
    command = [sys.executable, "-W", "ignore", str(here / "emulated_gpu.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {name: ""}


@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
def test_attention_with_key_counts_is_integer_only(method):
    codes = [QTensor(torch.empty(1, 2, 512, 64, dtype=torch.int8), torch.ones(1, 1, 1, 1), "tensor") for _ in "qkv"]
    problem = Problem(method, *codes, 0.125, out_dtype=torch.int8, out_scale=torch.ones(1, 1, 1, 1))
    plan = backend.planned(problem, key_counts=torch.empty(1, dtype=torch.int32))
    launch = plan.launches[-1]
    assert launch.program.file == "sm90/long_rows.cu" and ("KEY_COUNTS", "1") in launch.program.macros
    _machine(launch)
