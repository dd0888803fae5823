"""Problems that the GPU backends leave to others because of limits of grids and 32-bit indices, and what CUDA graphs
keep alive.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from intflash.backends import native  # noqa: E402
from intflash.backends.cuda import plans  # noqa: E402
from intflash.backends.gpu import scales  # noqa: E402
from intflash.backends.gpu.tensors import limits, readable  # noqa: E402
from intflash.problem import Problem  # noqa: E402
from intflash.quant import QTensor  # noqa: E402


def problem(shape, method="intflash", v=None, **more) -> Problem:
    """Makes a problem of codes without memory."""
    scale = torch.ones(1, 1, 1, 1)
    q = QTensor(torch.empty(shape, dtype=torch.int8, device="meta"), scale, "tensor")
    return Problem(method, q, q, q if v is None else QTensor(v, scale, "tensor"), 0.1, out_dtype=torch.int8, **more)


def test_more_heads_than_the_second_grid_axis():
    assert limits(problem((1, 65_535, 70, 64))) is None
    assert "at most 65535 heads, got 65536" in limits(problem((1, 65_536, 70, 64)))


@pytest.mark.parametrize("tokens, reason", [(58_254, None), (58_255, "rows of k must lie within 2^31 elements")])
def test_tokens_beyond_32_bit_offsets(tokens, reason):
    p = problem((1, 1, 8, 128))
    far = torch.empty(0, dtype=torch.int8, device="meta").as_strided((1, 1, tokens, 128), (0, 0, 36_864, 1))
    found = limits(replace(p, k=QTensor(far, p.k.scale, "tensor")))
    assert found is None if reason is None else reason in found


def test_readable_padding_lies_inside_the_storage():
    x = torch.zeros(2, 3, 8, 16, dtype=torch.int8)
    assert readable(x, 8) and not readable(x, 9) and readable(x[:1], 8 * 4) and not readable(x[1:], 9)
    assert not readable(torch.zeros(1, 1, 8, 1, dtype=torch.int8), 9)


needs_native = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))


@needs_native
def test_masks_that_repeat_beyond_32_bits():
    """A mask with as many batches as windows, or one, needs no quotient; 64 of 76,800 have an exact quotient."""
    for batch, batches, takes in (
        (76_800, 76_800, True),
        (76_800, 64, True),
        (76_800, 1, True),
        (131_072, 65_536, False),
    ):
        keep = torch.empty(batches, 1, 1, 49, dtype=torch.bool, device="meta")
        found = plans.find_kernel(problem((batch, 1, 49, 32), keep=keep))
        assert found.kernel == "window" if takes else "repeats over at most 2^32" in found.refusal


@needs_native
def test_windows_of_unaligned_key_major_values():
    stored = torch.zeros(33, 4, 1, 49, dtype=torch.int8)[:32].permute(1, 2, 3, 0)  # a batch of 49 bytes
    assert plans.find_kernel(problem((4, 1, 49, 32), v=stored)).kernel == "long_rows"
    stored = torch.zeros(33, 4, 1, 64, dtype=torch.int8)[:32, ..., :49].permute(1, 2, 3, 0)
    assert plans.find_kernel(problem((4, 1, 49, 32), v=stored)).kernel == "window"


def test_tensors_of_a_captured_graph_are_kept(monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for name in ("_memory", "_captured"):
        monkeypatch.setattr(scales, name, {})

    def remembered(key: object) -> object:
        return scales.cache_per_stream(key, torch.device("cuda"), object)

    before = remembered("scale")
    capturing = True
    assert remembered("scale") is before and remembered("new") is not remembered("new")
    capturing = False
    for other in range(2 * scales._MOST):
        remembered(other)
    assert remembered("scale") is before
