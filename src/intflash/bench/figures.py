"""Figures of the demo and of experiments as PNG, drawn by matplotlib without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from intflash.bench.demo import DemoResult
    from intflash.bench.experiments import Row

OURS, OTHERS, PAPER = "#0b6e4f", "#9aa5b1", "#d1495b"
COLORS = ("#0b6e4f", "#d1495b", "#2b59c3", "#e08e0b", "#6a4c93", "#17a2b8", "#7f5539", "#6c757d", "#ef6f6c", "#465775")
DPI = 110
PORTABLE = ("torch", "reference")  # backends of torch operations, without native code
FLOOR_DB = -20.0  # the least SQNR drawn, for methods that fail


def is_ours(series: str) -> bool:
    return series.startswith("intflash")


def demo(result: DemoResult, path: Path) -> None:
    """Top-1 (plain and with scaled queries), worst and mean SQNR, and time, one row of bars per method.

    Times of different backends differ by how the code is written: hatched bars are portable torch operations, to be
    compared with the dotted line (float32 by the same backend), plain ones are native code, to be compared with the
    dashed line (float32 by torch's own attention).
    """
    rows = [row for row in result.rows if row.error is None][::-1]
    names = [row.method for row in rows]
    colors = [OURS if is_ours(name) else OTHERS for name in names]
    figure = Figure(figsize=(12, 1.6 + 0.34 * len(rows)), layout="constrained")
    top1, noise, speed = figure.subplots(1, 3, sharey=True)
    at = range(len(rows))
    top1.barh(at, [row.top1 for row in rows], color=colors, height=0.7)
    top1.scatter([row.scaled_top1 for row in rows], at, color=PAPER, zorder=3, s=22, label="queries x 64")
    top1.axvline(result.float_top1, color="black", linewidth=0.8, linestyle="--", label="float32")
    top1.set(yticks=list(at), yticklabels=names, xlim=(0, 100.5), xlabel="Top-1, %", title="Accuracy")
    top1.legend(loc="lower left", fontsize=8)
    noise.barh(at, [_drawn(row.mean_sqnr) for row in rows], color=colors, height=0.7)
    noise.scatter([_drawn(row.worst_sqnr) for row in rows], at, color="black", zorder=3, s=22, label="worst layer")
    noise.set(xlabel="SQNR of the layers, dB (bar: mean)", title="Attention error", xlim=(0, 80))
    noise.legend(loc="lower right", fontsize=8)
    bars = speed.barh(at, [row.ms_per_image for row in rows], color=colors, height=0.7)
    for bar, row in zip(bars, rows, strict=True):
        bar.set(hatch="///" if row.backend in PORTABLE else "", edgecolor="white", linewidth=0)
    speed.axvline(result.float_ms_per_image, color="black", linewidth=0.8, linestyle="--", label="float32, torch SDPA")
    for row in rows:
        if row.method == "fp32" and row.backend in PORTABLE:
            speed.axvline(row.ms_per_image, color="black", linewidth=0.8, linestyle=":", label="float32, portable")
    speed.legend(handles=[*speed.get_legend_handles_labels()[0], Patch(facecolor=OTHERS, hatch="///",
                 edgecolor="white", label="portable code")], loc="lower right", fontsize=8)  # fmt: skip
    for y, row in zip(at, rows, strict=True):
        near = dict(xytext=(3, 0), textcoords="offset points", va="center", size=7)
        speed.annotate(row.backend, (row.ms_per_image, y), **near)
    speed.set(xlabel="ms per image, whole model", title="Time and backend")
    speed.margins(x=0.2)
    figure.suptitle(f"{result.images} held-out digits, model {result.model!r}")
    figure.savefig(path, dpi=DPI)


def bars(rows: Sequence[Row], metric: str, title: str, path: Path) -> None:
    """Draws one group of bars per case and one bar per series, with the paper's numbers as dashes."""
    rows = [row for row in rows if row.metric == metric and row.value not in (None, math.inf)]
    cases, series = _unique(row.case for row in rows), _unique(row.series for row in rows)
    inches = min(15.0, max(7.0, 1.4 + 0.2 * len(cases) * (len(series) + 1)))
    figure = Figure(figsize=(inches, 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(series)
    for index, name in enumerate(series):
        mine = [row for row in rows if row.series == name]
        at = [cases.index(row.case) + (index - (len(series) - 1) / 2) * width for row in mine]
        values = [_drawn(row.value) for row in mine]
        axes.bar(at, values, width * 0.92, label=name, color=COLORS[index % 10], alpha=0.95 if index < 10 else 0.55)
        for x, row in zip(at, mine, strict=True):
            if row.paper is not None:
                axes.hlines(row.paper, x - width / 2, x + width / 2, color="black", linewidth=2, zorder=3)
    if any(row.paper is not None for row in rows):
        axes.hlines([], 0, 0, color="black", linewidth=2, label="paper")
    smallest, largest = min(row.value for row in rows), max(row.value for row in rows)
    if 0 < smallest < largest / 300:
        axes.set_yscale("log")
    axes.set(xticks=range(len(cases)), ylabel=metric, title=title)
    axes.set_xticklabels(cases, rotation=0 if len(cases) < 7 else 30, ha="center" if len(cases) < 7 else "right")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center", ncols=max(4, round(inches / 2)))
    figure.savefig(path, dpi=DPI)


def lines(rows: Sequence[Row], metric: str, title: str, path: Path, xlabel: str) -> None:
    """Draws one line per series over the cases' values, with the paper's numbers as crosses."""
    rows = [row for row in rows if row.metric == metric and row.value not in (None, math.inf) and row.x is not None]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(_unique(row.series for row in rows)):
        mine = sorted((row.x, row.value, row.paper) for row in rows if row.series == name)
        color = COLORS[index % len(COLORS)]
        axes.plot([x for x, _, _ in mine], [_drawn(y) for _, y, _ in mine], "o-", color=color, markersize=4, label=name)
        paper = [(x, value) for x, _, value in mine if value is not None]
        if paper:
            axes.plot(*zip(*paper, strict=True), "x", color=color, markersize=8, label=f"{name}, paper")
    xs, ys = [row.x for row in rows], [row.value for row in rows]
    if min(xs) > 0 and max(xs) >= 8 * min(xs):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(xs)), [f"{x:g}" for x in sorted(set(xs))])
        axes.minorticks_off()
    if min(ys) > 0 and max(ys) > 30 * min(ys):
        axes.set_yscale("log")
    axes.set(xlabel=xlabel, ylabel=metric, title=title)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=DPI)


def _drawn(value: float) -> float:
    return FLOOR_DB if value == -math.inf else max(value, FLOOR_DB)


def _unique(names) -> list[str]:
    return list(dict.fromkeys(names))
