"""The kernels in the native shim: integer kernels have the bits of the reference, float kernels its values."""

import math

import numpy as np
import pytest
import torch

from intflash.backends.reference import BACKEND as REFERENCE
from intflash.backends.vortex import backend, launch
from intflash.call import prepare
from intflash.quant import QTensor, Recipe, quantize
from machines import vortex_shim

pytestmark = pytest.mark.usefixtures("host_compiler")

SIZES = [
    pytest.param(n, d, marks=() if (n, d) in ((16, 64), (64, 8), (197, 32)) else pytest.mark.full)
    for n in (16, 64, 197)
    for d in (8, 32, 64)
]
INTEGER = [(name, p_bits) for name in ("intflash_simt", "intflash_tensor") for p_bits in (16, 8)]
# float32: sums of up to 197 terms near 1; half: inputs and p rounded to 11 bits
FLOAT = [("attention_f32", 2e-6), ("flash_f32", 2e-6), ("flash_f32_split", 2e-6), ("flash_f16_tensor", 3e-3)]


def codes(n: int, d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (n, d), dtype=torch.int8, generator=generator)


def integer_case(name, p_bits, q, k, v, score_unit, out_bits=8, v_scales=None):
    """Runs a kernel and the reference on codes with `score_unit` octaves per score; (kernel, reference)."""
    scale = math.sqrt(score_unit / 1.4426950408889634)
    v_scale = torch.full((1, 1, 1, 1), 0.01) if v_scales is None else v_scales.view(1, 1, 1, -1)
    problem, *_ = prepare(
        QTensor(q[None, None], scale),
        QTensor(k[None, None], scale),
        QTensor(v[None, None], v_scale, "tensor" if v_scales is None else "channel"),
        scale=1.0,
        method="intflash" if p_bits == 16 else "intflash_p8",
        out_dtype={8: torch.int8, 16: torch.int16}[out_bits],
        out_scale=torch.full((1, 1, 1, 1), 0.006),
    )
    expected = REFERENCE.run(problem).out[0, 0].numpy()
    C, shift = backend.exponent_constants(problem.q.scale, problem.k.scale, 1.0)
    multiplier, exponent = backend.output_multiplier(v_scale, problem.out_scale)
    columns = np.zeros(v.shape[1], launch.MULTIPLIER)
    columns["multiplier"], columns["exponent"] = multiplier.flatten(), exponent.flatten()
    run = launch.integer_launch(
        name, q.numpy(), k.numpy(), v.numpy(),
        p_bits=p_bits, exponent=(int(C), int(shift)), multipliers=columns, out_bits=out_bits,
    )  # fmt: skip
    vortex_shim.run(run)
    return launch.integer_output(run, q.shape[0], v.shape[1])[0], expected


@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize(("name", "p_bits"), INTEGER)
def test_integer_kernels_have_the_bits_of_the_reference(name, p_bits, n, d):
    ours, expected = integer_case(name, p_bits, codes(n, d, 1), codes(n, d, 2), codes(n, d, 3), 4e-4)
    assert np.array_equal(ours, expected)
    assert np.unique(ours).size > 8  # the case says something


@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize(("name", "tolerance"), FLOAT)
def test_float_kernels_meet_float64(name, tolerance, n, d):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, n, d))
    run = launch.float_launch(name, q, k, v, 1 / math.sqrt(d))
    vortex_shim.run(run)
    s = q @ k.T / math.sqrt(d)
    p = np.exp(s - s.max(1, keepdims=True))
    assert np.abs(launch.float_output(run, n, d) - p @ v / p.sum(1, keepdims=True)).max() < tolerance


@pytest.mark.parametrize(("n_q", "n_k", "d", "d_v"), [(1, 1, 8, 8), (5, 33, 17, 9), (9, 300, 24, 40), (2, 31, 1, 1)])
@pytest.mark.parametrize(("name", "p_bits"), INTEGER)
def test_any_shape(name, p_bits, n_q, n_k, d, d_v):
    ours, expected = integer_case(name, p_bits, codes(n_q, d, 1), codes(n_k, d, 2), codes(n_k, d_v, 3), 1e-3)
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize(("name", "tolerance"), FLOAT)
def test_any_shape_float(name, tolerance):
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(5, 24)), rng.normal(size=(33, 24)), rng.normal(size=(33, 17))
    run = launch.float_launch(name, q, k, v, 0.2)
    vortex_shim.run(run)
    p = np.exp(q @ k.T * 0.2)
    assert np.abs(launch.float_output(run, 5, 17) - p @ v / p.sum(1, keepdims=True)).max() < tolerance


# 1e-14: C = 0, uniform attention; the rest walks k from 0 to its end, past every branch of depth_constants
@pytest.mark.parametrize(
    "score_unit", [1e-14, 1e-9, 1e-4, 1.9e-3, 0.25, 0.49, 0.6, 1.3, 3.0, 4.0, 7.9, 8.1, 15.9, 16, 40, 64]
)
@pytest.mark.parametrize(("name", "p_bits"), INTEGER)
def test_every_size_of_the_exponent_constant(name, p_bits, score_unit):
    generator = torch.Generator().manual_seed(5)
    q = torch.randint(-2, 3, (16, 8), dtype=torch.int8, generator=generator)
    k = torch.randint(-2, 3, (40, 8), dtype=torch.int8, generator=generator)
    q[:8] *= 63  # rows with large and rows with single-unit score differences
    ours, expected = integer_case(name, p_bits, q, k, codes(40, 8, 6), score_unit)
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize(("name", "p_bits"), INTEGER)
def test_extreme_codes_at_full_width(name, p_bits):
    q = torch.full((16, 64), 127, dtype=torch.int8)
    k = torch.full((30, 64), 127, dtype=torch.int8)
    k[::2] = -127  # scores of +-64 * 127^2, differences of 2^21
    v = torch.full((30, 64), -127, dtype=torch.int8)
    for score_unit in (1e-6, 2.0, 3.9):
        ours, expected = integer_case(name, p_bits, q, k, v, score_unit)
        assert np.array_equal(ours, expected)


def test_sums_past_one_flush_of_256_keys():
    v = torch.full((600, 8), 127, dtype=torch.int8)  # 65193 * 127 * 600 needs more than 32 bits
    for name in ("intflash_simt", "intflash_tensor"):
        ours, expected = integer_case(name, 16, codes(3, 8, 1), codes(600, 8, 2), v, 1e-14, out_bits=16)
        assert np.array_equal(ours, expected)


def test_output_scale_per_column_and_saturation():
    scales = torch.logspace(-4, 0.5, 24)
    for out_bits in (8, 16):
        ours, expected = integer_case(
            "intflash_simt", 16, codes(16, 24, 1), codes(40, 24, 2), codes(40, 24, 3), 1e-3, out_bits, scales
        )
        assert np.array_equal(ours, expected)
        assert ours.max() == (1 << (out_bits - 1)) - 1  # some columns saturate


@pytest.mark.parametrize("tensor_unit", [False, True])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
@pytest.mark.parametrize("out_dtype", [torch.int8, torch.int16, torch.float32, torch.float16])
def test_backend_in_the_shim_equals_the_reference(method, out_dtype, tensor_unit):
    q, k, v = torch.randn(2, 4, 20, 24), torch.randn(2, 2, 33, 24), torch.randn(2, 2, 33, 16)
    for recipe in (Recipe(), Recipe(q="head", k="head", v="channel")):
        problem, *_ = prepare(
            q, k, v, method=method, enable_gqa=True, recipe=recipe, out_dtype=out_dtype, return_lse=True,
            out_scale="bound" if out_dtype == torch.int8 else None,
        )  # fmt: skip
        assert backend.BACKEND.unsupported(problem) is None
        ours, expected = backend.run(problem, vortex_shim.run, tensor_unit=tensor_unit), REFERENCE.run(problem)
        assert torch.equal(ours.out, expected.out)
        assert torch.equal(ours.lse, expected.lse)
        assert (ours.out_scale is None) == (expected.out_scale is None)


def test_float_q_beside_codes_in_the_shim():
    q, k, v = torch.randn(2, 4, 20, 24), torch.randn(2, 2, 33, 24), torch.randn(2, 2, 33, 16)
    codes = quantize(k, "head"), quantize(v, "channel")
    problem, *_ = prepare(q, *codes, method="intflash", enable_gqa=True, return_lse=True)
    assert backend.BACKEND.unsupported(problem) is None
    ours, expected = backend.run(problem, vortex_shim.run, tensor_unit=False), REFERENCE.run(problem)
    assert torch.equal(ours.out, expected.out) and torch.equal(ours.lse, expected.lse)


def test_float_method_in_the_shim():
    problem, *_ = prepare(*(torch.randn(1, 2, 20, d) for d in (24, 24, 24)), method="fp32")
    difference = backend.run(problem, vortex_shim.run, tensor_unit=False).out - REFERENCE.run(problem).out
    assert difference.abs().max() < 2e-6


@pytest.mark.parametrize(("name", "p_bits"), INTEGER)
def test_the_most_keys_there_may_be(name, p_bits):
    """65,536 keys of the largest code: l and acc at their bounds."""
    ones = torch.ones((1, 8), dtype=torch.int8)
    v = torch.full((65_536, 8), 127, dtype=torch.int8)
    ours, expected = integer_case(name, p_bits, ones, ones.expand(65_536, 8).contiguous(), v, 1e-3, out_bits=16)
    assert np.array_equal(ours, expected)
