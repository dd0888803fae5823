"""What a backend is: a value with three functions. Reasons are sentences; None means it can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from intflash.problem import Problem, Result


@dataclass(frozen=True)
class Backend:
    """A way to run problems.

    Attributes:
        name: the value of ``backend=``.
        unavailable: why it cannot run on this machine at all, or None.
        unsupported: why it cannot serve this problem, or None.
        run: the computation; the problem is supported and its tensors are not changed.
        looks: whether `run` itself raises InputError for NaN and infinity where the problem says `check_finite`.
        native(): whether its absence on this machine is worth a warning when another backend serves instead.
    """

    name: str
    unavailable: Callable[[], str | None]
    unsupported: Callable[[Problem], str | None]
    run: Callable[[Problem], Result]
    native: Callable[[], bool] = lambda: False
    looks: bool = False
