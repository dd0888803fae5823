"""The public functions: the meaning of SDPA's arguments, outputs, choice of backends."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import intflash
from intflash import BackendError, InputError, QTensor, Recipe
from intflash.backends import backends, cpu
from intflash.methods import get_method
from intflash.numerics.exp import ABSENT
from oracle import float64_attention, randn, sqnr
from small_call import K, Q, V, attend, codes


def test_sdpa_is_torchs_signature():
    mask = torch.rand(2, 1, 20, 20) > 0.3
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.1}, {"attn_mask": torch.randn(20, 20)}):
        expected = F.scaled_dot_product_attention(Q, K, V, **options)
        assert sqnr(expected, intflash.sdpa(Q, K, V, **options)) > 30
    expected = F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True)
    assert sqnr(expected, intflash.sdpa(Q, K[:, :2], V[:, :2], enable_gqa=True)) > 30
    with pytest.raises(InputError, match="dropout_p must be 0.*got 0.1"):
        intflash.sdpa(Q, K, V, None, 0.1)
    with pytest.raises(InputError, match="exclude each other"):
        intflash.sdpa(Q, K, V, mask, is_causal=True)


@pytest.mark.parametrize("shape", [(20, 16), (4, 20, 16), (2, 4, 20, 16), (2, 3, 4, 20, 16)])
def test_any_leading_axes(shape):
    q, k, v = randn(*shape)
    out, lse = intflash.attention(q, k, v, return_lse=True)
    assert out.shape == shape and lse.shape == shape[:-1]
    assert sqnr(F.scaled_dot_product_attention(q, k, v), out) > 28
    assert torch.allclose(lse, torch.logsumexp(q @ k.mT / 4, -1), atol=0.15)


def test_mask_axes_of_five_axis_inputs_and_periodic_batches():
    q, k, v = randn(2, 3, 4, 20, 16)
    for lead in ((1, 3), (2, 1), (2, 3), (1, 1)):
        mask = torch.rand(*lead, 1, 20, 20) > 0.3
        assert sqnr(F.scaled_dot_product_attention(q, k, v, mask), intflash.attention(q, k, v, mask)) > 28
    with pytest.raises(InputError, match="attn_mask must broadcast"):  # windows repeat over one axis of batches only
        intflash.attention(*randn(4, 2, 4, 20, 16), torch.ones(2, 1, 1, 20, 20) > 0)
    windows = torch.rand(3, 1, 20, 20) > 0.3
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    expected = intflash.attention(q, k, v, windows[None]).flatten(0, 1)
    assert torch.equal(intflash.attention(*flat, windows), expected)


def test_caller_tensors_are_never_changed():
    tensors = dict(q=Q, k=K, v=V, attn_mask=torch.rand(2, 1, 20, 20) > 0.2, bias=torch.randn(1, 4, 20, 20))
    before = {n: t.clone() for n, t in tensors.items()}
    attend(**tensors, recipe=Recipe(smooth_k=True, rotate=True), out_dtype=torch.int8, out_scale="dynamic")
    assert all(torch.equal(tensors[n], before[n]) for n in tensors)


def test_integer_outputs_have_their_own_scale():
    v = V / 3
    exact = float64_attention(Q, K, v)
    for dtype, default, calibrated in ((torch.int8, 25, 32), (torch.int16, 32, 32)):
        out = attend(v=v, out_dtype=dtype, out_scale="bound")
        assert isinstance(out, QTensor) and out.data.dtype == dtype
        limit = torch.iinfo(dtype).max
        assert torch.allclose(out.scale, v.abs().amax((2, 3), keepdim=True) / limit)
        assert sqnr(exact, out.dequantize()) > default
        scale = exact.abs().max().float() / limit
        assert sqnr(exact, attend(v=v, out_dtype=dtype, out_scale=scale).dequantize()) > calibrated
        dynamic = attend(v=v, out_dtype=dtype, out_scale="dynamic")
        assert dynamic.data.abs().max() >= limit - 1 and sqnr(exact, dynamic.dequantize()) > calibrated
    assert attend(out_dtype=torch.int8, out_scale="bound", recipe=Recipe(v="channel")).granularity == "channel"
    assert attend(out_dtype=torch.int8, out_scale="bound", recipe=Recipe(v="head")).granularity == "head"


def test_four_bit_values_fill_the_integer_output():
    for granularity in ("tensor", "head"):
        recipe = Recipe(v=granularity, bits=4)
        out = attend(recipe=recipe, out_dtype=torch.int8, out_scale="bound")
        assert sqnr(attend(recipe=recipe), out.dequantize()) > 30
        assert torch.allclose(out.scale.amax(), V.abs().max() / 127)


def test_quantized_inputs_give_the_bits_of_float_inputs():
    expected = attend(out_dtype=torch.int16)
    got = attend(**codes("head"), out_dtype=torch.int16)
    assert torch.equal(got.data, expected.data) and attend(**codes(), out_scale=0.1).data.dtype == torch.int8


def test_static_scales_of_the_same_tensor_give_the_same_bits():
    scales = {f"{n}_scale": intflash.quantize(x, "head").scale for n, x in (("q", Q), ("k", K), ("v", V))}
    assert torch.equal(attend(recipe=Recipe(**scales)), attend())
    numbers = {f"{n}_scale": float(intflash.quantize(x).scale) for n, x in (("q", Q), ("k", K), ("v", V))}
    assert torch.equal(attend(recipe=Recipe(**numbers)), attend(recipe=Recipe("tensor", "tensor", "tensor")))


def test_integer_bias_is_used_unchanged():
    bias = torch.randn(1, 4, 20, 20)
    bias[..., 3] = float("-inf")
    quantized = intflash.quantize_bias(bias)
    assert (quantized == ABSENT).sum() == 80
    assert torch.equal(attend(bias=quantized, method="intflash"), attend(bias=bias, method="intflash"))


def test_smoothing_keeps_the_result_and_its_log_sum_exp():
    k = K + 5
    smooth, lse = attend(k=k, recipe=Recipe(smooth_k=True), return_lse=True)
    assert sqnr(float64_attention(Q, k, V), smooth) > sqnr(float64_attention(Q, k, V), attend(k=k)) + 3
    assert torch.allclose(lse, torch.logsumexp(Q @ k.mT / 4, -1), atol=0.1)


def test_a_row_without_keys_gives_zero():
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[4] = False
    out, lse = attend(attn_mask=mask, return_lse=True)
    assert not out[:, :, 4].any() and (lse[:, :, 4] == float("-inf")).all() and out[:, :, 5].any()


def test_backend_by_name_and_by_default():
    assert intflash.which_backend(Q, K, V, backend="reference", return_lse=True) == "reference"
    assert intflash.which_backend(Q, K, V, out_dtype=torch.int8, out_scale="dynamic") in intflash.info()["backends"]
    if intflash.info()["backends"].get("triton", {}).get("available"):
        with pytest.raises(BackendError, match="'triton' cannot serve method 'intflash_bfp': "):
            attend(backend="triton")


def test_info_lists_methods_and_backends():
    info = intflash.info()
    assert {"intflash", "intflash_p8", "intflash_online"} <= set(info["methods"])
    assert info["methods"]["intflash"]["integer_only"]
    served = info["backends"]["reference"]["methods"]
    assert set(served) == set(info["methods"]) and not any(served.values())


def test_without_the_native_module_another_backend_serves_and_says_so_once(monkeypatch, caplog):
    missing = replace(backends()["cpu"], unavailable=lambda: "it was not built here")
    monkeypatch.setitem(backends(), "cpu", missing)
    monkeypatch.setattr(cpu, "attend", lambda *arguments: None)  # as it is there
    with caplog.at_level("WARNING", "intflash"):
        assert torch.equal(attend(), attend(backend="torch"))
        attend()
    assert [record.getMessage() for record in caplog.records] == [
        "the fast backend 'cpu' is not available, a slower one serves: it was not built here"
    ]
    with pytest.raises(BackendError, match="it was not built here"):
        attend(backend="cpu")


def test_a_backend_of_another_machine_is_skipped_silently(monkeypatch, caplog):
    missing = replace(backends()["cpu"], unavailable=lambda: "of another machine", native=lambda: False)
    monkeypatch.setitem(backends(), "cpu", missing)
    monkeypatch.setattr(cpu, "attend", lambda *arguments: None)  # as it is there
    with caplog.at_level("WARNING", "intflash"):
        assert torch.equal(attend(), attend(backend="torch"))
    assert not caplog.records


def test_which_backend_names_the_serving_backend():
    assert intflash.which_backend(Q, K, V, method="qflash", return_lse=True) == "torch"
    with pytest.raises(BackendError, match="no log-sum-exp"):
        intflash.which_backend(Q, K, V, method="qflash", return_lse=True, backend="cpu")
    with pytest.raises(TypeError, match="at most 6"):
        intflash.which_backend(Q, K, V, None, False, None, "intflash")


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("method", ["intflash", "qflash", "fqvit", "lite", "fp32"])
def test_autocast_changes_no_bit(method, backend):
    if intflash.info()["backends"][backend]["methods"][method] is not None:
        pytest.skip("not one of its methods")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(method=method, backend=backend)
    assert torch.equal(found, attend(method=method, backend=backend))


def test_sdpa_accepts_what_torchs_does_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = intflash.sdpa(Q, K, V.bfloat16())
        with pytest.raises(InputError, match="all float tensors, .*, got Tensor, NoneType, Tensor"):
            intflash.sdpa(Q, None, V)
        with pytest.raises(InputError, match="float64"):
            intflash.sdpa(Q.double(), K.double(), V.double())
    assert torch.equal(found, intflash.sdpa(Q.bfloat16(), K.bfloat16(), V.bfloat16()))


@pytest.mark.parametrize("q, k, v", [
    ((2, 4), (2, 1), (2, 1)), ((2, 4), (1, 4), (1, 4)), ((2, 1), (2, 4), (1, 4)), ((2, 4), (), (4,)), ((), (3,), (3,)),
])  # fmt: skip
def test_sdpa_broadcasts_leading_axes_as_torchs(q, k, v):
    inputs = [x[0, 0].expand(*lead, 20, 16) * 1 for x, lead in zip((Q, K, V), (q, k, v), strict=True)]
    want, got = F.scaled_dot_product_attention(*inputs), intflash.sdpa(*inputs)
    assert got.shape == want.shape and sqnr(want, got) > 30
    with pytest.raises(InputError, match="same batch|same heads"):
        intflash.sdpa(Q, K[:, :3], V[:, :3])


def test_sdpa_broadcasts_batches_beside_groups():
    q, k, v = Q[:1], K[:, :2], V[:, :2]
    want = F.scaled_dot_product_attention(q.expand(2, -1, -1, -1), k, v, enable_gqa=True)
    assert sqnr(want, intflash.sdpa(q, k, v, enable_gqa=True)) > 30


def test_default_devices_and_dtypes_change_nothing():
    want = attend(return_lse=True, recipe=Recipe(rotate=True))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = attend(return_lse=True, recipe=Recipe(rotate=True))
        dtypes = {
            attend(method=m, return_lse=True, backend="torch")[1].dtype for m in ("intflash", "qflash", "ivit", "lite")
        }
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(want, found, strict=True))
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("method", ["intflash", "lite", "fp32"])
def test_a_backward_pass_is_refused(method):
    out, lse = attend(q=Q.clone().requires_grad_(), method=method, return_lse=True)
    assert torch.equal(out, attend(method=method))
    for x in (out, lse):
        with pytest.raises(RuntimeError, match="for inference and has no gradients"):
            x.sum().backward()
    with torch.no_grad():
        assert not attend(q=Q.clone().requires_grad_(), method=method).requires_grad


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_output_of_tensors_that_require_gradients_can_be_changed(backend):
    q = Q.transpose(1, 2).clone().transpose(1, 2).requires_grad_()
    out, lse = attend(q=q, backend=backend, return_lse=True)
    want = attend(backend=backend, q=q.detach())
    assert torch.equal(out, want) and out.stride() == want.stride()
    out += 1
    lse.mul_(2)
    out[:, :, 0] = 0
    with pytest.raises(RuntimeError, match="has no gradients"):
        out.sum().backward()


def test_tangents_are_refused():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, torch.ones_like(Q))
        with torch.no_grad(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            attend(q=dual)
        assert torch.equal(attend(), attend(q=torch.autograd.forward_ad.unpack_dual(dual).primal))


ONE = torch.full((1, 1, 1, 1), 0.03, requires_grad=True)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        dict(recipe=Recipe(v_scale=ONE)),
        dict(attn_mask=ONE),
        dict(bias=ONE),
        codes(q=QTensor(intflash.quantize(Q).data, ONE), out_dtype=torch.float32),
    ],
    ids=["scale of a recipe", "mask", "bias", "scale of codes"],
)
def test_scales_and_biases_have_no_gradients_either(options, backend):
    with pytest.raises(RuntimeError, match="has no gradients"):
        attend(**options, backend=backend).sum().backward()


def test_other_devices_use_the_backends_that_support_them():
    q, k, v = (x.to("meta") for x in (Q, K, V))
    assert attend(q=q, k=k, v=v, backend="torch", check_finite=False).shape == Q.shape


def test_four_bit_values_of_methods_with_scales_of_their_own():
    recipe = Recipe("tensor", "tensor", "tensor", bits=4, rule="divide")
    scales = {
        attend(method="qflash", recipe=recipe, out_dtype=torch.int8, out_scale="bound", backend=b).scale.item()
        for b in ("reference", "torch", None)
    }
    assert len(scales) == 1
    attend(
        method="lite", recipe=Recipe(bits=4, q="token", k="token", v="token"), out_dtype=torch.int8, out_scale="bound"
    )
    attend(method="fp16", recipe=Recipe(bits=4, q="none"), out_dtype=torch.int8, out_scale="bound")


@pytest.mark.parametrize("ends", [(0, 5, 20), (0, 20, 20)])
@pytest.mark.parametrize("method", ["int_flash_full", "lite", "fp32", "fp8"])
def test_packed_integer_output_has_one_scale(method, ends):
    v = V[:1].clone()
    v[:, :, ends[1] :] *= 10
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 5, 20), ends))
    recipe = None if method == "fp8" else Recipe(q="token", k="token", v="token")
    options = dict(q=Q[:1], k=K[:1], v=v, method=method, recipe=recipe, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    a, b = (attend(out_dtype=torch.int8, out_scale="bound", backend=name, **options) for name in ("reference", "torch"))
    assert torch.equal(a.scale, b.scale)
    exact = attend(backend="reference", **options)
    assert sqnr(exact, a.dequantize()) > 30 and sqnr(exact, b.dequantize()) > 30


@pytest.mark.parametrize("method", intflash.info()["methods"])
def test_integer_output_is_a_valid_qtensor(method):
    qkv, made = [torch.randn(2, 3, 20, 16) for _ in range(3)], 0
    kinds = ("head", "head", "head"), ("token", "tensor", "tensor"), ("tensor", "tensor", "channel")
    recipes = None, *(Recipe(*x) for x in kinds)
    names = ("cpu", "torch", "reference")
    choices = itertools.product(names, recipes, (torch.int8, torch.int16), (None, 0.1, "dynamic"))
    for backend, recipe, dtype, scale in choices:
        try:
            x = intflash.attention(
                *qkv, method=method, backend=backend, recipe=recipe, out_dtype=dtype, out_scale=scale
            )
        except (InputError, BackendError):  # not one of its granularities or types
            continue
        same, made = QTensor(x.data, x.scale, x.granularity, bits=x.bits), made + 1
        assert x.scale.dtype == torch.float32 and same.scale.shape == x.scale.shape
    assert made or torch.int8 not in get_method(method).out_dtypes
