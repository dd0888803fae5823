"""Calibration: observers that choose a clipping value, and the readable file that holds their scales.

A scale is clip / 127. `absmax` clips at the largest magnitude, `percentile` at the magnitude that 99.99 % of the values
do not exceed, and `mse` where the int8 codes have the least squared error.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.quant.quantizers import LEAST_SCALE, TINY_AMAX

FORMAT = "intflash-scales/1"
TENSORS = ("q", "k", "v", "out")
STATIC_GRANULARITIES = ("tensor", "head", "channel")
QMAX = 127
PERCENTILE = 99.99
MOST_CHANNELS = 1 << 20  # of heads, and of channels per head, in a file
WEIGHTS_TOLERANCE = 5e-3  # tolerance of a fingerprint in [-0.5, 0.5]: bfloat16 rounding moves it by at most 1e-3


class Histogram:
    """Counts of |x| per group in equal bins over [0, limit). The limit doubles when a value exceeds it.

    Args:
        granularity: "tensor" (one group), "head" (H groups) or "channel" (H * D groups) of
            tensors ``[B, H, N, D]``.
        bins: how many; None: `BINS` of the granularity.
    """

    BINS = {"tensor": 4096, "head": 4096, "channel": 1024}

    def __init__(self, granularity: str, bins: int | None = None) -> None:
        if granularity not in STATIC_GRANULARITIES:
            raise InputError(f"static scales are per {STATIC_GRANULARITIES}, got {granularity!r}")
        self.granularity = granularity
        self.bins = bins or self.BINS[granularity]
        self.counts: Tensor | None = None  # int64 [groups, bins]
        self.amax: Tensor | None = None  # float32 [groups]
        self.limit = 0.0

    def observe(self, x: Tensor) -> None:
        """Counts the values of ``x`` ``[B, H, N, D]``.

        Raises:
            InputError: a value is NaN or infinite, for which there is no scale.
        """
        x = x.detach().float()
        groups = {
            "tensor": lambda: x.reshape(1, -1),
            "head": lambda: x.transpose(0, 1).flatten(1),
            "channel": lambda: x.permute(1, 3, 0, 2).flatten(2).flatten(0, 1),
        }[self.granularity]().abs()
        amax = groups.amax(dim=1).cpu()
        top = float(amax.max())
        if not math.isfinite(top):
            raise InputError(f"calibration needs finite values, got {top} in a tensor of shape {list(x.shape)}")
        if self.counts is None:
            self.counts = torch.zeros(len(amax), self.bins, dtype=torch.int64)
            self.amax = torch.zeros_like(amax)
            self.limit = max(top, TINY_AMAX) * (1 + 1e-6)
        self.amax = torch.maximum(self.amax, amax)
        while top >= self.limit:
            pairs = self.counts.unflatten(1, (-1, 2)).sum(2)
            self.counts = torch.nn.functional.pad(pairs, (0, self.bins // 2))
            self.limit *= 2
        at = (groups * (self.bins / self.limit)).long().clamp(max=self.bins - 1)
        at += torch.arange(len(at), device=at.device)[:, None] * self.bins
        self.counts += torch.bincount(at.flatten(), minlength=self.counts.numel()).cpu().view_as(self.counts)

    @property
    def centers(self) -> Tensor:
        return (torch.arange(self.bins, dtype=torch.float64) + 0.5) * (self.limit / self.bins)


def absmax_clip(h: Histogram) -> Tensor:
    """Returns the largest magnitude per group."""
    return h.amax.double()


def percentile_clip(h: Histogram, percent: float = PERCENTILE) -> Tensor:
    """Returns the upper edge of the bin below which `percent` of the values lie, but at most the largest magnitude."""
    below = h.counts.cumsum(1).double() / h.counts.sum(1, keepdim=True)
    index = (below < percent / 100).sum(1)
    edge = (index + 1).double() * (h.limit / h.bins)
    return torch.minimum(edge, absmax_clip(h))


def mse_clip(h: Histogram, candidates: int = 100) -> Tensor:
    """Returns the clip in (0, amax] with the least squared error of int8 codes, among equal steps."""
    amax, centers = absmax_clip(h), h.centers
    best = torch.full_like(amax, float("inf"))
    clip = amax.clone()
    for step in range(candidates, candidates // 10, -1):
        trial = amax * (step / candidates)
        scale = (trial / QMAX).clamp(min=TINY_AMAX)[:, None]
        codes = torch.round(centers / scale).clamp(max=QMAX)
        error = (h.counts * (codes * scale - centers).square()).sum(1)
        better = error < best
        best, clip = torch.where(better, error, best), torch.where(better, trial, clip)
    return clip


OBSERVERS: dict[str, Callable[[Histogram], Tensor]] = {
    "absmax": absmax_clip,
    "percentile": percentile_clip,
    "mse": mse_clip,
}


def observed_scales(h: Histogram, observer: str) -> list[float]:
    """Returns one scale per group: float32 clip / 127 in the 9 digits that distinguish float32 values, and 1 for all
    zeros.
    """
    clip = OBSERVERS[observer](h).float()
    return [float(f"{s:.9g}") for s in torch.where(clip < TINY_AMAX, 1.0, clip / QMAX).tolist()]


@dataclass(frozen=True)
class LayerScales:
    """The scales of one attention layer: for each of q, k, v and out one value, H values (head), H * D values
    (channel), or none (not quantized).

    `weights` tells this layer's weights from others of the same shapes.
    """

    heads: int
    kv_heads: int
    head_dim: int
    weights: float
    q: list[float]
    k: list[float]
    v: list[float]
    out: list[float]

    def check(self, granularity: dict[str, str]) -> None:
        """Refuses sizes and scales that are invalid, and a number of scales that does not match the granularity.

        Raises:
            InputError: names the field, what is expected and what it holds.
        """
        for name in ("heads", "kv_heads", "head_dim"):
            size = getattr(self, name)
            if not (_is_integer(size) and 1 <= size <= MOST_CHANNELS):
                raise InputError(f"{name} is {_shown(size)}, expected an integer from 1 to {MOST_CHANNELS}")
        if not _is_number(self.weights):
            raise InputError(f"weights is {_shown(self.weights)}, expected a finite number, the fingerprint")
        for name in TENSORS:
            values, kind, heads = getattr(self, name), granularity[name], self._heads(name)
            if not isinstance(values, list):
                raise InputError(f"{name} is {_shown(values)}, expected a list of scales")
            count = {"none": 0, "tensor": 1, "head": heads, "channel": max(len(values) // heads, 1) * heads}[kind]
            if len(values) != count:
                raise InputError(f"{name} has {len(values)} scales, expected {count} (per {kind}, {heads} heads)")
            for scale in values:
                if not (_is_number(scale) and LEAST_SCALE <= scale <= torch.finfo(torch.float32).max):
                    raise InputError(
                        f"{name} has the scale {_shown(scale)}, expected a number that is finite and > 0 "
                        "as a normal float32"
                    )

    def _heads(self, name: str) -> int:
        return self.kv_heads if name in ("k", "v") else self.heads

    def tensor(self, name: str, granularity: str) -> float | Tensor | None:
        """Returns the scale of q, k, v or out as a recipe takes it: a float, or float32 ``[1, H, 1, 1|D]``."""
        values = getattr(self, name)
        if granularity == "none":
            return None
        if granularity == "tensor":
            return values[0]
        return torch.tensor(values, dtype=torch.float32).view(1, self._heads(name), 1, -1)


@dataclass(frozen=True)
class Scales:
    """Calibrated static scales of a model's attention layers, and where they came from."""

    model: str
    method: str
    observer: str
    granularity: dict[str, str]
    batches: int
    images: int
    versions: dict[str, str]
    layers: dict[str, LayerScales]

    def __post_init__(self) -> None:
        for name in ("model", "method", "observer"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{name} is {_shown(getattr(self, name))}, expected a string")
        for name in ("batches", "images"):
            if not (_is_integer(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"{name} is {_shown(getattr(self, name))}, expected an integer of at least 0")
        for name in ("granularity", "versions", "layers"):
            if not isinstance(getattr(self, name), dict):
                raise InputError(f"{name} is {_shown(getattr(self, name))}, expected an object of named values")
        kinds = (*STATIC_GRANULARITIES, "none")
        if self.granularity.keys() != set(TENSORS) or any(kind not in kinds for kind in self.granularity.values()):
            raise InputError(f"granularity must give each of {TENSORS} one of {kinds}, got {_shown(self.granularity)}")
        for name, layer in self.layers.items():
            try:
                layer.check(self.granularity)
            except InputError as error:
                raise InputError(f"layer {name}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes readable JSON, with one line per list of scales."""
        content = {"format": FORMAT} | asdict(self)
        text = json.dumps(content, indent=1)
        Path(path).write_text(_one_line_lists(text) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Scales:
        """Reads what `save` wrote.

        Raises:
            InputError: there is no such file, it has another format, or it holds invalid scales.
        """
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise InputError(f"the scales file {path} cannot be read: {error.strerror}") from None
        except ValueError as error:  # from UTF-8
            raise InputError(f"{path} is not a valid scales file: {error}") from None
        try:
            content = json.loads(text)
            found = content.pop("format", None) if isinstance(content, dict) else None
            if found != FORMAT:
                raise InputError(f"it has format {_shown(found)}, expected {FORMAT!r}")
            layers = content.get("layers")
            if isinstance(layers, dict):
                content["layers"] = {name: _made(LayerScales, layer, f"layer {name}") for name, layer in layers.items()}
            return _made(cls, content, "the file")
        except RecursionError:
            raise InputError(f"{path} is not a valid scales file: it is nested too deeply") from None
        except ValueError as error:  # from JSON or a check of this module
            raise InputError(f"{path} is not a valid scales file: {error}") from None

    def differences(self, model: str, layers: dict[str, dict[str, Any]]) -> list[str]:
        """Returns the differences between a model and this file; empty if the file fits.

        Args:
            model: the model's class.
            layers: name -> heads, kv_heads, head_dim (None where unknown) and weights of its layers.
        """
        found = []
        if model != self.model:
            found.append(f"model: the file is for {self.model}, this is {model}")
        found += [f"layer {name}: in the model, not in the file" for name in layers if name not in self.layers]
        found += [f"layer {name}: in the file, not in the model" for name in self.layers if name not in layers]
        for name, here in layers.items():
            saved = self.layers.get(name)
            if saved is None:
                continue
            for key in ("heads", "kv_heads", "head_dim"):
                if key == "kv_heads" and saved.kv_heads == saved.heads:  # the layer may repeat its own before the call
                    continue
                if here[key] is not None and here[key] != getattr(saved, key):
                    found.append(f"layer {name}: {key} {getattr(saved, key)} in the file, {here[key]} in the model")
            if abs(here["weights"] - saved.weights) > WEIGHTS_TOLERANCE:
                found.append(
                    f"layer {name}: calibrated with other weights (fingerprint {saved.weights:+.4f} in the file, "
                    f"{here['weights']:+.4f} in the model)"
                )
        return found


def _made(kind: type, content: Any, what: str) -> Any:
    """Makes an instance of a dataclass from a JSON object with exactly its fields."""
    if not isinstance(content, dict):
        raise InputError(f"{what} is {_shown(content)}, expected an object with the fields of {kind.__name__}")
    names = [field.name for field in fields(kind)]
    missing, unknown = [n for n in names if n not in content], [n for n in content if n not in names]
    if missing or unknown:
        listed = "; ".join(
            f"{word} {', '.join(map(repr, found))}"
            for word, found in (("misses", missing), ("has unknown", unknown))
            if found
        )
        raise InputError(f"{what} {listed}; its fields are {', '.join(names)}")
    return kind(**content)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether x is a number that is finite as a float. An integer of a file may exceed every float."""
    try:
        return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    """Returns the value as a message shows it, without its middle where it is long."""
    return reprlib.Repr().repr(value)


def _one_line_lists(text: str) -> str:
    """Returns JSON with an indent of 1 and each list of numbers on one line."""
    lines, joined = text.split("\n"), []
    inside: list[str] | None = None
    for line in lines:
        if inside is None and line.endswith("["):
            inside = [line]
        elif inside is not None and line.strip().rstrip(",") == "]":
            joined.append(inside[0] + " ".join(part.strip() for part in inside[1:]) + line.strip())
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            joined.append(line)
    return "\n".join(joined)
