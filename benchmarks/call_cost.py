"""What a call costs the host: Python until the work is queued on a GPU, the whole call on a CPU.

One thread computes. On a CPU the shape is so small that its arithmetic takes little beside the call. Compiled calls are
torch.compile's in its default mode: one call in a graph, for which torch's guards count, and as many as a ViT has.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import intflash
from intflash.bench.experiments import Experiment, Row, Setting

US = "us a call"
CALLS, RUNS = 1000, 15
LAYERS, LAYERS_OF = 12, {"attention", "an op of C++ that does nothing"}  # a ViT's calls in one graph
# Keys of a growing call: on a CPU with little arithmetic, on a GPU with one kernel for all of them.
GROWING = {"cpu": range(1, 65), "cuda": range(961, 1025)}
SHAPES = {
    "cpu": {"(1, 1, 1, 16)": (1, 1, 1, 16)},
    "cuda": {"A4": (64, 3, 49, 32), "A2": (1, 6, 197, 64), "N1024": (1, 4, 1024, 64)},
}
STATIC = intflash.Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.03)
_nothing = torch.library.Library("intflash_benchmarks", "FRAGMENT")


def host_times(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Microseconds of each call, the medians of several runs of a loop, in turns; on a CPU of this thread's time,
    without what other processes take."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(RUNS):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(CALLS):
                call()
            times[name].append((clock() - start) / CALLS)
    return {name: 1e6 * statistics.median(x) for name, x in times.items()}


def _eager(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    codes = [intflash.quantize(x) for x in (q, k, v)]
    growing = _growing(q, k, v)
    return {
        "torch SDPA": partial(scaled_dot_product_attention, q, k, v),
        "sdpa": partial(intflash.sdpa, q, k, v),
        "attention": partial(intflash.attention, q, k, v),
        "attention, static scales": partial(intflash.attention, q, k, v, recipe=STATIC),
        "attention, int8 in and out": partial(intflash.attention, *codes, out_scale="bound"),
        "attention, int8 in, float32 out": partial(intflash.attention, *codes, out_dtype=torch.float32),
        "attention, its keys grown by one": lambda: intflash.attention(*next(growing)),
    } | _general(q, k, v)


def _general(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Calls on a GPU that the native path leaves to Python: of another backend, or for kernels unknown to it."""
    if not q.is_cuda:
        return {}
    calls = {"general way: triton": partial(intflash.attention, q, k, v, backend="triton")}
    if k.shape[2] > 64:  # for windows the native path knows masks
        keep = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        masked = partial(intflash.attention, q, k, v, keep, backend="cuda", recipe=STATIC)
        calls["general way: cuda, masked, static scales"] = masked
    return calls


def _growing(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs with one key more in each, in one storage as a KV cache, then again from the first."""
    sizes = GROWING[q.device.type]
    keys, values = (torch.randn(*x.shape[:2], sizes[-1], x.shape[3], device=x.device, dtype=x.dtype) for x in (k, v))
    return cycle([(q, keys[:, :, :n], values[:, :, :n]) for n in sizes])


def _noop() -> Callable[..., Tensor]:
    """An op of the same tensors that does nothing but allocate its output."""
    if not hasattr(torch.ops.intflash_benchmarks, "noop"):
        _nothing.define("noop(Tensor q, Tensor k, Tensor v) -> Tensor")
        _nothing.impl("noop", lambda q, k, v: torch.empty_like(q), "CompositeExplicitAutograd")
        torch.library.register_fake("intflash_benchmarks::noop", lambda q, k, v: torch.empty_like(q), lib=_nothing)
    return torch.ops.intflash_benchmarks.noop.default


CPP_NOOP = """
#include <torch/library.h>
#include <ATen/ATen.h>
at::Tensor noop(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) { return at::empty_like(q); }
TORCH_LIBRARY_FRAGMENT(intflash_benchmarks, m) { m.def("cpp_noop(Tensor q, Tensor k, Tensor v) -> Tensor"); }
TORCH_LIBRARY_IMPL(intflash_benchmarks, CPU, m) { m.impl("cpp_noop", &noop); }
TORCH_LIBRARY_IMPL(intflash_benchmarks, CUDA, m) { m.impl("cpp_noop", &noop); }
"""


def _cpp_noop() -> Callable[..., Tensor] | None:
    """The same op in C++; None without a compiler or torch's headers."""
    if not hasattr(torch.ops.intflash_benchmarks, "cpp_noop"):
        if shutil.which("c++") is None:
            return None
        from torch.utils.cpp_extension import include_paths, library_paths

        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/noop.so"
            flags = ["-shared", "-fPIC", "-O1", "-std=c++20", "-x", "c++", "-", "-o", library]
            folders = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
            command = ["c++", *folders, *flags, "-ltorch_cpu", "-ltorch", "-lc10"]
            if subprocess.run(command, input=CPP_NOOP, text=True, capture_output=True).returncode:
                return None
            torch.ops.load_library(library)
        fake = torch.library.register_fake("intflash_benchmarks::cpp_noop", lib=_nothing)
        fake(lambda q, k, v: torch.empty_like(q))
    return torch.ops.intflash_benchmarks.cpp_noop.default


def _compiled(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], calls: int = 1) -> Callable[[], object]:
    """One graph with so many calls, each of which takes the output of the one before as its queries."""

    def graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(calls):
            q = function(q, k, v)
        return q

    # Of a code object of its own: torch would try the graphs of all contenders at each call.
    own = FunctionType(graph.__code__.replace(), graph.__globals__, closure=graph.__closure__)
    compiled: Any = torch.compile(own)
    return partial(compiled, *tensors)


def _measure(setting: Setting) -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _rows(setting)
    finally:
        torch.set_num_threads(threads)


def _rows(setting: Setting) -> Iterator[Row]:
    device = setting.device
    modes: dict[str, Callable[[], AbstractContextManager]] = {"no_grad": torch.no_grad}
    modes["inference_mode"] = torch.inference_mode
    for case, shape in SHAPES[device].items():
        dtype = torch.float32 if device == "cpu" else torch.float16
        generator = torch.Generator().manual_seed(setting.seed)
        tensors = tuple(torch.randn(shape, generator=generator).to(device, dtype) for _ in "qkv")
        for series, time_us in host_times(_eager(*tensors), device).items():
            yield Row(series, case, US, time_us)
        if setting.quick:
            continue
        functions = {
            "an op that does nothing": _noop(), "torch SDPA": scaled_dot_product_attention,
            "attention": intflash.attention,
        }  # fmt: skip
        if (of_cpp := _cpp_noop()) is not None:
            functions["an op of C++ that does nothing"] = of_cpp
        for mode, enter in modes.items():
            torch._dynamo.reset()
            with enter():
                inputs = tuple(x.clone() for x in tensors)  # in inference mode, of that mode
                graphs = {series: _compiled(function, inputs) for series, function in functions.items()}
                for series in sorted(LAYERS_OF & functions.keys()):
                    graphs[f"{series}, {LAYERS} calls in a graph"] = _compiled(functions[series], inputs, LAYERS)
                for series, time_us in host_times(graphs, device).items():
                    yield Row(f"compiled, {mode}: {series}", case, US, time_us)


EXPERIMENTS = (
    Experiment(
        name="call_cost",
        title="Host time of a call",
        source="docs/design/call-path.md",
        measure=_measure,
        notes=f"Median of {RUNS} runs of a Python loop of {CALLS} calls, contenders in turns, output allocation "
        "included, one thread. On a GPU no call waits for it. Ops that do nothing allocate their output: one is a "
        "Python function, one is C++.",
        limit_s=300.0,
    ),
)
