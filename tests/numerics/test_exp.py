"""The integer exponential's constants: their definition, their saturations, their accuracy."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import intflash
from intflash.methods.intflash import _p8_of_table
from intflash.numerics import exp

LOG2_E = math.log2(math.e)  # not the library's own
SCALES = st.floats(min_value=2.0**-120, max_value=2.0**20, width=32)
UNITS = pytest.mark.parametrize("unit", [exp.OCTAVES, exp.TABLE_STEPS], ids=["octaves", "table steps"])
PER_OCTAVE = {exp.OCTAVES: 1.0, exp.TABLE_STEPS: 7 / 16}
LEAST_COARSE = {exp.OCTAVES: 2.0**-14, exp.TABLE_STEPS: 2.0**-16}  # the c that keeps 24 fraction bits
FRACTION_BITS = {exp.OCTAVES: 32, exp.TABLE_STEPS: 30}  # of a smaller one


def constant(q_scale: float, k_scale: float, sm_scale: float, unit: exp.ScoreUnit = exp.OCTAVES) -> tuple[int, int]:
    scales = (torch.tensor(s, dtype=torch.float32).reshape(1, 1, 1, 1) for s in (q_scale, k_scale))
    C, k = exp.exponent_constants(*scales, sm_scale, unit)
    return int(C), int(k)


def largest_below(c: float, unit: exp.ScoreUnit) -> float:
    """Returns the largest sm_scale, for scales of 1, whose units per score are below c."""
    sm_scale = math.nextafter(c / PER_OCTAVE[unit] / LOG2_E, math.inf)
    while sm_scale * LOG2_E * PER_OCTAVE[unit] >= c:
        sm_scale = math.nextafter(sm_scale, 0)
    return sm_scale


@UNITS
@given(SCALES, SCALES, st.floats(min_value=1e-6, max_value=16))
def test_constant_is_the_rounded_units_per_score(unit, q_scale, k_scale, sm_scale):
    C, k = constant(q_scale, k_scale, sm_scale, unit)
    c = min(((q_scale * k_scale) * sm_scale) * LOG2_E, 64.0) * PER_OCTAVE[unit]
    assert k == next(n for n in range(9) if c / 2**n < 0.5)
    bits = FRACTION_BITS[unit] if c < LEAST_COARSE[unit] else 24
    assert min(round(Fraction(c) * 2**bits) * 2 ** (32 - bits - k), 2**31 - 256) == C
    if unit is exp.OCTAVES:
        assert exp.scalar_exponent_constants(q_scale, k_scale, sm_scale) == (C, k)


@UNITS
@given(st.floats(min_value=2.0**-40, max_value=2.0**8))
@example(2.0**-14)
@example(2.0**-16)
def test_products_of_32_bits_hold_all_but_small_constants(unit, c):
    C, k = constant(1.0, 1.0, c / LOG2_E, unit)
    c = min((c / LOG2_E) * LOG2_E, 64) * PER_OCTAVE[unit]
    if c >= LEAST_COARSE[unit]:
        assert (C << k) % 256 == 0 and min(round(Fraction(c) * 2**24), ((2**31 - 256) << k) >> 8) == (C << k) >> 8
    else:
        assert k == 0 and C % 2 ** (32 - FRACTION_BITS[unit]) == 0


@UNITS
def test_fraction_bits_fall_to_24_at_the_threshold(unit):
    """c's 25th fraction bit is kept below the threshold and rounded away above it."""
    least, last = LEAST_COARSE[unit], 2.0**-25
    for c, kept in ((least - last, least - last), (least + last, least)):
        assert constant(1.0, 1.0, largest_below(math.nextafter(c, 1), unit), unit) == (kept * 2**32, 0)


@UNITS
@pytest.mark.parametrize("c", [0.0, 0.25, math.nextafter(0.5, 0), 0.5, 1.0, 63.9, 64.0, 65.0, 1e30])
def test_constant_fits_its_register_at_the_edges(unit, c):
    C, k = constant(1.0, 1.0, c / LOG2_E, unit)
    assert 0 <= C < 2**31 and 0 <= k <= 8


@pytest.mark.parametrize(
    "unit, c",
    [(u, c) for u, per_octave in PER_OCTAVE.items() for c in (0.5, 1.0, 16.0, 32.0) if c < 64 * per_octave],
)
def test_the_largest_constant_of_a_shift_keeps_its_low_bits_0(unit, c):
    sm_scale = largest_below(c, unit)
    C, k = constant(1.0, 1.0, sm_scale, unit)
    assert C == 2**31 - 2**8 and k == math.log2(2 * c)
    if unit is exp.OCTAVES:
        assert exp.scalar_exponent_constants(1.0, 1.0, sm_scale) == (C, k)


@UNITS
def test_larger_than_64_octaves_is_64(unit):
    assert constant(1.0, 1.0, 65.0, unit) == constant(1.0, 1.0, 1e9, unit)
    C, k = constant(1.0, 1.0, 1e9, unit)
    assert C << k == 64 * unit.octave


def test_units_of_t():
    """256 steps of the table, of which an octave has 112, are 16/7 octaves. A bias counts in 2^-20 octave."""
    assert exp.OCTAVES.octave == 1 << 32 and [exp.OCTAVES.bias_step(bits) for bits in (20, 12)] == [1 << 12, 1 << 20]
    assert exp.TABLE_STEPS.octave == 7 << 28 == 112 << 24 and exp.TABLE_STEPS.bias_step(20) == 1792
    assert all(unit.bias_step(bits) << bits == unit.octave for bits in (20, 12) for unit in PER_OCTAVE)


def test_p8_of_the_table():
    """1,024 steps, each with the p8 of the 1/256 octave that contains it. T rounds to the nearest step, halves to
    the deeper one.
    """
    step = torch.arange(exp.LAST_STEP + 1)
    assert torch.equal((step * 37450) >> 14, 16 * step // 7)
    assert torch.equal(3686 - 16 * step // 7, 16 * (1613 - step) // 7)  # what a GPU computes
    there = torch.ones_like(step, dtype=torch.bool)
    p = _p8_of_table(step << 24, there)
    assert p[0] == exp.P8_MAX and bool((p.diff() <= 0).all())
    assert step.numel() == 1024 and int((p > 0).sum()) == 1008 and bool((p[1008:] == 0).all())
    assert torch.equal(_p8_of_table((step << 24) + (1 << 23) - 1, there), p)
    assert torch.equal(_p8_of_table((step[1:] << 24) - (1 << 23), there[1:]), p[1:])
    assert not _p8_of_table(torch.tensor([1024 << 24, 1 << 60]), there[:2]).any()
    assert not _p8_of_table(step << 24, ~there).any()


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
    assert e == max(-7, min(29, math.frexp(ratio)[1]))
    assert 2**23 <= M <= 2**24 if ratio >= 2.0**-8 else M == 0
    if 2.0**-8 <= ratio < 2.0**29:
        assert abs(M * 2.0 ** (e - 24) / ratio - 1) <= 2.0**-24


class _Copies(TorchDispatchMode):
    """Collects the operations that make a CUDA tensor from a CPU one, which cannot be captured in a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = [{x.device.type for x in tree_leaves(tree) if isinstance(x, torch.Tensor)} for tree in (args, out)]
        if "cpu" in devices[0] and "cuda" in devices[1]:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize("function", ["output_multiplier", "exponent_constants", "bias_codes", "log_sum_exp"])
def test_constants_of_a_gpu_are_made_there(function):
    with FakeTensorMode():
        scale = torch.empty(1, 2, 1, 1, device="cuda")
        calls = {
            "output_multiplier": lambda: exp.output_multiplier(scale, scale),
            "exponent_constants": lambda: exp.exponent_constants(scale, scale, 0.125, exp.OCTAVES),
            "bias_codes": lambda: exp.bias_codes(scale),
            "log_sum_exp": lambda: exp.log_sum_exp(scale.long(), scale.long(), 255),
        }
        with _Copies() as copies:
            calls[function]()
            torch.as_tensor(1, device="cuda")  # what it would look like
    assert copies.found == ["aten._to_copy.default"]


@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online", "intflash_bfp", "fqvit"])
def test_outputs_of_much_less_than_a_step_are_0(method):
    """s_V / s_O of the second head is below 2^-8."""
    q, k, v = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 8, 4), torch.ones(1, 2, 8, 2)
    v[:, 1] = 1e-6
    for backend in ("reference", "torch", "cpu")[: 2 if method == "fqvit" else 3]:
        out = intflash.attention(q, k, v, method=method, out_dtype=torch.int8, out_scale=1 / 127, backend=backend)
        assert out.data[:, 0].eq(127).all() and out.data[:, 1].eq(0).all()


def test_an_output_scale_of_0_has_the_same_bits_everywhere():
    """The default scale of subnormal V is 0 in float32."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (3, 1, 2, 20, 16), generator=g, dtype=torch.int8)
    q, k, v = (intflash.QTensor(x, s) for x, s in zip(codes, (0.03, 0.03, 2.0**-145), strict=True))
    outs = [
        intflash.attention(q, k, v, out_dtype=torch.int16, backend=name).data for name in ("reference", "torch", "cpu")
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
