"""Repeated calls on a CPU: most of what a small call takes is Python's checks and choices, once.

They follow from the call's signature: everything about its arguments but the values in its tensors. A repeated call
gets its `Problem` and its backend from here, and only values are looked at again.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from intflash import validate
from intflash.backends.base import Backend
from intflash.numerics.exp import BIAS_FRACTION_BITS
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

# By signature: a problem's method, softmax scale and the recipe of a call without its own, what follows the tensors,
# whether there are scales to look at, the backend.
_known: dict[tuple, tuple[str, float, Recipe | None, tuple, bool, Backend]] = {}
_MOST = 4096
_values_of = itemgetter(
    "is_causal", "scale", "method", "backend", "enable_gqa", "causal_align", "out_dtype", "return_lse", "check_finite"
)
_tensors_of = itemgetter("q", "k", "v", "bias", "attn_mask")
_others_of = itemgetter("out_scale", "cu_seqlens_q", "cu_seqlens_k")
_fields_of = attrgetter(
    "q", "k", "v", "bits", "block_size", "smooth_k", "rotate", "rule", "q_scale", "k_scale", "v_scale"
)
_VALUES = {type(None), bool, int, float, str, torch.dtype}


def signature(arguments: dict[str, Any]) -> tuple | None:
    """All that checks and choices may depend on but values; None where a problem has tensors made from the call's.

    A good part of what a repeated call costs: each line is here to be quick.
    """
    out_scale, cu_q, cu_k = _others_of(arguments)
    if out_scale is not None or cu_q is not None or cu_k is not None:  # made into a tensor; values
        return None
    key = [*_values_of(arguments)]
    if not _VALUES.issuperset(map(type, key)):
        return None
    recipe = arguments["recipe"]
    if recipe is not None:
        if type(recipe) is not Recipe:
            return None
        for x in _fields_of(recipe):
            key.append((x.dtype, x.shape, x.device) if isinstance(x, Tensor) else x)
    for x in _tensors_of(arguments):
        if x is None:
            key.append(None)
            continue
        if type(x) is QTensor:
            key += QTensor, x.granularity, x.block_size, x.bits, x.scale.shape
            x = x.data
        if type(x) is not Tensor and type(x) is not nn.Parameter or not x.is_cpu:
            return None
        try:
            key += x.dtype, x.shape
        except RuntimeError:  # of a nested tensor, which is refused elsewhere
            return None
    return tuple(key)


def find(key: tuple, arguments: dict[str, Any]) -> tuple[Problem, None, Backend] | None:
    """What is decided for a call whose signature came before: its problem, no shift of its log-sum-exp, its backend.

    Raises:
        InputError: a scale is not finite or not > 0, or the codes of a bias are saturated.
    """
    known = _known.get(key)
    if known is None:
        return None
    method, sm_scale, default, rest, scales, backend = known
    q, k, v, bias, mask = _tensors_of(arguments)
    recipe = default or arguments["recipe"]
    if scales:
        validate.check_scales(q, k, v, recipe)
    if bias is not None and arguments["check_finite"] is not False:
        validate.check_bias_values(bias, "bias", BIAS_FRACTION_BITS)
    return Problem(method, q, k, v, sm_scale, recipe, bias, None, mask, *rest), None, backend


def keep(key: tuple, arguments: dict[str, Any], problem: Problem, backend: Backend) -> None:
    """Remember what was found for a call, if its problem holds the call's own tensors only."""
    mask, bias = arguments["attn_mask"], arguments["bias"]
    own = problem.q is arguments["q"] and problem.k is arguments["k"] and problem.v is arguments["v"]
    if not (own and _same(problem.keep, mask) and _same(problem.bias, bias) and problem.bias_float is None):
        return
    if problem.recipe.bits != 8 or problem.out_scale is not None:  # looked at or made from values
        return
    if len(_known) >= _MOST:
        _known.clear()
    rest = problem.causal, problem.causal_align, None, None, problem.out_dtype, None, problem.return_lse
    recipe = problem.recipe
    check = arguments["check_finite"]
    given = isinstance(problem.q, QTensor) or any(isinstance(x, Tensor) for x in recipe.scales)
    scales = given and (check is None or bool(check))
    default = recipe if arguments["recipe"] is None else None
    _known[key] = problem.method, problem.sm_scale, default, (*rest, problem.check_finite), scales, backend


def _same(held: Tensor | None, given: Tensor | None) -> bool:
    """Whether a problem holds a mask as it was given, or a view of the same shape."""
    if held is None or given is None:
        return held is given
    return held.dtype == given.dtype and held.shape == given.shape
