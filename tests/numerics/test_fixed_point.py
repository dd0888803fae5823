"""Fixed-point primitives against Python integers and fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intflash.numerics import fixed_point as fp

VALUES = list(range(-300, 301)) + [2**31 - 1, -(2**31), 2**40 + 3, -(2**40) - 3]


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_primitives_against_python(make):
    x = make(VALUES)
    for shift in (1, 3, 24):
        expected = [math.floor(Fraction(v, 1 << shift) + Fraction(1, 2)) for v in VALUES]
        assert fp.rounding_rshift(x, shift).tolist() == expected
        assert fp.rounding_rshift(x, make([shift])).tolist() == expected
    assert fp.trunc_div(x, make([7])).tolist() == [math.trunc(Fraction(v, 7)) for v in VALUES]
    assert fp.floor_div(x, make([7])).tolist() == [v // 7 for v in VALUES]
    assert fp.saturate(x, 8).tolist() == [max(-127, min(127, v)) for v in VALUES]


@given(st.integers(-(2**62), 2**62))
def test_wraps_are_register_casts(v):
    assert fp.wrap_int32(np.array([v]))[0] == np.array([v]).astype(np.int32)[0]
    assert fp.wrap_int8(torch.tensor([v]))[0] == torch.tensor([v]).to(torch.int8)[0]


@given(st.integers(0, 2**32 - 1))
def test_clz32(v):
    assert fp.clz32(torch.tensor([v])).item() == 32 - v.bit_length()
    assert fp.clz32(np.array([v]))[0] == 32 - v.bit_length()
