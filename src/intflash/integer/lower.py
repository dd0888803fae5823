"""From a real-valued graph and its calibrated ranges to a program: scales, codes, multipliers and tables.

Scales of single channels that follow a LayerNorm, V or an average are folded into the next weights, and those of Q and
K against each other: the function stays the same, and what an integer sees has one scale (docs/numerics.md, section 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.integer.calibration import Calibration
from intflash.integer.graph import Attend, Dense, Graph, Lookup, Mean, Norm, PatchRows
from intflash.integer.program import (
    MAX_NORM_BIAS,
    MAX_NORM_SHIFT,
    MAX_SHIFT,
    METHODS,
    TABLE_BITS,
    Attention,
    Buffer,
    Embedding,
    Input,
    LayerNorm,
    Linear,
    Operation,
    Output,
    Patches,
    Pool,
    Program,
)
from intflash.numerics.exp import BIAS_FRACTION_BITS, quantize_bias
from intflash.quant.calibrate import OBSERVERS
from intflash.validate import check_bias_values

RESIDUAL_BITS = {16: 16, 32: 24}  # as asked for -> bits of a stream
SCALES = ("tensor", "head")
IMAGES = ("float", "uint8")
HEADROOM = 1.25  # of a stream over what was seen: a saturated outlier token would cost more than a quarter of a bit
LEAST_RATIO = 2.0**-12  # of a channel's scale to the largest: smaller ones would take bits from the others' multipliers
NORMAL_REACH = 4.5  # standard deviations that a channel's range should cover
LEAST_REACH = 1 / 32  # of a channel's range to the largest magnitude of all: few images show little of it
BIAS_LIMIT = 1 << 30  # of a linear's bias: K * 128 * 127 has the rest of int32
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Options:
    """How a model is quantized.

    Args:
        method: of attention, "intflash" or "intflash_p8".
        residual_bits: 16, or 32 where outliers need them (24 are used).
        activation_bits: of the index of an activation's table: 8, 10 or 12.
        observer: which clipping values are chosen: "absmax", "percentile" or "mse".
        fold: fold scales of channels into the next weights.
        scales: of Q, K and attention's output: "tensor" or "head".
        image: "float", the model's own input, or "uint8", raw pixels with the normalization folded in.
        mean, std: of uint8 images, for x / 255; one value for each channel.

    Raises:
        InputError: an option is unknown.
    """

    method: str = "intflash"
    residual_bits: int = 16
    activation_bits: int = 10
    observer: str = "absmax"
    fold: bool = True
    scales: str = "head"
    image: str = "float"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        known = {
            "method": METHODS, "residual_bits": tuple(RESIDUAL_BITS), "activation_bits": TABLE_BITS,
            "observer": tuple(OBSERVERS), "fold": (True, False), "scales": SCALES, "image": IMAGES,
        }  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name} must be one of {values}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Format:
    """What the codes of a value stand for: ``code * scale + offset``, float64 of one value or one for each channel."""

    scale: Tensor
    offset: Tensor


def lower(graph: Graph, calibration: Calibration, options: Options) -> Program:
    """The checked program of a graph.

    Raises:
        InputError: a layer would leave a declared width, or has a range of zero; the message names it.
    """
    return Lowering(graph, calibration, options).program()


class Lowering:
    def __init__(self, graph: Graph, calibration: Calibration, options: Options) -> None:
        self.graph, self.options = graph, options
        self.ranges = calibration.ranges
        self.stream_bits = RESIDUAL_BITS[options.residual_bits]
        self.inputs = [self._input(i) for i in graph.inputs]
        self.buffers: dict[str, Buffer] = {}
        self.tensors: dict[str, Tensor] = {}
        self.operations: list[Operation] = []
        self.codes: dict[str, Format] = {}  # of values that are read as codes
        self.units: dict[str, Tensor] = {}  # linear -> scale of each output's weights
        self.biases: dict[str, Tensor] = {}  # linear -> its bias, of codes * scale
        self.needs = _needs(graph)
        self.accumulators = graph.accumulators()
        self.stream_scale = self._stream_scales()

    def program(self) -> Program:
        steps = {
            PatchRows: self._patches, Lookup: self._lookup, Dense: self._dense, Norm: self._norm,
            Attend: self._attend, Mean: self._mean,
        }  # fmt: skip
        for layer in self.graph.layers:
            steps[type(layer)](layer)
        outputs = []
        for name, (value, shape) in self.graph.results.items():
            accumulated = value in self.accumulators
            scale = self.units[value] if accumulated else self.stream_scale[value].view(1)
            key = self._keep(f"{name}.scale", scale.float())
            outputs.append(Output(name, value if accumulated else self._stream(value), key, shape))
        return Program(
            tuple(self.inputs), self.buffers, tuple(self.operations), tuple(outputs), self.tensors, self.graph.result
        ).check()

    def _input(self, given: Input) -> Input:
        if given.kind != "float" or self.options.image == "float":
            return given
        channels = given.shape[0]
        for name in ("mean", "std"):
            values = getattr(self.options, name)
            if (
                len(values) != channels
                or not all(math.isfinite(x) for x in values)
                or (name == "std" and min(values) <= 0)
            ):
                raise InputError(f"{name} must be {channels} numbers (std > 0), one for each channel, got {values}")
        return replace(given, kind="uint8")

    def _stream_scales(self) -> dict[str, Tensor]:
        """The scale of each value that is read as a stream; values that are added have one scale."""
        group = {name: name for name in self.graph.shapes}

        def root(name: str) -> str:
            while group[name] != name:
                name = group[name]
            return name

        for layer in self.graph.layers:
            if isinstance(layer, Dense) and isinstance(layer.residual, str):
                group[root(layer.out[0])] = root(layer.residual)
        amax: dict[str, float] = {}
        for name, wanted in self.needs.items():
            if "stream" in wanted:
                amax[root(name)] = max(amax.get(root(name), 0.0), self.ranges[name].amax)
        for layer in self.graph.layers:
            if isinstance(layer, Lookup):  # calibration sees few of the rows that an index can choose
                parts = [*layer.tables, *([] if layer.rows is None else [layer.rows])]
                most = float(sum(x.double().abs().amax(0) for x in parts).max())
                amax[root(layer.out)] = max(amax[root(layer.out)], most)
        limit = 1 << (self.stream_bits - 1)
        return {
            name: torch.tensor(amax[root(name)] * HEADROOM / limit, dtype=torch.float64)
            for name, wanted in self.needs.items() if "stream" in wanted
        }  # fmt: skip

    def _clips(self, name: str) -> tuple[Tensor, Tensor]:
        """(low, high) of a value by the chosen observer: per channel where that is folded, else in all."""
        low, high = self._channel_clips(name)
        return (low, high) if self.options.fold else (low.min().view(1), high.max().view(1))

    def _channel_clips(self, name: str) -> tuple[Tensor, Tensor]:
        """(low, high) of a value, per channel where it was observed so.

        The ranges of channels are widened where few rows were seen, and have a least width.
        """
        ranges = self.ranges[name]
        low, high = ranges.clips(self.options.observer)
        if not ranges.per_channel:
            return low, high
        reach = math.sqrt(2 * math.log(max(ranges.rows, 2)))  # of the largest of so many normal values
        half = (high - low) / 2 * max(1.0, NORMAL_REACH / reach)
        half = half.clamp(min=ranges.amax * LEAST_REACH)
        return (high + low) / 2 - half, (high + low) / 2 + half

    def _keep(self, name: str, x: Tensor) -> str:
        self.tensors[name] = x.contiguous().cpu()
        return name

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _buffer(self, name: str, bits: int, shape: tuple[int, ...] | None = None) -> str:
        self.buffers[name] = Buffer(self.graph.shapes[name] if shape is None else shape, bits)
        return name

    def _stream(self, value: str) -> str:
        """The buffer of a value as a stream: its own name, unless that is of its codes."""
        return f"{value}.stream" if "codes" in self.needs[value] else value

    def _stream_buffer(self, value: str) -> str:
        return self._buffer(self._stream(value), self.stream_bits, self.graph.shapes[value])

    def _stream_codes(self, name: str, x: Tensor, scale: Tensor) -> str:
        """A constant in a stream's unit."""
        limit = 1 << (self.stream_bits - 1)
        codes = torch.round(x.double().cpu() / scale).clamp(-limit, limit - 1)
        return self._keep(name, codes.to(torch.int16 if self.stream_bits == 16 else torch.int32))

    def _asymmetric(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, zero point) of [low, high] in 256 codes; low <= 0 <= high."""
        scale = (high - low) / 255
        return scale, (-128 - torch.round(low / scale)).clamp(-128, 127)

    def _patches(self, layer: PatchRows) -> None:
        given = next(i for i in self.inputs if i.name == layer.image)
        self._buffer(layer.out, 8)
        pixels = layer.patch[0] * layer.patch[1]
        if given.kind == "uint8":
            mean, std = (
                torch.tensor(x, dtype=torch.float64).repeat_interleave(pixels)
                for x in (self.options.mean, self.options.std)
            )
            self.codes[layer.out] = Format(1 / (255 * std), (128 / 255 - mean) / std)
            self._add(Patches(layer.name, layer.image, layer.out, layer.patch))
            return
        low, high = (x.squeeze() for x in self.ranges[layer.out].clips("absmax"))
        scale, zero = self._asymmetric(low, high)
        scale = scale.float().double()  # as the codes are made
        self.codes[layer.out] = Format(scale, -zero * scale)
        self._add(Patches(layer.name, layer.image, layer.out, layer.patch, float(scale), int(zero)))

    def _lookup(self, layer: Lookup) -> None:
        scale = self.stream_scale[layer.out]
        tables = tuple(self._stream_codes(f"{layer.name}.table{i}", x, scale) for i, x in enumerate(layer.tables))
        rows = None if layer.rows is None else self._stream_codes(f"{layer.name}.rows", layer.rows, scale)
        self._add(Embedding(layer.name, layer.indices, tables, self._stream_buffer(layer.out), rows))

    def _dense(self, layer: Dense) -> None:
        x = self.codes[layer.x]
        weight = layer.weight.double().cpu()
        n, k = weight.shape
        scale, offset = (self.columns(y, k) for y in (x.scale, x.offset))
        bias = weight @ offset
        if layer.bias is not None:
            bias = bias + layer.bias.double().cpu()
        weight = weight * scale
        units = self.units[layer.name] = _weight_units(weight, bias, len(layer.out))
        codes = torch.round(weight / units[:, None]).clamp(-127, 127)
        # what rounding the weights adds on average, by the mean of each column's codes
        mean = (self.columns(self.ranges[layer.x].mean, k) - offset) / scale
        bias = self.biases[layer.name] = bias + (weight - codes * units[:, None]) @ mean
        made = _Product(self, layer, codes, bias, units)
        if len(layer.out) > 1:
            made.heads()
        elif layer.out[0] in self.accumulators:
            made.accumulator()
        elif layer.activation is not None:
            made.table()
        elif "stream" in self.needs[layer.out[0]]:
            made.stream()
        else:
            made.codes()

    @staticmethod
    def columns(x: Tensor, k: int) -> Tensor:
        """A value for each of K columns: of one number, or of channels whose rows a linear reads together."""
        return x.expand(k) if x.numel() == 1 else x.repeat(k // x.numel())

    def _norm(self, layer: Norm) -> None:
        wanted = self.needs[layer.out]
        channels = self.graph.shapes[layer.out][1]
        source = self._stream(layer.x)
        x_scale = self.stream_scale[layer.x]
        eps = max(1, round(channels * layer.eps / float(x_scale) ** 2))
        rows = None
        if layer.load_rows is not None:
            rows = self._keep(f"{layer.name}.load_rows", layer.load_rows.to(torch.int32))
        gamma, beta = layer.weight.double().cpu(), layer.bias.double().cpu()
        if "codes" in wanted:
            low, high = self._clips(layer.out)
            scale = _usable((high - low) / 254, layer.out)
            offset = (high + low) / 2
            self.codes[layer.out] = Format(scale, offset)
            self._add_norm(layer.name, source, self._buffer(layer.out, 8), gamma, beta, scale, offset, eps, rows)
        if "stream" in wanted:
            out = self._stream_buffer(layer.out)
            name = layer.name if out == layer.out else f"{layer.name}.stream"
            self._add_norm(name, source, out, gamma, beta, self.stream_scale[layer.out], torch.zeros(()), eps, rows)

    def _add_norm(
        self, name: str, x: str, out: str, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, eps: int,
        rows: str | None,
    ) -> None:  # fmt: skip
        m = gamma * math.sqrt(len(gamma)) / scale * 8
        b = (beta - offset) / scale
        shift = MAX_NORM_SHIFT
        while shift >= 1 and not (
            float(m.abs().max()) * 2**shift < 2**31 - 1 and float(b.abs().max()) * 2**shift + 2**shift < MAX_NORM_BIAS
        ):
            shift -= 1
        if shift < 1:
            raise InputError(
                f"{name}: gamma and beta leave the widths of an integer LayerNorm (|m| < 2^31, |b| < 2^30): the least "
                f"scale of its output is {float(scale.min()):.3g}, the largest gamma {float(gamma.abs().max()):.3g}, "
                f"the largest beta {float(beta.abs().max()):.3g}"
            )
        multiplier = torch.round(m * 2**shift).to(torch.int32)
        bias = (torch.round(b * 2**shift) + 2 ** (shift - 1)).to(torch.int32)
        self._add(
            LayerNorm(
                name, x, out, self._keep(f"{name}.multiplier", multiplier), self._keep(f"{name}.bias", bias), shift,
                eps, rows,
            )
        )  # fmt: skip

    def head_formats(self, attend: Attend) -> tuple[Format, Format, Format]:
        """What the codes of Q, K and V stand for, ``[heads * D]`` each."""
        _, heads, _, d = self.graph.shapes[attend.q]

        def shared(x: Tensor) -> Tensor:
            """The largest of a head, or of all, for each channel."""
            x = x.expand(heads * d).reshape(heads, d)
            x = x.amax(1, keepdim=True) if self.options.scales == "head" else x.amax()
            return x.expand(heads, d).flatten()

        (q_low, q_high), (k_low, k_high), (v_low, v_high) = (
            self._channel_clips(x) for x in (attend.q, attend.k, attend.v)
        )
        q_range, k_range = torch.maximum(q_high, -q_low), torch.maximum(k_high, -k_low)
        v_range = torch.maximum(v_high, -v_low)
        zero = torch.zeros(heads * d, dtype=torch.float64)
        if not self.options.fold:
            ranges = (
                shared(_usable(x / 127, n)) for x, n in ((q_range, attend.q), (k_range, attend.k), (v_range, attend.v))
            )
            return tuple(Format(x, zero) for x in ranges)
        # a constant in all keys changes no softmax, one in all values moves the output, an average of them, by itself
        k_offset, v_offset = (k_high + k_low) / 2, self.ranges[attend.v].mean
        k_range, v_range = (k_high - k_low) / 2, torch.maximum(v_high - v_offset, v_offset - v_low)
        ratio = torch.sqrt(_usable(k_range, attend.k) / _usable(q_range, attend.q))
        both = shared(torch.maximum(q_range * ratio, k_range / ratio)) / 127
        return (
            Format(both / ratio, zero),
            Format(both * ratio, k_offset),
            Format(_usable(v_range / 127, attend.v), v_offset),
        )

    def _attend(self, layer: Attend) -> None:
        _, heads, _, d = self.graph.shapes[layer.q]
        q, k, v = (self.codes[name] for name in (layer.q, layer.k, layer.v))
        low, high = self._channel_clips(layer.out)
        out_range = torch.maximum(high - v.offset, v.offset - low).clamp(min=0)
        part = (out_range / 127 / v.scale).reshape(heads, d).amax(1)  # of V's scale, that the output needs
        part = part.clamp(LEAST_RATIO, 1.0)
        if self.options.scales == "tensor":
            part = part.amax().expand(heads)
        part = part.float().double()
        # the product of their two scales is one number of a head
        score = torch.sqrt(q.scale * k.scale).reshape(heads, d)[:, 0]
        v_scale = torch.ones(heads)
        self.codes[layer.out] = Format(v.scale * part.repeat_interleave(d), v.offset)
        bias = None
        if layer.bias is not None:
            check_bias_values(layer.bias, f"{layer.name}: the relative-position bias", BIAS_FRACTION_BITS)
            bias = self._keep(f"{layer.name}.bias", quantize_bias(layer.bias))
        mask = self._keep(f"{layer.name}.mask", layer.mask) if isinstance(layer.mask, Tensor) else layer.mask
        self._add(
            Attention(
                layer.name, layer.q, layer.k, layer.v, self._buffer(layer.out, 8), self.options.method, layer.scale,
                _few(score), _few(score), _few(v_scale), _few(part), bias, mask,
            )
        )  # fmt: skip

    def _mean(self, layer: Mean) -> None:
        rows = layer.stop - layer.first
        if "stream" in self.needs[layer.out]:
            factor = float(self.stream_scale[layer.x] / self.stream_scale[layer.out]) / rows
            source, out = self._stream(layer.x), self._stream_buffer(layer.out)
        else:
            x = self.codes[layer.x]
            low, high = self._clips(layer.out)
            reach = torch.maximum(high - x.offset, x.offset - low) / x.scale
            part = min(max(float(reach.max()) / 127, LEAST_RATIO), 1.0)
            self.codes[layer.out] = Format(x.scale * part, x.offset)
            factor, source, out = 1 / (rows * part), layer.x, self._buffer(layer.out, 8)
        multiplier, shift = fixed_point(torch.tensor([factor], dtype=torch.float64), layer.name)
        self._add(Pool(layer.name, source, out, layer.first, layer.stop, int(multiplier), shift))


class _Product:
    """The Linear of one Dense layer: its epilogues decide what the accumulators become."""

    def __init__(self, into: Lowering, layer: Dense, codes: Tensor, bias: Tensor, units: Tensor) -> None:
        self.into, self.layer, self.bias, self.units = into, layer, bias, units
        self.name = layer.name
        self.weight = into._keep(f"{self.name}.weight", codes.to(torch.int8))

    def _add(self, out: tuple[str, ...], epilogue: str, bias: Tensor, factors: Tensor | None = None, **options) -> None:
        codes = torch.round(bias / self.units)
        if float(codes.abs().max()) >= 1 << 31:
            raise InputError(
                f"{self.name}: expected a bias below 2^31 in units of the products, got {float(codes.abs().max()):.4g}"
            )
        if factors is not None:
            multiplier, shift = fixed_point(factors, self.name)
            options |= {"multiplier": self.into._keep(f"{self.name}.multiplier", multiplier), "shift": shift}
        bias_name = self.into._keep(f"{self.name}.bias", codes.to(torch.int32))
        self.into._add(Linear(self.name, self.layer.x, self.weight, bias_name, out, epilogue, **options))

    def accumulator(self) -> None:
        shape = self.into.graph.shapes[self.layer.out[0]]
        self._add((self.into._buffer(self.layer.out[0], 32, shape),), "accumulator", self.bias)

    def heads(self) -> None:
        graph, outs = self.into.graph, self.layer.out
        attend = next(x for x in graph.layers if isinstance(x, Attend) and (x.q, x.k, x.v) == outs)
        formats = self.into.head_formats(attend)
        self.into.codes.update(zip(outs, formats, strict=True))
        for name in outs:
            self.into._buffer(name, 8)
        scale = torch.cat([f.scale.expand(len(self.bias) // 3) for f in formats])
        offset = torch.cat([f.offset.expand(len(self.bias) // 3) for f in formats])
        self._add(outs, "codes", self.bias - offset, self.units / scale, symmetric=True)

    def table(self) -> None:
        into, layer, bits = self.into, self.layer, self.into.options.activation_bits
        value = layer.out[0]
        low, high = (float(x) for x in into.ranges[value + Graph.PRE].clips(into.options.observer))
        if "stream" in into.needs[value]:
            out, scale, zero = into._stream_buffer(value), into.stream_scale[value], torch.zeros(())
        else:
            out_low, out_high = (x.squeeze() for x in into._clips(value))
            _usable(out_high - out_low, value)
            scale, zero = into._asymmetric(out_low, out_high)
            into.codes[value] = Format(scale, -zero * scale)
            out = into._buffer(value, 8)
        low, high = _working_range(layer.activation, low, high, float(scale))
        if not high > low:
            raise InputError(f"{value}: its calibrated range is zero, so that no scale can be chosen")
        half = 1 << (bits - 1)
        step = (high - low) / (2 * half - 1)
        offset = low + half * step  # index -half is `low`
        into.codes[value + Graph.PRE] = Format(torch.tensor(step), torch.tensor(offset))
        index = torch.arange(-half, half, dtype=torch.float64)
        limits = into.buffers[out].limits
        entries = torch.round(layer.activation(index * step + offset) / scale) + zero
        table = into._keep(f"{self.name}.table", entries.clamp(*limits).to(into.buffers[out].dtype))
        self._add((out,), "table", self.bias - offset, self.units / step, bits=bits, table=table)

    def stream(self) -> None:
        into, layer = self.into, self.layer
        scale = into.stream_scale[layer.out[0]]
        out, factors = into._stream_buffer(layer.out[0]), self.units / scale
        if layer.residual is None:
            self._add((out,), "codes", self.bias, factors)
            return
        if isinstance(layer.residual, Tensor):
            residual = into._stream_codes(f"{self.name}.residual", layer.residual, scale)
        else:
            residual = into._stream(layer.residual)
        rows = None
        if layer.store_rows is not None:
            rows = into._keep(f"{self.name}.store_rows", layer.store_rows.to(torch.int32))
        self._add((out,), "residual", self.bias, factors, residual=residual, store_rows=rows)

    def codes(self) -> None:
        into, value = self.into, self.layer.out[0]
        low, high = (x.squeeze() for x in into._clips(value))
        scale, zero = into._asymmetric(low, high)
        into.codes[value] = Format(scale, -zero * scale)
        self._add((into._buffer(value, 8),), "codes", self.bias + zero * scale, self.units / scale)


def _needs(graph: Graph) -> dict[str, set[str]]:
    """What each value is read as: "codes" by products and attention, "stream" by LayerNorms, sums and as a result."""
    needs: dict[str, set[str]] = {name: set() for name in graph.shapes}
    accumulators = graph.accumulators()
    for value, _ in graph.results.values():
        if value not in accumulators:
            needs[value].add("stream")
    for layer in graph.layers[::-1]:
        match layer:
            case Dense():
                needs[layer.x].add("codes")
                if layer.residual is not None:
                    needs[layer.out[0]].add("stream")
                if isinstance(layer.residual, str):
                    needs[layer.residual].add("stream")
            case Norm():
                needs[layer.x].add("stream")
            case Attend():
                for name in (layer.q, layer.k, layer.v):
                    needs[name].add("codes")
            case Mean():
                if not needs[layer.out]:
                    needs[layer.out].add("stream")
                needs[layer.x] |= needs[layer.out]
    for layer in graph.layers:
        outs = layer.out if isinstance(layer, Dense) else (layer.out,)
        for name in outs:
            both = needs[name] == {"codes", "stream"} and not isinstance(layer, Norm)
            if both or (isinstance(layer, Lookup | Attend) and len(needs[name]) != 1):
                raise InputError(f"{name}: expected a LayerNorm between a sum and a product, got none")
    return needs


def _weight_units(weight: Tensor, bias: Tensor, parts: int) -> Tensor:
    """The scale of each output's weights: its largest is 127, and its bias is at most 2^30 of it.

    Queries, keys and values are parts of one product, with scales of their own.
    """
    amax = weight.abs().amax(1).view(parts, -1)
    largest = amax.amax(1, keepdim=True)
    least = torch.where(largest > 0, largest, 1.0) * LEAST_RATIO
    return torch.maximum(torch.maximum(amax, least).flatten() / 127, bias.abs() / BIAS_LIMIT)


def fixed_point(factors: Tensor, name: str) -> tuple[Tensor, int]:
    """(multiplier int32, shift) of real factors >= 0: the largest shift up to 62 that keeps multipliers below 2^31.

    Raises:
        InputError: a factor is 2^30 or more.
    """
    top = float(factors.max())
    if not top < 1 << 30:
        raise InputError(f"{name}: expected requantization factors below 2^30, got {top:.4g}")
    shift = MAX_SHIFT
    while shift > 1 and round(math.ldexp(top, shift)) >= 1 << 31:
        shift -= 1
    return torch.round(factors * 2.0**shift).to(torch.int32), shift


def _usable(x: Tensor, name: str) -> Tensor:
    """Scales of channels, those of channels that never move raised to a part of the largest."""
    largest = float(x.max())
    if not largest > 0:
        raise InputError(f"{name}: its calibrated range is zero, so that no scale can be chosen")
    return x.clamp(min=largest * LEAST_RATIO)


def _few(x: Tensor) -> tuple[float, ...]:
    """Scales as a program holds them: one where all are the same."""
    values = tuple(float(v) for v in x.float())
    return values[:1] if len(set(values)) == 1 else values


def _working_range(function, low: float, high: float, step: float) -> tuple[float, float]:
    """[low, high] without the ends where the function's value is the end's to a quarter of an output's step."""
    x = torch.linspace(low, high, 4097, dtype=torch.float64)
    y = function(x)
    moved = ((y - y[0]).abs() > step / 4).nonzero()
    if len(moved):
        low = float(x[max(int(moved[0]) - 1, 0)])
    moved = ((y - y[-1]).abs() > step / 4).nonzero()
    if len(moved):
        high = float(x[min(int(moved[-1]) + 1, len(x) - 1)])
    return low, high
