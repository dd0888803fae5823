"""The scales of float Q, K and V on the device, and the buffers of their codes.

The bits are those of `quant.quantizers.quantize`. Each backend has its own kernels that compute them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

KEY_PADDING = 128  # rows of V's codes are padded with zeros to a multiple of this many keys
CHANNEL_PADDING = 16  # rows of codes of Q and K, and the channels of V, are padded to a multiple


class Qkv(NamedTuple):
    """The same property of Q, K and V."""

    q: object
    k: object
    v: object


@dataclass(frozen=True)
class FloatInputs:
    """Float Q, K and V with a float32 4-D scale of each (per tensor or head)."""

    tensors: Qkv
    scales: Qkv
    numbers: tuple[float, ...] | None = None  # the scales, where the recipe gives them as numbers
    dynamic: bool = False  # the scales come from the tensors' own maxima

    @property
    def granularities(self) -> Qkv:
        return Qkv(*("tensor" if s.numel() == 1 else "head" for s in self.scales))


class DynamicScales(NamedTuple):
    """Where the scales of float Q, K and V are found: a slot for each scale, those of Q first, then those of K and V.

    Attributes:
        amax: int32 zeros, a slot's maximum as the bits of a float >= 0, which are ordered as integers are.
        finished: int32 zeros, how many programs have added their part to a slot. It follows `amax` in memory.
        scales: float32, uninitialized.
        per_head: of Q, K and V: whether each head of each batch has a slot, or the whole tensor.
        counts: of Q, K and V: slots.
    """

    amax: Tensor
    finished: Tensor
    scales: Tensor
    per_head: Qkv
    counts: Qkv

    @property
    def first(self) -> Qkv:
        """The first slots of Q, K and V."""
        return Qkv(0, self.counts.q, self.counts.q + self.counts.k)


def serves(problem: Problem) -> bool:
    """Whether the GPU kernels quantize the floats as the recipe says: scales per tensor or head, all static or all
    dynamic.
    """
    recipe = problem.recipe
    names = [name for name in "qkv" if isinstance(getattr(problem, name), Tensor)]
    given = {getattr(recipe, f"{name}_scale") is not None for name in names}
    per = {getattr(recipe, name) for name in names}
    return recipe.bits == 8 and recipe.rule == "exact" and per <= {"tensor", "head"} and len(given) == 1


def dynamic_scales(tensors: Qkv, recipe: Recipe, multiple: int = 1) -> DynamicScales:
    """Returns the memory in which scales are found. The slots of heads are padded to a multiple of `multiple`."""
    per_head = Qkv(recipe.q == "head", recipe.k == "head", recipe.v == "head")
    heads = (x.shape[0] * x.shape[1] for x in tensors)
    counts = Qkv(*(_padded(n, multiple) if each else 1 for n, each in zip(heads, per_head, strict=True)))
    amax, finished = torch.zeros(2, sum(counts), dtype=torch.int32, device=tensors.q.device).unbind()
    return DynamicScales(amax, finished, torch.empty_like(amax, dtype=torch.float32), per_head, counts)


def with_scales(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, amax_launch: Callable[[Qkv, DynamicScales], Any]
) -> FloatInputs:
    """Returns the inputs with their static scales, or with those of their absolute maxima.

    amax_launch(tensors, found): the launch that computes `found.scales`.
    """
    tensors = Qkv(q, k, v)
    if recipe.q_scale is not None:
        given = recipe.scales
        numbers = None if any(isinstance(s, Tensor) for s in given) else tuple(map(float, given))
        return FloatInputs(tensors, Qkv(*(_static(s, x) for s, x in zip(given, tensors, strict=True))), numbers)
    # Each tensor's begin at a multiple of 16 bytes for any batch, so that Triton compiles what reads them once.
    found = dynamic_scales(tensors, recipe, multiple=4)
    amax_launch(tensors, found).run()
    shapes = ((*x.shape[:2], 1, 1) if heads else (1,) * 4 for x, heads in zip(tensors, found.per_head, strict=True))
    parts = zip(found.scales.split(found.counts), shapes, strict=True)
    return FloatInputs(tensors, Qkv(*(s[: math.prod(shape)].view(shape) for s, shape in parts)), dynamic=True)


def _static(scale: Tensor | float, x: Tensor) -> Tensor:
    if not isinstance(scale, Tensor):
        return _constant(float(scale), x.device)
    scale = scale.to(device=x.device, dtype=torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1, 1)
    return QTensor(torch.empty((*x.shape[:3], 1), dtype=torch.int8, device=x.device), scale, "head").scale


def _constant(value: float, device: torch.device) -> Tensor:
    make = functools.partial(torch.full, (1, 1, 1, 1), value, dtype=torch.float32, device=device)
    return cache_per_stream(("scale", value), device, make)


def empty_codes(inputs: FloatInputs) -> Qkv:
    """Returns uninitialized int8 codes of Q, K and V. V has contiguous keys, in rows padded to
    KEY_PADDING, those of Q and K in rows padded to CHANNEL_PADDING.
    """
    q, k, v = inputs.tensors
    batch, heads, nk, d = v.shape
    of_values = torch.empty(
        batch, heads, _padded(d, CHANNEL_PADDING), _padded(nk, KEY_PADDING), dtype=torch.int8, device=q.device
    )
    return Qkv(_empty_rows(q), _empty_rows(k), of_values[:, :, :d, :nk].mT)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _empty_rows(x: Tensor) -> Tensor:
    *rows, d = x.shape
    return torch.empty(*rows, _padded(d, CHANNEL_PADDING), dtype=torch.int8, device=x.device)[..., :d]


def quantized_tensors(inputs: FloatInputs, codes: Qkv) -> dict[str, QTensor]:
    """Returns the codes with their scales, by name."""
    return {name: QTensor(*x) for name, *x in zip("qkv", codes, inputs.scales, inputs.granularities, strict=True)}


_memory: dict[Hashable, Any] = {}
_captured: dict[Hashable, Any] = {}  # tensors whose addresses CUDA graphs hold; never released
_MOST = 256


def cache_per_stream(key: Hashable, device: torch.device, make: Callable[[], Any]) -> Any:
    """Returns what `make` puts on the device. It is made once for each stream.

    It is not cached during the capture of a graph, where nothing runs and a replay would own the result, and not shared
    across streams, where another stream could read before the first has written. Tensors that a graph has captured are
    kept for the life of the process.
    """
    if device.type != "cuda":
        return make()
    place = (key, device, torch.cuda.current_stream(device).cuda_stream)
    capturing = torch.cuda.is_current_stream_capturing()
    if place not in _memory:
        if capturing:
            return make()
        if len(_memory) >= _MOST:
            _memory.clear()
        kept = _captured.get(place)
        _memory[place] = make() if kept is None else kept
    if capturing:
        _captured[place] = _memory[place]
    return _memory[place]
