"""The commands `accuracy` and `bench attention`, `models` and `vortex`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from intflash.cli.console import console
from intflash.cli.options import Backend, BestDevice, Commands, Device, Seed, one_of
from intflash.cli.tables import number, number_or_text, tables
from intflash.outputs import check_file, check_folder

if TYPE_CHECKING:
    from intflash.bench.experiments import Experiment, ExperimentOutcome, Row, Setting

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Measure speed: of attention, of whole models, of the Vortex kernels."
)

Quick = Annotated[bool, typer.Option("--quick", help="Measure the small cases only.")]


def accuracy(
    only: Annotated[
        list[str] | None, typer.Option("--experiment", "-e", help="Run only this experiment; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figures go.")] = Path("results/accuracy"),
    quick: Quick = False,
    device: Device = "cpu",
    backend: Backend = None,
    seed: Seed = 0,
) -> None:
    """Measure the accuracy of every method, beside the numbers that the papers print.

    Accuracy is SQNR, mean squared error, cosine similarity and mean relative error against exact attention.
    """
    from intflash.bench.accuracy import EXPERIMENTS
    from intflash.bench.experiments import Setting

    setting = Setting(quick=quick, device=device, backend=backend, seed=seed)
    run_experiments(EXPERIMENTS, only, setting, out)


@app.command("attention")
def bench_attention(
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figure go.")] = Path("results/attention"),
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer workloads in less time.")] = False,
    suite: Annotated[
        str,
        typer.Option(
            help="The workloads: papers, the shapes of publications, or workloads, the calls of models on a GPU.",
            callback=one_of("papers", "workloads"),
        ),
    ] = "papers",
) -> None:
    """Time the kernels of IntFlash beside torch's attention, without and with the quantization of the inputs."""
    from dataclasses import asdict

    check_folder(out)
    if suite == "workloads" and device == "cpu":
        raise typer.BadParameter("the suite 'workloads' needs --device cuda")
    if device == "cpu":
        from intflash.bench.cpu_attention import WORKLOADS, measure

        with console.status("measuring"):
            rows = measure(out, workloads=WORKLOADS[1:2] if quick else WORKLOADS, budget_s=0.5 if quick else 3.0)
    else:
        from intflash.bench import gpu_attention, gpu_workloads

        run = gpu_workloads.run if suite == "workloads" else gpu_attention.run
        with console.status("measuring"):
            rows = run(out, quick)
    records = [asdict(row) | {"shape": None} for row in rows]
    columns = [name for name in records[0] if any(record[name] is not None for record in records)]
    cells = [["" if r[name] is None else escape(number_or_text(r[name])) for name in columns] for r in records]
    for table in tables(columns, cells, console.width):
        console.print(table)
    console.print(f"wrote {out}")


@app.command("models")
def bench_models(
    device: BestDevice = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A timm name; may be repeated (default: ViT-B, DeiT-S and Swin-T).")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="A batch size; may be repeated.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="How many rounds there are; each times every variant once.")] = 30,
    integer: Annotated[
        bool, typer.Option("--integer", help="Measure integer models on a GPU beside compiled FP16.")
    ] = False,
    max_autotune: Annotated[
        bool, typer.Option(help="With --integer: torch's max-autotune too, three minutes for each model and batch.")
    ] = True,
    out: Annotated[
        Path, typer.Option(help="Where results go: the path without .json and .md, with --integer a folder.")
    ] = Path("results/models"),
) -> None:
    """Measure images per second of timm models, patched with static scales and unpatched.

    The weights are random. timm must be installed. With --integer, whole integer
    models and BERT-base: JSON, CSV and figures of images per second, memory and
    energy, and the speed of single products.
    """
    if integer:
        from intflash.bench import integer_models
        from intflash.bench.experiments import Setting

        names = {name: name for name in integer_models.MODELS}
        unknown = [name for name in model or () if name not in names]
        if unknown:
            raise typer.BadParameter(f"expected models among {', '.join(names)}, got {', '.join(unknown)}")
        chosen = integer_models.experiment(model, batch, turns, max_autotune)
        return run_experiments((chosen,), [chosen.name], Setting(device=device), out)
    from intflash.bench import models

    models.check_models(model or models.MODELS)
    for path in models.result_files(out):
        check_file(path)
    with console.status("measuring"):
        outcomes = models.run_all(model or models.MODELS, batch or models.BATCHES[device], device, turns)
    failed = [f"{o.model} batch {o.batch}" for o in outcomes if o.error]
    if len(failed) < len(outcomes):
        for path in models.save(outcomes, out):
            console.print(f"wrote {path}")
    if failed:
        console.print(f"[red]not measured: {escape(', '.join(failed))}[/]")
        raise typer.Exit(1)


@app.command("vortex")
def bench_vortex(
    only: Annotated[
        list[str] | None, typer.Option("--experiment", "-e", help="Run only this experiment; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where JSON, CSV and figures go.")] = Path("results/vortex"),
    quick: Quick = False,
    seed: Seed = 0,
) -> None:
    """Count the cycles of the Vortex kernels, beside the numbers of the Vortex report.

    VORTEX_HOME and VORTEX_BUILD name your Vortex. Without Vortex the table holds
    the report's numbers only. -e chooses vortex_table (N = 64, head_dim 8, about
    a minute) or vortex_sweep (N = 1 to 128, head_dim 8 to 64, about three
    minutes; only head_dim 8 with --quick).
    """
    from intflash.bench import vortex
    from intflash.bench.experiments import Setting

    run_experiments(vortex.EXPERIMENTS, only, Setting(quick=quick, seed=seed), out)


def _chosen(experiments: Iterable[Experiment], only: list[str] | None) -> list[Experiment]:
    known = {e.name: e for e in experiments}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"no experiment {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in only or known]


def run_experiments(experiments: Iterable[Experiment], only: list[str] | None, setting: Setting, out: Path) -> None:
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
            folder = None if setting.rehearse else out
            outcome = run_experiment(experiment, replace(setting, log=status.update), folder)
        if not setting.rehearse:
            paths = outcome.save(out)
            _print_outcome(outcome)
            console.print(f"wrote {', '.join(map(str, paths))}\n")
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


def _print_outcome(outcome: ExperimentOutcome) -> None:
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
        headings = [escape(f"{metric} (paper's)" if paper else metric), *map(escape, columns)]
        found = []
        for line in lines:
            keys = ((line, column) if lines is series else (column, line) for column in columns)
            found.append([escape(line), *(_cell(cells.get((*key, metric))) for key in keys)])
        for table in tables(headings, found, console.width):
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
