"""The Triton backend: every method on NVIDIA GPUs of compute capability 8.0 or newer. The integer methods have the same
bits as the reference.

Triton is imported when the backend is first asked whether it is available; where it is missing, the answer says so.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from importlib import metadata
from types import ModuleType

from intflash.backends.base import Backend
from intflash.backends.features import (
    ANY_GRANULARITY,
    CODES,
    FLOAT_INPUTS,
    FLOAT_OUTPUT,
    FLOAT_QUERY,
    INTEGER_OUTPUT,
    MASKS,
    QUANTIZATION,
    per,
)  # fmt: skip
from intflash.problem import Problem, Result

OLDEST = (3, 6)  # the oldest Triton release that the kernels are tested with


def _module() -> ModuleType:
    from intflash.backends.triton import backend

    return backend


def _unavailable() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a plain folder of that name has no origin
        return "triton is not installed"
    return _too_old() or _module().unavailable()


@functools.cache
def _too_old() -> str | None:
    """Returns why the installed Triton cannot compile the kernels, or None. A build without metadata is assumed to
    be new enough.
    """
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) >= OLDEST:
        return None
    return f"it needs Triton {OLDEST[0]}.{OLDEST[1]} or newer, which torch 2.11 brings; Triton {version} is installed"


def _limits(problem: Problem) -> str | None:
    return _module().unsupported(problem)


def _run(problem: Problem) -> Result:
    return _module().run(problem)


_SERVED = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, INTEGER_OUTPUT, FLOAT_OUTPUT, MASKS,
    per("tensor head", "tensor head", "tensor head"), {"grouped heads", "log-sum-exp"},
)  # fmt: skip
_PACKED = _SERVED | {"packed sequences", "sliding window"}
_INTFLASH = _PACKED | per("token block", "block", "channel") | {"out_scale per channel"}
_FLOAT = _PACKED | ANY_GRANULARITY | {"out_scale per channel"}
SERVES = (
    dict.fromkeys(("intflash", "intflash_p8", "intflash_online", "intflash_bfp"), _INTFLASH)
    | dict.fromkeys(("qflash", "iflash"), _PACKED)
    | dict.fromkeys(("ivit", "ibert", "fqvit"), _SERVED | per(v="channel") | {"out_scale per channel"})
    | dict.fromkeys(("int_flash_full", "int_flash_half", "lite", "qattn", "fp16", "bf16", "fp32"), _FLOAT)
    | dict.fromkeys(("fp8", "fp8_head"), _FLOAT - {"packed sequences"})
)
BACKEND = Backend("triton", _unavailable, SERVES, _limits, _run, native=lambda: True)
