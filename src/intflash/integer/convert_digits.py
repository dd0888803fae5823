"""The digit models. Their stem (resizing and overlapping patches) is one linear map of an image's 64 pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intflash.digits.layers import Block
from intflash.digits.swin import WINDOW, DigitsSwin, WindowBlock
from intflash.digits.vit import DigitsViT
from intflash.integer.graph import Graph
from intflash.integer.registry import Converter, activation, expect
from intflash.integer.windows import ROW_MAJOR, merged, window_attention

PIXELS = 8  # a side of a digit


def vit(model: DigitsViT) -> Graph:
    """The graph of the digit ViT."""
    graph = Graph()
    weight, bias = stem(model.patches, model.SIZE)
    token, dim = model.class_token[0].detach(), model.class_token.shape[2]
    weight = torch.cat([torch.zeros(dim, weight.shape[1]), weight.flatten(0, 1)])
    bias = (torch.cat([token, bias]) + model.positions[0]).flatten()
    image = graph.patches("pixels", graph.image("images", (1, PIXELS, PIXELS)), (PIXELS, PIXELS))
    x = graph.linear("patches", image, weight, bias, view=(model.positions.shape[1], dim))
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        expect(block, name, Block)
        for part in ("qkv", "proj"):
            expect(getattr(block, part), f"{name}.{part}", nn.Linear)
        y = _norm(graph, f"{name}.norm1", x, block.norm1)
        q, k, v = graph.heads(f"{name}.qkv", y, block.qkv.weight, block.qkv.bias, block.heads)
        y = graph.attention(f"{name}.attention", q, k, v)
        x = graph.linear(f"{name}.proj", y, block.proj.weight, block.proj.bias, residual=x)
        x = mlp(graph, f"{name}.norm2", f"{name}.mlp", x, block.norm2, block.mlp)
    expect(model.head, "head", nn.Linear)
    y = _norm(graph, "norm", x, model.norm, load_rows=torch.tensor([[0]]))
    y = graph.linear("head", y, model.head.weight, model.head.bias)
    graph.output("logits", y, (model.head.out_features,))
    return graph


def swin(model: DigitsSwin) -> Graph:
    """The graph of the digit Swin."""
    graph = Graph()
    weight, bias = stem(model.patches, model.SIZE)
    tokens, dim = bias.shape
    image = graph.patches("pixels", graph.image("images", (1, PIXELS, PIXELS)), (PIXELS, PIXELS))
    x = graph.linear("patches", image, weight.flatten(0, 1), bias.flatten(), view=(tokens, dim))
    side = model.SIZE // 2
    for i, block in enumerate(model.stage1):
        x = _window_block(graph, f"stage1.{i}", x, block)
    norm, reduction = model.merge
    x = merged(graph, "merge", x, norm, reduction, (side, side), ROW_MAJOR, names=("0", "1"))
    for i, block in enumerate(model.stage2):
        x = _window_block(graph, f"stage2.{i}", x, block)
    expect(model.head, "head", nn.Linear)
    x = graph.mean("pool", _norm(graph, "norm", x, model.norm))
    x = graph.linear("head", x, model.head.weight, model.head.bias)
    graph.output("logits", x, (model.head.out_features,))
    return graph


def _window_block(graph: Graph, name: str, x: str, block: nn.Module) -> str:
    expect(block, name, WindowBlock)
    bias = block.bias_table.detach()[block.index].permute(2, 0, 1)[None]
    x = window_attention(
        graph, name, x, f"{name}.norm1", block.norm1, block, heads=block.heads, size=(block.size, block.size),
        window=(WINDOW, WINDOW), shift=(block.shift, block.shift), bias=bias,
    )  # fmt: skip
    return mlp(graph, f"{name}.norm2", f"{name}.mlp", x, block.norm2, block.mlp)


def mlp(graph: Graph, norm_name: str, name: str, x: str, norm: nn.LayerNorm, layers: nn.Sequential) -> str:
    """x + mlp(norm(x)) of a digit model's block."""
    fc1, act, fc2 = layers
    for part, linear in ("0", fc1), ("2", fc2):
        expect(linear, f"{name}.{part}", nn.Linear)
    y = _norm(graph, norm_name, x, norm)
    y = graph.linear(f"{name}.0", y, fc1.weight, fc1.bias, activation=activation(act, f"{name}.1"))
    return graph.linear(f"{name}.2", y, fc2.weight, fc2.bias, residual=x)


def _norm(graph: Graph, name: str, x: str, norm: nn.Module, load_rows: Tensor | None = None) -> str:
    expect(norm, name, nn.LayerNorm)
    return graph.layer_norm(name, x, norm, load_rows)


@torch.no_grad()
def stem(patches: nn.Conv2d, size: int) -> tuple[Tensor, Tensor]:
    """Weight ``[tokens, channels, 64]`` and bias ``[tokens, channels]`` of what a digit model does to its pixels."""
    expect(patches, "patches", nn.Conv2d)

    def tokens(images: Tensor) -> Tensor:
        resized = F.interpolate(images, size=(size, size), mode="bilinear")
        weight, bias = patches.weight.double(), patches.bias.double()
        return F.conv2d(resized - 0.5, weight, bias, patches.stride, patches.padding).flatten(2).transpose(1, 2)

    bias = tokens(torch.zeros(1, 1, PIXELS, PIXELS, dtype=torch.float64))
    pixels = torch.eye(PIXELS * PIXELS, dtype=torch.float64).view(-1, 1, PIXELS, PIXELS)
    return (tokens(pixels) - bias).permute(1, 2, 0).float(), bias[0].float()


CONVERTER = Converter(
    {DigitsViT: vit, DigitsSwin: swin},
    (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.ModuleList, nn.Sequential, Block, WindowBlock),
)
