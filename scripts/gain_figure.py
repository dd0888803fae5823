"""Draws the README's figure and prints its table: the speedup of integer attention on one GPU, from `bench attention`'s
CSV.

    python scripts/gain_figure.py benchmarks/results/h200/attention.csv docs/images/gain.png

The table is Markdown. matplotlib is needed (the extra `demo`).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

# label -> (workload of the CSV, method): the best of our methods for the shape
ROWS = {
    "ViT-S, 1 image": ("A2 batch 1", "intflash_p8"),
    "ViT-S, 8 images": ("A2 batch 8", "intflash_p8"),
    "ViT-S, 1024 images": ("A2 batch 1024", "intflash_p8"),
    "Swin-T stage 1, 8 images": ("A4 batch 8", "intflash_p8"),
    "Swin-T stage 1, 128 images": ("A4 batch 128", "intflash_p8"),
    "Swin-T stage 4, 8 images": ("A7 batch 8", "intflash_p8"),
    "N = 4096, head_dim 64": ("D64 N4096", "intflash_online"),
    "N = 16384, head_dim 128": ("D128 N16384", "intflash_online"),
}
STATIC, DYNAMIC = "float16, static scales", "float16, dynamic, of each head"


def gains(path: Path) -> dict[str, tuple[str, float, float, float]]:
    """Returns label -> (method, speedup with static scales, with scales computed in the call, of `intflash` with such
    scales).
    """
    with path.open(newline="") as file:
        found = {(row["workload"], row["method"], row["variant"]): float(row["ratio"]) for row in csv.DictReader(file)}
    return {
        label: (
            method, found[workload, method, STATIC], found[workload, method, DYNAMIC],
            found[workload, "intflash", DYNAMIC],
        )
        for label, (workload, method) in ROWS.items()
    }  # fmt: skip


def markdown(table: dict[str, tuple[str, float, float, float]]) -> str:
    """Returns the table's rows."""
    lines = (
        f"| {label} | `{method}` | {static:.2f}x | {dynamic:.2f}x | {accurate:.2f}x |"
        for label, (method, static, dynamic, accurate) in table.items()
    )
    return "\n".join(lines)


def draw(table: dict[str, tuple[str, float, float, float]], path: Path) -> None:
    """Draws horizontal bars of the three speedups, and a line where both take the same time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    series = {
        "fastest method, static scales": (1, "#1b6ca8"),
        "fastest method, scales found in each call": (2, "#69a7d1"),
        "intflash, scales found in each call": (3, "#c9c9c9"),
    }
    for i, (name, (column, colour)) in enumerate(series.items()):
        places = [y + (i - 1) * 0.26 for y in range(len(table))]
        bars = axes.barh(places, [row[column] for row in table.values()], 0.25, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_yticks(range(len(table)), list(table))
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("speedup over the faster of cuDNN and FlashAttention FP16 on one H200")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    measured = gains(source)
    print(markdown(measured))
    draw(measured, target)
