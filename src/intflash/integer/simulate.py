"""A graph in float64 with the quantizers of its program: what the scheme costs, apart from integer arithmetic.

Weights, codes, streams and the indices of tables are rounded to the program's scales; LayerNorm, softmax, activation
functions and requantization factors are exact. An integer model should come as close to the float model as this does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from intflash.integer.calibration import Calibration
from intflash.integer.graph import Attend, Dense, Graph
from intflash.integer.lower import Lowering, Options
from intflash.integer.registry import translate


def simulate(model: nn.Module, calibration: Calibration, options: Options, inputs: Mapping[str, Tensor]) -> dict:
    """The results of the model in float64, by name, quantized as `convert` with these options quantizes it.

    Args:
        inputs: by name, as `bind` gives them, on the CPU.
    """
    graph = translate(model, calibration.size)
    lowering = Lowering(graph, calibration, options)
    program = lowering.program()
    symmetric = {name for x in graph.layers if isinstance(x, Attend) for name in (x.q, x.k, x.v, x.out)}
    index = 1 << (options.activation_bits - 1)
    stream = 1 << (lowering.stream_bits - 1)

    def read(name: str, kind: str, x: Tensor) -> Tensor:
        if kind == "stream":
            scale = lowering.stream_scale[name]
            return torch.round(x / scale).clamp(-stream, stream - 1) * scale
        found = lowering.codes[name]
        low, high = (-index, index - 1) if name.endswith(Graph.PRE) else (-128 + (name in symmetric), 127)
        scale, offset = (y if y.numel() == 1 else _channels(y, x) for y in (found.scale, found.offset))
        return torch.round((x - offset) / scale).clamp(low, high) * scale + offset

    layers = []
    for layer in graph.layers:
        if isinstance(layer, Dense):
            x = lowering.codes[layer.x]
            weight = program.tensors[f"{layer.name}.weight"].double() * lowering.units[layer.name][:, None]
            scale, offset = (lowering.columns(y, weight.shape[1]) for y in (x.scale, x.offset))
            weight = weight / scale
            layer = replace(layer, weight=weight, bias=lowering.biases[layer.name] - weight @ offset)
        layers.append(layer)
    quantized = Graph(graph.inputs, layers, graph.shapes, graph.results)
    return quantized.run(inputs, torch.float64, read=read)


def _channels(y: Tensor, x: Tensor) -> Tensor:
    """A value of each channel as it broadcasts to rows, or, of heads, to ``[heads, 1, D]``."""
    return y.view(x.shape[2], 1, x.shape[4]) if x.ndim == 5 else y
