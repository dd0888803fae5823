"""The papers' shapes, and inputs that a seed decides."""

import pytest
import torch

from intflash.bench.workloads import COLUMNS, HARD, QFLASH, InputCase, normal, random_case


def test_qflash_table_1():
    shapes = {name: (w.windows, w.heads, w.n, w.head_dim) for name, w in QFLASH.items()}
    assert shapes["A2"] == (1, 6, 197, 64) and shapes["A4"] == (64, 3, 49, 32) and shapes["A7"] == (1, 24, 49, 32)
    assert QFLASH["A4"].batched(8).shape == (512, 3, 49, 32)
    assert QFLASH["A1"].operations == 4 * 3 * 197 * 197 * 64


@pytest.mark.parametrize(
    "case", [c for c in {c.name: c for c in (*COLUMNS, *HARD)}.values() if c.shape[2] <= 1024], ids=lambda c: c.name
)
def test_inputs_follow_the_seed(case):
    first, again, other = case.inputs(1), case.inputs(1), case.inputs(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
    assert first[1].shape == case.shape and first[0].shape[2] == min(case.rows or case.shape[2], case.shape[2])


def test_kept_rows_include_the_largest_query():
    few = random_case("few", 512, normal(), rows=16)
    every = InputCase("all", few.shape, few.draw)
    q, q_all = few.inputs(0)[0], every.inputs(0)[0]
    assert q.shape[2] == 16 and q.abs().max() == q_all.abs().max()


def test_sink_is_ten_octaves_above_the_keys_without_it():
    q, k, v = next(c for c in HARD if c.name == "sink 4k").inputs()
    octaves = (q[0, 0] @ k[0, 0, 0]) / 8 * 1.4426950408889634
    assert torch.allclose(octaves, torch.tensor(10.0)) and v[:, :, 0].abs().max() == 0
