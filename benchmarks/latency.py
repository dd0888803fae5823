"""The latency experiments of the papers, on the best backend of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import intflash
from intflash import QTensor, Recipe
from intflash.bench.accuracy import FINE
from intflash.bench.experiments import Experiment, Figure, Row, Setting, best_of_groups, describe
from intflash.bench.workloads import IFLASH, QFLASH, QFLASH_SPEEDUPS, InputCase, normal, random_case, workload_case
from intflash.methods import get_method

FLOAT_CALL = "us, quantization included"
CODE_CALL = "us, int8 in and out"
KERNEL = "us, attention launch alone"
_COMPARED = {FLOAT_CALL: "", KERNEL: ", launches alone"}


@dataclass(frozen=True)
class LatencyContender:
    """One line of a latency table: a method, or torch's own attention in `dtype` where `method` is None."""

    label: str
    method: str | None = None
    recipe: Recipe | None = None
    dtype: torch.dtype = torch.float32

    def calls(self, case: InputCase, setting: Setting, kernels: bool) -> dict[str, tuple[str, Callable[[], Any]]]:
        """Returns metric -> backend and a call without arguments. What the method does not support is left out.

        Args:
            kernels: also the attention launch alone, on a GPU.

        Raises:
            InputError, BackendError: the method cannot serve the case at all.
        """
        inputs = [x.to(setting.device, self.dtype) for x in case.inputs(setting.seed)]
        kernels = kernels and setting.device == "cuda"
        if self.method is None:
            found = "torch SDPA", partial(F.scaled_dot_product_attention, *inputs)
            return dict.fromkeys((FLOAT_CALL, KERNEL) if kernels else (FLOAT_CALL,), found)
        options = dict(method=self.method, backend=setting.backend)
        # refuses inputs that would be timed unchecked
        intflash.attention(*inputs, recipe=self.recipe, check_finite=True, **options)
        run, where = partial(intflash.attention, check_finite=False, **options), intflash.which_backend
        floats = where(*inputs, recipe=self.recipe, **options)
        calls = {FLOAT_CALL: (floats, partial(run, *inputs, recipe=self.recipe))}
        codes = self._codes(*inputs)
        if codes is not None:
            options = options | dict(out_scale="bound")
            calls[CODE_CALL] = where(*codes, **options), partial(run, *codes, out_scale="bound")
        if kernels:
            from intflash.bench.gpu_launches import make_kernel

            kernel = make_kernel(self.method, *inputs, backend=setting.backend, recipe=self.recipe)
            calls[KERNEL] = kernel.backend, kernel.launch
        return calls

    def _codes(self, *inputs: Tensor) -> list[QTensor] | None:
        """Returns q, k, v quantized as the method's recipe says; None if it keeps one in floating point."""
        method = intflash.info()["methods"][self.method]
        if not method["integer_only"] or "int8" not in method["out_dtypes"]:
            return None
        recipe = self.recipe or get_method(self.method).recipe
        return [recipe.quantize(name, x) for name, x in zip("qkv", inputs, strict=True)]


@dataclass(frozen=True)
class Latency:
    """Times every contender on every case. Their calls take turns.

    Attributes:
        contenders, cases: what to time.
        baselines: labels whose times the speedup rows divide.
        quick: the number of cases that `--quick` keeps.
        paper: (contender label, case name, baseline) -> the paper's speedup.
        kernels: on a GPU also the attention launches alone.
        best: (cases, contender label) -> the paper's best speedup over the first baseline (`best_of_groups`).
    """

    contenders: Sequence[LatencyContender]
    cases: Sequence[InputCase]
    baselines: Sequence[str]
    quick: int = 2
    paper: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    kernels: bool = False
    best: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __call__(self, setting: Setting) -> Iterator[Row]:
        rows = []
        for row in self._measured(setting):
            rows.append(row)
            yield row
        yield from best_of_groups(rows, speedup(self.baselines[0]), self.best)

    def _measured(self, setting: Setting) -> Iterator[Row]:
        for case in self.cases[: self.quick] if setting.quick else self.cases:
            setting.log(case.name)
            calls, backends, refused = {}, {}, {}
            for contender in self.contenders:
                try:
                    mine = contender.calls(case, setting, self.kernels)
                    for _, call in mine.values():
                        call()
                except Exception as error:  # a failure of a contender is a result too
                    refused[contender.label] = describe(error)
                    continue
                for metric, (backend, call) in mine.items():
                    backends[contender.label, metric], calls[contender.label, metric] = backend, call
            seconds = setting.times(calls)
            for (label, metric), time in seconds.items():
                place = dict(series=label, case=case.name, x=case.value, backend=backends[label, metric])
                yield Row(metric=metric, value=1e6 * time, **place)
                for name in self.baselines if metric in _COMPARED else ():
                    base = seconds.get((name, metric))
                    if base is not None:
                        paper = self.paper.get((label, case.name, name))
                        yield Row(metric=speedup(name, metric), value=base / time, paper=paper, **place)
            for label, reason in refused.items():
                yield Row(label, case.name, FLOAT_CALL, None, x=case.value, note=reason)


def speedup(baseline: str, metric: str = FLOAT_CALL) -> str:
    return f"speedup over {baseline}{_COMPARED[metric]}"


def _methods(*names: str) -> tuple[LatencyContender, ...]:
    return tuple(LatencyContender(name, name) for name in names)


SDPA = LatencyContender("torch SDPA float32")
SDPA_HALF = LatencyContender("torch SDPA float16", dtype=torch.float16)
PUBLISHED = _methods("ivit", "qattn", "int_flash_half", "int_flash_full", "qflash", "ibert", "fqvit")
OURS = _methods("intflash", "intflash_p8", "intflash_online")


def _figure3(batch: int) -> Experiment:
    return Experiment(
        name=f"qflash_figure3_batch{batch}",
        title=f"Latency of the methods on A1-A7, batch {batch}",
        source="QFlash, Figure 3",
        measure=Latency(
            contenders=(SDPA, SDPA_HALF, *PUBLISHED, *OURS),
            cases=[workload_case(w.batched(batch)) for w in QFLASH.values()],
            baselines=("ivit",),
            best=QFLASH_SPEEDUPS[batch],
        ),
        figures=(Figure(FLOAT_CALL), Figure(speedup("ivit"))),
        notes="Calls of the API, each on the backend that it takes by itself. The paper's text gives QFlash's best "
        "speedup over I-ViT on an RTX 5090. I-ViT, I-BERT and FQ-ViT run unfused, as those works do.",
    )


FIGURE3 = (_figure3(1), _figure3(8))

_IFLASH_SPEEDUPS = {"ivit": 7.10, "fp16": 1.08}

IFLASH_FIGURE2 = Experiment(
    name="iflash_figure2",
    title="I-FlashAttention beside the others, DeiT-Tiny and ViT-L/16",
    source="I-FlashAttention, Figure 2",
    measure=Latency(
        contenders=(SDPA, *_methods("ivit", "fp16", "iflash", "qattn", "int_flash_full"), *OURS),
        cases=[workload_case(w) for w in IFLASH.values()],
        baselines=tuple(_IFLASH_SPEEDUPS),
        paper={("iflash", name, base): x for name in IFLASH for base, x in _IFLASH_SPEEDUPS.items()},
        kernels=True,
    ),
    figures=tuple(Figure(speedup(base, metric)) for metric in _COMPARED for base in _IFLASH_SPEEDUPS),
    notes="The paper prints one speedup over I-ViT and one over FP16 FlashAttention, on an RTX 2080Ti, without saying "
    "for which size; the latter is our tile loop in float16.",
)

_LENGTHS = (1024, 2048, 4096, 8192, 16384)
# An inference time smaller by 31, 52, 66, 72 and 73 % is a speedup of 1 / (1 - that).
_FIGURE2 = dict(zip(_LENGTHS, (1 / 0.69, 1 / 0.48, 1 / 0.34, 1 / 0.28, 1 / 0.27), strict=True))


def _length_case(n: int) -> InputCase:
    return random_case(f"{n // 1024}k", n, normal(), heads=1, rows=None)


def _int_flash_figure2(name: str, lengths: Sequence[int], device: str, *baselines: LatencyContender) -> Experiment:
    labels = [base.label for base in baselines]
    return Experiment(
        name=name,
        title=f"Inference time over sequence length, {device}",
        source="INT-FlashAttention, Figure 2",
        measure=Latency(
            contenders=(*baselines, *_methods("fp8", "int_flash_full", "int_flash_half"), *OURS),
            cases=[_length_case(n) for n in lengths],
            baselines=labels,
            paper={("int_flash_full", f"{n // 1024}k", base): _FIGURE2[n] for n in lengths for base in labels},
            kernels=True,
        ),
        figures=(
            Figure(FLOAT_CALL, "lines", "keys N"),
            *(Figure(speedup(base, metric), "lines", "keys N") for metric in _COMPARED for base in labels),
        ),
        notes="The paper: FlashAttention FP16 in Triton on an RTX 4090; here torch's own, and on a GPU our Triton tile "
        "loop in float16 ('fp16'). One head, head_dim 64.",
        devices=(device,),
    )


INT_FLASH_FIGURE2 = (
    _int_flash_figure2("int_flash_figure2_cpu", _LENGTHS[:3], "cpu", SDPA),
    _int_flash_figure2("int_flash_figure2", _LENGTHS, "cuda", SDPA_HALF, LatencyContender("fp16", "fp16")),
)

GRANULARITY_LATENCY = Experiment(
    name="granularity_latency",
    title="Latency of intflash by granularity of the scales",
    source="QFlash, Figures 7 and 8, which are drawings",
    measure=Latency(
        contenders=(
            LatencyContender("per tensor", "intflash", Recipe("tensor", "tensor", "tensor")),
            LatencyContender("per head", "intflash", Recipe(q="head", k="head", v="head")),
            LatencyContender("token, head, head", "intflash", Recipe(q="token", k="head", v="head")),
            LatencyContender("token, block, channel", "intflash", Recipe(q="token", k="block", v="channel")),
            LatencyContender("fine", "intflash", FINE),
        ),
        cases=[workload_case(QFLASH[name].batched(8)) for name in ("A2", "A7")],
        baselines=("per tensor",),
        kernels=True,
    ),
    figures=(Figure(FLOAT_CALL),),
    notes="'fine': token Q, head K with smoothing, channel V. Granularities of Q, K, V in this order.",
)


def _division_rows(setting: Setting) -> Iterator[Row]:
    """QFlash Figure 6: floor division by a constant in three ways, on arrays that fit the cache."""
    n = 1 << 15
    x = torch.randint(-(1 << 15), 0, (n,), dtype=torch.int32)
    xf = x.float()
    rs, out, outf = 771, torch.empty_like(x), torch.empty_like(xf)
    multiplier = round(65536 / rs)

    def multiply_shift() -> None:
        torch.mul(x, multiplier, out=out)
        out.bitwise_right_shift_(16)

    calls = {
        "integer division": lambda: torch.div(x, rs, rounding_mode="floor", out=out),
        "multiply and shift": multiply_shift,
        "float division": lambda: torch.div(xf, float(rs), out=outf),
    }
    for name, seconds in setting.times(calls).items():
        yield Row(name, f"{n} int32", "G operations/s", n / seconds / 1e9, backend="torch")


FIGURE6 = Experiment(
    name="qflash_figure6_cpu",
    title="Division by a constant, three ways",
    source="QFlash, Figure 6, which prints no numbers",
    measure=_division_rows,
    figures=(Figure("G operations/s"),),
    notes="torch's element-wise operations on an array in the cache; multiply and shift are two of them.",
    devices=("cpu",),
)


def _peak_rows(setting: Setting) -> Iterator[Row]:
    """QFlash section 2.3: the matrix unit's int8 rate and its float rates."""
    n = 1024 if setting.device == "cpu" else 8192
    half = torch.float32 if setting.device == "cpu" else torch.float16
    a8, b8 = (torch.randint(-127, 128, (n, n), dtype=torch.int8, device=setting.device) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {"int8 (torch._int_mm)": partial(torch._int_mm, a8, b8.T)}
    for dtype in dict.fromkeys((half, torch.bfloat16)):
        a, b = (torch.randn(n, n, device=setting.device, dtype=dtype) for _ in range(2))
        calls[str(dtype).removeprefix("torch.")] = partial(torch.mm, a, b.T)
    paper = {"int8 (torch._int_mm)": 2.0} if setting.device == "cuda" else {}
    seconds = setting.times(calls)
    base = seconds[str(half).removeprefix("torch.")]
    for name, time in seconds.items():
        place = dict(series=name, case=f"{n} x {n}", backend="torch")
        yield Row(metric="T operations/s", value=2 * n**3 / time / 1e12, **place)
        yield Row(metric="ratio to the first float", value=base / time, paper=paper.get(name), **place)


PEAK = Experiment(
    name="matrix_peak",
    title="int8 beside float matrix products",
    source="QFlash, section 2.3 (RTX 5090: int8 is 2 times float16)",
    measure=_peak_rows,
    figures=(Figure("T operations/s"),),
)


EXPERIMENTS: tuple[Experiment, ...] = (
    *FIGURE3, IFLASH_FIGURE2, *INT_FLASH_FIGURE2, GRANULARITY_LATENCY, FIGURE6, PEAK,
)  # fmt: skip
