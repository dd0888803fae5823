"""What a backend is: its lists of what it serves, and its functions. Reasons are sentences; None means it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from intflash.backends.features import unserved
from intflash.problem import Problem, Result


@dataclass(frozen=True)
class Backend:
    """A way to run problems.

    Attributes:
        name: the value of ``backend=``.
        unavailable: why it cannot run on this machine at all, or None.
        serves: method -> the features of problems that it serves (backends/features.py). All others are refused.
        limits: why it cannot serve a problem of these features: its shape, its device, or a combination of features.
        run: the computation; the problem is supported and its tensors are not changed.
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

    def unsupported(self, problem: Problem) -> str | None:
        """Why it cannot serve this problem, or None."""
        return unserved(problem, self.serves) or self.limits(problem)
