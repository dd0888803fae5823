"""The integer exponential's constants: their definition, their saturations, their accuracy."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from intflash.numerics import exp

LOG2_E = math.log2(math.e)  # not the library's own
SCALES = st.floats(min_value=2.0**-120, max_value=2.0**20, width=32)


def constant(q_scale: float, k_scale: float, sm_scale: float) -> tuple[int, int]:
    scales = (torch.tensor(s, dtype=torch.float32).reshape(1, 1, 1, 1) for s in (q_scale, k_scale))
    C, k = exp.exponent_constants(*scales, sm_scale)
    return int(C), int(k)


@given(SCALES, SCALES, st.floats(min_value=1e-6, max_value=16))
def test_constant_is_the_rounded_octaves_per_unit(q_scale, k_scale, sm_scale):
    C, k = constant(q_scale, k_scale, sm_scale)
    c = min(((q_scale * k_scale) * sm_scale) * LOG2_E, 64.0)
    assert k == next(n for n in range(9) if c / 2**n < 0.5)
    bits = 32 if c < 2**-14 else 24
    assert min(round(Fraction(c) * 2**bits) * 2 ** (32 - bits - k), 2**31 - 256) == C
    assert exp.scalar_exponent_constants(q_scale, k_scale, sm_scale) == (C, k)


@pytest.mark.parametrize("c", [2.0**-14, 1e-3, 0.4, 0.5, 7.0, 64.0])
def test_products_of_32_bits_hold_all_but_small_constants(c):
    C, k = constant(1.0, 1.0, c / LOG2_E)
    assert (C << k) % 256 == 0 and (C << k) >> 8 == round(min((c / LOG2_E) * LOG2_E, 64) * 2**24)


@pytest.mark.parametrize("c", [0.0, 0.25, math.nextafter(0.5, 0), 0.5, 1.0, 63.9, 64.0, 65.0, 1e30])
def test_constant_fits_its_register_at_the_edges(c):
    C, k = constant(1.0, 1.0, c / LOG2_E)
    assert 0 <= C < 2**31 and 0 <= k <= 8


@pytest.mark.parametrize("c", [0.5, 1.0, 32.0])
def test_the_largest_constant_of_a_shift_keeps_its_low_bits_0(c):
    sm_scale = c / LOG2_E
    while sm_scale * LOG2_E >= c:
        sm_scale = math.nextafter(sm_scale, 0)
    C, k = constant(1.0, 1.0, sm_scale)
    assert C == 2**31 - 2**8 and exp.scalar_exponent_constants(1.0, 1.0, sm_scale) == (C, k)


def test_larger_than_64_octaves_is_64():
    assert constant(1.0, 1.0, 65.0) == constant(1.0, 1.0, 1e9)


def test_offset_rounds_the_depth_to_8_fraction_bits():
    depth = torch.tensor([0, 1, 2**23 - 1, 2**23, 2**24, 3 * 2**23, 2**32 - 1, 2**32, 5 * 2**32 + 12345, 2**61])
    assert torch.equal((exp.K0 - depth) >> 24, 3686 - ((depth + 2**23) >> 24))


def test_quadratic_is_two_to_the_f():
    f = torch.arange(256, dtype=torch.float64)
    m = (256 + f) ** 2 + exp.QUADRATIC_OFFSET
    relative = m / 2 ** (f / 256)
    factor = relative.mean()
    assert float((relative / factor - 1).pow(2).mean().sqrt()) < 0.0013  # rms error about the common factor
    top = 256 + 102
    assert (top * top + exp.QUADRATIC_OFFSET) >> 2 == exp.P16_MAX
    assert ((top * top + exp.QUADRATIC_OFFSET) + (1 << 9)) >> 10 == exp.P8_MAX


@given(st.floats(min_value=-1e4, max_value=1e4, width=32))
def test_bias_units(b):
    q = int(exp.quantize_bias(torch.tensor([b])))
    assert q == max(-(2**31 - 1), min(2**31 - 1, round(Fraction(b * LOG2_E) * 2**20)))
    if abs(b) < 1000:
        assert abs(exp.dequantize_bias(torch.tensor([q], dtype=torch.int32)).item() - b) <= 2e-6 + 1e-6 * abs(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_absent_bias(dtype):
    lowest = torch.finfo(dtype).min
    bias = torch.tensor([float("-inf"), lowest, lowest / 2, lowest / 4, 0.0], dtype=dtype)
    absent = (exp.quantize_bias(bias) == exp.ABSENT).tolist()
    assert absent == [True, True, True, False, False]
    assert exp.dequantize_bias(exp.quantize_bias(bias))[0] == float("-inf")


@given(st.floats(min_value=2.0**-60, max_value=2.0**60, width=32))
@example(2.0**-8)
@example(2.0**28)
@example(2.0**29)
def test_output_multiplier(ratio):
    M, e = (int(x) for x in exp.output_multiplier(torch.tensor([ratio]), torch.tensor([1.0])))
    assert 2**23 <= M <= 2**24 and e == max(-7, min(29, math.frexp(ratio)[1]))
    if 2.0**-8 <= ratio < 2.0**29:
        assert abs(M * 2.0 ** (e - 24) / ratio - 1) <= 2.0**-24
