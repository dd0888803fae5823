"""Bounds of the methods of other papers: errors that name them, at the edge and one beyond."""

import pytest
import torch

import intflash
from intflash import InputError, QTensor, Recipe
from intflash.methods import get_method, lite, qflash
from intflash.problem import Problem
from intflash.quant import quantize
from oracle import uniform


def attend(method, *tensors, **options):
    return intflash.attention(*tensors, method=method, backend="reference", **options)


def test_lite_refuses_a_head_dim_past_256():
    assert attend("lite", *uniform(1, 1, 1, 4, 256)).shape == (1, 1, 4, 256)
    with pytest.raises(InputError, match="256"):
        attend("lite", *uniform(1, 1, 1, 4, 257))


def test_lite_refuses_codes_of_minus_128():
    codes = torch.full((1, 1, 4, 256), -128, dtype=torch.int8)
    q, k = (QTensor(codes, 0.01) for _ in range(2))
    with pytest.raises(InputError, match=r"2\^22"):
        get_method("lite").reference(Problem("lite", q, k, k, 1e-6))


def test_lite_conversion_is_exact_to_its_edge():
    edge = 1 << 22
    s = torch.tensor([-edge + 1, -edge + 2, -(256 * 127**2), -1, 0, 1, 256 * 127**2, edge - 1])
    assert torch.equal(lite.int_to_float(s), s.float())


@pytest.mark.parametrize("method", ["qflash", "iflash"])
@pytest.mark.parametrize("what", ["head_dim", "keys"])
def test_qflash_bounds_its_int32_products(method, what):
    limit = qflash.MAX_PRODUCT_TERMS
    assert limit * 127**2 < 2**31 <= (limit + 1) * 127**2
    check = get_method(method).check

    def problem(n):
        shape = (1, 1, 1, n) if what == "head_dim" else (1, 1, n, 1)
        x = QTensor(torch.zeros(1, dtype=torch.int8).expand(shape), 1.0)
        return Problem(method, x if what == "head_dim" else QTensor(x.data[:, :, :1], 1.0), x, x, 1.0)

    check(problem(limit))
    with pytest.raises(InputError, match=str(limit)):
        check(problem(limit + 1))


@pytest.mark.parametrize("method", ["qflash", "iflash"])
def test_qflash_scale_range(method):
    """round(1 / sm_scale) is an int32 of at least 1."""
    x = torch.ones(1, 1, 4, 8)
    octave = 0.6931471805599453  # with scales of 1 this makes sm_scale = 1

    def at(sm_scale):
        codes = QTensor(x.to(torch.int8), 1.0)
        return Problem(method, codes, codes, codes, sm_scale=octave * sm_scale, check_finite=True)

    for inside in (1.99, 1.0, 2.0**-30):
        get_method(method).reference(at(inside))
    for outside in (2.01, 2.0**-32):
        with pytest.raises(InputError, match=r"needs round\(1 / "):
            get_method(method).reference(at(outside))


@pytest.mark.parametrize("method", ["qflash", "iflash"])
def test_qflash_fixes_its_output_scale(method):
    """It is V's own: nothing has to be given, and nothing else can be."""
    x = uniform(4, 1, 1, 8, 16)
    codes = [quantize(y) for y in x]
    for inputs in (x, codes):
        found = [attend(method, *inputs, out_dtype=torch.int8, out_scale=given) for given in (None, "bound")]
        assert torch.equal(found[0].data, found[1].data) and found[0].data.any()
        assert found[0].scale == found[1].scale
        for given in (0.1, torch.tensor(0.1), "dynamic"):
            with pytest.raises(InputError, match="V's own scale: out_scale must be None or 'bound', got"):
                attend(method, *inputs, out_dtype=torch.int8, out_scale=given)
    out = attend(method, *codes)
    assert out.data.dtype == torch.int8 and torch.equal(out.scale, codes[2].scale)
    with pytest.raises(InputError, match="must be None or 'bound', got 'dynamic'"):
        intflash.which_backend(*codes, method=method, out_scale="dynamic")


@pytest.mark.parametrize(
    "method, recipe",
    [
        ("qflash", Recipe(q="token")),
        ("ivit", Recipe(k="head")),
        ("qattn", Recipe(v="token")),
        ("ibert", Recipe(v="block")),
    ],
)
def test_granularities_that_a_method_does_not_take(method, recipe):
    with pytest.raises(InputError, match=method):
        attend(method, *uniform(4, 1, 2, 8, 16), recipe=recipe)


@pytest.mark.parametrize("method", ["ibert", "fqvit"])
def test_i_exp_refuses_a_unit_below_its_integers(method):
    q, k, v = uniform(4, 1, 1, 8, 16)
    with pytest.raises(InputError, match=r"2\^-30"):
        attend(method, q, k, v, scale=1e-12)


@pytest.mark.parametrize("method", ["qflash", "iflash", "ivit", "ibert", "fqvit", "lite", "int_flash_full", "fp8"])
def test_zeros_are_served(method):
    zero = torch.zeros(1, 1, 8, 16)
    assert not attend(method, zero, zero, zero).any()


@pytest.mark.parametrize("method", ["int_flash_full", "lite", "fp32"])
def test_out_scale_is_used(method):
    q, k, v = uniform(4, 1, 1, 8, 16)
    out = attend(method, q, k, v, out_dtype=torch.int16, out_scale=2.0**-12)
    assert out.scale.item() == 2.0**-12
    assert (out.dequantize() - attend(method, q, k, v)).abs().max() <= 2.0**-13 + 1e-6
