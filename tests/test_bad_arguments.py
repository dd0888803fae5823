"""Every argument of the public functions x every kind of bad value: an InputError that names the argument.

Tensors of other kinds (meta, sparse, nested, complex, float8) go to every backend by every route, and none may end in
an error of torch's own.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_upper_left

import intflash
from intflash import InputError, QTensor, Recipe
from intflash.backends import backends
from small_call import K, Q, V, codes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested and sparse tensors are prototypes, torch says
    KINDS = {
        "meta": lambda x: x.to("meta"),
        "sparse": lambda x: x.to_sparse(),
        "complex": lambda x: x.to(torch.complex64),
        "float8": lambda x: x.to(torch.float8_e4m3fn),
        "nested": lambda x: torch.nested.nested_tensor([x, x[:1]] if len(x) > 1 else [x, x]),
        "jagged": lambda x: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged),
    }
NOT_TENSORS = {"word": "a", "list": [1.0], "dict": {}, "function": len}
TWO = {"two elements": torch.ones(2)}
CU = torch.tensor([0, 20], dtype=torch.int32)
ONE = torch.full((1, 1, 1, 1), 0.05)
MASK = torch.zeros(20, 20)

# Argument -> a good value that the test makes bad, the other arguments that its call needs, and the name in the error.
TENSORS = {
    "q": (Q, {}, "q"),
    "k": (K, {}, "k"),
    "v": (V, {}, "v"),
    "attn_mask": (MASK, {}, "attn_mask"),
    "bias": (MASK, {}, "bias"),
    "out_scale": (ONE, dict(out_dtype=torch.int8), "out_scale"),
    "cu_seqlens_q": (CU, dict(q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_k=CU), "cu_seqlens_q"),
    "cu_seqlens_k": (CU, dict(q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_q=CU), "cu_seqlens_k"),
}
VALUES = {
    "is_causal": NOT_TENSORS | TWO,
    "enable_gqa": NOT_TENSORS | TWO,
    "return_lse": NOT_TENSORS | TWO,
    "check_finite": NOT_TENSORS | TWO,
    "scale": NOT_TENSORS | TWO | {"meta": torch.ones((), device="meta"), "big": 10**400, "zero": 0, "digits": "0.1"},
    "method": NOT_TENSORS | TWO | {"None": None},
    "backend": NOT_TENSORS | TWO,
    "causal_align": NOT_TENSORS | TWO | {"None": None},
    "window_size": NOT_TENSORS | TWO | {"three": (1, 2, 3), "floats": (1.0, 2.0), "below": (-2, 0), "bools": (True, 0)},
    "recipe": NOT_TENSORS | TWO,
    "out_dtype": NOT_TENSORS | TWO | {"float8": torch.float8_e4m3fn},
    "out_scale": {"list": [1.0], "big": 10**400, "past float32": 1e39, "two": torch.ones(2), "none": torch.ones(0)},
}
CASES = {
    f"{argument}-{kind}": (good[0], make, good[1], argument, good[2])
    for argument, good in TENSORS.items()
    for kind, make in KINDS.items()
}
ROUTES = {"attention": intflash.attention, "which_backend": intflash.which_backend}


def call(function, argument, value, **options):
    return function(**(dict(q=Q, k=K, v=V) | options | {argument: value}))


@pytest.mark.parametrize("backend", [None, *sorted(backends())])
@pytest.mark.parametrize("case", CASES)
def test_tensors_of_another_kind_are_refused_by_name(case, backend):
    good, make, options, argument, name = CASES[case]
    for function in ROUTES.values():
        for check in (None, True, False):
            with pytest.raises(InputError, match=rf"\b{name}\b"):
                call(function, argument, make(good), backend=backend, check_finite=check, **options)


@pytest.mark.parametrize("argument, value", [
    pytest.param(name, value, id=f"{name}-{kind}") for name, kinds in VALUES.items() for kind, value in kinds.items()
])  # fmt: skip
def test_values_of_another_kind_are_refused_by_name(argument, value):
    options = dict(out_dtype=torch.int8) if argument == "out_scale" else {}
    for backend in {None, "torch", "cpu", "reference"} if argument != "backend" else {None}:
        for function in ROUTES.values():
            with pytest.raises(InputError, match=rf"\b{argument}\b"):
                call(function, argument, value, **options, **({"backend": backend} if argument != "backend" else {}))


def lazily_negated(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose value differs from its memory. Its calls go through torch's dispatcher."""
    return torch._neg_view(x)


OF_CODES = {*TENSORS, *VALUES} - {"q", "k", "v", "recipe", "cu_seqlens_q", "cu_seqlens_k"}


@pytest.mark.parametrize("argument", sorted({*TENSORS, *VALUES}))
def test_the_custom_op_refuses_the_same(argument):
    """The error comes from us, and not from the dispatcher's check of a schema."""
    options = TENSORS.get(argument, (0, dict(out_dtype=torch.int8) if argument == "out_scale" else {}))[1]
    name = "q, k and v" if argument in "qkv" else argument
    with pytest.raises(InputError, match=name):
        call(intflash.attention, argument, [1.0], **(options | dict(q=lazily_negated(options.get("q", Q)))))
    if argument in OF_CODES:
        x = intflash.quantize(Q)
        with pytest.raises(InputError, match=name):
            call(intflash.attention, argument, [1.0], **options, **codes(q=QTensor(lazily_negated(x.data), x.scale)))


@pytest.mark.parametrize("name", KINDS)
def test_scales_of_another_kind(name):
    bad = KINDS[name](ONE)
    data = torch.ones(1, 1, 4, 4, dtype=torch.int8)
    with pytest.raises(InputError, match="scale"):
        QTensor(data, bad)
    with pytest.raises(InputError, match="data must be"):
        QTensor(KINDS[name](torch.ones(1, 1, 4, 4)), 0.1)
    for backend in ("torch", "cpu", "reference"):
        with pytest.raises(InputError, match="k's scale|k_scale"):
            intflash.attention(Q, K, V, recipe=Recipe(k_scale=bad), backend=backend)
        with pytest.raises(InputError, match="k's scale|k_scale"):
            intflash.attention(Q, K, V, recipe=Recipe(k_scale=bad), backend=backend, check_finite=False)


BAD = {
    "no query": (lambda: intflash.attention(None, K, V), "q, k and v"),
    "no query, dynamic": (
        lambda: intflash.attention(None, K, V, out_dtype=torch.int8, out_scale="dynamic"),
        "q, k and",
    ),
    "codes past float32": (lambda: QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 1e39), "scale .*1e.39"),
    "codes past float64": (lambda: QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 10**400), "scale .*of 401 digits"),
    "recipe past float64": (lambda: Recipe(v_scale=10**400), "v_scale .*of 401 digits"),
    "recipe of nothing": (lambda: Recipe(q_scale=torch.ones(0)), "q_scale must not be empty"),
    "recipe of words": (lambda: Recipe(smooth_k="False"), "smooth_k must be True or False, got 'False'"),
    "recipe of float bits": (lambda: Recipe(bits=8.0), "bits must be 4 or 8, got 8.0"),
    "16 bits of int8": (lambda: QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 1.0, bits=16), "must be int16"),
    "huge block": (lambda: Recipe(q="block", block_size=2**70), "block_size must be an integer below 2.31"),
    "huge block of codes": (
        lambda: QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 1.0, "block", 2**70),
        "block_size must be an integer below 2.31",
    ),
    "quantize nothing": (lambda: intflash.quantize(None), "quantize takes"),
    "quantize a list as scale": (lambda: intflash.quantize(Q, scale=[1.0]), "scale must be a number"),
    "dropout word": (lambda: intflash.sdpa(Q, K, V, None, "a"), "dropout_p must be 0"),
    "calibrate nothing": (lambda: intflash.calibrate(None, []), "an nn.Module"),
    "unpatch nothing": (lambda: intflash.unpatch(None), "an nn.Module"),
    "patch nothing": (lambda: intflash.patch(None), "an nn.Module"),
    "no scales file": (lambda: intflash.patch(nn.Linear(1, 1), scales="/nope.json"), "/nope.json"),
    "no scales file, as a path": (lambda: intflash.patch(nn.Linear(1, 1), scales=Path("/nope.json")), "/nope.json"),
    "bias list": (lambda: intflash.quantize_bias([1.0]), "quantize_bias takes"),
    "bias sparse": (lambda: intflash.quantize_bias(torch.eye(3).to_sparse()), "bias must be a dense"),
    "bias float8": (lambda: intflash.quantize_bias(torch.ones(3).to(torch.float8_e4m3fn)), "quantize_bias takes"),
}


@pytest.mark.parametrize("attempt, message", BAD.values(), ids=BAD.keys())
def test_other_functions(attempt, message):
    with pytest.raises(InputError, match=message):
        attempt()


def test_huge_blocks_allocate_for_existing_tokens_only():
    recipe, fits = (Recipe(q="block", k="block", block_size=size) for size in (10**9, 20))
    x = [torch.randn(1, 1, 20, 16) for _ in range(3)]
    for backend in ("reference", "torch", "cpu"):
        found = intflash.attention(*x, recipe=recipe, backend=backend)
        assert torch.equal(found, intflash.attention(*x, recipe=fits, backend=backend))
    assert intflash.quantize(x[0], "block", block_size=10**9).token_scale().shape == (1, 1, 20, 1)


def test_flags_of_other_types_keep_their_meaning():
    expected = intflash.attention(Q, K, V, None, True)
    for flag in (torch.tensor(True), torch.ones(1), 1):
        assert torch.equal(intflash.attention(Q, K, V, None, flag), expected)
    assert len(intflash.attention(Q, K, V, return_lse=torch.tensor(True))) == 2


@pytest.mark.parametrize(
    "options", [{}, dict(return_lse=True), dict(out_dtype=torch.int8, out_scale="dynamic")], ids=str
)
def test_meta_tensors_give_shapes(options):
    """As with torch's own attention, tensors without values have an output without values."""
    q, k, v = (x.to("meta") for x in (Q, K, V))
    for backend in (None, "cpu", "torch", "reference"):
        for check in (None, True, False):
            out = intflash.attention(q, k, v, backend=backend, check_finite=check, **options)
            out = out[0] if isinstance(out, tuple) else out
            assert out.shape == Q.shape and out.device.type == "meta"
    with pytest.raises(InputError, match="same head_dim"):
        intflash.attention(q[..., :8], k, v)


def test_huge_numbers_are_shown_short():
    with pytest.raises(InputError) as found:
        intflash.attention(Q, K, V, out_dtype=torch.int8, out_scale=10**4000)
    assert len(str(found.value)) < 200


def test_float64_scales_past_float32():
    """They are checked as they are used, in float32."""
    big = torch.tensor(1e39, dtype=torch.float64)
    with pytest.raises(InputError, match="out_scale must be finite"):
        intflash.attention(Q, K, V, out_dtype=torch.int8, out_scale=big)
    with pytest.raises(InputError, match="q's scale must be finite"):
        intflash.attention(Q, K, V, recipe=Recipe(q_scale=big))


def test_sdpa_refuses_flags_of_another_kind():
    for flag in ("is_causal", "enable_gqa"):
        with pytest.raises(InputError, match=f"{flag} must be True or False"):
            intflash.sdpa(Q, K, V, **{flag: torch.ones(2)})


def test_a_causal_bias_of_one_corner_and_the_other_corner():
    upper = causal_upper_left(20, 20)
    with pytest.raises(InputError, match="upper left corner, got causal_align='bottom_right'"):
        intflash.attention(Q, K, V, upper, causal_align="bottom_right")


def test_the_default_device_does_not_move_a_call():
    with torch.device("meta"):
        outs = [intflash.attention(Q, K, V, backend=name) for name in ("reference", "torch")]
    assert torch.equal(*outs) and outs[0].device.type == "cpu"


def test_shapes_of_static_scales_are_checked_before_a_backend_is_chosen():
    recipe = Recipe(q="head", q_scale=torch.ones(3) * 0.03)
    for function in (intflash.which_backend, intflash.attention):
        with pytest.raises(InputError, match=r"'head' scale of data .* must have shape .*, got \(3,\)"):
            function(Q, K, V, recipe=recipe)


def test_values_that_smoothing_takes_past_float32_are_refused():
    for recipe in (Recipe(smooth_k=True), Recipe(rotate=True)):
        with pytest.raises(InputError, match="too large to be rotated or smoothed"):
            intflash.attention(Q, torch.full_like(K, 1e38), V, recipe=recipe)
