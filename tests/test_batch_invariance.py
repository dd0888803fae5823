"""With default arguments an image's output does not depend on the other images of its batch, on any backend."""

import pytest
import torch

import intflash
from intflash import BackendError
from intflash.backends import backends
from intflash.methods import METHODS

OURS = [m.name for m in METHODS.values() if m.integer_bias]
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
# heads, key heads, queries, keys, head_dim: windows, short rows, long rows, few rows, K and V beside each other
SHAPES = ((3, 3, 49, 49, 32), (4, 4, 197, 197, 64), (4, 2, 300, 300, 64), (8, 2, 1, 600, 128), (2, 2, 130, 75, 72))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(backends()))
@pytest.mark.parametrize("method", OURS)
def test_an_image_does_not_depend_on_its_neighbours(method, name, device):
    served = 0
    for h, hk, nq, nk, d in SHAPES:
        g = torch.Generator().manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.float16
        q, k, v = (torch.randn(3, *s, generator=g).to(device, dtype) for s in ((h, nq, d), (hk, nk, d), (hk, nk, d)))
        options = dict(method=method, backend=name, enable_gqa=True, return_lse=True)
        try:
            together = intflash.attention(
                *(x * torch.tensor([1, 30, 0.1]).to(x)[:, None, None, None] for x in (q, k, v)), **options
            )
        except BackendError:
            continue
        alone = intflash.attention(*(x[:1] for x in (q, k, v)), **options)
        assert all(torch.equal(a, b[:1]) for a, b in zip(alone, together, strict=True)), (h, hk, nq, nk, d)
        served += 1
    if not served:
        pytest.skip(f"{name} does not serve {method} here")
