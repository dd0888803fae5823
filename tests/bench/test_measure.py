"""Errors against float64, timing, and what is recorded about the machine."""

import math
import time

import pytest
import torch

from intflash.bench import measure
from intflash.bench.measure import METRICS, exact_attention, sqnr, time_interleaved


def test_exact_attention_equals_torch_in_blocks(monkeypatch):
    q, k, v = (torch.randn(4, 2, n, 8) for n in (33, 20, 20))
    bias, keep = torch.randn(1, 2, 33, 20), torch.rand(2, 1, 33, 20) > 0.2
    mask = torch.where(keep.repeat(2, 1, 1, 1), bias, -math.inf).double()
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    monkeypatch.setattr(measure, "ROW_BLOCK", 4 * 2 * 20 * 7)  # 7 rows per block
    assert torch.allclose(exact_attention(q, k, v, bias=bias, keep=keep), expected)


def test_every_metric_on_a_worked_example():
    ref, out = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    values = {name: metric(ref.double(), out) for name, metric in METRICS.items()}
    assert values["SQNR dB"] == pytest.approx(20.0)
    assert values["MSE"] == pytest.approx(0.125)
    assert values["MRE of means %"] == pytest.approx(100 * 0.25 / 3.5)
    assert values["MRE elementwise %"] == pytest.approx(6.25)
    assert values["MRE of norms %"] == pytest.approx(10.0)
    assert values["MRE of maximum %"] == pytest.approx(6.25)
    assert values["cosine"] == pytest.approx(27 / (5 * math.hypot(3, 4.5)))


def test_sqnr_of_equal_and_of_broken_tensors():
    x = torch.ones(4)
    assert sqnr(x, x) == math.inf
    assert sqnr(x, x * math.nan) == -math.inf
    assert sqnr(x * 0, x) == -math.inf


def test_time_interleaved_orders_calls():
    short, long = time_interleaved([lambda: None, lambda: sum(range(20_000))], budget_s=0.05)
    assert 0 < short < long


def test_a_turn_repeats_a_short_call():
    made = []
    time_interleaved([lambda: made.append(1)], budget_s=0.0, rounds=1, turn_s=0.0)
    assert len(made) == 3  # two before
    made.clear()
    time_interleaved([lambda: made.append(1)], budget_s=0.0, rounds=1, turn_s=1.0)
    assert len(made) == 1002  # at most 1000 a turn


def test_calls_take_turns_and_the_median_turn_counts():
    order, now = [], 0.0
    costs = {"a": iter([1.0, 1.0, 3.0, 5.0, 100.0]), "b": iter([2.0] * 5)}

    def run(name):
        nonlocal now
        order.append(name)
        now += next(costs[name])

    calls = [lambda: run("a"), lambda: run("b")]
    assert time_interleaved(calls, budget_s=0.0, rounds=3, clock=lambda: now, turn_s=0.0) == [5.0, 2.0]
    assert order[4:] == ["a", "b"] * 3


def test_a_turn_of_many_calls_gives_the_time_of_one():
    now = 0.0

    def run():
        nonlocal now
        now += 2.0

    assert time_interleaved([run], budget_s=0.0, rounds=3, clock=lambda: now, turn_s=7.0) == [2.0]


def test_a_rest_between_turns_is_not_timed():
    start = time.perf_counter()
    (seconds,) = time_interleaved([lambda: None], budget_s=0.0, rounds=3, turn_s=0.0, rest_s=0.02)
    assert time.perf_counter() - start > 0.06 > seconds


def test_environment_names_machine_versions_and_commit():
    facts = measure.environment()
    assert facts["cpu"] and facts["versions"]["torch"] == torch.__version__
    assert {"commit", "date", "torch_threads"} <= facts.keys()
