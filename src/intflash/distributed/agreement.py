"""Whether all ranks make the same call, found before data moves, in the all-reduce that also makes shared scales.

A rank whose arguments are refused takes part with a fingerprint of its own, so that no rank waits for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from intflash.distributed.groups import Ranks
from intflash.distributed.traffic import FINGERPRINT, STAMP
from intflash.errors import InputError

ERROR = "error"  # the fact of a rank whose arguments were refused
_WORDS = 2  # of 31 bits
Facts = Mapping[str, str]


def agree(ranks: Ranks, facts: Facts, maxima: Tensor | None, device: torch.device, read: bool) -> Tensor:
    """The maxima over all ranks of int32 (see `codes.bits_of`) of a call that all ranks make.

    Args:
        facts: all that must be equal on all ranks, by name; `ERROR` alone where this rank's arguments were refused.
        maxima: int32, at most FINGERPRINT - STAMP of them, or None.
        read: whether the host waits for the answer. Where it does not, on a GPU on which a call with these facts went
            well before, a disagreement fails an assertion on the device, before any output can be used.

    Raises:
        InputError: the ranks' facts differ; the message shows how.
    """
    words = _fingerprint(tuple(facts.items()))
    stamp = _stamp(words, read, device)
    maxima = stamp[:0] if maxima is None else maxima
    sent = torch.cat((stamp, maxima, _zeros(FINGERPRINT - STAMP - len(maxima), device)))
    found = ranks.reduce(sent, dist.ReduceOp.MAX)
    if not read:
        torch._assert_async((found[: 2 * _WORDS] == stamp[: 2 * _WORDS]).all(), "the ranks' calls differ")
    elif found[: 2 * _WORDS].tolist() != stamp[: 2 * _WORDS].tolist():
        all_read = found[2 * _WORDS].item() == 0
        if all_read:
            raise InputError(_difference(ranks.describe(dict(facts))))
        why = f"another rank makes another call than this one: {_shown(facts)}"
        for group in ranks.groups:
            group.give_up(why)
        raise InputError(why)
    return found[STAMP : STAMP + len(maxima)]


@functools.lru_cache(4096)
def _fingerprint(facts: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=4 * _WORDS).digest()
    return tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "little") >> 1 for i in range(_WORDS))


@functools.lru_cache(4096)
def _stamp(words: tuple[int, ...], read: bool, device: torch.device) -> Tensor:
    """Each word and its complement, whose maxima over the ranks are their own only where all are equal; 1 where the
    host does not read."""
    stamp = torch.tensor([x for word in words for x in (word, ~word)] + [int(not read)], dtype=torch.int32)
    assert len(stamp) == STAMP
    return stamp.to(device)


@functools.lru_cache(64)
def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _difference(facts: list[Facts]) -> str:
    """What differs between the ranks, which ranks say what."""
    refused = {rank: x[ERROR] for rank, x in enumerate(facts) if ERROR in x}
    if refused:
        return "; ".join(f"rank {rank} of {len(facts)}: {why}" for rank, why in refused.items())
    lines = []
    for name in facts[0]:
        said: dict[str, list[int]] = {}
        for rank, x in enumerate(facts):
            said.setdefault(x.get(name, "nothing"), []).append(rank)
        if len(said) > 1:
            lines.append(f"{name} is " + ", ".join(f"{value} on ranks {where}" for value, where in said.items()))
    return "the ranks must make the same call: " + "; ".join(lines)


def _shown(facts: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value != "None")
