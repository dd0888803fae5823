"""The attention methods. A new method is a new file here that exports METHODS."""

from __future__ import annotations

import importlib
import pkgutil

from intflash.errors import InputError
from intflash.methods.base import Method


def _collect() -> dict[str, Method]:
    found: dict[str, Method] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for method in getattr(importlib.import_module(f"{__name__}.{module}"), "METHODS", ()):
            if method.name in found:
                raise RuntimeError(f"method {method.name!r} is defined twice")
            found[method.name] = method
    return found


METHODS: dict[str, Method] = _collect()


def get_method(name: str) -> Method:
    """Returns the method of that name.

    Raises:
        InputError: there is no such method; the message lists all methods.
    """
    try:
        return METHODS[name]
    except (KeyError, TypeError):
        raise InputError(f"unknown method {name!r}; there are: {', '.join(METHODS)}") from None
