"""The suite of models' calls: its inputs and its calls, without a GPU."""

from __future__ import annotations

import pytest
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from intflash.bench import gpu_workloads
from intflash.bench.measure import sqnr
from intflash.cli import app

TINY = (
    gpu_workloads.ModelCall("tiny", 2, 4, 9, 16, nk=12, kv_heads=2),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="causal"),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="padding"),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="bias"),
    gpu_workloads.ModelCall("tiny", 2, 2, 9, 16, mask="bias of windows"),
)


@pytest.mark.parametrize("call", TINY, ids=lambda call: call.shape)
def test_every_contender_computes_the_same_attention(call):
    tensors, mask = gpu_workloads.inputs(call, "cpu")
    causal, shared = call.mask == "causal", call.heads != call.key_heads
    want = scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=causal, enable_gqa=shared)
    ours = list(gpu_workloads.our_calls(call, tensors, mask))
    assert {(method, variant) for method, variant, *_ in ours} == {
        (method, variant)
        for method in gpu_workloads.METHODS
        for variant in (gpu_workloads.STATIC, gpu_workloads.DYNAMIC)
    }
    for method, variant, backend, run in ours:
        assert backend == "cpu" and sqnr(want.double(), run().double()) > 28, (method, variant)


def test_names_and_shapes_differ():
    assert len({call.name for call in gpu_workloads.CALLS}) == len(gpu_workloads.CALLS)
    assert set(gpu_workloads._QUICK) <= {call.name for call in gpu_workloads.CALLS}


def test_the_command_says_what_the_suite_needs():
    result = CliRunner().invoke(app, ["bench", "attention", "--suite", "workloads"])
    assert result.exit_code == 2 and "--device cuda" in result.output
