"""`calibrate`: run batches through a model and keep the scales its attention layers need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intflash.errors import InputError
from intflash.methods import example
from intflash.models.base import FloatCore
from intflash.models.patch import attach, call_name, describe_layers, libraries_of, unpatch
from intflash.outputs import check_file
from intflash.quant import Recipe
from intflash.quant.calibrate import (
    OBSERVERS,
    STATIC_GRANULARITIES,
    TENSORS,
    Histogram,
    LayerScales,
    Scales,
    observed_scales,
)


class _Observed(FloatCore):
    """A layer's own float attention that also counts the values of its inputs and outputs."""

    def __init__(self, granularity: dict[str, str]) -> None:
        super().__init__()
        self.granularity = granularity
        self.histograms = {name: Histogram(kind) for name, kind in granularity.items() if kind != "none"}
        self.sizes: tuple[int, int, int] | None = None  # heads, KV heads, head_dim; 0 heads of three axes
        self.axes = 4
        self.others = nn.ModuleList()  # one for each further call in one forward of the layer
        self.calls: int | None = None  # number of calls in each forward so far

    def at(self, call: int) -> _Observed:
        if call > len(self.others):
            if self.calls is not None:
                self.check_calls(call + 1)
            self.others.append(_Observed(self.granularity))
        return self if call == 0 else self.others[call - 1]

    def check_calls(self, calls: int) -> None:
        if self.calls not in (None, calls):
            raise InputError(
                f"a layer called attention {self.calls} times in one forward and {calls} times in another: static "
                "scales belong to one call, so this layer needs dynamic ones"
            )
        self.calls = calls

    def forward(self, q, k, v, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(q, k, v, *args, **kwargs)
        if k.shape[-2] == 0:  # without keys there is nothing to scale
            return out
        self.axes = q.ndim
        sizes = (q.shape[-3], k.shape[-3], q.shape[-1]) if q.ndim > 3 else (0, 0, q.shape[-1])
        if self.sizes not in (None, sizes):
            raise InputError(f"a layer was called with heads, KV heads, head_dim {self.sizes} and {sizes}")
        self.sizes = sizes
        for name, x in zip(TENSORS, (q, k, v, out), strict=True):
            if name in self.histograms:
                self.histograms[name].observe(x.reshape(-1, *x.shape[-3:]))
        return out

    def described(self, name: str, layer: dict[str, Any]) -> tuple[int, int, int]:
        """Returns heads, KV heads and head_dim: those of the calls, or of the layer where heads are not the third axis
        from the end, which only scales of tensors allow.
        """
        heads, kv_heads, head_dim = self.sizes
        known = layer["heads"]
        if self.axes == 4 or (heads and known in (None, heads)):
            return self.sizes
        if any(kind in ("head", "channel") for kind in self.granularity.values()):
            found = (
                f"axis -3 of its attention's tensors has {heads}" if heads else "those of its attention have three axes"
            )
            raise InputError(f"layer {name} has {known} heads, but {found}: calibrate it per tensor")
        return known or max(heads, 1), layer["kv_heads"] or known or max(kv_heads, 1), head_dim


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "auto",
    *,
    observer: str = "absmax",
    granularity: dict[str, str] | None = None,
    path: str | Path | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Scales:
    """Observe Q, K, V and outputs of every attention layer in float, and choose static scales.

    `patch` takes the scales of Q, K and V; those of the outputs are in the file for other uses.

    Args:
        model: as for `patch`, not patched; its attention runs in its own dtype.
        batches: an iterable of inputs, each a tensor, a tuple (``model(*batch)``) or a mapping (``model(**batch)``).
        method: the method that the scales are for. The file names it, and `patch` computes it unless it is given
            another: "auto", whose methods all take these scales, stays "auto".
        observer: "absmax", "percentile" (99.99 %) or "mse" (least squared error of the codes).
        granularity: of "q", "k", "v", "out": "tensor", "head" or "channel"; default: "tensor", or what a published
            method has where that can be static, else the coarsest that it takes.
        path: also write the scales there, as JSON.
        forward: ``forward(model, batch)`` instead of the default call.

    Returns:
        The `Scales` for ``patch(model, scales=...)``.

    Raises:
        InputError: no model, no batches, an unknown observer or granularity, a method that cannot have static scales,
            a layer whose number of attention calls differs between forwards, or a path that cannot be written.

    Example:
        >>> import torch, intflash
        >>> from intflash.digits import load_model
        >>> scales = intflash.calibrate(load_model("vit"), [torch.rand(4, 1, 8, 8)])
        >>> len(scales.layers), scales.granularity["q"]
        (4, 'tensor')
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"calibrate takes an nn.Module, got {type(model).__name__}")
    if not isinstance(observer, str) or observer not in OBSERVERS:
        raise InputError(f"observer must be one of {tuple(OBSERVERS)}, got {observer!r}")
    if not isinstance(batches, Iterable):
        raise InputError(f"batches must be an iterable of inputs, got {type(batches).__name__}")
    if isinstance(batches, Tensor) or hasattr(batches, "keys"):  # its rows or names would be mistaken for batches
        raise InputError(f"batches must be an iterable of inputs, got one {type(batches).__name__}: pass [x] for one x")
    chosen = static_granularity(method, granularity or {})
    if path is not None:
        check_file(path)
    cores: dict[str, _Observed] = {}
    layers = describe_layers(model)
    attach(model, lambda name: cores.setdefault(name, _Observed(chosen)))
    libraries = libraries_of(model)
    count = images = 0
    try:
        with torch.no_grad():
            for batch in batches:
                (forward or _forward)(model, batch)
                count, images = count + 1, images + _size(batch)
    finally:
        unpatch(model)
    if count == 0:
        raise InputError("calibration needs batches of images: no images were given")
    unused = [
        call_name(name, call)
        for name, first in cores.items() for call, core in enumerate((first, *first.others)) if core.sizes is None
    ]  # fmt: skip
    if unused:
        raise InputError(f"calibration ran {count} batches and never reached {', '.join(unused[:4])}")
    scales = Scales(
        model=type(model).__name__, method=method, observer=observer, granularity=chosen, batches=count,
        images=images, versions=_versions(libraries),
        layers={
            call_name(name, call): LayerScales(
                *core.described(name, layers[name]), layers[name]["weights"],
                **{t: observed_scales(core.histograms[t], observer) if t in core.histograms else [] for t in TENSORS},
            )
            for name, first in cores.items() for call, core in enumerate((first, *first.others))
        },
    )  # fmt: skip
    if path is not None:
        scales.save(path)
    return scales


def static_granularity(method: str, asked: dict[str, str]) -> dict[str, str]:
    """Returns the granularity of each of q, k, v and out: as asked for, or what suits the method.

    Raises:
        InputError: the method cannot have such static scales, or there is no such tensor.
    """
    unknown = [name for name in asked if name not in TENSORS]
    if unknown:
        raise InputError(f"granularity is of {', '.join(TENSORS)}, got {', '.join(map(repr, unknown))}")
    chosen, found = example(method), {}
    for name in ("q", "k", "v"):
        default = "tensor" if chosen.recipe == Recipe() else getattr(chosen.recipe, name)
        if default == "none" and name not in asked:
            found[name] = default  # the method keeps this tensor in floating point
            continue
        possible = [g for g in STATIC_GRANULARITIES if g in chosen.granularities.get(name, ())]
        if not possible:
            raise InputError(f"method {method!r} quantizes {name} per {chosen.granularities.get(name)}: not static")
        found[name] = asked.get(name, default if default in possible else possible[0])
        if found[name] not in possible:
            raise InputError(f"method {method!r} can have static {name} scales per {possible}, got {found[name]!r}")
    if set(found.values()) == {"none"}:
        raise InputError(f"method {method!r} computes in floating point: it has no scales to calibrate")
    found["out"] = asked.get("out", "tensor")
    if found["out"] not in STATIC_GRANULARITIES:
        raise InputError(f"output scales are per {STATIC_GRANULARITIES}, got {found['out']!r}")
    return found


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if hasattr(batch, "keys") else model(*batch)


def _size(batch: Any) -> int:
    """Returns the number of inputs in a batch: the length of its first tensor, or 1 where it has none."""
    parts = batch.values() if hasattr(batch, "keys") else batch if isinstance(batch, (tuple, list)) else [batch]
    sizes = (x.shape[0] if x.ndim else 1 for x in parts if isinstance(x, Tensor))
    return next(sizes, 1)


def _versions(libraries: set[str]) -> dict[str, str]:
    import intflash

    found = {"intflash": intflash.__version__, "torch": torch.__version__}
    for name in sorted(libraries & sys.modules.keys()):
        found[name] = getattr(sys.modules[name], "__version__", "unknown")
    return found
