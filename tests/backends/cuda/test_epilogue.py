"""csrc/cuda/epilogue.cuh in the emulator: the reciprocal of a row sum, factors of integer output, sums as floats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / "machines" / "ptx")]

import emulate  # noqa: E402

THREADS = 4096
KERNEL = """
#include "epilogue.cuh"
struct Pointers { const u32* in; const i64* packed; i32* out; };
extern "C" __global__ void attention(Pointers p) {
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (u32 i = thread; i < SUMS; i += gridDim.x * blockDim.x) {
        const u32 x = p.in[i];
        if (CASE < 2) p.out[i] = reciprocal_2_61<CASE == 0>(x << leading_zeros(x));
        else if (CASE == 3) p.out[i] = __float_as_int(as_float(((const ACC*)p.in)[i]));
        else {
            const Normalizer n = normalizer<ACC>(x, p.packed[i]);
            p.out[2 * i] = n.factor, p.out[2 * i + 1] = n.shift;
        }
    }
}
"""
pytestmark = pytest.mark.skipif(emulate.unavailable() is not None, reason=str(emulate.unavailable()))


def run(case: int, acc: str, x: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    low = x.to(torch.int32)  # the same 32 bits
    emulate.run_source(KERNEL, THREADS // 128, 128, [low, packed, out], CASE=case, ACC=acc, SUMS=len(x))


def leading_zeros(x: torch.Tensor) -> torch.Tensor:
    return 32 - torch.frexp(x.double()).exponent.long()


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    return (1 << 55) // (x << leading_zeros(x))


def sums(bits: int, count: int) -> torch.Tensor:
    """Returns row sums of up to `bits` bits, equally many of each length, with the least and the largest of every
    length.
    """
    ends = torch.tensor([(1 << b) + i for b in range(bits + 1) for i in (-1, 0, 1) if 0 < (1 << b) + i < 1 << bits])
    return torch.cat([ends, torch.exp2(torch.rand(count, dtype=torch.float64) * bits).long().clamp(1, (1 << bits) - 1)])


def test_reciprocal():
    """Covers every row sum of P8, and sums of any size."""
    torch.manual_seed(0)
    for case, x in ((0, torch.arange(1, 1 << 24)), (1, sums(32, 1 << 20))):
        found = torch.zeros(x.numel(), dtype=torch.int32)
        run(case, "i32", x, torch.zeros(1, dtype=torch.int64), found)
        for at in range(0, x.numel(), 1 << 20):
            part = slice(at, at + (1 << 20))
            assert torch.equal(found[part].long(), 64 * reciprocal(x[part]))


@pytest.mark.parametrize("acc, bits, least", (("i32", 24, 33), ("P16Accumulator", 32, 40)))
def test_normalizer(acc, bits, least):
    """docs/numerics.md, "The output": RR and sh. Both are larger by the same number of bits where the high word
    suffices.
    """
    torch.manual_seed(0)
    fewest = 127 if acc == "i32" else 65193  # the smallest sum of a row with keys
    l = sums(bits, 1 << 16).clamp(min=fewest)
    Mr, e = torch.randint(1 << 23, (1 << 24) + 1, l.shape), torch.randint(-7, 30, l.shape)
    Mr[::5], Mr[1::5] = 1 << 23, 1 << 24
    found = torch.zeros(l.numel(), 2, dtype=torch.int32)
    run(2, acc, l, e << 32 | Mr, found)
    RR, sh = (reciprocal(l) * Mr + (1 << 23)) >> 24, 55 - leading_zeros(l) - e
    factor, shift = found.long().unbind(-1)
    by = shift - sh
    assert (by >= 0).all() and torch.equal(factor, RR << by) and (factor < 1 << 31).all()
    aligned = e <= 4
    assert (by[~aligned] == 0).all() and (shift[aligned] >= least).all() and (by > 0).any()
    assert (by == 0)[aligned & (sh >= least)].all()


def test_a_row_without_keys_is_zero():
    e = torch.arange(-7, 30)
    found = torch.zeros(e.numel(), 2, dtype=torch.int32)
    run(2, "i32", torch.zeros_like(e), e << 32 | 1 << 23, found)
    assert ((found[:, 1] > 0) & (found[:, 1] < 64)).all()  # acc = 0 plus 2^(shift - 1), shifted, is 0


@pytest.mark.parametrize("acc, keys", (("P16Accumulator", 65_536), ("SmallP16Accumulator", 512)))
def test_sums_as_floats(acc, keys):
    """256 high + low is rounded once, to the largest sums of both digits, where V is -128 or 127."""
    torch.manual_seed(0)
    most = torch.tensor([254, 255]) * 128 * keys
    size = torch.exp2(torch.rand(1 << 18, 2, dtype=torch.float64) * torch.log2(most.double())).long()
    sums = torch.where(torch.rand(size.shape) < 0.5, -size, size)
    sums[:4] = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]]) * most
    sums[4:8], sums[8] = torch.tensor([[0, 0], [0, -1], [-1, 0], [-1, 255]]), torch.tensor([1, 1])
    exact = 256 * sums[:, 0] + sums[:, 1]
    halfway = 9 + torch.arange(1 << 16)  # between two floats: 25 bits, of which the last is 1
    exact[halfway] = (2 * torch.randint(1 << 23, 1 << 24, halfway.shape) + 1) * torch.tensor([-1, 1])[halfway % 2]
    sums[halfway] = torch.stack([exact[halfway] >> 8, exact[halfway] & 255], -1)
    found = torch.zeros(len(sums), dtype=torch.int32)
    run(3, acc, sums, torch.zeros(1, dtype=torch.int64), found)
    assert torch.equal(found.view(torch.float32), exact.float())
