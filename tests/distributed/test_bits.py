"""The bits of sharded attention are those of one process on any number of ranks, and its bytes those of the formula."""

import pytest
import torch

import intflash
from distributed.processes import answers, run
from intflash.distributed import bytes_sent
from intflash.distributed.shards import Shards


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_rank_has_the_bits_of_one_process(world):
    assert answers(run(world, "distributed.cases:run_cases")) == [{}] * world


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_on_gpus(world):
    """The same on NCCL, every rank with a GPU of its own."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, needs {world}")
    assert answers(run(world, "distributed.cases:run_cases", backend="nccl")) == [{}] * world


def test_bytes_of_the_schemes():
    """Written out for one shape: 6 query heads over 2, 4 ranks of 25 tokens, D 16, Dv 24, float16 output."""
    q, k, v = (1, 6, 100, 16), (1, 2, 100, 16), (1, 2, 100, 24)
    keys = 2 * (25 * 16 + 32 * 24)  # and values, whose rows of keys have a multiple of 16
    assert bytes_sent(q, k, v, ranks=4) == 3 * keys
    row = 6 * 25 * (16 + 2 * 24) + keys  # a rank's queries, outputs, keys and values
    assert bytes_sent(q, k, v, ranks=2, scheme="ulysses") == row  # half of twice as much
    assert bytes_sent(q, k, v, ranks=(2, 2)) == row / 2 + keys
    token = (1, 6, 1, 16)
    assert bytes_sent(token, k, v, ranks=4, scheme="merge") == 2 * 3 / 4 * 8 * 6 * (1 + 24 + 1)
    with pytest.raises(intflash.InputError, match="scheme must be one of"):
        bytes_sent(q, k, v, ranks=4, scheme="ring")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("tokens, ranks", [(12, 1), (12, 2), (13, 3), (16, 4), (23, 4)])
def test_shards_cover_the_sequence_once(tokens, ranks, layout):
    shards = Shards(tokens, ranks, layout)
    x = torch.arange(tokens * 6).view(1, 2, tokens, 3)
    parts = x.new_full((ranks, 1, 2, shards.longest, 3), -1)
    for rank in range(ranks):
        parts[rank, :, :, : shards.size(rank)] = x[:, :, shards.positions(rank)]
    assert torch.equal(shards.collect(parts, torch.empty_like(x)), x)
    everyone = range(ranks)
    assert torch.equal(shards.collect(parts, torch.empty_like(x), everyone), x)
    assert torch.equal(shards.spread(x, torch.full_like(parts, -1), everyone), parts)
    assert sorted(torch.cat([shards.positions(r) for r in everyone]).tolist()) == list(range(tokens))
    assert shards.union(everyone) == [slice(0, tokens)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("length", [4, 6, 8, 16])  # words of 4, 2 and 8 bytes
def test_codes_are_collected_in_words(layout, length):
    """Of K, whose channels are contiguous, and of V, whose keys are, behind other bytes of a message."""
    shards = Shards(4 * length, 2, layout)
    x = torch.randint(-128, 128, (1, 2, 4 * length, length)).to(torch.int8)
    message = torch.zeros(2, 8 + 2 * 2 * length * (length + 16), dtype=torch.int8)
    k = message[:, 8 : 8 + 2 * 2 * length * length].view(2, 1, 2, 2 * length, length)
    room = torch.zeros(2, 1, 2, length, 2 * length + 16, dtype=torch.int8)
    v = room[..., : 2 * length].mT
    for rank in range(2):
        k[rank] = v[rank] = x[:, :, shards.positions(rank)]
    assert torch.equal(shards.collect(k, torch.empty_like(x)), x)
    keys = torch.zeros(1, 2, length, 4 * length + 8, dtype=torch.int8)
    assert torch.equal(shards.collect(v, keys[..., : 4 * length].mT), x)
    assert not keys[..., 4 * length :].any()


def test_zigzag_gives_causal_work_evenly():
    shards = Shards(64, 4, "zigzag")
    assert {int((shards.positions(rank) + 1).sum()) for rank in range(4)} == {64 * 65 // 2 // 4}
