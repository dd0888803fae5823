"""Integer attention for NVIDIA GPUs in Triton: the same bits as the reference.

Triton is imported at the first question about the backend, and where it is not installed the answer says so.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

from intflash.backends.base import Backend
from intflash.problem import Problem, Result


def _module() -> ModuleType:
    from intflash.backends.triton import backend

    return backend


def _unavailable() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a mere folder of that name has no origin
        return "triton is not installed"
    return _module().unavailable()


def _unsupported(problem: Problem) -> str | None:
    return _module().unsupported(problem)


def _run(problem: Problem) -> Result:
    return _module().run(problem)


BACKEND = Backend("triton", _unavailable, _unsupported, _run, native=lambda: True)
