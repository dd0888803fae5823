"""Calls whose values nobody reads: docs/numerics.md, "Unchecked calls", the same bits on every CPU backend.

Offsets of packed sequences in CPU memory are read all the same.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import intflash
from intflash import InputError, QTensor, Recipe
from intflash.backends import cpu
from intflash.call import prepare
from intflash.numerics.exp import ABSENT, bias_bound
from small_call import K, Q, V, attend

NAN, INF = math.nan, math.inf
BAD_VALUES = (NAN, -NAN, INF, -INF)
BAD_SCALES = (0.0, -0.5, *BAD_VALUES, 2.0**-127)
RECIPES = {
    "dynamic": None,
    "dynamic per head": Recipe(q="head", k="head", v="head"),
    "static": Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02),
    "static per head": Recipe("head", "head", "head", **{f"{n}_scale": torch.full((4,), 0.02) for n in "qkv"}),
    "smooth, rotated": Recipe(smooth_k=True, rotate=True),
    "four bits": Recipe(bits=4),
    "per token": Recipe(q="token"),
}
METHODS = ("intflash", "intflash_p8", "intflash_online", "qflash", "iflash")


def outcome(backend: str, **call):
    """The bits of an unchecked call."""
    out = attend(backend=backend, check_finite=False, **call)
    return (out.data, out.scale) if isinstance(out, QTensor) else (out,)


def same(a, b) -> bool:
    return all(
        torch.equal(x.nan_to_num(7), y.nan_to_num(7)) and torch.equal(x.isnan(), y.isnan())
        for x, y in zip(a, b, strict=True)
    )


def with_bad_value(x: torch.Tensor, value: float, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype, copy=True)
    x[1, 1, 3, 5] = value
    return x


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("method", METHODS)
def test_values_that_are_not_finite(method, recipe):
    if method in ("qflash", "iflash") and recipe is not None and recipe.q == "token":
        recipe = Recipe("tensor", "tensor", "tensor", rule="divide")
    dtypes = itertools.cycle((torch.float32, torch.float16, torch.bfloat16))
    outputs = itertools.cycle((dict(out_dtype=torch.float32), dict(out_dtype=torch.int8, out_scale="bound")))
    for name, value in itertools.product("qkv", BAD_VALUES):
        dtype = next(dtypes)
        tensors = {n: with_bad_value(x, value if n == name else 1.0, dtype) for n, x in (("q", Q), ("k", K), ("v", V))}
        call = tensors | dict(method=method, recipe=recipe) | next(outputs)
        expected = outcome("reference", **call)
        for backend in ("torch", "cpu"):
            assert same(outcome(backend, **call), expected), (backend, name, value, dtype)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("recipe", ["dynamic", "dynamic per head", "static"])
def test_every_instruction_set_gives_these_bits(recipe, isa):
    for value, dtype in itertools.product(BAD_VALUES, (torch.float32, torch.float16, torch.bfloat16)):
        x = [with_bad_value(x, value, dtype) for x in (Q, K, V)]
        problem, _ = prepare(*x, recipe=RECIPES[recipe], check_finite=False)
        expected = attend(
            **dict(zip("qkv", x, strict=True)), recipe=RECIPES[recipe], check_finite=False, backend="reference"
        )
        assert torch.equal(cpu.run(problem, isa=isa).out, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", BAD_SCALES)
def test_scales_that_are_none_count_as_one(scale, method):
    codes = [intflash.quantize(x) for x in (Q, K, V)]
    for i, name in enumerate("qkv"):
        for bad in (torch.tensor(scale), torch.full((4,), scale)):
            kind = "tensor" if bad.ndim == 0 else "head"
            with_codes = [dict(zip("qkv", codes, strict=True)) for _ in range(2)]
            if scale == 2.0**-127:  # a good scale of codes, whose reciprocal nobody takes
                bad_scale = bad
            else:
                bad_scale = torch.ones_like(bad)
            with_codes[0][name] = QTensor(codes[i].data, bad, kind)
            with_codes[1][name] = QTensor(codes[i].data, bad_scale, kind)
            recipes = [dict(recipe=Recipe(**{name: kind, f"{name}_scale": s})) for s in (bad, torch.ones_like(bad))]
            for backend in ("reference", "torch", "cpu"):
                for one, other in (with_codes, recipes):
                    options = dict(method=method, out_dtype=torch.float32)
                    assert same(outcome(backend, **one, **options), outcome(backend, **other, **options)), (
                        backend,
                        name,
                    )
    if not method.startswith("intflash"):
        return
    for backend in ("reference", "torch", "cpu"):
        found = outcome(backend, method=method, out_dtype=torch.int8, out_scale=torch.tensor(scale))
        assert same(found, outcome(backend, method=method, out_dtype=torch.int8, out_scale=1.0))


def test_repeated_unchecked_calls_do_not_keep_a_scale():
    good, bad = torch.full((4,), 0.03), torch.full((4,), 0.03)
    bad[2] = NAN
    mended = torch.where(bad.isnan(), 1.0, bad)
    for scale, usable in ((good, good), (bad, mended), (good, good), (bad, mended)):
        found, expected = (attend(recipe=Recipe(q="head", q_scale=s), check_finite=False) for s in (scale, usable))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "value, code", [(NAN, ABSENT), (-INF, ABSENT), (INF, 2**31 - 1), (5000.0, 2**31 - 1), (-5000.0, 1 - 2**31)]
)
def test_biases_saturate_and_nan_is_absent(value, code):
    assert intflash.quantize_bias(torch.tensor([value])).item() == code
    bias = torch.zeros(20, 20)
    bias[:, 3] = value
    integer = intflash.quantize_bias(bias)
    options = dict(method="intflash", check_finite=False)
    for backend in ("reference", "torch", "cpu"):
        found = attend(bias=bias, backend=backend, **options)
        assert torch.equal(found, attend(bias=integer, backend=backend, **options))
        assert torch.equal(found, attend(bias=bias, backend="reference", **options))


@pytest.mark.parametrize("method", intflash.info()["methods"])
def test_nan_in_a_bias_makes_its_key_absent(method):
    bias = torch.linspace(-1, 1, 400).view(20, 20)
    bias[4, 3], bias[7] = NAN, NAN
    expected = attend(method=method, backend="reference", bias=bias.nan_to_num(-INF), check_finite=False)
    for backend in ("reference", "torch") + ("cpu",) * (method in cpu.METHODS):
        found = attend(method=method, backend=backend, bias=bias, check_finite=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online"])
def test_masks_that_would_saturate_are_refused_with_the_bound(method, sign):
    """ALiBi over 4,096 tokens, and a constant that does not change a softmax, would saturate and lose accuracy."""
    past, at = (torch.full((20, 20), sign * x) for x in (1419.6, 1419.5))
    for name in ("attn_mask", "bias"):
        for backend in (None, "reference", "torch", "cpu"):
            with pytest.raises(InputError, match=rf"{name} must lie within \+-1419.56 .*makes a key absent"):
                attend(**{name: past}, method=method, backend=backend)
            attend(**{name: at}, method=method, backend=backend)
    assert torch.equal(intflash.sdpa(Q, K, V, past), intflash.sdpa(Q, K, V, at))  # the default holds more
    with pytest.raises(InputError, match=r"attn_mask must lie within \+-363408"):
        intflash.sdpa(Q, K, V, 256 * past)
    with pytest.raises(InputError, match="bias holds saturated codes: .*1419.56"):
        attend(bias=intflash.quantize_bias(past), method=method)


def test_saturated_codes_are_found_in_repeated_calls():
    good, past = (intflash.quantize_bias(torch.full((20, 20), x)) for x in (3.0, 5000.0))
    for _ in range(3):
        attend(bias=good)
        with pytest.raises(InputError, match="bias holds saturated codes"):
            attend(bias=past)
        attend(bias=past, check_finite=False)


def test_absent_keys_and_methods_with_float_biases_have_no_bound():
    assert math.isclose(bias_bound(), 2048 * math.log(2), rel_tol=1e-6)
    mask = torch.zeros(20, 20)
    for absent in (-INF, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min / 2):
        mask[:, 3] = absent
        expected = attend(attn_mask=mask > -1)
        assert torch.equal(attend(attn_mask=mask), expected)
        assert torch.equal(intflash.sdpa(Q, K, V, mask), expected)
    half = torch.zeros(20, 20, dtype=torch.float16)
    half[:, 3] = torch.finfo(torch.float16).min
    attend(attn_mask=half)
    attend(attn_mask=mask + 5000.0, method="fp32")


CU = {
    "other end": [0, 4],
    "past the end": [0, 40],
    "not from 0": [3, 20],
    "falling": [0, 12, 9, 20],
    "negative": [0, -5, 20],
}


@pytest.mark.parametrize("ends", CU.values(), ids=CU.keys())
@pytest.mark.parametrize("backend", [None, "reference", "torch", "cpu"])
@pytest.mark.parametrize("method", ["intflash", "fp32"])
def test_offsets_in_cpu_memory_are_always_read(method, backend, ends):
    bad = torch.tensor(ends, dtype=torch.int32)
    good = torch.linspace(0, 20, len(ends)).to(torch.int32)
    for cu_q, cu_k in ((bad, good), (good, bad)):
        for check, lse in itertools.product((None, True, False), (False, True)):
            with pytest.raises(InputError, match="must rise from 0 to 20"):
                attend(
                    q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend, method=method,
                    check_finite=check, return_lse=lse,
                )  # fmt: skip


def test_float16_nans_keep_their_sign_at_every_place():
    x = torch.full((1, 1, 1, 35), 0xFE00 - 0x10000, dtype=torch.int16).view(torch.float16)  # 35: beyond whole vectors
    assert set(intflash.quantize(x, "head").data.flatten().tolist()) == {-127}
    assert set(intflash.quantize(-x, "head").data.flatten().tolist()) == {127}


def test_scales_past_float32_count_as_one():
    """As all scales that a check would refuse."""
    big = torch.tensor(1e39, dtype=torch.float64)
    outs = [intflash.attention(Q, K, V, recipe=Recipe(q_scale=x), check_finite=False) for x in (big, torch.tensor(1.0))]
    assert torch.equal(*outs)
