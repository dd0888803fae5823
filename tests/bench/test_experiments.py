"""One runner for every experiment: rows, files, figures; and the declared experiments themselves."""

import csv
import json
import math

import pytest

from benchmarks.registry import EXPERIMENTS  # raises if a name is there twice
from intflash.bench.accuracy import TABLE4, Accuracy, Series, which_definition_fits
from intflash.bench.experiments import (
    UNFINISHED,
    Experiment,
    ExperimentOutcome,
    Figure,
    Row,
    Setting,
    best_of_groups,
    run_experiment,
)
from intflash.bench.workloads import QFLASH, random_case, uniform, workload_case


def two_rows(setting):
    setting.log("measuring")
    yield Row("a", "N = 1", "SQNR dB", 30.0, paper=31.0, x=1, backend="reference")
    yield Row("b", "N = 1", "SQNR dB", math.inf, x=1)
    yield Row("c", "N = 1", "SQNR dB", None, note="refused")


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_outcomes_are_saved_completely(tmp_path, kind):
    experiment = Experiment("toy", "Toy", "nowhere", two_rows, (Figure("SQNR dB", kind, "N"),), lambda rows: ["done"])
    data, table, picture = run_experiment(experiment, Setting(seed=3)).save(tmp_path)
    content = json.loads(data.read_text())
    first = dict(series="a", case="N = 1", metric="SQNR dB", value=30.0, paper=31.0, x=1, backend="reference")
    assert content["rows"][0] == first
    assert content["rows"][1]["value"] == "inf" and "value" not in content["rows"][2]
    assert content["conclusions"] == ["done"] and content["seed"] == 3 and content["environment"]["cpu"]
    assert [row["series"] for row in csv.DictReader(table.open())] == ["a", "b", "c"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rows_are_in_the_file_while_the_experiment_runs(tmp_path):
    found = []

    def measure(setting):
        yield Row("a", "N = 1", "us", 1.0)
        found.append(json.loads((tmp_path / "toy.json").read_text()))

    outcome = run_experiment(Experiment("toy", "Toy", "nowhere", measure), Setting(), tmp_path)
    assert [row["value"] for row in found[0]["rows"]] == [1.0] and found[0]["error"] == UNFINISHED
    assert outcome.error is None and len(outcome.rows) == 1


def test_names_are_unique_and_papers_numbers_have_a_cell():
    assert {"qflash_table4", "qflash_figure5", "qflash_figure3_batch1"} <= {e.name for e in EXPERIMENTS}
    for experiment in EXPERIMENTS:
        plan = experiment.measure
        if isinstance(plan, Accuracy):
            labels, cases = {s.label for s in plan.series}, {c.name for c in plan.cases}
            for series, case, metric in plan.paper:
                assert series in labels and case in cases and metric in plan.metrics


def test_a_refused_call_is_a_row_with_its_reason():
    case = random_case("too large", 64, uniform(-500, 500))
    rows = list(Accuracy([Series("qflash", "qflash"), Series("intflash", "intflash")], [case], ("SQNR dB",))(Setting()))
    assert rows[0].value is None and "round(1 /" in rows[0].note
    assert rows[1].value > 10 and rows[1].note is None


def test_table4_within_half_a_decibel_where_reproducible():
    """QFlash Table 4 on A7; its QFlash and QAttn entries are not reproducible (docs/numerics.md)."""
    plan = TABLE4.measure
    names = {"intflash", "int_flash_half", "int_flash_full", "ceiling"}
    small = Accuracy(
        [s for s in plan.series if s.label in names], [workload_case(QFLASH["A7"])], ("SQNR dB",), paper=plan.paper
    )
    rows = {row.series: row for row in small(Setting())}
    for name in ("int_flash_half", "int_flash_full"):
        assert abs(rows[name].value - rows[name].paper) <= 0.5
    assert rows["ceiling"].value - rows["intflash"].value <= 0.2


def test_the_closest_definition_is_named():
    rows = [
        Row("m", "1k", "MRE of means %", 2.0, paper=4.0),
        Row("m", "1k", "MRE elementwise %", 4.1, paper=4.0),
    ]
    assert which_definition_fits(rows)[-1].startswith("Closest definition: MRE elementwise %")


def test_conclusions_need_rows():
    assert ExperimentOutcome(TABLE4, Setting(), []).conclusions() == []


def test_an_error_is_part_of_the_outcome(tmp_path):
    def measure(setting):
        yield Row("a", "N = 1", "us", 1.0)
        raise ZeroDivisionError("by nothing")

    outcome = run_experiment(Experiment("toy", "Toy", "nowhere", measure, conclude=lambda rows: ["done"]), Setting())
    content = json.loads(outcome.save(tmp_path)[0].read_text())
    assert content["error"] == "ZeroDivisionError: by nothing"
    assert len(content["rows"]) == 1 and content["conclusions"] == []


def test_a_rehearsal_runs_every_call_once_without_timing():
    ran = []
    seconds = Setting(rehearse=True).time([lambda: ran.append("a"), lambda: ran.append("b")])
    assert ran == ["a", "b"] and all(map(math.isnan, seconds))


def test_best_of_groups():
    rows = [Row("q", case, "x", value, backend=case) for case, value in (("A1", 2.0), ("A3", 3.0), ("A4", 9.0))]
    rows += [Row("q", "A2", "us", 50.0), Row("other", "A2", "x", 1.0), Row("q", "A2", "x", None, note="refused")]
    found = {(row.case, row.series): row for row in best_of_groups(rows, "x", {("A1-A3", "q"): 4.54})}
    assert set(found) == {("best of A1-A3", "q"), ("best of A1-A3", "other")}
    best = found["best of A1-A3", "q"]
    assert (best.value, best.paper, best.backend) == (3.0, 4.54, "A3") and found["best of A1-A3", "other"].paper is None
