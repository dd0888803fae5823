"""All-pairs test cases: every pair of values of any two factors occurs in some case."""

from __future__ import annotations

import itertools
from typing import Any


def pairwise(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """A small set of cases that covers all pairs; greedy and deterministic."""
    names = list(factors)
    indices = {n: range(len(factors[n])) for n in names}
    wanted = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in indices[a] for j in indices[b]}
    cases = []
    while wanted:
        (a, i), (b, j) = min(wanted)
        case = {a: i, b: j}
        for name in names:
            if name not in case:
                gain = {v: _covered({**case, name: v}, name, wanted, names) for v in indices[name]}
                case[name] = max(gain, key=gain.get)
        wanted -= {((x, case[x]), (y, case[y])) for x, y in itertools.combinations(names, 2)}
        cases.append({n: factors[n][case[n]] for n in names})
    return cases


def _covered(case: dict[str, int], name: str, wanted: set, names: list[str]) -> int:
    """How many wanted pairs the value of `name` adds to a case."""
    others = [(other, value) for other, value in case.items() if other != name]
    pairs = (sorted([(name, case[name]), other], key=lambda p: names.index(p[0])) for other in others)
    return sum(tuple(pair) in wanted for pair in pairs)
