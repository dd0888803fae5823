"""Float q beside int8 codes of k and v, as a KV cache holds them: the bits of a call whose q was quantized before."""

import pytest
import torch

import intflash
from intflash import BackendError, Recipe
from intflash.backends import backends
from intflash.methods import METHODS
from oracle import float64_attention, randn, sqnr
from pairwise import pairwise

FACTORS = {
    "tokens": [(1, 77), (5, 130), (49, 49), (3, 700)],
    "heads": [(2, 2), (8, 2), (3, 1)],
    "head_dim": [64, 17, 128],
    "mask": ["none", "keep", "float", "bias"],
    "causal": [None, "top_left", "bottom_right"],
    "window": [None, (20, 0), (7, 30)],
    "packed": [False, True],
    "q": ["tensor", "head", "token", "block"],
    "static": [None, "number", "tensor"],
    "codes": [("tensor", "tensor"), ("head", "head"), ("block", "channel")],
    "bits": [8, 4],
    "rule": ["exact", "divide"],
    "out": [None, torch.float32, torch.int8, torch.int16],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "strided": [False, True],
}


def possible(case):
    packed_blocks = case.get("packed") and ("block" in case.get("codes", ()) or case.get("q") == "block")
    return not packed_blocks


CASES = pairwise(FACTORS, possible)
NAMES = sorted(backends())
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def call(case, device):
    """Returns float q, codes of k and v, the recipe of q, and the other options."""
    g = torch.Generator().manual_seed(0)
    (hq, hk), (nq, nk), d = case["heads"], case["tokens"], case["head_dim"]
    batch = 1 if case["packed"] else 2
    q, k, v = (torch.randn(batch, h, n, d, generator=g) for h, n in ((hq, nq), (hk, nk), (hk, nk)))
    q = q.to(case["dtype"])
    if case["strided"]:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    k, v = (intflash.quantize(x, kind, block_size=64) for x, kind in zip((k, v), case["codes"], strict=True))
    given = dict(bits=case["bits"], block_size=16, rule=case["rule"])
    if case["static"] == "number":
        given["q_scale"] = 0.02
    elif case["static"] == "tensor":
        given["q_scale"] = intflash.quantize(q, case["q"], block_size=16).scale.to(device) * 0.9
    options = dict(enable_gqa=True, return_lse=True)
    if case["mask"] == "keep":
        options["attn_mask"] = torch.rand(batch, 1, nq, nk, generator=g) > 0.3
        options["attn_mask"][:, :, ::3] = False
    elif case["mask"] == "float":
        options["attn_mask"] = torch.randn(batch, 1, 1, nk, generator=g)
    elif case["mask"] == "bias":
        options["bias"] = intflash.quantize_bias(torch.randn(1, hq, nq, nk, generator=g))
    if case["packed"]:
        options["cu_seqlens_q"] = torch.tensor([0, nq // 3, nq], dtype=torch.int32)
        options["cu_seqlens_k"] = torch.tensor([0, nk // 2, nk], dtype=torch.int32)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if case["causal"]:
        options |= dict(is_causal=True, causal_align=case["causal"])
    if case["window"]:
        options["window_size"] = case["window"]
    if case["out"] is not None:
        options["out_dtype"] = case["out"]
    if case["out"] == torch.int8:
        options["out_scale"] = "bound"
    k, v = (intflash.QTensor(x.data.to(device), x.scale, x.granularity, x.block_size) for x in (k, v))
    return q.to(device), k, v, Recipe(case["q"], **given), options


def quantized(q, recipe):
    """q quantized before the call."""
    return intflash.quantize(
        q, recipe.q, scale=recipe.q_scale, bits=recipe.bits, block_size=recipe.block_size, rule=recipe.rule
    )


def assert_same(found, expected):
    (out, lse), (want, want_lse) = found, expected
    if isinstance(want, intflash.QTensor):
        assert torch.equal(out.scale, want.scale) and out.granularity == want.granularity
        out, want = out.data, want.data
    assert out.dtype == want.dtype and torch.equal(out, want)
    assert torch.allclose(lse, want_lse, rtol=0, atol=2e-5)


def name_of(case):
    return "-".join(str(v).replace("torch.", "").replace(" ", "") for v in case.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_bits_are_those_of_q_quantized_before(case, backend, device):
    if reason := backends()[backend].unavailable():
        pytest.skip(reason)
    q, k, v, recipe, options = call(case, device)
    want = options | dict(out_dtype=options.get("out_dtype", q.dtype))
    served = 0
    for method in (m.name for m in METHODS.values() if m.integer_bias):
        try:
            found = intflash.attention(q, k, v, method=method, backend=backend, recipe=recipe, **options)
        except BackendError:
            continue
        served += 1
        assert_same(found, intflash.attention(quantized(q, recipe), k, v, method=method, backend="reference", **want))
    if not served:
        pytest.skip(f"{backend} does not serve this call on {device}")


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_serves_it(method, backend):
    """Also methods that keep q in floating point: codes stand for their values there."""
    q, k, v = randn(1, 2, 20, 16)
    recipe = METHODS[method].recipe
    k, v = (intflash.quantize(x, "tensor") for x in (k, v))
    found = intflash.attention(q, k, v, method=method, backend=backend)
    if recipe.q == "none":
        want = intflash.attention(q, k.dequantize(), v.dequantize(), method=method, backend=backend)
    else:
        want = intflash.attention(quantized(q, recipe), k, v, method=method, backend=backend, out_dtype=q.dtype)
    assert found.dtype == q.dtype and torch.equal(found, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_scale", [None, 0.03], ids=["dynamic", "static"])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_bfp"])
def test_decode_over_a_growing_cache(method, q_scale, device):
    """Codes are appended to a preallocated cache, of which each step reads the tokens so far."""
    g = torch.Generator().manual_seed(0)
    heads, kv_heads, d, room = 4, 2, 32, 48
    cache = torch.zeros(2, 2, kv_heads, room, d, dtype=torch.int8, device=device)
    scales = torch.full((2, kv_heads), 0.03, device=device)
    recipe = None if q_scale is None else Recipe(q_scale=q_scale)
    floats = torch.empty(2, 2, kv_heads, 0, d, device=device)
    for step in range(40):
        q, *new = (torch.randn(2, h, 1, d, generator=g).to(device) for h in (heads, kv_heads, kv_heads))
        for i, x in enumerate(new):
            cache[i, :, :, step] = intflash.quantize(x, "head", scale=scales[i]).data[:, :, 0]
        floats = torch.cat([floats, torch.stack(new)], dim=3)
        if step % 13:
            continue
        k, v = (intflash.QTensor(cache[i, :, :, : step + 1], scales[i], "head") for i in range(2))
        options = dict(method=method, enable_gqa=True)
        out = intflash.attention(q, k, v, recipe=recipe, **options)
        whole = [intflash.quantize(floats[i], "head", scale=scales[i]) for i in range(2)]
        codes = quantized(q, recipe or Recipe())
        want = intflash.attention(codes, *whole, out_dtype=q.dtype, backend="reference", **options)
        assert out.dtype == q.dtype and torch.equal(out, want), step
        exact = float64_attention(q.cpu(), *(x.cpu() for x in floats))
        assert sqnr(exact, out.cpu()) > 25


@pytest.mark.parametrize("device", DEVICES)
def test_sdpa_and_autocast(device):
    q, k, v = (x.to(device) for x in randn(2, 4, 20, 16))
    k, v = (intflash.quantize(x[:, :2], "head") for x in (k, v))
    want = intflash.attention(q, k, v, enable_gqa=True)
    assert torch.equal(intflash.sdpa(q, k, v, enable_gqa=True), want)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert intflash.sdpa(q, k, v, enable_gqa=True).dtype == torch.bfloat16
        assert torch.equal(intflash.attention(q, k, v, enable_gqa=True), want)


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("bits", [8, 4])
def test_values_of_q_are_looked_at(bits, backend):
    if backends()[backend].unavailable():
        pytest.skip("not available")
    q, k, v = randn(1, 2, 20, 16)
    k, v = (intflash.quantize(x, bits=bits) for x in (k, v))
    q[0, 1, 3, 5] = float("inf")
    options = dict(backend=backend, out_dtype=torch.int16, recipe=Recipe(bits=bits))
    with pytest.raises(intflash.InputError, match="q must be finite, got 1 non-finite of 640"):
        intflash.attention(q, k, v, **options)
    found, want = (
        intflash.attention(q, k, v, check_finite=False, **options | dict(backend=name))
        for name in (backend, "reference")
    )
    assert torch.equal(found.data, want.data) and torch.equal(found.scale, want.scale)


def test_gradients_are_refused():
    q, k, v = randn(1, 2, 20, 16)
    k, v = (intflash.quantize(x) for x in (k, v))
    out = intflash.attention(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="for inference and has no gradients"):
        out.sum().backward()


def test_a_backend_that_does_not_name_it_refuses():
    from intflash.backends import features

    q, k, v = randn(1, 2, 20, 16)
    problem, _ = intflash.call.prepare(q, intflash.quantize(k), intflash.quantize(v), method="intflash")
    assert features.FLOAT_QUERY <= features.features(problem)
    serves = {"intflash": features.EVERY - features.FLOAT_QUERY}
    assert features.unserved(problem, serves) == "it has no float q beside codes of k and v for intflash"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("q_scale", [None, 0.03], ids=["dynamic", "static"])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_bfp"])
@pytest.mark.parametrize("shape", [(4, 8, 2, 1, 2000, 128), (2, 16, 1, 1, 900, 64), (2, 4, 4, 300, 1000, 64)], ids=str)
def test_a_graph_computes_with_what_its_tensors_hold(shape, method, q_scale):
    batch, heads, kv_heads, nq, nk, d = shape
    g = torch.Generator().manual_seed(0)
    recipe = Recipe() if q_scale is None else Recipe(q_scale=q_scale)
    q, k, v = (torch.randn(batch, h, n, d, generator=g) for h, n in ((heads, nq), (kv_heads, nk), (kv_heads, nk)))
    q, k, v = q.half().cuda(), *(intflash.quantize(x.cuda(), "head") for x in (k, v))
    options = dict(method=method, recipe=recipe, enable_gqa=True)
    assert intflash.which_backend(q, k, v, **options) == "cuda"
    for _ in range(2):
        intflash.attention(q, k, v, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = intflash.attention(q, k, v, **options)
    q.copy_(torch.randn(q.shape, generator=g))
    k.data.copy_(k.data.flip(2))
    graph.replay()
    torch.cuda.synchronize()
    k, v = (intflash.QTensor(x.data.cpu(), x.scale.cpu(), "head") for x in (k, v))
    options |= dict(recipe=None, out_dtype=torch.float16, backend="reference")
    assert torch.equal(out.cpu(), intflash.attention(quantized(q.cpu(), recipe), k, v, **options))
