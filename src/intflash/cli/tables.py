"""Tables of results for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from intflash.bench.demo import DemoResult

# Points of Top-1 below float32 from which the demo prints a number in red.
TOP1_TOLERANCE, SCALED_TOLERANCE = 0.4, 10.0


FIRST_WIDTH = 30  # of a first column, past which it wraps


def tables(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    title: str = "",
    caption: str = "",
    styles: Sequence[str | None] = (),
    left: Sequence[str] = (),
) -> Iterator[Table]:
    """One table, or several with the same first column where one would be wider than `width`; no number is cut.

    Args:
        headings: of the columns; the first names the rows and may wrap.
        rows: cells with rich's markup; a row that is short is filled up.
        title, caption: above the first table and below the last.
        styles: of the rows.
        left: headings of columns that are text, aligned to the left.
    """
    full = [(*row, *("",) * (len(headings) - len(row))) for row in rows]
    first = min(_width(headings[0], [row[0] for row in full]), FIRST_WIDTH)
    groups, used = [[]], first
    for i in range(1, len(headings)):
        needed = _width(headings[i], [row[i] for row in full]) + 1
        if groups[-1] and used + needed > width:
            groups.append([])
            used = first
        groups[-1].append(i)
        used += needed
    for place, columns in enumerate(groups):
        last = place == len(groups) - 1
        table = Table(
            title=title if place == 0 else None, title_justify="left", caption=caption if last else None,
            caption_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        table.add_column(headings[0], max_width=FIRST_WIDTH, overflow="fold")
        for i in columns:
            table.add_column(headings[i], justify="left" if headings[i] in left else "right", no_wrap=True)
        for n, row in enumerate(full):
            table.add_row(row[0], *(row[i] for i in columns), style=styles[n] if styles else None)
        yield table


def _width(heading: str, cells: Sequence[str]) -> int:
    lines = [line for text in (heading, *cells) for line in Text.from_markup(text).plain.split("\n")]
    return max(map(cell_len, lines))


def demo_table(result: DemoResult, factor: float) -> Table:
    """Accuracy and time of each method; that of the default method is highlighted."""
    from intflash.methods import AUTO, example

    default = example(AUTO).name
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
            style="bold green" if row.method == default else None,
        )
    return table


def number_or_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def number(value: float, metric: str) -> str:
    if metric == "MSE":
        return f"{value:.2e}"
    if metric == "cosine":
        return f"{value:.6f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3g}"
