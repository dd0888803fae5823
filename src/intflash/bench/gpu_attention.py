"""`intflash bench attention` on a GPU: our integer kernels beside torch's SDPA and installed peers (`peers.py`).

Kernel only, and with quantization. Contenders of a workload take turns in CUDA-graph replays; medians. Static scales
come from another batch than the timed one. Floors: 4 B H N^2 D operations at the int8 tensor peak, and every input and
output byte once at the measured copy bandwidth (`H200`); the larger is what no kernel beats.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import json
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from intflash.backends import select
from intflash.bench import peers
from intflash.bench.experiments import describe
from intflash.bench.measure import environment, exact_attention, sqnr
from intflash.bench.workloads import QFLASH
from intflash.problem import Problem
from intflash.quant import Recipe

log = logging.getLogger("intflash")

TITLE = "Integer attention beside torch's: kernel only, and from float16 with static and dynamic scales"
NOTES = "Ratio: the time of torch's fastest float16 attention (cuDNN, flash, memory-efficient) over this one, in the \
same run. Floors: int8 operations at the datasheet's peak, bytes at the measured copy bandwidth; the fraction is the \
larger over the time."
H200 = {"int8 operations/s": 1979e12, "bytes/s": 4.3e12}  # peak of the datasheet; measured device copy
SDPA = {f"SDPA {name}": f"{name} fp16" for name in ("cuDNN", "flash", "efficient")}
KERNEL, STATIC, DYNAMIC = "kernel only", "float16, static scales", "float16, dynamic scales"
HEADS = "float16, dynamic, of each head"  # the default
OF_TENSORS = Recipe(q="tensor", k="tensor", v="tensor")


@dataclass(frozen=True)
class GpuCase:
    name: str
    shape: tuple[int, int, int, int]
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """The result of one contender on one workload, in microseconds. `note` says why it did not run."""

    workload: str
    shape: str
    method: str
    backend: str | None
    variant: str
    us: float | None = None
    ratio: float | None = None  # the time of the fastest SDPA over this time
    tops: float | None = None
    gb_s: float | None = None
    arithmetic_floor_us: float | None = None
    memory_floor_us: float | None = None
    floor_fraction: float | None = None
    sqnr_db: float | None = None
    note: str | None = None


EXACT = ("intflash_p8", "intflash")


def cases(quick: bool = False) -> list[GpuCase]:
    """Returns the attention of ViT-Tiny to -Base and of Swin-T's stages, and of long rows, in several batch sizes."""
    found = []
    for name, w in QFLASH.items():
        for batch in (1, 8):
            found.append(GpuCase(f"{name} batch {batch}", w.batched(batch).shape, (*EXACT, "qflash")))
    found.append(GpuCase("A2 batch 1024", QFLASH["A2"].batched(1024).shape, EXACT))
    found.append(GpuCase("A4 batch 128", QFLASH["A4"].batched(128).shape, EXACT))
    for d, heads in ((64, 32), (128, 16)):
        for n in (1024, 4096, 16384):
            shape = (4 if n < 16384 else 1, heads, n, d)
            found.append(GpuCase(f"D{d} N{n}", shape, ("intflash_online", "intflash_p8", "intflash")))
    if quick:
        return [c for c in found if c.name in ("A2 batch 8", "A4 batch 8", "D64 N4096")]
    for batch in (64, 256):
        found += [GpuCase(f"{n} batch {batch}", QFLASH[n].batched(batch).shape, EXACT) for n in ("A2", "A4", "A7")]
    found.append(GpuCase("D80 N4096", (4, 16, 4096, 80), ("intflash_online",)))
    return found


def _inputs(shape: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    """Returns inputs uniform in [-4, 4], as in the QFlash benchmark, in float16."""
    g = torch.Generator("cuda").manual_seed(seed)
    return tuple((torch.rand(shape, generator=g, device="cuda") * 8 - 4).half() for _ in range(3))


def _kernel(name: str, inputs: tuple[Tensor, ...]) -> tuple[str, Callable[[], Any], Callable[[], Tensor]]:
    """Times the attention launch alone, on codes with int8 output, or torch's attention."""
    from intflash.bench.gpu_launches import make_kernel

    kernel = make_kernel(name, *inputs)
    return kernel.backend, kernel.launch, kernel.read


def _peer(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[str, Callable[[], Any], Any]:
    call = partial(function, *inputs)
    return "peer", call, call


def _whole(method: str, recipe: Recipe, inputs: tuple[Tensor, ...]) -> tuple[str, Callable[[], Any], Any]:
    """Times a call with float16 input and output and quantization inside, on the backend that the API would choose."""
    problem = Problem(method, *inputs, inputs[0].shape[3] ** -0.5, recipe=recipe, out_dtype=torch.float16)
    backend = select(problem, None)

    def call() -> Tensor:
        return backend.run(problem).out

    return backend.name, call, call


def _static_recipe(shape: tuple[int, ...]) -> Recipe:
    """Returns scales calibrated on another batch of the same distribution."""
    scales = [(x.float().abs().amax() / 127).item() for x in _inputs(shape, 1)]
    return Recipe(q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])


@dataclass(frozen=True)
class GpuContender:
    """What is timed. `make` returns its backend, its call, and a function that reads its output as floats."""

    method: str
    variant: str
    make: Callable[[], tuple[str, Callable[[], Any], Callable[[], Tensor]]]


def _contenders(case: GpuCase) -> Iterator[GpuContender]:
    inputs = _inputs(case.shape, 0)
    for name, kernel in SDPA.items():
        yield GpuContender(name, "float16", partial(_kernel, kernel, inputs))
    for name, function in peers.installed():
        yield GpuContender(name, "float16", partial(_peer, function, inputs))
    recipe = _static_recipe(case.shape)
    for method in case.methods:
        yield GpuContender(method, KERNEL, partial(_kernel, method, inputs))
        if method != "qflash":
            variants = {STATIC: recipe, DYNAMIC: OF_TENSORS, HEADS: Recipe()}
            for variant, chosen in variants.items():
                yield GpuContender(method, variant, partial(_whole, method, chosen, inputs))


def _running(
    case: GpuCase,
) -> tuple[list[tuple[GpuContender, str, Callable[[], Any], Callable[[], Tensor]]], list[Measured]]:
    """Returns the contenders that run, after one run each, and rows of those that do not."""
    running, refused = [], []
    for c in _contenders(case):
        try:
            backend, call, read = c.make()
            call()
            torch.cuda.synchronize()
            running.append((c, backend, call, read))
        except Exception as error:  # a failure of a contender is a result too
            log.warning("%s: %s %s: %s", case.name, c.method, c.variant, describe(error))
            refused.append(Measured(case.name, _shape(case), c.method, None, c.variant, note=describe(error)))
    return running, refused


def _shape(case: GpuCase) -> str:
    return "x".join(map(str, case.shape))


def measure_case(case: GpuCase, rounds: int = 9) -> list[Measured]:
    """Measures every contender of a case."""
    from intflash.bench.gpu_timing import time_calls

    running, refused = _running(case)
    seconds = time_calls([call for _, _, call, _ in running], rounds=rounds)
    times = {(c.method, c.variant): 1e6 * s for (c, *_), s in zip(running, seconds, strict=True)}
    best = min((us for (method, _), us in times.items() if method in SDPA), default=None)
    b, h, n, d = case.shape
    operations, elements = 4 * b * h * n * n * d, 4 * b * h * n * d
    reference = None
    if n <= 4096:
        reference = exact_attention(*(x[:2, :2] for x in _inputs(case.shape, 0)))
    rows = []
    for c, backend, _, read in running:
        method, variant = c.method, c.variant
        us = times[method, variant]
        moved = elements * (1 if variant == KERNEL else 2)
        floors = 1e6 * operations / H200["int8 operations/s"], 1e6 * moved / H200["bytes/s"]
        rows.append(
            Measured(
                case.name, _shape(case), method, backend, variant, us,
                None if best is None else best / us, operations / us / 1e6, moved / us / 1e3, *floors,
                max(floors) / us,
                None if reference is None else sqnr(reference, read()[:2, :2]),
            )
        )  # fmt: skip
    return rows + refused


def _rehearse(case: GpuCase) -> None:
    _running(case)


def compile_all(jobs: int, quick: bool = False) -> None:
    """Compiles what `run` will time into the caches on disk, in `jobs` processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_rehearse, sorted(cases(quick), key=lambda c: -c.shape[3])))


def run(out: Path, quick: bool = False) -> list[Measured]:
    """Measures all cases and writes attention.{json,csv,png} under `out`.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    return measure_all(cases(quick), measure_case, out, TITLE, NOTES)


def measure_all(
    cases: Iterable[Any], measure: Callable[[Any], list[Measured]], out: Path, title: str, notes: str
) -> list[Measured]:
    """Measures named cases one after the other, writes what is known after each, and draws the figure at the end.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    require_device()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Measured] = []
    for case in cases:
        rows += measure(case)
        log.info("%s done", case.name)
        torch.cuda.empty_cache()
        save(rows, out, title, notes)
    _figure(rows, out / "attention.png")
    return rows


def require_device() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("the GPU attention benchmark needs a CUDA device")


def save(rows: list[Measured], out: Path, title: str, notes: str) -> None:
    """Writes attention.{json,csv} under `out`."""
    records = [asdict(r) for r in rows]
    facts = {"title": title, "notes": notes, "device": "cuda", "environment": environment(), "ceilings": H200}
    facts["rows"] = records
    (out / "attention.json").write_text(json.dumps(facts, indent=1) + "\n")
    with (out / "attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)


def _figure(rows: list[Measured], path: Path) -> None:
    """Draws the ratio to the fastest SDPA by workload: the best of our methods for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r.workload for r in rows))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(names) + 1.2))
    for offset, variant in zip((-0.3, -0.1, 0.1, 0.3), (KERNEL, STATIC, DYNAMIC, HEADS), strict=True):
        ratios = {n: [r.ratio or 0 for r in rows if (r.workload, r.variant) == (n, variant)] for n in names}
        values = [max(ratios[n], default=0) for n in names]
        axes.barh([i + offset for i in range(len(names))], values, height=0.2, label=variant)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("fastest float16 SDPA, time over ours")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(rows: list[Measured]) -> str:
    """Returns our times relative to SDPA as lines of text."""
    lines = []
    for r in rows:
        if r.us is None:
            lines.append(f"{r.workload:14s} {r.method:16s} {r.variant}: {r.note}")
            continue
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        db = "" if r.sqnr_db is None else f"{r.sqnr_db:.1f} dB"
        who = f"{r.workload:14s} {r.method:16s} {r.backend:6s} {r.variant:31s}"
        lines.append(f"{who} {r.us:9.2f} us {ratio:6s} {r.tops:6.0f} TOPS {db}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    parser.add_argument("--rehearse", action="store_true", help="compile only")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.jobs:
        compile_all(options.jobs, options.quick)
    if options.rehearse:
        return
    sys.stdout.write(table(run(options.out, options.quick)) + "\n")


if __name__ == "__main__":
    main()
