"""Kernels alone on a GPU: over sequence length, on A1-A7, and QFlash's Figure 4 from float16 to integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from intflash.bench.experiments import Experiment, Figure, Row, Setting, best_of_groups
from intflash.bench.measure import exact_attention, sqnr
from intflash.bench.workloads import QFLASH, QFLASH_SPEEDUPS, Workload

MIXED = ("int_flash_half", "int_flash_full", "lite", "qattn", "fp16", "bf16", "fp8")
OURS = ("intflash_online", "intflash_p8", "intflash")
SDPA = ("cuDNN fp16", "flash fp16")
CUDNN = "ratio to cuDNN fp16"
TOPS = "T operations/s"
LAUNCH, WHOLE = "us", "us, whole call"
SPEEDUP = "speedup over ivit"
HOW = (
    "Inputs uniform in [-4, 4], prequantized. Every contender is its attention launch alone, output and constants made "
    "before (torch's attention: its call), of the backend that the API takes; CUDA-graph replays, contenders taking "
    "turns, medians. "
)

# The papers' own programs on an H200 (torch 2.11, triton 3.6): T operations/s by (head_dim, N).
_SIZES = tuple((d, n) for d in (64, 128) for n in (1024, 4096, 16384))
PUBLISHED = {
    "int_flash_full": dict(zip(_SIZES, (171, 211, 225, 168, 197, 208), strict=True)),
    "int_flash_half": dict(zip(_SIZES, (274, 371, 410, 334, 504, 551), strict=True)),
}


def _lengths(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu_launches import make_kernels, uniform_inputs

    forms = ("int_flash_half, convert", "int_flash_half, biased")
    for d, n in ((128, 4096), (64, 4096)) if setting.quick else _SIZES:
        setting.log(f"head_dim {d}, N {n}")
        w = Workload("", "", 32 if d == 64 else 16, n, d, batch=4)
        inputs = uniform_inputs(w.shape, setting.seed)
        kernels, refused = make_kernels((*SDPA, *MIXED, *forms, *OURS[:1]), inputs)
        seconds = setting.times({name: k.launch for name, k in kernels.items()}, rounds=7)
        reference = exact_attention(*(x[:1, :1] for x in inputs)) if n <= 4096 else None
        case = f"D{d} {n // 1024}k"
        for name, time in seconds.items():
            place = dict(series=name, case=case, x=n, backend=kernels[name].backend)
            paper = PUBLISHED.get(name.partition(",")[0], {}).get((d, n))
            yield Row(metric=TOPS, value=w.operations / time / 1e12, paper=paper, **place)
            if SDPA[0] in seconds:
                yield Row(metric=CUDNN, value=seconds[SDPA[0]] / time, **place)
            if reference is not None:
                yield Row(metric="SQNR dB", value=sqnr(reference, kernels[name].read()[:1, :1]), **place)
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
    title="Kernels alone over sequence length: methods with a float softmax, cuDNN and intflash_online",
    source="INT-FlashAttention, Figure 2; QFlash, section 5.1",
    measure=_lengths,
    figures=(Figure(TOPS), Figure(CUDNN)),
    conclude=_conclude_lengths,
    notes=HOW + "B = 4, H = 32 (D = 64) or 16 (D = 128). In brackets: the published program of the method, measured on "
    "an H200. int_flash_half, convert and biased: with a float and an integer maximum, in the Triton backend's loop.",
    devices=("cuda",),
)

ALL = (*SDPA, "ivit", "ibert", "fqvit", "qflash", "iflash", *MIXED, *OURS)


def _workload_rows(batch: int) -> Callable[[Setting], Iterator[Row]]:
    def measure(setting: Setting) -> Iterator[Row]:
        rows = []
        for w in list(QFLASH.values())[1:2] if setting.quick else QFLASH.values():
            setting.log(w.name)
            for row in _one_workload(w.batched(batch), setting):
                rows.append(row)
                yield row
        yield from best_of_groups(rows, SPEEDUP, QFLASH_SPEEDUPS[batch])

    return measure


def _one_workload(w: Workload, setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu_launches import make_kernels, uniform_inputs

    inputs = uniform_inputs(w.shape, setting.seed)
    kernels, refused = make_kernels(ALL, inputs)
    calls = [call for kernel in kernels.values() for call in (kernel.launch, kernel.whole)]
    times = setting.time(calls, rounds=7, sample_s=1e-3)
    seconds = dict(zip(kernels, zip(times[::2], times[1::2], strict=True), strict=True))
    reference = exact_attention(*(x[:8] for x in inputs))
    for name, (launch, whole) in seconds.items():
        place = dict(series=name, case=w.name, backend=kernels[name].backend)
        yield Row(metric=LAUNCH, value=1e6 * launch, **place)
        if "ivit" in seconds:
            yield Row(metric=SPEEDUP, value=seconds["ivit"][0] / launch, **place)
        yield Row(metric=WHOLE, value=1e6 * whole, **place)
        yield Row(metric="SQNR dB", value=sqnr(reference, kernels[name].read()[:8]), **place)
    for name, reason in refused.items():
        yield Row(name, w.name, LAUNCH, None, note=reason)


def _workload_experiment(batch: int) -> Experiment:
    best = " and ".join(f"{factor} ({cases})" for (cases, _), factor in QFLASH_SPEEDUPS[batch].items())
    return Experiment(
        name=f"kernels_batch{batch}",
        title=f"Kernels alone on A1-A7, batch {batch}",
        source="QFlash, Figure 3",
        measure=_workload_rows(batch),
        figures=(Figure(LAUNCH), Figure(SPEEDUP)),
        notes=f"{HOW}The paper: up to {best} times over I-ViT on an RTX 5090. int8 out where the method is "
        "integer-only, float16 otherwise; ivit, ibert and fqvit are three or four launches, scores and P in memory. "
        f"'{WHOLE}': the backend's call on the same codes, with the launch that makes its constants.",
        devices=("cuda",),
    )


WORKLOADS = (_workload_experiment(1), _workload_experiment(8))

_FIGURE4 = {"V0": 1.0, "V1": 1.414, "V2": 1.460, "V3": 1.610, "V4": 1.624}


def _figure4(setting: Setting) -> Iterator[Row]:
    from benchmarks.figure4_kernels import variants
    from intflash.bench.gpu_launches import uniform_inputs

    w = QFLASH["A2"].batched(64 if setting.quick else 1024)
    inputs = uniform_inputs(w.shape, setting.seed)
    kernels = variants(*inputs)
    seconds = setting.time([kernel.launch for kernel in kernels.values()])
    reference = exact_attention(*(x[:8] for x in inputs))
    for (name, kernel), time in zip(kernels.items(), seconds, strict=True):
        place = dict(series=name, case=f"A2 b{w.batch}", backend=kernel.backend)
        paper = _FIGURE4[name[:2]] if kernel.backend == "triton" else None
        yield Row(metric="us", value=1e6 * time, **place)
        yield Row(metric="speedup over V0", value=seconds[0] / time, paper=paper, **place)
        yield Row(metric="SQNR dB", value=sqnr(reference, kernel.read()[:8]), **place)


FIGURE4 = Experiment(
    name="qflash_figure4",
    title="From float16 to integers, one operation at a time",
    source="QFlash, Figure 4 (RTX 5090)",
    measure=_figure4,
    figures=(Figure("speedup over V0"),),
    notes="V0 to V4 are kernels of one tile loop, the Triton backend's: V3 is intflash_online with float32 "
    "accumulators, V4 intflash_online. A name in brackets: the same step by the backend that the API takes. "
    "float16 out, per-tensor scales, prequantized, launches alone.",
    devices=("cuda",),
)

EXPERIMENTS: tuple[Experiment, ...] = (LENGTHS, *WORKLOADS, FIGURE4)
