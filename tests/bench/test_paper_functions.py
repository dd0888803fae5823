"""The LayerNorm and GELU of I-BERT and I-ViT that integer_accuracy compares ours with: as close as the papers say."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.integer_accuracy import ibert_gelu, ibert_norm, ivit_gelu, ivit_norm


@pytest.mark.parametrize("norm, most", [(ibert_norm, 2e-3), (ivit_norm, 2e-3)])
def test_norms(norm, most):
    """Of integers as a stream has them: (x - mean) / standard deviation, but for the floors of mean and root."""
    x = torch.randint(-(1 << 13), 1 << 13, (8, 64, 192), generator=torch.Generator().manual_seed(0)).double()
    assert (norm(x) - F.layer_norm(x, (192,))).abs().max() < most


def test_ibert_gelu():
    """I-BERT gives a largest error of 1.8e-2."""
    x = torch.linspace(-6, 6, 1000, dtype=torch.float64)
    error = (ibert_gelu(x, 1.0) - F.gelu(x)).abs().max()
    assert 1e-3 < error < 1.9e-2


def test_ivit_gelu():
    """x sigmoid(1.702 x) has an error of 2.1e-2 itself; its shifts, its 8-bit sigmoid and above all its quotient add to
    that: 2^31 over a sum near 2^27 is floored to a number of four or five bits, 4 % of a large x."""
    x = torch.linspace(-6, 6, 1000, dtype=torch.float64)[None]
    error = (ivit_gelu(x, 6 / 127) - F.gelu(x)).abs().max()
    assert 2e-2 < error < 0.3
