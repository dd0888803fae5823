"""absmax.cu, head_absmax.cu, quantize_inputs.cu, constants.cu and bias_codes.cu compute the reference's bits, in the
emulator and on a GPU: the launches before an attention launch.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / "machines" / "ptx")]

import cuda_checks as checks  # noqa: E402
import emulate  # noqa: E402
from test_sm80 import GPUS  # noqa: E402

from intflash.backends.bias import bias_codes  # noqa: E402
from intflash.backends.cuda import BACKEND, backend  # noqa: E402
from intflash.backends.cuda.bias import bias_codes_launch  # noqa: E402
from intflash.backends.cuda.plans import Plan  # noqa: E402
from intflash.backends.cuda.program import CudaLaunch  # noqa: E402
from intflash.backends.gpu.constants import score_unit  # noqa: E402
from intflash.backends.gpu.scales import Qkv  # noqa: E402
from intflash.numerics import exp  # noqa: E402
from intflash.problem import Problem  # noqa: E402
from intflash.quant import QTensor, Recipe, quantize  # noqa: E402

KINDS = (["tensor"] * 3, ["head"] * 3, ["tensor", "head", "tensor"])  # of scales
FLOAT_KV = (torch.float16, torch.bfloat16, torch.float32)


def _unless(reason: str | None) -> pytest.MarkDecorator:
    return pytest.mark.skipif(reason is not None, reason=str(reason))


DEVICES = (
    pytest.param("cpu", marks=_unless(emulate.unavailable()), id="emulated"),
    pytest.param("cuda", marks=[pytest.mark.gpu, _unless(BACKEND.unavailable())]),
)
on_each_device = pytest.mark.parametrize("device", DEVICES)
FULL_IF_EMULATED = (pytest.param("cpu", marks=[pytest.mark.full, *DEVICES[0].marks], id="emulated"), DEVICES[1])
# The emulator takes most of a minute for each type; float16 in every test run.
on_each_device_and_type = pytest.mark.parametrize(
    "dtype, device",
    [
        pytest.param(dtype, *device.values, marks=device.marks, id=f"{dtype}-{device.id or 'cuda'}")
        for dtype in FLOAT_KV
        for device in (DEVICES if dtype == torch.float16 else FULL_IF_EMULATED)
    ],
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch, request):
    torch.manual_seed(0)
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(CudaLaunch, "run", emulate.run)


def layouts(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Qkv]]:
    """Yields Q, K and V in callers' layouts: separate tensors, views of one projection, tokens before heads, shared
    by all batches.
    """

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(shape) * 3).to(device=device, dtype=dtype)

    yield "apart", Qkv(made((2, 4, 70, 64)), made((2, 2, 133, 64)), made((2, 2, 133, 64)))
    yield "one projection", Qkv(*(x.transpose(1, 2) for x in made((2, 77, 3, 3, 48)).unbind(2)))
    yield "tokens first", Qkv(*(made((1, 130, 2, 16)).transpose(1, 2) for _ in "qkv"))
    yield "cut", Qkv(*(made((2, 3, 300, 32))[:, 1:, 16:145] for _ in "qkv"))
    yield "one head", Qkv(made((3, 4, 5, 128)), *(made((3, 1, 257, 128)).expand(3, 2, 257, 128) for _ in "kv"))


def planned(tensors: Qkv, recipe: Recipe, method: str = "intflash_p8", gpu=None, **more) -> Plan:
    """The plan of a problem of floats for the kernel of any rows, which takes each step by a launch of its own."""
    p = Problem(method, *tensors, 0.1, recipe=recipe, **(dict(out_dtype=torch.int16) | more))
    return checks.planned(p, gpu, kernel="any_rows")


def run_before(plan: Plan, last: str) -> None:
    """Runs the launches of a plan up to one of a file."""
    for launch in plan.launches:
        launch.run()
        if launch.program.file == last:
            return
    raise AssertionError(f"no launch of {last}")


def memory(plan: Plan, part: int) -> torch.Tensor:
    """The bytes of a part of a plan's workspace, on the CPU."""
    address, size = plan.workspace[part]
    (workspace,) = (
        x for x in plan.launches[0].tensors
        if x.dtype == torch.int8 and x.dim() == 1 and x.data_ptr() <= address < x.data_ptr() + x.numel()
    )  # fmt: skip
    first = address - workspace.data_ptr()
    return workspace[first : first + size].cpu()


def found_scales(plan: Plan, tensors: Qkv, kinds: list[str]) -> list[torch.Tensor]:
    """The scales of Q, K and V that a plan has found."""
    shapes = [(*x.shape[:2], 1, 1) if kind == "head" else (1, 1, 1, 1) for x, kind in zip(tensors, kinds, strict=True)]
    counts = [shape[0] * shape[1] for shape in shapes]
    scales = memory(plan, 0).view(torch.float32).split(counts)
    return [x.view(shape) for x, shape in zip(scales, shapes, strict=True)]


@on_each_device_and_type
def test_absmax_scales(dtype, device):
    """The largest value may be any element: here a corner of a tensor, and an element of the last CTA."""
    for name, tensors in layouts(dtype, device):
        for x, at, value in zip(tensors, (0, -1, 7), (-300.0, 200.0, 100.0), strict=True):
            x[at % x.shape[0], at % x.shape[1], at % x.shape[2], at % x.shape[3]] = value
        for kinds in KINDS:
            plan = planned(tensors, Recipe(*kinds))
            plan.launches[0].run()
            expected = [quantize(x.cpu(), kind).scale for x, kind in zip(tensors, kinds, strict=True)]
            assert all(map(torch.equal, found_scales(plan, tensors, kinds), expected)), (name, kinds)


@on_each_device
def test_absmax_scales_of_long_heads(device):
    """A cluster takes a head where the GPU has clusters; elsewhere the last CTA of a head converts its maximum. The
    maximum of each head is in another place.
    """
    shapes = ((1, 6, 5000, 64), (1, 3, 4100, 64), (1, 3, 4100, 64))
    tensors = Qkv(*(torch.randn(shape, device=device).half() for shape in shapes))
    for x in tensors:
        for head in range(x.shape[1]):
            x[0, head, head * (x.shape[2] - 1) // (x.shape[1] - 1), head] = -20.0 - head
    expected = [quantize(x.cpu(), "head").scale for x in tensors]
    for name in ("sm_89", "sm_90a") if device == "cpu" else (None,):
        plan = planned(tensors, checks.OF_HEADS, gpu=GPUS.get(name))
        macros = checks.macros(plan.launches[0])
        if name:
            assert macros["CLUSTER"] == ("0" if name == "sm_89" else "8")
        plan.launches[0].run()
        assert all(map(torch.equal, found_scales(plan, tensors, ["head"] * 3), expected)), name


def test_clusters_take_heads_that_are_short_or_many():
    """Few long heads would leave multiprocessors idle."""
    for heads, n, cluster in ((1, 8192, "8"), (1, 8193, "0"), (5, 8193, "0"), (6, 8193, "8")):
        x = torch.zeros(1, heads, n, 64, dtype=torch.float16, device="meta")
        launch = planned(Qkv(x, x, x), checks.OF_HEADS, gpu=GPUS["sm_90a"]).launches[0]
        assert launch.program.file == "head_absmax.cu" and checks.macros(launch)["CLUSTER"] == cluster
    queries, keys = (torch.zeros(1, 12, n, 128, dtype=torch.float16, device="meta") for n in (32760, 512))
    launch = planned(Qkv(queries, keys, keys), checks.OF_HEADS, gpu=GPUS["sm_90a"]).launches[0]
    assert launch.program.file == "head_absmax.cu" and checks.macros(launch)["CLUSTER"] == "0"


@pytest.mark.parametrize("recipe", (checks.OF_TENSORS, checks.OF_HEADS), ids=("tensors", "heads"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_searches_have_eight_loads_in_flight(dtype, recipe):
    """ptxas would wait for one load after another to save registers, of which there are enough."""
    x = torch.zeros(2, 6, 5000, 64, dtype=dtype, device="meta")
    launch = planned(Qkv(x, x, x), recipe, gpu=GPUS["sm_90a"]).launches[0]
    assert launch.program.file.endswith("absmax.cu")
    machine = checks.machine(launch)
    steps = [i.opcode for i in machine.instructions if i.opcode in ("LDG", "VIMNMX3")]  # a maximum waits for its load
    assert machine.spills == 0 and "LDG" * 8 in "".join(steps)


@on_each_device
def test_absmax_scales_of_small_maxima(device):
    """A maximum below 2^-100 counts as 0. Several CTAs run, and one is the last."""
    tensors = Qkv(*(torch.full((1, 2, 700, 64), value, device=device) for value in (0.0, 2.0**-101, 2.0**-100)))
    for kinds in KINDS:
        plan = planned(tensors, Recipe(*kinds))
        plan.launches[0].run()
        found = found_scales(plan, tensors, kinds)
        assert [s.unique().item() for s in found] == [1.0, 1.0, (torch.tensor(2.0**-100) / 127).item()]


def test_runs_cover_each_element_once():
    """Addresses of absmax.cu's chunks of 16 bytes, from `Runs` of params.cuh."""
    for name, tensors in layouts(torch.float16, "cpu"):
        launch = planned(tensors, checks.OF_TENSORS).launches[0]
        for index, x in enumerate(tensors):
            pointer, *strides, count, run, size, second_size = struct.unpack_from(
                "Q3q4I", launch.parameters, index * 64
            )
            assert pointer == x.data_ptr()
            found = []
            for i in range(count):
                first, second, third = i // run, i // run // size, i // run // size // second_size
                at = i % run * 16 + first % size * strides[0] + second % second_size * strides[1]
                found.append(at + third * strides[2])
            places = torch.zeros(x.shape, dtype=torch.int64)
            for axis, stride in enumerate(x.stride()):
                places += (torch.arange(x.shape[axis]) * stride * 2).view([-1 if i == axis else 1 for i in range(4)])
            want = torch.unique(places[..., ::8])
            assert sorted(found) == want.tolist(), name


def check_codes(plan: Plan, k: torch.Tensor, v: torch.Tensor, what: object) -> None:
    """A plan's codes of K and V, and the zeros that pad their keys: to a multiple of 16, and of 128 in V's rows."""
    b, h, n, d = v.shape
    of_keys, of_values = (memory(plan, len(plan.workspace) - i) for i in (4, 3))
    keys = of_keys.view(b, h, -(-n // 16) * 16, d)
    assert torch.equal(keys[:, :, :n], k) and (keys[:, :, n:] == 0).all(), what
    rows = of_values.view(b, h, d, -1)
    assert torch.equal(rows[..., :n].mT, v) and (rows[..., n:] == 0).all(), what


def fill_codes(plan: Plan, device: str) -> None:
    """Bytes that are not zeros, in place of codes that are yet to be written."""
    for address, size in plan.workspace[-4:-2] if device == "cpu" else ():
        ctypes.memset(address, 99, size)


@on_each_device_and_type
def test_quantize_inputs(dtype, device):
    """Scales of tensors and of heads that the call finds, and static ones that some values far exceed."""
    for (name, tensors), kind in itertools.product(layouts(dtype, device), ("tensor", "head", "static")):
        recipe = checks.OF_TENSORS if kind == "tensor" else checks.OF_HEADS
        scales = [quantize(x.cpu(), "tensor" if kind == "tensor" else "head").scale for x in tensors]
        if kind == "static":
            scales = [
                torch.linspace(1, 2, x.shape[0] * x.shape[1]).view(x.shape[0], x.shape[1], 1, 1) * 2.0**-9
                for x in tensors
            ]
            of_device = {f"{letter}_scale": s.to(device) for letter, s in zip("qkv", scales, strict=True)}
            recipe = replace(checks.OF_HEADS, **of_device)
        plan = planned(tensors, recipe)
        fill_codes(plan, device)
        run_before(plan, "quantize_inputs.cu")
        finds_scales = kind == "head" and tensors.k.shape[3] * tensors.k.element_size() <= 256
        (last,) = (x for x in plan.launches if x.program.file == "quantize_inputs.cu")
        assert (last is plan.launches[0]) == ("CLUSTER" in checks.macros(last)) == finds_scales, (name, kind)
        if finds_scales:
            assert all(map(torch.equal, found_scales(plan, tensors, ["head"] * 3), scales)), (name, kind)
        of = "tensor" if kind == "tensor" else "head"
        k, v = (quantize(x.cpu(), of, scale=s).data for x, s in zip(tensors[1:], scales[1:], strict=True))
        check_codes(plan, k, v, (name, kind))


@on_each_device
@pytest.mark.parametrize("n, tiles", ((1100, 2), (4096, 4)))
def test_scales_of_many_tokens(n, tiles, device):
    """A CTA of a cluster then takes several tiles. The maximum of each head is in another place."""
    tensors = Qkv(*(torch.randn(1, 3 - (n > 4000), n, 16, device=device).half() for _ in "qkv"))
    for x in tensors:
        for head in range(x.shape[1]):
            x[0, head, head * (n - 1) // (x.shape[1] - 1), head] = -20.0 - head
    plan = planned(tensors, checks.OF_HEADS)
    assert checks.macros(plan.launches[0])["TILES"] == str(tiles)
    plan.launches[0].run()
    q, k, v = (quantize(x.cpu(), "head") for x in tensors)
    assert all(map(torch.equal, found_scales(plan, tensors, ["head"] * 3), (q.scale, k.scale, v.scale)))
    check_codes(plan, k.data, v.data, n)


@pytest.mark.parametrize("architecture, clusters", (("sm_89", False), ("sm_90a", True), ("sm_120", True)))
def test_clusters_find_scales_where_the_gpu_has_them(architecture, clusters):
    """Of rows that registers hold; else a launch of its own finds them."""
    for n, d, fits in ((700, 128, True), (4096, 64, True), (4097, 64, False), (700, 136, False)):
        p = checks.empty_problem("intflash_bfp", n, d, torch.float16, torch.float16, recipe=checks.OF_HEADS)
        first = checks.planned(p, gpu=GPUS[architecture], kernel="any_rows").launches[0]
        found = first.program.file == "quantize_inputs.cu"
        assert found == (clusters and fits), (n, d)
        if found:
            assert checks.machine(first, architecture).spills == 0


@on_each_device
@pytest.mark.parametrize("keys_first", (False, True))
def test_copies_of_values(keys_first, device):
    """V's codes with contiguous keys, of the first tokens of a cache, padded with zeros; the keys without a value."""
    v = torch.randint(-127, 128, (2, 3, 750, 32), dtype=torch.int8)
    v[:, :, ::7] = 0
    v = v[:, :, :701]
    there = v.mT.contiguous().mT if keys_first else v
    scale = torch.ones(1, 1, 1, 1, device=device)
    q, k, values = (QTensor(x.to(device), scale, "tensor") for x in (v, v, there))
    plan = checks.planned(Problem("intflash_bfp", q, k, values, 0.1, out_dtype=torch.float16), kernel="long_rows")
    run_before(plan, "quantize_inputs.cu")
    (codes,) = (memory(plan, i) for i, (_, size) in enumerate(plan.workspace) if size == 2 * 3 * 32 * 768)
    rows = codes.view(2, 3, 32, 768)
    assert torch.equal(rows[..., :701].mT, v) and (rows[..., 701:] == 0).all()
    words = memory(plan, len(plan.workspace) - 1).view(torch.int32).view(2, 3, 6, 4)
    bits = torch.stack([words >> i & 1 for i in range(32)], -1)
    key = torch.tensor([[i // 4 * 16 + word * 4 + i % 4 for i in range(32)] for word in range(4)])
    valueless = torch.zeros(2, 3, 768, dtype=torch.int32)
    valueless[:, :, :701:7] = 1
    assert torch.equal(bits, valueless.view(2, 3, 6, 128)[..., key])


def _codes(b: int, h: int, n: int, kind: str) -> QTensor:
    shapes = {"tensor": (1, 1, 1, 1), "head": (b, h, 1, 1), "token": (b, h, n, 1)}
    scale = torch.exp2(torch.empty(shapes[kind]).uniform_(-40, 12))
    return QTensor(torch.zeros(b, h, n, 16, dtype=torch.int8), scale, kind)


def _of_query_heads(scale: torch.Tensor) -> torch.Tensor:
    """Returns scales of two query heads for each key head."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(2, dim=1)


@on_each_device
@pytest.mark.parametrize("out", (torch.int8, torch.int16, torch.float16), ids=str)
@pytest.mark.parametrize("method", ("intflash_p8", "intflash_online"))
def test_constants_kernel(method, out, device):
    """Scales over the whole range, so that C, k, e and the default scale all saturate."""
    unit = score_unit(method)
    for kinds in (("tensor",) * 3, ("token", "head", "head"), ("head", "tensor", "head")):
        for given in (None, (1, 1, 1, 1), (3, 4, 1, 1)):
            q = _codes(3, 4, 50, kinds[0])
            k, v = (_codes(3, 2, 9, kind) for kind in kinds[1:])
            integer = not out.is_floating_point
            out_scale = torch.exp2(torch.empty(given).uniform_(-40, 12)) if given and integer else None
            C, shift = exp.exponent_constants(q.token_scale(), _of_query_heads(k.scale).mT, 0.3, unit)
            of_device = (QTensor(x.data.to(device), x.scale.to(device), x.granularity) for x in (q, k, v))
            there_scale = None if out_scale is None else out_scale.to(device)
            there = Problem(method, *of_device, 0.3, out_dtype=out, out_scale=there_scale)
            plan = backend.planned(there, only_constants=True)
            plan.run()
            (_, shape), output = plan.constants.score, plan.constants.output
            assert torch.equal(memory(plan, 0).view(torch.int64).view(shape), shift << 32 | C)
            if not integer:
                assert output is None and plan.out_scale is None
                continue
            v_scale = _of_query_heads(v.scale)
            want = v_scale * 127.0 / torch.tensor(float(torch.iinfo(out).max)) if out_scale is None else out_scale
            Mr, e = exp.output_multiplier(v_scale, want)
            assert torch.equal(plan.out_scale.cpu(), want)
            assert torch.equal(memory(plan, 1).view(torch.int64).view(output[1]), (e << 32 | Mr).expand(output[1]))


def _masks(dtype: torch.dtype) -> torch.Tensor:
    """Random values, ties, the edges of the range and of what makes a key absent, and values that are not finite."""
    least = torch.finfo(dtype).min
    edges = [0.0, -0.0, 1419.5, -1419.5, 1419.6, -1419.6, 363408.0, -363409.0, 1e30, math.inf, -math.inf, math.nan]
    edges += [least, least / 2, least * 0.499, -least, torch.finfo(dtype).tiny]
    ties = (torch.arange(-200, 200).double() + 0.5) / exp.LOG2_E / (1 << 12)
    random = torch.randn(4000).double() * torch.logspace(-6, 5, 4000).double()
    return torch.cat([torch.tensor(edges).double(), ties, random]).to(dtype)


@on_each_device
@pytest.mark.parametrize("bits", (20, 12))
@pytest.mark.parametrize("dtype", exp.BIAS_DTYPES, ids=str)
def test_bias_codes(dtype, bits, device):
    bias = _masks(dtype)
    launch, codes = bias_codes_launch(bias.to(device), bits)
    launch.run()
    assert torch.equal(codes.cpu(), exp.bias_codes(bias, bits))


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("bits", (20, 12))
def test_bias_codes_of_views(bits):
    """Axes of stride 0 are computed once and stay so."""
    x = torch.randn(3, 2, 50, 70)
    for view in (x, x.mT, x[:, :, ::2, 1:], x[:1].expand(3, 2, 50, 70), x[:, :1, :1].expand(3, 2, 50, 70), x[:0]):
        there = x.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        codes = bias_codes(there, bits)
        assert torch.equal(codes.cpu(), exp.bias_codes(view, bits))
        assert [s == 0 for s in codes.stride()] == [s == 0 for s in view.stride()]


def test_bias_codes_on_a_cpu():
    x = torch.randn(2, 1, 3, 8)
    assert torch.equal(bias_codes(x, 12), exp.bias_codes(x, 12)) and torch.equal(bias_codes(x), exp.bias_codes(x))


def test_no_module_of_the_backend_imports_triton():
    """Triton is hidden, as on a machine without it."""
    code = """if True:
        import importlib, pkgutil, sys
        sys.modules["triton"] = None
        import intflash.backends.cuda as cuda, intflash.backends.gpu as gpu
        for package in (cuda, gpu):
            for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
        assert not [name for name in sys.modules if name.startswith("intflash") and "triton" in name]
    """
    subprocess.run([sys.executable, "-c", code], check=True)
