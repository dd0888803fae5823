"""The parts of the GPU experiments that can be tested without a GPU."""

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

import benchmarks
from intflash.bench import gpu_timing, peers

pytest.importorskip("triton")

KERNELS = """
import json
import interpreter  # before any kernel
import torch
from benchmarks.figure4_kernels import variants
from intflash.bench.gpu_launches import make_kernel
from intflash.bench.measure import exact_attention, sqnr
torch.manual_seed(0)
q, k, v = (torch.rand(1, 1, 80, 32) * 8 - 4 for _ in "qkv")
reference, found = exact_attention(q, k, v), {}
def describe(kernel):
    before = sqnr(reference, kernel.read())
    kernel.read().zero_()
    kernel.launch()
    return kernel.backend, before, sqnr(reference, kernel.read())
for name in ("intflash", "qflash", "ivit", "int_flash_half", "lite", "lite, convert"):
    found[name] = describe(make_kernel(name, q, k, v, backend="triton"))
found["by torch"] = describe(make_kernel("intflash", q, k, v, backend="torch"))
for name, kernel in variants(q, k, v).items():
    found[name] = kernel.backend, 99, sqnr(reference, kernel.read())
print(json.dumps(found))
"""


def test_recorded_launches_compute_the_output_again():
    """In Triton's interpreter, in a separate process."""
    folder = pathlib.Path(__file__).parents[1] / "backends" / "triton"
    command = [sys.executable, "-W", "ignore", "-c", KERNELS]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(benchmarks.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    others = {name for name, (backend, *_) in found.items() if backend != "triton"}
    assert others == {"by torch", "V0 (fp16)", "V1 (int_flash_half)", "V2 (int_flash_full)", "V4 (intflash_online)"}
    assert all(before > 15 and after > 15 for _, before, after in found.values()), found


NCU = """import 3.0
==PROF== Connected to process 2106 (/usr/bin/python3.12)
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
{}
==PROF== Disconnected from process 2106
"""


def test_marker_kernels_separate_ncu_lines():
    from benchmarks import tensor_pipe as profile

    imma, hmma = profile.METRICS
    kernels = [("spin_kernel(long)", 0, 0), ("flash_fwd<64, 128>", 0, 17.32), ("spin_kernel(long)", 0, 0),
               ("small", 0.5, 0), ("attention", 10.89, 0)]  # fmt: skip
    lines = []
    for i, (name, *values) in enumerate(kernels):
        lines += [f'"{i}","2106","{name}","{m}","%","{x}"' for m, x in zip((imma, hmma), values, strict=True)]
    assert profile.parse(NCU.format("\n".join(lines))) == [(0.0, 17.32), (10.89, 0.0)]
    assert profile.parse("==ERROR== no permission\n") == []


def test_missing_ncu_is_reported(monkeypatch):
    from benchmarks import tensor_pipe as profile
    from benchmarks.energy import UTILIZATION
    from intflash.bench.experiments import Setting, run_experiment

    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    outcome = run_experiment(UTILIZATION, Setting(device="cuda"))
    assert outcome.rows == [] and "ncu (Nsight Compute) is not installed" in outcome.error


def test_table2_shows_the_papers_numbers_beside_ours(monkeypatch):
    from benchmarks import tensor_pipe as profile
    from benchmarks.energy import UTILIZATION
    from intflash.bench.experiments import Setting, run_experiment

    readings = [
        ("qattn", "A2", profile.Reading("triton", (3.68, 7.37))),
        ("qflash", "A2", profile.Reading("triton", (4.0, 0.0))),
        ("intflash", "A2", "RuntimeError: no"),
    ]
    monkeypatch.setattr(profile, "run", lambda methods, workloads, seed: iter(readings))
    rows = run_experiment(UTILIZATION, Setting(device="cuda")).rows
    found = {(row.series, row.metric): (row.value, row.paper) for row in rows}
    assert found["qattn", "IMMA, % of peak"] == (3.68, 3.75) and found["qattn", "HMMA, % of peak"] == (7.37, 7.51)
    assert found["qflash", "IMMA, % of peak"] == (4.0, 8.0) and ("qflash", "HMMA, % of peak") not in found
    assert rows[-1].value is None and rows[-1].note == "RuntimeError: no"


def test_peers_are_those_that_can_be_imported(monkeypatch):
    for name in peers.PEERS:
        monkeypatch.setitem(sys.modules, name, None)  # none is installed
    assert list(peers.installed()) == []
    fake = types.ModuleType("sageattention")
    fake.sageattn = lambda q, k, v: q
    monkeypatch.setitem(sys.modules, "sageattention", fake)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", types.ModuleType("comfy_kitchen"))  # one without attention
    assert dict(peers.installed()) == {"sageattention": fake.sageattn}


def test_a_peer_is_a_contender_of_the_attention_benchmark(monkeypatch):
    import torch

    from intflash.bench import gpu_attention

    fake = types.ModuleType("sageattention")
    fake.sageattn = lambda q, k, v: q + 1
    monkeypatch.setitem(sys.modules, "sageattention", fake)
    x = torch.zeros(1, 1, 4, 16)
    monkeypatch.setattr(gpu_attention, "_inputs", lambda shape, seed: (x, x, x))
    case = gpu_attention.GpuCase("tiny", x.shape, ("intflash",))
    peer = next(c for c in gpu_attention._contenders(case) if c.method == "sageattention")
    backend, call, read = peer.make()
    assert (backend, peer.variant) == ("peer", "float16") and torch.equal(read(), x + 1) and torch.equal(call(), x + 1)


def test_overlapping_kernels_share_the_time_of_all():
    times = [("a", 10.0, 20.0), ("b", 14.0, 30.0), ("c", 35.0, 40.0), ("a", 36.0, 41.0)]
    assert gpu_timing.shares(times) == {gpu_timing.IDLE: 5.0, "a": 11.0, "b": 10.0, "c": 5.0}


def test_energy_is_read_from_the_device_that_computes(monkeypatch):
    """NVML's indices ignore CUDA_VISIBLE_DEVICES, its UUIDs do not."""
    energies = iter((5000, 9000))
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(energies) if handle == "GPU-12-ab" else 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_timing, "seconds_once", lambda call: 0.5)
    monkeypatch.setattr(gpu_timing.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        gpu_timing.torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="12-ab")
    )
    assert gpu_timing.joules_of_calls(lambda: None, 1.0)[0] == 2.0
