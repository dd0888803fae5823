"""csrc/cuda/sm80/any_rows.cu: the reference's bits on a GPU; without a GPU, that its machine code for every
architecture is integer-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import cuda_checks as checks
import integer_cases as ic
import pytest
import torch

from intflash.backends.cuda import BACKEND, backend, plans
from intflash.backends.cuda.plans import Plan
from intflash.backends.cuda.program import CudaLaunch
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

# sm_80 in every test run
ARCHITECTURES = (
    "sm_80",
    *(pytest.param(x, marks=pytest.mark.full) for x in ("sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")),
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
METHODS = backend.METHODS
FEW = tuple(x for x in METHODS if x != "intflash_online")  # few_rows.cu's
SLOW = pytest.param("intflash_bfp", marks=pytest.mark.full)  # its kernels take some seconds each to compile
STATIC = dict(q_scale=0.02, k_scale=0.015, v_scale=0.02)
# Warps of a CTA, tiles of 16 rows of a warp, keys of a tile, stages, CTAs per multiprocessor, CTAs that share channels.
TILES = (2, 1, 32, 2, 3, 1), (1, 1, 128, 3, 1, 1), (2, 2, 32, 3, 1, 1), (8, 1, 64, 2, 1, 1), (4, 1, 128, 2, 1, 2)
# Multiprocessors, compute capability and bytes of shared memory of GPUs that plans are made for.
GPUS = {
    "sm_80": (108, 8, 0, 163 << 10), "sm_86": (84, 8, 6, 99 << 10), "sm_89": (128, 8, 9, 99 << 10),
    "sm_90a": (132, 9, 0, 227 << 10), "sm_100": (148, 10, 0, 227 << 10), "sm_120": (170, 12, 0, 99 << 10),
}  # fmt: skip


def _bias(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 22), 1 << 22, shape, dtype=torch.int32)


def _masks(nq: int, nk: int) -> dict[str, dict[str, torch.Tensor]]:
    """Masks of four batches and two heads: of each kind, with rows without keys, from wide ones by strides."""
    keep, bias = torch.rand(4, 1, nq, nk) < 0.5, _bias(1, 2, nq, nk)
    keep[1] = False
    keep[:, :, nq // 2] = False
    return {
        "keep": dict(keep=keep),
        "padding": dict(keep=torch.arange(nk) < torch.tensor([nk, 1, nk // 2, 0])[:, None, None, None]),
        "keep of rows": dict(keep=keep[..., :1]),
        "keep transposed": dict(keep=keep.transpose(2, 3).contiguous().transpose(2, 3)),
        "bias": dict(bias=bias),
        "bias cut": dict(bias=_bias(1, 2, nq, nk + 4)[..., 1 : nk + 1]),
        "bias absent": dict(bias=bias.masked_fill(torch.rand(bias.shape) < 0.3, ic.ABSENT)),
        "bias of keys": dict(bias=bias[:, :, :1]),
        "bias of rows": dict(bias=bias[..., :1]),
        "bias of two batches": dict(bias=_bias(2, 1, nq, nk)),
        "bias and keep": dict(bias=bias, keep=keep),
        "bias, keep, causal": dict(bias=bias, keep=keep, causal=nk - nq),
    }


def _ends(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def cases(method: str) -> Iterator[tuple[str, Problem]]:
    """Problems of every feature that the kernel serves; `intflash_online` has no bias."""
    for name, p in _cases(method):
        if method != "intflash_online" or p.bias is None:
            yield name, p


def _cases(method: str) -> Iterator[tuple[str, Problem]]:
    sizes = [
        (1, 1, 64),
        (1, 300, 64),
        (40, 288, 64),
        (40, 420, 64),
        (40, 768, 64),
        (40, 641, 64),
        (5, 77, 64),
        (64, 64, 32),
        (65, 129, 64),
        (129, 65, 64),
        (100, 97, 128),
    ]
    sizes += [(70, 90, d) for d in (1, 8, 16, 17, 40, 72, 80, 96, 100, 160, 200, 256)]
    for nq, nk, d in sizes:
        yield f"{nq} {nk} {d}", ic.codes(method, batch=2, nq=nq, nk=nk, d=d, return_lse=True)
    for d, dv in ((64, 32), (40, 100), (32, 256)):
        yield f"dv {d} {dv}", ic.codes(method, nq=70, nk=90, d=d, dv=dv, return_lse=True)
    for offset in (0, 60, -30, 400, -100):
        yield f"causal {offset}", ic.codes(method, nq=90, nk=150, d=64, causal=offset, return_lse=True)
    for nq, nk in ((50, 77), (90, 132)):
        for name, masks in _masks(nq, nk).items():
            yield f"{nq} {nk} {name}", ic.codes(method, batch=4, nq=nq, nk=nk, return_lse=True, **masks)
    for out in (torch.int16, *FLOATS):
        yield f"out {out}", ic.codes(method, nq=40, nk=100, d=72, out_dtype=out)
        yield f"out {out} 17", ic.codes(method, nq=40, nk=100, d=17, out_dtype=out)
    for amax in (1e-6, 400.0, 50000.0):
        yield f"amax {amax}", ic.codes(method, nq=70, nk=150, d=64, amax=amax, return_lse=True)
        yield (
            f"amax {amax} bias",
            ic.codes(method, nq=70, nk=152, amax=amax, return_lse=True, bias=_bias(1, 2, 70, 152)),
        )
    yield "scales", ic.codes(method, heads=6, key_heads=2, nq=70, nk=150, kinds=("token", "head", "head"))
    yield "out scale", ic.codes(method, out_scale=torch.full((1, 1, 1, 1), 0.001))
    yield "groups", ic.codes(method, batch=2, heads=8, key_heads=2, nq=3, nk=260, d=128)
    if method == "intflash_bfp":
        yield from _sinks(method)
    yield from checks.spans(method, 70, 197, 64)
    if method == "intflash_online":
        yield from checks.rising(method, 40, 450, 64)
        keep = torch.rand(2, 1, 50, 300) < 0.5
        keep[..., :140], keep[:, :, 5] = False, False  # rows whose first granule has no keys
        yield "late keys", ic.codes(method, batch=2, nq=50, nk=300, amax=60.0, keep=keep, return_lse=True)
    for causal in (None, 0):
        for align in ("top_left", "bottom_right"):
            packed = dict(cu_seqlens_q=_ends(0, 20, 20, 85, 150), cu_seqlens_k=_ends(0, 33, 100, 101, 260))
            packed |= dict(causal=causal, causal_align=align, return_lse=True)
            yield f"packed {causal} {align}", ic.codes(method, nq=150, nk=260, d=64, **packed)
            yield (
                f"packed window {causal} {align}",
                ic.codes(method, nq=150, nk=260, d=64, **(packed | dict(causal=5, window_start=-30))),
            )
    yield from _windows(method)
    masks = dict(bias=_bias(1, 2, 150, 260), keep=torch.rand(1, 1, 150, 260) < 0.5)
    yield "packed bias, keep", ic.codes(method, nq=150, nk=260, **packed, **masks)
    halves = (torch.randn(1, 2, n, 40).half() for n in (150, 260, 260))
    ends = dict(cu_seqlens_q=_ends(0, 70, 150), cu_seqlens_k=_ends(0, 33, 260))
    yield "packed floats", Problem(method, *halves, 0.2, recipe=Recipe(), out_dtype=torch.float16, **ends)
    yield from _few_rows(method)
    yield from _float_queries(method)
    yield from _layouts(method)
    for dtype in FLOATS:
        for n, d in ((70, 64), (150, 40), (90, 100), (70, 160)):
            yield (
                f"{dtype} static {n} {d}",
                checks.floats(method, 2, n, d, dtype, Recipe(**STATIC), out_dtype=torch.int8),
            )
        heads = Recipe(v="head", q_scale=0.02, k_scale=0.015, v_scale=torch.tensor([0.02, 0.03]))
        yield f"{dtype} heads", checks.floats(method, 2, 100, 72, dtype, heads)
        yield f"{dtype} dynamic", checks.floats(method, 2, 100, 72, dtype, checks.OF_TENSORS, 1e-3, return_lse=True)
        yield f"{dtype} dynamic of heads", checks.floats(method, 2, 100, 40, dtype, checks.OF_HEADS)
        yield f"{dtype} token", checks.floats(method, 2, 60, 20, dtype, Recipe(q="token", k="head"))


def _windows(method: str) -> Iterator[tuple[str, Problem]]:
    """Sliding windows: narrower and wider than tiles, with rows that see no key, with masks, of few rows."""
    for nq, nk, start, causal in (
        (200, 460, -20, 0), (200, 460, 200, 260), (200, 460, -100, 150), (200, 90, -30, 0), (200, 460, 400, 420),
        (70, 150, 0, 0), (1, 900, 800, 899), (4, 900, 100, 105),
    ):  # fmt: skip
        shape = dict(nq=nq, nk=nk, d=64, return_lse=True, window_start=start, causal=causal)
        yield f"window {nq} {nk} {start} {causal}", ic.codes(method, **shape)
    shape = dict(batch=2, heads=4, key_heads=2, nq=150, nk=300, d=80, window_start=100, causal=150)
    yield "window, keep", ic.codes(method, keep=torch.rand(2, 1, 150, 300) < 0.5, **shape)
    yield "window, bias", ic.codes(method, bias=_bias(1, 4, 150, 300), **shape)


def _sinks(method: str) -> Iterator[tuple[str, Problem]]:
    """Sinks with and without a value; few rows, packed sequences with blocks of their own, and wide rows. Biases of
    floats, which have 12 fraction bits."""
    for name, nq, nk in (("bias of floats", 20, 300), ("few, bias of floats", 3, 900)):
        bias = torch.randint(-(1 << 14), 1 << 14, (1, 2, nq, nk), dtype=torch.int32)
        bias.masked_fill_(torch.rand(bias.shape) < 0.3, ic.ABSENT)
        yield name, ic.codes(method, nq=nq, nk=nk, bias=bias, bias_fraction_bits=12, return_lse=True)
    yield from ic.sink_cases(method)
    of_rows = dict(return_lse=True, out_dtype=torch.int16)
    ends = dict(cu_seqlens_q=_ends(0, 20, 20, 85, 150), cu_seqlens_k=_ends(0, 133, 200, 201, 860))
    keep = torch.rand(1, 1, 60, 760) < 0.5
    for octaves in (10.0, 40.0, 130.0):
        for zeros in ((), (0, 90, 91), tuple(range(100, 300))):
            name = f"sinks of {octaves} octaves, {len(zeros)} zeros"
            yield f"few, {name}", ic.sinks(method, octaves, zeros, n=900, nq=5, **of_rows)
            yield f"few, rounded, {name}", ic.sinks(method, octaves, zeros, n=600, nq=5, **of_rows)
            yield f"few, tiles, {name}", ic.sinks(method, octaves, zeros, n=4100, nq=21, **of_rows)
            yield f"packed, {name}", ic.sinks(method, octaves, zeros, n=860, nq=150, **of_rows, **ends)
            yield f"keep, {name}", ic.sinks(method, octaves, zeros, n=760, nq=60, keep=keep, **of_rows)
            yield f"wide, {name}", ic.sinks(method, octaves, zeros, n=860, nq=60, d=200, causal=800, **of_rows)


def _float_queries(method: str) -> Iterator[tuple[str, Problem]]:
    """Float Q beside codes of K and V, on other rows than few ones."""
    heads = dict(batch=2, heads=4, key_heads=2, kinds=("head",) * 3, return_lse=True)
    for nq, nk, d, dtype in ((70, 150, 64, torch.float16), (33, 90, 40, torch.float32), (20, 100, 17, torch.bfloat16)):
        p = ic.codes(method, nq=nq, nk=nk, d=d, causal=nk - nq, **heads)
        yield f"float q {nq} {nk} {d}", ic.float_query(p, dtype, Recipe())
    keep = torch.rand(2, 1, 50, 132) < 0.5
    p = ic.codes(method, nq=50, nk=132, d=80, keep=keep, **heads)
    yield "float q, keep", ic.float_query(p, torch.float16, Recipe(q_scale=0.02), out_dtype=torch.int8)
    p = ic.codes(method, nq=60, nk=100, d=64, **heads)
    yield "float q of tokens", ic.float_query(p, torch.float16, Recipe("token"))
    yield "float q of four bits", ic.float_query(p, torch.float16, Recipe(bits=4))
    ends = dict(cu_seqlens_q=_ends(0, 20, 50), cu_seqlens_k=_ends(0, 33, 100))
    p = ic.codes(method, nq=50, nk=100, d=64, causal=0, causal_align="bottom_right", **ends)
    yield "float q, packed", ic.float_query(p, torch.float16, Recipe())


def _few_rows(method: str) -> Iterator[tuple[str, Problem]]:
    """Few rows over many keys, which few_rows.cu takes with the exact methods."""
    for nq, heads, d in ((1, 8, 64), (4, 8, 40), (8, 4, 160), (1, 2, 256), (16, 2, 17)):
        shape = dict(batch=2, heads=heads, key_heads=2, nq=nq, nk=900, d=d)
        yield f"few {nq} {heads} {d}", ic.codes(method, return_lse=True, **shape)
    shape |= dict(d=64, nq=3, heads=8)
    keep, bias = torch.rand(2, 1, 3, 900) < 0.5, _bias(1, 8, 3, 900)
    keep[1, :, 2] = False
    bias.masked_fill_(torch.rand(900) < 0.3, ic.ABSENT)
    yield "few, causal", ic.codes(method, causal=500, return_lse=True, **shape)
    yield "few, keep", ic.codes(method, keep=keep, return_lse=True, **shape)
    yield "few, bias", ic.codes(method, bias=bias, return_lse=True, **shape)
    masks = dict(bias=bias, keep=keep, causal=697)
    yield "few, bias, keep, causal", ic.codes(method, out_dtype=torch.float16, **masks, **shape)
    tiles = dict(batch=1, heads=4, key_heads=2, nq=9, nk=4100, d=32, return_lse=True)  # two tiles of rows
    masks = dict(bias=_bias(1, 4, 9, 4100), keep=torch.rand(1, 1, 9, 4100) < 0.5, causal=3900)
    yield "few, tiles", ic.codes(method, **tiles)
    yield "few, tiles, bias, keep, causal", ic.codes(method, out_dtype=torch.float16, **masks, **tiles)
    yield "few, tiles, scales", ic.codes(method, kinds=("token", "head", "head"), out_dtype=torch.int16, **tiles)
    yield "few, scales", ic.codes(method, kinds=("token", "head", "head"), amax=400.0, out_dtype=torch.int16, **shape)
    q, k = torch.randn(2, 8, 2, 72).half(), torch.randn(2, 2, 850, 72).half()
    for nq, heads in ((1, 32), (3, 8)):  # rows i and i + 8 are of heads with other scales
        shape = dict(batch=2, heads=heads, key_heads=2, nq=nq, nk=850, d=64, kinds=("head",) * 3, return_lse=True)
        yield f"few, heads {nq} {heads}", ic.codes(method, **shape)
    of_heads = Recipe("head", q_scale=torch.linspace(0.01, 0.03, 8))
    for dtype, recipe in (
        (torch.float16, Recipe()), (torch.float32, Recipe("tensor")), (torch.bfloat16, Recipe(q_scale=0.02)),
        (torch.float16, of_heads),
    ):  # fmt: skip
        for kinds in (("tensor",) * 3, ("head",) * 3):
            p = ic.codes(method, batch=2, heads=8, key_heads=2, nq=2, nk=850, d=72, kinds=kinds, return_lse=True)
            yield (
                f"few, float q {dtype} {recipe.q} {recipe.q_scale is None} {kinds[1]}",
                ic.float_query(p, dtype, recipe),
            )
    for heads, d in ((8, 40), (32, 17)):  # the kernel finds Q's scale
        p = ic.codes(method, batch=2, heads=heads, key_heads=2, nq=1, nk=850, d=d, kinds=("head",) * 3, return_lse=True)
        yield f"few, float q one query {heads}", ic.float_query(p, torch.float16, Recipe())
    p = ic.codes(method, batch=2, heads=8, key_heads=2, nq=1, nk=900, d=128, kinds=("head",) * 3)
    yield "few, float q to int8", ic.float_query(p, torch.float16, Recipe(), out_dtype=torch.int8)
    yield "few, floats", Problem(method, q, k, k, 0.1, recipe=Recipe(**STATIC), out_dtype=torch.float16)
    for recipe in (checks.OF_TENSORS, checks.OF_HEADS):
        p = Problem(method, q, k, k.flip(2), 0.1, recipe=recipe, out_dtype=torch.int8)
        yield f"few, dynamic, {recipe.q}", p
    if method == "intflash_bfp":  # sums of more than 32 bits, over CTAs
        p = ic.codes(method, batch=1, heads=2, nq=3, nk=140_000, d=32, return_lse=True)
        largest = replace(p, v=replace(p.v, data=torch.full_like(p.v.data, 127)), k=replace(p.k, data=p.k.data * 0))
        yield from (("few, many keys", p), ("few, many keys of largest codes", largest))


def _layouts(method: str) -> Iterator[tuple[str, Problem]]:
    """Codes and floats in other layouts: slices of one tensor, any alignment, strided channels, contiguous keys."""
    x = torch.randint(-127, 128, (2, 101, 3, 3, 64), dtype=torch.int8)
    p = ic.codes(method)

    def of(q, k, v, **more) -> Problem:
        q, k, v = (QTensor(y, p.q.scale, "tensor") for y in (q, k, v))
        return Problem(method, q, k, v, 0.125, **(dict(out_dtype=torch.int8) | more))

    views = [y.transpose(1, 2) for y in x.unbind(2)]
    yield "slices", of(*views)
    yield "unaligned", of(*(y[..., 3:61] for y in views))
    yield "every second channel", of(*(y[..., ::2] for y in views))
    yield "backwards tokens", of(*(y.flip(2) for y in views))
    yield "shared heads", of(*(y[:, :1].expand(-1, 3, -1, -1) for y in views))
    padded = torch.full((2, 3, 64, 112), 99, dtype=torch.int8)
    yield "contiguous keys", of(views[0], views[1], padded[..., :101].copy_(views[2].mT).mT)
    yield "contiguous keys unpadded", of(views[0], views[1], views[2].mT.contiguous().mT)
    for dtype in FLOATS:
        floats = [y.to(dtype) / 50 for y in views]
        yield (
            f"unaligned {dtype}",
            Problem(method, *(y[..., 3:60] for y in floats), 0.125, recipe=Recipe(), out_dtype=dtype),
        )
        yield (
            f"every second channel {dtype}",
            Problem(method, *(y[..., ::2] for y in floats), 0.125, recipe=Recipe(**STATIC), out_dtype=dtype),
        )


def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves every problem to this kernel."""
    monkeypatch.setattr(plans, "FIXED", dict(kernel="any_rows"))


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("splits, large", ((1, 0), (2, 0), (6, 0), (1, 1), (2, 1)))
@pytest.mark.parametrize("method", FEW)
def test_any_split_of_the_keys_gives_the_same_bits(method, splits, large, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(plans, "FIXED", dict(kernel="any_rows", key_splits=splits, large_tiles=large))
    for name, p in _few_rows(method):
        there = ic.on_device(p, "cuda")
        assert plans.find_kernel(there).kernel == "few_rows", name
        assert checks.complaint(p, BACKEND.run(there)) is None, name


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("tile", (None, *TILES), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bits(method, tile, monkeypatch):
    torch.manual_seed(0)
    only(monkeypatch)
    if tile is not None:
        if method == "intflash_online" and tile[2] != 128:
            pytest.skip("its tiles are granules of 128 keys")
        monkeypatch.setattr(plans, "FIXED", dict(kernel="any_rows", tile=tile))
    wrong = {}
    for name, p in cases(method):
        if tile is not None and max(p.q.shape[3], p.v.shape[3]) > 80:  # beyond, the registers do not suffice
            continue
        there = ic.on_device(p, "cuda")
        assert BACKEND.unsupported(there) is None, name
        if found := checks.complaint(p, BACKEND.run(there)):
            wrong[name] = found
    assert wrong == {}


def _launch(
    method: str, d: int, dtype=torch.int8, out=torch.int8, n=100, architecture="sm_80", tile=(-1,) * 6, **more
) -> CudaLaunch:  # fmt: skip
    more = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    p = checks.empty_problem(method, n, d, dtype, out, **more)
    launch = checks.attention_launch(p, gpu=GPUS[architecture], kernel="any_rows", tile=tile)
    assert launch.program.file == "sm80/any_rows.cu"
    return launch


COMPILED = {
    "64": dict(d=64), "64 keys": dict(d=64, key_major=True), "128 keys": dict(d=128, key_major=True, out=torch.int16),
    "80": dict(d=80), "160": dict(d=160), "256": dict(d=256), "causal": dict(d=64, causal=0),
    "bias": dict(d=64, bias=_bias(1, 2, 100, 100)), "keep": dict(d=64, keep=torch.ones(1, 1, 1, 100, dtype=torch.bool)),
    "bias and keep": dict(d=96, bias=_bias(1, 2, 100, 100), keep=torch.ones(1, 1, 100, 100, dtype=torch.bool)),
    "packed": dict(d=64, cu_seqlens_q=_ends(0, 100), cu_seqlens_k=_ends(0, 100), causal=0),
    "window": dict(d=64, causal=0, window_start=-20), "two tiles of rows": dict(d=40, tile=(4, 2, 32, 3, 2, 1)),
}  # fmt: skip


def _has_masks(name: str) -> bool:
    return bool({"bias", "keep"} & set(COMPILED[name]))


def _dithered_launch(name: str, architecture: str) -> CudaLaunch:
    """One of `intflash_bfp` with so many keys that P is dithered."""
    longer = {
        key: x if not isinstance(x, torch.Tensor) else x.new_empty([900 if n == 100 else n for n in x.shape])
        for key, x in COMPILED[name].items()
    }
    return _launch("intflash_bfp", n=900, architecture=architecture, **longer)


# Words, where a third CTA or a larger tile gains more: with 6 spilled, `intflash_bfp` was 5 to 8 % faster on an H200 at
# head_dim 64 (three CTAs, not two) and 128 (64 keys, not 32) than with none.
MOST_SPILLS = dict.fromkeys(METHODS, 2) | {"intflash_bfp": 14}
# one of each kind in every test run
NAMES = (
    "64 keys",
    "bias and keep",
    *(pytest.param(x, marks=pytest.mark.full) for x in COMPILED if x not in ("64 keys", "bias and keep")),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_integer_only(name, architecture):
    """No floating-point opcode between int8 input and integer output; integer tensor-core products; no spills, or a few
    words where a third CTA gains more.
    """
    options = COMPILED[name]
    for method in METHODS:
        if method == "intflash_online" and {"bias", "tile"} & set(options):
            continue
        if method == "intflash_bfp" and _has_masks(name):
            continue
        if method == "intflash_online" and options["d"] == 256 and GPUS[architecture][3] < 120 << 10:
            continue  # refused: test_shared_memory_fits_every_gpu
        if method == "intflash_bfp":
            launch = _dithered_launch(name, architecture)
        else:
            launch = _launch(method, architecture=architecture, **options)
        machine = checks.machine(launch, architecture)
        most = 24 if name == "keep" else MOST_SPILLS[method]
        assert machine.float_instructions == [], (name, method, architecture)
        assert machine.spills <= most, (name, method, architecture, machine.registers)
        assert machine.opcodes["IMMA"] > 0


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", [name for name in COMPILED if not _has_masks(name)])
def test_rounded_p_is_integer_only(name, architecture):
    machine = checks.machine(_launch("intflash_bfp", architecture=architecture, **COMPILED[name]), architecture)
    assert machine.float_instructions == [] and machine.spills <= MOST_SPILLS["intflash_bfp"]


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name, most", (("keep", 40), ("bias", 4), ("bias and keep", 4)))
def test_masks_of_dithered_p_are_integer_only(name, most, architecture):
    """Some words are spilled where keys have no value, whose masks are read once more."""
    machine = checks.machine(_dithered_launch(name, architecture), architecture)
    assert machine.float_instructions == [] and machine.spills <= most


def _steps(plan: Plan) -> list[CudaLaunch]:
    return [launch for launch in plan.launches if launch.program.file == "sm80/few_rows.cu"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", [SLOW if x == "intflash_bfp" else x for x in FEW])
def test_few_rows_are_integer_only(method, architecture):
    for d, masks in ((128, {}), (64, dict(bias=_bias(1, 2, 1, 1000).to("meta"), causal=3))):
        p = checks.empty_problem(method, 1000, d, **masks)
        p = replace(p, q=replace(p.q, data=p.q.data[:, :, :1]))
        steps = _steps(checks.planned(p, gpu=GPUS[architecture], kernel="any_rows"))
        again = ["2"] if method == "intflash_bfp" else []  # of heads some of whose keys have no value
        assert [checks.macros(step)["STEP"] for step in steps] == ["0", "1", *again]
        for step in steps:
            machine = checks.machine(step, architecture)
            assert machine.float_instructions == [] and machine.spills == 0, (d, step.program, machine.registers)


@pytest.mark.parametrize(
    "d, architecture",
    (
        (64, "sm_80"),
        *(pytest.param(*x, marks=pytest.mark.full) for x in ((64, "sm_90a"), (128, "sm_90a"), (72, "sm_120"))),
    ),
)
@pytest.mark.parametrize("method", [SLOW if x == "intflash_bfp" else x for x in METHODS])
def test_floats_spill_few_words(method, d, architecture):
    for dtype in (torch.float16, torch.float32):
        launch = _launch(method, d, dtype, dtype, architecture=architecture, recipe=checks.OF_TENSORS)
        machine = checks.machine(launch, architecture)
        assert machine.spills <= MOST_SPILLS[method], (dtype, machine.registers)
        assert machine.float_instructions  # the negative control of test_integer_only


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", FEW)
def test_few_rows_of_float_q_do_not_spill(method, architecture):
    """Where the kernels compute the score constants, and Q's scale."""
    for d, heads in ((128, 8), (64, 32)):
        p = ic.codes(method, batch=1, heads=heads, key_heads=2, nq=1, nk=1000, d=d, kinds=("head",) * 3)
        for scores, recipe in (("1", Recipe(q_scale=0.02)), ("2", Recipe())):
            problem = ic.float_query(p, torch.float16, recipe)
            for step in _steps(checks.planned(problem, gpu=GPUS[architecture])):
                assert checks.macros(step)["SCORES"] == scores
                machine = checks.machine(step, architecture)
                assert machine.spills == 0, (d, heads, step.program, machine.registers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("d", (64, pytest.param(128, marks=pytest.mark.full)))
def test_large_tiles_of_few_rows_do_not_spill(d, architecture):
    """Two CTAs of them on a multiprocessor, where shared memory holds the tiles of both."""
    p = ic.codes("intflash_p8", batch=1, heads=8, key_heads=2, nq=1, nk=1000, d=d, kinds=("head",) * 3)
    problem = ic.float_query(p, torch.float16, Recipe())
    fits = GPUS[architecture][3] >= 2 * 3 * 256 * (d + 16)
    for step in _steps(checks.planned(problem, gpu=GPUS[architecture])):
        assert checks.macros(step)["KEYS"] == ("256" if fits else "128")
        machine = checks.machine(step, architecture)
        assert machine.spills == 0, (step.program, machine.registers)


def test_shared_memory_fits_every_gpu():
    """99 KiB, of compute capability 8.6, 8.9 and 12.0."""
    for method in METHODS:
        for d in (64, 128, 192, 256):
            if method == "intflash_online" and d == 256:
                with pytest.raises(ValueError, match="bytes of shared memory"):
                    _launch(method, d, architecture="sm_86")
            else:
                assert _launch(method, d, architecture="sm_86").shared_bytes <= 99 << 10


@pytest.mark.parametrize(
    "d, n, causal, gpu, tile",
    (
        (128, 1000, None, "sm_80", ("1", "64")), (128, 1000, None, "sm_86", ("1", "32")),  # of two CTAs
        (40, 1000, None, "sm_80", ("1", "64")), (40, 20000, None, "sm_80", ("2", "32")),  # enough CTAs
        (64, 20000, None, "sm_80", ("1", "64")), (32, 20000, 0, "sm_80", ("1", "64")),
    ),
)  # fmt: skip
@pytest.mark.parametrize("method", ("intflash", "intflash_bfp"))
def test_tiles_are_what_registers_and_shared_memory_hold(method, d, n, causal, gpu, tile):
    macros = checks.macros(_launch(method, d, n=n, architecture=gpu, causal=causal))
    assert (macros["ROW_TILES"], macros["KEYS"]) == tile


def test_only_what_16_byte_accesses_cannot_read_is_copied(monkeypatch):
    only(monkeypatch)
    wide = torch.randn(2, 2, 100, 67).half()

    def found(shift: int, channels: int) -> tuple[Problem, tuple[str, ...]]:
        x = wide[..., shift : shift + channels]
        k = x.contiguous()
        p = Problem("intflash", x if shift else k, k, k, 0.1, recipe=Recipe())
        return p, plans.find_kernel(p).copies

    p, copies = found(0, 64)
    assert copies == () and backend.with_copies(p, copies) is p
    p, copies = found(1, 64)
    made = backend.with_copies(p, copies)
    assert copies == ("q",) and made.k is p.k and torch.equal(made.q, p.q) and made.q.data_ptr() % 16 == 0
    p, copies = found(0, 20)
    made = backend.with_copies(p, copies)
    assert copies == ("q", "k", "v") and made.q.shape[3] == 20 and made.q.stride(2) == 32
    keep = torch.ones(1, 1, 100, 100, dtype=torch.bool).mT
    assert plans.find_kernel(replace(found(0, 64)[0], keep=keep)).copies == ("keep",)


@pytest.mark.parametrize("gpu", GPUS)
def test_which_kernel_serves(gpu, monkeypatch):
    """On Hopper wgmma's kernels serve aligned rows with masks of keys; these serve the rest but for windows."""
    monkeypatch.setattr(plans, "gpu_of", lambda device: GPUS[gpu])
    hopper = gpu == "sm_90a"
    p = checks.empty_problem("intflash", 100, 64, torch.float16, torch.float16)
    keep = torch.ones(1, 1, 1, 100, dtype=torch.bool, device="meta")
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 100], dtype=torch.int32))
    one = checks.empty_problem("intflash", 100, 64, torch.float16, torch.float16, batch=1)
    odd = {name: p.q[..., :60] for name in "qkv"}
    for problem, kernel in (
        (p, "short_rows" if hopper else "whole_rows"),
        (checks.empty_problem("intflash", 49, 64, torch.float16, torch.float16), "window"),
        (replace(p, **odd), "any_rows"),
        (replace(p, keep=keep), "long_rows" if hopper else "any_rows"),
        (replace(p, keep=keep.repeat(1, 1, 100, 1)), "any_rows"),
        (replace(one, **ends), "any_rows"),
    ):
        assert plans.find_kernel(problem).kernel == kernel


@pytest.mark.parametrize(
    "batch, heads, nq, nk, kernel",
    (
        (32, 32, 1, 8192, "few_rows"), (1, 32, 4, 600, "few_rows"),  # one tile of rows of each of 8 key heads
        (1, 32, 8, 8192, "few_rows"), (2, 32, 16, 8192, "few_rows"), (1, 8, 100, 20000, "few_rows"),
        (1, 32, 8, 2000, "long_rows"),  # few keys
        (2, 32, 32, 8192, "long_rows"), (1, 40, 128, 4096, "long_rows"),  # enough CTAs, or tiles of rows
        (1, 32, 8, 100_000, "long_rows"),  # many scores
    ),
)  # fmt: skip
def test_few_rows_are_taken_where_others_would_leave_the_gpu_idle(batch, heads, nq, nk, kernel, monkeypatch):
    k = QTensor(torch.empty(batch, 8, nk, 128, dtype=torch.int8, device="meta"), torch.ones(1, 1, 1, 1), "tensor")
    q = torch.empty(batch, heads, nq, 128, dtype=torch.float16, device="meta")
    monkeypatch.setattr(plans, "gpu_of", lambda device: checks.HOPPER)
    p = Problem("intflash_bfp", q, k, k, 0.1, out_dtype=torch.float16, recipe=Recipe())
    assert plans.find_kernel(p).kernel == kernel


def test_few_rows_of_codes_and_of_floats_over_many_keys_do_not_take_long_rows(monkeypatch):
    """Those would read K and V for each query head, in one CTA, and a copy of V's codes."""
    monkeypatch.setattr(plans, "gpu_of", lambda device: checks.HOPPER)
    for dtype, nk, kernel in (
        (torch.int8, 600, "few_rows"), (torch.int8, 500, "long_rows"),
        (torch.float16, 4096, "few_rows"), (torch.float16, 4095, "long_rows"),
    ):  # fmt: skip
        p = checks.empty_problem("intflash_bfp", nk, 128, dtype, torch.float16, heads=8)
        q = replace(p.q, data=p.q.data[:, :, :1]) if dtype == torch.int8 else p.q[:, :, :1]
        assert plans.find_kernel(replace(p, q=q)).kernel == kernel, (dtype, nk)
        if dtype == torch.int8:  # counts of keys, as integer models have them for padding
            assert plans.find_kernel(replace(p, q=q), has_key_counts=True).kernel == "long_rows"


def test_workspaces_of_few_rows_hold_every_key():
    """Scores of all keys, maxima of each split, and sums, for any number of splits."""
    for method, splits, d in ((m, n, d) for m in FEW for n in (1, 3, 6) for d in (17, 64, 200)):
        p = checks.empty_problem(method, 1000, d)
        p = replace(p, q=replace(p.q, data=p.q.data[:, :, :3]))
        plan = checks.planned(p, kernel="any_rows", key_splits=splits)
        first, second, *_ = _steps(plan)
        (_, scores), (_, maxima), (_, sums) = plan.workspace[-3:]
        made = first.grid[0] // 4  # two batches of two heads
        assert made <= splits and first.grid[0] == second.grid[0]
        assert scores == 4 * 3 * 1008 * 4 and maxima == 4 * made * 8 * 8 * (1 + (method == "intflash_bfp"))
        channels, digits = -(-d // 16) * 16, 1 + (method == "intflash")
        of_row = 2 * 8 * (channels + 3) if method == "intflash_bfp" else 4 * digits * (channels + 1)
        assert sums == 4 * (8 * of_row + (16 if method == "intflash_bfp" else 8))
