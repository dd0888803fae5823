"""The features of a problem, by name, and which of them a backend serves.

A backend lists, for each method it has, the features it serves; a problem with any other is refused. So a new field of
`Problem`, `Recipe` or `QTensor`, a new granularity or dtype is refused by every backend until its author names it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from intflash.methods import AUTO, AUTO_RULES
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

# What backends share, to be named in their lists. A name that is added here is promised by each that lists the group.
FLOAT_INPUTS = frozenset({"float32 inputs", "float16 inputs", "bfloat16 inputs"})
CODES = frozenset({"int8 codes", "8-bit codes", "4-bit codes"})
FLOAT_QUERY = frozenset({"float q beside codes of k and v"})
QUANTIZATION = frozenset({"8-bit codes", "4-bit codes", "rule 'exact'", "rule 'divide'", "static scales"})
INTEGER_OUTPUT = frozenset({"int8 output", "int16 output", "out_scale per tensor", "out_scale per head"})
FLOAT_OUTPUT = frozenset({"float32 output", "float16 output", "bfloat16 output"})
MASKS = frozenset({"integer bias", "float bias", "bool mask", "causal mask"})


def per(q: str = "", k: str = "", v: str = "") -> frozenset[str]:
    """The granularities of q, k and v, separated by blanks; "none" is a tensor that stays in floating point."""
    return frozenset(f"{name} per {kind}" for name, kinds in (("q", q), ("k", k), ("v", v)) for kind in kinds.split())


ANY_GRANULARITY = per(*["none tensor head token block channel"] * 3)
EVERY = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, INTEGER_OUTPUT, FLOAT_OUTPUT, MASKS, ANY_GRANULARITY,
    {"out_scale per channel", "grouped heads", "packed sequences", "log-sum-exp", "sliding window"},
)  # fmt: skip


def features(problem: Problem) -> set[str]:
    """What a backend must serve to compute this problem, besides its method, shapes and device.

    K smoothing and rotation are done before a backend sees the tensors, and `check_finite` is for `call.py` where the
    backend does not look: none of them is a feature.
    """
    recipe, tensors = problem.recipe, (problem.q, problem.k, problem.v)
    found = {f"{_name(problem.out_dtype)} output", *_unknown(problem, _PROBLEM)}
    for x in tensors:  # beside codes of q and k, v may be in floating point: its recipe says "none"
        if isinstance(x, Tensor):
            found.add(f"{_name(x.dtype)} inputs")
        else:
            found.update((f"{_name(x.data.dtype)} codes", f"{x.bits}-bit codes", *_unknown(x, _QTENSOR)))
    if isinstance(problem.q, Tensor):
        kinds = tuple(recipe.granularity_of(name, x) for name, x in zip("qkv", tensors, strict=True))
        if isinstance(problem.k, QTensor):
            found.update(FLOAT_QUERY)
        found.update(_unknown(recipe, _RECIPE))
        if kinds != ("none", "none", "none"):
            found.update((f"{recipe.bits}-bit codes", f"rule {recipe.rule!r}"))
        if not recipe.q_scale is recipe.k_scale is recipe.v_scale is None:
            found.add("static scales")
    else:
        kinds = tuple("none" if isinstance(x, Tensor) else x.granularity for x in tensors)
    found.update((f"q per {kinds[0]}", f"k per {kinds[1]}", f"v per {kinds[2]}"))
    if problem.q.shape[1] != problem.k.shape[1]:
        found.add("grouped heads")
    for field, name in _GIVEN.items():
        if getattr(problem, field) is not None:
            found.add(name)
    if problem.return_lse:
        found.add("log-sum-exp")
    if problem.out_scale is not None:
        shape = problem.out_scale.shape
        found.add(
            f"out_scale per {'channel' if shape[3] > 1 else 'head' if shape[0] > 1 or shape[1] > 1 else 'tensor'}"
        )
    return found


_GIVEN = {
    "bias": "integer bias", "bias_float": "float bias", "keep": "bool mask", "causal": "causal mask",
    "window_start": "sliding window", "cu_seqlens_q": "packed sequences",
}  # fmt: skip
# The fields that `features` knows, and those that ask nothing of a backend.
_PROBLEM = frozenset({
    *_GIVEN, "method", "q", "k", "v", "sm_scale", "recipe", "bias_fraction_bits", "causal_align", "cu_seqlens_k",
    "out_dtype", "out_scale", "return_lse", "check_finite",
})  # fmt: skip
_RECIPE = frozenset({
    "q", "k", "v", "bits", "block_size", "q_scale", "k_scale", "v_scale", "smooth_k", "rotate", "rule",
})  # fmt: skip
_QTENSOR = frozenset({"data", "scale", "granularity", "block_size", "bits"})


def unserved(problem: Problem, serves: Mapping[str, frozenset[str]]) -> str | None:
    """Why a backend with these lists, one for each of its methods, cannot serve a problem, or None."""
    served = serves.get(problem.method)
    if served is None:
        is_default = any(problem.method == rule.method for rule in AUTO_RULES)
        why = f"it has no kernel of this method{f', the default {AUTO!r}' if is_default else ''}"
        return f"{why}; it has those of {', '.join(serves)}: pass one of them as method"
    missing = features(problem) - served
    return f"it has no {' and no '.join(sorted(missing))} for {problem.method}" if missing else None


def _unknown(x: Problem | Recipe | QTensor, known: frozenset[str]) -> Iterator[str]:
    """The fields of a newer version of a class that are used, that is, differ from their defaults."""
    for name, default in _others(type(x), known):
        value = getattr(x, name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            yield f"{type(x).__name__}.{name}"


@functools.cache
def _others(cls: type, known: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default if f.default is not MISSING else None) for f in fields(cls) if f.name not in known)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
