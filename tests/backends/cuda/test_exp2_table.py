"""csrc/cuda/exp2_table.cuh in the emulator: the table, and the entries of scores, compared with Python integers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / "machines" / "ptx")]

import emulate  # noqa: E402

from intflash.numerics import exp  # noqa: E402

ROWS, STEPS, PROBES = 4096, 24, 16  # the maxima of a row's tiles, and scores looked up after each tile
OCTAVE, TOP = exp.TABLE_STEPS.octave, (1023 << 24) + (1 << 23) - 1
KERNEL = """
#include "exp2_table.cuh"
struct Pointers { const i64* score; const i32* scores; const i32* probes; i32* found; u32* table; };
extern "C" __global__ void attention(Pointers p) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 1024) p.table[i] = table_entry(i);
    const TableUnit unit(unpack_score(p.score[i]));
    TableRow row;
    row.init();
    i32* found = p.found + i * STEPS * (3 + 2 * PROBES);
    for (int step = i * STEPS; step < (i + 1) * STEPS; ++step) {
        const i32 s = p.scores[step];
        *found++ = row.needs_64_bits(s, unit) ? row.raise_64bit(s, unit) : row.raise_32bit(s, unit);
        *found++ = row.octave(unit);
        *found++ = row.limit;
        for (int j = 0; j < PROBES; ++j) {
            const i32 probe = p.probes[step * PROBES + j];
            *found++ = row.entry<false>(probe, unit) >> 16;
            *found++ = (unit.clamps() ? row.entry<true>(probe, unit) : row.entry<false>(probe, unit)) >> 16;
        }
    }
}
"""
pytestmark = pytest.mark.skipif(emulate.unavailable() is not None, reason=str(emulate.unavailable()))


def p8(step: torch.Tensor) -> torch.Tensor:
    """Returns p8 by the text of docs/numerics.md."""
    x = 3686 - 16 * step // 7
    u = 256 + x % 256
    return (((u * u + exp.QUADRATIC_OFFSET) << x // 256) + (1 << 23)) >> 24


def entry_of(T: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    return 1023 - ((e * OCTAVE - T + (1 << 23)) >> 24).clamp(max=1023)


def test_rows_and_table():
    torch.manual_seed(0)
    c = torch.logspace(-9, 2, ROWS, dtype=torch.float64)[torch.randperm(ROWS)]
    scales = (c / exp.LOG2_E).float().view(1, 1, ROWS, 1), torch.ones(1, 1, 1, 1)
    C, k = (x.flatten() for x in exp.exponent_constants(*scales, 1.0, exp.TABLE_STEPS))
    unit = C << k
    # rises from a fraction of an octave to hundreds, similar within a row, up to the largest scores
    rise = (2.0 ** torch.empty(ROWS, 1).uniform_(-3, 9) / c[:, None]).clamp(1, 1 << 21)
    steps = (rise * torch.rand(ROWS, STEPS)).long().cumsum(1)
    highest = (torch.randint(-(1 << 20), 1 << 20, (ROWS, 1)) + steps).clamp(max=1 << 21)
    lower = (torch.rand(ROWS, STEPS) < 0.2) & (torch.arange(STEPS) > 0)  # tiles whose scores raise nothing
    scores = torch.where(lower, highest - torch.randint(0, 1 << 20, highest.shape), highest).clamp(min=-(1 << 21))
    highest = scores.cummax(1).values
    e = -((-(highest * unit[:, None])) // OCTAVE)
    deepest = -(-(e * OCTAVE - TOP) // unit[:, None].clamp(min=1))  # the least score with x >= 0
    near = torch.stack([deepest + i for i in range(-4, 8)] + [highest, highest - 1], -1)
    far = highest[..., None] - torch.randint(0, 1 << 22, (ROWS, STEPS, PROBES - near.shape[-1]))
    probes = torch.minimum(torch.cat([near, far], -1).clamp(min=-(1 << 21)), highest[..., None])
    found, table = torch.zeros(ROWS, STEPS, 3 + 2 * PROBES, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    tensors = [k << 32 | C, scores.int(), probes.int(), found, table]
    emulate.run_source(KERNEL, ROWS // 128, 128, tensors, STEPS=STEPS, PROBES=PROBES)
    by, octave, limit, entries = *found[..., :3].long().unbind(-1), found[..., 3:].long().view(ROWS, STEPS, PROBES, 2)
    assert torch.equal(table.long(), p8(1023 - torch.arange(1024)))
    assert torch.equal(octave, e)
    rises = torch.diff(e, dim=1, prepend=torch.full((ROWS, 1), -(1 << 30)))
    assert torch.equal(by, rises.clamp(max=31))
    assert (limit * unit[:, None] <= e * OCTAVE).all() and (by > 0).any() and ((by == 0)[:, 1:]).any()
    want = p8(1023 - entry_of(probes * unit[:, None, None], e[..., None]))
    for form in range(2):
        assert torch.equal(p8(1023 - entries[..., form]), want)
