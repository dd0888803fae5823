"""torch's own samples of scaled_dot_product_attention through `intflash.sdpa`: accurate, or refused by our error."""

import itertools

import pytest
import torch

import intflash
from oracle import sqnr

pytest.importorskip("expecttest", reason="torch's samples need it")

NAME = "nn.functional.scaled_dot_product_attention"
# int8 codes of q, k and v leave about 30 dB on normal values; a sample has a few hundred outputs.
LEAST_DB = 25


def samples(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (found for found in op_db if found.name == NAME)
    return list(op.sample_inputs("cpu", dtype, requires_grad=False))


def check(sample):
    """Raises an AssertionError if the output is far from torch's. Returns the refusal, or None."""
    inputs, options = (sample.input, *sample.args), dict(sample.kwargs)
    try:
        got = intflash.sdpa(*inputs, **options)
    except (intflash.InputError, intflash.BackendError) as refusal:
        return str(refusal)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert sqnr(expected, got) > LEAST_DB
    return None


def test_torchs_float32_samples():
    refused = [check(sample) for sample in samples(torch.float32)]
    assert len(refused) >= 20 and refused.count(None) >= 8
    assert all(said is None or "dropout_p must be 0" in said or "batch" in said for said in refused)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_torchs_half_precision_samples(dtype):
    refused = [check(sample) for sample in samples(dtype)]
    assert refused.count(None) >= 8


@pytest.mark.full
def test_torchs_samples_with_each_option():
    """The samples again with scale and GQA, masks of each kind, and strides, for several seeds."""
    options = itertools.product((None, 0.3), ("none", "bool", "float"), (False, True), range(5))
    for scale, mask, strided, seed in options:
        torch.manual_seed(seed)
        for sample in samples(torch.float32):
            if sample.kwargs["dropout_p"] or sample.kwargs["is_causal"]:
                continue
            q, k, v = sample.input, *sample.args
            if strided:
                q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
            given = {"bool": torch.rand(q.shape[-2], k.shape[-2]) > 0.3, "float": torch.randn(q.shape[-2], k.shape[-2])}
            if mask != "none":
                sample.kwargs["attn_mask"] = given[mask]
            sample.input, sample.args = q, (k, v)
            sample.kwargs["scale"] = scale
            said = check(sample)
            assert said is None or "batch" in said


@pytest.mark.full
def test_torchs_float64_samples_are_refused_by_our_error():
    for sample in samples(torch.float64):
        assert "dtype" in check(sample) or "dropout_p" in check(sample)
