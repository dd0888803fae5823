"""On a GPU, the general way, which calls that the native path declines take: streams, threads, graphs, freed memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import intflash  # noqa: E402
from intflash.backends import cpu  # noqa: E402
from intflash.quant import QTensor, Recipe, quantize  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = {"windows": (8, 3, 49, 32), "rows": (2, 3, 197, 64), "long": (1, 2, 1040, 64), "odd": (1, 2, 77, 40)}
STATIC = Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.06)


def three(shape, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=g, device="cuda").half() for _ in "qkv"]


def codes(shape, seed=0):
    return [quantize(x) for x in three(shape, seed)]


@pytest.fixture(autouse=True)
def declined(monkeypatch):
    monkeypatch.setattr(cpu, "attend", lambda *arguments: None)


def leaves(result) -> list[Tensor]:
    return [result.data, result.scale] if isinstance(result, QTensor) else [result]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


KINDS = {"floats": (three, {}), "numbers": (three, dict(recipe=STATIC)), "codes": (codes, dict(out_scale="bound"))}
of_kinds = pytest.mark.parametrize("kind", KINDS)
of_shapes = pytest.mark.parametrize("shape", SHAPES)


@of_kinds
@of_shapes
def test_streams(kind, shape, backend):
    make, options = KINDS[kind]
    qkv = make(SHAPES[shape])
    want = intflash.attention(*qkv, backend="reference", **options)
    for _ in range(5):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = intflash.attention(*qkv, backend=backend, **options)
        stream.synchronize()
        assert same(found, want)


@of_kinds
@of_shapes
def test_a_graph_computes_with_what_its_tensors_hold(kind, shape, backend):
    make, options = KINDS[kind]
    qkv, other = make(SHAPES[shape]), make(SHAPES[shape], 10)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        intflash.attention(*qkv, backend=backend, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = intflash.attention(*qkv, backend=backend, **options)
    for x, y in zip(qkv, other, strict=True):
        for to, of in zip(leaves(x), leaves(y), strict=True):
            to.copy_(of)
    graph.replay()
    torch.cuda.synchronize()
    assert same(out, intflash.attention(*other, backend="reference", **options))


@of_shapes
def test_memory_is_freed_in_the_stream_s_order(shape, backend):
    qkv = three(SHAPES[shape])
    want = intflash.attention(*qkv, backend="reference")
    for _ in range(10):
        copies = [x.clone() for x in qkv]
        found = intflash.attention(*copies, backend=backend)
        del copies
        others = [torch.randn_like(x) for x in qkv]
        assert torch.equal(found, want)
        del others


def test_threads(backend):
    inputs = [three(SHAPES["rows"]), three(SHAPES["long"])]
    want = [intflash.attention(*qkv, backend=backend) for qkv in inputs]
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(20):
                found = [intflash.attention(*qkv, backend=backend) for qkv in inputs]
            torch.cuda.current_stream().synchronize()
            wrong.extend(not torch.equal(x, y) for x, y in zip(found, want, strict=True))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 8


def test_one_tensor_in_three_places(backend):
    q = three(SHAPES["rows"])[0]
    assert same(intflash.attention(q, q, q, backend=backend), intflash.attention(q, q, q, backend="reference"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_gpu(backend):
    qkv = [x.to("cuda:1") for x in three(SHAPES["long"])]
    with torch.cuda.device(0):
        found = intflash.attention(*qkv, backend=backend)
        assert torch.cuda.current_device() == 0
    assert same(found, intflash.attention(*qkv, backend="reference"))


def test_values_are_read_on_request(backend):
    q, k, v = three(SHAPES["rows"])
    intflash.attention(q, k, v, backend=backend, check_finite=True)
    q[0, 0, 0, 0] = torch.nan
    with pytest.raises(intflash.InputError, match="finite"):
        intflash.attention(q, k, v, backend=backend, check_finite=True)


def test_bad_calls_are_refused(backend):
    q, k, v = three(SHAPES["rows"])
    for _ in range(2):
        with pytest.raises(intflash.InputError, match="head_dim"):
            intflash.attention(q, k[..., :32], v, backend=backend)
        with pytest.raises(intflash.InputError):
            intflash.attention(q, k, v, attn_mask=[1, 2], backend=backend)
