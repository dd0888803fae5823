"""The custom op: torch.library's own checks, and full graphs under torch.compile."""

import itertools
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import intflash
from intflash import BackendError, InputError, QTensor, Recipe, call, op
from intflash.backends import cpu
from intflash.op import _general, _inference, _inference_scaled, _simple
from oracle import randn


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """Resets torch.compile. Otherwise code of another test is recompiled for a changed option, or after eight
    recompilations not at all.
    """
    torch._dynamo.reset()


def flat(q, k, v, **changes):
    arguments = dict.fromkeys(a.name for a in _general._schema.arguments)
    arguments |= dict(q=q, k=k, v=v, number_scales=[0.0] * 3, sizes=[128] * 3 + [8] * 3 + [-1, -1], options="")
    return tuple((arguments | changes).values())


@pytest.mark.parametrize("options", ["", "is_causal=True method=intflash_p8"])
def test_opcheck_of_the_simple_overload(options):
    torch.library.opcheck(_simple, (*randn(1, 2, 20, 16), torch.rand(20, 20) > 0.2, None, options))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"options": "return_lse=True is_causal=True"},
        {
            "out_dtype": torch.int8,
            "options": "q_granularity=token k_granularity=block v_granularity=channel bound_out=True",
        },
        {"out_dtype": torch.int16, "options": "dynamic_out=True"},
        {"options": "method=intflash_online", "number_scales": [0.03, 0.03, 0.03]},
        {"options": "smooth_k=True rotate=True return_lse=True"},
    ],
    ids=lambda c: "-".join(map(str, c)) or "plain",
)
def test_opcheck(changes):
    torch.library.opcheck(_general, flat(*randn(1, 2, 20, 16), **changes))


def test_opcheck_quantized():
    q, k, v = (intflash.quantize(x, "head") for x in randn(1, 2, 20, 16))
    torch.library.opcheck(
        _general,
        flat(q.data, k.data, v.data, q_scale=q.scale, k_scale=k.scale, v_scale=v.scale, out_dtype=torch.int8,
             options="codes=qkv q_granularity=head k_granularity=head v_granularity=head bound_out=True",
             sizes=[128] * 3 + [8] * 3 + [-1, -1]),
    )  # fmt: skip


def test_opcheck_of_float_q_beside_codes():
    q, *codes = randn(1, 2, 20, 16)
    k, v = (intflash.quantize(x, "head") for x in codes)
    torch.library.opcheck(
        _general,
        flat(q, k.data, v.data, k_scale=k.scale, v_scale=v.scale,
             options="codes=kv q_granularity=head k_granularity=head v_granularity=head return_lse=True"),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", [None, Recipe(q_scale=0.02, k_scale=0.02, v_scale=0.02)], ids=["dynamic", "static"])
def test_compiles_to_one_graph(recipe):
    def layer(q, k, v, mask):
        out, lse = intflash.attention(q * 2, k, v, mask, recipe=recipe, return_lse=True)
        return out + 1, lse

    arguments = (*randn(2, 2, 20, 16), torch.rand(2, 1, 20, 20) > 0.2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)
    for got, expected in zip(compiled, layer(*arguments), strict=True):
        assert torch.equal(got, expected)


def test_compiles_quantized_tensors_in_and_out():
    def layer(q, k, v):
        q, k, v = (intflash.quantize(x) for x in (q, k, v))
        return intflash.attention(q, k, v, out_dtype=torch.int16, out_scale=0.02).dequantize()

    arguments = randn(1, 2, 20, 16)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments), layer(*arguments))


def test_sdpa_under_compile_and_a_dynamic_shape():
    compiled = torch.compile(intflash.sdpa, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (7, 20, 33):
        q, k, v = randn(1, 2, n, 16)
        assert torch.equal(compiled(q, k, v), intflash.sdpa(q, k, v))


def test_compiled_calls_refuse_what_eager_ones_do():
    def layer(q, k, v):
        return intflash.attention(q, k, v, out_dtype=torch.int8, out_scale="auto").data

    for forward in (layer, torch.compile(layer, backend="aot_eager")):
        with pytest.raises(Exception, match="'dynamic' or 'bound', got 'auto'"):
            forward(*randn(1, 2, 8, 16))


def test_op_does_not_alias_a_given_out_scale():
    q, k, v = randn(1, 2, 8, 16)
    scale = torch.full((1, 1, 1, 1), 0.05)
    out = torch.ops.intflash.attention.general(*flat(q, k, v, out_scale=scale, out_dtype=torch.int8))
    assert torch.equal(out[1], scale) and out[1].data_ptr() != scale.data_ptr()
    assert isinstance(intflash.attention(q, k, v, out_dtype=torch.int8, out_scale=scale), QTensor)


def test_compiled_code_refuses_the_backward_pass_only():
    q, k, v = randn(1, 2, 20, 16)
    compiled = torch.compile(lambda *x: intflash.attention(*x) * 2, fullgraph=True, backend="aot_eager")
    out = compiled(q.clone().requires_grad_(), k, v)
    assert torch.equal(out, intflash.attention(q, k, v) * 2)
    with pytest.raises(RuntimeError, match="for inference and has no gradients"):
        out.sum().backward()


@pytest.mark.parametrize("method", ["lite", "fp32"])
def test_integer_output_of_a_float_v_compiles(method):
    inputs = randn(1, 2, 20, 16)

    def call(*x):
        return intflash.attention(*x, method=method, out_dtype=torch.int8, out_scale="bound").dequantize()

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs))


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("heads", [1, 2])
def test_compiled_integer_output_has_the_scale_of_all_tokens(granularity, heads):
    """Also where one key head serves several query heads, because compiled code depends on the shape of the scale."""
    q, k, v = randn(1, 4, 20, 16)
    recipe = Recipe(k=granularity, v=granularity, block_size=7)
    options = dict(method="fp16", out_dtype=torch.int16, recipe=recipe, enable_gqa=True)

    def call(*x):
        found = intflash.attention(*x, **options)
        return found.data, found.scale

    inputs = q, k[:, :heads], v[:, :heads]
    compiled, eager = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs)
    assert all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(compiled, eager, strict=True))


def test_traced_code_computes():
    q, k, v = randn(1, 2, 20, 16)
    traced = torch.jit.trace(lambda *x: intflash.attention(*x), (q, k, v), check_trace=False)
    assert torch.equal(traced(k, v, q), intflash.attention(k, v, q))


def test_the_op_passes_every_argument(monkeypatch):
    seen, compute = [], call.compute
    monkeypatch.setattr(call, "compute", lambda arguments: seen.append(arguments) or compute(arguments))
    inputs = randn(1, 2, 20, 16)
    intflash.attention(*inputs, backend="torch")
    torch.compile(lambda *x: intflash.attention(*x, backend="torch"), fullgraph=True, backend="aot_eager")(*inputs)
    assert [set(arguments) for arguments in seen] == [set(call.NAMES)] * 2
    assert all(torch.equal(arguments[name], x) for arguments in seen for name, x in zip("qkv", inputs, strict=True))


ENDS = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 20], [0, 12, 20])]
OPTIONS = {
    "causal": dict(is_causal=True, causal_align="bottom_right"),
    "window": dict(window_size=(9, 2)),
    "scale": dict(scale=0.7),
    "bias": dict(bias=torch.randn(1, 2, 20, 20, generator=torch.Generator().manual_seed(0))),
    "smooth, rotate": dict(recipe=Recipe(smooth_k=True, rotate=True), return_lse=True),
    "block": dict(recipe=Recipe(q="block", k="block", block_size=7)),
    "four bits": dict(recipe=Recipe(bits=4)),
    "packed": dict(cu_seqlens_q=ENDS[0], cu_seqlens_k=ENDS[1]),
    "dynamic": dict(out_dtype=torch.int8, out_scale="dynamic"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_compiled_calls_have_the_bits_of_eager_ones(options):
    q, k, v = randn(1, 2, 20, 16)
    if options.get("is_causal"):
        q = q[:, :, :18]

    def call(q, k, v):
        found = intflash.attention(q, k, v, **options)
        found = found if isinstance(found, tuple) else (found,)
        return [x.dequantize() if isinstance(x, QTensor) else x for x in found]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip(compiled, call(q, k, v), strict=True))


@pytest.mark.parametrize("granularity, bits", [("tensor", 4), ("block", 8)])
def test_compiled_calls_of_codes(granularity, bits):
    granularities = granularity, granularity, "tensor"
    codes = zip(randn(1, 2, 20, 16), granularities, strict=True)
    q, k, v = (intflash.quantize(x, g, bits=bits, block_size=7) for x, g in codes)

    def call(q, k, v):
        return intflash.attention(q, k, v, out_dtype=torch.int16).dequantize()

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


OF_QUERY = {
    "dynamic": {},
    "causal, lse": dict(is_causal=True, return_lse=True),
    "static": dict(recipe=Recipe(q_scale=0.03)),
    "static of heads": dict(recipe=Recipe(q_scale=torch.tensor([0.02, 0.03]))),
    "token, four bits, divide": dict(recipe=Recipe(q="token", bits=4, rule="divide")),
    "int8": dict(out_dtype=torch.int8, out_scale="bound"),
    "method": dict(method="int_flash_half"),
}


@pytest.mark.parametrize("options", OF_QUERY.values(), ids=OF_QUERY.keys())
def test_compiled_calls_of_float_q_beside_codes(options):
    inputs = randn(1, 2, 20, 16)
    codes = [intflash.quantize(x, kind, block_size=7) for x, kind in zip(inputs[1:], ("block", "channel"), strict=True)]

    def call(q):
        found = intflash.attention(q, *codes, **options)
        found = found if isinstance(found, tuple) else (found,)
        return [x.dequantize() if isinstance(x, QTensor) else x for x in found]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(inputs[0])
    assert all(torch.equal(x, y) for x, y in zip(compiled, call(inputs[0]), strict=True))


def test_compiled_calls_keep_the_rule():
    q = (torch.arange(640).view(1, 2, 20, 16) % 254 - 126.5) * 0.03  # ties
    _, k, v = randn(1, 2, 20, 16)
    recipes = [Recipe(rule=rule, q_scale=0.03) for rule in ("exact", "divide")]
    assert not torch.equal(*(recipe.quantize("q", q).data for recipe in recipes))

    def call(recipe):
        return intflash.attention(q, k, v, recipe=recipe)

    for recipe in recipes:
        assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(recipe), call(recipe))


def test_one_compiled_call_with_different_recipes():
    """torch makes a number that changes between calls a symbol."""
    q, k, v = randn(1, 2, 20, 16)

    def call(recipe):
        return intflash.attention(q, k, v, recipe=recipe)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for size, bits, scale in ((7, 8, 0.02), (9, 4, 0.03), (5, 8, 0.04)):
        recipe = Recipe(q="block", k="block", block_size=size, bits=bits, v_scale=scale)
        assert torch.equal(compiled(recipe), call(recipe))


def test_compiled_calls_keep_the_backend_and_the_checks():
    q, k, v = randn(1, 2, 20, 16)
    for arguments, options, said in (
        ((q, k[:, :1], v[:, :1]), {}, "enable_gqa=True"),
        ((q, k, v), dict(method="ivit", backend="cpu"), "cpu"),
    ):
        with pytest.raises(Exception, match=said):
            torch.compile(lambda *x: intflash.attention(*x, **options), backend="aot_eager")(*arguments)  # noqa: B023
    q[0, 0, 0, 0] = float("nan")
    unchecked = torch.compile(lambda *x: intflash.attention(*x, check_finite=False), backend="aot_eager")
    assert unchecked(q, k, v).shape == q.shape


# --- The overload `inference`, which compiled calls without gradients take --------------------------------------------

PLAIN = 1  # the number of the default options
CAUSAL = PLAIN + (1 << 4)
UNCHECKED = PLAIN + (1 << 16)


def inference(q, k, v, attn_mask=None, bias=None, options=PLAIN):
    return _inference(q, k, v, attn_mask, bias, options)


@pytest.mark.parametrize("options", [PLAIN, CAUSAL])
@pytest.mark.parametrize("enter", [torch.no_grad, torch.enable_grad])
def test_opcheck_of_the_inference_overload(enter, options):
    with enter():
        torch.library.opcheck(_inference, (*randn(1, 2, 20, 16), torch.rand(20, 20) > 0.2, None, options))


def scaled(q, k, v, *others, scale=0.0, numbers=(0.0, 0.0, 0.0), options=PLAIN):
    return _inference_scaled(q, k, v, *others, *[None] * (5 - len(others)), scale, *numbers, options)


STATIC = 0x11100000000 * 0x1001 + PLAIN  # granularity "tensor" and 8 bits of each


@pytest.mark.parametrize("enter", [torch.no_grad, torch.enable_grad])
def test_opcheck_of_the_scaled_inference_overload(enter):
    with enter():
        inputs, mask, scale = randn(1, 2, 20, 16), torch.rand(20, 20) > 0.2, torch.tensor(0.03)
        torch.library.opcheck(
            _inference_scaled,
            (*inputs, mask, None, scale, None, None, 0.5, 0.0, 0.02, 0.02, STATIC + (2 << 56)),
        )


def test_the_numbers_of_options(monkeypatch):
    """Compiled code on disk holds them: a number never changes its meaning."""
    own = ("", None, None, None, None, None, None, None)
    assert op._options_of(0x0000001) == (False, False, "top_left", None, None, "intflash", *own)
    assert op._options_of(0x3221111) == (True, True, "bottom_right", True, "cuda", "intflash_bfp", *own)
    numbered = "kv", "tensor", "head", "channel", None, 8, 4, torch.bfloat16
    assert op._options_of(0x321042110000001)[6:] == numbered
    qkv = randn(1, 2, 8, 16)
    monkeypatch.setattr(op, "_inference", lambda *arguments: arguments[-1])
    seen = set()
    for options in itertools.product(*(values for _, values in op._OPTIONS[:6])):
        number = op.compiled_inference(*qkv, None, None, *options, None, None, None)
        assert op._options_of(number) == (*options, *own)
        seen.add(number)
    assert len(seen) == 288
    for options in itertools.product((3, None, "other"), repeat=6):
        assert op.compiled_inference(*qkv, None, None, *options, None, None, None) is None


def test_the_numbers_of_scaled_options(monkeypatch):
    qkv = randn(1, 2, 8, 16)
    monkeypatch.setattr(op, "_inference_scaled", lambda *arguments: arguments)
    plain = False, False, "top_left", None, None, "intflash"

    def found(q, k, v, scale=None, recipe=None, out_dtype=None):
        arguments = op.compiled_inference(q, k, v, None, None, *plain, scale, recipe, out_dtype)
        return None if arguments is None else (*arguments[5:12], op._options_of(arguments[12])[6:])

    own, none = (None,) * 6, (None,) * 3
    assert found(*qkv, scale=0.5) == (*none, 0.5, 0.0, 0.0, 0.0, ("", *own, None))
    for dtype in op._OPTIONS[-1][1][1:]:
        assert found(*qkv, out_dtype=dtype) == (*none, 0.0, 0.0, 0.0, 0.0, ("", *own, dtype))
    of_v = torch.tensor([0.1, 0.2])
    for kinds in itertools.product(op._GRANULARITIES[1:], repeat=3):
        for bits in (4, 8):
            recipe = Recipe(*kinds, bits=bits, q_scale=0.2, v_scale=of_v)
            *scales, options = found(*qkv, recipe=recipe)
            assert scales[:2] == [None, None] and scales[2] is of_v and scales[3:] == [0.0, 0.2, 0.0, 0.0]
            assert options == ("", *kinds, bits, bits, bits, None)
    q, k, v = (
        intflash.quantize(x, g, bits=b) for x, g, b in zip(qkv, ("token", "head", "channel"), (8, 4, 8), strict=True)
    )
    assert found(qkv[0], k, v)[7] == ("kv", None, "head", "channel", None, 4, 8, None)
    assert found(q, k, v, out_dtype=torch.float32)[7] == ("qkv", "token", "head", "channel", 8, 4, 8, torch.float32)
    for refused in (
        dict(scale=1), dict(scale=-1.0), dict(scale=float("nan")), dict(recipe=Recipe(rule="divide")),
        dict(recipe=Recipe(smooth_k=True)), dict(recipe=Recipe(rotate=True)), dict(recipe=Recipe(k="block")),
        dict(recipe=3), dict(out_dtype=torch.int8), dict(out_dtype=torch.float64), dict(out_dtype="float32"),
    ):  # fmt: skip
        assert found(*qkv, **refused) is None
    assert found(q, k, v) is None and found(q, *qkv[1:]) is None and found(qkv[0], k, v, recipe=Recipe()) is None
    assert found(qkv[0], intflash.quantize(qkv[1], "block"), v) is None and found(None, *qkv[1:]) is None
    for _, values in op._OPTIONS[5:6]:
        for recipe in (op.get_method(name).recipe for name in values):
            assert recipe.rule == "exact" and not recipe.smooth_k and not recipe.rotate


@pytest.mark.parametrize("number", [0, 2, 1 + (2 << 4), 1 + (4 << 24), 1 + (3 << 28), 1 + (5 << 32), 1 + (1 << 60), -1])
def test_numbers_that_are_no_options(number):
    with torch.no_grad(), pytest.raises(InputError, match="that this version does not know"):
        inference(*randn(1, 2, 8, 16), options=number)


in_cpp = pytest.mark.skipif(not cpu.instruction_sets(), reason="the native module was not built")


STATIC_RECIPE, SCALE = Recipe(q_scale=0.03, k_scale=0.03, v_scale=torch.tensor(0.03)), torch.full((1, 1, 1, 1), 0.03)


@in_cpp
@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode])
def test_a_compiled_call_runs_no_python_of_intflash(enter):
    with enter():
        inputs, mask = randn(1, 2, 20, 16), torch.rand(20, 20) > 0.2
        codes = [intflash.quantize(x, scale=0.03).data for x in inputs[1:]]
        calls = [
            (lambda *x: intflash.attention(*x), inputs),
            (lambda *x: intflash.attention(*x, is_causal=True, method="auto"), (*inputs, mask)),
            (lambda *x: intflash.sdpa(*x), inputs),
            (lambda *x: intflash.attention(*x, scale=0.4, recipe=STATIC_RECIPE), inputs),
            (lambda q, k, v: intflash.attention(q, *(QTensor(x, SCALE) for x in (k, v))), (inputs[0], *codes)),
        ]
        for call_of, arguments in calls:
            compiled = torch.compile(call_of, fullgraph=True)
            expected = compiled(*arguments)
            folder, seen = os.path.dirname(intflash.__file__), []
            sys.setprofile(lambda frame, event, _: seen.append((frame.f_code.co_filename, frame.f_code.co_name)))  # noqa: B023
            try:
                out = compiled(*arguments)
            finally:
                sys.setprofile(None)
            assert torch.equal(out, expected) and torch.equal(out, call_of(*arguments))
            assert seen and not [x for x in seen if x[0].startswith(folder)]


MASKED = {
    "bool mask": lambda: dict(attn_mask=torch.rand(20, 20) > 0.2),
    "int bias": lambda: dict(bias=intflash.quantize_bias(torch.randn(1, 2, 20, 20)), is_causal=True),
    "no check": lambda: dict(check_finite=False, backend="cpu", causal_align="bottom_right", is_causal=True),
    "online": lambda: dict(method="intflash_online"),
    "scale": lambda: dict(scale=0.3, is_causal=True),
    "static": lambda: dict(recipe=Recipe(q_scale=0.03, k_scale=0.02, v_scale=0.01), method="intflash_p8"),
    "one static": lambda: dict(recipe=Recipe(q_scale=0.03)),
    "static tensors": lambda: dict(recipe=Recipe(q_scale=torch.tensor(0.03), v_scale=torch.tensor([0.03, 0.01]))),
    "four bits": lambda: dict(recipe=Recipe(bits=4), out_dtype=torch.float16),
    "per tensor": lambda: dict(recipe=Recipe("tensor", "head", "tensor"), attn_mask=torch.rand(20, 20) > 0.2),
}
DECLINED = {
    "float mask": lambda: dict(attn_mask=torch.randn(20, 20)),
    "float bias": lambda: dict(bias=torch.randn(1, 2, 20, 20), attn_mask=torch.rand(20, 20) > 0.2),
    "method": lambda: dict(method="qflash"),
    "per token": lambda: dict(recipe=Recipe("token", "head", "channel"), scale=0.3),
    "static, float bias": lambda: dict(recipe=Recipe(k_scale=0.02), bias=torch.randn(20, 20)),
    "window": lambda: dict(window_size=(4, 2), scale=0.3),
    "log-sum-exp": lambda: dict(return_lse=True),
}


@pytest.mark.parametrize("options", (MASKED | DECLINED).values(), ids=(MASKED | DECLINED).keys())
@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
def test_compiled_inference_has_the_bits_of_eager_calls(options, strided):
    options = options()
    inputs = randn(1, 2, 20, 16)
    if strided:
        inputs = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]  # declined: strided channels
    compiled = torch.compile(lambda *x: intflash.attention(*x, **options), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, found = intflash.attention(*inputs, **options), compiled(*inputs)
        if isinstance(expected, tuple):
            assert torch.equal(found[1], expected[1])
            expected, found = expected[0], found[0]
        assert torch.equal(found, expected) and found.dtype == expected.dtype


CODES = {
    "kv": lambda q, k, v: (q, intflash.quantize(k, "head"), intflash.quantize(v, "channel")),
    "kv of four bits": lambda q, k, v: (q, *(intflash.quantize(x, bits=4) for x in (k, v))),
    "block": lambda q, k, v: (q, intflash.quantize(k, "block", block_size=7), intflash.quantize(v)),
    "qkv": lambda *x: tuple(intflash.quantize(y, "head") for y in x),
    "q per token": lambda *x: (intflash.quantize(x[0], "token"), *(intflash.quantize(y) for y in x[1:])),
}


@pytest.mark.parametrize("kind", CODES)
def test_compiled_inference_of_codes(kind):
    inputs = CODES[kind](*randn(1, 2, 20, 16))
    options = dict(out_dtype=torch.float32, scale=0.4)
    compiled = torch.compile(lambda *x: intflash.attention(*x, **options), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), intflash.attention(*inputs, **options))


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_compiled_inference_of_other_axes(axes):
    inputs = [x.reshape((1,) * (axes - 4) + x.shape)[(0,) * (4 - axes)] for x in randn(1, 2, 20, 16)]
    compiled = torch.compile(lambda *x: intflash.attention(*x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), intflash.attention(*inputs))


def test_which_traced_calls_take_the_inference_overload():
    inputs = randn(1, 2, 20, 16)
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    def trace(*x, **options):
        torch._dynamo.reset()
        torch.compile(lambda *x: intflash.attention(*x, **options), fullgraph=True, backend=backend)(*x)
        return "attention.inference" in graphs[-1]

    assert trace(*inputs) and trace(*inputs, is_causal=True) and trace(*(torch.nn.Parameter(x, False) for x in inputs))
    with torch.no_grad():
        assert trace(*(x.clone().requires_grad_() for x in inputs))
    assert not trace(inputs[0].clone().requires_grad_(), *inputs[1:])
    assert trace(*inputs, scale=0.5) and "attention.inference_scaled" in graphs[-1]
    assert not trace(*inputs, scale=0.5, return_lse=True) and not trace(*inputs, is_causal=1)
    scale = torch.tensor(0.1, requires_grad=True)
    assert not trace(inputs[0].clone().requires_grad_(), *inputs[1:], scale=0.5)
    assert not trace(*inputs, recipe=Recipe(q_scale=scale))

    class Attends(torch.nn.Module):
        def forward(self, x):
            return intflash.attention(x, x, x)

    with torch.no_grad():  # an exported program may be differentiated later
        program = torch.export.export(Attends(), (inputs[0],), strict=False)
    assert "attention.default" in program.graph_module.code
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(1.0))):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="gradients|autograd.Function"):
            torch.compile(transform(lambda x: intflash.attention(x, x, x).sum()), backend="aot_eager")(inputs[0])


def test_code_with_the_inference_overload_is_not_compiled_for_gradients():
    q, k, v = randn(1, 2, 20, 16)
    compiled = torch.compile(inference, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="for inference and has no gradients"):
        compiled(q.clone().requires_grad_(), k, v)
    assert torch.equal(compiled(q, k, v), intflash.attention(q, k, v))


@pytest.mark.parametrize("enter", [torch.no_grad, torch.enable_grad])
def test_errors_in_the_kernel_are_those_of_eager_calls(enter):
    q, k, v = randn(1, 2, 20, 16)
    bad = k.index_fill(2, torch.tensor([3]), float("nan"))
    with enter():
        for _ in range(2):
            with pytest.raises(InputError, match="k must be finite"):
                inference(q, bad, v)
            with pytest.raises(InputError, match="enable_gqa=True"):
                inference(q, k[:, :1], v[:, :1])
            with pytest.raises(BackendError, match="cuda"):
                inference(q, k, v, options=PLAIN + (2 << 20))
            with pytest.raises(InputError, match="dense"):
                inference(q.to_sparse(), k, v)
            with pytest.raises(InputError, match="one device"):
                inference(q, k.to("meta"), v)
        assert inference(q, bad, v, options=UNCHECKED).shape == q.shape
        compiled = torch.compile(lambda *x: intflash.attention(*x), backend="aot_eager")
        with pytest.raises(InputError, match="k must be finite"):
            compiled(q, bad, v)
        assert torch.equal(compiled(q, k, v), intflash.attention(q, k, v))


def test_errors_in_the_kernel_of_another_thread():
    q, k, v = randn(1, 2, 20, 16)
    found = []

    def work():
        try:
            inference(q, k * float("nan"), v)
        except InputError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 1


def test_the_kernel_keeps_no_tensor():
    q, k, v = randn(1, 2, 20, 16)
    mask, bias = torch.rand(20, 20) > 0.2, torch.randn(20, 20)
    of_q = torch.tensor(0.03)
    kept = [weakref.ref(x) for x in (q, k, v, mask, bias, of_q)]
    with torch.no_grad():
        scaled(q, k, v, mask, None, of_q, options=STATIC)
        scaled(q, k, v, mask, bias, of_q, options=STATIC)  # declined
        inference(q, k, v)
        inference(q, k, v, mask)
        inference(q, k, v, mask, bias)  # declined
        with pytest.raises(InputError):
            inference(q, k * float("nan"), v, mask, bias)
        out = weakref.ref(inference(q, k, v))
    del q, k, v, mask, bias, of_q
    assert out() is None and [x() for x in kept] == [None] * 6


def test_the_kernel_refuses_gradients():
    q, k, v = randn(1, 2, 20, 16)
    out = inference(q.clone().requires_grad_(), k, v)
    assert torch.equal(out, intflash.attention(q, k, v))
    with pytest.raises(RuntimeError, match="for inference and has no gradients"):
        out.sum().backward()
    out = scaled(q, k, v, None, None, torch.tensor(0.03, requires_grad=True), options=STATIC)
    with pytest.raises(RuntimeError, match="for inference and has no gradients"):
        out.sum().backward()
    with torch.no_grad():
        assert not inference(q.clone().requires_grad_(), k, v).requires_grad
    assert not inference(q, k, v).requires_grad


def test_the_kernel_under_modes_and_transforms():
    q, k, v = randn(1, 2, 20, 16)
    expected = intflash.attention(q, k, v)
    with torch.inference_mode():
        assert inference(q, k, v).is_inference()
    with torch.no_grad():
        assert torch.equal(inference(torch._neg_view(-q), k, v), expected)
        assert torch.equal(torch.func.vmap(inference)(*(torch.stack([x, x]) for x in (q, k, v)))[1], expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(inference(q, k, v), expected)
        assert inference(*(x.to("meta") for x in (q, k, v))).is_meta


@in_cpp
def test_the_kernel_without_torch_s_functions():
    q, k, v = randn(1, 2, 20, 16)
    with torch.no_grad():
        expected = inference(q, k, v)
        cpu.use_native(cpu._native, find_torch=False)
        try:
            assert torch.equal(inference(q, k, v), expected)
        finally:
            cpu.use_native(cpu._native)
        assert torch.equal(inference(q, k, v), expected)


WITHOUT_INTERFACE = """
import importlib.util, sys, types
package = types.ModuleType("intflash")
package.__path__ = importlib.util.find_spec("intflash").submodule_search_locations
sys.modules["intflash"] = package  # so that the module below is imported before op.py
from intflash.backends import cpu
cpu.add_inference_kernel = lambda *arguments: []
del sys.modules["intflash"]
import intflash, torch
from intflash import op
q, k, v = torch.randn(3, 1, 2, 20, 16)
recipe = intflash.Recipe(q_scale=0.03)
compiled = torch.compile(lambda *x: intflash.attention(*x, recipe=recipe), fullgraph=True, backend="aot_eager")
with torch.no_grad():
    assert torch.equal(compiled(q, k, v), intflash.attention(q, k, v, recipe=recipe))
    assert torch.equal(op._inference(q, k, v, None, None, 1), intflash.attention(q, k, v))
    assert torch.ops.intflash.attention_inference is op._inference  # for generated code that lies on disk
    try:
        op._inference(q, k * float("nan"), v, None, None, 1)
    except intflash.InputError:
        print("refused")
try:
    op._inference(q.requires_grad_(), k, v, None, None, 1).sum().backward()
except RuntimeError as error:
    print("no gradients" in str(error))
"""


def test_a_torch_without_the_interface():
    found = subprocess.run([sys.executable, "-c", WITHOUT_INTERFACE], capture_output=True, text=True, timeout=120)
    assert found.stdout == "refused\nTrue\n", found.stderr
