"""Runs everything that this machine can measure and writes one page: `python -m benchmarks all`.

Experiments that do not depend on timing run first, several at once, together with rehearsals of the others, which
compile their kernels. The timed ones then run one at a time. Each job is a process of its own. A job that fails,
exceeds its limit or finds no time left becomes a result with the reason.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.registry import EXPERIMENTS
from intflash.bench.experiments import Experiment
from intflash.bench.measure import environment

DEMOS = ("vit", "swin")
GRACE_S = 8.0  # time in which a job that was told to stop may save its results


@dataclass(frozen=True)
class Job:
    """A process.

    Attributes:
        name: of its log.
        arguments: after ``python -m``.
        limit_s: when it is stopped.
        result: the JSON file that it writes; None for a rehearsal.
        title, source: of the page's section.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    result: Path | None = None
    title: str = ""
    source: str = ""


@dataclass(frozen=True)
class JobPlan:
    """Jobs that run beside others, and jobs that run alone after them."""

    together: Sequence[Job]
    alone: Sequence[Job]


@dataclass(frozen=True)
class Ended:
    """The end of a job; `reason` where it failed."""

    job: Job
    stage: str
    seconds: float
    reason: str | None = None


def plan(out: Path, device: str, *, quick: bool = False, seed: int = 0, jobs: int = 1, models: bool = False) -> JobPlan:
    """Returns the jobs for a device. Rehearsals compile a GPU's kernels, with at most `jobs` processes each."""
    few = ("--quick",) if quick else ()
    experiments = [e for e in EXPERIMENTS if device in e.devices]
    together = [_experiment(e, out, device, seed, few) for e in experiments if not e.timed]
    alone = [_experiment(e, out, device, seed, few) for e in experiments if e.timed]
    demos = [_demo(model, out / "demo", device, ("--images", "20") if quick else ()) for model in DEMOS]
    rehearsals = []
    if device == "cuda":
        arguments = ("intflash.bench.gpu_attention", "--rehearse", "--jobs", str(jobs), *few)
        scratch = out / "rehearsal"
        rehearsals = [_rehearsal(job.name, (*job.arguments, "--rehearse")) for job in alone]
        small = [_demo(model, scratch, device, ("--images", "5")) for model in DEMOS]
        rehearsals += [_rehearsal("attention", arguments), *(_rehearsal(job.name, job.arguments) for job in small)]
    arguments = ("intflash.cli", "bench", "attention", "--device", device, "--out", str(out), *few)
    alone += [Job("attention", arguments, 150, out / "attention.json", "Attention beside torch's"), *demos]
    if models:
        path = out / f"models-{device}.json"
        arguments = ("intflash.cli", "bench", "models", "--device", device, "--out", str(path.with_suffix("")))
        alone.append(Job("models", arguments, 240, path, "Whole models, patched beside unpatched"))
    return JobPlan((*rehearsals, *together), alone)


def _experiment(e: Experiment, out: Path, device: str, seed: int, few: tuple[str, ...]) -> Job:
    given = ("-e", e.name, "--out", str(out), "--device", device, "--seed", str(seed), *few)
    return Job(e.name, ("benchmarks", "run", *given), e.limit_s, out / f"{e.name}.json", e.title, e.source)


def _demo(model: str, out: Path, device: str, images: tuple[str, ...]) -> Job:
    arguments = ("intflash.cli", "demo", "--model", model, "--device", device, "--out", str(out), *images)
    title = f"Handwritten digits by every method, model {model}"
    return Job(f"demo-{model}", arguments, 90, out / f"demo-{model}.json", title)


def _rehearsal(name: str, arguments: tuple[str, ...]) -> Job:
    return Job(f"rehearsal of {name}", arguments, 150)


def run_all(
    plan: JobPlan, out: Path, *, seconds: float, jobs: int, log: Callable[[str], None] = lambda text: None
) -> list[Ended]:
    """Runs a plan's jobs within about `seconds` and writes every result, and run.json, to `out`."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for job in (*plan.together, *plan.alone):
        if job.result is not None:
            job.result.unlink(missing_ok=True)  # of an earlier run
    stop = time.monotonic() + seconds
    ended: list[Ended] = []

    def note(end: Ended) -> None:
        ended.append(end)
        log(f"{end.stage:8} {end.job.name}: {end.reason or 'done'}, {end.seconds:.0f} s")
        if end.reason is not None and end.job.result is not None:
            _save_failure(end)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        started = [pool.submit(_run, job, "together", out / "logs", stop, threads) for job in plan.together]
        for future in concurrent.futures.as_completed(started):
            note(future.result())
    for job in plan.alone:
        note(_run(job, "alone", out / "logs", stop))
    rows = [dict(job=e.job.name, stage=e.stage, seconds=round(e.seconds, 1), ended=e.reason or "done") for e in ended]
    facts = {"title": "How this page was made", "environment": environment(), "rows": rows}
    (out / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    return ended


def _run(job: Job, stage: str, logs: Path, stop: float, threads: int | None = None) -> Ended:
    start = time.monotonic()
    limit = min(job.limit_s, stop - start)
    if limit < GRACE_S:
        return Ended(job, stage, 0.0, "not started: the time of the whole run was used up")
    more = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    path = logs / f"{job.name.replace(' ', '-')}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *job.arguments], stdout=log, stderr=subprocess.STDOUT, env=os.environ | more,
            start_new_session=True,
        )  # fmt: skip
        reason = None
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit:.0f} s"
            _stop(process)
    if reason is None and process.returncode != 0:
        said = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        reason = f"ended with {process.returncode}: {said[-1][:300] if said else 'without a word'}"
    return Ended(job, stage, time.monotonic() - start, reason)


def _stop(process: subprocess.Popen) -> None:
    """Lets the job save its results, then ends it with all processes that it started."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _save_failure(end: Ended) -> None:
    """Writes the reason into the job's result, which may be incomplete or missing."""
    job = end.job
    if job.result.exists():
        content = json.loads(job.result.read_text())
    else:
        device = "cuda" if "cuda" in job.arguments else "cpu"
        content = {"name": job.name, "title": job.title, "source": job.source, "device": device, "rows": []}
        content["environment"] = environment()
    if _says_why(content):
        return
    job.result.parent.mkdir(parents=True, exist_ok=True)
    job.result.write_text(json.dumps(content | {"error": end.reason}, indent=1) + "\n")


def _says_why(content: dict[str, Any]) -> bool:
    """Whether an experiment that was stopped, or could not measure anything here, has given the reason itself."""
    rows = content["rows"]
    nothing = all(row.get("value") is None and row.get("us") is None for row in rows)
    return bool(content.get("error")) or (nothing and any(row.get("note") for row in rows))
