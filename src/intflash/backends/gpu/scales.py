"""The scales of float Q, K and V on the device, and the buffers of their codes.

The bits are those of `quant.quantizers.quantize`. Each backend has its own kernels that compute them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """Float Q, K and V with a float32 4-D scale of each (per tensor or head), or None where the attention kernel
    computes the scales of each head.
    """

    tensors: Qkv
    scales: Qkv | None
    numbers: tuple[float, ...] | None = None  # the scales, where the recipe gives them as numbers
    dynamic: bool = False  # the scales come from the tensors' own maxima

    @property
    def granularities(self) -> Qkv:
        return Qkv(*("tensor" if s.numel() == 1 else "head" for s in self.scales))


def serves(recipe: Recipe) -> bool:
    """Whether the GPU kernels quantize as the recipe says: all scales static, per tensor or head, or all dynamic, per
    tensor.
    """
    kinds = (recipe.q, recipe.k, recipe.v)
    given = [s is not None for s in recipe.scales]
    if recipe.bits != 8 or recipe.rule != "exact":
        return False
    return all(given) and set(kinds) <= {"tensor", "head"} or not any(given) and set(kinds) == {"tensor"}


def with_scales(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, amax_launches: Callable[[Qkv, Tensor, Tensor], Iterable[Any]]
) -> FloatInputs:
    """Returns the inputs with their static scales, or with those of their absolute maxima.

    amax_launches(tensors, amax, scales): the launches that fill the float32 `scales` of Q, K and V; `amax` is int32
    scratch memory with four zeros.
    """
    tensors = Qkv(q, k, v)
    if recipe.q_scale is not None:
        given = recipe.scales
        numbers = None if any(isinstance(s, Tensor) for s in given) else tuple(map(float, given))
        return FloatInputs(tensors, Qkv(*(_static(s, x) for s, x in zip(given, tensors, strict=True))), numbers)
    amax, scales = torch.zeros(2, 4, dtype=torch.int32, device=q.device).unbind()
    scales = scales.view(torch.float32)[:3]
    for launch in amax_launches(tensors, amax, scales):
        launch.run()
    return FloatInputs(tensors, Qkv(*(scales[i].view(1, 1, 1, 1) for i in range(3))), dynamic=True)


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


def empty_codes(inputs: FloatInputs, query: bool) -> Qkv:
    """Returns uninitialized int8 codes of K, V and, if `query`, Q. V has contiguous keys, in rows padded to
    KEY_PADDING, those of Q and K in rows padded to CHANNEL_PADDING.
    """
    q, k, v = inputs.tensors
    batch, heads, nk, d = v.shape
    of_values = torch.empty(
        batch, heads, _padded(d, CHANNEL_PADDING), _padded(nk, KEY_PADDING), dtype=torch.int8, device=q.device
    )
    return Qkv(_empty_rows(q) if query else None, _empty_rows(k), of_values[:, :, :d, :nk].mT)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _empty_rows(x: Tensor) -> Tensor:
    *rows, d = x.shape
    return torch.empty(*rows, _padded(d, CHANNEL_PADDING), dtype=torch.int8, device=x.device)[..., :d]


def quantized_tensors(inputs: FloatInputs, codes: Qkv) -> dict[str, QTensor]:
    """Returns the codes with their scales, by name, without those that are None."""
    made = zip("qkv", codes, inputs.scales, inputs.granularities, strict=True)
    return {name: QTensor(*x) for name, *x in made if x[0] is not None}


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
