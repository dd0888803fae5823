"""The measurement of context parallelism, tried with gloo at sizes that say nothing of time."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import context_parallel_model
from benchmarks.context_parallel import WORKLOADS, overlap
from documents import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SCRIPT = ["-m", "benchmarks.context_parallel", "--device", "cpu", "--tiny", "--workloads", "Llama prefill"]


def _torchrun(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([*TORCHRUN, *SCRIPT, *options], capture_output=True, text=True, cwd=ROOT, timeout=400)


def test_overlap():
    kernels = [
        ("ncclDevKernel_AllGather", 0, 10), ("attention", 4, 20), ("ncclDevKernel_AllGather", 30, 10),
        ("quantize", 20, 6), ("quantize", 35, 1),
    ]  # fmt: skip
    events = [dict(cat="kernel", name=name, ts=ts, dur=dur) for name, ts, dur in kernels]
    assert overlap([*events, dict(cat="cpu_op", name="nccl", ts=0, dur=99)]) == dict(
        nccl_us=20, others_us=23, hidden_us=7
    )


def test_operations():
    assert WORKLOADS["Wan 1.3B, 480p"].operations == pytest.approx(6.594e12, rel=1e-3)
    assert WORKLOADS["Llama prefill"].operations == pytest.approx(8.796e12, rel=1e-3)


@pytest.mark.full
def test_the_script_measures_everything(tmp_path):
    done = _torchrun("--out", str(tmp_path / "found"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (tmp_path / "found.rank0.trace.json").exists() and torch.__version__ in str(found["environment"])
    ours = [row for row in found["rows"] if "equal_bits" in row]
    assert len(ours) == 8 and all(row["equal_bits"] and row["ms"] > 0 for row in ours)
    assert all(row["bytes_counted"] == row["bytes_formula"] for row in ours)
    others = {row["contender"] for row in found["rows"]} - {row["contender"] for row in ours}
    assert {"intflash, one GPU", "FP16 SDPA, one GPU", "FP16 SDPA, ulysses", "torch context_parallel"} <= others


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, said", [("mismatch", "the ranks must make the same call: scale is"), ("kill", "exitcode: -9")]
)
def test_a_fault_ends_the_run(fault, said):
    done = _torchrun("--fault", fault)
    assert done.returncode != 0 and said in done.stderr and "was not seen" not in done.stderr


def test_the_formula_beside_measured_times_is_the_models():
    page, rates = (ROOT / "docs" / "design" / "distributed.md").read_text(), context_parallel_model.rates()
    work = context_parallel_model.Workload("Wan 1.3B at 720p", 12, 12, 75_600, False)
    model = context_parallel_model
    ours, four = (f"{1e3 * model.ours_gather(work, ranks, rates):.1f}" for ranks in (2, 4))
    usp, ring = (f"{1e3 * time(work, 4, rates):.1f}" for time in (model.usp, model.torch_ring))
    assert f"{ours} ms on two GPUs, measured 35.8, and {four} on four" in page
    assert f"FP16 by Ulysses {usp}, measured 17.5, torch's ring {ring}, measured 18.6" in page


def test_the_tables_of_the_design_page_are_the_models():
    page = (ROOT / "docs" / "design" / "distributed.md").read_text()
    for work in context_parallel_model.WORKLOADS:
        assert work.name in page and "\n".join(context_parallel_model.table(work)) in page
