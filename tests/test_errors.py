"""A clear error for every wrong argument of the public functions, before any work."""

import importlib.util

import pytest
import torch

import intflash
from intflash import InputError, QTensor, Recipe
from intflash.backends import triton as triton_backend
from small_call import K, Q, V, attend, codes

NAN = Q.clone()
NAN[0, 0, 0, 0] = float("nan")

BAD = {
    "unknown method": (dict(method="softmax"), "unknown method 'softmax'; there are: .*intflash"),
    "unknown backend": (dict(backend="tpu"), "unknown backend 'tpu'; there are: .*reference"),
    "renamed backend": (dict(backend="hopper"), "'hopper' is named 'cuda': pass backend=\"cuda\""),
    "codes of q alone": (
        dict(q=intflash.quantize(Q)),
        "a float tensor q beside QTensors k and v, got QTensor, Tensor, T",
    ),
    "codes of k alone": (dict(k=intflash.quantize(K)), "beside QTensors k and v, got Tensor, QTensor, Tensor"),
    "codes of v alone": (dict(v=intflash.quantize(V)), "beside QTensors k and v, got Tensor, Tensor, QTensor"),
    "codes of q and k": (dict(q=intflash.quantize(Q), k=intflash.quantize(K)), "got QTensor, QTensor, Tensor"),
    "bare codes of q": (
        codes(q=Q.to(torch.int8)),
        "q beside codes of k and v must have a dtype of .*QTensor.codes, sc",
    ),
    "wide q beside codes": (codes(q=Q.double()), "q beside codes of k and v must have a dtype of .*got .torch.float64"),
    "q of three axes beside codes": (codes(q=Q[0]), "same number of axes"),
    "k_scale of codes": (codes(q=Q, recipe=Recipe(k_scale=0.1)), "k_scale must be None, k has its own scale; got 0.1"),
    "v_scale of codes": (codes(q=Q, recipe=Recipe(v_scale=torch.ones(4))), r"got a tensor of shape \[4\]"),
    "granularity of codes": (codes(q=Q, recipe=Recipe(k="token")), "k must be left out or be 'tensor', .*got 'token'"),
    "smoothed codes": (codes(q=Q, recipe=Recipe(smooth_k=True)), "smooth_k must be False, it changes k before"),
    "rotated codes": (codes(q=Q, recipe=Recipe(rotate=True)), "rotate must be False"),
    "q granularity beside codes": (codes(q=Q, recipe=Recipe(q="channel")), "takes q with granularity"),
    "nan beside codes": (codes(q=NAN), "q must be finite, got 1 non-finite of 2560"),
    "scale of codes beside q": (
        codes(q=Q, v=QTensor(torch.ones(2, 4, 20, 16, dtype=torch.int8), -1.0)),
        "v's scale must be finite",
    ),
    "mixed dtypes": (dict(k=K.half()), "share one dtype.*float16"),
    "float64": (dict(q=Q.double(), k=K.double(), v=V.double()), "share one dtype"),
    "integers": (dict(q=Q.int(), k=K.int(), v=V.int()), "share one dtype"),
    "int16 codes": (codes(q=QTensor(torch.ones(2, 4, 20, 16, dtype=torch.int16), 1.0, bits=16)), "must be int8"),
    "other device": (dict(k=K.to("meta")), "on one device, got .*meta"),
    "one axis": (dict(q=Q[0, 0, 0], k=K[0, 0, 0], v=V[0, 0, 0]), "at least 2"),
    "other axes": (dict(k=K[0]), "same number of axes"),
    "empty keys": (dict(k=K[:, :, :0], v=V[:, :, :0]), r"must not be empty; got .*k \[2, 4, 0, 16\]"),
    "empty head_dim": (dict(q=Q[..., :0], k=K[..., :0]), "must not be empty"),
    "head_dim": (dict(q=Q[..., :8]), r"same head_dim; got q \[2, 4, 20, 8\], k \[2, 4, 20, 16\]"),
    "keys": (dict(v=V[:, :, :9]), "same number of keys"),
    "batch": (dict(q=Q[:1]), "same batch"),
    "heads": (dict(k=K[:, :2], v=V[:, :2]), "enable_gqa=True"),
    "group": (dict(k=K[:, :3], v=V[:, :3], enable_gqa=True), "multiple of key heads"),
    "v heads": (dict(v=V[:, :2], enable_gqa=True), "k and v the same heads"),
    "zero scale": (dict(scale=0.0), "finite and > 0, got 0.0"),
    "negative scale": (dict(scale=-1.0), "finite and > 0, got -1.0"),
    "nan scale": (dict(scale=float("nan")), "finite and > 0, got nan"),
    "infinite scale": (dict(scale=float("inf")), "finite and > 0, got inf"),
    "nan input": (dict(q=NAN), "q must be finite, got 1 non-finite of 2560"),
    "inf input": (dict(v=V / 0), "v must be finite"),
    "scale of codes": (codes(k=QTensor(torch.ones(2, 4, 20, 16, dtype=torch.int8), -1.0)), "k's scale must be finite"),
    "zero scale of codes": (codes(k=QTensor(torch.ones(2, 4, 20, 16, dtype=torch.int8), 0.0)), "k's scale must be"),
    "k granularity": (dict(recipe=Recipe(k="token")), r"takes k with granularity .*got 'token'"),
    "no quantization": (dict(recipe=Recipe(q="none")), "takes q with granularity"),
    "mask shape": (dict(attn_mask=torch.ones(3, 1, 20, 20, dtype=torch.bool)), r"broadcast to \[2, 4, 20, 20\]"),
    "mask keys": (dict(attn_mask=torch.ones(20, 19, dtype=torch.bool)), "attn_mask must broadcast"),
    "mask axes": (dict(attn_mask=torch.ones(1, 1, 1, 20, 20, dtype=torch.bool)), "attn_mask must broadcast"),
    "mask dtype": (dict(attn_mask=torch.ones(20, 20, dtype=torch.int8)), "bool or floating point, got torch.int8"),
    "bias as mask": (dict(attn_mask=torch.ones(20, 20, dtype=torch.int32)), "bool or floating point, got torch.int32"),
    "bias dtype": (dict(bias=torch.ones(20, 20, dtype=torch.int64)), "or int32 from quantize_bias, got torch.int64"),
    "list": (dict(q=[1.0]), "all float tensors, all QTensors, or .*, got list, Tensor, Tensor"),
    "list of methods": (dict(method=["intflash"]), "unknown method"),
    "list as mask": (dict(attn_mask=[True]), "attn_mask must be a tensor, got list"),
    "empty mask": (dict(attn_mask=torch.ones(0, 1, 20, 20) > 0), "attn_mask must broadcast"),
    "mask elsewhere": (dict(attn_mask=torch.ones(20, 20, device="meta") > 0), "device of q, cpu, got meta"),
    "bias elsewhere": (dict(bias=torch.ones(20, 20, device="meta")), "bias must be on the device of q"),
    "dict as recipe": (dict(recipe={"q": "head"}), "recipe must be a Recipe, got dict"),
    "word as scale": (dict(scale="a"), "finite and > 0, got 'a'"),
    "negative recipe": (dict(recipe=Recipe(q_scale=torch.tensor(-1.0))), "q's scale must be finite and > 0"),
    "nan in recipe": (dict(recipe=Recipe(v="head", v_scale=V.mean((0, 2, 3)) * float("nan"))), "v's scale must be"),
    "inf in recipe": (dict(recipe=Recipe(v="head", v_scale=torch.ones(4) / torch.arange(4))), "v's scale must be"),
    "mask nan": (dict(attn_mask=torch.full((20, 20), float("nan"))), "must not hold NaN"),
    "mask inf": (dict(attn_mask=torch.full((20, 20), float("inf"))), "must not hold NaN or .inf"),
    "two biases": (dict(attn_mask=torch.zeros(20, 20), bias=torch.zeros(20, 20)), "attn_mask must be bool"),
    "bias shape": (dict(bias=torch.zeros(7, 20, 20)), "bias must broadcast"),
    "alignment": (dict(is_causal=True, causal_align="left"), "causal_align must be one of"),
    "window of one number": (dict(window_size=4), r"window_size must be \(left, right\), two ints or None, got 4"),
    "window of three": (dict(window_size=(1, 2, 3)), "window_size must be"),
    "window of floats": (dict(window_size=(1.0, 0)), "window_size must be"),
    "window below -1": (dict(window_size=(-2, 0)), "or -1 or None for no bound, got .-2, 0."),
    "out dtype": (dict(out_dtype=torch.float64), "not out_dtype=torch.float64"),
    "out scale of floats": (dict(out_scale=0.1), "out_scale goes with an int8 or int16"),
    "no out scale": (dict(out_dtype=torch.int8), "int8 output.* needs out_scale: a calibrated scale"),
    "no out scale of codes": (codes(), "int8 output, which is the default for QTensors, needs out_scale"),
    "bound of floats": (dict(out_scale="bound"), "out_scale goes with an int8 or int16"),
    "zero out scale": (dict(out_dtype=torch.int8, out_scale=0.0), "out_scale must be finite and > 0"),
    "negative out scale": (dict(out_dtype=torch.int8, out_scale=-torch.ones(1)), "out_scale must be finite and > 0"),
    "infinite out scale": (dict(out_dtype=torch.int8, out_scale=torch.ones(1) / 0), "must be finite and > 0"),
    "out scale heads": (dict(out_dtype=torch.int8, out_scale=torch.ones(1, 3, 1, 1)), r"broadcast to \[2, 4, 1, 16\]"),
    "out scale shape": (dict(out_dtype=torch.int8, out_scale=torch.ones(1, 4, 20, 1)), "out_scale must be one value"),
    "out scale word": (dict(out_dtype=torch.int8, out_scale="auto"), "'dynamic' or 'bound', got 'auto'"),
    "half a packing": (dict(cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32)), "go together"),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_with_its_value(arguments, message):
    with pytest.raises(InputError, match=message):
        attend(**arguments)


@pytest.mark.parametrize(
    "cu_q, message",
    [
        (torch.tensor([0, 20]), "int32 tensor"),
        (torch.tensor([0, 19], dtype=torch.int32), "rise from 0 to 20"),
        (torch.tensor([1, 20], dtype=torch.int32), "rise from 0 to 20"),
        (torch.tensor([0, 12, 9, 20], dtype=torch.int32), "rise from 0 to 20"),
        (torch.tensor([0, 9, 12, 20], dtype=torch.int32), "one length, got 4 and 2"),
    ],
)
def test_bad_packing_is_refused(cu_q, message):
    cu_k = torch.tensor([0, 20], dtype=torch.int32)
    for backend in (None, "reference"):
        with pytest.raises(InputError, match=message):
            attend(q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)
    with pytest.raises(InputError, match="batch of 1, got 2"):
        attend(cu_seqlens_q=cu_k, cu_seqlens_k=cu_k)
    with pytest.raises(InputError, match="cannot have 'block' scales"):
        attend(q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_q=cu_k, cu_seqlens_k=cu_k, recipe=Recipe(k="block"))
    with pytest.raises(InputError, match="cannot have 'block' scales"):
        packed = dict(q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_q=cu_k, cu_seqlens_k=cu_k, method="lite")
        attend(recipe=Recipe(q="token", k="token", v="block"), **packed)
    with pytest.raises(InputError, match="device of q"):
        attend(q=Q[:1], k=K[:1], v=V[:1], cu_seqlens_q=cu_k.to("meta"), cu_seqlens_k=cu_k)


@pytest.mark.parametrize("end", [40, 10_000_000, -5])
def test_offsets_past_the_end_never_reach_memory(end):
    cu, good = (torch.tensor([0, x], dtype=torch.int32) for x in (end, 20))
    for pair in ((cu, good), (good, cu)):
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), pair, strict=True))
        with pytest.raises(InputError, match="rise from 0 to 20"):
            attend(q=Q[:1], k=K[:1], v=V[:1], check_finite=False, backend=None, **packed)


def test_values_are_checked_on_request():
    assert not attend(q=NAN, check_finite=False).isnan().all()
    with pytest.raises(InputError, match="q must be finite"):
        attend(q=NAN, check_finite=True)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize(
    "recipe", [None, Recipe(q_scale=0.1, k_scale=0.1, v_scale=0.1), Recipe(q="head", k="head", v="head")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_at_any_position(value, recipe, layout):
    for name, dtype in zip("qkv", (torch.float32, torch.float16, torch.bfloat16), strict=True):
        for place in ((0, 0, 0, 0), (0, 3, 19, 15), (1, 1, 7, 5), (1, 3, 19, 15)):
            inputs = {n: x.to(dtype) for n, x in (("q", Q), ("k", K), ("v", V))}
            bad = (
                inputs[name].clone()
                if layout == "heads first"
                else inputs[name].transpose(1, 2).clone().transpose(1, 2)
            )
            bad[place] = value
            with pytest.raises(InputError, match=f"{name} must be finite, got 1 non-finite of 2560"):
                attend(**(inputs | {name: bad}), recipe=recipe)


def test_finite_inputs_whose_sum_overflows_are_accepted():
    big = torch.full((1, 1, 64, 64), 3e38)
    assert attend(q=big, k=big, v=big).isfinite().all()


@pytest.mark.parametrize(
    "version, refused", [("3.3.1", True), ("3.5.1", True), ("3.6.0", False), ("3.10.0+git1", False)]
)
def test_an_old_triton_is_refused_without_importing_its_kernels(monkeypatch, version, refused):
    """torch 2.7 brings Triton 3.3, in which the kernels cannot be imported."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    too_old = triton_backend._too_old.__wrapped__
    reason = f"it needs Triton 3.6 or newer, which torch 2.11 brings; Triton {version} is installed"
    assert too_old() == (reason if refused else None)
    monkeypatch.setattr(triton_backend, "_too_old", too_old)
    monkeypatch.setattr(triton_backend, "_module", lambda: pytest.fail("imported") if refused else Served)
    if importlib.util.find_spec("triton") is not None:
        assert triton_backend.BACKEND.unavailable() == (reason if refused else None)


class Served:
    unavailable = staticmethod(lambda: None)
