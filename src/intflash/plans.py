"""Repeated calls: Python's way from arguments to kernels takes longer than most attention kernels, once.

Checks, choices, constants and parameters all follow from a call's signature: everything about its arguments but where
they lie and what values they hold. The second call of a signature runs under a `Tape`; from the third on its `Plan`
does the same operations and launches for the new tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from intflash.quant import QTensor, Recipe
from intflash.tape import Plan, Refused, Tape, leaves

_plans: dict[tuple, Plan | str] = {}
_MOST = 4096
NAMES = (
    "q", "k", "v", "attn_mask", "is_causal", "scale", "method", "backend", "enable_gqa", "bias", "causal_align",
    "recipe", "out_dtype", "out_scale", "return_lse", "cu_seqlens_q", "cu_seqlens_k", "check_finite",
)  # fmt: skip
_PLAIN = (bool, str, float, int, torch.dtype)
_READ = ("attn_mask", "bias", "cu_seqlens_q", "cu_seqlens_k", "out_scale")
_ONCE, _NEVER = "came once", "has no plan"


def run(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """`call(**arguments)`, by its plan where there is one."""
    signed = signature(arguments) if _may_be_planned(arguments) else None
    if signed is None:
        return call(**arguments)
    key, tensors = signed
    on_gpu = tensors[0].is_cuda
    if on_gpu:  # as torch.compile's code asks: torch.cuda.current_stream takes 7 us
        key = key, torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument that is no value: the call says what is wrong with it
        return call(**arguments)
    if isinstance(plan, Plan):
        try:
            return plan.run(tensors)
        except Refused:
            return call(**arguments)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        _plans[key] = _ONCE
    if plan is not _ONCE or on_gpu and torch.cuda.is_current_stream_capturing():
        return call(**arguments)
    with Tape(tensors) as tape:
        result = call(**arguments)
    _plans[key] = tape.plan(result) or _NEVER
    return result


def _may_be_planned(arguments: dict[str, Any]) -> bool:
    """GPU calls on the current device; CPU calls of floats alone, whose values nobody reads before the kernels do."""
    q = arguments["q"]
    x = q.data if isinstance(q, QTensor) else q
    if not isinstance(x, Tensor):
        return False
    if x.is_cuda:
        return x.device.index == torch.cuda.current_device()
    return x is q and x.is_cpu and all(arguments[name] is None for name in _READ)


def signature(arguments: dict[str, Any]) -> tuple[tuple, list[Tensor]] | None:
    """All that a call's launches may depend on, and its tensors; None where one is of a class of its own."""
    key: list[Any] = []
    tensors: list[Tensor] = []
    for name in NAMES:
        value = arguments[name]
        if value is None or type(value) in _PLAIN:
            key.append(value)
        elif isinstance(value, Tensor):
            key.append(Tensor)
            tensors.append(value)
        elif isinstance(value, QTensor):
            key += QTensor, value.granularity, value.block_size, value.bits
            tensors += value.data, value.scale
        elif isinstance(value, Recipe):
            scales = value.q_scale, value.k_scale, value.v_scale
            given = list(leaves(scales))
            key.append(_without_tensors(value, scales) if given else value)
            tensors += given
        else:
            key.append(value)
    for x in tensors:
        if type(x) is not Tensor and type(x) is not nn.Parameter or x.layout is not torch.strided:
            return None
        tail = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()  # rows past the last may be read
        key += x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16, tail
    ids = [id(x) for x in tensors]
    if len(set(ids)) < len(ids):
        key.append(tuple(map(ids.index, ids)))  # one tensor in two places
    return tuple(key), tensors


def _without_tensors(recipe: Recipe, scales: tuple) -> tuple:
    """What a recipe is besides the values of its scales."""
    rest = recipe.q, recipe.k, recipe.v, recipe.bits, recipe.block_size, recipe.smooth_k, recipe.rotate, recipe.rule
    return (*rest, *(Tensor if isinstance(x, Tensor) else x for x in scales))
