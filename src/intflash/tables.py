"""Tables of results for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from intflash.bench.demo import DemoResult

# Points of Top-1 below float32 from which the demo prints a number in red.
TOP1_TOLERANCE, SCALED_TOLERANCE = 0.4, 10.0


def demo_table(result: DemoResult, factor: float) -> Table:
    table = Table(
        title=f"{result.images} held-out digits, model {result.model}: attention by every method",
        caption="agrees: with float32's classes. dB: SQNR of attention's worst layer, its mean over layers, and of the "
        f"logits against float32's. Last but one: queries multiplied by {factor:g}. Red: Top-1 is lost.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,  # 80 columns hold it
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    headings = (
        "Top-1\n%",
        "agrees\n%",
        "worst\ndB",
        "mean\ndB",
        "logits\ndB",
        "ms/\nimage",
        f"Q x {factor:g}\nTop-1",
    )
    for name in headings:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_row(
        "float32 (torch)", f"{result.float_top1:.2f}", "", "", "", "", number(result.float_ms_per_image, "ms"),
        f"{result.float_scaled_top1:.1f}", "", style="dim",
    )  # fmt: skip
    for row in result.rows:
        if row.error:
            table.add_row(row.method, "refused", style="yellow")
            continue
        lost = row.top1 < result.float_top1 - TOP1_TOLERANCE
        broken = row.scaled_top1 < result.float_scaled_top1 - SCALED_TOLERANCE
        table.add_row(
            row.method,
            f"[red]{row.top1:.2f}[/]" if lost else f"{row.top1:.2f}",
            f"{row.agreement:.2f}",
            *(f"{value:.1f}" for value in (row.worst_sqnr, row.mean_sqnr, row.logits_sqnr)),
            number(row.ms_per_image, "ms"),
            f"[red]{row.scaled_top1:.1f}[/]" if broken else f"{row.scaled_top1:.1f}",
            row.backend,
            style="bold green" if row.method == "intflash" else None,
        )
    return table


def number(value: float, metric: str) -> str:
    if metric == "MSE":
        return f"{value:.2e}"
    if metric == "cosine":
        return f"{value:.6f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3g}"
