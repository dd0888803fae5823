"""Tensor-pipe cycles by Nsight Compute: all methods in one process, each kernel profiled once.

The parent starts `ncu python -m benchmarks.tensor_pipe`. The child first runs every kernel once, so that only compiled
kernels run under the profiler. It starts a torch kernel of a known name before each, so that the parent can separate
them.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = ("IMMA", "HMMA")
METRICS = tuple(f"sm__pipe_tensor_op_{unit.lower()}_cycles_active.avg.pct_of_peak_sustained_active" for unit in UNITS)
MARKER = "spin_kernel"  # torch.cuda._sleep's
LIMIT_S = 75


@dataclass(frozen=True)
class Reading:
    """UNITS in percent of the active cycles, of the busiest kernel of a call."""

    backend: str
    percent: tuple[float, ...]


def run(methods: Sequence[str], workloads: Sequence[str], seed: int) -> Iterator[tuple[str, str, Reading | str]]:
    """Yields (method, workload, its reading or the reason why there is none).

    Raises:
        RuntimeError: ncu is not installed, or gave no output.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu (Nsight Compute) is not installed")
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"methods": methods, "workloads": workloads, "seed": seed}))
        command = [
            ncu, "--profile-from-start", "off", "--target-processes", "application-only", "--clock-control", "none",
            "--csv", "--metrics", ",".join(METRICS), sys.executable, "-m", __name__, str(plan),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu took more than {LIMIT_S} s") from None
        ran = json.loads(plan.read_text())
    calls = parse(done.stdout)
    if "calls" not in ran or len(calls) != sum("backend" in call for call in ran["calls"]):
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"ncu gave no counters: {' | '.join(said[-3:])[:300]}")
    for call in ran["calls"]:
        reading = Reading(call["backend"], calls.pop(0)) if "backend" in call else call["reason"]
        yield call["method"], call["workload"], reading


def parse(text: str) -> list[tuple[float, ...]]:
    """Returns what ncu's CSV says about each call: its kernel with the busiest tensor pipe, or 0 where no counter
    ran.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    calls: list[dict[str, dict[str, float]]] = []
    for row in csv.DictReader(lines):
        if MARKER in row["Kernel Name"]:
            if not calls or calls[-1]:
                calls.append({})
        elif row["Metric Name"] in METRICS:
            value = row["Metric Value"].replace(",", "")
            calls[-1].setdefault(row["ID"], {})[row["Metric Name"]] = float(value or 0)
    readings = [[tuple(kernel.get(m, 0.0) for m in METRICS) for kernel in call.values()] for call in calls if call]
    return [max(kernels, key=sum) for kernels in readings]


def _child(path: Path) -> None:
    """Runs the plan's kernels under the profiler, and writes into the plan what ran."""
    import torch

    from intflash.bench.gpu_launches import make_kernels, uniform_inputs
    from intflash.bench.workloads import QFLASH

    plan = json.loads(path.read_text())
    said, ready = [], []
    for workload in plan["workloads"]:
        inputs = uniform_inputs(QFLASH[workload].batched(8).shape, plan["seed"])
        kernels, refused = make_kernels(plan["methods"], inputs)
        ready += kernels.values()
        said += [dict(workload=workload, method=name, backend=kernel.backend) for name, kernel in kernels.items()]
        said += [dict(workload=workload, method=name, reason=reason) for name, reason in refused.items()]
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for kernel in ready:
        torch.cuda._sleep(1)
        kernel.launch()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    path.write_text(json.dumps({"calls": said}))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
