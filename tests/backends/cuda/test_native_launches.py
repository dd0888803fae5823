"""The native call path on a GPU, without one: what it would launch, against what the Python launchers prepare."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import intflash
from intflash import Recipe, call
from intflash.backends import cpu
from intflash.backends.cuda import backend, program, sm80
from intflash.backends.cuda.parameters import Params
from intflash.backends.cuda.quantization import AbsmaxParams, ConstantsParams, HeadAbsmaxParams, QuantizeParams
from intflash.backends.gpu.constants import score_unit
from intflash.numerics import exp

pytestmark = pytest.mark.skipif(not cpu.instruction_sets(), reason="the native module was not built")

STRUCTS = {
    "attention": Params, "absmax": AbsmaxParams, "head_absmax": HeadAbsmaxParams, "constants": ConstantsParams,
    "quantize_inputs": QuantizeParams,
}  # fmt: skip


def native(arguments):
    """The launches of the native path, or None where it declines, and the result before they run."""
    found = cpu._native.gpu_launches(132, tuple(arguments[name] for name in call.NAMES))
    return (None, None) if found is None else (found[0], found[1:])


def python(problem, monkeypatch_run):
    """The launches of the Python backend."""
    launches = []
    monkeypatch_run(lambda self: launches.append(self))
    return launches, backend.run(problem)


def fields(struct, prefix=""):
    """(name, value, whether it is a pointer) of a struct's numbers, nested ones too."""
    for name, kind in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            yield from fields(value, f"{prefix}{name}.")
        elif isinstance(value, ctypes.Array):
            for i, item in enumerate(value):
                if isinstance(item, ctypes.Structure):
                    yield from fields(item, f"{prefix}{name}[{i}].")
                else:
                    yield f"{prefix}{name}[{i}]", item, False
        else:
            yield prefix + name, value, kind is ctypes.c_void_p


class Numbered:
    """Pointers by the order in which they first come; those of `known` tensors by their names."""

    def __init__(self, known):
        self.names = {x.data_ptr(): name for name, x in known.items()}
        self.count = 0

    def __call__(self, pointer):
        if pointer is not None and pointer not in self.names:
            self.count += 1
            self.names[pointer] = f"buffer {self.count}"
        return None if pointer is None else self.names[pointer]


def described(launches, known):
    number = Numbered(known)
    found = []
    for x in launches:
        if isinstance(x, program.CudaLaunch):
            maps = None
            if x.tensor_maps is not None:
                maps = tuple((m.sizes, m.strides, m.box, m.swizzle, m.batch, m.head) for m in x.tensor_maps.args)
            what = x.program, tuple(x.grid), x.threads, x.shared_bytes, maps
            struct = x.parameters
        else:
            made = program.CudaProgram.named(x["file"], x["entry"], x["macros"])
            what = made, x["grid"], x["threads"], x["shared_bytes"], x.get("maps")
            struct = STRUCTS[x["entry"]].from_buffer_copy(x["parameters"])
            assert len(x["parameters"]) == ctypes.sizeof(struct)
        values = [(name, number(value) if pointer else value) for name, value, pointer in fields(struct)]
        found.append((*what, values))
    return found


def compare(arguments, known, patch):
    """Compares both ways. Returns the kernel's file, or why there is none."""
    arguments = call.complete((), arguments)
    noted, result = native(arguments)
    problem, _ = call.prepare_call(arguments, values=False)
    with pytest.MonkeyPatch.context() as cuda:
        cuda.setattr(type(problem), "device", property(lambda self: torch.device("cuda")))
        for module in (program, sm80):
            cuda.setattr(module, "capability", lambda device: (9, 0))
        cuda.setattr(sm80, "shared_memory", lambda device: 227 << 10)
        reason = backend.unsupported(problem)
    if reason is not None:
        assert noted is None, reason
        return reason
    if noted is None:
        return "declined"
    for name in ("attn_mask", "bias"):
        if arguments[name] is not None:
            known = known | {name: arguments[name]}
    known = known | {
        name: getattr(x, "data", x) for name, x in zip("qkv", (problem.q, problem.k, problem.v), strict=True)
    }
    launches, want = python(problem, lambda run: patch.setattr(program.CudaLaunch, "run", run))
    recipe = problem.recipe
    if arguments["recipe"] is not None and isinstance(recipe.q_scale, float) and problem.out_dtype.is_floating_point:
        if launches[0].program.file == "constants.cu":  # the host knows the score constants
            launches.pop(0)
            score = Params.from_buffer_copy(noted[-1]["parameters"]).score.ptr
            scales = torch.full((1, 1, 1, 1), recipe.q_scale), torch.full((1, 1, 1, 1), recipe.k_scale)
            c, k = exp.exponent_constants(*scales, problem.sm_scale, score_unit(problem.method))
            assert ctypes.c_int64.from_address(score).value == k.item() << 32 | c.item()
    out, out_scale, t_max, l_sum = result
    got, wanted = described(noted, known), described(launches, known)
    assert [x[0] for x in got] == [x[0] for x in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert a[1:-1] == b[1:-1]
        assert a[-1] == b[-1]
    q = arguments["q"]
    assert out.shape == (*q.shape[:-1], problem.v.shape[-1]) and out.dtype == want.out.dtype
    if out.ndim == 4:
        assert out.stride() == want.out.stride()
    assert (out_scale is None) == (want.out_scale is None) and (t_max is None) == (want.lse is None)
    if out_scale is not None:
        assert out_scale.shape == want.out_scale.shape
    return got[-1][0].file


LAYOUTS = ("contiguous", "tokens first", "qkv", "padded heads", "broadcast batch")


def laid_out(layout, b, h, n, d, dtype):
    """A tensor [b, h, n, d] of a layout."""
    if layout == "tokens first":
        return torch.empty(b, n, h, d).to(dtype).transpose(1, 2)
    if layout == "qkv":
        return torch.empty(b, n, 3, h, d).to(dtype)[:, :, 1].transpose(1, 2)
    if layout == "padded heads":
        return torch.empty(b, h, n + 3, d + 16).to(dtype)[:, :, :n, :d]
    if layout == "broadcast batch":
        return torch.empty(1, h, n, d).to(dtype).expand(b, h, n, d)
    if layout == "contiguous keys":
        return torch.empty(b, h, d, -(-n // 16) * 16).to(dtype)[..., :n].mT
    return torch.empty(b, h, n, d).to(dtype)


def scale_of(draw, kind, b, h, n):
    first = draw(st.sampled_from([1, b]))
    shape = {"tensor": (1, 1, 1, 1), "head": (first, h, 1, 1), "token": (first, h, n, 1)}[kind]
    return torch.ones(shape)


@st.composite
def calls(draw):
    method = draw(st.sampled_from(["intflash", "intflash_p8", "intflash_online"]))
    b, group, hk = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5, 20]))
    sizes = st.one_of(st.integers(1, 64), st.integers(65, 260), st.sampled_from([640, 1024, 2000]))
    nq, nk = draw(sizes), draw(sizes)
    d = draw(st.sampled_from([16, 32, 48, 64, 80, 96, 128]))
    h = hk * group
    arguments = dict(method=method, enable_gqa=True, is_causal=draw(st.sampled_from([False, False, True])))
    arguments["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    arguments["return_lse"] = draw(st.booleans())
    arguments["check_finite"] = False
    if draw(st.booleans()):
        arguments["scale"] = 0.1
    if nq <= 64 and nk <= 64 and method != "intflash_online" and draw(st.booleans()):
        batches = draw(st.sampled_from([1, b]))
        shape = batches, draw(st.sampled_from([1, h])), draw(st.sampled_from([1, nq])), draw(st.sampled_from([1, nk]))
        if draw(st.booleans()):
            arguments["attn_mask"] = torch.ones(shape, dtype=torch.bool)
        if draw(st.booleans()):
            arguments["bias"] = torch.zeros(shape, dtype=torch.int32)
    known = {}
    if draw(st.booleans()):
        layouts = [draw(st.sampled_from(LAYOUTS)) for _ in "qkv"]
        if draw(st.booleans()):
            layouts[2] = "contiguous keys"
        kinds = (
            draw(st.sampled_from(["tensor", "head", "token"])),
            *(draw(st.sampled_from(["tensor", "head"])) for _ in "kv"),
        )
        shapes = (b, h, nq, d), (b, hk, nk, d), (b, hk, nk, d)
        for name, layout, kind, shape in zip("qkv", layouts, kinds, shapes, strict=True):
            data = laid_out(layout, *shape, torch.int8)
            arguments[name] = intflash.QTensor(data, scale_of(draw, kind, *shape[:3]), kind)
            known[f"{name} scale"] = arguments[name].scale
        arguments["out_dtype"] = draw(
            st.sampled_from([None, torch.int16, torch.float16, torch.bfloat16, torch.float32])
        )
    else:
        dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
        arguments["q"] = laid_out(draw(st.sampled_from(LAYOUTS)), b, h, nq, d, dtype)
        for name in "kv":
            arguments[name] = laid_out(draw(st.sampled_from(LAYOUTS)), b, hk, nk, d, dtype)
        arguments["out_dtype"] = draw(st.sampled_from([None, torch.int8, torch.int16, torch.float32]))
        kind = draw(st.sampled_from(["none", "dynamic", "heads", "numbers", "tensors"]))
        if kind == "heads":
            arguments["recipe"] = Recipe("head", "head", "head")
        elif kind == "numbers":
            arguments["recipe"] = Recipe(q_scale=0.03, k_scale=0.02, v_scale=0.01)
        elif kind == "tensors":
            kinds = [draw(st.sampled_from(["tensor", "head"])) for _ in "qkv"]
            scales = [scale_of(draw, g, b, n, 1) for g, n in zip(kinds, (h, hk, hk), strict=True)]
            arguments["recipe"] = Recipe(*kinds, **{f"{x}_scale": s for x, s in zip("qkv", scales, strict=True)})
            known = {f"{x} scale": s for x, s in zip("qkv", scales, strict=True)}
        elif kind == "dynamic":
            arguments["recipe"] = Recipe(*(draw(st.sampled_from(["tensor", "head"])) for _ in "qkv"))
    floats = isinstance(arguments["q"], torch.Tensor)
    if arguments["out_dtype"] == torch.int8 or (arguments["out_dtype"] is None and not floats):
        arguments["out_scale"] = "bound"
    if arguments["out_dtype"] in (torch.int8, torch.int16) and draw(st.booleans()):
        arguments["out_scale"] = torch.ones(draw(st.sampled_from([1, b])), draw(st.sampled_from([1, h])), 1, 1)
        known["out scale"] = arguments["out_scale"]
    return arguments, known


seen = {}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_launches_are_those_of_python(case):
    with pytest.MonkeyPatch.context() as patch:
        file = compare(*case, patch)
    seen[file] = seen.get(file, 0) + 1


@pytest.mark.parametrize("shape", [(64, 20, 1000, 300, 64), (300, 16, 130, 1000, 64), (9, 100, 777, 300, 128)], ids=str)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online"])
def test_much_work_is_split_alike(shape, method):
    b, h, nq, nk, d = shape
    q, k, v = (laid_out("broadcast batch", b, h, n, d, torch.float32) for n in (nq, nk, nk))
    for causal in (False, True):
        arguments = dict(q=q, k=k, v=v, method=method, is_causal=causal, check_finite=False)
        with pytest.MonkeyPatch.context() as patch:
            assert compare(arguments, {}, patch) == "sm90/long_rows.cu"
