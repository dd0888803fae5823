"""The command ``python -m benchmarks``: list, run and all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks import suite
from benchmarks.registry import EXPERIMENTS
from intflash.bench.experiments import Setting
from intflash.cli.bench import Quick, run_experiments
from intflash.cli.console import console
from intflash.cli.options import Backend, Commands, Device, Seed
from intflash.cli.report import report
from intflash.outputs import check_folder

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="The papers' tables and figures, measured here."
)


@app.command("list")
def list_experiments() -> None:
    """Lists the declared experiments: one per table or figure of the papers."""
    table = Table("name", "what it shows", "source", "on", box=box.SIMPLE_HEAD)
    for e in EXPERIMENTS:
        table.add_row(e.name, e.title, e.source, ", ".join(e.devices))
    console.print(table)


@app.command("run")
def run_some(
    only: Annotated[
        list[str] | None, typer.Option("--experiment", "-e", help="Only this one; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figures go.")] = Path("results/benchmarks"),
    quick: Quick = False,
    device: Device = "cpu",
    backend: Backend = None,
    seed: Seed = 0,
    budget: Annotated[float, typer.Option(help="Seconds of timing per case, about, on the CPU.")] = 4.0,
    rehearse: Annotated[bool, typer.Option(help="Only compile the kernels: time nothing, write nothing.")] = False,
) -> None:
    """Measures the declared experiments, beside the paper's numbers."""
    setting = Setting(quick=quick, device=device, backend=backend, seed=seed, budget_s=budget, rehearse=rehearse)
    run_experiments(EXPERIMENTS, only, setting, out)


@app.command("all")
def run_all(
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Where results, logs and the page go.")] = Path("results/all"),
    seconds: Annotated[
        float, typer.Option(help="What has not started by then is left out, and the page says so.")
    ] = 480,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at once while nothing is timed (default: cores).")
    ] = None,
    models: Annotated[bool, typer.Option("--models", help="Whole models too, which takes minutes more.")] = False,
    quick: Quick = False,
    seed: Seed = 0,
) -> None:
    """Measures everything that this machine can run, and writes the report page."""
    check_folder(out)
    count = jobs or os.cpu_count() or 1
    chosen = suite.plan(out, device, quick=quick, seed=seed, jobs=count, models=models)
    ended = suite.run_all(chosen, out, seconds=seconds, jobs=count, log=lambda line: console.print(escape(line)))
    report([out], out / "report.html")
    if any(end.reason for end in ended):
        console.print("[yellow]not everything was measured: the page says what and why[/]")


if __name__ == "__main__":
    app()
