"""All-pairs test cases: every possible pair of values of any two factors occurs in some case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


def pairwise(
    factors: dict[str, list[Any]], possible: Callable[[dict[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Returns a small set of possible cases that covers all possible pairs. Greedy and deterministic.

    Args:
        possible: whether a case, in which some factors may not be chosen yet, is possible.
    """
    names = list(factors)
    indices = {n: range(len(factors[n])) for n in names}
    wanted = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in indices[a] for j in indices[b]}
    cases = []

    def values(case: dict[str, int]) -> dict[str, Any]:
        return {n: factors[n][case[n]] for n in names if n in case}

    def completed(case: dict[str, int]) -> dict[str, int] | None:
        """Completes a case with the values that cover most pairs, while it stays possible; None if it cannot be
        completed.
        """
        if not possible(values(case)):
            return None
        name = next((n for n in names if n not in case), None)
        if name is None:
            return case
        gain = {v: _covered({**case, name: v}, name, wanted, names) for v in indices[name]}
        tried = (completed({**case, name: v}) for v in sorted(gain, key=gain.get, reverse=True))
        return next((found for found in tried if found is not None), None)

    while wanted:
        pair = min(wanted)
        case = completed(dict(pair))
        wanted.discard(pair)
        if case is not None:
            wanted -= {((x, case[x]), (y, case[y])) for x, y in itertools.combinations(names, 2)}
            cases.append(values(case))
    return cases


def _covered(case: dict[str, int], name: str, wanted: set, names: list[str]) -> int:
    """Returns how many uncovered pairs the value of `name` adds to a case."""
    others = [(other, value) for other, value in case.items() if other != name]
    pairs = (sorted([(name, case[name]), other], key=lambda p: names.index(p[0])) for other in others)
    return sum(tuple(pair) in wanted for pair in pairs)
