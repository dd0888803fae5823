"""csrc/cuda/sm90/long_rows_float.cu: near the reference on a GPU; without a GPU, the composition of its machine
code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import cuda_checks as checks
import mixed_cases as mc
import pytest
import torch

from intflash.backends import select
from intflash.backends.cuda import BACKEND, long_rows_float
from intflash.backends.gpu import float_softmax
from intflash.backends.gpu.tensors import Statistics
from intflash.problem import Problem
from intflash.quant import Recipe

METHODS = tuple(long_rows_float.METHODS)
KERNEL = SimpleNamespace(
    unsupported=long_rows_float.kernel_unsupported,
    run=partial(float_softmax.run, launch=long_rows_float.float_launch),
)
KINDS = (("head", 128), ("block", 128), ("token", 128))  # of K's scales: KEY_SCALES 0, 1, 2


def cases(method: str) -> Iterator[tuple[str, Problem]]:
    for n, d in ((1, 64), (17, 16), (70, 32), (197, 64), (300, 80), (300, 96), (300, 112), (520, 128), (1024, 48)):
        yield f"{n} {d}", mc.problem(method, nq=n, nk=n, d=d)
    for k in ("tensor", "head", "token", "block"):
        for block in (64, 128, 256):
            recipe = Recipe(q="token", k=k, v="none", block_size=block)
            yield f"k {k} {block}", mc.problem(method, nq=200, nk=300, d=64, recipe=recipe)
            yield f"k {k} {block} causal", mc.problem(method, nq=300, nk=300, d=128, causal=0, recipe=recipe)
    for nq, nk, causal in ((40, 200, 160), (70, 50, -20), (1, 700, 0), (300, 520, 40)):
        yield f"causal {nq} {nk} {causal}", mc.problem(method, nq=nq, nk=nk, causal=causal)
    yield "gqa", mc.problem(method, heads=4, key_heads=2, nq=20)
    for dtype in (torch.bfloat16, torch.float16):
        yield f"{dtype} out", mc.problem(method, out_dtype=dtype)
    peaked = mc.problem(method, nq=200, nk=700, d=64)  # the row reference rises in most tiles
    yield "rising", _replaced(peaked, k=peaked.k * torch.linspace(0.1, 8, 700)[:, None])
    outlier = 1 + 60 * (torch.arange(700) == 333)[:, None]
    yield "an outlier among the keys' scales", _replaced(peaked, k=peaked.k * outlier)
    yield "all scores below 0", _replaced(peaked, q=peaked.q.abs() * 3, k=-peaked.k.abs())


def _replaced(p: Problem, **tensors: torch.Tensor) -> Problem:
    return Problem(**{name: tensors.get(name, getattr(p, name)) for name in p.__dataclass_fields__})


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_the_reference(method):
    torch.manual_seed(0)
    complaints = {name: mc.complaint(p, "cuda", KERNEL) for name, p in cases(method)}
    assert {name: text for name, text in complaints.items() if text} == {}


@pytest.mark.gpu
@checks.needs_device
def test_agrees_with_the_authors_outputs():
    for name, db in mc.golden_db("cuda", KERNEL, ("half",)).items():
        assert db > 70, name


def test_unsupported_problems():
    for problem, what in (
        (mc.problem("lite", out_dtype=torch.int8), "float output"),
        (mc.problem("lite", d=40), "multiple of 16"),
        (mc.problem("int_flash_half", keep=torch.ones(1, 1, 70, 150, dtype=torch.bool)), "keep"),
    ):
        assert what in long_rows_float.kernel_unsupported(problem)
    assert "triton" in long_rows_float.unsupported(mc.problem("lite", d=64))


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_long_rows_select_this_backend(method):
    torch.manual_seed(0)
    p = mc.problem(method, nq=70, nk=2048, d=64)
    assert mc.complaint(p, "cuda", BACKEND) is None
    there = mc.on_device(p, "cuda")
    assert select(there, None) is BACKEND


def _launch(method: str, d: int, k: str = "token", block: int = 128, causal: int | None = None, out=torch.float16):
    recipe = Recipe(q="token", k=k, v="none", block_size=block)
    p = mc.problem(method, nq=300, nk=300, d=d, causal=causal, recipe=recipe, out_dtype=out).quantized()
    output = torch.empty(1, 2, 300, d, dtype=out)
    return long_rows_float.float_launch(p, float_softmax.operands(p), output, Statistics(None, None))


@pytest.mark.parametrize("k,block", KINDS)
@pytest.mark.parametrize("d", (64, *(pytest.param(d, marks=pytest.mark.full) for d in (16, 128))))
def test_tensor_core_instructions_and_spills(d, k, block):
    """Integer products for the scores, float products for P V, and no local memory."""
    for causal in (None, 0):
        machine = checks.machine(_launch("lite", d, k, block, causal))
        assert machine.opcodes["IGMMA"] > 0 and machine.opcodes["HGMMA"] > 0
        assert machine.spills <= (12 if (d, k) == (128, "token") else 0)  # one or two registers, over half a tile


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("d", range(16, 129, 16))
def test_nothing_spills(method, d):
    for k, block in KINDS:
        for causal in (None, 0):
            for out in (torch.bfloat16, torch.float32):
                assert checks.machine(_launch(method, d, k, block, causal, out)).spills <= 12
