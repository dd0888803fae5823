"""Every method serves masks, bias, causal offsets, GQA, Nq != Nk, odd head_dim, lse; against float64."""

import pytest
import torch

import intflash
from intflash import QTensor, Recipe
from intflash.methods import METHODS, get_method
from intflash.problem import Problem
from oracle import float64_attention, sqnr, uniform

# minimum SQNR in dB of every case below on inputs uniform in [-4, 4], and the tolerance of log-sum-exp
FLOORS = {
    "fp32": (100, 1e-4), "fp16": (55, 0.02), "bf16": (38, 0.1), "fp8": (15, 1.5), "fp8_head": (15, 1.5),
    "int_flash_full": (30, 0.3), "int_flash_half": (31, 0.3), "lite": (31, 0.3), "qattn": (30, 0.3),
    "qflash": (26, 0.3), "iflash": (26, 0.3), "ivit": (15, 0.9), "ibert": (27, 0.3), "fqvit": (8, 0.9),
}  # fmt: skip
OTHER_METHODS = sorted(FLOORS)


def run(method, q, k, v, **options):
    return intflash.attention(q, k, v, method=method, backend="reference", return_lse=True, **options)


def tensors(b=2, hq=2, hk=2, nq=49, nk=49, d=32, dv=None, seed=0):
    q, k, v = uniform(4, b, max(hq, hk), max(nq, nk), d, seed=seed)
    v = v if dv is None else uniform(4, b, hk, nk, dv, seed=seed + 1)[0]
    return q[:, :hq, :nq], k[:, :hk, :nk], v[:, :hk, :nk]


def exact_lse(q, k, bias=0.0, keep=None):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = q.double() @ k.double().mT / q.shape[-1] ** 0.5 + bias
    return torch.logsumexp(s if keep is None else s.masked_fill(~keep, float("-inf")), -1)


def meets(method, result, q, k, v, bias=None, keep=None):
    out, lse = result
    decibels, lse_error = FLOORS[method]
    assert sqnr(float64_attention(q, k, v, bias=bias, keep=keep), out) > decibels
    assert lse.shape == q.shape[:3]
    assert (lse - exact_lse(q, k, 0.0 if bias is None else bias.double(), keep)).abs().max() < lse_error


def test_the_floors_cover_every_other_method():
    assert set(OTHER_METHODS) == {name for name in METHODS if not name.startswith("intflash")}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_keep(method):
    q, k, v = tensors()
    keep = torch.rand(2, 1, 49, 49, generator=torch.Generator().manual_seed(3)) > 0.3
    meets(method, run(method, q, k, v, attn_mask=keep), q, k, v, keep=keep)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_bias_of_swin_windows(method):
    """A bias per window and head, with batch b at window b % 2; a third of the keys are masked by it."""
    q, k, v = tensors(b=4)
    g = torch.Generator().manual_seed(4)
    bias = torch.randn(2, 2, 49, 49, generator=g)
    absent = torch.rand(2, 2, 49, 49, generator=g) < 0.3
    result = run(method, q, k, v, bias=bias.masked_fill(absent, float("-inf")))
    meets(method, result, q, k, v, bias=bias.repeat(2, 1, 1, 1), keep=~absent.repeat(2, 1, 1, 1))


@pytest.mark.parametrize("method", OTHER_METHODS)
@pytest.mark.parametrize("nq, nk, align", [(49, 49, "top_left"), (33, 70, "bottom_right")])
def test_causal(method, nq, nk, align):
    q, k, v = tensors(nq=nq, nk=nk)
    offset = 0 if align == "top_left" else nk - nq
    keep = torch.arange(nk) <= torch.arange(nq)[:, None] + offset
    result = run(method, q, k, v, is_causal=True, causal_align=align)
    meets(method, result, q, k, v, keep=keep.expand(1, 1, nq, nk))


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_grouped_heads_and_odd_shapes(method):
    q, k, v = tensors(hq=4, hk=2, nq=5, nk=67, d=17, dv=9)
    meets(method, run(method, q, k, v, enable_gqa=True), q, k, v)


@pytest.mark.parametrize("method", OTHER_METHODS)
@pytest.mark.parametrize("d", [1, 256])
def test_extreme_head_dims(method, d):
    q, k, v = tensors(b=1, nq=16, nk=40, d=d)
    out, _ = run(method, q, k, v)
    assert sqnr(float64_attention(q, k, v), out) > FLOORS[method][0] - 8


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_varlen_equals_each_sequence_alone(method):
    """With static scales, so that packing does not change the codes."""
    q, k, v = tensors(b=1, nq=60, nk=80)
    base = get_method(method).recipe
    # blocks of a packed batch would straddle sequences; token scales do not depend on the packing
    kind = {n: {"block": "token", "head": "tensor"}.get(getattr(base, n), getattr(base, n)) for n in "qkv"}
    scales = {f"{n}_scale": 4 / 127 for n in "qkv" if kind[n] == "tensor"}
    recipe = Recipe(**kind, **scales, rule=base.rule)
    ends_q, ends_k = (0, 20, 60), (0, 50, 80)
    cu_q, cu_k = (torch.tensor(e, dtype=torch.int32) for e in (ends_q, ends_k))
    out, lse = run(method, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, recipe=recipe)
    for i in range(2):
        at, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        alone, alone_lse = run(method, q[:, :, at], k[:, :, keys], v[:, :, keys], recipe=recipe)
        if method.startswith("fp8"):  # its scales are the sequence's own in either case
            assert sqnr(alone, out[:, :, at]) > 30
        else:
            assert torch.equal(out[:, :, at], alone) and torch.equal(lse[:, :, at], alone_lse)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_rows_without_keys(method):
    q, k, v = tensors(b=1)
    keep = torch.ones(1, 1, 49, 49, dtype=torch.bool)
    keep[:, :, ::4] = False
    out, lse = run(method, q, k, v, attn_mask=keep)
    assert torch.isfinite(out).all()
    if method in ("qflash", "iflash"):  # as published: finite scores, so the row averages V over its masked keys
        assert sqnr(v.mean(2, keepdim=True).expand_as(out[:, :, ::4]), out[:, :, ::4]) > 0
    else:
        assert not out[:, :, ::4].any() and (lse[:, :, ::4] == float("-inf")).all()
    rest = torch.ones(49, dtype=torch.bool)
    rest[::4] = False
    assert sqnr(float64_attention(q, k, v)[:, :, rest], out[:, :, rest]) > FLOORS[method][0]


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_no_keys_at_all(method):
    q, k, v = tensors(b=1)
    codes = [QTensor(x.to(torch.int8), 0.03) for x in (q, k[:, :, :0], v[:, :, :0])]
    result = get_method(method).reference(Problem(method, *codes, sm_scale=0.2, return_lse=True))
    assert result.out.shape == q.shape and not result.out.any()


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_any_strides_and_input_dtypes(method):
    q, k, v = (x.half() for x in tensors())
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(run(method, *strided)[0], run(method, q, k, v)[0])
    assert run(method, q, k, v, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
