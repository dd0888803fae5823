"""The processing of a call's tensors before and after a backend: checks, smoothing, rotation, output scales."""

import pytest
import torch

import intflash
from intflash import InputError, Recipe, call, op
from intflash.call import prepare
from oracle import randn, sqnr

Q, K, V = randn(2, 4, 20, 16)
BACKENDS = ["cpu", "torch", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, dict(recipe=Recipe(bits=4), out_dtype=torch.int8, out_scale="bound"), dict(recipe=Recipe(smooth_k=True)),
     dict(recipe=Recipe(rotate=True)), dict(out_dtype=torch.int8, out_scale="bound"), dict(recipe=Recipe(q="token"))],
    ids=str,
)  # fmt: skip
def test_one_bad_value_is_found_for_every_backend_and_recipe(options, backend):
    k = K.clone()
    k[1, 2, 3, 4] = float("nan")
    with pytest.raises(InputError, match="k must be finite, got 1 non-finite of 2560"):
        intflash.attention(Q, k, V, backend=backend, **options)


@pytest.mark.parametrize("rotate", [False, True])
def test_smoothing_shifts_the_lse_of_every_group(rotate):
    k = K[:, :2] + torch.tensor([5.0, -3.0]).view(1, 2, 1, 1)
    options = dict(enable_gqa=True, recipe=Recipe(smooth_k=True, rotate=rotate), return_lse=True)
    _, lse = intflash.attention(Q, k, V[:, :2], **options)
    assert torch.allclose(lse, torch.logsumexp(Q @ k.repeat_interleave(2, dim=1).mT / 4, -1), atol=0.1)


def test_smoothed_tensors_share_a_dtype():
    problem = prepare(*(x.half() for x in (Q, K, V)), recipe=Recipe(smooth_k=True))[0]
    assert {x.dtype for x in (problem.q, problem.k, problem.v)} == {torch.float32}


def test_output_scales_of_four_bit_values_are_those_of_their_group():
    v = V[:, :2] * torch.tensor([1.0, 10.0]).view(1, 2, 1, 1)
    options = dict(enable_gqa=True, recipe=Recipe(v="head", bits=4), out_dtype=torch.int8, out_scale="bound")
    out = intflash.attention(Q, K[:, :2], v, **options)
    assert torch.allclose(out.scale, v.abs().amax((2, 3), keepdim=True).repeat_interleave(2, dim=1) / 127)


def test_a_given_output_scale_is_kept_with_four_bit_values():
    out = intflash.attention(Q, K, V, recipe=Recipe(bits=4), out_dtype=torch.int8, out_scale=0.05)
    assert out.scale.item() == pytest.approx(0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_output_scales_of_other_dtypes(dtype, backend):
    scale = torch.full((1, 4, 1, 1), 0.0625, dtype=dtype)
    want = intflash.attention(Q, K, V, out_dtype=torch.int8, out_scale=scale.float(), backend="reference")
    got = intflash.attention(Q, K, V, out_dtype=torch.int8, out_scale=scale, backend=backend)
    assert got.scale.dtype == torch.float32 and torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_integer_output_of_values_with_scales_along_the_tokens(granularity):
    v = V * torch.arange(1, 21).view(1, 1, 20, 1)
    options = dict(method="lite", recipe=Recipe(q="token", k="token", v=granularity, block_size=8))
    found = [
        intflash.attention(Q, K, v, out_dtype=torch.int8, out_scale="bound", backend=b, **options)
        for b in ("reference", "torch")
    ]
    assert found[0].scale.shape[2] == 1 and torch.equal(found[0].scale, found[1].scale)
    assert sqnr(intflash.attention(Q, K, v, **options), found[0].dequantize()) > 20


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask", "bias", "out_scale"])
def test_every_tensor_of_a_call_is_checked_for_gradients(name):
    x = torch.ones(1, 1, 1, 1, requires_grad=True)
    wanting = op.gradients_wanted(dict.fromkeys(call.NAMES) | dict(q=Q, k=K, v=V) | {name: x})
    assert len(wanting) == 1 and wanting[0] is x
