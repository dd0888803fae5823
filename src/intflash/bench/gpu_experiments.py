"""Experiments that need a GPU: kernels alone, the papers' tables of energy and tensor-core use, lite's conversion."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from intflash.bench.experiments import Experiment, Figure, Row, Setting
from intflash.bench.measure import exact_attention, sqnr
from intflash.bench.workloads import QFLASH, Workload

MIXED = ("int_flash_half", "int_flash_full", "lite", "qattn", "fp16", "bf16", "fp8")
OURS = ("intflash_online", "intflash_p8", "intflash")
SDPA = ("cuDNN fp16", "flash fp16")
CUDNN = "ratio to cuDNN fp16"
TOPS = "T operations/s"

_WHOLE_CALLS = (
    " The intflash, qflash and iflash rows are whole calls on int8 codes, with the launch that computes the constants; "
    "`intflash bench attention` times their kernels alone."
)

# The published kernels' own programs on an H200 (torch 2.11, triton 3.6), T operations/s by (head_dim, N).
_SIZES = tuple((d, n) for d in (64, 128) for n in (1024, 4096, 16384))
PUBLISHED = {
    "int_flash_full": dict(zip(_SIZES, (171, 211, 225, 168, 197, 208), strict=True)),
    "int_flash_half": dict(zip(_SIZES, (274, 371, 410, 334, 504, 551), strict=True)),
}


def _inputs(shape: Sequence[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform in [-4, 4], the QFlash benchmark's distribution, drawn on the GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    return tuple(torch.rand(tuple(shape), generator=g, device="cuda") * 8 - 4 for _ in range(3))


def _calls(names: Sequence[str], inputs: Sequence[Tensor], refused: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """Kernel and output reader of each method that runs; `refused` takes the others' reasons."""
    from intflash.bench.gpu.kernels import kernel_call

    found = {}
    for name in names:
        try:
            call, read = kernel_call(name, *inputs)
            call()
            torch.cuda.synchronize()
            found[name] = call, read
        except Exception as error:  # whatever stops a contender is a result
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found


def _backend(name: str, inputs: tuple[Tensor, ...]) -> str:
    from intflash.bench.gpu.kernels import backend_of

    return backend_of(name, *inputs)


# --- kernels alone


def _lengths(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu.timing import time_calls

    for d, n in ((128, 4096), (64, 4096)) if setting.quick else _SIZES:
        setting.log(f"head_dim {d}, N {n}")
        w = Workload("", "", 32 if d == 64 else 16, n, d, batch=4)
        inputs, refused = _inputs(w.shape, setting.seed), {}
        both = tuple(f"int_flash_half, {kind} maximum" for kind in ("float", "integer"))
        calls = _calls((*SDPA, *both, *MIXED[1:], *OURS[:1]), inputs, refused)
        seconds = dict(zip(calls, time_calls([c for c, _ in calls.values()], rounds=7), strict=True))
        reference = exact_attention(*(x[:1, :1] for x in inputs)) if n <= 4096 else None
        case = f"D{d} {n // 1024}k"
        for name, time in seconds.items():
            place = dict(series=name, case=case, x=n, backend=_backend(name, inputs))
            paper = PUBLISHED.get(name.partition(",")[0], {}).get((d, n))
            yield Row(metric=TOPS, value=w.operations / time / 1e12, paper=paper, **place)
            if SDPA[0] in seconds:
                yield Row(metric=CUDNN, value=seconds[SDPA[0]] / time, **place)
            if reference is not None:
                yield Row(metric="SQNR dB", value=sqnr(reference, calls[name][1]()[:1, :1]), **place)
        for name, reason in refused.items():
            yield Row(name, case, TOPS, None, note=reason)


def _conclude_lengths(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.metric == TOPS and row.paper is not None and row.value is not None:
            lines.append(f"{row.series}, {row.case}: {row.value / row.paper:.2f} times the published kernel.")
    return lines


LENGTHS = Experiment(
    name="mixed_kernels",
    title="Kernels alone over sequence length: the mixed families beside cuDNN and intflash_online",
    source="INT-FlashAttention, Figure 2; QFlash, section 5.1",
    measure=_lengths,
    figures=(Figure(TOPS), Figure(CUDNN)),
    conclude=_conclude_lengths,
    notes="B = 4, H = 32 (D = 64) or 16 (D = 128), inputs uniform in [-4, 4], prequantized; CUDA-graph replays, "
    "contenders taking turns, medians. In brackets: the published program of the method, measured on an H200."
    + _WHOLE_CALLS,
    devices=("cuda",),
)

ALL = (*SDPA, "ivit", "ibert", "fqvit", "qflash", "iflash", *MIXED, *OURS)


def _workload_rows(batch: int, names: Sequence[str]) -> Callable[[Setting], Iterator[Row]]:
    def measure(setting: Setting) -> Iterator[Row]:
        from intflash.bench.gpu.timing import time_calls

        for w in list(QFLASH.values())[1:2] if setting.quick else QFLASH.values():
            setting.log(w.name)
            w, refused = w.batched(batch), {}
            inputs = _inputs(w.shape, setting.seed)
            calls = _calls(names, inputs, refused)
            seconds = dict(zip(calls, time_calls([c for c, _ in calls.values()], rounds=7, sample_s=1e-3), strict=True))
            reference = exact_attention(*(x[:8] for x in inputs))
            for name, time in seconds.items():
                place = dict(series=name, case=w.name, backend=_backend(name, inputs))
                yield Row(metric="us", value=1e6 * time, **place)
                if "ivit" in seconds:
                    yield Row(metric="speedup over ivit", value=seconds["ivit"] / time, **place)
                yield Row(metric="SQNR dB", value=sqnr(reference, calls[name][1]()[:8]), **place)
            for name, reason in refused.items():
                yield Row(name, w.name, "us", None, note=reason)

    return measure


def _workload_experiment(batch: int, names: Sequence[str], text: str) -> Experiment:
    return Experiment(
        name=f"kernels_batch{batch}",
        title=f"Kernels alone on A1-A7, batch {batch}",
        source="QFlash, Figure 3" if batch <= 8 else "QFlash, Figure 4's batch",
        measure=_workload_rows(batch, names),
        figures=(Figure("us"), Figure("speedup over ivit")),
        notes=text + "Prequantized inputs, int8 out where the method is integer-only, float16 otherwise; ivit, ibert "
        "and fqvit are three or four launches, scores and P in memory. CUDA-graph replays, medians."
        + _WHOLE_CALLS,
        devices=("cuda",),
    )


WORKLOADS = (
    _workload_experiment(1, ALL, "The paper: up to 4.54 (ViT) and 7.69 (Swin) times over I-ViT on an RTX 5090. "),
    _workload_experiment(8, ALL, "The paper: up to 6.73 (ViT) and 8.69 (Swin) times over I-ViT on an RTX 5090. "),
)

# --- QFlash Table 3: energy


_ENERGY = {"flash fp16": 929.6, "int_flash_full": 840.0, "int_flash_half": 920.5, "qattn": 795.2, "qflash": 754.6}


def _energy(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu.timing import joules

    names = (*SDPA, "int_flash_full", "int_flash_half", "qattn", "qflash", "intflash_p8", "intflash")
    for batch in (8,) if setting.quick else (8, 1024):
        setting.log(f"A2, batch {batch}")
        refused: dict[str, str] = {}
        case = f"A2 b{batch}"
        inputs = _inputs(QFLASH["A2"].batched(batch).shape, setting.seed)
        for name, (call, _) in _calls(names, inputs, refused).items():
            energy, seconds = joules(call, 1.0)
            place = dict(series=name, case=case, backend=_backend(name, inputs))
            yield Row(
                metric="uJ per call", value=1e6 * energy, paper=_ENERGY.get(name) if batch == 8 else None, **place
            )
            yield Row(metric="W", value=energy / seconds, **place)
        for name, reason in refused.items():
            yield Row(name, case, "uJ per call", None, note=reason)


ENERGY = Experiment(
    name="qflash_table3",
    title="Energy of one attention call, A2",
    source="QFlash, Table 3 (RTX 5090, nvidia-smi)",
    measure=_energy,
    figures=(Figure("uJ per call"),),
    notes="NVML's energy counter over one second of graph replays: the whole board, idle power included."
    + _WHOLE_CALLS,
    devices=("cuda",),
)

# --- QFlash Table 2: tensor-core utilization

_UTILIZATION = {
    ("flash fp16", "A2"): 13.08, ("flash fp16", "A7"): 4.69,
    ("int_flash_full", "A2"): 7.18, ("int_flash_full", "A7"): 2.13, ("qflash", "A2"): 8.00, ("qflash", "A7"): 2.55,
}  # fmt: skip
# Names of the counter in Nsight Compute's generations, tried in this order.
_NCU_METRICS = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
)
TENSOR_ACTIVE = "tensor pipe active, % of peak"


def _utilization(setting: Setting) -> Iterator[Row]:
    names = (
        "flash fp16",
        "cuDNN fp16",
        "int_flash_full",
        "int_flash_half",
        "qattn",
        "qflash",
        "intflash_p8",
        "intflash",
    )
    for workload in ("A2",) if setting.quick else ("A2", "A7"):
        for name in names:
            setting.log(f"{workload} {name}")
            value, note = _profile(name, workload)
            paper = _UTILIZATION.get((name, workload))
            yield Row(name, workload, TENSOR_ACTIVE, value, paper=paper, note=note)
            if note == NO_NCU:
                return


NO_NCU = "ncu is not installed"


def _profile(name: str, workload: str) -> tuple[float | None, str | None]:
    """The largest share of tensor-pipe cycles among the kernels of one call, in a process of its own; or why not."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return None, NO_NCU
    program = (
        "import torch\nfrom intflash.bench.gpu.kernels import kernel_call\n"
        "from intflash.bench.gpu_experiments import _inputs, QFLASH\n"
        f"call, _ = kernel_call({name!r}, *_inputs(QFLASH[{workload!r}].batched(8).shape, 0))\n"
        "for _ in range(3): call()\ntorch.cuda.synchronize()\ntorch.cuda.cudart().cudaProfilerStart()\ncall()\n"
        "torch.cuda.synchronize()\ntorch.cuda.cudart().cudaProfilerStop()\n"
    )
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--metrics"]
    said = ""
    for metric in _NCU_METRICS:
        command = [ncu, *options, metric, sys.executable, "-c", program]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return None, "ncu took more than 60 s"
        lines = done.stdout.splitlines()
        header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
        rows = csv.DictReader(lines[header:])
        values = [float(r["Metric Value"].replace(",", "")) for r in rows if r.get("Metric Name") == metric]
        if values:
            return max(values), None
        said = next((x for x in reversed((done.stdout + done.stderr).splitlines()) if x.strip()), "")
    return None, f"ncu gave no counter: {said[:160]}"


UTILIZATION = Experiment(
    name="qflash_table2",
    title="Tensor-core utilization, batch 8",
    source="QFlash, Table 2 (RTX 5090)",
    measure=_utilization,
    figures=(Figure(TENSOR_ACTIVE),),
    notes="Nsight Compute, where it is installed. The paper gives IMMA and HMMA apart, here all tensor work "
    "together: the paper's numbers stand where a method uses one of the two only.",
    devices=("cuda",),
)

# --- QFlash Figure 4

_FIGURE4 = {"V0": 1.0, "V1": 1.414, "V2": 1.460, "V3": 1.610, "V4": 1.624}


def _figure4(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu.figure4 import VARIANTS, variant
    from intflash.bench.gpu.timing import time_calls

    w = QFLASH["A2"].batched(64 if setting.quick else 1024)
    inputs = _inputs(w.shape, setting.seed)
    calls = {name: variant(name, *inputs) for name in VARIANTS}
    seconds = time_calls([call for call, _ in calls.values()], rounds=9)
    reference = exact_attention(*(x[:8] for x in inputs))
    for (name, (_, out)), time in zip(calls.items(), seconds, strict=True):
        place = dict(series=name, case=f"A2 b{w.batch}", backend="triton")
        yield Row(metric="us", value=1e6 * time, **place)
        yield Row(metric="speedup over V0", value=seconds[0] / time, paper=_FIGURE4[name[:2]], **place)
        yield Row(metric="SQNR dB", value=sqnr(reference, out[:8]), **place)


FIGURE4 = Experiment(
    name="qflash_figure4",
    title="From float16 to integers, one operation at a time",
    source="QFlash, Figure 4 (RTX 5090)",
    measure=_figure4,
    figures=(Figure("speedup over V0"),),
    notes="Kernels of one tile loop: V3 is intflash_online with float32 accumulators, V4 intflash_online. float16 out, "
    "per-tensor scales, prequantized.",
    devices=("cuda",),
)

# --- microbenchmarks


def _figure6(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu import conversion
    from intflash.bench.gpu.timing import time_calls

    calls = conversion.calls(conversion.DIVISIONS, conversion.division_launch)
    count = conversion.elements(conversion.division_launch("none"))
    seconds = dict(zip(calls, time_calls(list(calls.values())), strict=True))
    for name in conversion.DIVISIONS[1:]:
        place = dict(series=name, case="in registers", backend="triton")
        yield Row(metric="G operations/s", value=count / seconds[name] / 1e9, **place)
        yield Row(
            metric="G operations/s, loop subtracted", value=count / (seconds[name] - seconds["none"]) / 1e9, **place
        )


FIGURE6 = Experiment(
    name="qflash_figure6",
    title="Division by the call's constant, three ways",
    source="QFlash, Figure 6, which prints no numbers",
    measure=_figure6,
    figures=(Figure("G operations/s"),),
    notes="int32 by a kernel argument: instruction division (whose reciprocal the compiler takes out of the loop), "
    "(x * round(2^16 / rs)) >> 16, and IEEE float32 division. One exclusive or and one addition a round besides.",
    devices=("cuda",),
)


def _conversion(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu import conversion
    from intflash.bench.gpu.timing import time_calls

    calls = conversion.calls(conversion.FLOWS, conversion.conversion_launch)
    count = conversion.elements(conversion.conversion_launch("none"))
    seconds = dict(zip(calls, time_calls(list(calls.values())), strict=True))
    for name in conversion.FLOWS[1:]:
        place = dict(series=name, case="conversion and maximum alone", backend="triton")
        yield Row(metric="G scores/s", value=count / seconds[name] / 1e9, **place)
        own = {flow: seconds[flow] - seconds["none"] for flow in conversion.FLOWS[1:]}
        yield Row(metric="speedup over convert", value=seconds["convert"] / seconds[name], **place)
        paper = 2.0 if name == "dual" else None
        yield Row(
            metric="speedup over convert, loop subtracted", value=own["convert"] / own[name], paper=paper, **place
        )
    from intflash.bench.gpu.kernels import kernel_call

    for d, n in ((128, 4096),) if setting.quick else ((64, 4096), (128, 4096), (128, 16384)):
        inputs = _inputs((4, 32 if d == 64 else 16, n, d), setting.seed)
        flows = [kernel_call("lite", *inputs, flow=flow)[0] for flow in conversion.FLOWS[1:]]
        times = time_calls(flows, rounds=9)
        for name, time in zip(conversion.FLOWS[1:], times, strict=True):
            place = dict(series=name, case=f"lite kernel D{d} {n // 1024}k", backend="triton")
            paper = 1.035 if name == "dual" else None
            yield Row(metric="speedup over convert", value=times[0] / time, paper=paper, **place)
            yield Row(metric=TOPS, value=4 * inputs[0].numel() * n / time / 1e12, **place)


CONVERSION = Experiment(
    name="lite_conversion",
    title="int32 to float32 in the softmax: I2F, magic addition, dual flow, integer maximum",
    source="LiteAttention v0.4, Dual-Flow Interleaving",
    measure=_conversion,
    figures=(Figure("speedup over convert"), Figure("G scores/s")),
    notes="The article: conversion plus reduction more than 2 times faster, 3 to 4 % of the run time. Alone: a score "
    "tile in registers, converted, its row maxima taken; besides one xor and one FMA a score, also subtracted.",
    devices=("cuda",),
)

_OPCODES = {
    "I2F": ("I2F", "I2FP"), "FMNMX": ("FMNMX", "FMNMX3"), "VIADD, IADD3": ("VIADD", "IADD3"),
    "VIMNMX": ("VIMNMX",), "VIMNMX3": ("VIMNMX3",), "MOV, IMAD.MOV": (), "MUFU": ("MUFU",), "FFMA": ("FFMA",),
    "FADD": ("FADD",), "F2FP": ("F2FP",), "SHFL": ("SHFL",),
}  # fmt: skip


def tile_loop(machine: Any) -> Sequence[Any]:
    """The smallest loop with a tensor product, or the longest loop: the one over complete tiles of keys."""
    loops = list(machine.loops())
    products = [body for body in loops if any("MMA" in i.opcode for i in body)]
    return min(products, key=len) if products else max(loops, key=len)


def _sass(setting: Setting) -> Iterator[Row]:
    from intflash.backends.triton import mixed, mixed_steps
    from intflash.backends.triton.streaming import Statistics, Tile
    from intflash.bench.gpu import conversion
    from intflash.bench.sass import compile_launch
    from intflash.methods import get_method
    from intflash.problem import Problem

    for flow in conversion.FLOWS[1:]:
        launches = {"alone": (conversion.conversion_launch(flow), 64)}
        for d in (64,) if setting.quick else (64, 128):
            x = torch.zeros(1, 1, 1024, d)
            problem = Problem("lite", x, x, x, d**-0.5, recipe=get_method("lite").recipe, out_dtype=torch.bfloat16)
            problem, out = problem.quantized(), x.bfloat16()
            none, tile = Statistics(None, None), Tile(64, 128, 4, 2)
            parts = mixed.operands(problem)
            launches[f"kernel D{d}"] = mixed.mixed_launch(problem, parts, out, none, tile, mixed_steps.LITE[flow]), 64
        for case, (launch, scores) in launches.items():
            setting.log(f"{flow} {case}")
            body = tile_loop(compile_launch(launch, 90))
            for label, count in _count(body).items():
                yield Row(flow, f"{case}: {label}", "sm_90 instructions per score", count / scores, backend="triton")
            yield Row(flow, f"{case}: all", "sm_90 instructions per score", len(body) / scores, backend="triton")


def _count(body: Sequence[Any]) -> dict[str, int]:
    opcodes = Counter(i.opcode for i in body)
    found = {label: sum(opcodes[name] for name in names) for label, names in _OPCODES.items()}
    found["MOV, IMAD.MOV"] = opcodes["MOV"] + sum(i.text.startswith("IMAD.MOV") for i in body)
    return found


SASS = Experiment(
    name="lite_sass",
    title="The flows of the conversion in machine code",
    source="LiteAttention v0.4, note 4 (the SASS reflects the two flows)",
    measure=_sass,
    notes="Compiled for sm_90, counted in the loop over complete tiles; no GPU is needed.",
)

EXPERIMENTS: tuple[Experiment, ...] = (
    LENGTHS, *WORKLOADS, FIGURE4, CONVERSION, SASS, FIGURE6, ENERGY, UTILIZATION,
)  # fmt: skip
