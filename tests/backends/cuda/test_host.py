"""The host side of the CUDA backend: which problems it serves, its parameters for the kernels, its cache on disk."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace

import cuda_checks as checks
import pytest
import torch

from intflash.backends import native
from intflash.backends.cuda import plans, program
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

HEADS = dict(q="head", k="head", v="head")


def problem(shift: int = 0, **changes) -> Problem:
    """Makes a float16 problem whose tensors begin `shift` elements after the start of their memory."""
    x = torch.zeros(25_600 + 64, dtype=torch.float16)[shift : shift + 25_600].view(2, 2, 100, 64)
    return Problem("intflash", x, x, x, 0.125, **(dict(recipe=Recipe(**HEADS), out_dtype=torch.float16) | changes))


def test_unaligned_tensors_are_for_the_kernels_of_any_rows():
    assert plans.find_kernel(problem()).kernel == "short_rows"
    assert plans.find_kernel(problem(shift=4)) == ("any_rows", None, ("q", "k", "v"))


AMPERE = (108, 8, 0, 163 << 10)


def codes_problem(v: torch.Tensor, method: str = "intflash", d: int = 64) -> Problem:
    """Makes a problem of int8 codes [B, H, N, D] of which V is given."""
    b, h, n, _ = v.shape
    q, k, v = (QTensor(x, torch.ones(1, 1, 1, 1), "tensor") for x in (*torch.zeros(2, b, h, n, d).to(torch.int8), v))
    return Problem(method, q, k, v, 0.125, out_dtype=torch.float16)


def kernel_of(p: Problem, gpu, monkeypatch) -> plans.Found:
    monkeypatch.setattr(plans, "gpu_of", lambda device: gpu)
    return plans.find_kernel(p)


@pytest.mark.parametrize("gpu, kernel", [(AMPERE, "any_rows"), (checks.HOPPER, "long_rows")], ids=("8.0", "9.0"))
@pytest.mark.parametrize("keys", (100, 257))
def test_whole_rows_leave_contiguous_keys_that_they_cannot_read(gpu, kernel, keys, monkeypatch):
    """Rows of V with contiguous keys that are no multiples of 16 bytes apart."""
    v = torch.zeros(2, 2, 64, keys, dtype=torch.int8).mT
    assert kernel_of(codes_problem(v, "intflash_bfp"), gpu, monkeypatch).kernel == kernel
    padded = torch.zeros(2, 2, 64, 288, dtype=torch.int8)[..., :keys].mT
    assert kernel_of(codes_problem(padded, "intflash_bfp"), gpu, monkeypatch).kernel in ("whole_rows", "short_rows")


@pytest.mark.parametrize("v", [
    torch.zeros(2, 2, 65, dtype=torch.int8)[..., 1:].unsqueeze(-1).transpose(-1, -2),  # one key, from an odd address
    torch.zeros(2, 2, 64, 79, dtype=torch.int8).as_strided((2, 2, 64, 64), (8192, 4096, 1, 1)),  # keys overlap channels
], ids=("one key", "overlapping"))  # fmt: skip
@pytest.mark.parametrize("gpu", (AMPERE, checks.HOPPER), ids=("8.0", "9.0"))
def test_stride_1_of_keys_says_nothing_of_channels_beside(v, gpu, monkeypatch):
    assert kernel_of(codes_problem(v), gpu, monkeypatch) == ("any_rows", None, ("v",))


def test_keys_without_a_value_are_found_in_one_channel(monkeypatch):
    v = torch.zeros(1, 1, 160, 1, dtype=torch.int8)
    launches = checks.planned(codes_problem(v, "intflash_bfp"), gpu=AMPERE).launches
    macros = {launch.program.file: checks.macros(launch) for launch in launches}
    assert macros["valueless.cu"]["KEY_MAJOR"] == macros["sm80/any_rows.cu"]["KEY_MAJOR"] == "1"


def test_v_may_be_broadcast_over_channels():
    v = torch.ones(1, 1, 1024, 1, dtype=torch.int8).expand(1, 1, 1024, 64)
    assert checks.macros(checks.attention_launch(codes_problem(v)))["TMA"] == "0"


def test_tokens_2_gib_apart_are_refused(monkeypatch):
    q = torch.empty(1, device="meta").as_strided((1, 1, 2, 64), (64, 64, 1 << 29, 1))
    found = kernel_of(
        Problem("intflash", q, q, q, 0.125, recipe=Recipe(), out_dtype=torch.float32), AMPERE, monkeypatch
    )
    assert found.kernel is None and "tokens of q must be less than 2^31 bytes apart" in found.refusal


@pytest.mark.parametrize("keys, mask", [(256, "keep"), (128, "bias")])
def test_masks_that_repeat_too_often_are_refused(keys, mask, monkeypatch):
    """The quotient that finds a mask's batch is exact while batches times masks are below 2^32."""
    q = torch.empty(131_074, 1, 4, 32, dtype=torch.float16, device="meta")
    k = torch.empty(131_074, 1, keys, 32, dtype=torch.float16, device="meta")
    dtype = torch.bool if mask == "keep" else torch.int32
    masks = {mask: torch.empty(65_537, 1, 1, keys, dtype=dtype, device="meta")}
    p = Problem("intflash", q, k, k, 0.125, recipe=Recipe(), out_dtype=torch.float16, **masks)
    found = kernel_of(p, checks.HOPPER, monkeypatch)
    assert found.kernel is None and "repeats over at most 2^32 in all" in found.refusal


def test_float_rows_need_contiguous_channels_of_v():
    def refusal(v: torch.Tensor) -> str | None:
        return native.module.float_refusal(q, q, v, checks.HOPPER, torch.float16)

    q = torch.zeros(1, 2, 2048, 64, dtype=torch.int8)
    assert refusal(q) is None and "v needs contiguous channels" in refusal(
        torch.zeros(1, 2, 64, 2048).to(torch.int8).mT
    )


@pytest.mark.parametrize("change", [dict(bits=4), dict(rule="divide"), dict(k_scale=0.5), dict(q="tensor")], ids=str)
def test_head_amax_in_kernel_serves_one_recipe(change):
    def in_kernel(**changes) -> bool:
        return checks.macros(checks.attention_launch(problem(**changes)))["HEAD_AMAX_IN_KERNEL"] == "1"

    assert in_kernel() and not in_kernel(out_dtype=torch.int8)
    assert not in_kernel(recipe=Recipe(**(HEADS | change)))


@pytest.mark.parametrize("by", [2, 3, 5, 6, 7, 12, 48, 100, 1000])
def test_reciprocals_divide_small_numbers(by):
    p = checks.empty_problem("intflash", 64, 32, batch=1, heads=by)
    numbers = struct.unpack_from("13I", checks.attention_launch(p).parameters, 12 * 40 + 3 * 8)
    reciprocal = numbers[10]  # of heads
    assert all(x * reciprocal >> 32 == x // by for x in range(20_000))


def test_without_the_native_module_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(native, "missing", "no compiler was there")
    assert program.unavailable() == "no compiler was there"


def test_programs_of_other_macros_or_architectures_are_cached_separately(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(program, "cache_folder", lambda name: tmp_path / name)
    compiled = []

    def compile_program(*what):
        compiled.append(what)
        return SimpleNamespace(cubin=repr(what).encode())

    monkeypatch.setattr(program, "compile_program", compile_program)
    programs = [program.CudaProgram.of("sm90/short_rows.cu", (), BITS=bits) for bits in (8, 16)]
    wanted = [(p, architecture) for p in programs for architecture in ("sm_80", "sm_90a")]
    for _ in range(2):
        assert [program.machine_code.__wrapped__(*what) for what in wanted] == [repr(what).encode() for what in wanted]
    assert compiled == wanted


def test_architectures_are_those_of_nvrtc():
    """sm_90a, not sm_90, because wgmma and TMA are for that architecture."""
    names = [program.architecture_of(x) for x in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert names == ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]


def test_refusals_say_why_no_kernel_serves():
    codes = checks.empty_problem("intflash_online", 100, 64)
    bias = torch.zeros(1, 1, 1, 100, dtype=torch.int32, device="meta")
    q = checks.empty_problem("intflash", 100, 272)
    tokens = QTensor(q.k.data, torch.ones(1, 2, 100, 1, device="meta"), "token")
    for p, reason in (
        (checks.empty_problem("intflash", 100, 64, heads=65_536), "at most 65535 heads, got 65536"),
        (replace(codes, bias=bias), "intflash_online has no bias"),
        (q, "takes at most 256 channels, got 272 and 272"),
        (replace(q, k=tokens), "one scale per tensor or head, got 'token' and 'tensor'"),
    ):
        kernel, refusal, copies = plans.find_kernel(p)
        assert kernel is None and reason in refusal and copies == ()
        with pytest.raises(ValueError, match="no CUDA kernel|one scale per"):
            plans.plan(p)


def test_every_part_of_a_plan_is_named():
    """No choice is ignored that has no name."""
    with pytest.raises(ValueError, match="no choice 'splits' can be fixed"):
        checks.planned(checks.empty_problem("intflash", 100, 64), splits=1)
    with pytest.raises(ValueError, match="tile has 6 numbers"):
        checks.planned(checks.empty_problem("intflash", 100, 64), tile=(1, 2))


def test_launches_of_float_q_beside_codes():
    """On Hopper too, few rows are left to few_rows.cu, which computes what it can from the scales."""

    def files(nq: int, nk: int, d: int = 64, recipe: Recipe | None = None, **more) -> list[str]:
        k = QTensor(torch.zeros(2, 2, nk, d, dtype=torch.int8), torch.full((2, 2, 1, 1), 0.1), "head")
        options = dict(recipe=recipe or Recipe(), out_dtype=torch.float16) | more
        p = Problem("intflash", torch.zeros(2, 8, nq, d, dtype=torch.float16), k, k, 0.125, **options)
        return [launch.program.file for launch in checks.planned(p).launches]

    few = ["sm80/few_rows.cu"] * 2
    static = Recipe(q_scale=0.1)
    assert files(1, 600) == few and files(1, 600, recipe=static) == few and files(4, 600, recipe=static) == few
    assert files(2, 600) == ["head_absmax.cu", *few] and files(1, 600, recipe=Recipe("tensor")) == files(2, 600)
    to_int8 = dict(out_dtype=torch.int8, recipe=static)
    assert files(1, 600, **to_int8) == ["constants.cu", *few]
    long = ["quantize_inputs.cu", "sm90/long_rows.cu"]  # the first copies V
    assert files(100, 600) == ["head_absmax.cu", *long]  # computes the score constants too
    assert files(100, 600, d=72) == ["head_absmax.cu", "constants.cu", "sm80/any_rows.cu"]
    assert files(100, 100, recipe=static) == long
