"""`python -m benchmarks all`: its plan, jobs that fail or exceed their time, and the page."""

import json
import os
import time

import pytest

from benchmarks import suite
from benchmarks.registry import EXPERIMENTS
from benchmarks.suite import Job, JobPlan, plan, run_all
from intflash.bench.report import build, read_results


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_experiment_of_a_device_is_planned_once(tmp_path, device):
    found = plan(tmp_path, device, jobs=4)
    names = [job.name for job in (*found.together, *found.alone) if job.result is not None]
    assert len(names) == len(set(names))
    assert set(names) == {e.name for e in EXPERIMENTS if device in e.devices} | {"attention", "demo-vit", "demo-swin"}
    timed = {e.name for e in EXPERIMENTS if device in e.devices and e.timed}
    assert timed <= {job.name for job in found.alone}


def test_rehearsals_compile_what_is_timed_on_a_gpu(tmp_path):
    found = plan(tmp_path, "cuda", quick=True, jobs=4)
    rehearsed = {job.name.removeprefix("rehearsal of ") for job in found.together if job.result is None}
    assert rehearsed == {job.name for job in found.alone}
    assert not any(str(tmp_path) in job.arguments for job in found.together if "demo" in job.name)


def test_models_run_only_on_request(tmp_path):
    assert [job.name for job in plan(tmp_path, "cuda", models=True).alone][-1] == "models"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Modules that can be run with ``python -m``, by name and source text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return make


def test_jobs_that_end_badly_are_results_with_the_reason(tmp_path, scripts, monkeypatch):
    monkeypatch.setattr(suite, "GRACE_S", 1.0)
    out = tmp_path / "out"
    good, slow, bad = (out / f"{name}.json" for name in ("good", "slow", "bad"))
    result = {"title": "Good", "rows": [{"a": 1}]}
    scripts("good", f"open({str(good)!r}, 'w').write('''{json.dumps(result)}''')")
    scripts("slow", "import time; time.sleep(60)")
    scripts("bad", "raise ValueError('no such thing')")
    together = [Job("slow", ("slow",), 2.0, slow, "Slow one"), Job("bad", ("bad",), 30.0, bad, "Bad one")]
    alone = [Job("good", ("good",), 30.0, good), Job("late", ("good",), 30.0, out / "late.json", "Late one")]
    start = time.monotonic()
    ended = run_all(JobPlan(together, alone[:1]), out, seconds=60, jobs=2)
    assert time.monotonic() - start < 30
    reasons = {end.job.name: end.reason for end in ended}
    assert reasons["good"] is None and "stopped after 2 s" in reasons["slow"] and "no such thing" in reasons["bad"]
    run_all(JobPlan([], alone[1:]), out, seconds=0, jobs=1)
    page = build(read_results([out]))
    for text in ("Slow one", "stopped after 2 s", "Bad one", "ended with 1: ValueError: no such thing", "Good"):
        assert text in page
    assert "Late one" in page and "the time of the whole run was used up" in page
    assert "How this page was made" in page


def test_results_of_an_earlier_run_are_removed(tmp_path, scripts):
    out = tmp_path / "out"
    out.mkdir()
    stale = out / "bad.json"
    stale.write_text(json.dumps({"title": "Bad", "rows": [{"a": 1}]}))
    scripts("bad", "raise SystemExit(3)")
    run_all(JobPlan([], [Job("bad", ("bad",), 30.0, stale, "Bad one")]), out, seconds=60, jobs=1)
    content = json.loads(stale.read_text())
    assert content["rows"] == [] and content["error"] == "ended with 3: without a word"


def test_an_incomplete_result_gets_the_reason(tmp_path, scripts):
    half = tmp_path / "out" / "half.json"
    text = json.dumps({"title": "Half", "rows": [{"a": 1}]})
    scripts("half", f"open({str(half)!r}, 'w').write({text!r})\nraise SystemExit('enough')")
    run_all(JobPlan([], [Job("half", ("half",), 30.0, half)]), half.parent, seconds=60, jobs=1)
    content = json.loads(half.read_text())
    assert content["rows"] == [{"a": 1}] and content["error"] == "ended with 1: enough"


def test_a_result_with_a_reason_is_kept(tmp_path, scripts):
    told = tmp_path / "out" / "told.json"
    text = json.dumps({"title": "Told", "rows": [{"series": "a", "note": "no device"}]})
    scripts("told", f"open({str(told)!r}, 'w').write({text!r})\nraise SystemExit(1)")
    (end,) = run_all(JobPlan([], [Job("told", ("told",), 30.0, told)]), told.parent, seconds=60, jobs=1)
    assert end.reason.startswith("ended with 1") and told.read_text() == text


def test_a_stopped_experiment_keeps_its_rows(tmp_path, scripts):
    out = tmp_path / "out"
    text = """
import sys, time
from benchmarks import __main__ as cli
from intflash.bench import experiments
def measure(setting):
    yield experiments.Row("a", "b", "us", 1.0)
    time.sleep(60)
slow = experiments.Experiment("slow", "Slow one", "nowhere", measure)
cli.EXPERIMENTS = (slow,)
sys.argv = ["benchmarks", "run", "-e", "slow", "--out", {out!r}]
cli.app()
"""
    scripts("slow", text.replace("{out!r}", repr(str(out))))
    job = Job("slow", ("slow",), 12.0, out / "slow.json", "Slow one")
    (end,) = run_all(JobPlan([], [job]), out, seconds=60, jobs=1)
    content = json.loads(job.result.read_text())
    assert "stopped after 12 s" in end.reason and "stopped before its end" in content["error"]
    assert [row["value"] for row in content["rows"]] == [1.0]
