"""The portable backend's tiles and steps: no choice of them changes a bit, and none is larger than allowed."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from intflash.backends.portable import _KERNELS
from intflash.backends.portable.tiles import Tiling
from intflash.backends.reference import BACKEND as REFERENCE
from intflash.methods import METHODS
from intflash.problem import Problem
from intflash.quant import QTensor

NK = 150
SMALL = Tiling(elements=1 << 13, resident=1 << 15)

INVARIANT = ("intflash", "intflash_p8")
INTEGER = [m.name for m in METHODS.values() if m.integer_only]


def data(kind, g):
    q, k, v = (
        torch.randint(-127, 128, (2, h, n, 17), generator=g, dtype=torch.int8) for h, n in ((4, 21), (2, NK), (2, NK))
    )
    keep = torch.ones(2, 1, 21, NK, dtype=torch.bool)
    if kind == "last key largest":
        q.abs_()
        k[:, :, -1] = 127
    elif kind == "ties":
        k[:] = k[:, :, :1]
    elif kind == "absent stretches":
        keep[..., 20:90] = False
        keep[:, :, 3] = False
        keep[0, :, 5, :149] = False
    return [QTensor(x, 0.02) for x in (q, k, v)], keep


@st.composite
def splits(draw):
    """Splits the keys at any position, in any order."""
    cuts = sorted({0, NK, *draw(st.lists(st.integers(1, NK - 1), max_size=6))})
    return tuple(draw(st.permutations(list(zip(cuts, cuts[1:], strict=False)))))


@pytest.mark.parametrize("method", INVARIANT)
@pytest.mark.parametrize("kind", ["random", "last key largest", "ties", "absent stretches"])
@pytest.mark.parametrize("biased", [False, True])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(steps=splits(), elements=st.sampled_from((1, 100, 5000, 1 << 20)), causal=st.sampled_from((None, 0, 120)))
def test_key_steps_change_no_bit(method, kind, biased, steps, elements, causal):
    g = torch.Generator().manual_seed(1)
    (q, k, v), keep = data(kind, g)
    bias = torch.randint(-(1 << 22), 1 << 22, (1, 4, 21, NK), generator=g, dtype=torch.int32) if biased else None
    problem = Problem(method, q, k, v, 0.25, keep=keep, bias=bias, causal=causal, return_lse=True)
    expected = REFERENCE.run(problem)
    got = _KERNELS[method](problem, Tiling(elements=elements, resident=4 * elements, steps=steps))
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("method", INTEGER)
@pytest.mark.parametrize("elements", [1, 700, 20_000])
def test_tiles_change_no_bit(method, elements):
    g = torch.Generator().manual_seed(2)
    (q, k, v), keep = data("random", g)
    problem = Problem(method, q, k, v, 0.25, keep=keep, causal=2, out_dtype=torch.int8)
    problem = replace(problem, out_scale=None if method in ("qflash", "iflash") else torch.full((1, 1, 1, 1), 0.02))
    got = _KERNELS[method](problem, Tiling(elements=elements, resident=elements))
    assert torch.equal(got.out, REFERENCE.run(problem).out)


@pytest.mark.parametrize("keys", [512, 2048])
def test_longest_step_with_largest_values(keys):
    """255 * 127 * 512 is float32's last exact sum. Longer steps use float64."""
    q, k = (QTensor(torch.zeros(1, 1, n, 4, dtype=torch.int8), 1.0) for n in (2, 2048))
    v = QTensor(torch.full((1, 1, 2048, 3), 127, dtype=torch.int8), 1.0)
    v.data[..., 1::2, 1] = 126
    problem = Problem("intflash_p8", q, k, v, 1.0, out_dtype=torch.int16)
    got = _KERNELS["intflash_p8"](problem, Tiling(keys=keys))
    assert torch.equal(got.out, REFERENCE.run(problem).out)


class PeakMemory(TorchDispatchMode):
    """Measures the bytes of the tensors that operations make, at their peak."""

    def __init__(self):
        super().__init__()
        self.users, self.sizes, self.peak = Counter(), {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.users[storage.data_ptr()] += 1
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(x, self.release, storage.data_ptr())
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out

    def release(self, address):
        self.users[address] -= 1
        if not self.users[address]:
            self.sizes.pop(address, None)


def peak(problem, tiling=SMALL):
    with PeakMemory() as memory:
        _KERNELS[problem.method](problem, tiling)
    return memory.peak


@pytest.mark.parametrize("method", [x if x in INTEGER else pytest.param(x, marks=pytest.mark.full) for x in METHODS])
def test_masks_are_never_expanded(method):
    """A mask with one row per key, and one of a window's keys: both use memory for a tile only, not for batch x
    heads.
    """
    b, h, n = 4, 8, 128
    codes = torch.ones(b, h, n, 8, dtype=torch.int8)
    x = [QTensor(codes, 0.1) for _ in range(3)]
    scale = None if method in ("qflash", "iflash") else torch.full((1, 1, 1, 1), 0.1)
    plain = Problem(method, *x, 0.3, out_dtype=torch.int8, out_scale=scale)
    bare = peak(plain)
    every_score = b * h * n * n * 4  # one int32 tensor of them all: 2 MiB
    assert bare < every_score
    name, dtype = ("bias", torch.int32) if METHODS[method].integer_bias else ("bias_float", torch.float32)
    for shape in ((1, 1, 1, n), (2, 1, n, n), (1, h, n, n)):
        masked = replace(plain, keep=torch.ones(shape, dtype=torch.bool), **{name: torch.zeros(shape, dtype=dtype)})
        assert peak(masked) - bare < every_score / 2


@pytest.mark.parametrize("method", INVARIANT + ("intflash_online", "qflash", "lite"))
def test_memory_of_many_keys_is_bounded(method):
    q, k = (QTensor(torch.ones(1, 1, n, 4, dtype=torch.int8), 0.1) for n in (200, 20_000))
    scores = 200 * 20_000 * 4
    assert peak(Problem(method, q, k, k, 0.3), Tiling(elements=1 << 16, resident=1 << 18)) < scores / 3
