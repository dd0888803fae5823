"""The command `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from intflash.cli.console import console
from intflash.cli.options import Backend, Device, Methods, methods_in_order, one_of
from intflash.cli.tables import demo_table, number
from intflash.outputs import check_folder

if TYPE_CHECKING:
    from intflash.bench.demo import MethodResult


def demo(
    out: Annotated[Path, typer.Option(help="The folder of the JSON file and the figure.")] = Path("results/demo"),
    model: Annotated[str, typer.Option(help="The digit model: vit or swin.", callback=one_of("vit", "swin"))] = "vit",
    method: Methods = None,
    backend: Backend = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Classify only this many of the 599 images; fewer are quicker.")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Classify handwritten digits by a vision transformer, with attention computed by every method."""
    from intflash.bench.demo import QUERY_FACTOR, run_demo

    check_folder(out)
    methods = method or methods_in_order()
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading")
        result = run_demo(
            model, methods, backend, images, device,
            on_total=lambda steps: progress.update(task, total=steps),
            on_step=lambda name: progress.update(task, description=name, advance=1),
            on_row=_tell,
        )  # fmt: skip
    console.print(demo_table(result, QUERY_FACTOR))
    for row in result.rows:
        if row.error:
            console.print(f"[yellow]{row.method}[/]: {escape(row.error)}")
    for path in result.save(out):
        console.print(f"wrote {path}")
    if all(row.error for row in result.rows):
        console.print("[red]every method was refused[/]")
        raise typer.Exit(1)


def _tell(row: MethodResult) -> None:
    """A line for a finished method where no progress bar shows that something happens."""
    if not console.is_terminal:
        found = "refused" if row.error else f"{row.top1:.2f} % Top-1, {number(row.ms_per_image, 'ms')} ms an image"
        console.print(f"{row.method:16} {found}")
