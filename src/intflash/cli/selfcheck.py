"""The command `selfcheck`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from intflash.cli.console import console
from intflash.cli.options import Methods, Seed, backend_name
from intflash.cli.tables import tables
from intflash.outputs import check_folder

if TYPE_CHECKING:
    from intflash.selfcheck.session import Finding, Report


def _backends(names: list[str] | None) -> list[str] | None:
    return names and [backend_name(name) for name in names]


def selfcheck(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long the check takes.")] = 60.0,
    seed: Seed = 0,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only this backend; may be repeated (default: all of this machine).", callback=_backends
        ),
    ] = None,
    method: Methods = None,
    only: Annotated[
        list[int] | None, typer.Option(min=0, help="Run only the problem of this number; may be repeated.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The folder of the JSON file and of programs that reproduce failures.")
    ] = Path("results/selfcheck"),
) -> None:
    """Compare every backend of this machine with the reference on random attention problems.

    Integer methods must give the same bits, float methods must stay within a stated tolerance, and a backend that
    refuses a problem must say why. After a failure the exit code is 1, and the smallest program that shows it is
    printed.
    """
    from intflash.selfcheck import places, run

    check_folder(out)
    chosen, missing = places(backend)
    for name, reason in missing.items():
        console.print(f"[yellow]{name}[/] is not checked: {escape(reason)}", soft_wrap=True)
    if not chosen:
        console.print("[red]no backend to check[/]")
        raise typer.Exit(1)
    columns = (TextColumn("{task.description:40}"), BarColumn(), TextColumn("{task.fields[cases]} problems"))
    running = out / "running.txt"
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting", total=seconds, cases=0)

        def on_case(index: int, case: object, elapsed: float) -> None:
            # What a crash of the process would leave: the problem that it was about.
            running.write_text(f"--seed {seed} --only {index}: {case}\n")
            shape = f"{case.method} {case.nq} x {case.nk}, head_dim {case.d}"
            progress.update(task, description=shape, completed=elapsed, cases=index + 1)

        report = run(
            chosen, seed=seed, seconds=seconds, only=only, methods=method, on_case=on_case,
            on_finding=_tell, on_shrink=lambda text: progress.update(task, description=text),
        )  # fmt: skip
    running.unlink(missing_ok=True)
    report.missing = missing
    _print(report, [str(place) for place in chosen])
    paths = report.save(out)
    console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)
    if report.findings:
        raise typer.Exit(1)


def _tell(finding: Finding) -> None:
    said = f"problem {finding.index}, {finding.place}, {finding.case.method}: {finding.failure.said}"
    console.print(f"[red]failed[/] {escape(said)}", soft_wrap=True)


def _print(report: Report, names: list[str]) -> None:
    """What was covered, what was refused, what failed."""
    methods = list(dict.fromkeys(method for _, method in report.tallies))
    rows = [[method, *(_counts(report.tallies.get((name, method), {})) for name in names)] for method in methods]
    title = f"{report.cases} problems in {report.seconds:.0f} s: equal to the reference / refused / failed"
    for table in tables(("method", *names), rows, console.width, title=title):
        console.print(table)
    for (place, reason), count in report.reasons.most_common():
        console.print(f"{place} refused {count}: {escape(reason)}", style="dim", soft_wrap=True)
    for finding in report.findings:
        console.print(
            f"[red]{finding.place}, {finding.case.method}, {finding.failure.stage}[/]: {escape(finding.failure.said)} "
            f"({finding.count} problems; {report.command(finding)})",
            soft_wrap=True,
        )
    smallest = report.smallest()
    if smallest is None:
        console.print("[green]no failure[/]")
        return
    console.rule("the smallest program that shows a failure", align="left")
    console.print(smallest.reproducer(), markup=False, highlight=False, soft_wrap=True)


def _counts(tally: dict[str, int]) -> str:
    """ "12 / 3 / 0": problems that agree (with the reference's refusals too), refused or left out, failed."""
    agree, refused = (
        sum(tally.get(name, 0) for name in pair) for pair in (("checked", "bad input"), ("refused", "left out"))
    )
    failed = tally.get("failed", 0)
    return f"{agree} / {refused} / {f'[red]{failed}[/]' if failed else 0}" if tally else ""
