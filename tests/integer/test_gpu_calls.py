"""Calls of a loaded program without a GPU: streams, graphs and kernels are stood in for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from intflash.integer.gpu import executor  # noqa: E402
from intflash.integer.program import Buffer, Input, Output  # noqa: E402

CHANNELS = 6


class Steps:
    """y = 2 (image + 1), and 0 where the mask is False."""

    inputs_of_rest = frozenset({"mask"})

    def __init__(self, program):
        self.launches = 0

    def run(self, inputs):
        return self.rest(self.first(inputs), inputs)

    def first(self, inputs, made=None):
        self.launches += 1
        out = made["codes"] if made else torch.empty_like(inputs["image"], memory_format=torch.contiguous_format)
        return {"codes": out.copy_(inputs["image"] + 1)}

    def rest(self, made, inputs):
        return {"y": 2 * made["codes"] * inputs["mask"]}


class Graph:
    """Computes again what it "captured", into the same memory."""

    def __init__(self):
        self.again = lambda: None

    def replay(self):
        self.again()


@pytest.fixture
def loaded(monkeypatch):
    calls = SimpleNamespace(stream=1, waits=0, captures=0)

    class Event:
        def record(self, stream):
            assert stream.raw == calls.stream

    def wait_event(event):
        calls.waits += 1

    @contextlib.contextmanager
    def capture(graph, pool, capture_error_mode):
        calls.captures += 1
        yield

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: calls.stream, raising=False)
    for name, fake in {
        "current_device": lambda: 0,
        "current_stream": lambda: SimpleNamespace(raw=calls.stream, wait_event=wait_event),
        "Event": Event,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: 0,
        "CUDAGraph": Graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(executor, "Steps", Steps)
    program = SimpleNamespace(
        inputs=[Input("image", "uint8", (CHANNELS,)), Input("mask", "mask", (CHANNELS,))],
        outputs=[Output("y", "y", "s", (CHANNELS,))],
        buffers={"y": Buffer((CHANNELS,), 32)},
    )
    made = executor.LoadedProgram(program)
    original = made._capture

    def captured(given):
        forward = original(given)
        steps = Steps(program)
        forward.graph.again = lambda: forward.outputs["y"].copy_(steps.rest(forward.made, forward.inputs)["y"])
        return forward

    monkeypatch.setattr(made, "_capture", captured)
    return made, calls


def call(made, image, mask, read=None):
    found = made._replay({"image": image, "mask": mask}, read or executor._copies)
    return found if read else found["y"]


def expected(image, mask):
    return 2 * (image + 1) * mask


def images(seed: int, batch: int = 2):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(-9, 9, (batch, CHANNELS), generator=g).to(torch.int32)
    return image, torch.rand(batch, CHANNELS, generator=g) < 0.5


def test_calls_read_the_callers_tensors_and_own_their_results(loaded):
    made, calls = loaded
    given = [images(seed) for seed in range(5)]
    found = [call(made, *x) for x in given]
    assert all(torch.equal(y, expected(*x)) for x, y in zip(given, found, strict=True))
    assert calls.captures == 1
    assert made._steps.launches == 2 + 5  # to compile, to have what the graph reads, and in each call


def test_batches_have_graphs_of_their_own_and_layouts_do_not(loaded):
    made, calls = loaded
    image, mask = images(1, 3)
    wide = torch.stack((image, image + 5), 2)[..., 1]  # not contiguous
    for _ in range(3):
        assert torch.equal(call(made, image, mask), expected(image, mask))
        assert torch.equal(call(made, wide, mask), expected(wide, mask))
        assert torch.equal(call(made, image[1:], mask[1:]), expected(image[1:], mask[1:]))
    assert calls.captures == 2


def test_the_result_is_read_before_another_call(loaded):
    made, _ = loaded
    image, mask = images(2)
    assert torch.equal(call(made, image, mask, lambda found: found["y"] * 0.5), 0.5 * expected(image, mask))


def test_streams_wait_for_each_other(loaded):
    made, calls = loaded
    for stream, waits in ((1, 0), (1, 0), (2, 1), (2, 1), (1, 2)):
        calls.stream = stream
        image, mask = images(stream)
        assert torch.equal(call(made, image, mask), expected(image, mask)) and calls.waits == waits


def test_the_graph_that_was_not_used_for_longest_is_forgotten(loaded):
    made, _ = loaded
    for batch in range(1, executor.MAX_GRAPHS + 3):
        image, mask = images(batch, batch)
        assert torch.equal(call(made, image, mask), expected(image, mask))
    assert len(made._forwards) == executor.MAX_GRAPHS
