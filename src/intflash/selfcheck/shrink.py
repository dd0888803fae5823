"""From a failing case to the smallest one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from intflash.selfcheck.cases import Case, MaskCase

_DEFAULTS = {f.name: f.default for f in fields(Case) if f.name not in ("values_seed", "method")}
_SIZES = ("nk", "nq", "d", "dv", "hq", "hk", "block_size")
_MASK_DEFAULTS = {f.name: f.default for f in fields(MaskCase) if f.name not in ("kind", "axes")}


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 20.0) -> Case:
    """The simplest case found that still fails, by simplifying one thing at a time until nothing helps.

    Args:
        fails: whether a case fails in the way that is looked for.
        seconds: after which the simplest so far is taken.
    """
    end = time.monotonic() + seconds
    tried: set[Case] = {case}
    again = True
    while again:
        again = False
        for simpler in _simpler(case):
            if simpler in tried or not possible(simpler):
                continue
            if time.monotonic() > end:
                return case
            tried.add(simpler)
            if fails(simpler):
                case, again = simpler, True
                break
    return case


def possible(case: Case) -> bool:
    """Whether the fields of a case go together: the shapes of a valid call, but for its fault."""
    if case.hq % case.hk or case.headless and (case.hq, case.hk) != (1, 1):
        return False
    codes = [i for i, name in enumerate("qkv") if case.has_codes(name)]
    if codes and (case.granularity is None or case.headless or len(case.batch) != 1):
        return False
    if any(case.granularity[i] == "none" for i in codes):
        return False
    if case.cache and (case.inputs == "codes" or any(case.static[1:]) or case.smooth_k or case.rotate):
        return False
    if case.packed is not None and (case.flat_batch != 1 or len(case.batch) > 1 or case.headless):
        return False
    if case.out_scale is not None and not case.integer_output:
        return False
    most = len(case.lead) + (2 if case.headless else 3)
    return all(mask is None or len(mask.axes) <= most for mask in (case.mask, case.bias))


def size(case: Case) -> int:
    """How much a reader has to look at: elements, and each choice that is not the usual one."""
    elements = case.flat_batch * (case.hq * case.nq * case.d + case.hk * case.nk * (case.d + case.dv))
    return elements + 20 * sum(getattr(case, name) != usual for name, usual in _DEFAULTS.items())


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one thing, those that save most first."""
    if len(case.turns) > 1:
        yield from (replace(case, turns=(turn,)) for turn in case.turns)
        yield replace(case, turns=case.turns[-2:])
        yield replace(case, turns=case.turns[:2])
    for name in (
        "mask",
        "bias",
        "packed",
        "fault",
        "granularity",
        "causal",
        "window",
        "out_scale",
        "lse",
        "moved",
        "compiled",
    ):
        yield from _usual(case, name)
    yield from _usual(case, "static", "granularity", "smooth_k", "rotate", "bits", "rule")
    if case.inputs == "codes":
        yield replace(case, inputs="float32", granularity=None, out_dtype=case.out_dtype or "int8")
    for name in _DEFAULTS:
        if name not in (*_SIZES, "turns", "batch", "graphed"):
            yield from _usual(case, name)
    if case.batch != (1,):
        yield replace(case, batch=(1,), headless=False)
        for i, n in enumerate(case.batch):
            yield from (replace(case, batch=(*case.batch[:i], m, *case.batch[i + 1 :])) for m in _smaller(n))
    if case.hq != case.hk:
        yield replace(case, hq=case.hk)
    if case.hq > 1:
        group = case.hq // case.hk
        yield from (replace(case, hq=n * group, hk=n) for n in _smaller(case.hk))
    if case.nq == case.nk:
        yield from (replace(case, nq=n, nk=n) for n in _smaller(case.nq))
    if case.d == case.dv:
        yield from (replace(case, d=n, dv=n) for n in _smaller(case.d))
    for name in _SIZES:
        yield from (replace(case, **{name: n}) for n in _smaller(getattr(case, name)))
    for name in ("layouts", "offsets", "static", "granularity"):
        yield from _one_usual(case, name)
    if case.packed is not None:
        yield from (replace(case, packed=n) for n in _smaller(case.packed))
    for name in ("mask", "bias"):
        mask = getattr(case, name)
        if mask is not None:
            yield from (replace(case, **{name: simpler}) for simpler in _simpler_masks(mask))


def _usual(case: Case, *names: str) -> Iterator[Case]:
    """The case with these fields as they usually are, if one is not."""
    usual = {name: _DEFAULTS[name] for name in names}
    if any(getattr(case, name) != value for name, value in usual.items()):
        yield replace(case, **usual)


def _one_usual(case: Case, name: str) -> Iterator[Case]:
    """The case with one of q, k and v as it usually is."""
    usual: dict[str, Any] = dict(layouts="contiguous", offsets=0, static=None, granularity="tensor")
    found = getattr(case, name)
    for i in range(3 if found is not None else 0):
        if found[i] != usual[name]:
            yield replace(case, **{name: (*found[:i], usual[name], *found[i + 1 :])})


def _simpler_masks(mask: MaskCase) -> Iterator[MaskCase]:
    for name, usual in _MASK_DEFAULTS.items():
        if getattr(mask, name) != usual:
            yield replace(mask, **{name: usual})
    if len(mask.axes) > 1:
        yield replace(mask, axes=mask.axes[:-1])
    for i, kind in enumerate(mask.axes):
        if kind != "one":
            yield replace(mask, axes=(*mask.axes[:i], "one", *mask.axes[i + 1 :]))
    if mask.kind not in ("bool", "float32"):
        yield replace(mask, kind="float32")


def _smaller(n: int) -> list[int]:
    """Sizes to try for one, the smallest first."""
    return sorted({m for m in (1, 2, 8, n // 4, n // 2, n - n // 4, n - 8, n - 1) if 0 < m < n})
