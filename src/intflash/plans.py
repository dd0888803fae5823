"""Repeated calls on a GPU: Python's way from arguments to launches takes longer than most attention kernels, once.

Checks, choices, constants and parameters all follow from a call's signature: everything about its arguments but where
they lie and what values they hold. The second call of a signature runs under a `Tape`; from the third on its `Plan`
does the same operations and launches for the new tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from intflash.quant import QTensor, Recipe
from intflash.tape import Plan, Tape

_plans: dict[tuple, Plan | str] = {}
_captured: dict[tuple, Plan] = {}  # graphs have their constants' addresses: never let go
_MOST = 4096
NAMES = (
    "q", "k", "v", "attn_mask", "is_causal", "scale", "method", "backend", "enable_gqa", "bias", "causal_align",
    "window_size", "recipe", "out_dtype", "out_scale", "return_lse", "cu_seqlens_q", "cu_seqlens_k", "check_finite",
)  # fmt: skip
_TENSORS = "q", "k", "v", "attn_mask", "bias", "out_scale", "cu_seqlens_q", "cu_seqlens_k"
_tensors_of = itemgetter(*_TENSORS)
_values_of = itemgetter(*(name for name in NAMES if name not in _TENSORS and name != "recipe"))
_recipes: dict[int, tuple[weakref.ref, list[int], tuple]] = {}
_taping = threading.Lock()  # torch keeps some of a dispatch mode's state for the whole process
_ONCE, _NEVER = "came once", "has no plan"


def run(call: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> Any:
    """`call(arguments)`, by its plan where there is one."""
    q = arguments["q"]
    q = q.data if isinstance(q, QTensor) else q
    if not isinstance(q, Tensor) or not q.is_cuda or q.device.index != torch.cuda.current_device():
        return call(arguments)
    signed = signature(arguments)
    if signed is None:
        return call(arguments)
    tensors = signed[1]
    # as torch.compile's code asks: torch.cuda.current_stream takes 7 us
    key = signed[0], torch._C._cuda_getCurrentRawStream(q.device.index)
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument that is no value: the call says what is wrong with it
        return call(arguments)
    if isinstance(plan, Plan):
        if torch.cuda.is_current_stream_capturing():
            _captured[key] = plan
        return plan.run(tensors)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        _plans[key] = _ONCE
    if plan is not _ONCE or torch.cuda.is_current_stream_capturing() or not _taping.acquire(blocking=False):
        return call(arguments)
    try:
        with Tape(tensors) as tape:
            result = call(arguments)
    finally:
        _taping.release()
    _plans[key] = tape.plan(result) or _NEVER
    return result


def signature(arguments: dict[str, Any]) -> tuple[tuple, list[Tensor]] | None:
    """All that a call's launches may depend on, and its tensors; None where one is of a class of its own.

    A good part of what a repeated call costs: each line is here to be quick.
    """
    key: list[Any] = [*_values_of(arguments)]
    tensors: list[Tensor] = []
    for x in _tensors_of(arguments):
        if isinstance(x, Tensor):
            key.append(Tensor)
            tensors.append(x)
        elif isinstance(x, QTensor):
            key += QTensor, x.granularity, x.block_size, x.bits
            tensors += x.data, x.scale
        else:
            key.append(x)
    recipe = arguments["recipe"]
    try:
        for x in tensors:
            key += _layout(x)
        if isinstance(recipe, Recipe):
            scales = [x for x in recipe.scales if isinstance(x, Tensor)]
            key += _recipe_key(recipe, scales)
            tensors += scales
        else:
            key.append(recipe)
    except (_Own, RuntimeError):  # or without strides, as sparse ones, or memory, as in torch.func's transforms
        return None
    if len(set(map(id, tensors))) < len(tensors):
        ids = list(map(id, tensors))
        key.append(tuple(map(ids.index, ids)))  # one tensor in two places
    return tuple(key), tensors


class _Own(Exception):
    """A tensor of a class of its own."""


def _layout(x: Tensor) -> tuple:
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        raise _Own
    past = x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize  # rows past the last may be read
    return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16, past


def _recipe_key(recipe: Recipe, scales: list[Tensor]) -> tuple:
    """What a recipe is besides the values of its scales: it is frozen, so that this is known as long as they lie where
    they lay."""
    where = [x.data_ptr() for x in scales]
    known = _recipes.get(id(recipe))
    if known is not None and known[0]() is recipe and known[1] == where:
        return known[2]
    rest = recipe.q, recipe.k, recipe.v, recipe.bits, recipe.block_size, recipe.smooth_k, recipe.rotate, recipe.rule
    given = (Tensor if isinstance(x, Tensor) else x for x in recipe.scales)
    key = (*rest, *given, *map(_layout, scales))
    if len(_recipes) >= _MOST:
        _recipes.clear()
    _recipes[id(recipe)] = weakref.ref(recipe), where, key
    return key
