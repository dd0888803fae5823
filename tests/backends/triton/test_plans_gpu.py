"""On a GPU, the general way: from its third call on a signature runs by its plan, as the first call would."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import intflash  # noqa: E402
from intflash import plans  # noqa: E402
from intflash.backends import cpu  # noqa: E402
from intflash.errors import BackendError  # noqa: E402
from intflash.quant import QTensor, Recipe, quantize  # noqa: E402
from intflash.tape import Plan, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OURS = ("intflash", "intflash_p8", "intflash_online")
SHAPES = {"windows": (8, 3, 49, 32), "rows": (2, 3, 197, 64), "long": (1, 2, 1040, 64), "odd": (1, 2, 77, 40)}


def tensor(shape, seed, dtype=torch.float16):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(dtype)


def three(shape, seed, key_heads=None, dtype=torch.float16):
    keys = (shape[0], key_heads or shape[1], *shape[2:])
    return tensor(shape, seed, dtype), tensor(keys, seed + 1, dtype), tensor(keys, seed + 2, dtype) * 2


def packed(shape, seed):
    """q, k, v as models make them: views of one tensor, tokens before heads."""
    b, h, n, d = shape
    return tensor((b, n, 3, h, d), seed).permute(2, 0, 3, 1, 4).unbind()


def codes(shape, seed, kinds=("tensor",) * 3):
    return [quantize(x, kind, block_size=32) for x, kind in zip(three(shape, seed), kinds, strict=True)]


def scales(seed):
    return {f"{name}_scale": tensor((), seed + i, torch.float32).abs() * 0.01 + 0.02 for i, name in enumerate("qkv")}


def ends(n):
    return torch.tensor([0, n // 3, n], dtype=torch.int32, device="cuda")


HEADS = Recipe(q="head", k="head", v="head")
CALLS = {  # (shape, seed) -> tensors and options
    "floats": lambda s, i: (three(s, i), {}),
    "packed": lambda s, i: (packed(s, i), {}),
    "three axes": lambda s, i: ([x[0] for x in three(s, i)], {}),
    "float32, lse": lambda s, i: (three(s, i, dtype=torch.float32), dict(return_lse=True)),
    "static numbers": lambda s, i: (three(s, i), dict(recipe=Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.06))),
    "static tensors": lambda s, i: (three(s, i), dict(recipe=Recipe(**scales(i)))),
    "heads": lambda s, i: (three(s, i), dict(recipe=HEADS)),
    "tokens": lambda s, i: (three(s, i), dict(recipe=Recipe(q="token", k="head"))),
    "smooth, rotated": lambda s, i: (three(s, i), dict(recipe=Recipe(smooth_k=True, rotate=True), return_lse=True)),
    "codes": lambda s, i: (codes(s, i), dict(out_scale="bound")),
    "codes of tokens, to floats": lambda s, i: (
        codes(s, i, ("token", "block", "channel")),
        dict(out_dtype=torch.float16),
    ),
    "int16": lambda s, i: (three(s, i), dict(out_dtype=torch.int16)),
    "int8, scale": lambda s, i: (three(s, i), dict(out_dtype=torch.int8, out_scale=0.02)),
    "int8, scales": lambda s, i: (codes(s, i), dict(out_scale=tensor((1, s[1], 1, 1), i, torch.float32).abs() + 0.02)),
    "int8, own scale": lambda s, i: (codes(s, i), dict(out_scale="dynamic")),
    "bias": lambda s, i: (three(s, i), dict(bias=tensor((1, s[1], s[2], s[2]), i, torch.float32))),
    "bias and mask": lambda s, i: (
        codes(s, i),
        dict(bias=tensor((1, s[1], s[2], s[2]), i), attn_mask=tensor((s[0], 1, s[2], s[2]), i) > 0,
             out_scale="bound"),
    ),
    "causal, gqa": lambda s, i: (three((s[0], 4, *s[2:]), i, 2), dict(is_causal=True, enable_gqa=True)),
    "sequences": lambda s, i: (
        three((1, *s[1:]), i), dict(cu_seqlens_q=ends(s[2]), cu_seqlens_k=ends(s[2]), check_finite=False)
    ),
    "four bits": lambda s, i: (three(s, i), dict(recipe=Recipe(bits=4), out_dtype=torch.int8, out_scale="bound")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(cpu, "attend", lambda *arguments: None)  # the native path declines


def unplanned(monkeypatch, *tensors, **options):
    with monkeypatch.context() as patch:
        patch.setattr(plans, "run", lambda call, arguments: call(arguments))
        return intflash.attention(*tensors, **options)


def same(a, b):
    a, b = list(leaves(a)), list(leaves(b))
    return len(a) == len(b) and all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("method", OURS)
def test_same_bits(method, name, shape, backend, monkeypatch):
    options = dict(method=method, backend=backend, check_finite=False)
    for seed in range(0, 40, 10):
        tensors, more = CALLS[name](SHAPES[shape], seed)
        if seed == 0:
            try:
                intflash.which_backend(*tensors, **(options | more))
            except BackendError as error:
                pytest.skip(str(error))
        found = intflash.attention(*tensors, **(options | more))
        assert same(found, unplanned(monkeypatch, *tensors, **(options | more)))
    assert [type(plan) for plan in plans._plans.values()] == [Plan]


@pytest.mark.parametrize(
    "method", ["qflash", "iflash", "lite", "int_flash_half", "int_flash_full", "ibert", "ivit", "fp16"]
)
def test_other_methods(method, monkeypatch):
    for seed in range(0, 40, 10):
        tensors = three(SHAPES["rows"], seed)
        found = intflash.attention(*tensors, method=method)
        assert same(found, unplanned(monkeypatch, *tensors, method=method))


def test_one_tensor_in_two_places_is_another_signature(monkeypatch):
    q, k, v = three(SHAPES["rows"], 0)
    for _ in range(3):
        intflash.attention(q, q, q)
    assert same(intflash.attention(q, k, v), unplanned(monkeypatch, q, k, v))


def test_streams_have_plans_of_their_own(monkeypatch):
    q, k, v = codes(SHAPES["rows"], 0)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                found = intflash.attention(q, k, v)
        torch.cuda.synchronize()
        assert same(found, unplanned(monkeypatch, q, k, v))
    assert len(plans._plans) == 2


def test_capture_by_plan():
    q, k, v = three(SHAPES["rows"], 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            intflash.attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = intflash.attention(q, k, v)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, intflash.attention(q, k, v))


def test_values_read_on_request_are_read_each_time():
    q, k, v = three(SHAPES["rows"], 0)
    for _ in range(4):
        intflash.attention(q, k, v, check_finite=True)
    q[0, 0, 0, 0] = torch.nan
    with pytest.raises(intflash.InputError, match="finite"):
        intflash.attention(q, k, v, check_finite=True)


def test_bad_calls_raise_each_time():
    q, k, v = three(SHAPES["rows"], 0)
    for _ in range(4):
        with pytest.raises(intflash.InputError, match="head_dim"):
            intflash.attention(q, k[..., :32], v)
    with pytest.raises(intflash.InputError):
        intflash.attention(q, k, v, attn_mask=[1, 2])


def test_quantized_output_is_a_qtensor():
    q, k, v = codes(SHAPES["rows"], 0)
    assert all(isinstance(intflash.attention(q, k, v), QTensor) for _ in range(4))
