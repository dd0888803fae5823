"""An experiment is a value: what to measure, the paper's numbers, and how to draw it. One runner serves all of them.

A new experiment is a new value in the EXPERIMENTS of a module. Experiments that users run (`intflash accuracy`) are in
this package, all others in the checkout's `benchmarks` folder.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from intflash.bench.measure import environment, time_interleaved

logger = logging.getLogger("intflash")


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


Name = TypeVar("Name")


@dataclass(frozen=True)
class Setting:
    """What a run may choose; an experiment reads it and nothing else.

    Attributes:
        quick: the smaller cases only.
        device: "cpu" or "cuda".
        backend: as in `intflash.attention`; None takes the best.
        seed: of the inputs.
        budget_s: about how long a timing of one case may take on the CPU.
        rehearse: run what would be timed once and time nothing, which compiles its kernels.
        log: told in a few words what is being measured.
    """

    quick: bool = False
    device: str = "cpu"
    backend: str | None = None
    seed: int = 0
    budget_s: float = 4.0
    rehearse: bool = False
    log: Callable[[str], None] = lambda text: None

    def time(self, calls: Sequence[Callable[[], Any]], rounds: int = 9, sample_s: float = 3e-3) -> list[float]:
        """Returns the median seconds of each call. The calls take turns. On a GPU CUDA graphs are replayed, without
        launch overhead.
        """
        if self.rehearse:
            for call in calls:
                call()
            return [math.nan] * len(calls)
        if self.device == "cpu":
            return time_interleaved(calls, self.budget_s)
        from intflash.bench import gpu_timing as timing

        return timing.time_calls(calls, rounds, sample_s)

    def times(self, calls: Mapping[Name, Callable[[], Any]], **how: Any) -> dict[Name, float]:
        """`time` of named calls."""
        return dict(zip(calls, self.time(list(calls.values()), **how), strict=True))


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
        timed: whether another process beside it would spoil the numbers.
        limit_s: how long it may take where it is one of many (`bench all`).
    """

    name: str
    title: str
    source: str
    measure: Callable[[Setting], Iterator[Row]]
    figures: tuple[Figure, ...] = ()
    conclude: Callable[[Sequence[Row]], list[str]] | None = None
    notes: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    timed: bool = True
    limit_s: float = 90.0


untimed = partial(Experiment, timed=False)


@dataclass(frozen=True)
class ExperimentOutcome:
    """An experiment's rows with the machine they were measured on. `error`: why rows are missing."""

    experiment: Experiment
    setting: Setting
    rows: list[Row]
    error: str | None = None
    environment: dict[str, Any] = field(default_factory=environment)

    def conclusions(self) -> list[str]:
        whole = self.rows and self.error is None
        return self.experiment.conclude(self.rows) if self.experiment.conclude and whole else []

    def save(self, folder: Path) -> list[Path]:
        """Writes <name>.json, <name>.csv and the figures' PNGs into `folder`. Returns their paths."""
        from intflash.bench import figures

        folder.mkdir(parents=True, exist_ok=True)
        e = self.experiment
        data = self.save_rows(folder)  # first: drawing takes seconds
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
        if drawn:
            self.save_rows(folder, drawn)
        return [*data, *drawn]

    def save_rows(self, folder: Path, drawn: Sequence[Path] = ()) -> list[Path]:
        """Writes <name>.json, which names these figures, and <name>.csv into a folder that exists."""
        e = self.experiment
        content = {
            "name": e.name,
            "title": e.title,
            "source": e.source,
            "notes": e.notes,
            "error": self.error,
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
        return [data, table]


UNFINISHED = "the run ended before the experiment did"


def run_experiment(experiment: Experiment, setting: Setting, folder: Path | None = None) -> ExperimentOutcome:
    """Measures every row of an experiment. An error that stops it becomes part of the outcome, beside the rows
    measured so far. A folder gets the rows as they come, so that they outlive a run that is killed.
    """
    outcome = ExperimentOutcome(experiment, setting, [], UNFINISHED)
    error = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for row in experiment.measure(setting):
            outcome.rows.append(row)
            if folder is not None:
                outcome.save_rows(folder)
    except Exception as raised:
        logger.exception("%s stopped", experiment.name)
        error = describe(raised)
    return replace(outcome, error=error)


def describe(error: Exception) -> str:
    """Returns an exception as one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def best_of_groups(rows: Iterable[Row], metric: str, papers: Mapping[tuple[str, str], float]) -> Iterator[Row]:
    """Each series' largest value of a metric over the cases that a paper gives one number for.

    Args:
        papers: (cases, series) -> the paper's number; "A1-A3" are the cases from A1 to A3.
    """
    rows = [row for row in rows if row.metric == metric and row.value is not None]
    for cases in dict.fromkeys(cases for cases, _ in papers):
        first, last = cases.split("-")
        inside = [row for row in rows if first <= row.case <= last]
        for series in dict.fromkeys(row.series for row in inside):
            best = max((row for row in inside if row.series == series), key=lambda row: row.value)
            yield replace(best, case=f"best of {cases}", paper=papers.get((cases, series)))


def collect(modules: Iterable[ModuleType]) -> tuple[Experiment, ...]:
    """Returns the EXPERIMENTS of these modules.

    Raises:
        RuntimeError: two experiments have one name.
    """
    found: dict[str, Experiment] = {}
    for module in modules:
        for experiment in module.EXPERIMENTS:
            if experiment.name in found:
                raise RuntimeError(f"experiment {experiment.name!r} is defined twice")
            found[experiment.name] = experiment
    return tuple(found.values())


def _plain(value: Any) -> Any:
    """Replaces infinities, which JSON does not have, by text that float() reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
