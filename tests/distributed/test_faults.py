"""A wrong call on one rank, or a rank that ends, gives every rank an error that names it: no hang, no wrong result."""

import re

import pytest
import torch
import torch.distributed as dist

import intflash
from distributed.processes import answers, run
from intflash.distributed import attention

SHAPES = r"q is torch.float32 \[1, 4, 24, 16\] on ranks \[0, 1\], torch.float32 \[1, 4, 18, 16\] on ranks \[2\]"
DISAGREEMENTS = {
    "shape": SHAPES,
    "dtype": r"q is torch.float32 .* on ranks \[0, 1\], torch.float16 .* on ranks \[2\]",
    "method": r"method is intflash on ranks \[0, 1\], intflash_p8 on ranks \[2\]",
    "scale": r"scale is 0.25 on ranks \[0, 1\], 0.5 on ranks \[2\]",
    "causal": r"is_causal is False on ranks \[0, 1\], True on ranks \[2\]",
    "layout": r"layout is contiguous on ranks \[0, 1\], zigzag on ranks \[2\]",
    "recipe": r"recipe is .*0.2.* on ranks \[0, 1\], .*0.1.* on ranks \[2\]",
    "codes": r"q is 8-bit codes .*0.2.* on ranks \[0, 1\], 8-bit codes .*0.1.* on ranks \[2\]",
    "nan": r"rank 2 of 3: InputError: q must be finite, got 1 non-finite of 512 values",
    "option": r"rank 2 of 3: TypeError: unknown arguments: colour",
    "kind": r"rank 2 of 3: InputError: q, k and v must be all float tensors, all QTensors, or .*, got NoneType",
    "mask": r"rank 2 of 3: InputError: attn_mask must broadcast to \[1, 4, 8, 24\], got shape \[1, 1, 1, 16\]",
    "bias": r"rank 2 of 3: InputError: bias must not hold NaN",
}
NOT_SERVED = {
    "packed": "packed sequences .* are not sharded",
    "dynamic": "out_scale='dynamic' needs all outputs",
    "method": "has the methods intflash, intflash_p8, intflash_online, intflash_bfp, got 'fp16'",
    "codes of keys": "q, k and v all floats or all QTensors, got a float q beside QTensors k and v",
    "axes": r"must be \[B, H, n, D\], got \[4, 8, 16\]",
    "layout": "layout must be one of .*got 'striped'",
    "queries": "queries must be one of .*got 'some'",
    "scheme": "scheme must be one of .*got 'ring'",
    "chunks": "chunks must be an integer of at least 1, got 0",
    "length": r"must hold 20 of 40 key tokens \(contiguous\), got 8",
    "heads": "1 key heads do not divide among 2 ranks",
    "rows": "a mask with a row for each query",
    "merge": "only replicated ones are merged",
    "merge online": "'intflash_online' has no maximum and sums to merge",
    "merge cpu": "backend 'cpu' gives no integer sums",
    "local": "every rank has all keys",
    "causal": "needs as many keys as queries, got 16 and 8",
    "blocks": "q? ?k has a scale for each block of 5 tokens",
    "replicated length": "key_length is 9, but every rank has all key tokens, 8",
    "group": "group must be a ProcessGroup or DeviceMesh",
    "backend": "BackendError: .*cuda",
}


def test_what_differs_between_ranks_is_found_on_every_rank():
    found = answers(run(3, "distributed.faults:disagreements"))
    for rank, seen in enumerate(found):
        assert seen.pop("scheme") == "no error", rank  # the one that is taken by default: equal in effect
        assert seen.keys() == DISAGREEMENTS.keys()
        for name, message in seen.items():
            # the rank whose own arguments are wrong says so without its number
            pattern = DISAGREEMENTS[name].removeprefix("rank 2 of 3: ") if rank == 2 else DISAGREEMENTS[name]
            assert re.search(pattern, message), f"{name} on rank {rank}: {message}"


def test_a_killed_rank_is_named_by_the_others():
    *found, last = run(3, "distributed.faults:killed")
    assert last is None
    for first, second, seconds in answers(found):
        assert re.search(r"DistributedError: all_reduce failed on rank [01] .*ranks \[2\] have ended", first), first
        assert "an earlier call on this process group failed" in second
        assert seconds < 30


def test_a_stuck_rank_ends_the_others_at_the_timeout():
    *found, last = run(3, "distributed.faults:stuck", timeout_s=2)
    for message, seconds in answers(found):
        assert re.search(r"all_reduce failed on rank [01] .*ranks \[2\] have ended or do not answer", message), message
        assert 1 < seconds < 20


def test_what_is_not_served_is_refused_with_a_reason():
    for seen in answers(run(2, "distributed.faults:not_served")):
        for name, pattern in NOT_SERVED.items():
            assert re.search(pattern, seen[name]), f"{name}: {seen[name]}"


def test_without_torch_distributed():
    assert not dist.is_initialized()
    with pytest.raises(intflash.InputError, match="torch.distributed is not initialized"):
        attention(*(torch.randn(1, 1, 4, 16) for _ in range(3)))
