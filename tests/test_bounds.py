"""Every bound of docs/numerics.md, at its edge and one beyond, on every backend."""

import pytest
import torch

import intflash
from intflash import BackendError, InputError, QTensor
from intflash.backends import backends
from intflash.methods import METHODS
from intflash.numerics import exp, groups

METHOD_NAMES = [m.name for m in METHODS.values() if m.integer_bias]


def constant(value: int, *shape: int, scale: float = 1.0) -> QTensor:
    return QTensor(torch.full(shape, value, dtype=torch.int8), scale)


def run(method, backend, *tensors, **options):
    reason = backends()[backend].unavailable()
    if reason:
        pytest.skip(reason)
    try:
        return intflash.attention(*tensors, method=method, backend=backend, out_dtype=torch.int16, **options)
    except BackendError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("backend", sorted(backends()))
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("sign", [1, -1])
def test_most_keys_with_the_largest_sums(method, backend, sign):
    """l and acc reach 65,536 times their largest addend and still fit. The mean of equal values is the value."""
    q, k = constant(0, 1, 1, 2, 8), constant(0, 1, 1, 65_536, 8)
    out = run(method, backend, q, k, constant(127 * sign, 1, 1, 65_536, 8))
    assert (out.data == sign * 32767).all()


@pytest.mark.parametrize("backend", sorted(backends()))
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_one_key_too_many_is_refused(method, backend):
    most = groups.MAX_KEYS if method == "intflash_bfp" else exp.MAX_KEYS
    q, k = constant(0, 1, 1, 1, 1), constant(0, 1, 1, most + 1, 1)
    with pytest.raises(InputError, match=f"at most {most} keys .*got {most + 1}"):
        intflash.attention(q, k, k, method=method, backend=backend, out_scale="bound")


@pytest.mark.parametrize("backend", sorted(backends()))
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_largest_head_dim_with_the_largest_scores(method, backend):
    """S = +-256 * 127^2. The present key with the largest score gets all the weight."""
    k = torch.full((1, 1, 3, 256), -127, dtype=torch.int8)
    k[:, :, 1] = 127
    v = torch.arange(3, dtype=torch.int8).reshape(1, 1, 3, 1).expand(1, 1, 3, 256)
    out = run(method, backend, constant(127, 1, 1, 2, 256), QTensor(k, 1.0), QTensor(v, 1.0))
    assert (out.data == round(32767 / 127)).all()


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_one_head_dim_too_many_is_refused(method):
    x = constant(1, 1, 1, 2, 257)
    with pytest.raises(InputError, match="head_dim at most 256, got 257"):
        intflash.attention(x, x, x, method=method, out_scale="bound")


@pytest.mark.parametrize("backend", sorted(backends()))
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("sm_scale", [1e-30, 1e-9, 0.346, 0.347, 1.0, 44.3, 44.4, 1e30])
def test_exponent_scale_from_uniform_to_hard_maximum(method, backend, sm_scale):
    """C = 0 is uniform attention. Above 64 octaves per unit the largest key gets all the weight. In between, the
    reference's bits.
    """
    g = torch.Generator().manual_seed(1)
    q, k, v = (QTensor(torch.randint(-127, 128, (1, 2, 40, 8), generator=g, dtype=torch.int8), 1.0) for _ in range(3))
    out = run(method, backend, q, k, v, scale=sm_scale)
    expected = intflash.attention(q, k, v, scale=sm_scale, method=method, backend="reference", out_dtype=torch.int16)
    assert torch.equal(out.data, expected.data)
    if sm_scale == 1e-30:
        mean = v.dequantize().mean(2, keepdim=True)
        assert (out.dequantize() - mean).abs().max() < 0.01


@pytest.mark.parametrize("backend", sorted(backends()))
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("ratio", [2.0**-20, 2.0**-8, 2.0**-7, 1.0, 2.0**28, 2.0**29, 2.0**40])
def test_output_scale_saturates_on_every_backend(method, backend, ratio):
    g = torch.Generator().manual_seed(2)
    q, k, v = (QTensor(torch.randint(-127, 128, (1, 1, 20, 8), generator=g, dtype=torch.int8), 0.02) for _ in range(3))
    scale = 0.02 / ratio
    out = run(method, backend, q, k, v, out_scale=scale)
    expected = intflash.attention(q, k, v, method=method, backend="reference", out_dtype=torch.int16, out_scale=scale)
    assert torch.equal(out.data, expected.data)
