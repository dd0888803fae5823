"""The CUDA backend: attention kernels in CUDA C++ for NVIDIA GPUs of compute capability 8.0 and newer, with the same
bits as the reference.

One kernel serves every shape on each of these GPUs, others serve particular shapes faster, short and long rows only on
Hopper (sm_90a). They do not need Triton. The native module plans and launches them, and CUDA's Python bindings compile
them; where either is missing, the backend says so.
"""

from __future__ import annotations

import functools

import torch

from intflash.backends.base import Backend
from intflash.backends.features import (
    ANY_GRANULARITY,
    CODES,
    FLOAT_INPUTS,
    FLOAT_OUTPUT,
    FLOAT_QUERY,
    INTEGER_OUTPUT,
    QUANTIZATION,
    per,
)  # fmt: skip
from intflash.problem import Problem, Result


def _has_kernels() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not _has_kernels():
        return f"its kernels need compute capability 8.0, this GPU has {torch.cuda.get_device_capability()}"
    from intflash.backends.cuda import program

    return program.unavailable()


def _limits(problem: Problem) -> str | None:
    from intflash.backends.cuda import backend

    return backend.unsupported(problem)


def _run(problem: Problem) -> Result:
    from intflash.backends.cuda import backend

    return backend.run(problem)


@functools.cache  # where nothing can be compiled, that is found out once for each program
def machine_code(file: str, kernel: str, macros: tuple[tuple[str, str], ...]) -> bytes | None:
    """The machine code of a program of csrc/cuda for the native call path, which serves Hopper; None where nothing can
    be compiled."""
    from intflash.backends.cuda import program

    try:
        return program.machine_code(program.CudaProgram.named(file, kernel, macros), program.HOPPER)
    except (ImportError, OSError):  # `unavailable` says what is missing
        return None


# The native module decides which kernel serves a problem, by its shape and layout.
_SERVED = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, FLOAT_OUTPUT, {"causal mask", "grouped heads", "log-sum-exp"}
)
_INTFLASH = _SERVED | INTEGER_OUTPUT | per("tensor head token block", "tensor head", "tensor head")
_MASKS = {"bool mask", "packed sequences", "sliding window"}
SERVES = {
    "intflash": _INTFLASH | _MASKS | {"integer bias"},
    "intflash_p8": _INTFLASH | _MASKS | {"integer bias"},
    "intflash_online": _INTFLASH | _MASKS,
    "intflash_bfp": _INTFLASH | _MASKS | {"integer bias"},
    "lite": _SERVED | ANY_GRANULARITY,
    "int_flash_half": _SERVED | ANY_GRANULARITY,
}
BACKEND = Backend("cuda", _unavailable, SERVES, _limits, _run, native=_has_kernels)
