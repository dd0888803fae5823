"""`intflash bench attention` on a GPU: our integer kernels beside torch's SDPA, kernel only and with quantization.

Contenders of a workload take turns in CUDA-graph replays; medians. Static scales come from another batch than the
timed one. Floors: 4 B H N^2 D operations at the int8 tensor peak, and every input and output byte once at the
measured copy bandwidth (`H200`); the larger is what no kernel beats.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import importlib
import json
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from intflash.backends import select
from intflash.bench.gpu.timing import time_calls
from intflash.bench.measure import environment, exact_attention, sqnr
from intflash.bench.workloads import QFLASH
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

log = logging.getLogger(__name__)

H200 = {"int8 operations/s": 1979e12, "bytes/s": 4.3e12}  # datasheet peak; measured device copy
SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FASTER_OF = ("cuDNN", "flash")
KERNEL, STATIC, DYNAMIC = "kernel only", "float16, static scales", "float16, dynamic scales"


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, int, int, int]
    methods: tuple[str, ...]
    targets: tuple[float | None, float | None, float | None] = (None, None, None)  # kernel, static, dynamic


@dataclass(frozen=True)
class Measured:
    """One contender on one workload; times in microseconds."""

    workload: str
    shape: str
    method: str
    backend: str
    variant: str
    us: float
    ratio: float | None  # the faster of cuDNN's and flash's float16 time over this one
    target: float | None
    tops: float
    gb_s: float
    arithmetic_floor_us: float
    memory_floor_us: float
    floor_fraction: float
    sqnr_db: float | None


EXACT = ("intflash_p8", "intflash")


def cases(quick: bool = False) -> list[Case]:
    """The rows of the target table, then batches and lengths around them."""
    found = []
    for name, w in QFLASH.items():
        vit = w.n == 197
        for batch in (1, 8):
            targets = (1.6, 1.3, None) if vit else ((1.8, 1.8, None) if batch == 1 else (2.0, 2.0, None))
            found.append(Case(f"{name} batch {batch}", w.batched(batch).shape, (*EXACT, "qflash"), targets))
    found.append(Case("A2 batch 1024", QFLASH["A2"].batched(1024).shape, EXACT, (2.0, 1.3, 1.0)))
    found.append(Case("A4 batch 128", QFLASH["A4"].batched(128).shape, EXACT, (5.0, 4.0, 2.0)))
    for d, heads, targets in ((64, 32, (1.35, 1.25, 1.2)), (128, 16, (1.3, 1.2, 1.15))):
        for n in (1024, 4096, 16384):
            goal = targets if n > 1024 else (None,) * 3
            shape = (4 if n < 16384 else 1, heads, n, d)
            found.append(Case(f"D{d} N{n}", shape, ("intflash_online", "intflash_p8", "intflash"), goal))
    if quick:
        return [c for c in found if c.name in ("A2 batch 8", "A4 batch 8", "D64 N4096")]
    for batch in (64, 256):
        found += [Case(f"{n} batch {batch}", QFLASH[n].batched(batch).shape, EXACT) for n in ("A2", "A4", "A7")]
    found.append(Case("D80 N4096", (4, 16, 4096, 80), ("intflash_online",)))
    return found


def _inputs(shape: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    """Uniform in [-4, 4], the QFlash benchmark's distribution, float16."""
    g = torch.Generator("cuda").manual_seed(seed)
    return tuple((torch.rand(shape, generator=g, device="cuda") * 8 - 4).half() for _ in range(3))


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v)


def _kernel_only(
    method: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[str, Callable[[], Any], Callable[[], Tensor]]:
    """The attention launch alone on codes (V with contiguous keys, as the quantizer writes it for more than a window),
    int8 out: its backend, the call, and what reads its output.
    """
    from intflash.backends.triton import backend, published
    from intflash.backends.triton.constants import constants_launch
    from intflash.methods import get_method

    problem = Problem(method, q, k, v, q.shape[3] ** -0.5, recipe=get_method(method).recipe, out_dtype=torch.int8)
    problem = problem.quantized()
    b, h, n, d = v.shape
    if n > 64:  # windows are turned in registers
        rows = torch.zeros(b, h, d, -(-n // 128) * 128, dtype=torch.int8, device=v.device)[..., :n]
        problem = replace(problem, v=replace(problem.v, data=rows.copy_(problem.v.data.mT).mT))
    out, statistics = torch.empty_like(q, dtype=torch.int8), backend.row_statistics(problem)
    if method in published.STEPS:
        launch = published.published_launch(problem, published.constants(problem)[0], out, statistics)
        return "triton", launch.run, lambda: out.float() * problem.v.scale
    fill, constants, scale = constants_launch(problem)
    fill.run()
    name = select(problem, None).name
    module = importlib.import_module(f"intflash.backends.{name}.backend")
    launch = module.attention_launch(problem, constants, out, statistics)
    return name, launch.run, lambda: QTensor(out, scale).dequantize()


def _whole(method: str, recipe: Recipe, inputs: tuple[Tensor, ...]) -> tuple[str, Callable[[], Tensor]]:
    """float16 in and out, quantization inside, through the backend that the API would take."""
    problem = Problem(method, *inputs, inputs[0].shape[3] ** -0.5, recipe=recipe, out_dtype=torch.float16)
    backend = select(problem, None)
    return backend.name, lambda: backend.run(problem).out


def _static_recipe(shape: tuple[int, ...]) -> Recipe:
    """Scales calibrated on another batch of the same distribution."""
    scales = [(x.float().abs().amax() / 127).item() for x in _inputs(shape, 1)]
    return Recipe(q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])


@dataclass(frozen=True)
class Contender:
    method: str
    backend: str
    variant: str
    call: Callable[[], Any]
    read: Callable[[], Tensor]  # its output as floats


def _contenders(case: Case) -> Iterator[Contender]:
    inputs = _inputs(case.shape, 0)
    for name, backend in SDPA.items():
        call = partial(_sdpa, backend, *inputs)
        yield Contender(f"SDPA {name}", "torch", "float16", call, call)
    recipe = _static_recipe(case.shape)
    for method in case.methods:
        name, call, read = _kernel_only(method, *inputs)
        yield Contender(method, name, KERNEL, call, read)
        if method != "qflash":
            for variant, chosen in ((STATIC, recipe), (DYNAMIC, Recipe())):
                name, call = _whole(method, chosen, inputs)
                yield Contender(method, name, variant, call, call)


def measure_case(case: Case, rounds: int = 9) -> list[Measured]:
    """Every contender of a case; one that cannot run is logged and left out."""
    running = []
    for c in _contenders(case):
        try:
            c.call()
            torch.cuda.synchronize()
            running.append(c)
        except Exception as error:  # whatever stops a contender is a result
            log.warning("%s: %s %s: %s", case.name, c.method, c.variant, str(error).splitlines()[0][:200])
    seconds = time_calls([c.call for c in running], rounds=rounds)
    times = {(c.method, c.variant): 1e6 * s for c, s in zip(running, seconds, strict=True)}
    best = min((times[f"SDPA {n}", "float16"] for n in FASTER_OF if (f"SDPA {n}", "float16") in times), default=None)
    b, h, n, d = case.shape
    operations, elements = 4 * b * h * n * n * d, 4 * b * h * n * d
    reference = None
    if n <= 4096:
        reference = exact_attention(*(x[:2, :2] for x in _inputs(case.shape, 0)))
    rows = []
    for c in running:
        method, variant = c.method, c.variant
        us = times[method, variant]
        moved = elements * (1 if variant == KERNEL else 2)
        floors = 1e6 * operations / H200["int8 operations/s"], 1e6 * moved / H200["bytes/s"]
        wanted = dict(zip((KERNEL, STATIC, DYNAMIC), case.targets, strict=True)).get(variant)
        if method == "qflash" or (method != "intflash_online" and n >= 1024):
            wanted = 0.9 if method == "intflash" and variant == KERNEL and n >= 4096 else None
        rows.append(
            Measured(
                case.name, "x".join(map(str, case.shape)), method, c.backend, variant, us,
                None if best is None else best / us, wanted, operations / us / 1e6, moved / us / 1e3, *floors,
                max(floors) / us,
                None if reference is None else sqnr(reference, c.read()[:2, :2]),
            )
        )  # fmt: skip
    return rows


def _warm(case: Case) -> None:
    """Run every contender once, which compiles its kernels into Triton's cache on disk."""
    for c in _contenders(case):
        try:
            c.call()
            torch.cuda.synchronize()
        except Exception:  # measure_case reports it
            log.debug("%s: a contender failed while compiling", case.name)


def compile_all(jobs: int, quick: bool = False) -> None:
    """Compile what `run` will time, in `jobs` processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_warm, sorted(cases(quick), key=lambda c: -c.shape[3])))


def run(out: Path, quick: bool = False) -> list[Measured]:
    """Measure all cases and write gpu_attention.{json,csv,png} under `out`.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the GPU attention benchmark needs a CUDA device")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Measured] = []
    for case in cases(quick):
        rows += measure_case(case)
        log.info("%s done", case.name)
        torch.cuda.empty_cache()
        _save(rows, out)
    return rows


def _save(rows: list[Measured], out: Path) -> None:
    records = [asdict(r) for r in rows]
    facts = {"environment": environment(), "ceilings": H200, "rows": records}
    (out / "gpu_attention.json").write_text(json.dumps(facts, indent=1) + "\n")
    with (out / "gpu_attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    _figure(rows, out / "gpu_attention.png")


def _figure(rows: list[Measured], path: Path) -> None:
    """Ratio to the faster SDPA by workload: the best exact or online method of each variant, and the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r.workload for r in rows))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(names) + 1.2))
    for offset, variant in zip((-0.25, 0.0, 0.25), (KERNEL, STATIC, DYNAMIC), strict=True):
        ratios = {n: [r.ratio or 0 for r in rows if (r.workload, r.variant) == (n, variant)] for n in names}
        values = [max(ratios[n], default=0) for n in names]
        axes.barh([i + offset for i in range(len(names))], values, height=0.25, label=variant)
    for r in rows:
        if r.target is not None and r.variant == KERNEL:
            axes.plot([r.target], [names.index(r.workload) - 0.25], "k|", markersize=8)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("faster of cuDNN and flash float16 SDPA, time over ours (bar: target, kernel only)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(rows: list[Measured]) -> str:
    """Ours against SDPA as lines of text."""
    lines = []
    for r in rows:
        goal = "" if r.target is None else f" (target {r.target})"
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}{goal}"
        db = "" if r.sqnr_db is None else f"{r.sqnr_db:.1f} dB"
        who = f"{r.workload:14s} {r.method:16s} {r.backend:6s} {r.variant:24s}"
        lines.append(f"{who} {r.us:9.2f} us {ratio:20s} {r.tops:6.0f} TOPS {db}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.jobs:
        compile_all(options.jobs, options.quick)
    sys.stdout.write(table(run(options.out, options.quick)) + "\n")


if __name__ == "__main__":
    main()
