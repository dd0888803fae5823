"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from intflash.cli.console import console
from intflash.outputs import check_file


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of results (default: results and benchmarks/results, where they exist)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("results/report.html"),
) -> None:
    """Write one HTML page of all results below the given folders."""
    from intflash.bench.report import build, read_results

    places = folders or [folder for folder in (Path("benchmarks/results"), Path("results")) if folder.is_dir()]
    sections = read_results(places)
    if not sections:
        searched = ", ".join(map(str, places)) or "benchmarks/results and results, which do not exist"
        raise typer.BadParameter(f"no results in {searched}; run intflash demo, accuracy or bench attention first")
    check_file(out)
    out.write_text(build(sections), encoding="utf-8")
    console.print(f"wrote {out}: {len(sections)} results, {out.stat().st_size / 1e6:.1f} MB")
