"""The float-softmax and unfused Triton kernels on a GPU: every case compared with the reference, large ones too."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import mixed_cases as mc
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHARES = 3  # of a method's cases, most of which compile a kernel


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("method", mc.METHODS)
def test_kernel_matches_reference(method, share):
    torch.manual_seed(0)
    mine = list(mc.cases(method, large=True))[share::SHARES]
    complaints = {name: mc.complaint(p, "cuda") for name, p in mine}
    assert mine and {name: text for name, text in complaints.items() if text} == {}


def test_int_flash_agrees_with_the_authors_kernels():
    for case, db in mc.golden_db("cuda").items():
        assert db > (70 if case.endswith("half") else 48), case
