"""Plans of calls on a GPU, without one: what must hold for every launch, and that the direct way from the arguments of
`attention` plans what the general way does.
"""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import intflash
from intflash import Recipe, call
from intflash.backends import cpu
from intflash.backends.cuda import backend, plans
from intflash.backends.cuda.plans import Plan
from intflash.backends.cuda.program import CudaLaunch
from intflash.methods import resolve

pytestmark = pytest.mark.skipif(not cpu.instruction_sets(), reason="the native module was not built")
SHARED_BYTES = 227 << 10


def numbered(launches: tuple[CudaLaunch, ...]) -> list[tuple]:
    """Launches with their words of 8 bytes, addresses by the order in which they first come."""
    names: dict[int, str] = {}

    def word(x: int) -> int | str:
        is_address = 0x5000 <= x >> 32 < 0x8000  # of the memory of a process on Linux; no other number is
        return names.setdefault(x, f"address {len(names)}") if is_address else x

    found = []
    for x in launches:
        words = [word(w) for w in struct.unpack(f"<{len(x.parameters) // 8}Q", x.parameters)]
        maps = [(*m[:4], word(m.address)) for m in x.maps]
        found.append((x.program, x.grid, x.threads, x.shared_bytes, words, maps, x.after_maps))
    return found


def check(plan: Plan) -> None:
    """What every GPU and the driver need of launches."""
    end = 0
    for address, size in plan.workspace:
        assert address >= end and size > 0
        assert (address - plan.workspace[0][0]) % 256 == 0
        end = address + size
    for x in plan.launches:
        assert all(1 <= n < 1 << 31 for n in x.grid) and max(x.grid[1:]) <= 65535
        assert x.threads % 32 == 0 and 32 <= x.threads <= 1024
        assert x.shared_bytes <= SHARED_BYTES and len(x.parameters) % 8 == 0
        assert len({name for name, _ in x.program.macros}) == len(x.program.macros)
        for sizes, strides, box, swizzle, address in x.maps:  # the driver's rules for tensor maps
            assert address % 16 == 0 and all(s % 16 == 0 and 0 <= s < 1 << 40 for s in strides)
            assert all(0 < b <= 256 for b in box)
            assert all(0 < s < 1 << 32 for s in sizes) and box[0] <= swizzle and swizzle in (32, 64, 128)
        assert len(x.maps) in (0, 2) and bool(x.maps) == (dict(x.program.macros).get("TMA", "0") == "1")


def resolved(arguments: dict) -> dict:
    """All arguments of a call, with the method that "auto" is."""
    arguments = call.complete((), arguments)
    return arguments | dict(method=resolve(arguments["method"], arguments["k"].shape[-2]))


def compare(arguments: dict) -> str:
    """Compares both ways. Returns the kernel's file, or why there is none."""
    arguments = resolved(arguments)
    direct = cpu._native.gpu_launches(132, tuple(arguments[name] for name in call.NAMES))
    problem, _ = call.prepare_call(arguments, values=False)
    found = plans.find_kernel(problem)
    if found.kernel is None:
        assert direct is None, found.refusal
        return found.refusal
    plan = backend.planned(problem)
    check(plan)
    if direct is None:
        return "declined"
    notes, out, out_scale, t_max, l_sum = direct
    launches = tuple(plans.launch_of(note, problem.device, ()) for note in notes)
    assert numbered(launches) == numbered(plan.launches)
    q = arguments["q"]
    assert out.shape == (*q.shape[:-1], problem.v.shape[-1]) and out.dtype == plan.out.dtype
    if out.ndim == 4:
        assert out.stride() == plan.out.stride()
    assert (out_scale is None) == (plan.out_scale is None) and (t_max is None) == (plan.t_max is None)
    assert (l_sum is None) == (plan.l is None)
    if out_scale is not None:
        assert out_scale.shape == plan.out_scale.shape
    return launches[-1].program.file


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
    method = draw(st.sampled_from(["intflash", "intflash_p8", "intflash_online", "intflash_bfp"]))
    b, group, hk = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5, 20]))
    sizes = st.one_of(st.integers(1, 64), st.integers(65, 260), st.sampled_from([640, 1024, 2000]))
    nq, nk = draw(sizes), draw(sizes)
    d = draw(st.sampled_from([16, 32, 48, 64, 72, 80, 96, 100, 128, 192]))
    h = hk * group
    arguments = dict(method=method, enable_gqa=True, is_causal=draw(st.sampled_from([False, False, True])))
    arguments["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    arguments["return_lse"] = draw(st.booleans())
    arguments["check_finite"] = False
    if draw(st.booleans()):
        arguments["scale"] = 0.1
    if method != "intflash_online" and draw(st.booleans()):
        batches = draw(st.sampled_from([1, b]))
        shape = batches, draw(st.sampled_from([1, h])), draw(st.sampled_from([1, nq])), draw(st.sampled_from([1, nk]))
        if draw(st.booleans()):
            arguments["attn_mask"] = torch.ones(shape, dtype=torch.bool)
        if draw(st.booleans()):
            arguments["bias"] = torch.zeros(shape, dtype=torch.int32)
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
        arguments["out_dtype"] = draw(
            st.sampled_from([None, torch.int16, torch.float16, torch.bfloat16, torch.float32])
        )
        if draw(st.booleans()):  # float q beside codes of k and v
            dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
            arguments["q"] = laid_out(draw(st.sampled_from(LAYOUTS)), b, h, nq, d, dtype)
            kind, given = draw(st.sampled_from(["tensor", "head"])), draw(st.sampled_from(["none", "number", "tensor"]))
            q_scale = dict(none=None, number=0.03, tensor=scale_of(draw, kind, b, h, 1))[given]
            arguments["recipe"] = Recipe(kind, q_scale=q_scale)
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
        elif kind == "dynamic":
            arguments["recipe"] = Recipe(*(draw(st.sampled_from(["tensor", "head"])) for _ in "qkv"))
    floats = isinstance(arguments["q"], torch.Tensor)
    if arguments["out_dtype"] == torch.int8 or (arguments["out_dtype"] is None and not floats):
        arguments["out_scale"] = "bound"
    if arguments["out_dtype"] in (torch.int8, torch.int16) and draw(st.booleans()):
        arguments["out_scale"] = torch.ones(draw(st.sampled_from([1, b])), draw(st.sampled_from([1, h])), 1, 1)
    return arguments


seen = {}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_both_ways_plan_alike(arguments):
    file = compare(arguments)
    seen[file] = seen.get(file, 0) + 1


@pytest.mark.parametrize("shape", [(64, 20, 1000, 340, 64), (300, 16, 130, 1000, 64), (9, 100, 777, 300, 128)], ids=str)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online"])
def test_much_work_is_planned_alike(shape, method):
    b, h, nq, nk, d = shape
    q, k, v = (laid_out("broadcast batch", b, h, n, d, torch.float32) for n in (nq, nk, nk))
    for causal in (False, True):
        assert compare(dict(q=q, k=k, v=v, method=method, is_causal=causal, check_finite=False)) == "sm90/long_rows.cu"


@pytest.mark.parametrize("arguments, file", [
    (dict(n=197, bias=True), "sm90/short_rows.cu"), (dict(n=300, keep=True), "sm90/long_rows.cu"),
    (dict(n=300, d=72), "sm90/long_rows.cu"), (dict(n=700, d=160, nq=1), "sm80/few_rows.cu"),
    (dict(n=300, bias=True), "sm80/any_rows.cu"),
], ids=str)  # fmt: skip
def test_the_direct_way_serves(arguments, file):
    """A bias of short rows, masks of keys, head_dim that is padded, and the kernels for any rows."""
    n, d = arguments["n"], arguments.get("d", 64)
    q, k = torch.zeros(2, 4, arguments.get("nq", n), d).half(), torch.zeros(2, 4, n, d).half()
    more = dict(bias=torch.zeros(1, 4, n, n, dtype=torch.int32)) if "bias" in arguments else {}
    if "keep" in arguments:
        more["attn_mask"] = torch.ones(2, 1, 1, n, dtype=torch.bool)
    assert compare(dict(q=q, k=k, v=k, check_finite=False, **more)) == file


@pytest.mark.parametrize("nq, files", [
    (1, ["sm80/few_rows.cu"] * 3), (2, ["head_absmax.cu", *["sm80/few_rows.cu"] * 3]),
    (300, ["head_absmax.cu", "quantize_inputs.cu", "sm90/long_rows.cu"]),
], ids=str)  # fmt: skip
def test_the_direct_way_serves_float_q_beside_codes(nq, files):
    """A step of decoding over a cache of codes, whose scale the kernel finds, and more rows."""
    codes = intflash.QTensor(torch.zeros(2, 2, 600, 64, dtype=torch.int8), torch.ones(2, 2, 1, 1), "head")
    q = torch.zeros(2, 8, nq, 64).half()
    arguments = dict(q=q, k=codes, v=codes, enable_gqa=True, check_finite=False)
    assert compare(arguments) == files[-1]
    found = cpu._native.gpu_launches(132, tuple(resolved(arguments)[name] for name in call.NAMES))
    assert [note["file"] for note in found[0]] == files


def test_plans_of_meta_tensors_allocate_nothing():
    shape = (1000, 16, 4096, 128)  # 8 GB
    q = torch.empty(shape, dtype=torch.int8, device="meta")
    codes = intflash.QTensor(q, torch.ones(1, 1, 1, 1, device="meta"), "tensor")
    problem = intflash.problem.Problem("intflash", codes, codes, codes, 0.1, out_dtype=torch.int8)
    plan = backend.planned(problem)
    check(plan)
    assert plan.out is None and plan.launches[-1].program.file == "sm90/long_rows.cu"
