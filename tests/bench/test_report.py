"""The report page: complete, self-contained, and safe to open."""

import json
import re

import pytest

from intflash import InputError
from intflash.bench.experiments import Experiment, Figure, Row, Setting, run_experiment
from intflash.bench.report import build, read_results

ROWS = (
    Row("intflash", "A2", "SQNR dB", 37.5, paper=36.0, backend="cpu"),
    Row("<b>other</b>", "A2", "SQNR dB", None, note="5 < 6"),
    Row("intflash", "A2", "MSE", 4.4e-4),
    Row("<b>other</b>", "A2", "MSE", float("inf")),
)


@pytest.fixture
def page(tmp_path):
    experiment = Experiment("toy", "A toy", "Paper, Table 9", lambda s: iter(ROWS), (Figure("SQNR dB"),), notes="Note.")
    run_experiment(experiment, Setting()).save(tmp_path / "accuracy")
    plain = {"title": "Plain", "rows": [{"kernel": "k1", "us": 5.25, "ok": True}]}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    (tmp_path / "scales.json").write_text("{}")  # no result: left out
    return build(read_results([tmp_path]))


def test_page_holds_tables_figures_and_provenance(page):
    assert page.count("<section") == 2
    for text in ("A toy", "Paper, Table 9", "Note.", "37.50", "(36.00)", "4.40e-04", "inf", "refused", "k1", "5.25"):
        assert text in page
    assert page.count("data:image/png;base64,") == 1
    assert "machine and versions" in page and "torch:" in page


def test_page_needs_no_network_and_fits_a_phone(page):
    assert "width=device-width" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page) and "<script" not in page


def test_reasons_are_shown_as_text(page, tmp_path):
    assert "&lt;b&gt;other&lt;/b&gt; on A2: 5 &lt; 6" in page
    (tmp_path / "failed.json").write_text(json.dumps({"title": "No luck", "error": "too <slow>", "rows": []}))
    page = build(read_results([tmp_path]))
    assert "No luck" in page and "Did not finish: too &lt;slow&gt;" in page and page.count("<section") == 3


def test_text_is_escaped(page):
    assert "<b>other</b>" not in page and "5 &lt; 6" in page


def test_whole_models_are_rows(tmp_path):
    from intflash.bench.models import ModelOutcome, Timing, save

    timed = ModelOutcome(
        "vit_patch16", 8, [Timing("fp16", 100.0, 99.0, 101.0)], {"intflash / fp16": (1.5, 1.4, 1.6)}, 12, 30
    )
    save(
        [timed, ModelOutcome("swin", 8, [], {}, 0, float("nan"), error="its process ended with 1")], tmp_path / "models"
    )
    page = build(read_results([tmp_path]))
    for text in ("Whole models", "vit batch 8", "intflash / fp16", "1.5", "its process ended with 1"):
        assert text in page


def test_each_experiment_appears_once_per_machine_by_its_latest_run(tmp_path):
    def save(folder, date, cpu, value):
        facts = {"date": date, "cpu": cpu}
        (tmp_path / folder).mkdir()
        rows = [{"series": "intflash", "case": "A2", "metric": "us", "value": value}]
        content = {"name": "toy", "title": "A toy", "environment": facts, "rows": rows}
        (tmp_path / folder / "toy.json").write_text(json.dumps(content))

    save("new", "2026-02-01", "one", 2.5)
    save("old", "2026-01-01", "one", 1.5)
    save("other", "2026-01-01", "two", 3.5)
    kept = [section.content["rows"][0]["value"] for section in read_results([tmp_path])]
    assert kept == [2.5, 3.5]


def test_the_page_opens_with_a_summary(tmp_path):
    rows = [
        {"workload": name, "threads": threads, "series": series, "ratio": ratio}
        for name, threads, series, ratio in (
            ("A1", 1, "torch float32 SDPA", 1.0), ("A1", 1, "intflash, int8 in and out", 2.0),
            ("A1", 1, "intflash_p8, int8 in and out", 3.0), ("A2", 1, "intflash_p8, int8 in and out", 5.0),
            ("A2", 2, "intflash_p8, int8 in and out", 9.0),
        )
    ]  # fmt: skip
    facts = {"cpu": "Some CPU", "instruction_sets": ["avx2", "generic"]}
    (tmp_path / "attention.json").write_text(json.dumps({"environment": facts, "rows": rows}))
    page = build(read_results([tmp_path]))
    cells = "<td>Some CPU (avx2)</td>"
    cells += "<td>int8 in and out</td><td>torch float32</td><td>3.00</td><td>4.00</td><td>5.00</td>"
    assert cells in page and page.index(cells) < page.index("<nav>")


def test_a_file_that_is_not_json_is_named(tmp_path):
    for text in ("{", "[" * 100_000):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(InputError, match="expected JSON in .*broken.json"):
            read_results([tmp_path])


@pytest.mark.parametrize(
    "content",
    [
        {"rows": [1]},
        {"rows": ["a"]},
        {"rows": [{"a": 1}], "environment": 3},
        {"rows": [{"method": "a"}], "float_top1": 1.0},
        {"rows": [{"series": "a", "case": [], "metric": "dB"}]},
        {"rows": [{"a": 1}], "name": ["a"]},
    ],
    ids=str,
)
def test_a_result_of_another_form_is_refused_by_name(tmp_path, content):
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="expected a result as intflash writes it in .*other.json"):
        build(read_results([tmp_path]))
