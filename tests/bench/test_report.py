"""The page: whole, self-contained, and safe to open."""

import json
import re

import pytest

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


def test_reasons_are_told_in_words(page, tmp_path):
    assert "&lt;b&gt;other&lt;/b&gt; on A2: 5 &lt; 6" in page
    (tmp_path / "failed.json").write_text(json.dumps({"title": "No luck", "error": "too <slow>", "rows": []}))
    page = build(read_results([tmp_path]))
    assert "No luck" in page and "Did not finish: too &lt;slow&gt;" in page and page.count("<section") == 3


def test_text_is_escaped(page):
    assert "<b>other</b>" not in page and "5 &lt; 6" in page


def test_whole_models_are_rows(tmp_path):
    from intflash.bench.models import Outcome, Timing, save

    timed = Outcome(
        "vit_patch16", 8, [Timing("fp16", 100.0, 99.0, 101.0)], {"intflash / fp16": (1.5, 1.4, 1.6)}, 12, 30
    )
    save([timed, Outcome("swin", 8, [], {}, 0, float("nan"), error="its process ended with 1")], tmp_path / "models")
    page = build(read_results([tmp_path]))
    for text in ("Whole models", "vit batch 8", "intflash / fp16", "1.5", "its process ended with 1"):
        assert text in page
