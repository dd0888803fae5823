"""Repeated calls on a GPU: Python's way from arguments to launches takes longer than most attention kernels, once.

Checks, choices, constants and parameters all follow from a call's signature: everything about its arguments but where
they lie and what values they hold. The second call of a signature runs under a `Tape`; from the third on its `Plan`
does the same operations and launches for the new tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from intflash.quant import QTensor, Recipe
from intflash.tape import Plan, Tape, leaves

_plans: dict[tuple, Plan | str] = {}
_MOST = 4096
NAMES = (
    "q", "k", "v", "attn_mask", "is_causal", "scale", "method", "backend", "enable_gqa", "bias", "causal_align",
    "recipe", "out_dtype", "out_scale", "return_lse", "cu_seqlens_q", "cu_seqlens_k", "check_finite",
)  # fmt: skip
_PLAIN = (bool, str, float, int, torch.dtype)
_taping = threading.Lock()  # torch keeps some of a dispatch mode's state for the whole process
_ONCE, _NEVER = "came once", "has no plan"


def run(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """`call(**arguments)`, by its plan where there is one."""
    q = arguments["q"]
    q = q.data if isinstance(q, QTensor) else q
    if not isinstance(q, Tensor) or not q.is_cuda or q.device.index != torch.cuda.current_device():
        return call(**arguments)
    signed = signature(arguments)
    if signed is None:
        return call(**arguments)
    tensors = signed[1]
    # as torch.compile's code asks: torch.cuda.current_stream takes 7 us
    key = signed[0], torch._C._cuda_getCurrentRawStream(q.device.index)
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument that is no value: the call says what is wrong with it
        return call(**arguments)
    if isinstance(plan, Plan):
        return plan.run(tensors)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        _plans[key] = _ONCE
    if plan is not _ONCE or torch.cuda.is_current_stream_capturing() or not _taping.acquire(blocking=False):
        return call(**arguments)
    try:
        with Tape(tensors) as tape:
            result = call(**arguments)
    finally:
        _taping.release()
    _plans[key] = tape.plan(result) or _NEVER
    return result


def signature(arguments: dict[str, Any]) -> tuple[tuple, list[Tensor]] | None:
    """All that a call's launches may depend on, and its tensors; None where one is of a class of its own."""
    key: list[Any] = []
    tensors: list[Tensor] = []
    for name in NAMES:
        value = arguments[name]
        if value is None or type(value) in _PLAIN:  # as below, sooner
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
        try:
            tail = (
                x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
            )  # rows past the last may be read
        except NotImplementedError:  # of a transform, as torch.func's
            return None
        key += x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16, tail
    ids = [id(x) for x in tensors]
    if len(set(ids)) < len(ids):
        key.append(tuple(map(ids.index, ids)))  # one tensor in two places
    return tuple(key), tensors


def _without_tensors(recipe: Recipe, scales: tuple) -> tuple:
    """What a recipe is besides the values of its scales."""
    rest = recipe.q, recipe.k, recipe.v, recipe.bits, recipe.block_size, recipe.smooth_k, recipe.rotate, recipe.rule
    return (*rest, *(Tensor if isinstance(x, Tensor) else x for x in scales))
