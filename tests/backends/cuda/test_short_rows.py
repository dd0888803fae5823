"""csrc/cuda/sm90/short_rows.cu: the reference's bits on a GPU; without a GPU, that its machine code is integer-only."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import replace

import cuda_checks as checks
import integer_cases as ic
import pytest
import torch
from cuda_checks import BITS
from hypothesis import given, settings
from hypothesis import strategies as st

from intflash.backends.cuda import plans
from intflash.backends.gpu.tensors import GRID_LIMIT, key_major
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

METHODS = (*BITS, "intflash_bfp")
FLOAT_KV = (torch.float16, torch.bfloat16, torch.float32)
# Warpgroups per CTA, tiles of 64 rows per CTA, CTAs per multiprocessor, heads with one CTA each: one warpgroup and
# several, one tile per CTA and several, warpgroups without a tile, some heads divided.
SPLITS = (1, 1, 2, 0), (1, 4, 2, 0), (2, 2, 1, 0), (2, 1, 1, 0), (2, 3, 1, 0), (1, 1, 2, 1), (1, 2, 2, 3)


def contiguous_keys(p: Problem) -> Problem:
    """Returns V as the quantizer writes it, with rows padded by values that must not be used."""
    (b, h, n, d), keys = p.v.data.shape, -(-p.v.data.shape[2] // 16) * 16
    v = torch.full((b, h, d, keys), 99, dtype=torch.int8)[..., :n].copy_(p.v.data.mT).mT
    assert key_major(v, keys)
    return replace(p, v=replace(p.v, data=v))


def cases(method: str) -> Iterator[tuple[str, Problem]]:
    for nq, nk, d in [
        *((n, n, 64) for n in (65, 80, 100, 128, 129, 193, 197, 208, 224, 226, 257, 272)),
        *((100, n, 64) for n in (288, 303, 325, 336)), *((70, n, 80) for n in (197, 224, 257, 288, 304)),
        *((150, 150, d) for d in (16, 32, 48, 80)),
        (100, 100, 96), (300, 97, 64), (66, 197, 64), (1, 197, 64), (197, 70, 32), (136, 70, 64),
        (65, 70, 128), (8, 16, 64), (200, 257, 32), (300, 241, 48),
    ]:  # fmt: skip
        yield f"{nq} {nk} {d}", ic.codes(method, batch=2, nq=nq, nk=nk, d=d, return_lse=True)
    vit = dict(batch=2, heads=3, nq=197, nk=197, d=64)
    for dtype in (torch.int16, *FLOAT_KV):
        yield f"out {dtype}", ic.codes(method, out_dtype=dtype, **vit)
    for amax in (1e-6, 400.0, 50000.0):
        yield f"amax {amax}", ic.codes(method, amax=amax, return_lse=True, **vit)
    yield "scales", ic.codes(method, heads=4, key_heads=2, nq=150, nk=150, d=64, kinds=("token", "head", "head"))
    for scale in (1e-2, 1e-3, 1e-9):  # s_V / s_O above 1, 2^5 and 2^23
        yield f"out scale {scale}", ic.codes(method, out_scale=torch.full((1, 1, 1, 1), scale), **vit)
    for nk in (257, 258, 336):  # every p of a row is the largest one
        p = ic.codes(method, nq=72, nk=nk, d=64, return_lse=True)
        yield f"equal scores {nk}", replace(p, q=replace(p.q, data=torch.zeros_like(p.q.data)))
    yield from checks.spans(method, 197, 197, 64)
    yield from checks.spans(method, 66, 100, 32)
    # all scores below 0, each times 2^k: some warps of the remainder rows have no chunk of 16 keys
    for nk in (16, 40, 100):
        x = ic.codes(method, batch=2, nq=66, nk=nk, d=64, amax=400.0, return_lse=True)
        below = (replace(y, data=sign * y.data.abs().clamp_min(1)) for y, sign in ((x.q, 1), (x.k, -1)))
        yield f"below zero {nk}", replace(x, **dict(zip("qk", below, strict=True)))
    packed = torch.randint(-127, 128, (2, 197, 3, 3, 64), dtype=torch.int8)
    p = ic.codes(method, **vit)
    q, k, v = (QTensor(x.transpose(1, 2), p.q.scale, "tensor") for x in packed.unbind(2))
    yield "packed", Problem(method, q, k, v, 0.125, out_dtype=torch.int8)
    for n, d in ((70, 64), (130, 64), (197, 64), (208, 64), (224, 64), (336, 64), (257, 80), (70, 128), (150, 32)):
        p = ic.codes(method, heads=4, key_heads=2, batch=2, nq=n, nk=n, d=d, return_lse=True)
        yield f"contiguous keys {n} {d}", contiguous_keys(p)
    yield "contiguous keys 130 197", contiguous_keys(ic.codes(method, batch=3, nq=130, nk=197, d=64))
    for nk in (65, 257):
        many = ic.codes(method, batch=45, heads=3, nq=65, nk=nk, d=64)
        yield f"contiguous keys {nk}, many heads", contiguous_keys(many)
    for n, d in ((197, 64), (65, 80), (224, 64), (257, 64), (240, 48), (325, 64), (257, 80), (16, 128)):
        yield f"dynamic of heads {n} {d}", checks.floats(method, 2, n, d, torch.float16, checks.OF_HEADS)
    views = torch.randn(2, 197, 3, 3, 64).half()
    views[:, :, 1, 2], views[:, :, 2, 0] = 0, 1e-7  # maxima of 0 and of a subnormal number
    views = [x.transpose(1, 2) for x in views.unbind(2)]
    yield "dynamic of heads, views", Problem(method, *views, 0.125, recipe=checks.OF_HEADS, out_dtype=torch.float16)
    for n, d in ((197, 64), (100, 96), (70, 32)):
        for recipe in (checks.OF_TENSORS, checks.OF_HEADS):
            p = checks.floats(method, 40, n, d, torch.float16, recipe, out_dtype=torch.int8)
            yield f"dynamic, int8, {recipe.q} {n} {d}", p
    yield "dynamic, views", Problem(method, *views, 0.125, recipe=checks.OF_TENSORS, out_dtype=torch.float16)
    for dtype in FLOAT_KV:  # the largest possible codes, and ties
        halves = ((torch.randint(-254, 255, (2, 3, 197, 64)) / 2 * unit).to(dtype) for unit in (1.0, 2**-9, 2**-20))
        yield f"dynamic ties {dtype}", Problem(method, *halves, 0.125, recipe=checks.OF_TENSORS, out_dtype=torch.int8)
    for dtype in FLOAT_KV:
        for scale in (1e-12, 1e-7, 1e-4, 0.02, 1000.0):
            static = Recipe(q_scale=scale, k_scale=scale, v_scale=scale)
            yield f"{dtype} static {scale}", checks.floats(method, 2, 150, 64, dtype, static, out_dtype=torch.int8)
        heads = Recipe(v="head", q_scale=0.02, k_scale=0.015, v_scale=torch.tensor([0.02, 0.03]))
        yield f"{dtype} heads", checks.floats(method, 2, 150, 64, dtype, heads)
        yield f"{dtype} dynamic", checks.floats(method, 2, 150, 64, dtype, checks.OF_TENSORS, 1e-3)
        yield f"{dtype} dynamic of heads", checks.floats(method, 2, 150, 64, dtype, checks.OF_HEADS, return_lse=True)
    yield from _biased(method)
    if method == "intflash_bfp":
        yield from _valueless(method)


def _valueless(method: str) -> Iterator[tuple[str, Problem]]:
    """Sinks with and without a value, at gaps over which the others keep weights or not, in some heads or in all."""
    some, many = (0, 90, 91, 196), tuple(range(150))
    sizes = (66, 70), (150, 20), (197, 197), (257, 130), (336, 70)
    for (n, nq), octaves, zeros in itertools.product(sizes, (5.0, 40.0, 130.0), (some, many)):
        name = f"sinks {octaves} {n} {len(zeros)}"
        yield name, ic.sinks(method, octaves, tuple(z for z in zeros if z < n), n=n, d=64, nq=nq, return_lse=True)
    for out in (torch.int16, torch.float32):
        yield f"sinks, {out}", ic.sinks(method, 40.0, some, n=200, d=64, nq=70, out_dtype=out)
    yield "sinks, contiguous keys", contiguous_keys(ic.sinks(method, 40.0, some, n=200, d=64, nq=20))
    yield "sinks, gqa", ic.sinks(method, 8.0, some, heads=4, key_heads=2, n=197, d=32, nq=20, return_lse=True)
    p = ic.codes(method, heads=4, key_heads=2, nq=150, nk=150, d=64, kinds=("token", "head", "head"), return_lse=True)
    p.v.data[:, 1, [0, 77, 149]] = 0  # of one head alone
    yield "no value, tokens", p
    for recipe in (checks.OF_TENSORS, checks.OF_HEADS, Recipe(q_scale=0.1, k_scale=0.1, v_scale=0.02)):
        p = checks.floats(method, 2, 197, 64, torch.float16, recipe, return_lse=True)
        p.v[:, 1, [0, 5, 127, 128, 196]] = 0
        yield f"no value, floats {recipe.q} {recipe.q_scale}", p
    p = ic.codes(method, batch=2, heads=2, nq=100, nk=100, d=64, bias_fraction_bits=12, return_lse=True)
    p.v.data[:, :, 3:40] = 0
    bias = torch.randint(-(1 << 16), 1 << 16, (1, 2, 100, 100), dtype=torch.int32)
    gone = bias.masked_fill(torch.rand(bias.shape) < 0.2, ic.ABSENT)
    gone[0, 0, 5:9], gone[0, 0, 9:12, :40], gone[0, 0, 12:15, 40:] = ic.ABSENT, ic.ABSENT, ic.ABSENT
    yield "no value, absent", replace(p, bias=gone)
    yield "no value, absent, 20 bits", replace(p, bias=gone, bias_fraction_bits=20)
    for reach in (1 << 14, 1 << 17, 1 << 20, 1 << 30):  # of 12 fraction bits, as a float bias has
        bias = torch.randint(-reach, reach, (1, 3, 196, 196), dtype=torch.int32)
        p = ic.codes(method, heads=3, nq=196, nk=196, d=64, bias=bias, bias_fraction_bits=12, return_lse=True)
        yield f"bias of floats {reach}", p


def _biased(method: str) -> Iterator[tuple[str, Problem]]:
    """Biases that 32-bit exponents hold and larger ones, absent keys and rows without keys, for any axes."""
    for n, d, reach in itertools.product((80, 196, 197, 224), (64, 32), (1 << 22, 1 << 25, 1 << 28)):
        if n * d == 224 * 64 and method != "intflash_p8":
            continue  # its registers do not suffice
        bias = torch.randint(-reach, reach, (2, 3, n, n), dtype=torch.int32)
        p = ic.codes(method, batch=4, heads=3, nq=n, nk=n, d=d, bias=bias, return_lse=True)
        yield f"bias {n} {d} {reach}", p
        gone = bias.masked_fill(torch.rand(bias.shape) < 0.2, ic.ABSENT)
        gone[0, 1, 5:40] = ic.ABSENT
        yield f"absent {n} {d} {reach}", replace(p, bias=gone)
    for shape in ((1, 1, 100, 196), (2, 3, 1, 196), (2, 1, 100, 196)):
        bias = torch.randint(-(1 << 22), 1 << 22, shape, dtype=torch.int32)
        yield f"bias of shape {shape}", ic.codes(method, batch=2, heads=3, nq=100, nk=196, d=64, bias=bias)
    bias = torch.randint(-(1 << 22), 1 << 22, (1, 4, 196, 196), dtype=torch.int32)
    for amax in (1e-6, 50.0, 400.0, 50000.0):  # scores that 32-bit exponents hold, and larger ones
        p = ic.codes(method, heads=4, key_heads=2, nq=196, nk=196, d=64, amax=amax, bias=bias, return_lse=True)
        yield f"bias, amax {amax}", p
    p = ic.codes(method, heads=4, key_heads=2, nq=196, nk=196, d=64, kinds=("token", "head", "head"), bias=bias)
    yield "bias, tokens", p
    yield "bias, contiguous keys", contiguous_keys(ic.codes(method, heads=4, nq=196, nk=196, d=64, bias=bias))
    for batch, recipe in ((2, checks.OF_TENSORS), (75, checks.OF_TENSORS), (2, checks.OF_HEADS)):
        yield (
            f"bias of floats {batch} {recipe.q}",
            checks.floats(method, batch, 196, 64, torch.float16, recipe, bias=bias),
        )


@pytest.mark.parametrize("method", METHODS)
def test_every_case_is_served(method):
    torch.manual_seed(0)
    assert checks.unserved(cases(method), "short_rows", checks.HOPPER) == []


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("split", (None, *SPLITS), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bits(method, split, monkeypatch):
    torch.manual_seed(0)
    if split is not None:
        monkeypatch.setattr(plans, "FIXED", dict(row_split=split, exp_32bit=1))
    assert checks.differences(cases(method), "short_rows") == {}


def _cross(method: str, nq: int, nk: int, batch=1, heads=20, device="meta") -> Problem:
    q, k, v = (torch.randn(batch, heads, n, 64, device=device).half() for n in (nq, nk, nk))
    return Problem(method, q, k, v, 0.125, recipe=checks.OF_HEADS, out_dtype=torch.float16)


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("cluster", (2, 3, 5, 8))
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_scales_that_a_cluster_finds(method, cluster, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(plans, "FIXED", dict(cluster=cluster))
    for nq, nk in ((2500, 77), (1100, 3), (520, 197)):
        p = _cross(method, nq, nk, 2, 3, "cpu")
        for x in (p.q, p.k, p.v):  # each head's largest query is in another CTA's part
            for head in range(6):
                x[head // 3, head % 3, head * (x.shape[2] - 1) // 5, head] = 20.0 + head
        assert "CLUSTER" in checks.macros(checks.attention_launch(p, gpu=checks.HOPPER, cluster=cluster))
        assert checks.complaint(p, checks.BACKEND.run(ic.on_device(p, "cuda"))) is None, (nq, nk)


@pytest.mark.parametrize(
    "batch, heads, nq, cluster",
    ((2, 10, 4096, "5"), (1, 28, 4096, "4"), (1, 14, 8192, "8"), (2, 10, 1024, None), (1, 80, 1024, None)),
)
def test_a_cluster_finds_the_scales_of_many_queries(batch, heads, nq, cluster):
    """In one launch, whose CTAs are a head's."""
    launches = checks.planned(_cross("intflash_p8", nq, 77, batch, heads), gpu=checks.HOPPER).launches
    assert len(launches) == 1 and checks.macros(launches[0]).get("CLUSTER") == cluster
    assert cluster is None or launches[0].grid[2] == int(cluster)
    if cluster == "5":
        assert checks.machine(launches[0]).spills == 0


@pytest.mark.parametrize("heads, nq", ((4, 4096), (16, 4096), (40, 4096), (20, 2048), (80, 2048)))
def test_many_queries_whose_clusters_would_be_slower_have_a_pass_for_their_scales(heads, nq):
    assert len(checks.planned(_cross("intflash_p8", nq, 77, 1, heads), gpu=checks.HOPPER).launches) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("heads", (20, 80, 128))
def test_many_queries_of_a_head_are_divided_among_the_multiprocessors(method, heads):
    launch = checks.attention_launch(_cross(method, 4096, 77, 1, heads), gpu=checks.HOPPER, head_amax_in_kernel=0)
    processors = -(-math.prod(launch.grid) // int(checks.macros(launch)["CTAS_PER_SM"]))
    assert processors >= 100


def _launch(method: str, n: int, d: int, *args, split=None, **more):
    p = checks.empty_problem(method, n, d, *args, **more)
    assert plans.find_kernel(p).kernel == "short_rows"
    return checks.attention_launch(p, **({} if split is None else dict(row_split=split)))


@pytest.mark.parametrize("out", checks.in_full_but((torch.int8,), (torch.int8, torch.int16)), ids=str)
@pytest.mark.parametrize("method", checks.in_full_but(("intflash_p8",), METHODS))
def test_integer_only(method, out):
    """No floating-point opcode between int8 input and integer output; integer tensor-core products; no spills."""
    for (n, d), major, batch in itertools.product(((197, 64), (130, 32)), (False, True), (2, 80)):
        launch = _launch(method, n, d, torch.int8, out, major, batch=batch)
        assert checks.macros(launch)["TMA"] == str(int(major and batch == 80))
        machine = checks.machine(launch)
        assert machine.float_instructions == [], (n, d, major, batch)
        assert machine.spills == 0, (n, d, major, batch, machine.registers)
        assert machine.opcodes["IGMMA"] > 0


@pytest.mark.parametrize(
    "recipe",
    (
        pytest.param(checks.OF_TENSORS, id="dynamic"),
        pytest.param(Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02), id="static", marks=pytest.mark.full),
    ),
)
@pytest.mark.parametrize("method", checks.in_full_but(("intflash_p8",), METHODS))
@pytest.mark.parametrize("dtype", checks.COMPILED_FLOATS, ids=str)
def test_floats_do_not_spill(method, dtype, recipe):
    for (n, d), split in itertools.product(((197, 64), (80, 96)), (None, (2, 4, 1, 0))):
        batch = 2 if split else 80
        launch = _launch(method, n, d, dtype, dtype, split=split, batch=batch, recipe=recipe)
        assert checks.machine(launch).spills == 0, (n, d, split)


@pytest.mark.parametrize("n, d", ((128, 128), (96, 96), (224, 64), (256, 64)))
def test_large_batches_do_not_spill(n, d):
    launch = _launch("intflash_p8", n, d, torch.int8, torch.int8, True, batch=200)
    assert checks.macros(launch)["EXP_32BIT"] == "1"
    assert checks.machine(launch).spills == 0


@pytest.mark.parametrize(
    "n, d, words",
    ((80, 128, 20), *(pytest.param(*x, marks=pytest.mark.full) for x in ((96, 128, 0), (112, 112, 0), (96, 112, 4)))),
)
def test_large_batches_of_wide_floats_spill_few_words(n, d, words):
    """A few words cost less than a third CTA gains."""
    static = Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)
    for recipe in (static, checks.OF_TENSORS):
        launch = _launch("intflash_p8", n, d, torch.float16, torch.float16, batch=200, recipe=recipe)
        assert checks.machine(launch).spills <= words


@pytest.mark.parametrize(
    "n, dtype, words",
    (
        (197, torch.float16, 55),
        *(
            pytest.param(*x, marks=pytest.mark.full)
            for x in ((197, torch.int8, 32), (128, torch.float16, 25), (128, torch.int8, 0))
        ),
    ),
)
def test_a_third_cta_spills_few_words_where_all_heads_run_at_once(n, dtype, words):
    static = Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)
    launch = _launch("intflash", n, 64, dtype, dtype, batch=32, heads=12, recipe=static)  # three heads for each
    assert checks.macros(launch)["CTAS_PER_SM"] == "3"
    assert checks.machine(launch).spills <= words
    launch = _launch("intflash", n, 64, dtype, dtype, batch=44, heads=12, recipe=static)  # four for each
    assert checks.macros(launch)["CTAS_PER_SM"] == "2"


@pytest.mark.parametrize("shape", checks.in_full_but(((336, 64),), ((272, 64), (304, 64), (336, 64), (304, 80))))
def test_the_longest_rows_spill_few_words(shape):
    """They take one product with K where long rows take two, which is worth more."""
    static = Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)
    for recipe, batch in itertools.product((static, checks.OF_HEADS), (1, 32)):
        launch = _launch("intflash_bfp", *shape, torch.float16, torch.float16, batch=batch, heads=16, recipe=recipe)
        assert checks.machine(launch).spills <= 30


def test_heads_are_divided_where_whole_ones_would_wait():
    """300 heads with a bias, two at once on each of 132 multiprocessors: 36 of them would wait for all others."""
    for batch, heads, recipe, grid, divided in (
        (22, 12, None, (12, 22, 1), "0"), (25, 12, None, (402, 1, 1), "2"), (44, 12, None, (12, 44, 1), "0"),
        (25, 16, checks.OF_HEADS, (16, 25, 1), "0"),
    ):  # fmt: skip
        bias = torch.zeros(batch, heads, 196, 196, dtype=torch.int32, device="meta")
        more = {} if recipe is None else dict(recipe=recipe)
        launch = _launch(
            "intflash_bfp", 196, 64, torch.float16, torch.float16, batch=batch, heads=heads, bias=bias, **more
        )
        assert (launch.grid, checks.macros(launch)["DIVIDED"]) == (grid, divided)


def test_a_kernel_of_heads_some_of_which_are_divided_does_not_spill():
    launch = _launch("intflash_bfp", 197, 64, torch.float16, torch.float16, batch=64, heads=6, recipe=checks.OF_HEADS)
    assert checks.macros(launch)["DIVIDED"] == "2" and checks.machine(launch).spills == 0


def _rows_of_ctas(launch, nq: int) -> Iterator[tuple[int, int, int]]:
    """The head and the rows of each CTA, as `RowsOfCta` of short_rows.cu computes them."""
    (x, y, z), tiles, share = launch.grid, checks.tiles_of_cta(launch), checks.share_of(launch)
    divided = checks.macros(launch)["DIVIDED"]
    for i, j, k in itertools.product(range(x), range(y), range(z)):
        head, part, parts = j * x + i, k, z
        if divided == "2":
            part, parts = ((i - share.whole) // share.rest, share.pieces) if i >= share.whole else (0, 1)
            head -= part * share.rest
        first = part * tiles * 64 if divided != "0" else 0
        yield head, first, nq if divided == "0" or part + 1 == parts else first + tiles * 64


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 1400), st.integers(1, 400), st.integers(16, 224), st.booleans(), st.booleans(),
    st.sampled_from((1, 16, 114, 132)),
)  # fmt: skip
def test_every_row_has_one_cta(heads, nq, nk, is_static, has_bias, processors):
    recipe = Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02) if is_static else checks.OF_HEADS
    q, k = (torch.empty(1, heads, n, 64, dtype=torch.float16, device="meta") for n in (nq, nk))
    bias = torch.zeros(1, 1, nq, nk, dtype=torch.int32, device="meta") if has_bias else None
    p = Problem("intflash_bfp", q, k, k, 0.125, recipe=recipe, out_dtype=torch.float16, bias=bias)
    launch = checks.attention_launch(p, gpu=(processors, *checks.HOPPER[1:]), kernel="short_rows")
    rows = [[] for _ in range(heads)]
    for head, first, stop in _rows_of_ctas(launch, nq):
        assert 0 <= first < stop <= nq
        rows[head] += range(first, stop)
    assert all(sorted(of_head) == list(range(nq)) for of_head in rows)


@pytest.mark.parametrize("method", checks.in_full_but(("intflash_p8",), METHODS))
def test_biases_do_not_spill(method):
    for n, dtype, batch in ((196, torch.float16, 150), (197, torch.int8, 2)):
        bias = torch.zeros(1, 2, n, n, dtype=torch.int32, device="meta")
        recipe = checks.OF_TENSORS
        machine = checks.machine(_launch(method, n, 64, dtype, dtype, batch=batch, bias=bias, recipe=recipe))
        assert machine.spills == 0 and (dtype == torch.float16 or machine.float_instructions == [])


def test_when_tma_loads_keys():
    """Rows of K whose heads begin at whole rows; not a head within a row, and not a single group of keys."""
    packed = torch.zeros(100, 197, 3, 3, 64, dtype=torch.int8, device="meta").transpose(1, 3)
    apart, within = torch.zeros(100, 3, 197, 64, dtype=torch.int8, device="meta"), packed[:, :, 1]
    v = torch.zeros(100, 3, 64, 208, dtype=torch.int8, device="meta")[..., :197].mT

    def loads(k: torch.Tensor, values: torch.Tensor) -> bool:
        q, k, values = (QTensor(x, torch.ones(1, 1, 1, 1, device="meta"), "tensor") for x in (apart, k, values))
        launch = checks.attention_launch(Problem("intflash", q, k, values, 0.125, out_dtype=torch.int8))
        maps = checks.macros(launch)["TMA"] == "1"
        assert len(launch.maps) == 2 * maps and launch.program.file == "sm90/short_rows.cu"
        return maps

    assert loads(apart, v) and loads(apart[:, :1].expand(100, 3, 197, 64), v)
    assert not loads(within, v) and not loads(apart[:, :, :16], v[:, :, :16]) and not loads(apart, apart)


def test_key_map_permutes_rows_as_score_row():
    """Row 16 g + 8 b + 2 q + i of a box is key 16 g + 4 q + 2 b + i of the head, whatever number of keys it has."""
    p = checks.empty_problem("intflash", 85, 64, batch=80, heads=3, key_major=True)
    launch = checks.attention_launch(p)
    m, (per_batch, per_head) = launch.maps[0], struct.unpack("2i", launch.after_maps[:8])
    k = p.k.data
    assert m.sizes[-1] == 5 and m.box == (64, 2, 4, 2, 5) and m.address == checks.view_of(launch, 1).ptr
    for batch, head, g, b, q, i in itertools.product((0, 1, 79), range(3), (0, 1, 4), range(2), range(4), range(2)):
        at = (batch * per_batch + head * per_head + i, q, b, g)
        assert all(x < size for x, size in zip(at, m.sizes[1:], strict=True))
        address = sum(x * stride for x, stride in zip(at, m.strides, strict=True))
        assert address == k[batch, head, 16 * g + 4 * q + 2 * b + i].storage_offset()


def test_many_batches_use_the_first_grid_axis():
    for batch, first in ((GRID_LIMIT, False), (GRID_LIMIT + 1, True)):
        launch = _launch("intflash_p8", 100, 64, batch=batch, heads=3)
        assert launch.grid == ((batch, 3, 1) if first else (3, batch, 1))
        assert checks.macros(launch)["HEADS_FIRST"] == str(int(not first))


def test_remainder_rows_are_few():
    found = [checks.macros(_launch("intflash", n, 64))["REMAINDER_ROWS"] for n in (128, 65, 72, 73, 197)]
    assert found == ["0", "1", "1", "0", "1"]


def test_shared_memory_fits_the_ctas_of_a_multiprocessor():
    """All CTAs that the registers hold, each with its 1 KB that the hardware reserves, fit the 228 KB."""
    keys = 66, 100, 128, 197, 224, 272, 336
    for method, n, d, batch in itertools.product(METHODS, keys, (16, 64, 80, 128), (1, 5, 200)):
        p = checks.empty_problem(method, n, d, key_major=True, batch=batch)
        if plans.find_kernel(p).kernel != "short_rows":
            continue  # the registers do not hold it
        launch = checks.attention_launch(p)
        ctas = int(checks.macros(launch)["CTAS_PER_SM"])
        assert launch.shared_bytes <= 227 << 10 and ctas * (launch.shared_bytes + 1024) <= 228 << 10, (method, n, d)


def test_float_output_has_float_instructions():
    """The negative control: with float output the same check finds float instructions."""
    assert checks.machine(_launch("intflash_p8", 197, 64, torch.int8, torch.float16)).float_instructions


def test_rows_that_exceed_the_registers_are_unsupported():
    of_shapes = {(336, 64): "short_rows", (337, 64): "long_rows", (304, 80): "short_rows", (305, 80): "long_rows",
                 (224, 128): "long_rows"}  # fmt: skip
    for (n, d), kernel in of_shapes.items():
        assert plans.find_kernel(checks.empty_problem("intflash", n, d)).kernel == kernel
    p = checks.empty_problem("intflash", 100, 64)
    odd = torch.zeros(2, 2, 64, 100, dtype=torch.int8, device="meta").mT
    assert plans.find_kernel(replace(p, v=replace(p.v, data=odd))).kernel == "long_rows"


def test_tokens_beyond_2_gib_are_unsupported():
    one = torch.empty(1, 1, 100, 64, dtype=torch.float16, device="meta")
    far = one.as_strided((1, 1, 100, 64), (0, 0, 11_000_000, 1))
    p = Problem("intflash", one, one, one, 0.125, out_dtype=torch.float16)
    assert plans.find_kernel(p).kernel == "short_rows"
    assert plans.find_kernel(replace(p, q=far, k=far, v=far)).kernel != "short_rows"


def test_more_queries_than_the_third_grid_axis():
    p = checks.empty_problem("intflash", 100, 64, batch=1, heads=1)
    long = torch.empty(1, 1, 64 * GRID_LIMIT + 1, 64, dtype=torch.int8, device="meta")
    for q, kernel in ((long[:, :, 1:], "short_rows"), (long, "long_rows")):
        assert plans.find_kernel(replace(p, q=replace(p.q, data=q))).kernel == kernel
