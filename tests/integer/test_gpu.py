"""The GPU executor: the reference's bits, in Triton's interpreter and on a GPU, and integer-only machine code."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import sass  # noqa: E402
from integer import gpu_cases, small_programs  # noqa: E402
from intflash.backends.cuda import program as cuda_program  # noqa: E402
from intflash.integer import reference  # noqa: E402
from intflash.integer.gpu import executor, hopper, kernels  # noqa: E402
from intflash.integer.model import IntegerModel  # noqa: E402
from intflash.integer.program import Buffer, Linear  # noqa: E402

HERE = Path(__file__).parent
QUICK = (
    "linear 5 77 40", "residual buffer", "norm 16 bits 33", "norm 24 bits 33 parts 4", "two norms 16", "pool 30",
    "patches 0.37", "patches of bytes", "block intflash_p8",
)  # fmt: skip


def wrong(*parts: str) -> dict[str, str]:
    """The complaints about cases whose names contain one of these parts, by a process that interprets kernels."""
    command = [sys.executable, "-W", "ignore", str(HERE / "gpu_cases.py"), *parts]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= len(parts)
    return {name: complaint for name, complaint in found.items() if complaint}


def test_bits_in_the_interpreter():
    assert wrong(*QUICK) == {}


@pytest.mark.full
def test_bits_of_all_cases_in_the_interpreter():
    assert wrong() == {}


@pytest.mark.gpu
def test_bits_on_a_gpu():
    complaints = {name: gpu_cases.complaint(*case, "cuda") for name, case in gpu_cases.cases(large=True)}
    assert {name: complaint for name, complaint in complaints.items() if complaint} == {}


def test_other_gpus_take_the_triton_kernels(monkeypatch):
    """The backend `cuda` serves GPUs from compute capability 8.0 on, the kernels of hopper.py 9.0 alone."""
    monkeypatch.setattr(hopper, "get_backend", lambda name: SimpleNamespace(unavailable=lambda: None))
    weight, stream, codes = empty(64, 32), empty(2, 5, 64, dtype=torch.int16), empty(2, 5, 64)
    for capability, served in (((8, 0), False), ((9, 0), True), ((12, 0), False)):
        monkeypatch.setattr(cuda_program, "capability", lambda device, found=capability: found)
        assert hopper.serves(weight) == hopper.serves_layer_norm(stream, codes, None) == served


def empty(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def product(m: int, n: int, k: int, epilogue: str, bits: int, constant: bool = False, mapped: bool = False):
    op = Linear("linear", "x", "w", "b", ("y",), epilogue, "m", 44, epilogue == "codes", 10)
    integers, out = torch.int32, empty(1, m, n, dtype={8: torch.int8, 16: torch.int16, 32: torch.int32}[bits])
    residual = None if epilogue != "residual" else out[0] if constant else out
    return kernels.linear_launch(
        op, empty(m, k), empty(n, k), empty(n, dtype=integers),
        None if epilogue == "accumulator" else empty(n, dtype=integers), empty(1024) if epilogue == "table" else None,
        residual, empty(m, dtype=integers) if mapped else None, out, Buffer((m, n), bits),
    )  # fmt: skip


def launches() -> dict[str, kernels.TritonLaunch]:
    """A launch of each kernel on tensors without data."""
    i16, i32 = torch.int16, torch.int32
    constants = empty(768, dtype=i32), empty(768, dtype=i32)
    return {
        "linear to codes": product(12608, 2304, 768, "codes", 8),
        "linear to a table": product(12608, 3072, 768, "table", 8),
        "linear with a residual": product(12608, 768, 3072, "residual", 16),
        "linear with a mapped residual": product(196, 768, 768, "residual", 16, True, True),
        "linear of few rows": product(1, 1000, 768, "accumulator", 32),
        "linear of few columns": product(12544, 288, 96, "codes", 8),
        "layer_norm": kernels.layer_norm_launch(
            empty(4, 197, 768, dtype=i16), *constants, empty(4, 197, 768), None, 20, 1000, (-128, 127)
        ),
        "layer_norm of 24 bits": kernels.layer_norm_launch(
            empty(4, 197, 768, dtype=i32), *constants, empty(4, 197, 768), None, 20, 1 << 40, (-128, 127)
        ),
        "layer_norm of a map": kernels.layer_norm_launch(
            empty(4, 196, 192, dtype=i16), *constants, empty(4, 49, 768), empty(49, 4, dtype=i32), 20, 9, (-128, 127)
        ),
        "pool": kernels.pool_launch(
            empty(4, 197, 768), empty(4, 1, 768), 1, 197, empty(1, dtype=i32), 40, (-128, 127)
        ),
        "embedding": kernels.embedding_launch(
            (empty(4, 128, dtype=torch.int64),) * 3, (empty(100, 768, dtype=i16),) * 3, empty(128, 768, dtype=i16),
            empty(4, 128, 768, dtype=i16), (-32768, 32767),
        ),
        "key order": kernels.key_order_launch(
            empty(4, 512, dtype=torch.bool), empty(4, 512, dtype=i32), empty(4, dtype=i32)
        ),
        "gathered keys": kernels.gather_keys_launch(
            *empty(4, 512, 2, 12, 64).permute(2, 0, 3, 1, 4), empty(4, 512, dtype=i32), empty(4, dtype=i32),
            empty(4, 12, 512, 64), empty(4, 12, 64, 512),
        ),
        "patches of bytes": kernels.patches_launch(
            empty(4, 3, 224, 224, dtype=torch.uint8), empty(4, 196, 768), (16, 16), 1.0, 0
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", launches())
def test_integer_only(name):
    """No floating-point opcode and no spill (sm_90)."""
    _check(name, 90)


@pytest.mark.full
@pytest.mark.parametrize("arch", [a for a in sass.ARCHITECTURES if a != 90])
@pytest.mark.parametrize("name", launches())
def test_integer_only_on_other_architectures(name, arch):
    _check(name, arch)


def _check(name: str, arch: int) -> None:
    machine = sass.compile_launch(launches()[name], arch)
    assert machine.float_instructions == []
    assert machine.spills == 0, f"{machine.registers} registers, {machine.spills} local loads and stores"
    products = sum(machine.opcodes[x] for x in ("IMMA", "IGMMA", "UTCIMMA"))
    assert (products > 0) == name.startswith("linear")


def test_the_search_finds_floats():
    """Patches of floats are rounded in floating point: the one float step of a model's input."""
    launch = kernels.patches_launch(empty(4, 3, 224, 224, dtype=torch.float32), empty(4, 196, 768), (16, 16), 1.5, 0)
    assert sass.compile_launch(launch, 90).float_instructions


@pytest.fixture(scope="module")
def small():
    """A model on the GPU with a float image, images, and their expected results by the reference."""
    program, inputs = small_programs.block(torch.Generator().manual_seed(0), batch=6, head_dim=16)
    expected = {name: x.cuda() for name, x in reference.run(program, inputs).items()}
    model = IntegerModel(program, backend="gpu").cuda()
    return model, inputs["image"].cuda(), expected


def results(model: IntegerModel, images: torch.Tensor) -> dict[str, torch.Tensor]:
    return executor.run(model.program, {"image": images})


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rows: slice = slice(None)) -> bool:
    return all(torch.equal(found[name], x[rows]) for name, x in expected.items())


@pytest.mark.gpu
def test_results_outlive_the_next_call(small):
    model, images, expected = small
    first = results(model, images[:3])
    second = results(model, images[3:])
    assert same(first, expected, slice(0, 3)) and same(second, expected, slice(3, 6))


@pytest.mark.gpu
def test_more_shapes_than_graphs_are_kept(small):
    model, images, expected = small
    for batch in (*range(1, executor.MAX_GRAPHS + 3), 1):
        repeated = images.repeat(4, 1, 1, 1)[:batch]
        found = results(model, repeated)
        assert all(torch.equal(found[name], x.repeat(4, *[1] * (x.dim() - 1))[:batch]) for name, x in expected.items())
    assert len(executor._loaded[model.program]._forwards) == executor.MAX_GRAPHS


@pytest.mark.gpu
def test_streams_and_threads(small):
    model, images, expected = small
    failures = []

    def call(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(20):
                rows = slice((seed + i) % 3, (seed + i) % 3 + 3)
                if not same(results(model, images[rows]), expected, rows):
                    failures.append((seed, i))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu
def test_inside_of_the_callers_graph(small):
    model, images, expected = small
    results(model, images)
    static = images.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(model, static)
    static.copy_(images.flip(0))
    graph.replay()
    assert all(torch.equal(found[name], x.flip(0)) for name, x in expected.items())


@pytest.mark.gpu
def test_images_that_lie_otherwise(small):
    """Each is rounded to codes where it lies."""
    model, images, expected = small
    wide = torch.cat((images, images), 3)
    memory = torch.empty(images.numel() + 1, device="cuda")
    unaligned = memory[1:].view(images.shape).copy_(images)
    others = wide[..., : images.shape[3]], unaligned, images.to(memory_format=torch.channels_last)
    for _ in range(3):
        assert all(same(results(model, x), expected) for x in others)
        assert same(results(model, images.flip(0)), {name: x.flip(0) for name, x in expected.items()})


@pytest.mark.gpu
def test_a_bert_without_its_optional_inputs_inside_of_the_callers_graph():
    transformers = pytest.importorskip("transformers")
    from intflash import integer

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    model = transformers.BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    ids = torch.randint(0, 50, (3, 16))
    made = integer.convert(model, integer.calibrate(model, [{"input_ids": ids}]), backend="reference")
    mask = torch.arange(16)[None] < torch.tensor([[16], [9], [1]])
    expected, masked = made(input_ids=ids)[0].cuda(), made(input_ids=ids, attention_mask=mask)[0].cuda()
    ids, mask, made = ids.cuda(), mask.cuda(), IntegerModel(made.program, backend="gpu").cuda()
    made(input_ids=ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made(input_ids=ids)[0]
    graph.replay()
    assert torch.equal(found, expected)
    for _ in range(3):
        assert torch.equal(made(input_ids=ids)[0], expected)
        assert torch.equal(made(input_ids=ids, attention_mask=mask)[0], masked)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(small, mode):
    model, images, expected = small
    with mode():
        assert same(results(model, images[:2]), expected, slice(0, 2))


@pytest.mark.gpu
def test_inside_of_a_compiled_model():
    program, inputs = small_programs.block(torch.Generator().manual_seed(1), batch=2, head_dim=16)
    program = replace(program, outputs=program.outputs[:1]).check()
    model, image = IntegerModel(program, backend="gpu").cuda(), inputs["image"].cuda()
    expected = reference.run(program, inputs)[program.outputs[0].buffer].float()
    assert torch.equal(torch.compile(lambda x: 2 * model(x + 0))(image).cpu(), 2 * expected)


@pytest.mark.gpu
def test_an_empty_batch(small):
    model, images, _ = small
    assert all(len(x) == 0 for x in results(model, images[:0]).values())


def test_an_empty_batch_needs_no_gpu():
    program, inputs = small_programs.block(torch.Generator().manual_seed(0))
    found = executor.run(program, {name: x[:0] for name, x in inputs.items()})
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        o.buffer: ((0, *program.buffers[o.buffer].shape), program.buffers[o.buffer].dtype) for o in program.outputs
    }
