"""The quotients that the benchmarks report, and the source of their static scales. Times are given, nothing is
measured.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

import intflash
from intflash.bench import cpu_attention, gpu_attention
from intflash.bench import models as whole_models
from intflash.bench.workloads import Workload


@pytest.fixture
def gpu_case(monkeypatch):
    """A case whose inputs are `1 + seed` everywhere."""
    x = torch.ones(1, 1, 4, 16)
    monkeypatch.setattr(gpu_attention, "_inputs", lambda shape, seed: (x * (1 + seed),) * 3)
    return gpu_attention.GpuCase("tiny", x.shape, ("intflash",))


def test_static_scales_come_from_another_batch_than_the_timed_one(gpu_case):
    static = next(c for c in gpu_attention._contenders(gpu_case) if c.variant == gpu_attention.STATIC)
    _, recipe, inputs = static.make.args
    assert recipe.q_scale == pytest.approx(2 / 127) and inputs[0].max() == 1


def test_gpu_ratios_use_the_fastest_of_torch(gpu_case, monkeypatch):
    pytest.importorskip("triton")
    from intflash.bench import gpu_timing as timing

    times = {"SDPA cuDNN": 30e-6, "SDPA flash": 20e-6, "SDPA efficient": 15e-6, "intflash": 10e-6}
    contenders = [gpu_attention.GpuContender(name, gpu_attention.KERNEL, None) for name in times]
    running = [(c, "a backend", lambda: None, lambda: torch.ones(gpu_case.shape)) for c in contenders]
    monkeypatch.setattr(gpu_attention, "_running", lambda case: (running, []))
    monkeypatch.setattr(timing, "time_calls", lambda calls, rounds: list(times.values()))
    rows = {row.method: row for row in gpu_attention.measure_case(gpu_case)}
    ours = rows["intflash"]
    assert (ours.us, ours.ratio) == (pytest.approx(10), pytest.approx(1.5))
    assert ours.tops == pytest.approx(4 * 4 * 4 * 16 / 10e-6 / 1e12)
    assert rows["SDPA cuDNN"].ratio == pytest.approx(15 / 30)


@pytest.mark.skipif(not cpu_attention.cpu.instruction_sets(), reason="the native module was not built")
def test_cpu_ratios_compare_masked_with_masked(monkeypatch):
    def times(calls, *given, **how):
        return [1.0 + i for i in range(len(calls))]

    monkeypatch.setattr(cpu_attention, "time_interleaved", times)
    rows = cpu_attention._measure_one(Workload("A7", "swin", 2, 9, 8), 1, 0.0, [])
    microseconds = {row.series: row.microseconds for row in rows}
    assert list(microseconds.values()) == [1e6 * (1 + i) for i in range(len(rows))]
    masked = f"{cpu_attention.PEER}, {cpu_attention.MASKED}"
    for row in rows:
        peer = masked if row.series.endswith(cpu_attention.MASKED) else cpu_attention.PEER
        assert row.ratio == round(microseconds[peer] / row.microseconds, 2)


def test_models_are_calibrated_on_other_images_than_the_timed_ones(monkeypatch):
    class Enough(Exception):
        pass

    def calibrate(model, batches, *more, **options):
        raise Enough(torch.cat(list(batches)))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=lambda name: torch.nn.Linear(1, 1)))
    monkeypatch.setattr(intflash, "calibrate", calibrate)
    images, other = torch.zeros(1, 3, 8, 8), torch.ones(2, 3, 8, 8)
    with pytest.raises(Enough) as stopped:
        whole_models.build_variants("any", images, other)
    assert torch.equal(stopped.value.args[0], other)


def test_model_ratios_divide_the_float_models_time_by_ours(monkeypatch):
    calls = dict.fromkeys(("fp32", "intflash static"), lambda: torch.ones(1))
    monkeypatch.setattr(whole_models, "build_variants", lambda *given: (calls, 3))
    samples = {"fp32": [3.0, 3.0], "intflash static": [1.5, 1.5]}
    monkeypatch.setattr(whole_models, "_take_turns", lambda *given: samples)
    found = whole_models.measure("any", 6, "cpu", 2, lambda: None)
    assert found.ratios == {"intflash static / fp32": (2.0, 2.0, 2.0)}
    assert [(t.variant, t.images_per_s) for t in found.timings] == [("fp32", 2.0), ("intflash static", 4.0)]
