"""csrc/cuda/sm90/long_rows.cu: the reference's bits on a GPU; without a GPU, that its machine code is integer-only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import cuda_checks as checks
import integer_cases as ic
import pytest
import torch

from intflash.backends.cuda import plans
from intflash.integer.gpu.hopper import quotient_reciprocal
from intflash.numerics.groups import ROUNDED_KEYS
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

METHODS = "intflash", "intflash_p8", "intflash_online", "intflash_bfp"
FLOAT_KV = (torch.float16, torch.bfloat16, torch.float32)


def _viewed(p: Problem, names: str, view: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
    tensors = {name: getattr(p, name) for name in names}
    return replace(p, **{name: replace(x, data=view(x.data)) for name, x in tensors.items()})


def _more_keys(method: str) -> int:
    """Keys to add to a problem so that a sequence of `intflash_bfp` has several blocks."""
    return 640 if method == "intflash_bfp" else 0


def cases(method: str) -> Iterator[tuple[str, Problem]]:
    """Problems that the kernel serves; of `intflash_bfp` with so few keys that P is rounded and with more."""
    more = _more_keys(method)
    for n, d in [
        (257, 64), (300, 16), (300, 96), (300, 112), (512, 128), (640, 80), (1000, 64), (1024, 128),
        (1000, 48), (768, 64), (769, 64),
    ]:  # fmt: skip
        yield f"{n} {d}", ic.codes(method, nq=n, nk=n, d=d, return_lse=True)
    for nq, nk in ((1, 700), (50, 300 + more), (300, 520 + more), (700, 333 + more)):
        for causal in (0, nk - nq, -130, 40):
            for d in (64, 128):
                yield (
                    f"causal {nq} {nk} {d} {causal}",
                    ic.codes(method, nq=nq, nk=nk, d=d, causal=causal, return_lse=True),
                )
    for batch, nq in ((3, 200), (5, 450), (1, 1000)):  # remainder rows of several batches in one part of the grid
        for d in (64, 128):
            shape = dict(batch=batch, heads=2, nq=nq, nk=140 + more, d=d)
            yield f"rest {batch} {nq} {d}", ic.codes(method, return_lse=True, **shape)
    for d in (64, 128):  # CTAs that take several heads and parts of heads
        shape = dict(batch=20, heads=12, key_heads=4, nq=70, nk=250 + more, d=d)
        yield f"heads {d}", ic.codes(method, return_lse=True, **shape)
    # too many keys to be resident
    yield "pieces", ic.codes(method, batch=10, heads=7, nq=200, nk=800, d=128, return_lse=True)
    yield "groups", ic.codes(method, batch=2, heads=6, key_heads=2, nq=200, nk=400 + more, d=64, return_lse=True)
    for d in (64, 128):
        shape = dict(heads=4, key_heads=2, nq=300, nk=300 + more, d=d)
        tokens = ic.codes(method, kinds=("token", "head", "head"), **shape)
        yield f"tokens {d}", replace(tokens, return_lse=True)
        yield f"tokens causal {d}", replace(tokens, causal=0, return_lse=True)
        for amax in (1e-6, 0.5, 400.0, 50000.0):
            p = ic.codes(method, nq=200, nk=900, d=d, amax=amax, return_lse=True)
            yield f"amax {amax} {d}", p
            yield f"amax {amax} {d} causal", replace(p, causal=300)
        for dtype in (torch.int16, *FLOAT_KV):
            yield f"out {dtype} {d}", ic.codes(method, nq=130, nk=300 + more, d=d, out_dtype=dtype)
    for nk in (516, 520, 1200):  # the sums of P's digits times V are up to 2^24, and more
        p = ic.codes(method, nq=70, nk=nk, d=64, amax=1e-6, out_dtype=torch.float32)
        v = torch.randint(100, 128, p.v.data.shape, dtype=torch.int8)
        yield f"sums of {nk}", replace(p, v=replace(p.v, data=-v))
    if method == "intflash_bfp":
        yield from ((n, p) for n, p in ic.sink_cases(method) if p.cu_seqlens_q is None and p.window_start is None)
        for d in (16, 48, 64, 80, 128):
            for octaves, zeros in ((10.0, (0, 90)), (40.0, (0, 90, 91)), (60.0, ())):
                shape = dict(n=900, d=d, return_lse=True, out_dtype=torch.int16)
                yield f"sinks {octaves} {d}", ic.sinks(method, octaves, zeros, **shape)
            yield f"sinks causal {d}", ic.sinks(method, 40.0, (0, 90, 91), n=900, d=d, causal=0, return_lse=True)
            keep = torch.rand(1, 1, 1, 900) < 0.5
            yield f"sinks keep {d}", ic.sinks(method, 40.0, (0, 90, 91), n=900, d=d, keep=keep, return_lse=True)
            yield f"sinks float {d}", ic.sinks(method, 40.0, (0, 90, 91), n=900, d=d, out_dtype=torch.float32)
        for d, dtype in itertools.product((64, 72), FLOAT_KV):
            p = checks.floats(method, 2, 830, d, dtype, Recipe(), return_lse=True)
            zeros = torch.zeros(830, 1, dtype=torch.bool)
            zeros[[0, 130, 131, 255, 829]] = True
            yield f"floats without a value {d} {dtype}", replace(p, v=p.v.masked_fill(zeros, 0))
        static = Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.03)
        for n, key in ((830, 520), (830, 829), (577, 576)):  # a sink in one of the later tiles alone
            p = checks.floats(method, 2, n, 64, torch.float16, static, return_lse=True)
            p.k[:, :, key], p.v[:, :, key] = 3.5, 0
            yield f"floats, key {key} of {n} without a value", p
    yield from checks.spans(method, 200, 400 + more, 64)
    yield from checks.spans(method, 70, 330 + more, 48)
    yield from checks.rising(method, 100, 1500, 64)
    yield from checks.rising(method, 70, 400 + more, 128)
    for d in (16, 32, 64, 80, 128):  # with and without TMA
        for causal in (None, 0, 100):
            shape = dict(batch=2, heads=4, key_heads=2, nq=140, nk=400 + more, d=d)
            yield f"copies {d} {causal}", ic.codes(method, causal=causal, **shape)
        p = ic.codes(method, batch=2, heads=3, nq=70, nk=320 + more, d=d)
        yield f"tokens first {d}", _viewed(p, "qkv", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
        yield f"cut {d}", _viewed(p, "kv", lambda x: x[:, :, 16 : 272 + more])
    packed = torch.randint(-127, 128, (2, 300 + more, 3, 3, 64), dtype=torch.int8)
    q, k, v = (QTensor(x.transpose(1, 2), torch.full((1, 1, 1, 1), 0.02), "tensor") for x in packed.unbind(2))
    yield "packed", Problem(method, q, k, v, 0.125, out_dtype=torch.int8)
    for padded, first in ((304, 0), (512, 16), (301, 0)):  # contiguous keys; the last ones are copied
        rows = torch.randint(-127, 128, (2, 3, 64, padded + more), dtype=torch.int8)[..., first : first + 300 + more]
        yield (
            f"key-major {padded}",
            Problem(method, q, k, QTensor(rows.mT, v.scale, "tensor"), 0.125, out_dtype=torch.int8),
        )
    heads = Recipe(v="head", q_scale=0.02, k_scale=0.015, v_scale=torch.tensor([0.02, 0.03]))
    scales = dict(q_scale=torch.tensor([0.02, 0.03, 0.015, 0.05]), k_scale=torch.tensor([0.02, 0.015]))
    own = replace(checks.OF_HEADS, **scales, v_scale=torch.tensor([0.02, 0.03]))
    for dtype in FLOAT_KV:
        for name, recipe in (
            ("static", Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)),
            ("heads", heads),
            ("dynamic", checks.OF_TENSORS),
            ("dynamic of heads", checks.OF_HEADS),
            ("dynamic of both", Recipe("tensor", "head", "tensor")),
        ):
            yield f"{dtype} {name}", ic.floats(method, 300 + more, dtype, recipe, return_lse=True)
        for d in (16, 64, 80, 128):  # the kernel quantizes Q; values far outside a scale's range
            static = Recipe(q_scale=2**-18, k_scale=0.02, v_scale=0.02)
            yield f"{dtype} {d}", checks.floats(method, 2, 330 + more, d, dtype, static, return_lse=True)
            p = checks.floats(method, 2, 330 + more, d, dtype, own)
            yield f"{dtype} {d} causal", replace(p, causal=10, out_dtype=torch.int8)
            p = replace(p, q=p.q.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 3:200])
            yield f"{dtype} {d} tokens first", p
    yield from _padded_channels(method)
    yield from _key_masks(method)
    yield from _found_scales(method)
    yield from _remainder_rows(method)
    if method == "intflash_bfp":
        yield from _keys_without_values(method)
        yield from _dithered(method)


def _without_values(p: Problem, keys: list[int] | slice, head: int | None = None) -> Problem:
    """The problem with values of 0 for some keys, of one head or of all."""
    v = (p.v if isinstance(p.v, torch.Tensor) else p.v.data).clone()
    v[:, slice(None) if head is None else slice(head, head + 1), keys] = 0
    return replace(p, v=v if isinstance(p.v, torch.Tensor) else replace(p.v, data=v))


def _keys_without_values(method: str) -> Iterator[tuple[str, Problem]]:
    """Keys without a value where P is rounded: some, most or all, in a head or in all, beside every mask and output,
    and in heads with remainder rows.
    """
    some, most, every = [0, 130, 131, 255, 299], slice(0, None, 2), slice(None)
    outputs = torch.int8, torch.int16, *FLOAT_KV
    for (d, keys), out in zip(itertools.product((32, 48, 64, 80, 128), (some, most, every)), outputs * 3, strict=True):
        p = ic.codes(method, nq=70, nk=300, d=d, out_dtype=out, return_lse=True)
        yield f"no values {d} {keys} {out}", _without_values(p, keys)
    for d, out in zip((32, 64, 80, 112, 128), outputs, strict=True):
        for octaves in (3.0, 26.0, 60.0, 130.0):  # of the keys without a value above the others
            p = ic.sinks(method, octaves, tuple(range(0, 577, 90)), n=577, nq=65, d=d, out_dtype=out, return_lse=True)
            yield f"no values, sinks of {octaves} octaves {d} {out}", p
    for d, causal in itertools.product((64, 128), (0, -130, 230)):  # rows may see no key, or none with a value
        p = ic.codes(method, nq=300, nk=520, d=d, causal=causal, return_lse=True)
        yield f"no values causal {d} {causal}", _without_values(p, slice(0, 60))
    for d, kinds in itertools.product((64, 128), (("token", "head", "head"), ("tensor",) * 3)):
        p = ic.codes(method, heads=4, key_heads=2, nq=65, nk=768, d=d, kinds=kinds, return_lse=True)
        yield f"no values, a head {d} {kinds[0]}", _without_values(p, some, 1)
        yield f"no values, a head causal {d} {kinds[0]}", replace(_without_values(p, some, 1), causal=575)
    for d, dtype, recipe in itertools.product((40, 64, 72, 80, 128), FLOAT_KV, (checks.OF_HEADS, checks.OF_TENSORS)):
        p = checks.floats(method, 2, 300, d, dtype, recipe, return_lse=True)
        p = replace(p, q=p.q[:, :, :65])
        yield f"no values {d} {dtype} {recipe.q}", _without_values(p, some, 1)
        yield f"no values {d} {dtype} {recipe.q}, no value", _without_values(p, every, 0)
    for name, p in itertools.chain(checks.spans(method, 70, 400, 64), checks.rising(method, 70, 400, 64)):
        yield f"no values, {name}", _without_values(p, [3, 200, 390, 399])
    keep = torch.rand(6, 320) < 0.7
    keep[0], keep[1, 200:], keep[2], keep[3, :130] = False, False, False, False
    keep[0, [0, 130]] = True  # keys without a value alone
    for d in (64, 128):
        p = ic.codes(method, batch=6, heads=4, key_heads=2, nq=65, nk=320, d=d, keep=keep[:, None, None])
        yield f"no values keep {d}", replace(_without_values(p, some, 1), return_lse=True)
        p = checks.floats(method, 6, 320, d, torch.float16, checks.OF_HEADS, keep=keep[:, None, None])
        yield f"no values keep {d} from floats", replace(_without_values(p, some, 1), return_lse=True)


def _dithered(method: str) -> Iterator[tuple[str, Problem]]:
    """What the cases of few keys vary, with so many that P is dithered."""
    for d in (32, 64, 80, 128):
        p = ic.codes(method, batch=2, heads=3, nq=70, nk=944, d=d, return_lse=True)
        yield f"dithered {d}", p
        yield (
            f"dithered {d} tokens first",
            _viewed(p, "qkv", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        )
        yield f"dithered {d} cut", _viewed(p, "kv", lambda x: x[:, :, 16:896])
        tokens = ic.codes(method, nq=70, nk=900, d=d, kinds=("token", "head", "head"), return_lse=True)
        yield f"dithered {d} tokens", tokens
    for d, dtype in itertools.product((64, 72), FLOAT_KV):
        p = checks.floats(method, 2, 900, d, dtype, checks.OF_HEADS, return_lse=True)
        yield f"dithered {d} {dtype}", _without_values(p, [0, 130, 131, 255, 899])


def _found_scales(method: str) -> Iterator[tuple[str, Problem]]:
    """Scales per head that the kernel finds itself: heads of several CTAs, and CTAs of several heads."""
    for d, dtype in itertools.product((32, 64, 72, 128), FLOAT_KV[:2]):
        p = checks.floats(method, 2, 300, d, dtype, checks.OF_HEADS, return_lse=True)
        yield f"scales of few heads {d} {dtype}", _tokens_first(p)
        p = checks.floats(method, 135, 512, d, dtype, checks.OF_HEADS, return_lse=True)
        # two heads for each CTA but the last, which has one
        yield f"scales of many heads {d} {dtype}", replace(p, q=p.q[:, :1, :70], k=p.k[:, :1], v=p.v[:, :1])


def _padded_channels(method: str) -> Iterator[tuple[str, Problem]]:
    """head_dim that the kernel pads to a multiple of 16."""
    for d, dtype in itertools.product((40, 56, 72, 88, 104, 120), FLOAT_KV):
        for n, recipe in ((330, Recipe(q_scale=2**-18, k_scale=0.02, v_scale=0.02)), (272, Recipe())):
            p = checks.floats(method, 2, n + _more_keys(method), d, dtype, recipe, return_lse=True)
            yield f"padded {d} {n} {dtype}", p
            yield f"padded {d} {n} {dtype} tokens first", _tokens_first(p)
        yield f"padded {d} {dtype} causal", replace(p, causal=10, out_dtype=torch.float32)


def _remainder_rows(method: str) -> Iterator[tuple[str, Problem]]:
    """One, eight or five rows more than whole tiles of 64, with K/V resident in shared memory."""
    shapes = (65, 257), (136, 300), (69, 500)
    for d, (nq, nk) in itertools.product((64, 80, 128), shapes):
        p = ic.codes(method, heads=2, key_heads=1, nq=nq, nk=nk, d=d, return_lse=True)
        yield f"remainder {nq} {nk} {d}", p
        p = ic.codes(method, nq=nq, nk=nk, d=d, kinds=("token", "head", "head"), out_dtype=torch.float16)
        yield f"remainder {nq} {nk} {d} tokens", p
    static = Recipe(q_scale=0.02, k_scale=2**-18, v_scale=2**-9)
    for d, recipe, i in itertools.product((64, 72, 80, 128), (static, checks.OF_HEADS), range(3)):
        (nq, nk), dtype = shapes[i], FLOAT_KV[i]
        p = checks.floats(method, 2, nk, d, dtype, recipe, return_lse=True)
        name = "static" if recipe is static else "found"
        yield f"remainder {nq} {nk} {d} {dtype} {name}", replace(p, q=p.q[:, :, :nq])
    for d in (64, 128):  # two heads for each CTA but the last, which has one
        yield f"remainder of many heads {d}", ic.codes(method, batch=263, heads=1, nq=65, nk=250, d=d, return_lse=True)
    for amax in (50000.0, 1e-6):  # without and with exponentials in 32 bits
        yield f"remainder amax {amax}", ic.codes(method, nq=67, nk=600, d=64, amax=amax, return_lse=True)


def _tokens_first(p: Problem) -> Problem:
    views = {name: getattr(p, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    return replace(p, **views)


def _key_masks(method: str) -> Iterator[tuple[str, Problem]]:
    """Bool masks of keys: lengths, none of a batch's keys, keys at the end, any keys; one mask for several batches."""
    for d, nk in itertools.product((64, 128), (300, 640, 768, 900, 1280)):
        key = torch.arange(nk)
        first = torch.tensor([1, nk, 0, 130, 128, 257])[:, None]
        masks = {
            "first": key < first, "last": key >= nk - first, "any": torch.rand(6, nk) < 0.5,
            "holes": (key < first) & (key % 129 > 0), "shared": (torch.rand(2, nk) < 0.99),
        }  # fmt: skip
        for name, keep in masks.items():
            p = ic.codes(method, batch=6, heads=4, key_heads=2, nq=100, nk=nk, d=d, keep=keep[:, None, None])
            yield f"{name} of {nk} keys {d}", replace(p, return_lse=True)
            p = checks.floats(method, 6, nk, d, torch.float16, Recipe(), keep=keep[:, None, None])
            yield f"{name} of {nk} keys {d} from floats", p


@pytest.mark.parametrize("method", checks.in_full_but(("intflash_bfp",), METHODS))
def test_every_case_is_served(method):
    torch.manual_seed(0)
    assert checks.unserved(cases(method), "long_rows", checks.HOPPER) == []


def _on_processors(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    """Plans are those for a Hopper GPU of so many multiprocessors."""
    monkeypatch.setattr(plans, "gpu_of", lambda device: (processors, *checks.HOPPER[1:]))


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("resident", (False, True))
@pytest.mark.parametrize("method", METHODS)
def test_bits(method, resident, monkeypatch):
    """resident: K/V resident in shared memory where they fit, also from floats with scales found there, or nowhere."""
    choice = int(resident)
    monkeypatch.setattr(plans, "FIXED", dict(resident=choice, fuses_keys=choice, head_amax_in_kernel=choice))
    torch.manual_seed(0)
    assert checks.differences(cases(method), "long_rows") == {}


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_bits_at_the_largest_number_of_keys(method):
    """As many keys as l and the digit sums hold, with uniform attention; of `intflash_bfp` so many that a row's sums
    keep fewer fraction bits.
    """
    torch.manual_seed(0)
    shape = dict(heads=1, nq=3, nk=70_000 if method == "intflash_bfp" else 65_536, amax=1e-6)
    found = [(str(d), ic.codes(method, d=d, return_lse=True, **shape)) for d in (16, 128)]
    assert checks.differences(found, "long_rows") == {}


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_every_range_split(method, monkeypatch):
    """CTAs that take several ranges, whole and smaller ones, with the smaller ones from any CTA on."""
    torch.manual_seed(0)
    splits = (1, 1, 0), (1, 2, 3), (2, 1, 4), (0, 2, 0)
    for processors, (whole, tiles, first) in itertools.product((1, 5, 132), splits):
        split = whole, tiles, min(first, processors - 1)
        _on_processors(monkeypatch, processors)
        monkeypatch.setattr(plans, "FIXED", dict(resident=0, range_split=split))
        for batch, nq, d in ((1, 700, 128), (5, 650, 64), (3, 800, 112)):
            p = ic.codes(method, batch=batch, heads=2, nq=nq, nk=300 + _more_keys(method), d=d, return_lse=True)
            assert checks.differences([(f"{processors} {split} {batch} {nq} {d}", p)], "long_rows") == {}


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_resident_heads(method, monkeypatch):
    """CTAs that take parts of heads, one head or several, with as many keys as fit."""
    monkeypatch.setattr(plans, "FIXED", dict(resident=1))
    torch.manual_seed(0)
    for processors in (1, 5, 132):
        _on_processors(monkeypatch, processors)
        for batch, nq, nk, d in ((1, 700, 577, 128), (5, 650, 300, 64), (7, 50, 1664, 64), (3, 200, 130, 112)):
            p = ic.codes(method, batch=batch, heads=4, key_heads=2, nq=nq, nk=nk, d=d, return_lse=True)
            assert checks.differences([(f"{processors} {batch} {nq} {nk}", p)], "long_rows") == {}


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_resident_floats(method, monkeypatch):
    """Every head_dim, many and few heads per CTA, as many keys as fit, values far outside a scale's range."""
    monkeypatch.setattr(plans, "FIXED", dict(fuses_keys=1, head_amax_in_kernel=1))
    torch.manual_seed(0)
    static = Recipe(q_scale=0.02, k_scale=2**-18, v_scale=2**-9)
    for processors, recipe, dtype in itertools.product(
        (1, 5, 132), (static, checks.OF_TENSORS, checks.OF_HEADS), FLOAT_KV[:2]
    ):
        _on_processors(monkeypatch, processors)
        most = (384, 1152) if method == "intflash_online" else (512, 1408)  # the table of P takes space
        most = (most[0], ROUNDED_KEYS) if method == "intflash_bfp" else most
        shapes = [(2, 260, d) for d in range(32, 129, 16)] + [(3, most[0] - 4, 112), (2, most[1], 64), (40, 257, 64)]
        for batch, n, d in shapes:
            p = checks.floats(method, batch, n, d, dtype, recipe)
            assert checks.macros(checks.attention_launch(p, kernel="long_rows", fuses_keys=1))["FLOAT_KV"] == "1"
            assert checks.differences([(f"{processors} {dtype} {batch} {n} {d}", p)], "long_rows") == {}


@pytest.mark.gpu
@checks.needs_device
@pytest.mark.parametrize("d", (64, 128))
def test_bits_of_more_keys_than_32_bits_hold_the_sums_of(d):
    """With keys without a value and without, where each product is of the largest codes and where it is not."""
    torch.manual_seed(0)
    for nk, causal in ((65_537, None), (70_000, 69_930), (140_000, None)):
        p = ic.codes("intflash_bfp", nq=70, nk=nk, d=d, causal=causal, return_lse=True)
        ones = replace(p, v=replace(p.v, data=torch.full_like(p.v.data, 127)), k=replace(p.k, data=p.k.data * 0))
        made = {"plain": p, "no values": _without_values(p, slice(0, None, 500)), "largest": ones}
        assert checks.differences(made.items(), "long_rows") == {}


def test_sums_of_many_keys_have_64_bits():
    for nk, many in ((65_536, None), (65_537, "1")):
        p = ic.codes("intflash_bfp", nq=70, nk=nk, d=64)
        assert checks.macros(checks.attention_launch(p, kernel="long_rows")).get("MANY_KEYS") == many


def _ranges_of_cta(share: checks.Share, ctas: int, cta: int) -> Iterator[int]:
    """Mirrors `RangeScheduler` of tile_scheduler.cuh."""
    yield from range(cta, share.whole_of_all, ctas)
    if cta >= share.first:
        yield from range(share.whole_of_all + cta - share.first, share.pieces, ctas - share.first)


def _schedule(batch: int, nq: int, nk: int = 300, d: int = 16, dtype=torch.int8, **options) -> tuple[int, checks.Share]:
    """CTAs and ranges of the launch of a problem of `batch` batches and two heads."""
    more = {name: options.pop(name) for name in ("causal", "heads") if name in options}
    p = checks.empty_problem("intflash_online", nk, d, dtype, dtype, batch=batch, **more)
    q = (p.q if isinstance(p.q, torch.Tensor) else p.q.data)[:, :, :1].expand(-1, -1, nq, -1)
    p = replace(p, q=q if isinstance(p.q, torch.Tensor) else replace(p.q, data=q))
    launch = checks.attention_launch(p, **options)
    assert launch.program.file == "sm90/long_rows.cu"
    return launch.grid[0], checks.share_of(launch)


@pytest.mark.parametrize("causal", (None, 0))
def test_ranges_cover_each_row_once(causal):
    """Each range, as `WorkTile` of tile_scheduler.cuh reads it, is taken by one CTA, the smaller ones last."""
    for batch, nq, consumers in itertools.product((1, 2, 5, 40), (1, 191, 192, 193, 400, 1000, 4096), (2, 3)):
        ctas, share = _schedule(batch, nq, causal=causal, resident=0, consumers=consumers)
        rows, heads = 64 * consumers, batch * 2
        ranges = [list(_ranges_of_cta(share, ctas, i)) for i in range(ctas)]
        assert sorted(itertools.chain(*ranges)) == list(range(share.pieces)) and all(ranges)
        assert all(taken_ranges == sorted(taken_ranges) for taken_ranges in ranges) and share.rest_tiles <= consumers
        taken = [[] for _ in range(heads)]
        for i in range(share.pieces):
            if i < share.whole_of_all:
                head, piece = divmod(i, share.whole)
                taken[head].append((piece * rows, piece * rows + rows))
            else:
                head, piece = divmod(i - share.whole_of_all, share.rest)
                first = share.whole * rows + piece * 64 * share.rest_tiles
                taken[head].append((first, first + 64 * share.rest_tiles))
        for parts in taken:
            parts = sorted(parts)
            assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1][0] < nq <= parts[-1][1]


def test_resident_tiles_cover_each_row_once():
    """Each tile of 64 rows, as `ResidentScheduler` of tile_scheduler.cuh reads it, is taken once."""
    for batch, nq in itertools.product((1, 2, 5, 400), (1, 64, 65, 197, 577)):
        ctas, share = _schedule(batch, nq, resident=1)
        assert share.whole == -(-nq // 64)
        first = [i * share.rest_tiles + min(i, share.first) for i in range(ctas + 1)]
        ends = [first[i] + share.rest_tiles + (i < share.first) for i in range(ctas)]
        assert first[0] == 0 and first[1:] == ends and ends[-1] == batch * 2 * share.whole
        assert all(a < b for a, b in itertools.pairwise(first))


def test_resident_tiles_of_floats_cover_each_row_once():
    """With few heads, a CTA takes tiles of one head; with more, whole heads where that costs few more tiles."""
    schedule = functools.partial(_schedule, d=64, dtype=torch.float16, fuses_keys=1)
    for batch, nq in itertools.product((1, 2, 5, 33, 66, 67, 130, 400), (1, 64, 65, 197, 577, 1370)):
        ctas, share = schedule(batch, nq)
        tiles, taken = -(-nq // 64), []
        for i in range(ctas):
            first = i * share.rest_tiles + min(i, share.first)
            run = range(first, min(first + share.rest_tiles + (i < share.first), share.pieces))
            places = [divmod(tile, share.whole) for tile in run]
            taken += [(head, tile) for head, tile in places if tile < tiles]
            assert places[0][1] < tiles and (share.whole == tiles or len({head for head, _ in places}) == 1)
        assert sorted(taken) == list(itertools.product(range(batch * 2), range(tiles)))
    assert schedule(8, 1370)[0] <= 132
    assert [schedule(batch, 577)[0] for batch in (128, 192, 256)] == [128, 128, 128]  # 2, 3 and 4 heads
    ctas, share = schedule(512, 577)  # 8 heads are 80 tiles instead of 78
    assert ctas == 132 and share.rest_tiles == 77


def test_ring_buffers_fit_shared_memory():
    """At least four tiles of keys fit the 227 KB of a CTA, and resident K and V take as many as fit."""
    for d, consumers, method in itertools.product(range(16, 129, 16), (2, 3), METHODS):
        sizes, stages = [], []
        for resident in (0, 1):
            p = checks.empty_problem(method, 400, d)
            launch = checks.attention_launch(p, consumers=consumers, resident=resident)
            sizes.append(launch.shared_bytes)
            stages.append(int(checks.macros(launch)["STAGES"]))
        assert 4 == stages[0] <= stages[1] and sizes[0] <= sizes[1] <= 227 * 1024
        width = 32 if d <= 32 else 64 if d <= 64 else 128  # of K's rows
        stage = -(-128 * (width + d) // 1024) * 1024 + 16
        assert sizes[1] + stage > 227 * 1024 and sizes[1] - sizes[0] == (stages[1] - 4) * stage


def _is_resident(p: Problem) -> bool:
    return checks.macros(checks.attention_launch(p))["KV_RESIDENT"] == "1"


def test_when_kv_is_resident():
    """Codes where they fit; float Q reads codes of K and V again where there are at most two tiles of keys."""
    assert [_is_resident(checks.empty_problem("intflash_online", n, 64, batch=1)) for n in (197, 256, 577, 1700)] == [
        True, True, True, False,
    ]  # fmt: skip
    floats = (
        checks.empty_problem("intflash_online", n, 64, torch.float32, torch.float32, batch=1)
        for n in (197, 256, 577, 1700)
    )
    assert list(map(_is_resident, floats)) == [False, False, True, False]
    assert not _is_resident(checks.empty_problem("intflash_online", 197, 64, causal=0))
    several = (checks.empty_problem("intflash_bfp", 577, d, batch=batch) for d in (64, 80) for batch in (33, 34))
    assert list(map(_is_resident, several)) == [False, True, True, True]  # of 66 and 68 heads


def test_when_the_kernel_finds_scales():
    def in_kernel(n: int, d: int, batch: int, recipe=checks.OF_HEADS, out=torch.float16, **fixed) -> bool:
        p = checks.empty_problem("intflash_p8", n, d, torch.float16, out, recipe=recipe, batch=batch, heads=12)
        return checks.macros(checks.attention_launch(p, **fixed)).get("HEAD_AMAX_IN_KERNEL") == "1"

    assert in_kernel(577, 64, 32) and in_kernel(577, 80, 32) and in_kernel(512, 128, 32)  # several heads for a CTA
    assert in_kernel(577, 64, 10) and in_kernel(257, 80, 2)  # a head, or a part of one
    assert not in_kernel(577, 64, 1) and in_kernel(577, 64, 1, head_amax_in_kernel=1)  # a pass over one image is short
    assert not in_kernel(577, 64, 12)  # one head and a part of another
    assert not in_kernel(1500, 64, 32)  # K and V are not resident
    for recipe, out in ((checks.OF_TENSORS, torch.float16), (checks.OF_HEADS, torch.int8)):
        assert not in_kernel(577, 64, 32, recipe, out, head_amax_in_kernel=1)


def test_which_remainder_rows_have_a_path():
    """At most 8 rows, with resident K and V of at most 640 keys, from a head_dim of 64 on, for methods with an exact
    maximum."""

    def tiles(method: str, nq: int, nk: int, d: int = 64, **fixed) -> str | None:
        p = checks.empty_problem(method, nk, d, batch=64)
        q = replace(p.q, data=p.q.data[:, :, :1].expand(-1, -1, nq, -1))
        return checks.macros(checks.attention_launch(replace(p, q=q), **fixed)).get("REMAINDER_KEY_TILES")

    for method in ("intflash", "intflash_p8", "intflash_bfp"):
        found = [tiles(method, nq, 577) for nq in (576, 577, 584, 585)]
        assert found == [None, "5", "5", None]
        assert [tiles(method, 577, nk, kernel="long_rows") for nk in (257, 640, 641)] == ["3", "5", None]
        assert [tiles(method, 577, 577, d) for d in (48, 64, 80, 128)] == [None, "5", "5", "5"]
        assert tiles(method, 577, 577, resident=0) is tiles(method, 577, 577, remainder=0) is None
    assert tiles("intflash_online", 577, 577) is None


def _quantizes_kv(method: str, n: int, d: int, dtype=torch.float16, **more) -> bool:
    launch = checks.attention_launch(checks.empty_problem(method, n, d, dtype, dtype, **more))
    assert launch.program.file == "sm90/long_rows.cu"
    return checks.macros(launch)["FLOAT_KV"] == "1"


def test_when_the_kernel_quantizes_kv():
    """As measured: not where a CTA would load a long head for one tile of rows, not from float32, and not where a pass
    for the scales would precede it.
    """
    static = Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)
    for batch, n, d, quantizes_kv in (
        (1, 340, 64, True), (32, 577, 64, True), (16, 1370, 64, True), (256, 1408, 64, True), (256, 1409, 64, False),
        (1, 1370, 64, False), (24, 785, 64, False), (256, 640, 128, True), (256, 641, 128, False),
    ):  # fmt: skip
        assert _quantizes_kv("intflash_p8", n, d, batch=batch, recipe=static) == quantizes_kv, (batch, n, d)
    for n, d, quantizes_kv in ((1152, 64, True), (1153, 64, False), (384, 128, True), (385, 128, False)):
        assert _quantizes_kv("intflash_online", n, d, batch=256) == quantizes_kv, (n, d)  # beside a table
    found = functools.partial(_quantizes_kv, "intflash_p8", d=64, recipe=checks.OF_HEADS)
    assert found(577, batch=64) and not found(577, batch=32) and not found(400, batch=1)
    assert _quantizes_kv("intflash_p8", 577, 64, batch=1, recipe=checks.OF_TENSORS)  # the pass finds scales of heads
    assert not _quantizes_kv("intflash_online", 577, 64, torch.float32)
    assert not _quantizes_kv("intflash_online", 577, 64, causal=0)
    p = checks.empty_problem("intflash_online", 577, 64, torch.float16, torch.float16)
    far = torch.empty(p.k.shape, dtype=p.k.dtype, device="meta").as_strided(p.k.shape, (0, 0, 1 << 21, 1))
    assert checks.macros(checks.attention_launch(replace(p, k=far)))["FLOAT_KV"] == "0"


def test_quotient_by_reciprocal():
    """`quotient` of params.cuh divides by floor((2^32 - 1) / by) with one correction."""
    for by in (1, 2, 3, 5, 7, 21, 132, 341, 65_535, 2**31 - 1):
        reciprocal = quotient_reciprocal(by)
        for x in {0, 1, by - 1, by, by + 1, 12_345_678, 2**31 - 1, 2**32 - 1 - (2**32 - 1) % by, 2**32 - 2, 2**32 - 1}:
            q = x * reciprocal >> 32
            assert q + (x - q * by >= by) == x // by


def _range_split(nq: int, heads: int) -> tuple[int, int, int]:
    """Whole ranges of a head, tiles of a smaller one, and the first CTA that takes smaller ones."""
    _, share = _schedule(heads // 2, nq, resident=0, consumers=3)
    return share.whole, share.rest_tiles, share.first


def test_range_splits_of_few_heads():
    """4096 rows of 64 heads are 10.3 ranges of 192 rows for each of 132 multiprocessors and would take 11 rounds."""
    assert _range_split(4096, 64) == (20, 2, 0)
    assert _range_split(4096, 128) == (21, 3, 48)  # those that take 21 whole ranges take no smaller one
    assert _range_split(4224, 60) == (22, 3, 0)
    assert _range_split(512, 16) == (0, 1, 0)  # a tile of 64 rows for each of 128 multiprocessors


def test_range_splits_of_many_heads():
    """With 3000 heads and more, the remaining rows are half of the work."""
    assert _range_split(197, 6144) == (1, 3, 0)  # five rows
    assert _range_split(256, 3072) == (0, 2, 0)
    assert _range_split(320, 6144) == (1, 3, 0)
    assert _range_split(577, 3072) == (3, 3, 0)


def _launch(method: str, d: int, out=torch.int8, causal=None, rows=False, query=None, resident=False, n=340):
    p = checks.empty_problem(method, n, d, torch.int8 if query is None else query, out, causal=causal)
    if rows:
        p = replace(p, q=QTensor(p.q.data, torch.ones(1, 2, n, 1, device="meta"), "token"))
    if query is not None:
        p = replace(p, recipe=checks.OF_TENSORS)
    launch = checks.attention_launch(p, resident=int(resident), fuses_keys=0)
    assert launch.program.file == "sm90/long_rows.cu"
    return launch


# Loads and stores of spilled registers. Those of `intflash_bfp` are in and around the loops for heads some of whose
# keys have no value, and with a scale for each row one in each of the main loops.
MOST_SPILLS = dict.fromkeys(METHODS, 0) | {"intflash_bfp": 24}
IN_EVERY_RUN = ("intflash_p8", 64), ("intflash_online", 16)


@pytest.mark.parametrize(
    "method, d",
    [
        pytest.param(*x, marks=() if x in IN_EVERY_RUN else pytest.mark.full)
        for x in itertools.product(METHODS, (16, 64, 80, 128))
    ],
)
def test_integer_only(method, d):
    """No floating-point opcode between int8 and integers, and no local memory."""
    _check_integer_only(method, d)


@pytest.mark.parametrize("d", checks.in_full_but((128,), (64, 128)))
def test_integer_only_of_dithered_p(d):
    """So many keys that P is dithered, of which each run compiles the plain kernel."""
    _check_integer_only("intflash_bfp", d, 1 if d == 128 else 3, n=900)


def _check_integer_only(method: str, d: int, variants: int = 3, n: int = 340, most_spills: int | None = None) -> None:
    most = MOST_SPILLS[method] if most_spills is None else most_spills
    for out, causal, rows, resident in (
        (torch.int8, None, False, False), (torch.int16, 0, True, False), (torch.int8, None, False, True),
    )[:variants]:  # fmt: skip
        machine = checks.machine(_launch(method, d, out, causal, rows, resident=resident, n=n))
        assert machine.float_instructions == []
        assert machine.spills <= most and machine.stack_bytes <= 4 * most
        assert machine.opcodes["IGMMA"] > 0


@pytest.mark.full
@pytest.mark.parametrize("query", checks.COMPILED_FLOATS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_float_queries_do_not_spill(method, query):
    for d, resident in itertools.product((64, 128), (False, True)):
        launch = _launch(method, d, query, query=query, resident=resident)
        assert checks.machine(launch).spills <= MOST_SPILLS[method]
        if method == "intflash_bfp":
            launch = _launch(method, d, query, query=query, resident=resident, n=900)
            assert checks.machine(launch).spills <= MOST_SPILLS[method]


@pytest.mark.parametrize(
    "recipe",
    (
        pytest.param(checks.OF_TENSORS, id="dynamic"),
        pytest.param(Recipe(q_scale=0.1, k_scale=0.1, v_scale=0.1), id="static", marks=pytest.mark.full),
    ),
)
@pytest.mark.parametrize("method", checks.in_full_but(("intflash_p8",), METHODS))
def test_floats_do_not_spill(method, recipe):
    for d, dtype in itertools.product((64, 80), (torch.float16, torch.bfloat16)):
        assert checks.machine(_float_launch(method, d, dtype, recipe)).spills <= MOST_SPILLS[method]


@pytest.mark.parametrize("method", checks.in_full_but(("intflash_p8",), METHODS))
def test_scales_found_in_the_kernel_do_not_spill(method):
    launch = _float_launch(method, 64, torch.float16, checks.OF_HEADS, head_amax_in_kernel=1)
    assert checks.macros(launch)["HEAD_AMAX_IN_KERNEL"] == "1"
    assert checks.machine(launch).spills <= MOST_SPILLS[method]


def _float_launch(method, d, dtype, recipe, **fixed):
    p = checks.empty_problem(method, 340, d, dtype, dtype, recipe=recipe)
    launch = checks.attention_launch(p, fuses_keys=1, **fixed)
    assert checks.macros(launch)["FLOAT_KV"] == "1"
    return launch


@pytest.mark.parametrize("method", checks.in_full_but(("intflash_bfp",), METHODS))
def test_padded_channels_and_key_masks_do_not_spill(method):
    from_floats = False, True
    for d, floats in itertools.product((40, 56, 72, 88), from_floats):
        assert checks.machine(_workload_launch(method, d, floats)).spills <= MOST_SPILLS[method]
    for floats in from_floats:
        keep = torch.ones(2, 1, 1, 512, dtype=torch.bool, device="meta")
        # a row's maximum may be spilled once for each tile of rows, outside of the loop over keys
        machine = checks.machine(_workload_launch(method, 64, floats, keep=keep))
        assert machine.spills <= 2 * floats + MOST_SPILLS[method]


@pytest.mark.parametrize("shape", checks.in_full_but(((577, 64),), ((577, 64), (257, 80), (449, 128))))
@pytest.mark.parametrize("method", checks.in_full_but(("intflash",), ("intflash", "intflash_p8", "intflash_bfp")))
def test_remainder_rows_do_not_spill(method, shape):
    n, d = shape
    for dtype in (torch.int8, torch.float16):
        p = checks.empty_problem(method, n, d, dtype, dtype, recipe=checks.OF_HEADS, batch=64)
        launch = checks.attention_launch(p, kernel="long_rows", fuses_keys=1, head_amax_in_kernel=1)
        assert "REMAINDER_KEY_TILES" in checks.macros(launch)
        machine = checks.machine(launch)
        assert machine.spills <= MOST_SPILLS[method] and (dtype != torch.int8 or machine.float_instructions == [])


def _workload_launch(method: str, d: int, floats: bool, **more):
    p = checks.empty_problem(method, 512, d, torch.float16, torch.float16, recipe=checks.OF_TENSORS, **more)
    launch = checks.attention_launch(p, fuses_keys=int(floats))
    assert checks.macros(launch)["FLOAT_KV"] == str(int(floats))
    return launch


def test_float_output_has_float_instructions():
    """The negative control: with float output the same check finds floating-point opcodes."""
    assert checks.machine(_launch("intflash_online", 64, torch.float16)).float_instructions


@pytest.mark.full
@pytest.mark.parametrize("causal, resident", ((None, False), (0, False), (None, True)))
@pytest.mark.parametrize("d", range(16, 129, 16))
@pytest.mark.parametrize("method", METHODS)
def test_codes_do_not_spill_anywhere(method, d, causal, resident):
    for out in (torch.int8, torch.float32):
        for rows in (False, True):
            launch = _launch(method, d, out, causal, rows, resident=resident)
            assert checks.machine(launch).spills <= MOST_SPILLS[method]
            if method == "intflash_bfp":
                launch = _launch(method, d, out, causal, rows, resident=resident, n=900)
                assert checks.machine(launch).spills <= MOST_SPILLS[method]


@pytest.mark.full
@pytest.mark.parametrize("d", range(32, 129, 16))
@pytest.mark.parametrize("method", METHODS)
def test_floats_do_not_spill_anywhere(method, d):
    static = Recipe(q_scale=0.1, k_scale=0.1, v_scale=0.1)
    for dtype, recipe in itertools.product((torch.float16, torch.bfloat16), (checks.OF_TENSORS, static)):
        assert checks.machine(_float_launch(method, d, dtype, recipe)).spills <= MOST_SPILLS[method]


def test_sliding_windows_and_other_masks_are_not_for_long_rows():
    """Also after the quantization pass, where only the kernels' own refusals are asked."""
    for dtype in (torch.int8, torch.float16):
        p = checks.empty_problem("intflash", 300, 64, dtype, dtype, causal=0)
        assert plans.find_kernel(p).kernel == "long_rows"
        assert plans.find_kernel(replace(p, window_start=-99)).kernel == "any_rows"
    keep = torch.ones(1, 1, 1, 300, dtype=torch.bool, device="meta")
    p = checks.empty_problem("intflash", 300, 64)
    for mask, kernel in (
        (keep, "long_rows"), (keep.expand(1, 2, 300, 300), "long_rows"), (keep.repeat(1, 1, 300, 1), "any_rows"),
    ):  # fmt: skip
        assert plans.find_kernel(replace(p, keep=mask)).kernel == kernel
