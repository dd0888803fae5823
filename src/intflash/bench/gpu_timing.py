"""Time and energy of GPU work by CUDA graphs, which exclude Python's launch time. The contenders take turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
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
    # cuBLAS's workspace is to be memory of the graph, as in torch's own graphs. Torch frees any other when it records
    # one, and the graph would then write memory of somebody else.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    torch._C._cuda_clearCublasWorkspaces()
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
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")  # its indices ignore CUDA_VISIBLE_DEVICES
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


IDLE = "idle"


def kernel_times(call: Callable[[], Any], calls: int = 3) -> dict[str, float]:
    """Returns the microseconds of each kernel of one call by the kernel's name, as `shares` counts them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    times = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    return {name: us / calls for name, us in shares(times).items()}


def shares(times: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Splits the time of kernels (name, start, end) among their names, so that the sum is the time of all.

    A kernel that starts before the previous one has ended only waits until then: its time begins at that end. `IDLE`
    is the time in which there is no kernel.
    """
    found: dict[str, float] = {}
    before = None
    for name, start, end in sorted(times, key=lambda kernel: kernel[2]):
        if before is None:
            before = start
        found[IDLE] = found.get(IDLE, 0.0) + max(0.0, start - before)
        found[name] = found.get(name, 0.0) + end - max(start, before)
        before = end
    return found
