"""Time and energy of GPU work by CUDA graphs, which exclude Python's launch time. The contenders take turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MAX_REPEATS = 200  # calls in one graph


def capture(call: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """Returns a graph of `repeats` calls. The call runs once before on a side stream, as capture requires."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    return graph


def seconds_once(run: Callable[[], Any]) -> float:
    """Returns the device seconds of one run, measured by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def time_calls(calls: Sequence[Callable[[], Any]], rounds: int = 9, sample_s: float = 3e-3) -> list[float]:
    """Returns the median seconds of each call, from graphs of about `sample_s`. Each round has one sample of every
    call, in an order of its own, because a kernel that follows one that heats the chip is a few percent slower.
    """
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        once = min(seconds_once(call) for _ in range(3))
        repeats = max(1, min(MAX_REPEATS, round(sample_s / max(once, 1e-6))))
        graphs.append((capture(call, repeats), repeats))
    samples: list[list[float]] = [[] for _ in graphs]
    turns = random.Random(0)
    for _ in range(rounds):
        for i in turns.sample(range(len(graphs)), len(graphs)):
            graph, repeats = graphs[i]
            samples[i].append(seconds_once(graph.replay) / repeats)
    return [statistics.median(sample) for sample in samples]


def joules(call: Callable[[], Any], seconds: float = 2.0) -> tuple[float, float]:
    """Returns (joules, seconds) of one call, by NVML's energy counter over graph replays of about `seconds`.

    Raises:
        ImportError: nvidia-ml-py is not installed.
    """
    call()
    once = max(min(seconds_once(call) for _ in range(3)), 1e-6)
    repeats = max(1, min(MAX_REPEATS, round(5e-3 / once)))
    joule, second = joules_of_calls(capture(call, repeats).replay, seconds)
    return joule / repeats, second / repeats


def joules_of_calls(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """As `joules`, of calls that are not captured."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    count = max(1, round(seconds / max(seconds_once(call), 1e-6)))
    for _ in range(max(1, count // 10)):  # until clocks and power settle
        call()
    torch.cuda.synchronize()
    before, start = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    after, stop = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter()
    return (after - before) / 1e3 / count, (stop - start) / count
