"""The CPU kernels beside torch's (and onnxruntime's) attention: `intflash bench attention --device cpu`.

Every series of a workload takes turns with every other in one process, so that a slow spell of the
machine hits all of them; a time is the median over the turns (on one thread of its CPU time, so that
other processes on a shared machine are left out; with several, turns are apart by a rest in which
other libraries' threads stop spinning), a ratio is torch float32 SDPA's median over the series' own
in the same run.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import intflash
from intflash.backends import cpu
from intflash.bench.measure import environment, time_interleaved
from intflash.bench.workloads import QFLASH, Workload
from intflash.call import prepare

WORKLOADS = (
    *QFLASH.values(),
    Workload("N1024", "long", 4, 1024, 64),
    Workload("N4096", "long", 1, 4096, 64),
)
SWIN = ("A4", "A5", "A6", "A7")
TITLE = "Integer attention beside torch's on a CPU: int8 or float32 in and out"
PEER = "torch float32 SDPA"
METHODS = ("intflash_p8", "intflash", "intflash_bfp", "intflash_online")
SCALING = "intflash_p8 alone, int8 in and out"
AT_ONCE = "the same, a call of one thread in each"  # as offered by the machine, whose cores may share units
CALLS_AT_ONCE = 8  # per workload, so that handing them out does not count
MASKED = "with bias and mask"  # of Swin's workloads: a bias per head, a mask per window
AMPLITUDE = 4.0  # inputs are uniform in [-4, 4], as in QFlash's Table 4
# per series and turn; in turns of 2 ms the first calls, slow because of others' data in the caches, are a tenth of the
# time
TURN_S = 10e-3
REST_S = 5e-3  # between turns of several threads


@dataclass(frozen=True)
class CpuRow:
    """The result of one series on one workload."""

    workload: str
    shape: str
    threads: int
    series: str
    kernels: str
    microseconds: float
    # PEER's time over this one in the same run (MASKED: PEER's time with masks; SCALING, AT_ONCE: our time on one
    # thread)
    ratio: float
    busy_neighbour: bool = False  # another process used a core


def measure(
    out: Path | str = "results/attention",
    *,
    threads: Sequence[int] = (1, 2),
    budget_s: float = 3.0,
    workloads: Sequence[Workload] = WORKLOADS,
) -> list[CpuRow]:
    """Time every workload and write ``attention.json``, ``.csv`` and ``.png`` into `out`.

    Args:
        out: an existing or new folder.
        threads: the thread counts, for torch and for us alike; the instruction sets are compared on
            one thread. With several, our scaling is measured too, alone and beside a busy process.
        budget_s: about how long to measure per workload and thread count.
        workloads: the shapes.

    Raises:
        RuntimeError: the native module was not built.
    """
    if not cpu.instruction_sets():
        raise RuntimeError("the native CPU kernels were not built: nothing to measure")
    before = torch.get_num_threads()
    rows: list[CpuRow] = []
    try:
        for count in threads:
            for workload in workloads:
                rows += _measure_one(workload, count, budget_s, cpu.instruction_sets() if count == 1 else [])
        if max(threads) > 1:
            rows += _scaling(max(threads), budget_s / 2, workloads)
            neighbour = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
            neighbour.start()
            try:
                rows += _scaling(max(threads), budget_s / 2, workloads, busy_neighbour=True)
            finally:
                neighbour.terminate()
                neighbour.join()
    finally:
        torch.set_num_threads(before)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    facts = environment() | {"instruction_sets": cpu.instruction_sets(), "amplitude": AMPLITUDE}
    if importlib.util.find_spec("onnxruntime"):
        facts["onnxruntime"] = importlib.metadata.version("onnxruntime")
    content = {"title": TITLE, "device": "cpu", "environment": facts, "rows": [asdict(r) for r in rows]}
    text = json.dumps(content, indent=1)
    (folder / "attention.json").write_text(text + "\n")
    with (folder / "attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, asdict(rows[0]).keys())
        writer.writeheader()
        writer.writerows(asdict(r) for r in rows)
    _figure(rows, folder / "attention.png")
    return rows


def _inputs(workload: Workload) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(workload.shape, generator=generator) * 2 - 1) * AMPLITUDE for _ in "qkv"]


def _measure_one(workload: Workload, threads: int, budget_s: float, isas: Sequence[str]) -> list[CpuRow]:
    torch.set_num_threads(threads)
    q, k, v = _inputs(workload)
    low = [x.to(torch.bfloat16) for x in (q, k, v)]
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        (PEER, ""): partial(F.scaled_dot_product_attention, q, k, v),
        ("torch bfloat16 SDPA", ""): partial(F.scaled_dot_product_attention, *low),
    }
    session = _onnx_session(q, k, v, threads)
    if session is not None:
        calls["onnxruntime float32", ""] = session
    best = cpu.instruction_sets()[0]
    for method in METHODS:
        floats = prepare(q, k, v, method=method)[0]
        codes = prepare(q, k, v, method=method, out_dtype=torch.int8, out_scale="bound")[0].quantized()
        calls[f"{method}, int8 in and out", best] = partial(cpu.run, codes)
        calls[f"{method}, float32 in and out", best] = partial(cpu.run, floats)
        calls[f"{method}, float32 in and out, attention()", best] = partial(intflash.attention, q, k, v, method=method)
        for isa in isas[1:]:
            if method != "intflash_online" and isa != "generic":
                calls[f"{method}, int8 in and out", isa] = partial(cpu.run, codes, isa=isa)
    if workload.name in SWIN:
        bias = torch.randn(1, *q.shape[1:3], workload.n, generator=torch.Generator().manual_seed(1))
        keep = torch.rand(q.shape[0], 1, workload.n, workload.n, generator=torch.Generator().manual_seed(2)) > 0.25
        peer_mask = bias.masked_fill(~keep, float("-inf"))
        calls[f"{PEER}, {MASKED}", ""] = partial(F.scaled_dot_product_attention, q, k, v, peer_mask)
        for method in (m for m in METHODS if m != "intflash_online"):
            problem = prepare(q, k, v, keep, method=method, bias=bias, out_dtype=torch.int8, out_scale="bound")[
                0
            ].quantized()
            calls[f"{method}, int8 in and out, {MASKED}", best] = partial(cpu.run, problem)
    clock = time.thread_time if threads == 1 else time.perf_counter
    rest_s = 0.0 if threads == 1 else REST_S
    times = time_interleaved(list(calls.values()), budget_s, clock=clock, turn_s=TURN_S, rest_s=rest_s)
    seconds = dict(zip(calls, times, strict=True))
    shape = "x".join(map(str, workload.shape))
    rows = []
    for (series, isa), t in seconds.items():
        peer = seconds[f"{PEER}, {MASKED}" if series.endswith(MASKED) else PEER, ""]
        rows.append(CpuRow(workload.name, shape, threads, series, isa, round(1e6 * t, 2), round(peer / t, 2)))
    return rows


def _scaling(
    threads: int, budget_s: float, workloads: Sequence[Workload], busy_neighbour: bool = False
) -> list[CpuRow]:
    """Measures our scaling: one thread against several, and against as many calls at once."""
    torch.set_num_threads(1)
    rows = []
    with ThreadPoolExecutor(threads) as callers:
        for workload in workloads:
            codes = prepare(*_inputs(workload), method="intflash_p8", out_dtype=torch.int8, out_scale="bound")[
                0
            ].quantized()
            one, several = (partial(cpu.run, codes, threads=n) for n in (1, threads))
            calls = [one, several, partial(_at_once, callers, one, threads)]
            times = time_interleaved(calls, budget_s, turn_s=TURN_S)
            times[2] /= CALLS_AT_ONCE * threads
            shape, isa = "x".join(map(str, workload.shape)), cpu.instruction_sets()[0]
            for n, series, t in zip((1, threads, threads), (SCALING, SCALING, AT_ONCE), times, strict=True):
                ratio = round(times[0] / t, 2)
                rows.append(CpuRow(workload.name, shape, n, series, isa, round(1e6 * t, 2), ratio, busy_neighbour))
    return rows


def _at_once(callers: Executor, call: Callable[[], Any], count: int) -> None:
    running = [callers.submit(lambda: [call() for _ in range(CALLS_AT_ONCE)]) for _ in range(count)]
    for future in running:
        future.result()


def _spin() -> None:
    while True:
        pass


def _onnx_session(q: Tensor, k: Tensor, v: Tensor, threads: int) -> Callable[[], Any] | None:
    """Returns onnxruntime's MultiHeadAttention on the same inputs, where onnxruntime and onnx are installed."""
    try:
        import onnx
        import onnxruntime
    except ImportError:
        return None
    b, h, n, d = q.shape
    names = ("query", "key", "value")
    packed = {
        name: x.transpose(1, 2).reshape(b, n, h * d).contiguous().numpy()
        for name, x in zip(names, (q, k, v), strict=True)
    }
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[b, n, h * d])
    node = onnx.helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=h)
    graph = onnx.helper.make_graph([node], "attention", [value(name) for name in names], [value("out")])
    model = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)],
        ir_version=8,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # otherwise they occupy the next series' cores
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, packed)


def _figure(rows: Sequence[CpuRow], path: Path) -> None:
    """Draws the ratios of the best kernels on the smallest number of threads."""
    import matplotlib
    from matplotlib.figure import Figure

    best = cpu.instruction_sets()[0]
    rows = [r for r in rows if r.kernels in ("", best) and r.series not in (PEER, SCALING, AT_ONCE)]
    fewest = min(r.threads for r in rows)
    rows = [r for r in rows if r.threads == fewest and not r.series.endswith(MASKED)]
    names = list(dict.fromkeys(r.workload for r in rows))
    series = list(dict.fromkeys(r.series for r in rows))
    width = 0.84 / len(series)
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=matplotlib.color_sequences["tab20"])
    for i, name in enumerate(series):
        found = {r.workload: r.ratio for r in rows if r.series == name}
        at = [x + (i - (len(series) - 1) / 2) * width for x in range(len(names))]
        axes.bar(at, [found[w] for w in names], width, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xticks=range(len(names)), xticklabels=names, ylabel=f"times {PEER}")
    axes.set_title(f"threads: {fewest}, {best} kernels")
    figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    figure.savefig(path, dpi=110)
