"""torchvision: `VisionTransformer` (`vit_b_16` and its kin) and Swin v1 (`swin_t`, `swin_s`, `swin_b`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchvision.models.swin_transformer import PatchMerging, ShiftedWindowAttention, SwinTransformer
from torchvision.models.swin_transformer import SwinTransformerBlock as WindowBlock
from torchvision.models.vision_transformer import Encoder, EncoderBlock, MLPBlock, VisionTransformer
from torchvision.ops.misc import MLP, Permute
from torchvision.ops.stochastic_depth import StochasticDepth

from intflash.integer.graph import Graph
from intflash.integer.registry import Converter, activation, expect, expect_patches, refuse
from intflash.integer.windows import merged, window_attention

PASS = (nn.Identity, nn.Dropout, StochasticDepth)  # in evaluation mode
SWIN_IMAGE = (3, 224, 224)  # a Swin takes any size; calibration images say which


def vision_transformer(model: VisionTransformer) -> Graph:
    """The graph of a torchvision ViT.

    Raises:
        InputError: a module has no integer form; the message names it.
    """
    graph, encoder = Graph(), model.encoder
    expect(encoder, "encoder", Encoder)
    rows = _patches(graph, "conv_proj", model.conv_proj, (3, model.image_size, model.image_size))
    expect(encoder.dropout, "encoder.dropout", *PASS)
    constant = encoder.pos_embedding.detach()[0].clone()
    constant[0] += model.class_token.detach()[0, 0]
    x = graph.linear(
        "conv_proj", rows, model.conv_proj.weight.flatten(1), model.conv_proj.bias, residual=constant,
        store_rows=torch.arange(1, len(constant)),
    )  # fmt: skip
    for block_name, block in encoder.layers.named_children():
        x = _block(graph, f"encoder.layers.{block_name}", x, block)
    x = _norm(graph, "encoder.ln", x, encoder.ln, torch.tensor([[0]]))
    layers = dict(model.heads.named_children())
    if "pre_logits" in layers:
        x = _linear(graph, "heads.pre_logits", x, layers["pre_logits"], act=("heads.act", layers["act"]))
    x = _linear(graph, "heads.head", x, layers["head"])
    graph.output("logits", x, (graph.shapes[x][1],))
    return graph


def _patches(graph: Graph, name: str, projection: nn.Module, image: tuple[int, int, int]) -> str:
    expect_patches(projection, name)
    return graph.patches(f"{name}.patches", graph.image("x", image), projection.stride)


def _norm(graph: Graph, name: str, x: str, norm: nn.Module, rows: torch.Tensor | None = None) -> str:
    expect(norm, name, nn.LayerNorm)
    return graph.layer_norm(name, x, norm, rows)


def _linear(graph: Graph, name: str, x: str, linear: nn.Module, *, act=None, residual: str | None = None) -> str:
    expect(linear, name, nn.Linear)
    function = None if act is None else activation(act[1], act[0])
    return graph.linear(name, x, linear.weight, linear.bias, activation=function, residual=residual)


def _block(graph: Graph, name: str, x: str, block: nn.Module) -> str:
    expect(block, name, EncoderBlock)
    expect(block.dropout, f"{name}.dropout", *PASS)
    attn = block.self_attention
    expect(attn, f"{name}.self_attention", nn.MultiheadAttention)
    if not (attn.batch_first and attn._qkv_same_embed_dim) or attn.bias_k is not None or attn.add_zero_attn:
        refuse(f"{name}.self_attention", attn, "expected batch_first, and no other width, bias or zeros of keys")
    y = _norm(graph, f"{name}.ln_1", x, block.ln_1)
    q, k, v = graph.heads(f"{name}.self_attention.in_proj", y, attn.in_proj_weight, attn.in_proj_bias, attn.num_heads)
    y = graph.attention(f"{name}.self_attention", q, k, v)
    out = attn.out_proj
    expect(out, f"{name}.self_attention.out_proj", NonDynamicallyQuantizableLinear)
    x = graph.linear(f"{name}.self_attention.out_proj", y, out.weight, out.bias, residual=x)
    return _mlp(graph, f"{name}.mlp", _norm(graph, f"{name}.ln_2", x, block.ln_2), block.mlp, x)


def _mlp(graph: Graph, name: str, y: str, module: nn.Module, residual: str) -> str:
    expect(module, name, MLP, MLPBlock)
    layers = {part: layer for part, layer in module.named_children() if type(layer) not in PASS}
    if len(layers) != 3:
        refuse(name, module, "expected linear, activation and linear")
    (first, fc1), (second, act), (third, fc2) = layers.items()
    y = _linear(graph, f"{name}.{first}", y, fc1, act=(f"{name}.{second}", act))
    return _linear(graph, f"{name}.{third}", y, fc2, residual=residual)


def swin(model: SwinTransformer, image: tuple[int, ...] = SWIN_IMAGE) -> Graph:
    """The graph of a torchvision Swin v1 for images ``(channels, height, width)``.

    Raises:
        InputError: a module has no integer form; the message names it.
    """
    graph = Graph(resized=lambda other: swin(model, other))
    stem, *stages = model.features
    expect(stem, "features.0", nn.Sequential)
    projection, permute, norm = stem
    expect(permute, "features.0.1", Permute)
    rows = _patches(graph, "features.0.0", projection, image)
    x = graph.linear("features.0.0", rows, projection.weight.flatten(1), projection.bias)
    x = _norm(graph, "features.0.2", x, norm)
    size = (image[1] // projection.stride[0], image[2] // projection.stride[1])
    for i, stage in enumerate(stages, 1):
        name = f"features.{i}"
        if isinstance(stage, nn.Sequential):
            for j, block in enumerate(stage):
                x = _window_block(graph, f"{name}.{j}", x, block, size)
            continue
        expect(stage, name, PatchMerging)
        expect(stage.norm, f"{name}.norm", nn.LayerNorm)
        x = merged(graph, name, x, stage.norm, stage.reduction, size)
        size = (size[0] // 2, size[1] // 2)
    for name in ("permute", "avgpool", "flatten"):
        expect(getattr(model, name), name, Permute, nn.AdaptiveAvgPool2d, nn.Flatten)
    x = graph.mean("avgpool", _norm(graph, "norm", x, model.norm))
    x = _linear(graph, "head", x, model.head)
    graph.output("logits", x, (graph.shapes[x][1],))
    return graph


def _window_block(graph: Graph, name: str, x: str, block: nn.Module, size: tuple[int, int]) -> str:
    expect(block, name, WindowBlock)
    expect(block.stochastic_depth, f"{name}.stochastic_depth", *PASS)
    attn = block.attn
    expect(attn, f"{name}.attn", ShiftedWindowAttention)
    expect(block.norm1, f"{name}.norm1", nn.LayerNorm)
    window = tuple(attn.window_size)
    # one window along an axis is not shifted
    shift = tuple(0 if w >= n else s for n, w, s in zip(size, window, attn.shift_size, strict=True))
    x = window_attention(
        graph, f"{name}.attn", x, f"{name}.norm1", block.norm1, attn, heads=attn.num_heads, size=size, window=window,
        shift=shift, bias=attn.get_relative_position_bias().detach(),
    )  # fmt: skip
    return _mlp(graph, f"{name}.mlp", _norm(graph, f"{name}.norm2", x, block.norm2), block.mlp, x)


CONVERTER = Converter(
    {VisionTransformer: vision_transformer, SwinTransformer: swin},
    (
        nn.Linear, NonDynamicallyQuantizableLinear, nn.LayerNorm, nn.Conv2d, nn.Sequential, nn.MultiheadAttention,
        nn.AdaptiveAvgPool2d, nn.Flatten, *PASS, Permute, Encoder, EncoderBlock, MLP, MLPBlock, WindowBlock,
        ShiftedWindowAttention, PatchMerging,
    ),
)  # fmt: skip
