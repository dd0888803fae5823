"""The host side of the CUDA backend: which problems it serves, its parameters for the kernels, its cache on disk."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from intflash.backends import native
from intflash.backends.cuda import backend, long_rows, program, short_rows, sm80
from intflash.backends.cuda.parameters import _reciprocal
from intflash.backends.cuda.tensor_maps import key_map
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

HEADS = dict(q="head", k="head", v="head")


def problem(shift: int = 0, **changes) -> Problem:
    """Makes a float16 problem whose tensors begin `shift` elements after the start of their memory."""
    x = torch.zeros(25_600 + 64, dtype=torch.float16)[shift : shift + 25_600].view(2, 2, 100, 64)
    return Problem("intflash", x, x, x, 0.125, **(dict(recipe=Recipe(**HEADS), out_dtype=torch.float16) | changes))


def test_unaligned_tensors_are_unsupported():
    assert backend._alignment(problem()) is None
    assert "multiples of 16 bytes" in backend._alignment(problem(shift=4))


@pytest.mark.parametrize("change", [dict(bits=4), dict(rule="divide"), dict(k_scale=0.5), dict(q="tensor")], ids=str)
def test_head_amax_in_kernel_serves_one_recipe(change):
    assert backend.head_amax_in_kernel(problem()) and not backend.head_amax_in_kernel(problem(out_dtype=torch.int8))
    assert not backend.head_amax_in_kernel(problem(recipe=Recipe(**(HEADS | change))))


@pytest.mark.parametrize("by", [2, 3, 5, 6, 7, 12, 48, 100, 1000])
def test_reciprocals_divide_small_numbers(by):
    reciprocal = _reciprocal(by)
    assert all(x * reciprocal >> 32 == x // by for x in range(20_000))


def test_key_map_permutes_rows_as_score_row():
    """Row 16 g + 8 b + 2 q + i of a box is key 16 g + 4 q + 2 b + i of the head, whatever number of keys it has."""
    k = torch.empty(2, 3, 37, 64, dtype=torch.int8)
    m = key_map(k, 2, 64)
    assert m.sizes[-1] == 2 and m.box == (64, 2, 4, 2, 2)
    for batch, head, g, b, q, i in itertools.product(range(2), range(3), range(2), range(2), range(4), range(2)):
        at = (batch * m.batch + head * m.head + i, q, b, g)
        assert all(x < size for x, size in zip(at, m.sizes[1:], strict=True))
        address = sum(x * stride for x, stride in zip(at, m.strides, strict=True))
        assert address == k[batch, head, 16 * g + 4 * q + 2 * b + i].storage_offset()
    assert key_map(k[:, :, :15], 1, 64) is None


def test_remainder_rows_are_few():
    assert [short_rows.has_remainder_rows(n, 64) for n in (64, 65, 72, 73, 197)] == [False, True, True, False, True]


def test_tokens_beyond_2_gib_are_unsupported():
    one = torch.empty(1, 1, 100, 64, dtype=torch.float16, device="meta")
    far = one.as_strided((1, 1, 100, 64), (0, 0, 11_000_000, 1))
    assert short_rows.unsupported(replace(problem(), q=one, k=one, v=one)) is None
    assert "2 GiB" in short_rows.unsupported(replace(problem(), q=far, k=far, v=far))


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


def _on(monkeypatch, capability: tuple[int, int]) -> None:
    for module in (backend, program):
        monkeypatch.setattr(module, "on_hopper", lambda device: capability == (9, 0))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_which_kernel_serves(capability, monkeypatch):
    """On Hopper wgmma's kernels serve aligned rows with masks of keys, everywhere sm80's the rest but for windows."""
    _on(monkeypatch, capability)
    x = torch.zeros(2, 2, 100, 64, dtype=torch.float16)
    keep = torch.ones(1, 1, 1, 100, dtype=torch.bool)
    short, small, odd = problem(), problem(), problem()
    small.q = small.k = small.v = x[:, :, :49]
    odd.q = odd.k = odd.v = x[..., :60]
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 100], dtype=torch.int32))
    particular = [backend.particular_unsupported(p) is None for p in (short, small, odd)]
    assert particular == [capability == (9, 0), True, False]
    assert (backend.particular_unsupported(problem(keep=keep)) is None) == (capability == (9, 0))
    assert (backend.particular_unsupported(problem(keep=keep.expand(1, 2, 100, 100))) is None) == (capability == (9, 0))
    for more in (dict(keep=keep.repeat(1, 1, 100, 1)), ends):
        assert backend.particular_unsupported(problem(**more))


def test_launches_of_float_q_beside_codes(monkeypatch):
    """On Hopper too, few rows are left to few_rows.cu, which computes what it can from the scales."""
    _on(monkeypatch, (9, 0))
    launched: list[str] = []
    monkeypatch.setattr(program.CudaLaunch, "run", lambda self: launched.append(self.program.file))

    def files(nq: int, nk: int, d: int = 64, recipe: Recipe | None = None, **more) -> list[str]:
        launched.clear()
        k = QTensor(torch.zeros(2, 2, nk, d, dtype=torch.int8), torch.full((2, 2, 1, 1), 0.1), "head")
        options = dict(recipe=recipe or Recipe(), out_dtype=torch.float16) | more
        p = Problem("intflash", torch.zeros(2, 8, nq, d, dtype=torch.float16), k, k, 0.125, **options)
        backend.run(p)
        return launched.copy()

    few = ["sm80/few_rows.cu"] * 3
    static = Recipe(q_scale=0.1)
    assert files(1, 600) == few and files(1, 600, recipe=static) == few and files(4, 600, recipe=static) == few
    assert files(2, 600) == ["head_absmax.cu", *few] and files(1, 600, recipe=Recipe("tensor")) == files(2, 600)
    to_int8 = dict(out_dtype=torch.int8, recipe=static)
    assert files(1, 600, **to_int8) == ["constants.cu", *few]
    assert files(100, 600) == ["head_absmax.cu", "constants.cu", "sm90/long_rows.cu"]
    assert files(100, 600, d=72) == ["head_absmax.cu", "constants.cu", "sm80/attention.cu"]
    assert files(100, 100, recipe=static) == ["constants.cu", "sm90/long_rows.cu"]


def test_long_rows_refuse_sliding_windows(monkeypatch):
    """Also after the quantization pass, where only the kernels' own refusals are asked."""
    _on(monkeypatch, (9, 0))
    x = torch.zeros(2, 2, 300, 64, dtype=torch.float16)
    p = problem(causal=0, window_start=-99)
    p.q = p.k = p.v = x
    assert "window_start" in long_rows.unsupported(p)
    p.window_start = None
    assert long_rows.unsupported(p) is None


def test_only_what_16_byte_accesses_cannot_read_is_copied():
    fine = problem()
    assert sm80.aligned(fine) is fine
    shifted = problem(shift=4)
    copies = sm80.aligned(shifted)
    assert copies.q.shape == shifted.q.shape and copies.q.data_ptr() % 16 == 0 and torch.equal(copies.q, shifted.q)
    short = replace(fine, q=fine.q[..., :20], k=fine.k[..., :20])
    copies = sm80.aligned(short)
    assert copies.q.shape[3] == 20 and copies.q.stride(2) == 32 and copies.v is fine.v
