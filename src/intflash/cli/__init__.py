"""The command `intflash`. Each file holds commands; heavy imports wait until their command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from intflash.cli import bench, demo, info, models, report, selfcheck
from intflash.cli.options import Commands

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Integer and INT8 FlashAttention for inference."
)


def _version(asked: bool) -> None:
    if asked:
        from intflash import __version__

        typer.echo(f"intflash {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Integer and INT8 FlashAttention for inference."""


app.command("demo")(demo.demo)
app.command("info")(info.info)
app.command("selfcheck")(selfcheck.selfcheck)
app.command("accuracy")(bench.accuracy)
app.command("eval")(models.evaluate_command)
app.command("calibrate")(models.calibrate_command)
app.command("convert")(models.convert_command)
app.add_typer(bench.app, name="bench")
app.command("report")(report.report)
