"""The native call path on a CPU: which calls it serves, with the general way's bits; which it leaves to that; that
nothing fools it."""

import math
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import intflash
from intflash import InputError, QTensor, Recipe, call, op
from intflash.backends import AUTOMATIC, cpu

pytestmark = pytest.mark.skipif(not cpu.instruction_sets(), reason="the native module was not built")


@pytest.fixture
def general(monkeypatch):
    """The calls that took the general way."""
    calls = []
    real = op.attention
    monkeypatch.setattr(op, "attention", lambda arguments: calls.append(arguments) or real(arguments))
    return calls


def tensors(seed, *, dtype=torch.float32, heads=(4, 4), strided=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads[0], 33, 16), (2, heads[1], 40, 16), (2, heads[1], 40, 24)]
    made = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made] if strided else made


def codes(seed, q="tensor", k="tensor", v="tensor", **options):
    return [intflash.quantize(x, g, **options) for x, g in zip(tensors(seed), (q, k, v), strict=True)]


def float_q(seed, k="tensor", v="tensor", dtype=torch.float32, **options):
    """Float q beside codes of k and v."""
    return [tensors(seed, dtype=dtype)[0], *codes(seed, "tensor", k, v, **options)[1:]]


def mask(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3


def int_bias(seed, *shape):
    return intflash.quantize_bias(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


HEADS = torch.tensor([0.01, 0.02, 0.03, 0.04])
SERVED = {
    "floats": lambda s: (tensors(s), {}),
    "views": lambda s: (tensors(s, strided=True), {}),
    "bfloat16": lambda s: (tensors(s, dtype=torch.bfloat16), {}),
    "float16 to float32": lambda s: (tensors(s, dtype=torch.float16), dict(out_dtype=torch.float32)),
    "three axes": lambda s: ([x[0] for x in tensors(s)], {}),
    "three axes, views": lambda s: ([x[0] for x in tensors(s, strided=True)], dict(return_lse=True)),
    "two axes": lambda s: ([x[0, 0] for x in tensors(s)], dict(return_lse=True)),
    "codes": lambda s: (codes(s), dict(out_scale="bound")),
    "codes per head": lambda s: (codes(s, "head", "head", "head"), dict(out_scale="bound")),
    "codes per token": lambda s: (codes(s, "token", "block", "channel", block_size=7), dict(out_scale="bound")),
    "codes of four bits": lambda s: (codes(s, bits=4), dict(out_dtype=torch.float32)),
    "int16": lambda s: (codes(s), dict(out_dtype=torch.int16)),
    "shared heads": lambda s: (tensors(s, heads=(4, 2)), dict(enable_gqa=True)),
    "log-sum-exp": lambda s: (tensors(s), dict(return_lse=True, scale=0.2)),
    "log-sum-exp of codes": lambda s: (codes(s), dict(return_lse=True, out_scale="bound")),
    "causal": lambda s: (tensors(s), dict(is_causal=True, causal_align="bottom_right")),
    "causal from the left": lambda s: (tensors(s), dict(is_causal=True)),
    "window": lambda s: (tensors(s), dict(window_size=(20, 5), causal_align="bottom_right")),
    "causal window": lambda s: (tensors(s), dict(is_causal=True, window_size=(30, -1))),
    "right side of a window": lambda s: (tensors(s), dict(window_size=(-1, 7))),
    "windows": lambda s: (tensors(s), dict(attn_mask=mask(s, 2, 1, 33, 40), bias=int_bias(s, 1, 4, 33, 40))),
    "small mask": lambda s: (tensors(s), dict(attn_mask=mask(s, 33, 40))),
    "mask of keys": lambda s: (tensors(s), dict(attn_mask=mask(s, 2, 1, 1, 40))),
    "unlooked": lambda s: (codes(s), dict(check_finite=False, out_scale="bound")),
    "looked": lambda s: (tensors(s), dict(check_finite=True)),
    "four bits": lambda s: (tensors(s), dict(recipe=Recipe(bits=4))),
    "number scales": lambda s: (tensors(s), dict(recipe=Recipe(q="head", q_scale=0.03, k_scale=0.02, v_scale=0.04))),
    "tensor scales": lambda s: (
        tensors(s),
        dict(recipe=Recipe("head", "tensor", "head", q_scale=HEADS, k_scale=HEADS[:1], v_scale=HEADS.view(1, 4, 1, 1))),
    ),
    "scale as an int": lambda s: (tensors(s), dict(scale=1)),
    "by name": lambda s: (tensors(s), dict(backend="cpu", method="intflash_p8")),
    "online": lambda s: (tensors(s), dict(method="intflash_online", bias=int_bias(s, 33, 40))),
    "two groups": lambda s: (codes(s), dict(method="intflash_bfp", return_lse=True, out_scale="bound")),
    "two groups, bias": lambda s: (tensors(s), dict(method="intflash_bfp", bias=int_bias(s, 33, 40))),
    "float q": lambda s: (float_q(s), {}),
    "float16 q, masks": lambda s: (
        float_q(s, "head", "head", dtype=torch.float16),
        dict(attn_mask=mask(s, 2, 1, 33, 40), bias=int_bias(s, 1, 4, 33, 40), return_lse=True),
    ),
    "float q, number": lambda s: (float_q(s, "block", "channel", block_size=7), dict(recipe=Recipe(q_scale=0.03))),
    "float q, heads": lambda s: (float_q(s, bits=4), dict(recipe=Recipe("head", "tensor", bits=4, q_scale=HEADS))),
    "float q to int8": lambda s: (float_q(s), dict(out_dtype=torch.int8, out_scale="bound", check_finite=False)),
    "float q to int16": lambda s: (float_q(s, "head", "channel"), dict(out_dtype=torch.int16, method="intflash_p8")),
}  # fmt: skip
DECLINED = {
    "qflash": lambda s: (tensors(s), dict(method="qflash", out_dtype=torch.int8, out_scale="bound")),
    "another backend": lambda s: (tensors(s), dict(backend="torch")),
    "five axes": lambda s: ([x[None] for x in tensors(s)], {}),
    "float mask": lambda s: (tensors(s), dict(attn_mask=torch.randn(33, 40))),
    "output's scale": lambda s: (tensors(s), dict(out_dtype=torch.int8, out_scale=0.1)),
    "integers out of floats": lambda s: (tensors(s), dict(out_dtype=torch.int8, out_scale="bound")),
    "softmax scale in a tensor": lambda s: (tensors(s), dict(scale=torch.tensor(0.2))),
    "smoothed": lambda s: (tensors(s), dict(recipe=Recipe(smooth_k=True))),
    "rotated": lambda s: (tensors(s), dict(recipe=Recipe(rotate=True))),
    "divided": lambda s: (tensors(s), dict(recipe=Recipe(rule="divide"))),
    "per token": lambda s: (tensors(s), dict(recipe=Recipe(q="token"))),
    "strided channels": lambda s: ([x.mT.contiguous().mT for x in tensors(s)], {}),
    "float64 scale": lambda s: (tensors(s), dict(recipe=Recipe(q_scale=torch.tensor(0.1, dtype=torch.float64)))),
    "four bits to integers": lambda s: (codes(s, bits=4), dict(out_scale="bound")),
    "packed": lambda s: (
        [x[:1] for x in tensors(s)],
        dict(cu_seqlens_q=torch.tensor([0, 33]).int(), cu_seqlens_k=torch.tensor([0, 40]).int()),
    ),
    "float q per token": lambda s: (float_q(s), dict(recipe=Recipe(q="token"))),
    "float q, divided": lambda s: (float_q(s), dict(recipe=Recipe(rule="divide"))),
    "float q, qflash": lambda s: (float_q(s), dict(method="qflash")),
    "float q, four bits to integers": lambda s: (float_q(s, bits=4), dict(out_dtype=torch.int16)),
    "a window with None": lambda s: (tensors(s), dict(window_size=(None, 4))),
    "a window as a list": lambda s: (tensors(s), dict(window_size=[3, 4])),
    "a flag as a number": lambda s: (tensors(s), dict(is_causal=1)),
}


def values(result):
    out, lse = result if isinstance(result, tuple) else (result, None)
    kept = [out.data, out.scale, out.granularity, out.bits] if isinstance(out, QTensor) else [out]
    return [*kept, lse]


def assert_same(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x, y) and x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        else:
            assert x == y


def assert_same_bits(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def generally(qkv, **options):
    """The call by the general way."""
    out, lse = op.attention(call.normalize(call.complete(tuple(qkv), options)))
    return out if lse is None else (out, lse)


@pytest.mark.parametrize("kind", SERVED)
def test_served(kind, general):
    for seed in range(2):
        qkv, options = SERVED[kind](seed)
        result = intflash.attention(*qkv, **options)
        assert not general
        assert_same(result, generally(qkv, **options))
        reference = generally(qkv, **options | dict(backend="reference"))
        assert_same_bits(result, reference)
        general.clear()


@pytest.mark.parametrize("kind", DECLINED)
def test_declined(kind, general):
    qkv, options = DECLINED[kind](0)
    result = intflash.attention(*qkv, **options)
    assert len(general) == 1
    reference = intflash.attention(*qkv, **options | dict(backend="reference"))
    assert_same_bits(result, reference)


def test_sdpa_over_codes(general):
    q, k, v = float_q(0, "head", "head")
    expected = intflash.attention(q, k, v)
    assert torch.equal(intflash.sdpa(q, k, v), expected) and expected.dtype == q.dtype and not general


def test_sdpa(general):
    q, k, v = tensors(0, heads=(4, 2))
    assert torch.equal(intflash.sdpa(q, k, v, enable_gqa=True), intflash.attention(q, k, v, enable_gqa=True))
    assert torch.equal(
        intflash.sdpa(q, q, q, attn_mask=mask(0, 33, 33)), intflash.attention(q, q, q, attn_mask=mask(0, 33, 33))
    )
    assert not general
    assert torch.equal(intflash.sdpa(q, q[:1], q[:1]), intflash.attention(q, *(q[:1].expand_as(q),) * 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert intflash.sdpa(q, q, q).dtype == torch.bfloat16
        general.clear()
        assert torch.equal(intflash.attention(q, q, q), generally([q, q, q]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_are_looked_at(bad):
    q, k, v = tensors(0)
    with pytest.raises(InputError, match="k must be finite"):
        intflash.attention(q, k.index_fill(2, torch.tensor([3]), bad), v)
    k = k.index_fill(2, torch.tensor([3]), bad)
    unlooked = dict(check_finite=False)
    assert torch.equal(intflash.attention(q, k, v, **unlooked), generally([q, k, v], **unlooked, backend="reference"))


def test_scales_are_looked_at():
    q, k, v = codes(0)
    k.scale.zero_()
    with pytest.raises(InputError, match="k's scale must be finite and > 0"):
        intflash.attention(q, k, v)
    options = dict(check_finite=False, out_scale="bound")
    assert_same(intflash.attention(q, k, v, **options), generally([q, k, v], **options))
    scale = torch.tensor([0.1])
    recipe = Recipe(q_scale=scale)
    intflash.attention(*tensors(0), recipe=recipe)
    for wrong in (-1.0, math.nan, math.inf, 1e-39):
        scale.fill_(wrong)
        with pytest.raises(InputError, match="q's scale must be finite and > 0"):
            intflash.attention(*tensors(0), recipe=recipe)


def test_saturated_biases_are_looked_at():
    bias = torch.zeros(1, 1, 33, 40, dtype=torch.int32)
    bias[..., 5] = -(2**31)  # absent
    qkv = tensors(0)
    assert torch.equal(intflash.attention(*qkv, bias=bias), generally(qkv, bias=bias, backend="reference"))
    for limit in (2**31 - 1, 1 - 2**31):
        bias[0, 0, 3, 7] = limit
        with pytest.raises(InputError, match="saturated"):
            intflash.attention(*qkv, bias=bias)
        intflash.attention(*qkv, bias=bias, check_finite=False)


def test_the_arguments_are_those_of_attention():
    assert cpu._native.ARGUMENTS == call.NAMES
    assert cpu._native.FLAT == op.FLAT


def test_what_it_reads_of_recipes_and_codes():
    """A new field needs a place in csrc/host/attend.cpp, or what it says would be ignored."""
    assert [f.name for f in fields(Recipe)] == [
        "q", "k", "v", "bits", "block_size", "q_scale", "k_scale", "v_scale", "smooth_k", "rotate", "rule"
    ]  # fmt: skip
    assert [f.name for f in fields(QTensor)] == ["data", "scale", "granularity", "block_size", "bits"]


def test_it_serves_for_the_first_choice():
    assert AUTOMATIC["cpu"][0] == "cpu"


class Own(Tensor):
    pass


class Watching(Tensor):
    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def square(seed=0):
    return torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(seed))


def test_subclasses_are_left_to_torch(general):
    x = square()
    expected = intflash.attention(x, x, x)
    for other in (x.as_subclass(Own), x.as_subclass(Watching)):
        general.clear()
        for arguments in ((other, x, x), (x, other, x), (x, x, other)):
            assert torch.equal(intflash.attention(*arguments).as_subclass(Tensor), expected)
        assert len(general) == 3
    general.clear()
    keep = torch.ones(20, 20, dtype=torch.bool)
    intflash.attention(x, x, x, keep.as_subclass(Own))
    intflash.attention(x, x, x, recipe=Recipe(q_scale=torch.tensor(0.1).as_subclass(Own)))
    assert len(general) == 2


def test_parameters_are_tensors(general):
    x = torch.nn.Parameter(square())
    with torch.no_grad():
        assert torch.equal(intflash.attention(x, x, x), intflash.attention(x.data, x.data, x.data))
    assert not general


def test_gradients_are_refused():
    x, y = square(), square().requires_grad_()
    for arguments in ((y, x, x), (x, y, x), (x, x, y)):
        with pytest.raises(RuntimeError, match="no gradients"):
            intflash.attention(*arguments).sum().backward()
    scale = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradients"):
        intflash.attention(x, x, x, recipe=Recipe(q_scale=scale)).sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        intflash.attention(torch.autograd.forward_ad.make_dual(x, x), x, x)
    with torch.no_grad():
        assert not intflash.attention(y, y, y).requires_grad


def test_inference_mode_gives_its_tensors():
    with torch.inference_mode():
        x = square()
        assert intflash.attention(x, x, x).is_inference()
    assert not intflash.attention(square(), square(), square()).is_inference()


def test_modes_see_the_call(general):
    x = square()
    with Seen() as mode:
        intflash.attention(x, x, x)
    assert "intflash.attention.default" in mode.ops
    with Functions():
        intflash.attention(x, x, x)
    with torch.device("meta"):  # another default device
        assert intflash.attention(x, x, x).device == x.device
    assert len(general) == 3


def test_transforms_see_the_call():
    x = torch.stack([square(0)[0], square(1)[0]])
    expected = torch.stack([intflash.attention(*(y[None],) * 3)[0] for y in x])
    assert torch.equal(torch.func.vmap(lambda y: intflash.attention(y, y, y))(x), expected)
    traced = torch.jit.trace(lambda y: intflash.attention(y, y, y), (x,), check_trace=False)
    assert torch.equal(traced(x), intflash.attention(x, x, x))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda y: intflash.attention(y, y, y))(x)
    assert "intflash.attention" in graph.code and torch.equal(graph(x), intflash.attention(x, x, x))
    assert "intflash.attention" in torch.export.export(Attends(), (x,)).graph_module.code


class Attends(torch.nn.Module):
    def forward(self, x):
        return intflash.attention(x, x, x)


def test_tensors_that_are_not_their_memory(general):
    x = square()
    expected = intflash.attention(-x, x, x)
    assert torch.equal(intflash.attention(torch._neg_view(x), x, x), expected)
    imaginary = torch.complex(x, x).conj().imag  # negated, lazily
    assert torch.equal(intflash.attention(imaginary, x, x), expected)
    assert len(general) == 2
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert intflash.attention(fake, fake, fake).shape == x.shape
    assert intflash.attention(*(x.to("meta"),) * 3).is_meta
    for other in (x.to_sparse(), torch.nested.nested_tensor([x[0]])):
        with pytest.raises(InputError, match="dense"):
            intflash.attention(other, x, x)
    with pytest.raises(ValueError, match="no memory of its own"):
        intflash.attention(torch._to_functional_tensor(x), x, x)


def test_freed_memory_is_not_read():
    x = square()
    empty = x.clone()
    empty.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory of its own"):
        intflash.attention(empty, x, x)


def test_results_are_memory_of_their_own():
    x = square()
    before = x.clone()
    first = intflash.attention(x, x, x)
    kept = first.clone()
    second = intflash.attention(x, x, x)
    second.zero_()
    assert torch.equal(first, kept) and torch.equal(x, before)
    assert first.untyped_storage().resizable() and first._base is None
    assert torch.equal(intflash.attention(x.expand(2, 2, 20, 16), *(x.expand(2, 2, 20, 16),) * 2)[1], first[0])


def test_calls_from_several_threads():
    qkv = [tensors(seed) for seed in range(4)]
    expected = [intflash.attention(*x) for x in qkv]
    wrong = []

    def work(i):
        for _ in range(50):
            if not torch.equal(intflash.attention(*qkv[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_calls():
    code = """
import os, torch, intflash
q = torch.randn(4, 8, 100, 32)
a = intflash.attention(q, q, q)
pid = os.fork()
if pid == 0:  # without torch's own threads, which do not survive a fork
    os._exit(0 if intflash.attention(q, q, q).numpy().tobytes() == a.numpy().tobytes() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_call_that_is_wrong_stays_so():
    q, k, v = tensors(0, heads=(4, 2))
    for _ in range(2):
        with pytest.raises(InputError, match="enable_gqa"):
            intflash.attention(q, k, v)
        intflash.attention(q, k, v, enable_gqa=True)
        with pytest.raises(InputError, match="unknown method"):
            intflash.attention(q, k, v, enable_gqa=True, method="none")
        with pytest.raises(InputError, match="one device|must be on"):
            intflash.attention(q, k.to("meta"), v, enable_gqa=True)


WRONG = {
    "keys": lambda: (tensors(0)[0], tensors(0)[1], tensors(0)[2][:, :, :9]),
    "head_dim": lambda: (tensors(0)[0][..., :8], *tensors(0)[1:]),
    "batch": lambda: (tensors(0)[0][:1], *tensors(0)[1:]),
    "dtype": lambda: (tensors(0)[0].half(), *tensors(0)[1:]),
    "axes": lambda: (tensors(0)[0][0], *tensors(0)[1:]),
    "empty": lambda: (tensors(0)[0][:, :, :0], *tensors(0)[1:]),
    "kinds": lambda: (codes(0)[0], *tensors(0)[1:]),
    "int16 codes": lambda: (QTensor(torch.ones(2, 4, 33, 16).short(), 1.0, bits=16), *codes(0)[1:]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_inputs_are_declined(kind):
    arguments = call.complete(WRONG[kind](), {})
    assert cpu.attend(*(arguments[name] for name in call.NAMES)) is None
    with pytest.raises(InputError):
        intflash.attention(*WRONG[kind]())


@pytest.mark.parametrize(
    "options",
    [
        dict(scale=0.0), dict(scale=-1.0), dict(scale=math.nan), dict(scale=math.inf), dict(scale=10**400),
        dict(scale="1"), dict(scale=True), dict(method=3), dict(backend=3), dict(causal_align="left"),
        dict(causal_align=None), dict(recipe=3), dict(out_dtype="float32"), dict(out_dtype=torch.float64),
        dict(attn_mask=torch.ones(3, 33, 40, dtype=torch.bool)), dict(attn_mask=torch.ones(33, 39, dtype=torch.bool)),
        dict(attn_mask=[1]), dict(bias=torch.zeros(33, 40)), dict(bias=torch.zeros(33, 40).long()),
        dict(enable_gqa=None), dict(return_lse=None), dict(check_finite=0), dict(attn_mask=torch.ones(0, 40).bool()),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_only_python_judges(options):
    arguments = call.complete(tuple(tensors(0)), options)
    assert cpu.attend(*(arguments[name] for name in call.NAMES)) is None


def test_without_torch_s_functions_everything_is_declined(general):
    x = square()
    expected = intflash.attention(x, x, x)
    cpu.use_native(cpu._native, find_torch=False)
    try:
        assert torch.equal(intflash.attention(x, x, x), expected)
        assert len(general) == 1
    finally:
        cpu.use_native(cpu._native)
    intflash.attention(x, x, x)
    assert len(general) == 1
