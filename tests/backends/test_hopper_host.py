"""What the Hopper backend decides on the host: whom it serves, its numbers for the kernels, what it keeps on disk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from intflash.backends.hopper import backend, program, rows  # noqa: E402
from intflash.backends.hopper.parameters import _reciprocal  # noqa: E402
from intflash.backends.hopper.tensor_maps import key_map  # noqa: E402
from intflash.problem import Problem  # noqa: E402
from intflash.quant import Recipe  # noqa: E402

HEADS = dict(q="head", k="head", v="head")


def problem(shift: int = 0, **changes) -> Problem:
    """Of float16, `shift` elements from the start of their memory."""
    x = torch.zeros(25_600 + 64, dtype=torch.float16)[shift : shift + 25_600].view(2, 2, 100, 64)
    return Problem("intflash", x, x, x, 0.125, **(dict(recipe=Recipe(**HEADS), out_dtype=torch.float16) | changes))


def test_tensors_off_16_bytes_are_left_to_triton():
    assert backend._alignment(problem()) is None
    assert "multiples of 16 bytes" in backend._alignment(problem(shift=4))


@pytest.mark.parametrize("change", [dict(bits=4), dict(rule="divide"), dict(k_scale=0.5), dict(q="tensor")], ids=str)
def test_scales_are_found_in_the_kernel_for_one_recipe_only(change):
    assert backend.finds(problem()) and not backend.finds(problem(out_dtype=torch.int8))
    assert not backend.finds(problem(recipe=Recipe(**(HEADS | change))))


@pytest.mark.parametrize("by", [2, 3, 5, 6, 7, 12, 48, 100, 1000])
def test_reciprocals_divide_small_numbers(by):
    reciprocal = _reciprocal(by)
    assert all(x * reciprocal >> 32 == x // by for x in range(20_000))


def test_key_maps_need_whole_groups_of_keys():
    maps = [key_map(torch.zeros(1, 1, n, 64, dtype=torch.int8), 128, 64) for n in (256, 250)]
    assert maps[0] is not None and maps[1] is None


def test_a_tail_needs_rows():
    assert [rows.has_tail(n, 64) for n in (64, 65, 72, 73, 197)] == [False, True, True, False, True]


def test_values_lie_within_2_gib():
    one = torch.empty(1, 1, 100, 64, dtype=torch.float16, device="meta")
    far = one.as_strided((1, 1, 100, 64), (0, 0, 11_000_000, 1))
    assert rows.unsupported(replace(problem(), q=one, k=one, v=one)) is None
    assert "2 GiB" in rows.unsupported(replace(problem(), q=far, k=far, v=far))


def test_programs_with_other_macros_are_kept_apart(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(program, "cache_folder", lambda name: tmp_path / name)
    compiled = []

    def compile_program(p):
        compiled.append(p)
        return SimpleNamespace(cubin=repr(p.macros).encode())

    monkeypatch.setattr(program, "compile_program", compile_program)
    programs = [program.Program.of("rows.cu", (), BITS=bits) for bits in (8, 16)]
    for _ in range(2):
        assert [program.machine_code.__wrapped__(p) for p in programs] == [repr(p.macros).encode() for p in programs]
    assert compiled == programs
