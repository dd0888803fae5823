"""Problems for the integer-only Triton kernels, whose results must equal the reference's bit for bit.

`python integer_cases.py report METHOD` runs them in Triton's interpreter and prints the differences as JSON,
`report_sinks` those of rows with sinks, `report_few_sinks` of some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

if __name__ == "__main__":
    import interpreter  # noqa: F401  sets TRITON_INTERPRET before Triton is imported

import torch
from mixed_cases import on_device

from intflash.backends.portable import BACKEND as TORCH
from intflash.backends.reference import BACKEND as REFERENCE
from intflash.backends.triton import BACKEND
from intflash.methods import get_method
from intflash.numerics.exp import LOG2_E
from intflash.numerics.groups import ROUNDED_KEYS
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe, quantize

OURS = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp")
QFLASH_METHODS = ("qflash", "iflash")
ABSENT = -(1 << 31)


def codes(
    method, batch=1, heads=2, nq=50, nk=150, d=32, dv=None, key_heads=None, amax=4.0, kinds=("tensor",) * 3, **more
) -> Problem:  # fmt: skip
    """Makes a problem of int8 codes with int8 output."""
    key_heads = key_heads or heads
    shapes = (batch, heads, nq, d), (batch, key_heads, nk, d), (batch, key_heads, nk, dv or d)
    q, k, v = (quantize((torch.rand(s) * 2 - 1) * amax, g, block_size=32) for s, g in zip(shapes, kinds, strict=True))
    return Problem(method, q, k, v, d**-0.5, **(dict(out_dtype=torch.int8) | more))


def floats(method, nk=150, dtype=torch.float16, recipe=None, **more) -> Problem:
    q, k, v = (torch.randn(s).to(dtype) for s in ((2, 4, 50, 32), (2, 2, nk, 32), (2, 2, nk, 32)))
    recipe = recipe or get_method(method).recipe
    return Problem(method, q, k, v, 32**-0.5, recipe=recipe, **(dict(out_dtype=dtype) | more))


def float_query(p: Problem, dtype: torch.dtype, recipe: Recipe, **more) -> Problem:
    """The problem with floats for its codes of Q, and output of their dtype."""
    q = (p.q.data * 0.02).to(dtype)
    return replace(p, q=q, recipe=recipe, **(dict(out_dtype=dtype) | more))


def _bias(method, shape, own: bool = False) -> dict[str, torch.Tensor | int]:
    """Makes the bias of a problem, in which a fifth of the keys is absent. own: with the fraction bits of a float bias
    of the method, else those of `quantize_bias`."""
    gone = torch.rand(shape) < 0.2
    if method in QFLASH_METHODS:
        return {"bias_float": torch.randn(shape).masked_fill(gone, -torch.inf)}
    bits = get_method(method).bias_fraction_bits if own else 20
    codes = torch.randint(-(4 << bits), 4 << bits, shape, dtype=torch.int32).masked_fill(gone, ABSENT)
    return {"bias": codes, "bias_fraction_bits": bits}


def cases(method: str, large: bool = False) -> Iterator[tuple[str, Problem]]:
    """Named problems of a method; `large` adds the shapes that the interpreter is too slow for."""
    sizes = [(17, 17), (49, 32), (64, 80)]
    if large:
        sizes += [(n, d) for n in (1, 49, 64, 197, 256, 300, 1024) for d in (1, 17, 64, 80, 128, 256)]
    for n, d in sizes:
        yield f"n{n} d{d}", codes(method, nq=n, nk=n, d=d, return_lse=True)
    yield "int16", codes(method, out_dtype=torch.int16)
    yield "float32", codes(method, nk=300, out_dtype=torch.float32)
    for nq, nk in [(50, 150)] + [(300, 520)] * large:
        shape = dict(nq=nq, nk=nk)
        for offset in (0, nk - nq, -30):
            yield f"{nq} causal {offset}", codes(method, causal=offset, return_lse=True, **shape)
        for window, causal in ((-20, 40), (nk - nq - 60, nk - nq), (0, 0), (-nk, 9)):
            yield (
                f"{nq} window {window} {causal}",
                codes(method, causal=causal, window_start=window, return_lse=True, **shape),
            )
        yield f"{nq} gqa", codes(method, heads=4, key_heads=2, d=17, dv=20, **shape)
        yield f"{nq} bias", codes(method, batch=4, heads=1, **_bias(method, (2, 1, 1, nk)), **shape)
        yield f"{nq} bias of rows", codes(method, batch=2, **_bias(method, (1, 2, nq, nk), own=True), **shape)
        keep = torch.rand(2, 1, nq, nk) < 0.5
        yield f"{nq} keep", codes(method, batch=2, heads=1, keep=keep, return_lse=True, **shape)
        yield f"{nq} keep causal", codes(method, batch=2, heads=1, keep=keep, causal=nk - nq, **shape)
        masks = dict(keep=torch.rand(3, 1, 1, nk) < 0.5, **_bias(method, (2, 1, 1, nk)))
        yield f"{nq} bias, keep, causal, fewer batches", codes(method, batch=6, heads=1, causal=3, **masks, **shape)
    if large:
        yield "bfloat16", codes(method, nq=300, nk=600, d=64, out_dtype=torch.bfloat16)
        yield "strides", _strided(method)
    ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 20, 20, 50), (0, 33, 100, 150))]
    packed = dict(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    yield "packed", codes(method, causal=0, causal_align="bottom_right", return_lse=True, **packed)
    packed |= dict(causal=3, window_start=-9)
    yield "packed window", codes(method, causal_align="bottom_right", return_lse=True, **packed)
    if method in QFLASH_METHODS:
        yield "heads", codes(method, kinds=("head", "head", "head"))
        yield "tiny scale", codes(method, amax=0.05, causal=3)
        for amax in (1e-6, 5000.0):  # round(1 / sm_scale) above 2^31 and below 1, in unchecked calls
            yield f"amax {amax}", codes(method, amax=amax, return_lse=True, **_bias(method, (1, 1, 50, 150)))
        return
    for amax in (1e-6, 500.0, 50000.0):  # uniform attention; a single key; k = 8
        yield f"amax {amax}", codes(method, amax=amax)
    if method == "intflash_bfp":
        yield from sink_cases(method)
    channels = dict(kinds=("token", "head", "channel"))
    yield "token, head, channel", codes(method, **channels)
    yield "token, head, channel, float32", codes(method, out_dtype=torch.float32, **channels)
    yield "token, block", codes(method, kinds=("token", "block", "tensor"), causal=5)
    yield "out scale", codes(method, kinds=("tensor", "tensor", "channel"), out_scale=torch.full((1, 1, 1, 1), 0.003))
    static = Recipe(q_scale=0.02, k_scale=0.015, v_scale=torch.tensor(0.02))
    heads = Recipe(v="head", q_scale=0.02, k_scale=0.015, v_scale=torch.tensor([0.02, 0.03]))
    of_heads = {f"{n}_scale": torch.linspace(0.01, 0.05, h) for n, h in zip("qkv", (4, 2, 2), strict=True)}
    for nk in (60, 300):
        yield f"floats {nk} dynamic", floats(method, nk)
        yield f"floats {nk} dynamic of tensors", floats(method, nk, recipe=Recipe("tensor", "tensor", "tensor"))
        yield f"floats {nk} dynamic of both", floats(method, nk, recipe=Recipe("head", "tensor", "head"))
        yield f"floats {nk} dynamic, int8", floats(method, nk, torch.float32, out_dtype=torch.int8)
        yield f"floats {nk} static", floats(method, nk, recipe=static)
        yield f"floats {nk} static heads", floats(method, nk, torch.float32, heads, out_dtype=torch.int8)
        yield f"floats {nk} static heads of all", floats(method, nk, recipe=Recipe("head", "head", "head", **of_heads))
    for recipe in (Recipe(), Recipe("token", q_scale=None), Recipe(q_scale=0.02)):
        yield f"float q {recipe.q}", float_query(codes(method, kinds=("head", "head", "head")), torch.float16, recipe)
    yield "floats token", floats(method, recipe=Recipe(q="token", k="head"))
    yield "zeros", Problem(method, *(torch.zeros(1, 1, 20, 32) for _ in "qkv"), 0.2, out_dtype=torch.float32)


def sinks(method: str, octaves: float, zeros: tuple[int, ...], n=900, d=32, nq=None, **more) -> Problem:
    """Makes a problem in which every 90th key is a sink, `octaves` above the others, with values of `zeros` all 0."""
    p = codes(method, nq=nq or n, nk=n, d=d, **more)
    q, k, v = (p.q.data.clone(), p.k.data.clone(), p.v.data.clone())
    q[..., 0], k[..., 0], k[..., ::90, 0] = 16, 0, 127
    q[..., ::3, :] //= 4  # rows with other gaps
    v[..., list(zeros), :] = 0
    scale = torch.full((1, 1, 1, 1), octaves / (16 * 127 * p.sm_scale * LOG2_E))
    one = torch.full((1, 1, 1, 1), 1.0)
    made = (QTensor(x, s, "tensor") for x, s in ((q, scale), (k, one), (v, p.v.scale)))
    return replace(p, **dict(zip("qkv", made, strict=True)))


def sink_cases(method: str) -> Iterator[tuple[str, Problem]]:
    """Sinks with and without a value, at gaps over which the others' l merges exactly, with floored bits, and not at
    all; in sequences whose p is dithered and rounded, and in packed ones of both.
    """
    few = dict(nq=20, return_lse=True, out_dtype=torch.int16)  # rows: the interpreter is slow
    for octaves in (3.0, 20.0, 40.0, 60.0, 130.0):
        for zeros in ((), tuple(range(0, 900, 90)), (1, *range(128, 256)), tuple(range(900))):
            yield f"sinks of {octaves} octaves, {len(zeros)} zeros", sinks(method, octaves, zeros, **few)
    zeros = tuple(range(0, 900, 90))
    yield "sinks, float32", sinks(method, 40.0, zeros, nq=20, out_dtype=torch.float32)
    yield "sinks, small output scale", sinks(method, 40.0, zeros, nq=20, out_scale=torch.full((1, 1, 1, 1), 1e-12))
    yield "sinks, causal", sinks(method, 40.0, zeros, causal=580, **few)
    yield "sinks, gqa", sinks(method, 8.0, zeros, heads=4, key_heads=2, **few)
    for octaves in (10.0, 26.0, 130.0):
        for zeros in ((), (0, 90), tuple(range(200))):
            name = f"sinks of {octaves} octaves in 420 keys, {len(zeros)} zeros"
            yield name, sinks(method, octaves, zeros, n=420, **few)
    ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 8, 15, 20), (0, 37, 837, 1300))]
    packed = dict(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], n=1300, **few)
    for more in ({}, dict(causal=0, causal_align="bottom_right", window_start=-300)):
        yield f"sinks, packed, {len(more)} masks", sinks(method, 17.0, (90, 900), **packed, **more)
    yield "sinks, window", sinks(method, 17.0, (90, 450), causal=860, window_start=300, **few)
    yield "-128", _uniform(method, -128, ROUNDED_KEYS)


def _uniform(method: str, value: int, n: int) -> Problem:
    """Makes a problem in which all weights are equal and so are the values."""
    p = codes(method, nq=3, nk=n, d=32, amax=1e-6, out_dtype=torch.int16)
    return replace(p, v=replace(p.v, data=torch.full_like(p.v.data, value)))


def _strided(method: str) -> Problem:
    """Makes Q, K and V as slices of one [B, N, 3, H, D] tensor."""
    packed = torch.randint(-127, 128, (2, 197, 3, 3, 64), dtype=torch.int8)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    p = codes(method)
    q, k, v = (type(p.q)(x, p.q.scale) for x in (q, k, v))
    return Problem(method, q, k, v, 0.125, out_dtype=torch.int8)


def complaint(p: Problem, device: str = "cpu") -> str | None:
    """Returns how the Triton backend's result differs from the reference's on the CPU, or None."""
    there = on_device(p, device)
    reason = BACKEND.unsupported(there)
    if reason:
        return f"unsupported: {reason}"
    want, got = REFERENCE.run(p.quantized()), BACKEND.run(there)
    out = got.out.cpu()
    if out.dtype != want.out.dtype or not torch.equal(want.out, out):
        return f"{(want.out != out).double().mean():.5f} of the outputs differ"
    if want.out_scale is not None and not torch.equal(want.out_scale, got.out_scale.cpu().expand_as(want.out_scale)):
        return "the output's scale differs"
    # float64 logarithms of two devices may differ by one unit in the last place
    if want.lse is not None and not torch.allclose(want.lse, got.lse.cpu(), rtol=1e-6, atol=1e-6, equal_nan=True):
        return f"log-sum-exp off by {(want.lse - got.lse.cpu()).abs().max():.2g}"
    return None


def unread_scales(method: str) -> dict[str, str | None]:
    """Returns the differences from the torch backend for scales outside a method's range in unchecked calls."""
    found = {}
    for octaves in (2.01, torch.inf, 2.0**-32, 0.0, -0.5, torch.nan):
        p = codes(method, nq=9, nk=40, d=16)
        scale = torch.full((1, 1, 1, 1), octaves / (p.k.scale.item() * p.sm_scale * LOG2_E))
        p = replace(p, q=QTensor.unchecked(p.q.data, scale, "tensor", 8))
        same = torch.equal(TORCH.run(p).out, BACKEND.run(p).out)
        found[f"{method}, {octaves} octaves"] = None if same else "the outputs differ"
    return found


def report_sinks(method: str) -> dict[str, str | None]:
    return {name: complaint(p) for name, p in sink_cases(method)}


def report_few_sinks(method: str) -> dict[str, str | None]:
    """Returns the differences where sums are merged with floored bits: with all kinds of keys without a value. Once
    more with the sums of more than 65,536 keys.
    """
    from intflash.backends.triton import two_groups

    few = [case for case in sink_cases(method) if case[0].startswith(("sinks of 40.0", "sinks of 26.0", "sinks, p"))]
    found = {name: complaint(p) for name, p in few}
    two_groups.steps_for = lambda problem: two_groups.STEPS_OF_MANY_KEYS
    return found | {f"{name}, int64": complaint(p) for name, p in few}


def report(method: str) -> dict[str, str | None]:
    from intflash.backends.triton import launch

    found = {name: complaint(p) for name, p in cases(method)}
    if method in QFLASH_METHODS:
        found |= unread_scales(method)
    launch.MOST_BATCHES = 0  # any batch stands for one that only the first axis of a grid holds
    again = ("n17 d17", "floats 60 dynamic", "floats 300 dynamic", "50 gqa")
    return found | {f"{name}, batch first": complaint(p) for name, p in cases(method) if name in again}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    reports = dict(report=report, report_sinks=report_sinks, report_few_sinks=report_few_sinks)
    print(json.dumps(reports[sys.argv[1]](sys.argv[2])))
