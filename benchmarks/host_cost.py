"""What the host costs beside a call: importing, the first call of a process, and models that torch runs eagerly.

Imports and first calls are measured in processes of their own. A first call finds its kernels on disk, and torch's CUDA
context exists before. Models are timm's with random weights, in float16 on a GPU.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import intflash
from intflash.bench.experiments import Experiment, Row, Setting

TURNS, PROCESSES = 5, 3
MODELS = {"ViT-B": "vit_base_patch16_224", "DeiT-S": "deit_small_patch16_224"}
BATCHES = 1, 8
PROCESS = """
import sys, time
start = time.perf_counter()
import torch
between = time.perf_counter()
import intflash
print(between - start, time.perf_counter() - between)
shape, device = eval(sys.argv[1]), sys.argv[2]
q, k, v = (torch.randn(shape, device=device, dtype=torch.float16 if device == "cuda" else torch.float32) for _ in "qkv")
torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().item()
start = time.perf_counter()
intflash.attention(q, k, v).sum().item()
print(time.perf_counter() - start)
"""
FIRST_SHAPES = {"short rows": (1, 6, 197, 64), "long rows": (1, 4, 1024, 64)}


def _measure(setting: Setting) -> Iterator[Row]:
    yield from _processes(setting.device)
    if not setting.quick:
        yield from _models(setting)


def _processes(device: str) -> Iterator[Row]:
    imports = []
    for case, shape in FIRST_SHAPES.items():
        command = [sys.executable, "-c", PROCESS, str(shape), device]
        runs = []
        for _ in range(PROCESSES + 1):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(list(map(float, done.stdout.split())))
        imports += runs[1:]  # the first fills caches
        yield Row("first call of a process", case, "s", statistics.median(x[2] for x in runs[1:]))
    for i, series in enumerate(("import torch", "import intflash after torch")):
        yield Row(series, "import", "s", statistics.median(x[i] for x in imports))


def _models(setting: Setting) -> Iterator[Row]:
    import timm

    dtype = torch.float16 if setting.device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(setting.seed)
    images = torch.randn(max(BATCHES), 3, 224, 224, generator=generator).to(setting.device, dtype)
    for case, name in MODELS.items():
        torch.manual_seed(setting.seed)
        model = timm.create_model(name).eval().requires_grad_(False).to(setting.device)
        scales = intflash.calibrate(model, [images[:4].float(), images[4:].float()])
        model = model.to(dtype)
        variants = {"unpatched, eager": model, "patched, eager": copy.deepcopy(model)}
        variants["patched, eager, scales of each call"] = copy.deepcopy(model)
        intflash.patch(variants["patched, eager"], scales=scales)
        intflash.patch(variants["patched, eager, scales of each call"])
        for batch in BATCHES:
            times = _forward_ms(variants, images[:batch], 30 if setting.device == "cuda" else 2)
            for series, ms in times.items():
                yield Row(series, f"{case}, batch {batch}", "ms a forward pass", ms)


def _forward_ms(variants: dict[str, nn.Module], images: Tensor, passes: int) -> dict[str, float]:
    """Wall clock of a forward pass in a loop that waits at its end; the variants take turns; medians."""
    wait: Callable[[], None] = torch.cuda.synchronize if images.is_cuda else lambda: None
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode():
        for turn in range(TURNS + 1):  # the first compiles
            for name, model in variants.items():
                wait()
                start = time.perf_counter()
                for _ in range(passes):
                    model(images)
                wait()
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - start) / passes)
    return {name: statistics.median(x) for name, x in times.items()}


EXPERIMENTS = (
    Experiment(
        name="host_cost",
        title="Imports, first calls and eager models",
        source="docs/design/call-path.md",
        measure=_measure,
        notes=f"Median of {PROCESSES} processes, after one that fills caches, or of {TURNS} turns of a loop of forward "
        "passes. A first call is that of `attention` after one of torch's on the same tensors, its kernels on disk, "
        "until its result is on the host. Weights are random, scales static unless the series says otherwise.",
        limit_s=300.0,
    ),
)
