"""On a Hopper GPU: native calls give the bits of the general way, whatever thread, stream, graph or memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import intflash
from intflash import InputError, QTensor, Recipe, call, op
from intflash.backends.cuda import BACKEND

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(BACKEND.unavailable() is not None, reason=str(BACKEND.unavailable())),
]

SHAPES = {
    "windows": (64, 3, 49, 32), "rows": (1, 6, 197, 64), "many rows": (64, 6, 197, 64), "long": (1, 4, 1024, 64),
    "odd": (2, 2, 777, 128),
}  # fmt: skip
STATIC = Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.06)
HEADS = Recipe("head", "head", "head")


def tensor(shape, seed, dtype=torch.float16):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(dtype)


def three(shape, seed=0, dtype=torch.float16, key_heads=None):
    keys = (shape[0], key_heads or shape[1], *shape[2:])
    return [tensor(shape, seed, dtype), tensor(keys, seed + 1, dtype), tensor(keys, seed + 2, dtype) * 2]


def packed(shape, seed):
    """q, k, v as models make them: views of one tensor, tokens before heads."""
    b, h, n, d = shape
    return tensor((b, n, 3, h, d), seed).permute(2, 0, 3, 1, 4).unbind()


def codes(shape, seed, kinds=("tensor",) * 3, **options):
    return [
        intflash.quantize(x, kind) for x, kind in zip(three(shape, seed, torch.float32, **options), kinds, strict=True)
    ]


def contiguous_keys(x: QTensor) -> QTensor:
    b, h, n, d = x.data.shape
    rows = torch.zeros(b, h, d, -(-n // 16) * 16, dtype=torch.int8, device="cuda")
    return QTensor(rows[..., :n].copy_(x.data.mT).mT, x.scale, x.granularity)


def scales(heads):
    q_scale, v_scale = (torch.full(shape, 0.03, device="cuda") for shape in ((heads,), (1, heads, 1, 1)))
    return Recipe("head", "tensor", "head", q_scale=q_scale, k_scale=q_scale[:1], v_scale=v_scale)


def windows(shape, seed):
    b, h, n, _ = shape
    bias = intflash.quantize_bias(tensor((1, h, n, n), seed, torch.float32))
    return dict(attn_mask=tensor((b // 2, 1, n, n), seed) > 0, bias=bias)


CALLS = {  # (shape, seed) -> tensors and options
    "dynamic": lambda s, i: (three(s, i), {}),
    "numbers": lambda s, i: (three(s, i), dict(recipe=STATIC)),
    "tensors": lambda s, i: (three(s, i), dict(recipe=scales(s[1]))),
    "views": lambda s, i: (packed(s, i), {}),
    "bfloat16": lambda s, i: (three(s, i, torch.bfloat16), dict(recipe=STATIC)),
    "float32, lse": lambda s, i: (three(s, i, torch.float32), dict(return_lse=True)),
    "three axes": lambda s, i: ([x[0] for x in three(s, i)], dict(return_lse=True)),
    "heads": lambda s, i: (three(s, i), dict(recipe=HEADS)),
    "codes": lambda s, i: (codes(s, i), dict(out_scale="bound")),
    "codes, contiguous keys": lambda s, i: (
        [*codes(s, i)[:2], contiguous_keys(codes(s, i)[2])],
        dict(return_lse=True, out_scale="bound"),
    ),
    "codes of tokens": lambda s, i: (codes(s, i, ("token", "head", "head")), dict(out_dtype=torch.float16)),
    "codes to int16": lambda s, i: (codes(s, i, ("head", "tensor", "head")), dict(out_dtype=torch.int16)),
    "to int8": lambda s, i: (three(s, i), dict(out_dtype=torch.int8, out_scale="bound")),
    "to int8 by a number": lambda s, i: (three(s, i), dict(out_dtype=torch.int8, out_scale=0.02, recipe=STATIC)),
    "to int8 by heads": lambda s, i: (codes(s, i), dict(out_scale=torch.full((1, s[1], 1, 1), 0.02, device="cuda"))),
    "causal": lambda s, i: (three(s, i), dict(is_causal=True)),
    "causal, shared heads": lambda s, i: (
        three((s[0], 4, *s[2:]), i, key_heads=2),
        dict(is_causal=True, causal_align="bottom_right", enable_gqa=True, recipe=STATIC),
    ),
    "float q": lambda s, i: ([three(s, i)[0], *codes(s, i, ("head",) * 3)[1:]], {}),
    "windows": lambda s, i: (three(s, i), windows(s, i)),
}


@pytest.fixture
def general(monkeypatch):
    """The calls that took the general way."""
    calls = []
    real = op.attention
    monkeypatch.setattr(op, "attention", lambda arguments: calls.append(arguments) or real(arguments))
    return calls


def generally(*qkv, **options):
    with torch.no_grad():
        out, lse = call.compute(call.normalize(call.complete(tuple(qkv), options)))
    return out if lse is None else (out, lse)


def leaves(result):
    for x in result if isinstance(result, tuple) else (result,):
        yield from (x.data, x.scale) if isinstance(x, QTensor) else (x,)


def assert_same(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert isinstance(x, Tensor) and torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online", "intflash_bfp"])
def test_same_bits(method, name, shape, general):
    if name == "windows" and (shape != "windows" or method == "intflash_online"):
        pytest.skip("masks are for windows")
    if name == "heads" and (shape in ("long", "odd") or method == "intflash_online"):
        pytest.skip("long rows do not find the scales of heads")
    for seed in (0, 10):
        qkv, options = CALLS[name](SHAPES[shape], seed)
        found = intflash.attention(*qkv, method=method, **options)
        assert not general
        assert_same(found, generally(*qkv, method=method, **options))


KERNELS = {  # kernel -> shape, queries, options of a call on the CPU
    "bias of short rows": ((2, 4, 197, 64), 197, dict(bias=(1, 4, 197, 197))),
    "mask of keys": ((3, 4, 300, 64), 300, dict(attn_mask=(3, 1, 1, 300))),
    "padded channels": ((2, 4, 330, 72), 330, {}),
    "any rows": ((2, 4, 300, 64), 300, dict(bias=(1, 1, 300, 300))),
    "few rows": ((1, 4, 700, 160), 1, {}),
}


@pytest.mark.parametrize("recipe", [STATIC, HEADS], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
def test_bits_of_the_reference(method, name, recipe, general):
    """Of the direct way, for kernels beside those for windows, short and long rows."""
    shape, rows, masks = KERNELS[name]
    q, k, v = (x.cpu() for x in three(shape))
    options = dict(method=method, recipe=recipe)
    for option, axes in masks.items():
        values = tensor(axes, 7, torch.float32).cpu()
        options[option] = values > 0 if option == "attn_mask" else intflash.quantize_bias(values)
    q = q[:, :, :rows]
    want = intflash.attention(q, k, v, backend="reference", **options)
    there = {x: y.cuda() if isinstance(y, Tensor) else y for x, y in options.items()}
    general.clear()
    found = intflash.attention(*(x.cuda() for x in (q, k, v)), **there)
    assert not general and torch.equal(found.cpu(), want)


@pytest.mark.parametrize("recipe", [None, Recipe("tensor"), Recipe(q_scale=0.03)], ids=["heads", "tensor", "static"])
@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
def test_bits_of_float_q_beside_codes(method, rows, recipe, general):
    """A step of decoding over a cache of codes, and more rows."""
    q, *_ = three((2, 16, 700, 64))
    _, k, v = codes((2, 16, 700, 64), 3, ("head",) * 3, key_heads=2)
    q, options = q[:, :, :rows], dict(method=method, recipe=recipe, enable_gqa=True)
    on_cpu = [QTensor(x.data.cpu(), x.scale.cpu(), "head") for x in (k, v)]
    want = intflash.attention(q.cpu(), *on_cpu, backend="reference", **options)
    general.clear()
    found = intflash.attention(q, k, v, **options)
    assert not general and torch.equal(found.cpu(), want)


def test_sdpa():
    q, k, v = three(SHAPES["rows"])
    assert_same(intflash.sdpa(q, k, v), generally(q, k, v))


def test_keys_that_grow_in_one_storage(general):
    _, k, v = three(SHAPES["long"])
    row = tensor((1, 4, 1, 64), 5)
    for n in (961, 976, 1000, 1023, 1024):
        assert_same(intflash.attention(row, k[:, :, :n], v[:, :, :n]), generally(row, k[:, :, :n], v[:, :, :n]))
    assert not general


KINDS = [("rows", None), ("rows", STATIC), ("long", None), ("long", STATIC)]


@pytest.mark.parametrize("shape, recipe", KINDS)
def test_streams(shape, recipe):
    qkv = three(SHAPES[shape])
    expected = generally(*qkv, recipe=recipe)
    for _ in range(10):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = intflash.attention(*qkv, recipe=recipe)
        stream.synchronize()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", ["rows", "long"])
@pytest.mark.parametrize("recipe", [None, STATIC, Recipe(q_scale=0.0317, k_scale=0.0313, v_scale=0.0611)])
def test_a_graph_computes_with_what_its_tensors_hold(shape, recipe):
    """Also where the capture is the first to need a number of the recipe."""
    qkv = three(SHAPES[shape])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = intflash.attention(*qkv, recipe=recipe)
    for x in qkv:
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, generally(*qkv, recipe=recipe))


def test_a_graph_may_be_the_first_to_use_a_kernel():
    qkv = three((2, 3, 51, 48))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = intflash.attention(*qkv)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, generally(*qkv))


def test_threads():
    rows, long = three(SHAPES["rows"]), three(SHAPES["long"])
    expected = generally(*rows), generally(*long, recipe=STATIC)
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(50):
                found = intflash.attention(*rows), intflash.attention(*long, recipe=STATIC)
            torch.cuda.current_stream().synchronize()
            wrong.extend(not torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 16


def test_a_thread_that_has_not_used_the_gpu():
    qkv, found = three(SHAPES["rows"]), []
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(intflash.attention(*qkv)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], generally(*qkv))


def test_memory_is_freed_in_the_stream_s_order():
    qkv = three(SHAPES["long"])
    expected = generally(*qkv)
    for _ in range(20):
        copies = [x.clone() for x in qkv]
        found = intflash.attention(*copies)
        del copies
        others = [torch.randn_like(x) for x in qkv]
        assert torch.equal(found, expected)
        del others


def test_one_tensor_in_three_places():
    q = three(SHAPES["rows"])[0]
    assert torch.equal(intflash.attention(q, q, q), generally(q, q, q))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_gpu():
    qkv = [x.to("cuda:1") for x in three(SHAPES["long"])]
    with torch.cuda.device(0):
        found = intflash.attention(*qkv)
        assert torch.cuda.current_device() == 0
    assert_same(found, generally(*qkv))


def test_values_are_read_on_request():
    q, k, v = three(SHAPES["rows"])
    q[0, 0, 0, 0] = torch.nan
    intflash.attention(q, k, v)
    with pytest.raises(InputError, match="finite"):
        intflash.attention(q, k, v, check_finite=True)


def test_bad_calls_are_refused():
    q, k, v = three(SHAPES["rows"])
    for qkv, options, match in [
        ((q, k[..., :32], v), {}, "head_dim"), ((q, k[:, :3], v), {}, "heads"), ((q, k, v.cpu()), {}, "one device"),
        ((q, k, v), dict(method="none"), "unknown method"), ((q, k, v), dict(scale=-1.0), "scale"),
        ((q, k, v), dict(attn_mask=[1]), "attn_mask"),
    ]:  # fmt: skip
        for _ in range(2):
            with pytest.raises(InputError, match=match):
                intflash.attention(*qkv, **options)


def test_gradients_are_refused():
    q, k, v = three(SHAPES["rows"])
    out = intflash.attention(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="inference"):
        out.float().sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["dynamic", "numbers", "codes", "float32, lse", "to int8 by heads"])
def test_compiled(name, mode):
    with mode():
        qkv, options = CALLS[name](SHAPES["rows"], 0)
        found = torch.compile(lambda *qkv: intflash.attention(*qkv, **options))(*qkv)
        for x, y in zip(leaves(found), leaves(generally(*qkv, **options)), strict=True):
            assert torch.equal(x, y)
