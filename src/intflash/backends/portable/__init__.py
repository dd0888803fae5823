"""The portable backend: tiled, vectorized torch arithmetic on any device torch runs on.

Bit-exact with the golden reference for every integer method, and written apart from it: the two share
constants and quantizers only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from intflash.backends.base import Backend
from intflash.backends.portable import intflash
from intflash.problem import Problem, Result

_KERNELS: dict[str, Callable[[Problem], Result]] = {
    "intflash": partial(intflash.exact_maximum, bits=16),
    "intflash_p8": partial(intflash.exact_maximum, bits=8),
    "intflash_online": intflash.online,
}


def _unsupported(problem: Problem) -> str | None:
    if problem.method not in _KERNELS:
        return f"method {problem.method!r} has no portable kernel; there are: {', '.join(_KERNELS)}"
    return None


def _run(problem: Problem) -> Result:
    kernel = _KERNELS[problem.method]
    problem = problem.quantized()
    sequences = problem.sequences()
    if sequences is None:
        return kernel(problem)
    results = [kernel(s) for s in sequences]
    lse = torch.cat([r.lse for r in results], dim=2) if problem.return_lse else None
    return Result(torch.cat([r.out for r in results], dim=2), results[0].out_scale, lse)


BACKEND = Backend(name="torch", unavailable=lambda: None, unsupported=_unsupported, run=_run)
