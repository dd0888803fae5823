"""csrc/cuda/sm80/window.cu: the reference's bits on a GPU; without a GPU, that its machine code is
integer-only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import cuda_checks as checks
import integer_cases as ic
import pytest
import torch

from intflash.backends.cuda import backend, plans
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

# warps per window, rows per tile of a warp, windows per CTA
SPLITS = (1, 16, 1), (4, 16, 1), (8, 8, 1), (2, 16, 1), (1, 16, 3)
FLOAT_KV = (torch.float16, torch.bfloat16, torch.float32)
METHODS = "intflash", "intflash_p8", "intflash_bfp"


def _masks(nq: int, nk: int, heads: int) -> dict[str, dict[str, torch.Tensor]]:
    bias = torch.randint(-(1 << 22), 1 << 22, (1, heads, nq, nk), dtype=torch.int32)
    keep = torch.rand(4, 1, nq, nk) < 0.5
    keep[1] = False
    keep[:, :, nq // 2] = False
    return {
        "bias": dict(bias=bias),
        "absent keys": dict(bias=bias.masked_fill(torch.rand(bias.shape) < 0.3, ic.ABSENT)),
        "bias of windows": dict(bias=bias[:, :1].repeat(4, 1, 1, 1)),
        "bias and keep": dict(bias=bias, keep=keep),
        "bias of keys": dict(bias=bias[:, :, :1]),
        "bias of rows": dict(bias=bias[..., :1]),
        "keep": dict(keep=keep),
        "keep of keys": dict(keep=keep[:1, :, :1]),
    }


def cases(method: str) -> Iterator[tuple[str, Problem]]:
    sizes = [(n, n, d) for n in (1, 16, 17, 49, 64) for d in (16, 32, 48, 64)]
    for nq, nk, d in [*sizes, (37, 59, 32), (1, 50, 32), (49, 1, 32), (64, 52, 32), (33, 64, 64)]:
        yield f"{nq} {nk} {d}", ic.codes(method, batch=3, nq=nq, nk=nk, d=d, return_lse=True)
    window = dict(batch=8, heads=3, nq=49, nk=49)
    for dtype in (torch.int16, *FLOAT_KV):
        yield f"out {dtype}", ic.codes(method, out_dtype=dtype, **window)
    for amax in (1e-6, 400.0, 50000.0):
        yield f"amax {amax}", ic.codes(method, amax=amax, return_lse=True, **window)
        yield f"amax {amax} bias", ic.codes(method, amax=amax, **window, **_masks(49, 49, 3)["bias"])
    yield "scales", ic.codes(method, heads=4, key_heads=2, nq=49, nk=49, kinds=("token", "head", "head"))
    yield "out scale", ic.codes(method, out_scale=torch.full((1, 1, 1, 1), 0.001), **window)
    for nq, nk in ((49, 49), (17, 50), (64, 64)):
        for name, masks in _masks(nq, nk, 3).items():
            yield f"{nq} {nk} {name}", ic.codes(method, batch=8, heads=3, nq=nq, nk=nk, return_lse=True, **masks)
    if method == "intflash_bfp":  # whose float biases have 12 fraction bits
        bias = torch.randint(-(1 << 14), 1 << 14, (1, 3, 49, 49), dtype=torch.int32)
        bias.masked_fill_(torch.rand(bias.shape) < 0.3, ic.ABSENT)
        yield "bias of floats", ic.codes(method, bias=bias, bias_fraction_bits=12, return_lse=True, **window)
    packed = torch.randint(-127, 128, (5, 49, 3, 3, 32), dtype=torch.int8)
    p = ic.codes(method, **window)
    q, k, v = (QTensor(x.transpose(1, 2), p.q.scale, "tensor") for x in packed.unbind(2))
    yield "packed", Problem(method, q, k, v, 0.2, out_dtype=torch.int8)
    for nq, d in ((49, 32), (64, 64), (16, 16)):
        masks = _masks(nq, nq, 4)["bias and keep"]
        yield f"dynamic of heads {nq} {d}", checks.floats(method, 4, nq, d, torch.float16, checks.OF_HEADS, **masks)
    for dtype in FLOAT_KV:
        for scale in (1e-12, 1e-4, 0.02, 1000.0):
            static = Recipe(q_scale=scale, k_scale=scale, v_scale=scale)
            yield f"{dtype} static {scale}", checks.floats(method, 4, 49, 32, dtype, static, out_dtype=torch.int8)
        heads = Recipe(v="head", q_scale=0.02, k_scale=0.015, v_scale=torch.tensor([0.02, 0.03]))
        yield f"{dtype} heads", checks.floats(method, 4, 49, 32, dtype, heads)
        yield f"{dtype} dynamic", checks.floats(method, 4, 49, 32, dtype, checks.OF_TENSORS, 1e-3)
        for recipe in (checks.OF_TENSORS, checks.OF_HEADS):
            p = checks.floats(method, 4, 49, 32, dtype, recipe, out_dtype=torch.int8)
            yield f"{dtype} dynamic, int8, {recipe.q}", p
        yield f"{dtype} dynamic of heads", checks.floats(method, 4, 49, 32, dtype, checks.OF_HEADS, return_lse=True)
        yield f"{dtype} masked", checks.floats(method, 4, 49, 32, dtype, heads, **_masks(49, 49, 4)["bias and keep"])
    if method == "intflash_bfp":
        yield from _sinks(method)


def _sinks(method: str) -> Iterator[tuple[str, Problem]]:
    """Sinks with and without a value, with masks, and floats whose values are 0."""
    some = (0, 16, 30, 48)
    for n, octaves, zeros in itertools.product((49, 64), (5.0, 40.0, 130.0), ((), some, tuple(range(64)))):
        name = f"sinks {octaves} {n} {len(zeros)}"
        zeros = tuple(z for z in zeros if z < n)
        yield name, ic.sinks(method, octaves, zeros, n=n, d=32, out_dtype=torch.int16, return_lse=True)
    for name, masks in _masks(49, 49, 3).items():
        yield f"sinks, {name}", ic.sinks(method, 26.0, some, batch=4, heads=3, n=49, d=64, return_lse=True, **masks)
    yield "sinks, float32", ic.sinks(method, 40.0, some, n=49, d=48, out_dtype=torch.float32, return_lse=True)
    for dtype in FLOAT_KV:
        p = checks.floats(method, 2, 49, 32, dtype, checks.OF_HEADS, return_lse=True)
        p.v[:, :, list(some)] = 0
        yield f"sinks, {dtype}", p


@pytest.mark.parametrize("method", METHODS)
def test_every_case_is_served(method):
    torch.manual_seed(0)
    assert checks.unserved(cases(method), "window", checks.HOPPER) == []


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bits(method, split, monkeypatch):
    """All supported cases in one test, so that few processes compile."""
    torch.manual_seed(0)
    monkeypatch.setattr(plans, "FIXED", dict(window_split=split))
    assert checks.differences(cases(method), "window") == {}


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_contiguous_keys(method):
    p = ic.on_device(ic.codes(method, batch=8, heads=3, nq=49, nk=49), "cuda")
    padded = torch.full((8, 3, 32, 128), 99, dtype=torch.int8, device="cuda")[..., :49].copy_(p.v.data.mT).mT
    there = replace(p, v=replace(p.v, data=padded))
    assert plans.find_kernel(there).kernel == "window"
    assert torch.equal(checks.BACKEND.run(there).out, checks.BACKEND.run(p).out)


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("count", (8, 64, 4096))
def test_overlapping_launches(split, count, monkeypatch):
    """Launches overlap, but each sees all that the previous one wrote, and overwrites nothing that it still reads."""
    torch.manual_seed(1)
    monkeypatch.setattr(plans, "FIXED", dict(window_split=split))
    first = torch.randint(-127, 128, (count, 3, 49, 32), dtype=torch.int8, device="cuda")
    results = []
    for waits in (True, False):
        buffers = first.clone(), torch.empty_like(first)
        scale = torch.full((1, 1, 1, 1), 0.02, device="cuda")
        codes = [QTensor(b, scale, "tensor") for b in buffers]
        problems = [Problem("intflash_p8", x, x, x, 0.3, out_dtype=torch.int8) for x in codes]
        fill = backend.planned(problems[0], only_constants=True)
        fill.run()
        for i in range(20):
            backend.planned(problems[i % 2], out=buffers[1 - i % 2], constants=fill.constants).run()
            if waits:
                torch.cuda.synchronize()
        results.append(buffers[0].cpu())
    assert torch.equal(*results)


def _launch(method: str, split, n: int = 49, d: int = 32, dtype=torch.int8, out=torch.int8, **more):
    masks = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    p = checks.empty_problem(method, n, d, dtype, out, batch=8, heads=3, **masks)
    return checks.attention_launch(p, window_split=split)


SOME = [pytest.param(s, id=str(s), marks=[pytest.mark.full] if i > 0 else []) for i, s in enumerate(SPLITS[:4])]


@pytest.mark.parametrize("split", SOME)
@pytest.mark.parametrize("method", checks.in_full_but(("intflash_p8",), METHODS))
def test_integer_only(method, split):
    """No floating-point opcode between int8 input and integer output; integer tensor-core products; no spills, but for
    some words of `intflash_bfp`, which has code for keys without a value too."""
    sizes, dtypes = ((49, 32), (64, 64)), (torch.int8, torch.int16)
    for (n, d), out, name in itertools.product(sizes, dtypes, (None, "bias and keep")):
        machine = checks.machine(_launch(method, split, n, d, out=out, **(_masks(n, n, 3)[name] if name else {})))
        assert machine.float_instructions == [], (n, d, out, name)
        assert machine.spills <= (30 if method == "intflash_bfp" else 0), (n, d, out, name, machine.registers)
        assert machine.opcodes["IMMA"] > 0


@pytest.mark.full
@pytest.mark.parametrize("split", SOME)
@pytest.mark.parametrize("method", METHODS)
def test_floats_do_not_spill(method, split):
    for (n, d), (dtype, name) in itertools.product(
        ((49, 32), (64, 64)), ((torch.float16, None), (torch.float16, "bias and keep"), (torch.bfloat16, None))
    ):
        for recipe in (checks.OF_TENSORS, checks.OF_HEADS):  # the kernel finds the scales of heads
            masks = _masks(n, n, 3)[name] if name else {}
            machine = checks.machine(_launch(method, split, n, d, dtype, dtype, recipe=recipe, **masks))
            most = 14 if method == "intflash_bfp" else 0
            assert machine.spills <= most, (dtype, d, name, recipe.q, machine.registers)


def test_float_output_has_float_instructions():
    """The negative control: with float output the same check finds float instructions."""
    assert checks.machine(_launch("intflash_p8", SPLITS[0], out=torch.float16)).float_instructions


def test_which_problems_are_windows():
    for n, d, kernel in ((64, 64, "window"), (65, 64, "short_rows"), (49, 80, "short_rows"), (49, 24, "any_rows")):
        assert plans.find_kernel(checks.empty_problem("intflash", n, d)).kernel == kernel, (n, d)
    for method, options in (("intflash_online", {}), ("intflash", dict(causal=0))):
        assert plans.find_kernel(checks.empty_problem(method, 49, 32, **options)).kernel == "long_rows"


def test_each_window_has_its_warps():
    """Few windows are shared by several warps each, of which none is without rows."""
    for batch, heads, nq, warps, tile in (
        (1, 3, 49, 7, 8), (1, 3, 17, 3, 8), (1, 3, 16, 2, 8), (100, 3, 49, 4, 16), (100, 3, 16, 1, 16),
        (1000, 3, 49, 1, 16),
    ):  # fmt: skip
        launch = checks.attention_launch(checks.empty_problem("intflash", nq, 32, batch=batch, heads=heads))
        assert launch.grid == (batch * heads, 1, 1) and launch.threads == 32 * warps, (batch, nq)
        assert checks.macros(launch)["TILE_ROWS"] == str(tile)
