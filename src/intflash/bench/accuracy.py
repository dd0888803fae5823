"""Accuracy experiments: error of methods against float64 attention on the unquantized inputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import intflash
from intflash import Recipe
from intflash.bench.experiments import Experiment, Figure, Row, Setting, describe, untimed
from intflash.bench.measure import METRICS, MRE_DEFINITIONS, exact_attention
from intflash.bench.workloads import (
    COLUMNS,
    HARD,
    IFLASH,
    QFLASH,
    SINKS,
    InputCase,
    normal,
    random_case,
    uniform,
    workload_case,
)
from intflash.call import prepare
from intflash.problem import Problem
from intflash.quant import hadamard_rotate, key_mean


@dataclass(frozen=True)
class Series:
    """One line of a table: a method with its options.

    With `method` None it is the ceiling: float64 softmax on the same quantized inputs. A `variant`
    (`benchmarks/variants.py`) computes in place of the method, on the method's quantized problem.
    """

    label: str
    method: str | None
    recipe: Recipe | None = None
    out_dtype: torch.dtype = torch.float32
    variant: Callable[[Problem], Tensor] | None = None

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: str | None) -> tuple[Tensor, str]:
        """Returns the output as floats, and the name of the backend that computed it."""
        if self.method is None:
            return ceiling(q, k, v, scale, self.recipe or Recipe()), "float64"
        options = dict(scale=scale, method=self.method, recipe=self.recipe, out_dtype=self.out_dtype)
        if not self.out_dtype.is_floating_point:
            options["out_scale"] = "bound"
        if self.variant is not None:
            return self.variant(prepare(q, k, v, **options)[0].quantized()), "reference"
        options["backend"] = backend
        out = intflash.attention(q, k, v, **options)
        out = out if isinstance(out, Tensor) else out.dequantize(torch.float64)
        return out, intflash.which_backend(q, k, v, **options)


def ceiling(q: Tensor, k: Tensor, v: Tensor, scale: float | None, recipe: Recipe, bias: Tensor | None = None) -> Tensor:
    """Returns exact attention on inputs quantized by `recipe`, which no method on these codes can exceed in
    accuracy.
    """
    if recipe.rotate:
        q, k = hadamard_rotate(q), hadamard_rotate(k)
    if recipe.smooth_k:
        k = k - key_mean(k)
    codes = (recipe.quantize(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    floats = (x if isinstance(x, Tensor) else x.data.double() * x.token_scale().double() for x in codes)
    return exact_attention(*floats, sm_scale=scale, bias=bias)


@dataclass(frozen=True)
class Accuracy:
    """Measures every series on every case. Yields one row per metric.

    Attributes:
        series, cases, metrics: what to measure.
        quick: the number of cases that `--quick` keeps.
        paper: (series label, case name, metric) -> the paper's number.
    """

    series: Sequence[Series]
    cases: Sequence[InputCase]
    metrics: Sequence[str] = ("SQNR dB", "MSE", "cosine", "MRE of means %")
    quick: int = 2
    paper: Mapping[tuple[str, str, str], float] = field(default_factory=dict)

    def __call__(self, setting: Setting) -> Iterator[Row]:
        for case in self.cases[: self.quick] if setting.quick else self.cases:
            setting.log(f"{case.name}: float64")
            q, k, v = (x.to(setting.device) for x in case.inputs(setting.seed))
            ref = exact_attention(q, k, v, case.sm_scale)
            for series in self.series:
                setting.log(f"{case.name}: {series.label}")
                yield from self._rows(series, case, ref, (q, k, v), setting)

    def _rows(
        self, series: Series, case: InputCase, ref: Tensor, inputs: Sequence[Tensor], setting: Setting
    ) -> Iterator[Row]:
        out = backend = note = None
        try:
            out, backend = series.run(*inputs, case.sm_scale, setting.backend)
        except Exception as error:  # a failure of a series is a result too
            note = describe(error)
        for metric in self.metrics:
            yield Row(
                series=series.label,
                case=case.name,
                metric=metric,
                value=None if out is None else METRICS[metric](ref, out),
                paper=self.paper.get((series.label, case.name, metric)),
                x=case.value,
                backend=backend,
                note=note,
            )


def _paper(
    metric: str, cases: Sequence[str], numbers: Mapping[str, Sequence[float]]
) -> dict[tuple[str, str, str], float]:
    return {(s, case, metric): x for s, row in numbers.items() for case, x in zip(cases, row, strict=True)}


INT8, INT16 = torch.int8, torch.int16
FINE = Recipe(q="token", k="head", v="channel", smooth_k=True)

OURS = (
    Series("intflash", "intflash"),
    Series("intflash_p8", "intflash_p8"),
    Series("intflash_online", "intflash_online"),
    Series("intflash_bfp", "intflash_bfp"),
)
PUBLISHED = tuple(
    Series(name, name)
    for name in ("qflash", "iflash", "int_flash_half", "int_flash_full", "lite", "qattn", "ivit", "ibert", "fqvit")
)
FLOATS = tuple(Series(name, name) for name in ("fp16", "bf16", "fp8", "fp8_head"))
CEILING = Series("ceiling", None)

_TABLE4_MSE = {
    "ivit": (7.05e-3, 9.38e-3),
    "qattn": (1.04e-3, 1.04e-3),
    "int_flash_half": (4.04e-4, 3.86e-4),
    "int_flash_full": (5.41e-4, 5.17e-4),
    "qflash": (1.51e-3, 2.47e-3),
}
_TABLE4_SQNR = {
    "ivit": (25.80, 25.22),
    "qattn": (34.12, 34.75),
    "int_flash_half": (38.19, 39.07),
    "int_flash_full": (36.92, 37.80),
    "qflash": (32.50, 31.02),
}

TABLE4 = untimed(
    name="qflash_table4",
    title="SQNR and MSE on A2 and A7, uniform in [-4, 4]",
    source="QFlash, Table 4",
    measure=Accuracy(
        series=(*OURS, *PUBLISHED, *FLOATS, CEILING),
        cases=[workload_case(QFLASH[name].batched(8)) for name in ("A2", "A7")],
        paper=_paper("SQNR dB", ("A2", "A7"), _TABLE4_SQNR) | _paper("MSE", ("A2", "A7"), _TABLE4_MSE),
    ),
    figures=(Figure("SQNR dB"),),
    notes="Batch 8. Float output, except that qflash and iflash write int8 codes of scale s_V. "
    "The paper does not state its inputs; uniform in [-4, 4] is its benchmark's distribution.",
)

IFLASH_SQNR = untimed(
    name="iflash_sqnr",
    title="SQNR of I-FlashAttention",
    source="I-FlashAttention, section 3",
    measure=Accuracy(
        series=(*(s for s in PUBLISHED if s.label in ("iflash", "qattn", "ivit", "int_flash_full")), OURS[0], CEILING),
        cases=[workload_case(w) for w in IFLASH.values()],
        paper={("iflash", n, metric): x for n in IFLASH for metric, x in (("SQNR dB", 33.30), ("MSE", 1.23e-3))},
    ),
    notes="The paper gives one SQNR and one MSE (whose exponent it prints as 3) and neither its inputs nor which size; "
    "ours: uniform in [-4, 4].",
    figures=(Figure("SQNR dB"),),
)

_LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384}
_TABLE1 = {
    "fp8": (7.46, 7.50, 7.66, 7.51, 7.57),
    "int_flash_half": (0.890, 0.802, 0.843, 0.932, 0.775),
    "int_flash_full": (4.05, 4.18, 4.21, 4.38, 4.52),
}
_TABLE2 = {
    "fp8": (8.94, 9.15, 8.89, 9.02, 8.97),
    "int_flash_half": (0.317, 0.300, 0.280, 0.299, 0.296),
    "int_flash_full": (1.69, 1.62, 1.65, 1.85, 1.82),
}
_PAPER_V = Recipe(q="token", k="token", v="tensor", rule="divide")
MRE_SERIES = (
    Series("fp8", "fp8"),
    Series("int_flash_half", "int_flash_half"),
    Series("int_flash_full", "int_flash_full", _PAPER_V),
    Series("intflash", "intflash"),
    Series("intflash, fine", "intflash", FINE),
    Series("intflash_p8", "intflash_p8"),
)


def which_definition_fits(rows: Sequence[Row]) -> list[str]:
    """Returns how far each definition is from the paper's numbers: the median factor per series and over all."""
    sentences, distance = [], {}
    for metric in MRE_DEFINITIONS:
        factors: dict[str, list[float]] = {}
        for row in rows:
            if row.metric == metric and row.value and row.paper and math.isfinite(row.value):
                factors.setdefault(row.series, []).append(row.value / row.paper)
        if not factors:
            continue
        medians = {name: statistics.median(ratios) for name, ratios in factors.items()}
        everything = [abs(math.log2(r)) for ratios in factors.values() for r in ratios]
        distance[metric] = statistics.mean(everything)
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in medians.items())
        sentences.append(f"{metric}: ours / paper, median over N: {shown}; mean factor {2 ** distance[metric]:.2f}.")
    if distance:
        best = min(distance, key=distance.__getitem__)
        sentences.append(f"Closest definition: {best} (a mean factor of {2 ** distance[best]:.2f} from the paper).")
    return sentences


def _mre_experiment(name: str, title: str, source: str, draw, numbers: Mapping[str, Sequence[float]]) -> Experiment:
    cases = [random_case(label, n, draw) for label, n in _LENGTHS.items()]
    paper: dict[tuple[str, str, str], float] = {}
    for metric in MRE_DEFINITIONS:
        paper |= _paper(metric, tuple(_LENGTHS), numbers)
    return untimed(
        name=name,
        title=title,
        source=source,
        measure=Accuracy(MRE_SERIES, cases, (*MRE_DEFINITIONS, "SQNR dB"), paper=paper),
        figures=tuple(Figure(metric, "lines", "keys N") for metric in MRE_DEFINITIONS),
        conclude=which_definition_fits,
        notes="One batch, 2 heads, head_dim 64; errors over 1,024 of the N queries. The paper does not define its mean "
        "relative error and prints one number: it stands beside each of the four definitions. "
        "'fine': token Q, head K with smoothing, channel V.",
    )


TABLE1 = _mre_experiment(
    "int_flash_table1", "Mean relative error, normal inputs", "INT-FlashAttention, Table 1", normal(), _TABLE1
)
TABLE2 = _mre_experiment(
    "int_flash_table2",
    "Mean relative error, uniform inputs",
    "INT-FlashAttention, Table 2",
    uniform(-0.5, 0.5),
    _TABLE2,
)

_FULL4 = Recipe(q="token", k="token", v="head", bits=4, rule="divide")
_HALF4 = Recipe(q="token", k="token", v="none", bits=4, rule="divide")

INT4 = untimed(
    name="int4",
    title="Four-bit codes",
    source="INT-FlashAttention, section 3, which gives no numbers",
    measure=Accuracy(
        series=(
            Series("int_flash_full, 8 bits", "int_flash_full"),
            Series("int_flash_full, 4 bits", "int_flash_full", _FULL4),
            Series("int_flash_half, 4 bits", "int_flash_half", _HALF4),
            Series("intflash, 8 bits", "intflash"),
            Series("intflash, 4 bits", "intflash", Recipe(bits=4)),
            Series("intflash, 4 bits fine", "intflash", replace(FINE, bits=4)),
            Series("intflash, 4 bits fine rotated", "intflash", replace(FINE, bits=4, rotate=True)),
        ),
        cases=[c for c in COLUMNS if c.name in ("A2", "A7", "randn 1k", "outlier K", "D128 corr")],
        metrics=("SQNR dB", "MSE"),
    ),
    figures=(Figure("SQNR dB"),),
    notes="4-bit codes lie in [-7, 7] and are held in int8.",
)

GRANULARITY = untimed(
    name="granularity",
    title="Granularity of the scales",
    source="QFlash, Figures 7 and 8, which are drawings",
    measure=Accuracy(
        series=(
            Series("per tensor", "intflash", Recipe("tensor", "tensor", "tensor")),
            Series("per head", "intflash", Recipe(q="head", k="head", v="head")),
            Series("token, head, head", "intflash", Recipe(q="token", k="head", v="head")),
            Series("token, block, channel", "intflash", Recipe(q="token", k="block", v="channel")),
            Series("fine", "intflash", FINE),
            Series("fine, rotated", "intflash", replace(FINE, rotate=True)),
        ),
        cases=[c for c in COLUMNS if c.name in ("A2", "A7", "randn 1k", "outlier K", "D128 corr", "x.02")],
        metrics=("SQNR dB", "MSE"),
    ),
    notes="intflash, float output; granularities of Q, K, V in this order. 'fine': token Q, head K with smoothing, "
    "channel V.",
    figures=(Figure("SQNR dB"),),
)  # fmt: skip

SPEC_TABLE = untimed(
    name="columns",
    title="intflash on every column of docs/numerics.md",
    source="docs/numerics.md, section 2",
    measure=Accuracy(
        series=(
            Series("intflash_p8, int16", "intflash_p8", out_dtype=INT16),
            Series("intflash_online, float", "intflash_online"),
            Series("intflash, int8", "intflash", out_dtype=INT8),
            Series("intflash, int16", "intflash", out_dtype=INT16),
            Series("intflash, float", "intflash"),
            Series("intflash fine, int16", "intflash", FINE, INT16),
            Series("qflash", "qflash"),
            CEILING,
        ),
        cases=COLUMNS,
        metrics=("SQNR dB",),
        quick=3,
    ),
    figures=(Figure("SQNR dB"),),
    conclude=lambda rows: below_ceiling(rows, ("intflash, int16", "intflash, float")),
    notes="int8 output here has s_O = s_V; fine: token Q, head K with smoothing, channel V.",
)

HARD_INPUTS = untimed(
    name="hard_inputs",
    title="Where the published integer method breaks",
    source="docs/numerics.md, section 3",
    measure=Accuracy(
        series=(
            Series("qflash", "qflash"),
            Series("iflash", "iflash"),
            Series("intflash_p8, int16", "intflash_p8", out_dtype=INT16),
            Series("intflash, int16", "intflash", out_dtype=INT16),
            Series("intflash, float", "intflash"),
            CEILING,
        ),
        cases=HARD,
        metrics=("SQNR dB",),
        quick=2,
    ),
    figures=(Figure("SQNR dB"),),
    conclude=lambda rows: below_ceiling(rows, ("intflash, int16", "intflash, float")),
)


ATTENTION_SINKS = untimed(
    name="sinks",
    title="Attention sinks: SQNR over the sink's share of the weight",
    source="docs/numerics.md, section 2",
    measure=Accuracy(
        series=(  # drawn over each other in this order
            CEILING,
            *(s for s in (*FLOATS, *PUBLISHED) if s.label not in ("bf16", "fp8_head", "iflash", "ivit", "ibert")),
            *OURS,
        ),
        cases=SINKS,
        metrics=("SQNR dB",),
        quick=3,
    ),
    figures=(Figure("SQNR dB", "lines", "share of the sink, %"),),
    conclude=lambda rows: below_ceiling(rows, ("intflash_bfp", "intflash", "intflash_p8")),
    notes="N = 1024, head_dim 64, 256 queries, 2 heads; float output. One key has the share of the mean row and the "
    "value 0; the other scores have a standard deviation of 0.87.",
)


def below_ceiling(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    """Returns by how much the named series stay below the ceiling in the worst case."""
    top = {row.case: row.value for row in rows if row.series == CEILING.label}
    sentences = []
    for label in labels:
        gaps = {row.case: top[row.case] - row.value for row in rows if row.series == label and row.value is not None}
        worst = max(gaps, key=gaps.__getitem__)
        sentences.append(f"{label}: at most {gaps[worst]:.2f} dB below the ceiling ({worst}).")
    return sentences


EXPERIMENTS: tuple[Experiment, ...] = (
    TABLE4, IFLASH_SQNR, TABLE1, TABLE2, INT4, GRANULARITY, SPEC_TABLE, HARD_INPUTS, ATTENTION_SINKS,
)  # fmt: skip
