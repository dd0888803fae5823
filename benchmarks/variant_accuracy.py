"""Accuracy of the algorithmic variants that the papers study: QFlash's Figure 5, and formulas as printed beside the
authors' programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks import variants
from intflash import Recipe
from intflash.bench.accuracy import CEILING, Accuracy, Series
from intflash.bench.experiments import Figure, Row, untimed
from intflash.bench.workloads import COLUMNS, InputCase, uniform
from intflash.methods.qflash import TILE

TILES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)


def _collapses(rows: Sequence[Row]) -> list[str]:
    """Returns the first number of tiles at which a series is at least 3 dB below scale release."""
    release = {row.x: row.value for row in rows if row.series == "scale release"}
    sentences = []
    for label in dict.fromkeys(row.series for row in rows):
        lost = [row.x for row in rows if row.series == label and release[row.x] - row.value >= 3]
        if lost:
            sentences.append(f"{label}: 3 dB or more below scale release from {min(lost):g} tiles on.")
    return sentences


FIGURE5 = untimed(
    name="qflash_figure5",
    title="QFlash: accumulating the scale over tiles, and releasing it in each tile",
    source="QFlash, Figure 5, which prints no numbers",
    measure=Accuracy(
        series=(
            Series("scale release", "qflash", variant=variants.scale_release),
            Series("scale accumulation, 32 bits", "qflash", variant=variants.scale_accumulation),
            Series("scale accumulation, 64 bits", "qflash", variant=partial(variants.scale_accumulation, bits=64)),
            Series("intflash", "intflash"),
        ),
        cases=[InputCase(f"{t} tiles", (1, 6, t * TILE, 64), uniform(-4, 4), rows=197, value=t) for t in TILES],
        metrics=("SQNR dB",),
        quick=4,
    ),
    figures=(Figure("SQNR dB", "lines", f"tiles of {TILE} keys"),),
    conclude=_collapses,
    notes="Six heads, head_dim 64, uniform in [-4, 4]; accumulation as in Eq. 13: each tile adds the bits of 1/s.",
)

_CASES = [case for case in COLUMNS if case.name in ("A2", "A7", "randn 1k", "U(.5) 1k")]

QFLASH_VARIANTS = untimed(
    name="qflash_variants",
    title="QFlash and I-FlashAttention: formulas of the papers beside the published programs",
    source="QFlash, Eq. 9-10 and 16; I-FlashAttention, Algorithms 1 and 2",
    measure=Accuracy(
        series=(
            *(Series(name, "qflash", variant=variant) for name, variant in variants.QFLASH_VARIANTS.items()),
            *(
                Series(f"as published, {name}", "qflash", recipe, variant=variants.scale_release)
                for name, recipe in variants.GRANULARITIES.items()
            ),
            CEILING,
        ),
        cases=_CASES,
        metrics=("SQNR dB", "MSE"),
    ),
    figures=(Figure("SQNR dB"),),
    notes="'divided': the published program with this step's multiplication and shift replaced by a division.",
)

INT_FLASH_VARIANTS = untimed(
    name="int_flash_variants",
    title="INT-FlashAttention: formulas of the paper beside the published program",
    source="INT-FlashAttention, Algorithm 1, line 12",
    measure=Accuracy(
        series=(
            Series("full, as published", "int_flash_full"),
            Series("full, as printed", "int_flash_full", variant=variants.int_flash_as_printed),
            Series("full, V per tensor", "int_flash_full", Recipe(q="token", k="token", v="tensor", rule="divide")),
            Series("half, as published", "int_flash_half"),
        ),
        cases=_CASES,
        metrics=("SQNR dB", "MSE"),
        paper={
            ("full, as published", "A2", "SQNR dB"): 36.92,
            ("full, as published", "A7", "SQNR dB"): 37.80,
            ("half, as published", "A2", "SQNR dB"): 38.19,
            ("half, as published", "A7", "SQNR dB"): 39.07,
        },
    ),
    figures=(Figure("SQNR dB"),),
    notes="Printed: l sums the quantized P. The paper's numbers are those of QFlash, Table 4.",
)

EXPERIMENTS = (FIGURE5, QFLASH_VARIANTS, INT_FLASH_VARIANTS)
