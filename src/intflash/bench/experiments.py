"""An experiment is a value: what to measure, the paper's numbers, how to draw it. One runner for all.

A new experiment is a new value in a module of `intflash.bench` that exports EXPERIMENTS.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from intflash import bench
from intflash.bench.measure import environment


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        series: a method or variant, a line or colour of the figure.
        case: workload or input, a column of the table.
        metric: what the number is, with its unit.
        value: measured; None if it could not be, and `note` says why.
        paper: the paper's number for it, if it prints one.
        x: the case's place on an axis.
        backend: what computed it.
    """

    series: str
    case: str
    metric: str
    value: float | None
    paper: float | None = None
    x: float | None = None
    backend: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Setting:
    """What a run may choose; an experiment reads it and nothing else.

    Attributes:
        quick: the smaller cases only.
        device: "cpu" or "cuda".
        backend: as in `intflash.attention`; None takes the best.
        seed: of the inputs.
        budget_s: about how long a timing of one case may take.
        log: told in a few words what is being measured.
    """

    quick: bool = False
    device: str = "cpu"
    backend: str | None = None
    seed: int = 0
    budget_s: float = 4.0
    log: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Figure:
    """How to draw one metric: "bars" over cases, or "lines" over x."""

    metric: str
    kind: str = "bars"
    xlabel: str = ""


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Attributes:
        name: file name and name on the command line.
        title: what it shows.
        source: the paper's table or figure, or the document's section.
        measure: yields the rows.
        figures: one PNG each.
        conclude: from all rows to sentences that go under the table.
        notes: what a reader must know about how it was measured.
        devices: where it makes sense.
    """

    name: str
    title: str
    source: str
    measure: Callable[[Setting], Iterator[Row]]
    figures: tuple[Figure, ...] = ()
    conclude: Callable[[Sequence[Row]], list[str]] | None = None
    notes: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Outcome:
    """An experiment's rows with what they were measured on."""

    experiment: Experiment
    setting: Setting
    rows: list[Row]
    environment: dict[str, Any] = field(default_factory=environment)

    def conclusions(self) -> list[str]:
        return self.experiment.conclude(self.rows) if self.experiment.conclude and self.rows else []

    def save(self, folder: Path) -> list[Path]:
        """Write <name>.json, <name>.csv and the figures' PNGs into `folder`; returns their paths."""
        from intflash.bench import figures

        folder.mkdir(parents=True, exist_ok=True)
        e = self.experiment
        drawn = []
        for index, figure in enumerate(e.figures):
            if not any(row.metric == figure.metric and row.value is not None for row in self.rows):
                continue
            path = folder / f"{e.name}{'' if index == 0 else f'-{index + 1}'}.png"
            if figure.kind == "lines":
                figures.lines(self.rows, figure.metric, e.title, path, figure.xlabel)
            else:
                figures.bars(self.rows, figure.metric, e.title, path)
            drawn.append(path)
        content = {
            "name": e.name,
            "title": e.title,
            "source": e.source,
            "notes": e.notes,
            "conclusions": self.conclusions(),
            "quick": self.setting.quick,
            "device": self.setting.device,
            "seed": self.setting.seed,
            "environment": self.environment,
            "figures": [path.name for path in drawn],
            "rows": [{k: _plain(v) for k, v in asdict(row).items() if v is not None} for row in self.rows],
        }
        data, table = folder / f"{e.name}.json", folder / f"{e.name}.csv"
        data.write_text(json.dumps(content, indent=1) + "\n")
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, Row.__dataclass_fields__)
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)
        return [data, table, *drawn]


def run_experiment(experiment: Experiment, setting: Setting) -> Outcome:
    """Measure every row of an experiment."""
    return Outcome(experiment, setting, list(experiment.measure(setting)))


def collect(*modules: str) -> tuple[Experiment, ...]:
    """The EXPERIMENTS of these modules of `intflash.bench`, by default of all that export some.

    Raises:
        RuntimeError: two experiments have one name.
    """
    names = modules or tuple(m.name for m in pkgutil.iter_modules(bench.__path__))
    found: dict[str, Experiment] = {}
    for name in names:
        for experiment in getattr(importlib.import_module(f"{bench.__name__}.{name}"), "EXPERIMENTS", ()):
            if experiment.name in found:
                raise RuntimeError(f"experiment {experiment.name!r} is defined twice")
            found[experiment.name] = experiment
    return tuple(found.values())


def _plain(value: Any) -> Any:
    """JSON has no infinities: they become text, as float() reads them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
