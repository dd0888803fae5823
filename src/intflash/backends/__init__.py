"""The backends, and the choice among them. A new backend is a new module here that exports BACKEND."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil

from intflash.backends.base import Backend
from intflash.errors import BackendError, InputError
from intflash.problem import Problem

logger = logging.getLogger("intflash")

AUTOMATIC = {"cuda": ("cuda", "triton", "torch", "reference"), "cpu": ("cpu", "torch", "reference")}


@functools.cache
def backends() -> dict[str, Backend]:
    """Every backend by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {module.BACKEND.name: module.BACKEND for module in modules if hasattr(module, "BACKEND")}


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    if name == "hopper":
        raise InputError("backend 'hopper' is named 'cuda': pass backend=\"cuda\"")
    try:
        return backends()[name]
    except (KeyError, TypeError):
        raise InputError(f"unknown backend {name!r}; there are: {', '.join(sorted(backends()))}") from None


def why_not(backend: Backend, problem: Problem) -> str | None:
    """Why this backend cannot serve this problem here, or None."""
    return backend.unavailable() or backend.unsupported(problem)


def select(problem: Problem, name: str | None) -> Backend:
    """The backend asked for, or with None the best that can serve.

    Raises:
        BackendError: the one asked for cannot serve, or none can; the message says why.
    """
    if name is not None:
        backend = get_backend(name)
        reason = why_not(backend, problem)
        if reason is not None:
            raise BackendError(f"backend {name!r} cannot serve method {problem.method!r}: {reason}")
        return backend
    reasons = []
    for candidate in AUTOMATIC.get(problem.device.type, ("torch", "reference")):
        backend = backends().get(candidate)
        if backend is None:
            continue
        reason = backend.unavailable()
        if reason is not None:
            if backend.native():
                _warn_once(f"the fast backend {candidate!r} is not available, a slower one serves: {reason}")
        else:
            reason = backend.unsupported(problem)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise BackendError(f"no backend can serve method {problem.method!r}: " + "; ".join(reasons))


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
