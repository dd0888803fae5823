"""The command `intflash`: demo, info, accuracy, bench, report. Heavy imports wait for their command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from intflash.models import cli as models_cli
from intflash.options import Backend, Commands, Device, Methods, one_of
from intflash.outputs import check_file, check_folder
from intflash.tables import demo_table, number

if TYPE_CHECKING:
    from intflash.bench.demo import MethodResult
    from intflash.bench.experiments import Experiment, Outcome, Row, Setting

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Integer and INT8 FlashAttention for inference."
)
bench_app = typer.Typer(no_args_is_help=True, help="Time and experiments of the papers.")
app.add_typer(bench_app, name="bench")
app.add_typer(models_cli.app)  # eval, calibrate
console = Console()

Quick = Annotated[bool, typer.Option("--quick", help="The small cases only.")]
Seed = Annotated[int, typer.Option(help="Seed of the random inputs.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where JSON and figure go.")] = Path("results/demo"),
    model: Annotated[str, typer.Option(help="vit or swin.", callback=one_of("vit", "swin"))] = "vit",
    method: Methods = None,
    backend: Backend = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many of the 599 images: fewer are quicker.")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Classify handwritten digits with attention computed by every method."""
    from intflash.bench.demo import QUERY_FACTOR, run_demo

    check_folder(out)
    methods = method or _methods_in_order()
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


def _tell(row: MethodResult) -> None:
    """A line for a finished method where no progress bar shows that something happens."""
    if not console.is_terminal:
        found = "refused" if row.error else f"{row.top1:.2f} % Top-1, {number(row.ms_per_image, 'ms')} ms an image"
        console.print(f"{row.method:16} {found}")


def _methods_in_order() -> list[str]:
    """Ours first, then the published integer methods, then mixed precision and floats."""
    import intflash

    methods = intflash.info()["methods"]
    return sorted(methods, key=lambda name: (not name.startswith("intflash"), not methods[name]["integer_only"]))


@app.command()
def info() -> None:
    """Methods and backends: what each serves on this machine, and why not."""
    import torch

    import intflash

    found = intflash.info()
    console.print(
        f"intflash {intflash.__version__}, torch {torch.__version__}, "
        + (torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")
    )
    methods = _methods_in_order()
    what = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", "integer", "what it is", "source"):
        what.add_column(heading, no_wrap=heading == "method")
    served = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", *found["backends"]):
        served.add_column(heading, no_wrap=True)
    for name in methods:
        method = found["methods"][name]
        what.add_row(name, "only" if method["integer_only"] else "", method["summary"], method["source"])
        reasons = (backend["methods"][name] for backend in found["backends"].values())
        served.add_row(name, *("[green]yes[/]" if reason is None else "[dim]no[/]" for reason in reasons))
    console.print(what)
    console.print(served)
    for name, backend in found["backends"].items():
        for reason, methods in _reasons(backend).items():
            console.print(f"[bold]{name}[/] does not serve {methods}: {escape(reason)}")


def _reasons(backend: dict) -> dict[str, str]:
    """Reason -> the methods it holds for."""
    if backend["available"] is not None:
        return {backend["available"]: "any method"}
    grouped: dict[str, list[str]] = {}
    for method, reason in backend["methods"].items():
        if reason is not None:
            grouped.setdefault(reason, []).append(method)
    return {reason: ", ".join(methods) for reason, methods in grouped.items()}


@app.command()
def accuracy(
    only: Annotated[
        list[str] | None, typer.Option("--experiment", "-e", help="Only this one; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figures go.")] = Path("results/accuracy"),
    quick: Quick = False,
    device: Device = "cpu",
    backend: Backend = None,
    seed: Seed = 0,
) -> None:
    """SQNR, MSE, cosine and mean relative error of the methods, beside the papers' numbers."""
    from intflash.bench.accuracy import EXPERIMENTS
    from intflash.bench.experiments import Setting

    setting = Setting(quick=quick, device=device, backend=backend, seed=seed)
    _run_experiments(EXPERIMENTS, only, setting, out)


@bench_app.command("attention")
def bench_attention(
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figure go.")] = Path("results/attention"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer workloads, less time.")] = False,
) -> None:
    """Our kernels beside torch's attention in one run: kernel only, and with quantization included."""
    from dataclasses import asdict

    check_folder(out)
    if device == "cpu":
        from intflash.bench.cpu_attention import WORKLOADS, measure

        with console.status("measuring"):
            rows = measure(out, workloads=WORKLOADS[1:2] if quick else WORKLOADS, budget_s=0.5 if quick else 3.0)
    else:
        from intflash.bench.gpu_attention import run

        with console.status("measuring"):
            rows = run(out, quick)
    records = [asdict(row) | {"shape": None} for row in rows]
    columns = [name for name in records[0] if any(record[name] is not None for record in records)]
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for record in records:
        values = (record[name] for name in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in values))
    console.print(table, soft_wrap=True)
    console.print(f"wrote {out}")


@bench_app.command("vortex")
def bench_vortex(
    only: Annotated[
        list[str] | None, typer.Option("--experiment", "-e", help="Only this one; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figures go.")] = Path("results/vortex"),
    quick: Quick = False,
    seed: Seed = 0,
) -> None:
    """The Vortex report's table with our programs beside it, on your Vortex (VORTEX_HOME, VORTEX_BUILD).

    -e chooses vortex_table, vortex_sweep or vortex_instructions. The last
    needs clang, no Vortex: our kernels in the lockstep interpreter, which
    takes about two minutes (20 s with --quick).
    """
    from intflash.bench import vortex
    from intflash.bench.experiments import Setting

    _run_experiments(vortex.EXPERIMENTS, only, Setting(quick=quick, seed=seed), out)


@app.command()
def report(
    folders: Annotated[list[Path] | None, typer.Argument(help="Where results are (default: those there are).")] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("results/report.html"),
) -> None:
    """Assemble everything measured into one static page."""
    from intflash.bench.report import build, read_results

    places = folders or [folder for folder in (Path("benchmarks/results"), Path("results")) if folder.is_dir()]
    sections = read_results(places)
    if not sections:
        searched = ", ".join(map(str, places)) or "benchmarks/results and results, which do not exist"
        raise typer.BadParameter(f"no results in {searched}; run intflash demo, accuracy or bench attention first")
    check_file(out)
    out.write_text(build(sections), encoding="utf-8")
    console.print(f"wrote {out}: {len(sections)} results, {out.stat().st_size / 1e6:.1f} MB")


def _chosen(experiments: Iterable[Experiment], only: list[str] | None) -> list[Experiment]:
    known = {e.name: e for e in experiments}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"no experiment {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in only or known]


def _run_experiments(experiments: Iterable[Experiment], only: list[str] | None, setting: Setting, out: Path) -> None:
    """Measure and save them; one that stopped, or was asked for by name and gave no number, makes the exit code 1."""
    import signal
    from dataclasses import replace

    from intflash.bench.experiments import run_experiment

    chosen = _chosen(experiments, only)
    if not setting.rehearse:
        check_folder(out)
    failed, before = False, signal.signal(signal.SIGTERM, _told_to_stop)
    for experiment in chosen:
        if setting.device not in experiment.devices:
            failed = failed or bool(only)
            console.print(f"[dim]{experiment.name} needs {' or '.join(experiment.devices)}: left out[/]")
            continue
        with console.status(experiment.name) as status:
            outcome = run_experiment(experiment, replace(setting, log=status.update))
        if not setting.rehearse:
            _print_outcome(outcome)
            console.print(f"wrote {', '.join(str(path) for path in outcome.save(out))}\n")
        if outcome.error:
            failed = True
            console.print(f"[red]{experiment.name} did not finish: {escape(outcome.error)}[/]", soft_wrap=True)
        elif only and not setting.rehearse and not any(row.value is not None for row in outcome.rows):
            failed = True
            reason = next((row.note for row in outcome.rows if row.note), "it has no rows here")
            console.print(f"[red]{experiment.name} gave no number: {escape(reason)}[/]", soft_wrap=True)
    signal.signal(signal.SIGTERM, before)
    if failed:
        raise typer.Exit(1)


def _told_to_stop(number: int, frame: object) -> None:
    """An experiment that outlasted its time keeps the rows that it has."""
    raise TimeoutError("stopped before its end")


def _print_outcome(outcome: Outcome) -> None:
    """A table per metric: series by cases, or cases by series where there are more cases."""
    experiment, rows = outcome.experiment, outcome.rows
    cases, series, metrics = (
        list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("case", "series", "metric")
    )
    cells = {(row.series, row.case, row.metric): row for row in rows}
    lines, columns = (cases, series) if len(cases) > len(series) else (series, cases)
    console.rule(f"{experiment.title} ({experiment.source})", align="left")
    for metric in metrics:
        paper = any(row.paper is not None for row in rows if row.metric == metric)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(f"{metric} (paper's)" if paper else metric, no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for line in lines:
            keys = ((line, column) if lines is series else (column, line) for column in columns)
            table.add_row(line, *(_cell(cells.get((*key, metric))) for key in keys))
        console.print(table)
    for sentence in outcome.conclusions():
        console.print(escape(sentence))
    for reason in dict.fromkeys(f"{row.series} on {row.case}: {row.note}" for row in rows if row.note):
        console.print(f"[yellow]{escape(reason)}[/]")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    value = "refused" if row.value is None else number(row.value, row.metric)
    return value if row.paper is None else f"{value} [dim]({number(row.paper, row.metric)})[/]"


if __name__ == "__main__":
    app()
