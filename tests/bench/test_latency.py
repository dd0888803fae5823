"""Latency experiments: what is timed, what it is compared with, and how a refusal is shown."""

from dataclasses import dataclass

import pytest
import torch

from benchmarks.latency import CODE_CALL, EXPERIMENTS, FLOAT_CALL, KERNEL, Latency, LatencyContender, speedup
from intflash import QTensor, Recipe
from intflash.bench.experiments import Setting
from intflash.bench.workloads import InputCase, normal, random_case, uniform

FAST = Setting(budget_s=0.01)


def test_rows_are_times_and_speedups_over_the_baseline():
    contenders = [
        LatencyContender("torch"),
        LatencyContender("ours", "intflash"),
        LatencyContender("half", "int_flash_half"),
    ]
    plan = Latency(contenders, [random_case("tiny", 16, normal())], ("torch",), paper={("ours", "tiny", "torch"): 2.0})
    rows = {(row.series, row.metric): row for row in plan(FAST)}
    assert rows["torch", "speedup over torch"].value == 1
    ratio = rows["torch", FLOAT_CALL].value / rows["ours", FLOAT_CALL].value
    assert abs(rows["ours", "speedup over torch"].value / ratio - 1) < 1e-9
    assert rows["ours", "speedup over torch"].paper == 2.0
    assert rows["ours", CODE_CALL].value > 0 and rows["ours", CODE_CALL].backend
    assert ("half", CODE_CALL) not in rows  # it keeps V in floating point


def test_float_calls_get_floats_and_code_calls_get_codes():
    calls = LatencyContender("ours", "intflash").calls(random_case("tiny", 16, normal()), Setting(), False)
    assert all(isinstance(x, QTensor) for x in calls[CODE_CALL][1].args)
    assert all(isinstance(x, torch.Tensor) for x in calls[FLOAT_CALL][1].args)


def test_speedups_compare_the_same_kind_of_call(monkeypatch):
    seconds = {("torch", FLOAT_CALL): 8.0, ("torch", KERNEL): 6.0, ("ours", FLOAT_CALL): 4.0, ("ours", KERNEL): 2.0}
    made = dict.fromkeys((FLOAT_CALL, KERNEL), ("a backend", lambda: None))
    monkeypatch.setattr(LatencyContender, "calls", lambda self, *given: made)
    monkeypatch.setattr(Setting, "times", lambda self, calls: seconds)
    contenders = [LatencyContender("torch"), LatencyContender("ours", "intflash")]
    plan = Latency(contenders, [random_case("tiny", 16, normal())], ("torch",))
    rows = {(row.series, row.metric): row.value for row in plan(Setting())}
    assert rows["ours", speedup("torch")] == 2 and rows["ours", speedup("torch", KERNEL)] == 3


def test_an_unsupported_contender_is_a_row_with_a_reason():
    case = random_case("wide", 16, uniform(-500, 500))
    rows = list(Latency([LatencyContender("torch"), LatencyContender("qflash", "qflash")], [case], ("torch",))(FAST))
    assert [row.series for row in rows if row.value is None] == ["qflash"]


def test_quick_keeps_the_first_cases():
    cases = [random_case(f"n{n}", n, normal()) for n in (4, 8, 16)]
    rows = list(Latency([LatencyContender("torch")], cases, ("torch",), quick=1)(Setting(quick=True, budget_s=0.01)))
    assert {row.case for row in rows} == {"n4"}


def test_every_paper_speedup_has_a_cell():
    for experiment in EXPERIMENTS:
        plan = experiment.measure
        if isinstance(plan, Latency):
            labels, names = {c.label for c in plan.contenders}, {c.name for c in plan.cases}
            assert set(plan.baselines) <= labels
            assert all(a in labels and name in names and b in plan.baselines for a, name, b in plan.paper)
            assert all(label in labels and set(cases.split("-")) <= names for cases, label in plan.best)


class Here:
    """A tensor that stays on the CPU wherever it is sent."""

    def __init__(self, x):
        self.x = x

    def to(self, device, dtype):
        return self.x.to(dtype)


@dataclass(frozen=True)
class CaseHere(InputCase):
    def inputs(self, seed=0):
        return tuple(map(Here, super().inputs(seed)))


def test_launches_are_timed_beside_whole_calls_on_a_gpu(monkeypatch):
    kernels = pytest.importorskip("intflash.bench.gpu_launches")
    made = []

    def make_kernel(name, *inputs, backend, recipe):
        made.append((name, backend, recipe))
        return kernels.Kernel("a backend", lambda: None, lambda: None, lambda: None)

    monkeypatch.setattr(kernels, "make_kernel", make_kernel)
    recipe = Recipe(q="token", k="head", v="head")
    contenders = [LatencyContender("torch"), LatencyContender("ours", "intflash", recipe)]
    papers = {("ours", "tiny", "torch"): 2.0}
    plan = Latency(contenders, [CaseHere("tiny", (1, 1, 16, 8), normal())], ("torch",), paper=papers, kernels=True)
    rows = {(row.series, row.metric): row for row in plan(Setting(device="cuda", rehearse=True))}
    assert made == [("intflash", None, recipe)]
    assert rows["ours", KERNEL].backend == "a backend" and rows["ours", CODE_CALL].backend == "cpu"
    for metric in (FLOAT_CALL, KERNEL):
        assert rows["ours", speedup("torch", metric)].paper == 2.0
    assert KERNEL not in {row.metric for row in plan(Setting(rehearse=True))}
