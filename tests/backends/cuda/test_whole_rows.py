"""csrc/cuda/sm80/whole_rows.cu: the reference's bits on a GPU; without a GPU, which calls it takes, and that its
machine code for every architecture is integer-only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import cuda_checks as checks
import integer_cases as ic
import pytest
import torch
from test_sm80 import ARCHITECTURES, FLOATS, GPUS

from benchmarks import sass
from intflash.backends.cuda import plans
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

METHODS = "intflash", "intflash_p8", "intflash_bfp"


def cases(method: str) -> Iterator[tuple[str, Problem]]:
    for nq, nk, d in (
        (197, 197, 64), (1, 1, 16), (70, 17, 32), (49, 50, 48), (16, 144, 32), (257, 256, 64), (257, 257, 64),
        (20, 288, 64), (300, 77, 80), (33, 33, 96), (40, 70, 128), (20, 20, 144),
    ):  # fmt: skip
        yield f"{nq} {nk} {d}", ic.codes(method, batch=2, nq=nq, nk=nk, d=d, return_lse=True)
    yield "dv", ic.codes(method, nq=70, nk=90, d=64, dv=32, return_lse=True)
    for out in (torch.int16, *FLOATS):
        yield f"out {out}", ic.codes(method, nq=40, nk=100, d=64, out_dtype=out)
    for amax in (1e-6, 400.0, 50000.0):
        yield f"amax {amax}", ic.codes(method, nq=70, nk=150, d=64, amax=amax, return_lse=True)
    yield "scales", ic.codes(method, heads=6, key_heads=2, nq=70, nk=150, kinds=("token", "head", "head"))
    yield "groups", ic.codes(method, batch=40, heads=8, key_heads=2, nq=30, nk=65, d=64, return_lse=True)
    yield from checks.spans(method, 70, 197, 64)
    x = torch.randint(-127, 128, (2, 101, 3, 3, 64), dtype=torch.int8)
    q, k, v = (QTensor(y.transpose(1, 2), torch.full((1, 1, 1, 1), 0.02), "tensor") for y in x.unbind(2))
    yield "packed", Problem(method, q, k, v, 0.125, out_dtype=torch.int8)
    padded = torch.full((2, 3, 64, 112), 99, dtype=torch.int8)
    keys_first = padded[..., :101].copy_(v.data.mT).mT
    yield "contiguous keys", Problem(method, q, k, QTensor(keys_first, v.scale, "tensor"), 0.125, out_dtype=torch.int8)
    static = Recipe(q_scale=2**-18, k_scale=0.02, v_scale=0.02)  # values far outside of the scale's range
    for dtype, d in itertools.product(FLOATS, (8, 40, 64, 72, 128)):
        n = 150 if d in (64, 72) else 65  # the registers do not hold all
        yield f"{dtype} static {d}", checks.floats(method, 2, n, d, dtype, static, return_lse=True)
        p = checks.floats(method, 3, 65, d, dtype, checks.OF_HEADS, return_lse=True)
        yield f"{dtype} heads {d}", replace(p, **{name: _tokens_first(getattr(p, name)) for name in "qkv"})
    yield "257 heads", checks.floats(method, 2, 257, 64, torch.float16, checks.OF_HEADS, return_lse=True)
    for dtype in FLOATS:
        yield f"{dtype} many heads", checks.floats(method, 80, 33, 64, dtype, checks.OF_HEADS, return_lse=True)
        yield f"{dtype} tensors", checks.floats(method, 2, 197, 64, dtype, checks.OF_TENSORS, return_lse=True)
        yield f"{dtype} to int8", checks.floats(method, 2, 100, 64, dtype, checks.OF_HEADS, out_dtype=torch.int8)
    long = checks.floats(method, 2, 1030, 32, torch.float16, checks.OF_HEADS)  # a pass finds the scales
    yield "many rows", replace(long, k=long.k[:, :, :77], v=long.v[:, :, :77])
    if method == "intflash_bfp":
        yield from _sinks(method)
        yield from _masks(method)


def _masks(method: str) -> Iterator[tuple[str, Problem]]:
    """Biases and bool masks of every broadcast shape, with absent keys and rows that have none. Biases are of floats,
    with 12 fraction bits, or codes of `quantize_bias`, with 20."""
    for nk, batch, heads, rows, keys, bits in (
        (49, 1, 2, 40, 49, 12),
        (132, 2, 1, 1, 132, 20),
        (280, 2, 2, 40, 280, 20),
        (70, 1, 1, 40, 1, 12),
    ):
        bias = torch.randint(-(8 << bits), 8 << bits, (batch, heads, rows, keys)).to(torch.int32)
        bias[torch.rand(bias.shape) < 0.1] = -(2**31)  # absent
        keep = torch.rand(batch, heads, rows, keys) < 0.6
        if rows > 1:
            bias[:, :, 3], keep[:, :, 5] = -(2**31), False
        shape = dict(batch=2, heads=2, nq=40, nk=nk, d=64, bias_fraction_bits=bits, return_lse=True)
        for name, masks in dict(bias=dict(bias=bias), keep=dict(keep=keep), both=dict(bias=bias, keep=keep)).items():
            yield f"{name} {nk}", ic.codes(method, **shape, **masks)
    p = checks.floats(method, 2, 197, 64, torch.float16, checks.OF_HEADS, return_lse=True)
    yield "keep, floats", replace(p, keep=torch.rand(1, 1, 1, 197) < 0.5)
    sinks = ic.sinks(method, 40.0, (0, 90, 91), n=200, d=64, nq=20)
    yield "keep, sinks", replace(sinks, keep=torch.rand(1, 1, 20, 200) < 0.5)


def _sinks(method: str) -> Iterator[tuple[str, Problem]]:
    """Sinks with and without a value, at gaps over which the others keep weights or not."""
    some, block = (0, 90, 91), tuple(range(128))
    for n, octaves, zeros in itertools.product((100, 200, 280), (5.0, 9.0, 40.0, 130.0), ((), some, block)):
        name = f"sinks {octaves} {n} {len(zeros)}"
        yield name, ic.sinks(method, octaves, tuple(z for z in zeros if z < n), n=n, d=64, nq=20, return_lse=True)
    keys_first = ic.sinks(method, 40.0, some, n=200, d=64, nq=20, out_dtype=torch.float32)
    v = torch.zeros(*keys_first.v.shape[:2], 64, 208, dtype=torch.int8)
    v[..., :200] = keys_first.v.data.mT
    yield "sinks, contiguous keys", replace(keys_first, v=replace(keys_first.v, data=v[..., :200].mT))
    for d, recipe in ((64, checks.OF_HEADS), (40, Recipe(q_scale=0.1, k_scale=0.1, v_scale=0.02))):
        p = checks.floats(method, 2, 197, d, torch.float16, recipe, return_lse=True)
        p.v[:, :, [0, 5, 127, 128, 196]] = 0
        yield f"sinks, floats {d}", p


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves every problem to this kernel."""
    monkeypatch.setattr(plans, "FIXED", dict(kernel="whole_rows"))


@pytest.mark.parametrize("architecture", GPUS)
@pytest.mark.parametrize("method", METHODS)
def test_every_case_is_served(method, architecture, monkeypatch):
    torch.manual_seed(0)
    only(monkeypatch)
    assert checks.unserved(cases(method), "whole_rows", GPUS[architecture]) == []


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_bits(method, monkeypatch):
    torch.manual_seed(0)
    only(monkeypatch)
    assert checks.differences(cases(method), "whole_rows") == {}


def _machine(method: str, n: int, d: int, dtype: torch.dtype, out: torch.dtype, architecture: str, batch: int = 1):
    more = dict(recipe=checks.OF_HEADS) if dtype.is_floating_point else {}
    p = checks.empty_problem(method, n, d, dtype, out, batch=batch, **more)
    launch = checks.attention_launch(p, gpu=GPUS[architecture], kernel="whole_rows")
    assert launch.program.file == "sm80/whole_rows.cu"
    return checks.machine(launch, architecture)


def spills_few_words(machine: sass.Machine, method: str, architecture: str) -> bool:
    """Whether a tile of rows, of a thousand and more instructions, reads and writes few spilled words, and all code so
    few that they are not K's or V's, which registers hold until their scales are found.
    """
    opcodes = [i.opcode for i in machine.instructions]
    rows = opcodes[opcodes.index("IMMA") :]  # before the first product are the loads of the head, for all its rows
    most = 12 if method == "intflash_bfp" else 10
    if method == "intflash_bfp" and architecture in ("sm_100", "sm_120"):
        most = 38  # ptxas needs some more registers there
    return sum(x in ("LDL", "STL") for x in rows) <= most and machine.spills <= 48


# ViT's in every test run
SHAPES = (
    (197, 64),
    *(
        pytest.param(*x, marks=pytest.mark.full)
        for x in ((65, 64), (144, 32), (256, 64), (257, 64), (288, 64), (224, 128))
    ),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n, d", SHAPES)
@pytest.mark.parametrize("method", checks.in_full_but(("intflash", "intflash_p8"), METHODS))  # the third compiles long
def test_integer_only(method, n, d, architecture):
    """No floating-point opcode between int8 input and integer output; few words spilled."""
    if (method, n, d) == ("intflash", 224, 128):
        pytest.skip("the registers do not hold its two digits")
    found = _machine(method, n, d, torch.int8, torch.int8, architecture)
    assert found.float_instructions == []
    assert spills_few_words(found, method, architecture)
    for dtype, batch in ((torch.float16, 500), (torch.float32, 1)):  # CTAs of four and of eight warps
        found = _machine(method, n, d, dtype, dtype, architecture, batch)
        assert spills_few_words(found, method, architecture)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n, d", ((49, 32), (196, 64), (257, 64)))
def test_masks_spill_little(n, d, architecture):
    p = checks.empty_problem("intflash_bfp", n, d, torch.float16, torch.float16, recipe=checks.OF_HEADS, batch=500)
    bias = torch.empty(1, 1, n, n, dtype=torch.int32, device="meta")
    for masks in (dict(bias=bias), dict(keep=bias.bool())):
        launch = checks.attention_launch(replace(p, **masks), gpu=GPUS[architecture], kernel="whole_rows")
        assert spills_few_words(checks.machine(launch, architecture), "intflash_bfp", architecture)


def test_which_calls_it_takes(monkeypatch):
    def kernel(gpu: str, n: int, d: int, method: str = "intflash_p8", **more) -> str:
        monkeypatch.setattr(plans, "gpu_of", lambda device: GPUS[gpu])
        return plans.find_kernel(checks.empty_problem(method, n, d, torch.float16, torch.float16, **more)).kernel

    for gpu in ("sm_80", "sm_86", "sm_89", "sm_120"):
        assert [kernel(gpu, n, 64) for n in (64, 65, 197, 256, 288, 289)] == ["window", *["whole_rows"] * 4, "any_rows"]
        assert kernel(gpu, 197, 64, causal=0) == "any_rows" and kernel(gpu, 197, 64, "intflash_online") == "any_rows"
        assert kernel(gpu, 197, 64, "intflash") == "whole_rows" and kernel(gpu, 256, 256) == "any_rows"
        of_blocks = [kernel(gpu, n, 64, "intflash_bfp") for n in (49, 65, 197, 288, 289)]
        assert of_blocks == ["window", *["whole_rows"] * 3, "any_rows"]
    of_hopper = {(197, 64): "short_rows", (256, 64): "short_rows", (304, 80): "short_rows", (257, 96): "long_rows",
                 (272, 128): "long_rows", (197, 144): "whole_rows", (337, 64): "long_rows"}  # fmt: skip
    assert {shape: kernel("sm_90a", *shape) for shape in of_hopper} == of_hopper
    keep = torch.empty(1, 1, 1, 197, dtype=torch.bool, device="meta")
    assert kernel("sm_90a", 197, 64, "intflash_bfp", keep=keep) == "whole_rows"
    of_blocks = [kernel("sm_90a", n, 64, "intflash_bfp") for n in (49, 65, 336, 337, 641)]
    assert of_blocks == ["window", *["short_rows"] * 2, *["long_rows"] * 2]
    assert kernel("sm_90a", 197, 64, "intflash_bfp", causal=0) == "long_rows"
    of_256 = {(64, 1): "short_rows", (64, 300): "short_rows", (128, 1): "long_rows", (96, 300): "whole_rows"}
    assert {x: kernel("sm_90a", 256, x[0], "intflash_bfp", batch=x[1]) for x in of_256} == of_256
    keep = torch.empty(1, 1, 1, 256, dtype=torch.bool, device="meta")
    assert kernel("sm_90a", 256, 64, "intflash_bfp", keep=keep, batch=300) == "whole_rows"
    codes = checks.empty_problem("intflash_p8", 256, 144)
    assert plans.find_kernel(codes).kernel == "whole_rows"


def _launches(batch: int, nq: int, **more):
    p = checks.empty_problem("intflash_p8", nq, 64, torch.float16, torch.float16, recipe=checks.OF_HEADS, batch=batch)
    return checks.planned(p, gpu=GPUS["sm_80"], kernel="whole_rows").launches


def test_few_heads_are_taken_by_several_ctas():
    """A head's 13 tiles of 16 rows are for one CTA where there are many heads, else for up to four, of 8 warps where no
    multiprocessor has two CTAs.
    """
    grids = {batch: [(x.grid[0], x.threads) for x in _launches(batch, 197)] for batch in (1, 60, 108, 500)}
    assert grids == {1: [(8, 256)], 60: [(240, 128)], 108: [(216, 128)], 500: [(1000, 128)]}
