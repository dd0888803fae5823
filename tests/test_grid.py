"""Pairwise grid over a call's options: each backend equals the reference, and the reference agrees with float64."""

import pytest
import torch

import intflash
from intflash import BackendError, Recipe
from intflash.backends import backends
from intflash.methods import METHODS
from oracle import float64_attention, sqnr
from pairwise import pairwise

FACTORS = {
    "head_dim": [64, 1, 17, 49, 80, 256],
    "mask": ["none", "keep", "keep_rows", "float"],
    "bias": ["none", "heads", "windows", "row"],
    "causal": [None, "top_left", "bottom_right"],
    "window": [None, (20, 0), (7, 30), (-1, 5), (40, None)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "packed": [False, True],
    "tokens": [(49, 49), (1, 197), (130, 75)],
    "granularity": [("tensor", "tensor", "tensor"), ("head", "head", "head"), ("token", "block", "channel")],
    "out": [torch.float32, torch.int8, torch.int16, torch.bfloat16],
    "dtype": [torch.float32, torch.float16],
    "strided": [False, True],
}


def possible(case):
    """Whether a case, which may be incomplete, is possible."""
    packed_blocks = case.get("packed") and "block" in case.get("granularity", ())
    return not (packed_blocks or (case.get("mask") == "float" and case.get("bias", "none") != "none"))


CASES = pairwise(FACTORS, possible)
INTEGER = [m.name for m in METHODS.values() if m.integer_bias]
OTHERS = sorted(set(backends()) - {"reference"})


def call(case, seed=0):
    """Returns the arguments of `attention` for a case, and what float64 attention needs besides q, k, v."""
    g = torch.Generator().manual_seed(seed)
    (hq, hk), (nq, nk), d = case["heads"], case["tokens"], case["head_dim"]
    batch = 1 if case["packed"] else 4
    shapes = [(batch, hq, nq, d), (batch, hk, nk, d), (batch, hk, nk, d)]
    q, k, v = (torch.randn(s, generator=g).to(case["dtype"]) for s in shapes)
    if case["strided"]:  # [B, N, H, D] memory, as a model's projection leaves it
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    options = dict(enable_gqa=True, recipe=Recipe(*case["granularity"], block_size=64), out_dtype=case["out"])
    if case["out"] == torch.int8:
        options["out_scale"] = "bound"
    keep = torch.ones(1, 1, nq, nk, dtype=torch.bool)
    bias = None
    if case["mask"] in ("keep", "keep_rows"):
        mask = torch.rand(batch, 1, nq, nk, generator=g) > 0.3
        if case["mask"] == "keep_rows":
            mask[:, :, ::3] = False
        options["attn_mask"], keep = mask, keep & mask
    elif case["mask"] == "float":
        bias = torch.randn(batch, 1, 1, nk, generator=g)
        bias[..., ::4] = float("-inf")
        options["attn_mask"] = bias
    if case["bias"] != "none":
        windows = 2 if batch == 4 else 1
        shape = {"heads": (1, hq, nq, nk), "windows": (windows, 1, nq, nk), "row": (1, 1, 1, nk)}[case["bias"]]
        options["bias"] = torch.randn(shape, generator=g)
        bias = options["bias"].repeat(batch // shape[0], 1, 1, 1)
    if case["packed"]:
        cu_q = torch.tensor([0, nq // 3, nq], dtype=torch.int32)
        cu_k = torch.tensor([0, nk // 2, nk], dtype=torch.int32)
        options |= dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        row, key = (torch.bucketize(torch.arange(n), c[1:], right=True) for n, c in ((nq, cu_q), (nk, cu_k)))
        keep = keep & (row[:, None] == key)
    if case["causal"]:
        options |= dict(is_causal=True, causal_align=case["causal"])
    if case["window"]:
        options |= dict(window_size=case["window"])
    if case["causal"] or case["window"]:
        keep = keep & visible_keys(case, options, nq, nk)
    return (q, k, v), options, dict(bias=bias, keep=keep)


def visible_keys(case, options, nq, nk):
    bounds = [(0, nq)], [(0, nk)]
    if case["packed"]:
        bounds = [list(zip(c.tolist(), c.tolist()[1:], strict=False))
                  for c in (options["cu_seqlens_q"], options["cu_seqlens_k"])]  # fmt: skip
    visible = torch.zeros(nq, nk, dtype=torch.bool)
    for (a, b), (c, d) in zip(*bounds, strict=True):
        offset = (d - c) - (b - a) if case["causal"] == "bottom_right" else 0
        after = torch.arange(d - c) - torch.arange(b - a)[:, None] - offset  # the query's own key
        left, right = case["window"] or (None, None)
        right = 0 if case["causal"] else right
        visible[a:b, c:d] = (after >= (-nq - nk if left in (None, -1) else -left)) & (
            after <= (nq + nk if right in (None, -1) else right)
        )
    return visible


def name_of(case):
    return "-".join(str(v).replace("torch.", "").replace(" ", "") for v in case.values())


def real(out):
    return out.dequantize() if isinstance(out, intflash.QTensor) else out


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_reference_meets_float64(case):
    (q, k, v), options, exact = call(case)
    expected = float64_attention(q, k, v, **exact)
    out, lse = intflash.attention(q, k, v, method="intflash", backend="reference", return_lse=True, **options)
    # int8 inputs leave about 30 dB on randn; int8 output with s_O = s_V leaves less where attention averages
    assert sqnr(expected, real(out)) > (14 if case["out"] == torch.int8 else 26)
    dead = ~exact["keep"].expand(*q.shape[:3], k.shape[2]).any(-1)
    if exact["bias"] is not None:
        dead = dead | ~((exact["bias"] > -1e30) & exact["keep"]).expand(*q.shape[:3], k.shape[2]).any(-1)
    assert not real(out)[dead].any() and torch.equal(lse == float("-inf"), dead)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("method", INTEGER)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_backend_equals_reference(case, method, backend):
    reason = backends()[backend].unavailable()
    if reason:
        pytest.skip(reason)
    tensors, options, _ = call(case)
    try:
        out, lse = intflash.attention(*tensors, method=method, backend=backend, return_lse=True, **options)
    except BackendError as reason:
        pytest.skip(str(reason))
    expected, expected_lse = intflash.attention(
        *tensors, method=method, backend="reference", return_lse=True, **options
    )
    if isinstance(expected, intflash.QTensor):
        assert torch.equal(out.scale, expected.scale)
        out, expected = out.data, expected.data
    assert torch.equal(out, expected)
    assert torch.allclose(lse, expected_lse, rtol=0, atol=2e-5)
