"""Measurement: error against float64, time, and the machine on which a number was measured."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROW_BLOCK = 1 << 25  # scores per float64 block: 256 MiB


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Returns softmax(sm_scale * q k^T + bias) v in float64, computed in blocks of rows; ``[B, H, Nq, Dv]``.

    `bias` is ``[1, H, Nq, Nk]``, `keep` bool ``[W, 1, Nq, Nk]`` where batch b uses row ``b % W``.
    """
    q, k, v = q.double(), k.double(), v.double()
    b, h, nq, d = q.shape
    sm_scale = d**-0.5 if sm_scale is None else sm_scale
    rows = max(1, ROW_BLOCK // (b * h * k.shape[2]))
    out = []
    for start in range(0, nq, rows):
        at = slice(start, start + rows)
        scores = (q[:, :, at] @ k.mT) * sm_scale
        if bias is not None:
            scores += bias[:, :, at]
        if keep is not None:
            scores.masked_fill_(~keep[:, :, at].repeat(b // keep.shape[0], 1, 1, 1), -math.inf)
        out.append(torch.softmax(scores, dim=-1) @ v)
    return torch.cat(out, dim=2)


def sqnr(ref: Tensor, out: Tensor) -> float:
    """20 log10(||ref|| / ||out - ref||) in dB; infinite for equal tensors.

    Example:
        >>> sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        20.0
    """
    signal, noise = ref.double().norm().item(), (out.double() - ref.double()).norm().item()
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def mse(ref: Tensor, out: Tensor) -> float:
    return (out.double() - ref.double()).square().mean().item()


def cosine(ref: Tensor, out: Tensor) -> float:
    """Returns the cosine similarity of the whole tensors."""
    return torch.nn.functional.cosine_similarity(ref.double().flatten(), out.double().flatten(), dim=0).item()


# INT-FlashAttention does not define its mean relative error. These are four usual definitions, in percent.
def mre_of_means(ref: Tensor, out: Tensor) -> float:
    """mean|out - ref| / mean|ref|."""
    return 100 * ((out.double() - ref).abs().mean() / ref.abs().mean()).item()


def mre_elementwise(ref: Tensor, out: Tensor) -> float:
    """mean(|out - ref| / |ref|), which elements near 0 dominate."""
    return 100 * ((out.double() - ref).abs() / ref.abs()).mean().item()


def mre_of_norms(ref: Tensor, out: Tensor) -> float:
    """||out - ref|| / ||ref||, Frobenius."""
    return 100 * ((out.double() - ref).norm() / ref.norm()).item()


def mre_of_maximum(ref: Tensor, out: Tensor) -> float:
    """mean|out - ref| / max|ref|."""
    return 100 * ((out.double() - ref).abs().mean() / ref.abs().max()).item()


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "SQNR dB": sqnr,
    "MSE": mse,
    "cosine": cosine,
    "MRE of means %": mre_of_means,
    "MRE elementwise %": mre_elementwise,
    "MRE of norms %": mre_of_norms,
    "MRE of maximum %": mre_of_maximum,
}
MRE_DEFINITIONS = tuple(name for name in METRICS if name.startswith("MRE"))


def time_interleaved(
    calls: Sequence[Callable[[], Any]],
    budget_s: float,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    turn_s: float = 2e-3,
    rest_s: float = 0.0,
) -> list[float]:
    """Median seconds of each call, all calls taking turns so that a slow spell of the machine hits all.

    Args:
        calls: functions without arguments.
        budget_s: about how long to measure in all.
        rounds: turns at least.
        clock: `time.thread_time` leaves out what other processes take, for calls of one thread.
        turn_s: a turn repeats a short call until it lasts about so long: in the first calls of a turn the caches hold
            what the call before it left.
        rest_s: nothing runs for so long after a turn: other libraries' threads spin on for a while after a call.
    """
    repeats, once = [], 0.0
    for call in calls:
        call()
        start = clock()
        call()
        seconds = clock() - start
        repeats.append(max(1, min(1000, math.ceil(turn_s / max(seconds, 1e-7)))))
        once += seconds * repeats[-1]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(max(rounds, min(200, int(budget_s / max(once, 1e-6))))):
        for call, count, sample in zip(calls, repeats, samples, strict=True):
            start = clock()
            for _ in range(count):
                call()
            sample.append((clock() - start) / count)
            if rest_s:
                time.sleep(rest_s)
    return [statistics.median(sample) for sample in samples]


def environment() -> dict[str, Any]:
    """Returns machine, versions, commit and time, which are stored with every result."""
    import intflash

    versions = {"intflash": intflash.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: _version(name) for name in ("triton", "numpy")}
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": versions,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
    return facts


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Returns the commit of the running source tree, with "+" where tracked files differ; None outside a checkout.

    The variable GIT_COMMIT, if set, gives it for a copy of a tree.
    """
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    here = Path(__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in here.parents):
        return None
    try:
        git = ["git", "-C", str(here)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")
