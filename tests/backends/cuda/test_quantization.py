"""absmax.cu, quantize_inputs.cu and constants.cu compute the reference's bits, in the emulator and on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / "machines" / "ptx")]

import emulate  # noqa: E402

from intflash.backends.cuda import BACKEND, quantization  # noqa: E402
from intflash.backends.gpu import scales as gpu_scales  # noqa: E402
from intflash.backends.gpu.scales import FloatInputs, Qkv  # noqa: E402
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


@pytest.fixture(autouse=True)
def emulated(monkeypatch, request):
    torch.manual_seed(0)
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(quantization.CudaLaunch, "run", emulate.run)


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


@on_each_device
@pytest.mark.parametrize("dtype", FLOAT_KV, ids=str)
def test_absmax_scales(dtype, device):
    """The largest value may be any element: here a corner of a tensor, and an element of the last CTA."""
    for name, tensors in layouts(dtype, device):
        for x, at, value in zip(tensors, (0, -1, 7), (-300.0, 200.0, 100.0), strict=True):
            x[at % x.shape[0], at % x.shape[1], at % x.shape[2], at % x.shape[3]] = value
        for kinds in KINDS:
            found = gpu_scales.with_scales(*tensors, Recipe(*kinds), quantization.amax_launch).scales
            expected = [quantize(x, kind).scale for x, kind in zip(tensors, kinds, strict=True)]
            assert all(map(torch.equal, found, expected)), (name, kinds)


@on_each_device
def test_absmax_scales_of_small_maxima(device):
    """A maximum below 2^-100 counts as 0. Several CTAs run, and one is the last."""
    tensors = Qkv(*(torch.full((1, 2, 700, 64), value, device=device) for value in (0.0, 2.0**-101, 2.0**-100)))
    for kinds in KINDS:
        found = gpu_scales.with_scales(*tensors, Recipe(*kinds), quantization.amax_launch).scales
        assert [s.unique().item() for s in found] == [1.0, 1.0, (torch.tensor(2.0**-100) / 127).item()]


def test_runs_cover_each_element_once():
    for name, x in ((name, x) for name, tensors in layouts(torch.float16, "cpu") for x in tensors):
        r, found = quantization.runs(x), []
        for i in range(r.count):
            first, second, third = i // r.run, i // r.run // r.sizes[0], i // r.run // r.sizes[0] // r.sizes[1]
            at = i % r.run * 16 + first % r.sizes[0] * r.strides[0] + second % r.sizes[1] * r.strides[1]
            found.append(at + third * r.strides[2])
        places = torch.zeros(x.shape, dtype=torch.int64)
        for axis, stride in enumerate(x.stride()):
            places += (torch.arange(x.shape[axis]) * stride * 2).view([-1 if i == axis else 1 for i in range(4)])
        want = torch.unique(places[..., ::8])
        assert sorted(found) == want.tolist(), name


@on_each_device
@pytest.mark.parametrize("dtype", FLOAT_KV, ids=str)
def test_quantize_inputs(dtype, device):
    """Dynamic scales, and static scales of heads that some values far exceed. V's padding holds zeros."""
    for name, tensors in layouts(dtype, device):
        for scale, dynamic, query in ((None, True, True), (2.0**-9, False, True), (2.0**-9, False, False)):
            scales = []
            for x in tensors:
                heads = torch.linspace(1, 2, x.shape[0] * x.shape[1]).view(x.shape[0], x.shape[1], 1, 1)
                scales.append(quantize(x.cpu()).scale if dynamic else heads * scale)
            inputs = FloatInputs(tensors, Qkv(*(s.to(device) for s in scales)), dynamic=dynamic)
            launch, codes = quantization.quantize_launch(inputs, query)
            assert list(codes) == list("qkv" if query else "kv")
            stored = codes["v"].data.mT
            padded = stored.as_strided((*stored.shape[:3], stored.stride(2)), stored.stride())
            padded.fill_(99)
            launch.run()
            for letter, s in zip("qkv", scales, strict=True):
                x = getattr(tensors, letter)
                if letter in codes:
                    want = quantize(x.cpu(), "tensor" if dynamic else "head", scale=s).data
                    assert torch.equal(codes[letter].data.cpu(), want), (name, letter, scale)
            assert (padded[..., stored.shape[3] :] == 0).all(), name


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
    unit = quantization.score_unit(method)
    for kinds in (("tensor",) * 3, ("token", "head", "head"), ("head", "tensor", "head")):
        for given in (None, (1, 1, 1, 1), (3, 4, 1, 1)):
            q = _codes(3, 4, 50, kinds[0])
            k, v = (_codes(3, 2, 9, kind) for kind in kinds[1:])
            out_scale = None if given is None else torch.exp2(torch.empty(given).uniform_(-40, 12))
            p = Problem(method, q, k, v, 0.3, out_dtype=out, out_scale=out_scale)
            C, shift = exp.exponent_constants(q.token_scale(), _of_query_heads(k.scale).mT, 0.3, unit)
            there = Problem(method, *(QTensor(x.data.to(device), x.scale.to(device), x.granularity) for x in (q, k, v)),
                            0.3, out_dtype=out, out_scale=None if given is None else out_scale.to(device))  # fmt: skip
            launch, constants, found_scale = quantization.constants_launch(there)
            launch.run()
            assert torch.equal(constants.score.ptr.cpu(), shift << 32 | C)
            if out.is_floating_point:
                assert constants.output is None and found_scale is None
                continue
            v_scale = _of_query_heads(v.scale)
            want = v_scale * 127.0 / torch.tensor(float(torch.iinfo(out).max)) if given is None else p.out_scale
            Mr, e = exp.output_multiplier(v_scale, want)
            assert torch.equal(found_scale.cpu(), want)
            assert torch.equal(constants.output.ptr.cpu(), (e << 32 | Mr).expand(constants.output.ptr.shape))


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
