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
