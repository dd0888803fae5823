"""Throughput of whole models: timm's float model against the same model patched with static scales.

`intflash bench models --device cuda` measures everything on a GPU in minutes. The processes, one for each model and
batch, compile at the same time and are then timed one after the other. Variants of a model take turns, so that a slow
phase of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from intflash.bench.measure import environment, sqnr
from intflash.errors import InputError
from intflash.models.data import import_timm

logger = logging.getLogger("intflash")

Job = TypeVar("Job", bound=Hashable)

MODELS = ("vit_base_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224")
BATCHES = {"cuda": (1, 8, 64, 256), "cpu": (1, 4, 16)}
BASELINE, OURS = "fp", "intflash"  # prefixes of the variants' names
CALIBRATION_IMAGES = 32
BLOCK_SECONDS = {"cuda": 0.02, "cpu": 0.2}  # of one turn of one variant
CATEGORIES = {  # of kernels, by parts of their names; the first match counts
    "attention": (
        "_short_rows_kernel", "_tile_loop_kernel", "_constants_kernel", "_quantize_kernel", "_amax", "attention",
        "flash", "fmha", "sdpa",
    ),
    "convolution": ("conv", "implicit", "fprop", "winograd"),
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "sm90_xmma", "splitk"),
    "norms, GELU, residuals, softmax, copies (fused by torch)": ("triton",),
    "copies and elementwise": ("copy", "elementwise", "memcpy", "memset", "cat", "roll", "index", "fill"),
}  # fmt: skip


@dataclass
class Timing:
    """One variant: images per second, the median over turns with the 95 % interval of the median."""

    variant: str
    images_per_s: float
    low: float
    high: float


@dataclass
class ModelOutcome:
    """One model and batch: timings, our speed relative to each float variant, and supporting data."""

    model: str
    batch: int
    timings: list[Timing]
    ratios: dict[str, tuple[float, float, float]]  # "ours / float variant" -> median, low, high
    replaced: int
    logits_sqnr: float
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)  # variant -> category -> us per batch
    error: str | None = None


def interval_of_median(samples: list[float]) -> tuple[float, float, float]:
    """Returns the median and its 95 % bootstrap interval.

    Example:
        >>> interval_of_median([2.0, 2.0, 2.0])
        (2.0, 2.0, 2.0)
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(500))
    return statistics.median(samples), medians[12], medians[487]


def build_variants(name: str, images: Tensor, other: Tensor) -> tuple[dict[str, Callable[[], Tensor]], int]:
    """Returns name -> call of each variant of a model on these images, and the layers replaced.

    `other` are the images from which the static scales are calibrated.
    """
    import timm

    import intflash

    torch.manual_seed(0)
    model = timm.create_model(name).eval().requires_grad_(False).to(images.device)
    scales = intflash.calibrate(model, other.float().split(8), OURS)
    if images.is_cuda:
        model = model.half()
    patched = copy.deepcopy(model)
    replaced = len(intflash.patch(patched, scales=scales).replaced)
    lighter = copy.deepcopy(model)
    intflash.patch(lighter, "intflash_p8", scales)
    if not images.is_cuda:
        dynamic = copy.deepcopy(model)
        intflash.patch(dynamic, OURS)
        half, half_images = copy.deepcopy(model).bfloat16(), images.bfloat16()
        calls = {
            "fp32": lambda: model(images),
            f"{OURS} static, fp32": lambda: patched(images),
            f"{OURS} dynamic, fp32": lambda: dynamic(images),
            f"{OURS}_p8 static, fp32": lambda: lighter(images),
            "bf16": lambda: half(half_images),
        }
        return calls, replaced
    compiled, ours, ours_p8 = _compile(model), _compile(patched), _compile(lighter)
    calls = {
        "fp16 compiled": lambda: compiled(images),
        f"{OURS} compiled": lambda: ours(images),
        f"{OURS}_p8 compiled": lambda: ours_p8(images),
        "fp16 eager": lambda: model(images),
        f"{OURS} eager": lambda: patched(images),
    }
    return calls | _other_attention(model, images), replaced


def _compile(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")


def _other_attention(model: nn.Module, images: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Returns the float model with the attention that it does not use by default: cuDNN's, or fused attention in
    Swin.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    twin = copy.deepcopy(model)
    unfused = [m for m in twin.modules() if getattr(m, "fused_attn", True) is False]
    for module in unfused:
        module.fused_attn = True
    compiled = _compile(twin)
    if unfused:
        return {"fp16 compiled, fused attention": lambda: compiled(images)}

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return compiled(images)

    return {"fp16 compiled, cuDNN": call}


def measure(name: str, batch: int, device: str, turns: int, ready: Callable[[], None]) -> ModelOutcome:
    """Builds, compiles and warms up every variant. After `ready` returns, times them in turns."""
    torch.manual_seed(1)
    dtype = torch.float16 if device == "cuda" else torch.float32
    images = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    other = torch.randn(CALIBRATION_IMAGES, 3, 224, 224, device=device, dtype=dtype)
    with torch.no_grad():
        calls, replaced = build_variants(name, images, other)
        logits = {variant: _warm(call) for variant, call in calls.items()}
        reference = next(iter(logits.values()))
        ours = next(out for variant, out in logits.items() if variant.startswith(OURS))
        ready()
        samples = _take_turns(calls, device, turns)
        kernels = {v: kernel_times(c) for v, c in calls.items() if "compiled" in v} if device == "cuda" else {}
    timings = [Timing(v, *interval_of_median([batch / s for s in seconds])) for v, seconds in samples.items()]
    ratios = {
        f"{a} / {b}": interval_of_median([y / x for x, y in zip(samples[a], samples[b], strict=True)])
        for a in samples
        for b in samples
        if a.startswith(OURS) and not b.startswith(OURS) and ("eager" in a) == ("eager" in b)
    }
    return ModelOutcome(name, batch, timings, ratios, replaced, sqnr(reference, ours), kernels)


def _warm(call: Callable[[], Tensor]) -> Tensor:
    for _ in range(3):
        out = call()
    out = out.float().clone()
    if out.is_cuda:
        torch.cuda.synchronize()
    return out


def _take_turns(calls: dict[str, Callable[[], Tensor]], device: str, turns: int) -> dict[str, list[float]]:
    """Returns the seconds per call of each variant, one sample per turn."""
    counts = {}
    for variant, call in calls.items():
        try:
            seconds = min(_block(call, 1, device) for _ in range(3))
        except RuntimeError as error:
            raise RuntimeError(f"{variant} failed") from error
        counts[variant] = max(1, math.ceil(BLOCK_SECONDS[device] / seconds))
    samples: dict[str, list[float]] = {variant: [] for variant in calls}
    for _ in range(turns):
        for variant, call in calls.items():
            samples[variant].append(_block(call, counts[variant], device))
    return samples


def _block(call: Callable[[], Tensor], count: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def kernel_times(call: Callable[[], Tensor], calls: int = 3) -> dict[str, float]:
    """Returns the microseconds of GPU kernels per call by category, and the ten longest kernels by name."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    single: dict[str, float] = {}
    for event in profiler.key_averages():
        us = event.self_device_time_total / calls
        low = event.key.lower()
        category = next((c for c, parts in CATEGORIES.items() if any(p in low for p in parts)), "other")
        found[category] = found.get(category, 0.0) + us
        single[f"kernel {event.key[:80]} x{event.count // calls}"] = us
    longest = sorted(single.items(), key=lambda item: -item[1])[:10]
    return {name: round(us, 1) for name, us in (*sorted(found.items(), key=lambda item: -item[1]), *longest) if us}


def check_models(names: Iterable[str]) -> None:
    """Refuses names that timm does not know.

    Raises:
        InputError: a name is unknown, or timm cannot be imported.
    """
    timm = import_timm()
    unknown = [name for name in names if not timm.is_model(name)]
    if unknown:
        known = ", ".join(MODELS)
        raise InputError(f"expected models of timm.list_models(), as {known}, got {', '.join(unknown)}")


def in_workers(
    commands: Mapping[Job, Sequence[str]], together: int
) -> Iterator[tuple[Job, dict[str, Any] | None, int]]:
    """Yields each job with what its process answered (see `answer`), or None, and the exit code.

    So many prepare themselves at once. They then measure one after the other.
    """
    jobs = list(commands)
    for first in range(0, len(jobs), together):
        workers = [
            (job, subprocess.Popen(commands[job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for job in jobs[first : first + together]
        ]
        lines = [(job, worker, worker.stdout.readline()) for job, worker in workers]  # all have compiled
        for job, worker, line in lines:
            text = line if line.strip() != "ready" else worker.communicate("go\n")[0]
            worker.wait()
            try:
                content = json.loads(text.strip().splitlines()[-1])
            except (IndexError, json.JSONDecodeError):
                content = None
            yield job, content, worker.returncode


def answer(measure: Callable[[Callable[[], None]], Any]) -> None:
    """The worker's side: `measure` prepares, calls the function that it is given, which waits for the worker's turn,
    and returns a dataclass with what it measured.
    """

    def ready() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()

    outcome = measure(ready)
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")


def run_all(models: Iterable[str], batches: Iterable[int], device: str, turns: int) -> list[ModelOutcome]:
    """Measures each model and batch in its own process. On a GPU all compile at once and are timed one by one."""
    jobs = [(m, b) for m in models for b in batches]
    command = [sys.executable, "-m", __name__, "--device", device, "--turns", str(turns)]
    commands = {(m, b): [*command, "--model", m, "--batch", str(b)] for m, b in jobs}
    outcomes = []
    for (m, b), content, code in in_workers(commands, len(jobs) if device == "cuda" else 1):
        if content is None:
            outcome = ModelOutcome(m, b, [], {}, 0, math.nan, error=f"its process ended with {code}")
        else:
            outcome = ModelOutcome(**content)
            outcome.timings = [Timing(**t) for t in outcome.timings]
        logger.info("%s batch %d: %s", m, b, outcome.error or outcome.ratios)
        outcomes.append(outcome)
    return outcomes


def markdown(outcomes: list[ModelOutcome], facts: dict[str, Any]) -> str:
    """Returns the table of the documentation."""
    lines = [f"# Whole models on {facts.get('gpu', facts['cpu'])}", ""]
    lines += [f"{facts['date']}, commit {facts['commit']}, {facts['versions']}. Images/s, medians over turns with the "
              "95 % interval of the median; random weights, static scales from other images.", ""]  # fmt: skip
    lines += ["| model | batch | variant | images/s | interval |", "|---|---|---|---|---|"]
    for o in outcomes:
        for t in o.timings:
            lines.append(
                f"| {o.model} | {o.batch} | {t.variant} | {t.images_per_s:.4g} | {t.low:.4g} to {t.high:.4g} |"
            )
    lines += ["", "| model | batch | ratio of | times as fast | interval | layers replaced | SQNR of logits, dB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for o in outcomes:
        if o.error:
            lines.append(f"| {o.model} | {o.batch} | {o.error} | | | | |")
        for name, (median, low, high) in o.ratios.items():
            lines.append(
                f"| {o.model} | {o.batch} | {name} | {median:.3f} | {low:.3f} to {high:.3f} | {o.replaced} "
                f"| {o.logits_sqnr:.1f} |"
            )
    if any(o.kernels for o in outcomes):
        lines += ["", "## Where the time goes (us of GPU kernels per batch)", ""]
        lines += ["| model | batch | variant | kernels |", "|---|---|---|---|"]
    for o in outcomes:
        for variant, kernels in o.kernels.items():
            shown = ", ".join(f"{name} {us:g}" for name, us in kernels.items() if not name.startswith("kernel "))
            lines.append(f"| {o.model} | {o.batch} | {variant} | {shown} |")
    return "\n".join(lines) + "\n"


def rows(outcomes: list[ModelOutcome]) -> list[dict[str, Any]]:
    """Returns what the report shows: series, case, metric and value, as an experiment's rows."""
    found = []
    for o in outcomes:
        case = f"{o.model.partition('_patch')[0]} batch {o.batch}"
        found += [dict(series=t.variant, case=case, metric="images/s", value=t.images_per_s) for t in o.timings]
        found += [
            dict(series=name, case=case, metric="times as fast", value=ratio) for name, (ratio, *_) in o.ratios.items()
        ]
        if o.error:
            found.append(dict(series=OURS, case=case, metric="images/s", note=o.error))
    return found


def result_files(out: Path) -> list[Path]:
    return [out.with_suffix(".json"), out.with_suffix(".md")]


def save(outcomes: list[ModelOutcome], out: Path) -> list[Path]:
    """Writes ``out`` as JSON and as Markdown."""
    facts = environment()
    paths = result_files(out)
    content = {"title": "Whole models, patched beside unpatched", "device": "cuda" if "gpu" in facts else "cpu"}
    content |= {"environment": facts, "rows": rows(outcomes), "outcomes": [asdict(o) for o in outcomes]}
    paths[0].write_text(json.dumps(content, indent=1) + "\n")
    paths[1].write_text(markdown(outcomes, facts))
    return paths


def main() -> None:
    """The worker that `run_all` starts for one model and batch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", choices=tuple(BATCHES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    given = parser.parse_args()
    answer(lambda ready: measure(given.model, given.batch, given.device, given.turns, ready))


if __name__ == "__main__":
    main()
