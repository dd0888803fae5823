"""Attention for Hopper GPUs (sm_90a) in CUDA C++: the same bits as the reference, and the speed that Triton's kernels
leave there. Scales, codes and constants are made by the Triton backend's small kernels.

CUDA's Python bindings are imported at the first question about the backend, and where they are missing the answer
says so.
"""

from __future__ import annotations

import importlib.util

import torch

from intflash.backends.base import Backend
from intflash.problem import Problem, Result


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not _on_hopper():
        return f"its kernels are for compute capability 9.0, this GPU has {torch.cuda.get_device_capability()}"
    if importlib.util.find_spec("triton") is None:
        return "triton, which makes its scales and constants, is not installed"
    from intflash.backends.hopper import program

    return program.unavailable()


def _unsupported(problem: Problem) -> str | None:
    from intflash.backends.hopper import backend

    return backend.unsupported(problem)


def _run(problem: Problem) -> Result:
    from intflash.backends.hopper import backend

    return backend.run(problem)


BACKEND = Backend("hopper", _unavailable, _unsupported, _run, native=_on_hopper)
