"""A model as a list of real-valued layers: what a converter makes of an `nn.Module`, and what conversion quantizes.

Each layer becomes one operation of a program. `run` computes the graph in floating point: calibration observes the
values there, and compares the outputs with the model's own, so that a wrong translation is found before it is used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from intflash.errors import InputError
from intflash.integer.program import Input

Activation = Callable[[Tensor], Tensor]
PROBED = (-8.0, 8.0, 65)  # where a fingerprint looks at an activation function: from, to, how many points


@dataclass(frozen=True, eq=False)
class PatchRows:
    name: str
    image: str
    out: str
    patch: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Lookup:
    name: str
    indices: tuple[str, ...]
    tables: tuple[Tensor, ...]
    out: str
    rows: Tensor | None


@dataclass(frozen=True, eq=False)
class Dense:
    name: str
    x: str
    weight: Tensor
    bias: Tensor | None
    out: tuple[str, ...]
    activation: Activation | None
    residual: str | Tensor | None
    store_rows: Tensor | None


@dataclass(frozen=True, eq=False)
class Norm:
    name: str
    x: str
    out: str
    weight: Tensor
    bias: Tensor
    eps: float
    load_rows: Tensor | None


@dataclass(frozen=True, eq=False)
class Attend:
    name: str
    q: str
    k: str
    v: str
    out: str
    scale: float
    bias: Tensor | None
    mask: str | Tensor | None


@dataclass(frozen=True, eq=False)
class Mean:
    name: str
    x: str
    out: str
    first: int
    stop: int


Layer = PatchRows | Lookup | Dense | Norm | Attend | Mean


@dataclass(eq=False)
class Graph:
    """Layers over named values; the methods add a layer and return the names of its values.

    Values are ``[B, rows, channels]``, those of heads ``[B, S, heads, N, D]``; `shapes` has them without the batch. Of
    a Dense layer with an activation, ``name + PRE`` is the value before it.

    Attributes:
        inputs: in the order of the model's call.
        results: names of results -> (value, shape per image).
        read: from what the model returns to the tensors of `results`; by default the tensor itself.
        result: as `Program.result`.
        resized: the first input's shape -> the graph of the same model for inputs of that shape, where the model takes
            several: sequences of tokens, images of several sizes.
    """

    PRE = ".pre"

    inputs: list[Input] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    results: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    read: Callable[[Any], Mapping[str, Tensor]] = lambda result: {"logits": result}
    result: str = "tensor"
    resized: Callable[[tuple[int, ...]], Graph] | None = None

    def image(self, name: str, shape: tuple[int, int, int]) -> str:
        """A float image input ``[channels, H, W]``."""
        self.inputs.append(Input(name, "float", shape))
        return name

    def index(self, name: str, tokens: int, bound: int, *, optional: bool = False) -> str:
        """An input of `tokens` integers from 0 to `bound` - 1."""
        self.inputs.append(Input(name, "index", (tokens,), bound, optional))
        return name

    def mask(self, name: str, tokens: int) -> str:
        """An optional input that is 0 where a token is padding."""
        self.inputs.append(Input(name, "mask", (tokens,), optional=True))
        return name

    def patches(self, name: str, image: str, patch: tuple[int, int]) -> str:
        """The image as patch rows, columns in a Conv2d weight's order (channel, row, column)."""
        channels, height, width = next(i.shape for i in self.inputs if i.name == image)
        if height % patch[0] or width % patch[1]:
            raise InputError(f"{name}: patches of {patch} do not divide an image of {height} x {width}")
        shape = ((height // patch[0]) * (width // patch[1]), channels * patch[0] * patch[1])
        self.layers.append(PatchRows(name, image, self._value(name, shape), patch))
        return name

    def embedding(
        self, name: str, indices: tuple[str, ...], tables: tuple[Tensor, ...], rows: Tensor | None = None
    ) -> str:
        """The sum of one row of each table and of constant rows ``[tokens, channels]``."""
        tokens = next(i.shape[0] for i in self.inputs if i.name == indices[0])
        tables = tuple(_real(x) for x in tables)
        self._value(name, (tokens, tables[0].shape[1]))
        self.layers.append(Lookup(name, indices, tables, name, None if rows is None else _real(rows)))
        return name

    def linear(
        self,
        name: str,
        x: str,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation | None = None,
        residual: str | Tensor | None = None,
        store_rows: Tensor | None = None,
        view: tuple[int, int] | None = None,
    ) -> str:
        """x ``[..., K]`` times weight ``[N, K]`` plus bias, then an elementwise function or a residual.

        Args:
            residual: a value, or a constant ``[rows, N]`` that every image adds.
            store_rows: int ``[rows of the product]``, the residual's row that each is added to; other rows of the
                residual are kept as they are.
            view: rows and channels of the value, where it is not the product's (its elements in the same order).
        """
        weight = _real(weight)
        rows = math.prod(self.shapes[x]) // weight.shape[1]
        shape = view or (rows, weight.shape[0])
        if residual is not None:
            shape = tuple(residual.shape) if isinstance(residual, Tensor) else self.shapes[residual]
        if activation is not None:
            self._value(name + self.PRE, shape)
        self._dense(name, x, weight, bias, (self._value(name, shape),), activation, residual, store_rows)
        return name

    def heads(
        self, name: str, x: str, weight: Tensor, bias: Tensor | None, heads: int, windows: int = 1
    ) -> tuple[str, str, str]:
        """Queries, keys and values: weight ``[3 * heads * D, K]``, rows window by window."""
        rows, n = math.prod(self.shapes[x]) // weight.shape[1], weight.shape[0]
        shape = (windows, heads, rows // windows, n // 3 // heads)
        outs = tuple(self._value(f"{name}.{part}", shape) for part in "qkv")
        self._dense(name, x, weight, bias, outs, None, None, None)
        return outs

    def _dense(self, name, x, weight, bias, outs, activation, residual, store_rows) -> None:
        self.layers.append(
            Dense(
                name, x, _real(weight), None if bias is None else _real(bias), outs, activation,
                _real(residual) if isinstance(residual, Tensor) else residual,
                None if store_rows is None else store_rows.to(torch.int64).cpu(),
            )
        )  # fmt: skip

    def layer_norm(self, name: str, x: str, norm: torch.nn.LayerNorm, load_rows: Tensor | None = None) -> str:
        """LayerNorm of x, or of its rows that `load_rows` ``[R, parts]`` concatenates. An `nn.LayerNorm` over the
        channels, with or without weight and bias."""
        rows, channels = self.shapes[x]
        if load_rows is not None:
            load_rows = load_rows.to(torch.int64).cpu()
            rows, channels = load_rows.shape[0], load_rows.shape[1] * channels
        if tuple(norm.normalized_shape) != (channels,):
            raise InputError(f"{name}: expected a LayerNorm of {channels} channels, got {tuple(norm.normalized_shape)}")
        weight = torch.ones(channels) if norm.weight is None else norm.weight
        bias = torch.zeros(channels) if norm.bias is None else norm.bias
        self._value(name, (rows, channels))
        self.layers.append(Norm(name, x, name, _real(weight), _real(bias), float(norm.eps), load_rows))
        return name

    def attention(
        self,
        name: str,
        q: str,
        k: str,
        v: str,
        *,
        scale: float | None = None,
        bias: Tensor | None = None,
        mask: str | Tensor | None = None,
    ) -> str:
        """Attention of queries, keys and values, as rows and channels.

        Args:
            scale: of the softmax, by default 1 / sqrt(D).
            bias: float ``[1, heads, N, N]``, added to the scaled scores.
            mask: a mask input, or bool ``[S, 1, N, N]``, False where a key takes no part.
        """
        s, heads, n, d = self.shapes[q]
        self._value(name, (s * n, heads * d))
        mask = mask.cpu() if isinstance(mask, Tensor) else mask
        scale = d**-0.5 if scale is None else float(scale)
        self.layers.append(Attend(name, q, k, v, name, scale, None if bias is None else _real(bias), mask))
        return name

    def mean(self, name: str, x: str, first: int = 0, stop: int | None = None) -> str:
        """The mean of the rows from `first` up to `stop`, as one row."""
        rows, channels = self.shapes[x]
        self._value(name, (1, channels))
        self.layers.append(Mean(name, x, name, first, rows if stop is None else stop))
        return name

    def output(self, name: str, value: str, shape: tuple[int, ...]) -> None:
        """A result of the model: a value in this shape, without the batch axis. Of a sequence, two axes are tokens and
        channels."""
        self.results[name] = (value, shape)

    def _value(self, name: str, shape: tuple[int, ...]) -> str:
        if name in self.shapes:
            raise InputError(f"two values are named {name!r}")
        self.shapes[name] = tuple(int(n) for n in shape)
        return name

    def accumulators(self) -> set[str]:
        """The results that stay a linear's accumulators; the others are streams."""
        results = {value for value, _ in self.results.values()}
        plain = (x for x in self.layers if isinstance(x, Dense) and x.activation is None and x.residual is None)
        return {x.out[0] for x in plain} & results

    def reads_codes(self, mean: Mean) -> bool:
        """Whether a mean is of codes, for a linear; else it is of a stream, for a LayerNorm or as a result."""
        return any(isinstance(x, Dense) and x.x == mean.out for x in self.layers)

    def check(self) -> Graph:
        """This graph, after refusing weights that are not finite.

        Raises:
            InputError: names the layer.
        """
        for layer in self.layers:
            for what, x in tensors_of(layer):
                if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                    raise InputError(f"{layer.name}: expected a finite {what}, got NaN or infinity in it")
        return self

    def fingerprints(self) -> dict[str, str]:
        """Layer -> a digest of all that it computes: constants, shapes, options, values of its function."""
        return {layer.name: _digest(layer, self.shapes) for layer in self.layers}

    def run(
        self,
        inputs: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        seen: Callable[[str, Tensor], None] = lambda name, x: None,
        read: Callable[[str, str, Tensor], Tensor] = lambda name, kind, x: x,
    ) -> dict[str, Tensor]:
        """The results ``[B, *shape]`` in floating point.

        Args:
            seen: is shown each value.
            read: (value, "codes" or "stream", what it is) -> what a layer, or the result, reads in its place.
        """
        run = _Run(self, inputs, dtype, seen, read)
        for layer in self.layers:
            run.layer(layer)
        accumulated = self.accumulators()
        return {
            name: (run.values[value] if value in accumulated else run.stream(value)).reshape(-1, *shape)
            for name, (value, shape) in self.results.items()
        }


def _real(x: Tensor) -> Tensor:
    """A constant: float32 or float64, its own memory's values, without gradients."""
    x = x.detach()
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def tensors_of(layer: Layer) -> list[tuple[str, Tensor]]:
    """The constants of a layer, with the names of their fields."""
    found = []
    for f in fields(layer):
        value = getattr(layer, f.name)
        found += [(f.name, x) for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Tensor)]
    return found


def _digest(layer: Layer, shapes: Mapping[str, tuple[int, ...]]) -> str:
    digest = hashlib.sha256()
    for f in fields(layer):
        value = getattr(layer, f.name)
        for x in value if isinstance(value, tuple) else (value,):
            if callable(x) and not isinstance(x, Tensor):
                x = x(torch.linspace(*PROBED, dtype=torch.float64))
            if isinstance(x, Tensor):
                digest.update(f"{f.name} {tuple(x.shape)}".encode())
                digest.update(x.flatten().cpu().contiguous().view(torch.uint8).numpy())
            else:
                digest.update(f"{f.name} {x!r} {shapes.get(x) if isinstance(x, str) else ''}".encode())
    return digest.hexdigest()[:16]


class _Run:
    """One computation of a graph: its values so far, and what each layer adds to them."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Tensor], dtype: torch.dtype, seen, read) -> None:
        self.graph, self.inputs, self.dtype, self.seen, self.read = graph, inputs, dtype, seen, read
        self.values: dict[str, Tensor] = {}

    def codes(self, name: str) -> Tensor:
        return self.read(name, "codes", self.values[name])

    def stream(self, name: str) -> Tensor:
        return self.read(name, "stream", self.values[name])

    def keep(self, name: str, x: Tensor) -> None:
        self.values[name] = x.reshape(-1, *self.graph.shapes[name])
        self.seen(name, self.values[name])

    def layer(self, layer: Layer) -> None:
        {
            PatchRows: self._patches, Lookup: self._lookup, Dense: self._dense, Norm: self._norm,
            Attend: self._attend, Mean: self._mean,
        }[type(layer)](layer)  # fmt: skip

    def _patches(self, layer: PatchRows) -> None:
        x = self.inputs[layer.image].to(self.dtype)
        self.keep(layer.out, F.unfold(x, layer.patch, stride=layer.patch).transpose(1, 2))

    def _lookup(self, layer: Lookup) -> None:
        pairs = zip(layer.indices, layer.tables, strict=True)
        total = sum(F.embedding(self.inputs[index], table.to(self.dtype)) for index, table in pairs)
        self.keep(layer.out, total if layer.rows is None else total + layer.rows.to(self.dtype))

    def _dense(self, layer: Dense) -> None:
        x = self.codes(layer.x)
        weight = layer.weight.to(self.dtype)
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        y = F.linear(x.reshape(len(x), -1, weight.shape[1]), weight, bias)
        if layer.activation is not None:
            before = layer.out[0] + Graph.PRE
            self.keep(before, y)
            y = layer.activation(self.codes(before))
        if layer.residual is not None:
            shape = (len(x), *self.graph.shapes[layer.out[0]])
            constant = isinstance(layer.residual, Tensor)
            base = layer.residual.to(self.dtype).expand(shape) if constant else self.stream(layer.residual)
            if layer.store_rows is None:
                y = base + y.reshape(shape)
            else:
                y = base.index_add(1, layer.store_rows.to(y.device), y)
        if len(layer.out) == 1:
            self.keep(layer.out[0], y)
            return
        s, heads, n, d = self.graph.shapes[layer.out[0]]
        y = y.reshape(len(x), s, n, len(layer.out), heads, d).permute(3, 0, 1, 4, 2, 5)
        for name, part in zip(layer.out, y, strict=True):
            self.keep(name, part)

    def _norm(self, layer: Norm) -> None:
        x = self.stream(layer.x)
        if layer.load_rows is not None:
            x = x[:, layer.load_rows.to(x.device)].flatten(2)
        weight, bias = layer.weight.to(self.dtype), layer.bias.to(self.dtype)
        self.keep(layer.out, F.layer_norm(x, x.shape[-1:], weight, bias, layer.eps))

    def _attend(self, layer: Attend) -> None:
        q, k, v = (self.codes(name).flatten(0, 1) for name in (layer.q, layer.k, layer.v))
        mask = None if layer.bias is None else layer.bias.to(self.dtype)
        if layer.mask is not None:
            if isinstance(layer.mask, Tensor):
                present = layer.mask.to(q.device).repeat(len(q) // len(layer.mask), 1, 1, 1)
            else:
                present = self.inputs[layer.mask][:, None, None, :]
            hidden = q.new_zeros(present.shape).masked_fill(~present, float("-inf"))
            mask = hidden if mask is None else mask + hidden
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
        self.keep(layer.out, y.transpose(1, 2))

    def _mean(self, layer: Mean) -> None:
        kind = self.codes if self.graph.reads_codes(layer) else self.stream
        self.keep(layer.out, kind(layer.x)[:, layer.first : layer.stop].mean(1, keepdim=True))
