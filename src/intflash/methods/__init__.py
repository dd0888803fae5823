"""The attention methods, and which of them "auto" is. A new method is a new file here that exports METHODS."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import NamedTuple

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


class Rule(NamedTuple):
    """`method` serves calls of at most `keys` keys."""

    keys: float
    method: str


AUTO = "auto"  # the default of every call, patched model and calibration
# What "auto" is: the first rule that has a call's number of keys. All of its methods are accurate for all scores
# (tests/methods/test_two_groups.py), and have one recipe, one set of granularities and one unit of the bias.
AUTO_RULES = (Rule(math.inf, "intflash_bfp"),)


def resolve(method: str, keys: int) -> str:
    """Returns the method's name, of "auto" the one for so many keys. It depends on nothing else.

    >>> resolve("auto", 197), resolve("qflash", 197)
    ('intflash_bfp', 'qflash')
    """
    if method != AUTO:
        return method
    for rule in AUTO_RULES:  # most calls ask: a generator takes longer
        if keys <= rule.keys:
            break
    return rule.method


def example(method: str) -> Method:
    """Returns a method; of "auto" one that has the recipe, the granularities and the bias of all that it may be."""
    return get_method(AUTO_RULES[0].method if method == AUTO else method)


def get_method(name: str) -> Method:
    """Returns the method of that name.

    Raises:
        InputError: there is no such method; the message lists all methods.
    """
    try:
        return METHODS[name]
    except (KeyError, TypeError):
        raise InputError(f"unknown method {name!r}; there are: {AUTO}, {', '.join(METHODS)}") from None
