"""Which arguments make Triton compile a kernel again, and the form of tuples that it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import mixed_cases as mc  # noqa: E402

import intflash  # noqa: E402
from benchmarks import sass  # noqa: E402
from intflash.backends.gpu import float_softmax  # noqa: E402
from intflash.backends.gpu.scales import FloatInputs, Qkv  # noqa: E402
from intflash.backends.gpu.tensors import Statistics  # noqa: E402
from intflash.backends.triton import device_functions, mixed_precision, quantize, specializations, unfused  # noqa: E402
from intflash.backends.triton.launch import TritonLaunch  # noqa: E402
from intflash.methods import get_method  # noqa: E402
from intflash.problem import Problem  # noqa: E402

OURS = ("intflash", "intflash_p8", "intflash_online")


def float_launches(method: str, batch: int = 2, nk: int = 150, **options: Any) -> Iterator[TritonLaunch]:
    """Yields the launches of a method with a float softmax, or of an unfused method."""
    x = torch.zeros(batch, 2, 70, 64), torch.zeros(batch, 2, nk, 64)
    recipe = get_method(method).recipe
    problem = Problem(method, x[0], x[1], x[1], 0.125, recipe=recipe, out_dtype=torch.float16, **options)
    problem, out = problem.quantized(), torch.empty(batch, 2, 70, 64, dtype=torch.float16)
    if method in mc.UNFUSED:
        yield from unfused.unfused_launches(problem, out, [None] * 3)[0]
    else:
        yield mixed_precision.mixed_launch(problem, float_softmax.operands(problem), out, Statistics(None, None))


def masks(batches: int, nk: int, kind: str) -> dict[str, torch.Tensor]:
    """Returns a bool mask, and a bias of the kind "bias" or "bias_float", with `batches` batches each."""
    bias = torch.zeros(batches, 1, 1, nk, dtype=torch.int32 if kind == "bias" else torch.float32)
    return {"keep": torch.ones(batches, 1, 70, nk, dtype=torch.bool), kind: bias}


def nested(value: Any) -> Iterator[tuple]:
    """Yields every tuple in `value` that contains tuples."""
    if isinstance(value, tuple):
        if any(isinstance(x, tuple) for x in value):
            yield value
        for x in value:
            yield from nested(x)


def every_launch() -> Iterator[tuple[str, TritonLaunch]]:
    for name in specializations.names():
        yield name, specializations.launch(name)
    for method in (*mixed_precision.STEPS, *unfused.METHODS):
        for launch in float_launches(method, causal=0, **masks(2, 150, "bias_float")):
            yield method, launch
    x, one = torch.zeros(1, 2, 70, 64), torch.ones(1, 1, 1, 1)
    yield "codes of floats", quantize.quantize_launch(FloatInputs(Qkv(x, x, x), Qkv(one, one, one)))[0]


def test_tuples_of_views_end_in_a_constant():
    """In other tuples Triton loses strides of 1 (`device_functions.Masks`)."""
    for name, launch in every_launch():
        for parameter, value in launch.arguments.items():
            if not next(p for p in launch.kernel.params if p.name == parameter).is_constexpr:
                assert all(x[-1] is None for x in nested(value)), (name, parameter)


@pytest.mark.parametrize("method", ("int_flash_full", "lite", "fp16", "ibert"))
def test_bool_masks_with_causal_compile(method):
    for launch in float_launches(method, causal=80, keep=torch.ones(2, 1, 70, 150, dtype=torch.bool)):
        sass.compiled(launch, 90)


@pytest.mark.full
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("method", (*mixed_precision.STEPS, *unfused.METHODS))
def test_masks_with_causal_compile_for_every_method(method, bias):
    more = masks(3, 150, "bias_float")
    if not bias:
        del more["bias_float"]
    for launch in float_launches(method, batch=6, causal=80, **more):
        sass.compiled(launch, 90)


def test_batch_row_arithmetic():
    """Mirrors the arithmetic of `device_functions.batch_row`."""
    for period in (2, 3, 7, 16, 64, 1000, 65535, 76_799, (1 << 30) - 1):
        packed, inverse = device_functions.repeat_period(period, 5 * period)
        assert packed % 2 == inverse % 2 == 1 and packed >> 1 == period and inverse < 1 << 63
        for b in (0, 1, period - 1, period, period + 1, 3 * period - 1, 3 * period, (1 << 31) - 1, (1 << 31) - period):
            rest = b - (2 * b * inverse >> 64) * period
            assert (rest - period if rest >= period else rest) == b % period
    assert device_functions.repeat_period(1, 8) == device_functions.repeat_period(8, 8) == (None, None)


@pytest.mark.parametrize("method, nk", [*((m, n) for m in OURS for n in (150, 300)), ("qflash", 150)])
def test_one_kernel_for_all_batches_of_a_mask(method, nk):
    """For one class of tiles: the mask's row is that of the batch, the only one, or found by arguments of the
    launch.
    """

    def compilations(pairs: tuple[tuple[int, int], ...]) -> int:
        kind = "bias_float" if method in specializations.QFLASH_METHODS else "bias"
        launches = (
            specializations.attention_launch(method, 70, nk, 64, batch=batch, **masks(period, nk, kind))
            for batch, period in pairs
        )
        return len({sass.ast_source(x).hash() for x in launches})

    assert compilations(((2, 2), (3, 3), (7, 7), (16, 16), (20, 20))) == 1
    assert compilations(((2, 1), (7, 1), (16, 1))) == 1  # the same kernel if the mask's batches lie at multiples of 16
    assert compilations(((4, 2), (6, 3), (32, 16), (30, 5), (33, 11))) == 1


@pytest.mark.parametrize("method", ("lite", "ibert"))
def test_one_float_kernel_for_all_batches_of_a_mask(method):
    def compilations(pairs: tuple[tuple[int, int], ...]) -> int:
        launches = (next(float_launches(method, b, 150, **masks(p, 150, "bias_float"))) for b, p in pairs)
        return len({sass.ast_source(x).hash() for x in launches})

    assert compilations(((2, 2), (3, 3), (7, 7), (16, 16), (20, 20))) == 1
    assert compilations(((4, 2), (6, 3), (64, 16), (75, 5))) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("nk", (49, 300))
def test_batches_of_a_mask_compile_once(nk):
    """Counts the kernels that Triton has compiled."""
    from intflash.backends.triton.short_rows import _short_rows_kernel
    from intflash.backends.triton.tile_loop import _tile_loop_kernel

    kernel = _short_rows_kernel if nk <= 256 else _tile_loop_kernel

    def compiled() -> int:
        return len(kernel.device_caches[torch.cuda.current_device()][0])

    def call(batch: int, period: int) -> None:
        q, k = (torch.randn(batch, 2, n, 32, device="cuda", dtype=torch.float16) for n in (49, nk))
        keep = torch.rand(period, 1, 49, nk, device="cuda") < 0.9
        intflash.attention(q, k, k, attn_mask=keep, is_causal=True, causal_align="bottom_right", backend="triton")

    call(2, 2), call(4, 2), call(2, 1)
    before = compiled()
    for batch, period in ((3, 3), (5, 5), (16, 16), (16, 1), (6, 2), (6, 3), (64, 16), (35, 7)):
        call(batch, period)
    assert compiled() == before


def test_a_mask_of_another_shape_is_another_kernel():
    """The negative control: a hash that never changes would also count one kernel."""
    launch = specializations.attention_launch("intflash", 49, 49, 32)
    other = replace(launch, arguments=launch.arguments | dict(CAUSAL=True))
    assert sass.ast_source(launch).hash() != sass.ast_source(other).hash()
