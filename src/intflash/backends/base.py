"""What a backend is: its lists of what it serves, and its functions. Reasons are sentences; None means it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from intflash.backends.features import unserved
from intflash.problem import Problem, Result


class Partial(NamedTuple):
    """The steps of a method whose sums are exact, for ranks that hold some of the keys each.

    Attributes:
        methods: those that it can compute so.
        maxima(problem): each row's Tmax over the problem's keys, int64 ``[B, Hq, Nq, 1]``; below every score without
            keys.
        sums(problem, t_max): acc and l of the problem's keys below a maximum of more keys, int64
            ``[B, Hq, Nq, Dv + 1]``, l last.
        finish(problem, t_max, sums): the result of the maxima and sums of all keys.
    """

    methods: tuple[str, ...]
    maxima: Callable[[Problem], Tensor]
    sums: Callable[[Problem, Tensor], Tensor]
    finish: Callable[[Problem, Tensor, Tensor], Result]


@dataclass(frozen=True)
class Backend:
    """A way to run problems.

    Attributes:
        name: the value of ``backend=``.
        unavailable: why it cannot run on this machine at all, or None.
        serves: method -> the features of problems that it serves (backends/features.py). All others are refused.
        limits: why it cannot serve a problem of these features: its shape, its device, or a combination of features.
        run: the computation; the problem is supported and its tensors are not changed.
        partial: how it computes some of the keys of a problem of codes, without packed sequences; None where it cannot.
        looks: whether `run` itself raises InputError for NaN and infinity where the problem says `check_finite`.
        native(): whether its absence on this machine is worth a warning when another backend serves instead.
    """

    name: str
    unavailable: Callable[[], str | None]
    serves: Mapping[str, frozenset[str]]
    limits: Callable[[Problem], str | None]
    run: Callable[[Problem], Result]
    native: Callable[[], bool] = lambda: False
    looks: bool = False
    partial: Partial | None = None

    def unsupported(self, problem: Problem) -> str | None:
        """Why it cannot serve this problem, or None."""
        return unserved(problem, self.serves) or self.limits(problem)
