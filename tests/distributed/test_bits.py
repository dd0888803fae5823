"""The bits of sharded attention are those of one process on any number of ranks, and its bytes those of the formula."""

import pytest

from distributed.processes import answers, run


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_rank_has_the_bits_of_one_process(world):
    assert answers(run(world, "distributed.cases:run_cases")) == [{}] * world
