"""The suite of models' calls: its inputs and its calls, without a GPU."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from intflash.bench import gpu_attention, gpu_workloads
from intflash.bench.measure import sqnr
from intflash.cli import app

TINY = (
    gpu_workloads.ModelCall("tiny", 2, 4, 9, 16, nk=12, kv_heads=2),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="causal"),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="padding"),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="bias"),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="bias of windows"),
    gpu_workloads.ModelCall("tiny", 2, 4, 1, 16, nk=40, kv_heads=2, cache=True),
)


@pytest.mark.parametrize("call", TINY, ids=lambda call: call.shape)
def test_every_contender_computes_the_same_attention(call):
    tensors, mask = gpu_workloads.inputs(call, "cpu")
    causal, shared = call.mask == "causal", call.heads != call.key_heads
    want = scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=causal, enable_gqa=shared)
    ours = list(gpu_workloads.our_contenders(call, tensors, mask))
    assert {(method, variant) for method, variant, _ in ours} == {
        (method, variant)
        for method in gpu_workloads.METHODS
        for variant in (gpu_workloads.STATIC, gpu_workloads.DYNAMIC)
    }
    for method, variant, make in ours:
        backend, run = make()
        assert backend == "cpu" and sqnr(want.double(), run().double()) > 28, (method, variant)


def test_names_and_shapes_differ():
    assert len({call.name for call in gpu_workloads.CALLS}) == len(gpu_workloads.CALLS)
    assert set(gpu_workloads._QUICK) <= {call.name for call in gpu_workloads.CALLS}


def test_every_row_of_the_issue_is_there():
    names = {call.name for call in gpu_workloads.CALLS}
    rows = {f"A{i} batch {batch}" for i in range(1, 8) for batch in (1, 8, 64, 1024)}
    assert rows | {"Flux, SD3", "Wan", "Llama prefill", "Llama decode", "SDXL self", "Whisper encoder"} <= names


def fake_gpu(monkeypatch, timed=lambda runs, rounds: [1e-6] * len(runs)):
    """Lets the suite run on the CPU, with tiny calls and without times."""
    made = gpu_workloads.inputs
    monkeypatch.setattr(gpu_workloads, "CALLS", TINY)
    monkeypatch.setattr(gpu_workloads, "inputs", lambda call, device: made(call, "cpu"))
    monkeypatch.setattr(gpu_workloads, "time_calls", timed)
    monkeypatch.setattr(gpu_workloads, "compile_all", lambda calls, seconds: None)
    monkeypatch.setattr(gpu_attention, "environment", dict)
    for name in ("is_available", "synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: True)


def test_the_suite_writes_rows_as_they_come(monkeypatch, tmp_path):
    def timed(runs, rounds):
        if len(list(tmp_path.iterdir())):
            raise RuntimeError("the second workload fails")
        return [1e-6] * len(runs)

    fake_gpu(monkeypatch, timed)
    rows = gpu_workloads.run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"attention.json", "attention.csv", "attention.png"}
    records = json.loads((tmp_path / "attention.json").read_text())
    assert records["title"] == gpu_workloads.TITLE and len(records["rows"]) == len(rows)
    assert [row.note for row in rows[-len(TINY) + 1 :]] == ["RuntimeError: the second workload fails"] * (len(TINY) - 1)


def test_workloads_beyond_the_time_are_named(monkeypatch, tmp_path):
    fake_gpu(monkeypatch)
    rows = gpu_workloads.run(tmp_path, budget_s=0)
    assert len(rows) == len(TINY) and all("time of the suite was over" in row.note for row in rows)


def test_an_fp8_peer_gets_codes(monkeypatch):
    """A stand-in for FlashAttention-3, which takes tokens before heads."""
    shapes = []
    peer = types.ModuleType("fa3_fwd_interface")
    peer.flash_attn_func = lambda q, k, v, **options: shapes.append((q.shape, q.dtype, options["causal"]))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", peer)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    call = gpu_workloads.ModelCall("tiny", 2, 4, 9, 16, kv_heads=2, mask="causal")
    found = [
        c for c in gpu_workloads.contenders(call, *gpu_workloads.inputs(call, "cpu")) if c.variant == gpu_workloads.FP8
    ]
    assert [c.method for c in found] == ["FlashAttention-3 FP8"]
    found[0].make()[1]()
    assert shapes == [((2, 9, 4, 16), torch.float8_e4m3fn, True)]


def test_the_command_says_what_the_suite_needs():
    result = CliRunner().invoke(app, ["bench", "attention", "--suite", "workloads"])
    assert result.exit_code == 2 and "--device cuda" in result.output
