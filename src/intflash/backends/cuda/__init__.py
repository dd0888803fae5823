"""The CUDA backend: attention kernels in CUDA C++ for Hopper GPUs (sm_90a), with the same bits as the reference.

On Hopper they are faster than the Triton kernels, and they do not need Triton. CUDA's Python bindings are imported when
the backend is first asked whether it is available; where they are missing, the answer says so.
"""

from __future__ import annotations

import torch

from intflash.backends.base import Backend
from intflash.backends.features import (
    ANY_GRANULARITY,
    CODES,
    FLOAT_INPUTS,
    FLOAT_OUTPUT,
    INTEGER_OUTPUT,
    QUANTIZATION,
    per,
)  # fmt: skip
from intflash.problem import Problem, Result


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not _on_hopper():
        return f"its kernels are for compute capability 9.0, this GPU has {torch.cuda.get_device_capability()}"
    from intflash.backends.cuda import program

    return program.unavailable()


def _limits(problem: Problem) -> str | None:
    from intflash.backends.cuda import backend

    return backend.unsupported(problem)


def _run(problem: Problem) -> Result:
    from intflash.backends.cuda import backend

    return backend.run(problem)


def machine_code(file: str, kernel: str, macros: tuple[tuple[str, str], ...]) -> bytes | None:
    """The machine code of a program of csrc/cuda for the native call path; None where nothing can be compiled."""
    from intflash.backends.cuda import program

    try:
        return program.machine_code(program.CudaProgram.named(file, kernel, macros))
    except (ImportError, OSError):  # `unavailable` says what is missing
        return None


# backend.py decides which kernel serves a problem, by its shape and layout.
_SERVED = frozenset.union(
    FLOAT_INPUTS, CODES, QUANTIZATION, FLOAT_OUTPUT, {"causal mask", "grouped heads", "log-sum-exp"}
)
_INTFLASH = _SERVED | INTEGER_OUTPUT | per("tensor head token block", "tensor head", "tensor head")
_WINDOWS = {"integer bias", "bool mask"}
SERVES = {
    "intflash": _INTFLASH | _WINDOWS,
    "intflash_p8": _INTFLASH | _WINDOWS,
    "intflash_online": _INTFLASH,
    "lite": _SERVED | ANY_GRANULARITY,
    "int_flash_half": _SERVED | ANY_GRANULARITY,
}
BACKEND = Backend("cuda", _unavailable, SERVES, _limits, _run, native=_on_hopper)
