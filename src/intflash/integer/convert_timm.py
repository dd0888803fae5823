"""timm: Swin v1, and `VisionTransformer` and DeiT with class, distillation and register tokens and plain pooling."""

from __future__ import annotations

import torch
from timm.layers import ClassifierHead, DropPath, LayerNorm, Mlp, PatchDropout, PatchEmbed, SelectAdaptivePool2d
from timm.layers.adaptive_avgmax_pool import FastAdaptiveAvgPool
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    WindowAttention,
)
from timm.models.vision_transformer import Attention, Block, LayerScale, VisionTransformer
from torch import Tensor, nn

from intflash.integer.graph import Graph
from intflash.integer.registry import Converter, activation, expect, expect_patches, refuse
from intflash.integer.windows import merged, window_attention

NORMS = (nn.LayerNorm, LayerNorm)
PASS = (nn.Identity, nn.Dropout, PatchDropout, DropPath)  # in evaluation mode


def vision_transformer(model: VisionTransformer) -> Graph:
    """The graph of a timm ViT or DeiT.

    Raises:
        InputError: a module has no integer form; the message names it.
    """
    _check(model)
    graph = Graph()
    x = _embed(graph, model)
    for i, block in enumerate(model.blocks):
        x = _block(graph, f"blocks.{i}", x, block)
    _head(graph, model, x)
    return graph


def _check(model: VisionTransformer) -> None:
    """Refuse what the layers below do not show."""
    for name in ("pos_drop", "patch_drop", "head_drop"):
        expect(getattr(model, name), name, *PASS)
    expect(model.patch_embed, "patch_embed", PatchEmbed)
    expect(model.patch_embed.norm, "patch_embed.norm", nn.Identity)
    expect_patches(model.patch_embed.proj, "patch_embed.proj")
    if model.dynamic_img_size or model.patch_embed.dynamic_img_pad:
        refuse("", model, "dynamic_img_size: an integer model is made for one image size")
    if model.attn_pool is not None or model.global_pool not in ("token", "avg"):
        refuse("", model, f"global_pool {model.global_pool!r}, expected 'token' or 'avg'")
    if type(model) is VisionTransformerDistilled and model.num_classes == 0:
        refuse("", model, "it has no classifier")


def _embed(graph: Graph, model: VisionTransformer) -> str:
    """Patch embedding, prefix tokens and position embedding, as one linear and constant rows."""
    projection, (height, width) = model.patch_embed.proj, model.patch_embed.img_size
    rows = graph.patches("patch_embed", graph.image("x", (projection.in_channels, height, width)), projection.stride)
    prefix = [getattr(model, name, None) for name in ("cls_token", "dist_token", "reg_token")]
    prefix = torch.cat([x.detach()[0] for x in prefix if x is not None] or [torch.zeros(0, model.embed_dim)])
    constant = torch.cat([prefix, prefix.new_zeros(model.patch_embed.num_patches, model.embed_dim)])
    if model.pos_embed is not None:
        positions = model.pos_embed.detach()[0]
        constant[len(constant) - len(positions) :] += positions
    x = graph.linear(
        "patch_embed.proj", rows, projection.weight.flatten(1), projection.bias, residual=constant,
        store_rows=torch.arange(len(prefix), len(constant)),
    )  # fmt: skip
    if type(model.norm_pre) is nn.Identity:
        return x
    return _norm(graph, "norm_pre", x, model.norm_pre)


def _norm(graph: Graph, name: str, x: str, norm: nn.Module, rows: Tensor | None = None) -> str:
    expect(norm, name, *NORMS)
    return graph.layer_norm(name, x, norm, rows)


def _block(graph: Graph, name: str, x: str, block: nn.Module) -> str:
    expect(block, name, Block)
    attn = block.attn
    expect(attn, f"{name}.attn", Attention)
    for part in ("drop_path1", "drop_path2"):
        expect(getattr(block, part), f"{name}.{part}", *PASS)
    for part in ("q_norm", "k_norm", "norm", "attn_drop", "proj_drop"):
        expect(getattr(attn, part, nn.Identity()), f"{name}.attn.{part}", *PASS)
    expect(attn.qkv, f"{name}.attn.qkv", nn.Linear)
    if getattr(attn, "gate", None) is not None:
        refuse(f"{name}.attn.gate", attn.gate, "the attention output is gated")
    y = _norm(graph, f"{name}.norm1", x, block.norm1)
    q, k, v = graph.heads(f"{name}.attn.qkv", y, attn.qkv.weight, attn.qkv.bias, attn.num_heads)
    y = graph.attention(f"{name}.attn", q, k, v, scale=attn.scale)
    x = scaled_linear(graph, f"{name}.attn.proj", y, attn.proj, block.ls1, f"{name}.ls1", x)
    y = _norm(graph, f"{name}.norm2", x, block.norm2)
    return mlp(graph, f"{name}.mlp", y, block.mlp, block.ls2, f"{name}.ls2", x)


def mlp(graph: Graph, name: str, y: str, module: nn.Module, scale: nn.Module, scale_name: str, residual: str) -> str:
    """residual + scale * mlp(y) of a timm `Mlp`."""
    expect(module, name, Mlp)
    for part in ("drop1", "norm", "drop2"):
        expect(getattr(module, part), f"{name}.{part}", *PASS)
    for part in ("fc1", "fc2"):
        expect(getattr(module, part), f"{name}.{part}", nn.Linear)
    y = graph.linear(
        f"{name}.fc1", y, module.fc1.weight, module.fc1.bias, activation=activation(module.act, f"{name}.act")
    )
    return scaled_linear(graph, f"{name}.fc2", y, module.fc2, scale, scale_name, residual)


def scaled_linear(
    graph: Graph, name: str, x: str, linear: nn.Linear, scale: nn.Module, scale_name: str, residual: str
) -> str:
    """residual + scale * linear(x), the layer scale in the weights."""
    expect(linear, name, nn.Linear)
    weight, bias = linear.weight.detach(), linear.bias
    if type(scale) is not nn.Identity:
        expect(scale, scale_name, LayerScale)
        gamma = scale.gamma.detach()
        weight = weight * gamma[:, None]
        bias = None if bias is None else bias.detach() * gamma
    return graph.linear(name, x, weight, bias, residual=residual)


def _head(graph: Graph, model: VisionTransformer, x: str) -> None:
    distilled = type(model) is VisionTransformerDistilled
    prefix = model.num_prefix_tokens
    if model.global_pool == "avg":
        first = 0 if getattr(model, "pool_include_prefix", False) else prefix
        if type(model.norm) is not nn.Identity:
            x = _norm(graph, "norm", x, model.norm)
        x = graph.mean("pool", x, first)
        if type(model.fc_norm) is not nn.Identity:
            x = _norm(graph, "fc_norm", x, model.fc_norm)
    else:
        names = [name for name in ("norm", "fc_norm") if type(getattr(model, name)) is not nn.Identity]
        if len(names) != 1:
            refuse("", model, "expected one LayerNorm before the head")
        x = _norm(graph, names[0], x, getattr(model, names[0]), torch.tensor([[0], [1]] if distilled else [[0]]))
    if model.num_classes == 0:
        graph.output("logits", x, (model.embed_dim,))
        return
    heads = [("head", model.head)] + ([("head_dist", model.head_dist)] if distilled else [])
    for name, head in heads:
        expect(head, name, nn.Linear)
    # the average of two heads is one product with both tokens
    weight = torch.cat([head.weight.detach() / len(heads) for _, head in heads], dim=1)
    biases = [head.bias.detach() / len(heads) for _, head in heads if head.bias is not None]
    x = graph.linear("head", x, weight, sum(biases) if biases else None)
    graph.output("logits", x, (model.num_classes,))


def swin(model: SwinTransformer) -> Graph:
    """The graph of a timm Swin v1.

    Raises:
        InputError: a module has no integer form; the message names it.
    """
    expect(model.patch_embed, "patch_embed", PatchEmbed)
    if not model.patch_embed.strict_img_size or model.patch_embed.dynamic_img_pad:
        refuse("", model, "dynamic_img_size: an integer model is made for one image size")
    projection, (height, width) = model.patch_embed.proj, model.patch_embed.img_size
    expect_patches(projection, "patch_embed.proj")
    graph = Graph()
    rows = graph.patches("patch_embed", graph.image("x", (projection.in_channels, height, width)), projection.stride)
    x = graph.linear("patch_embed.proj", rows, projection.weight.flatten(1), projection.bias)
    if type(model.patch_embed.norm) is not nn.Identity:
        x = _norm(graph, "patch_embed.norm", x, model.patch_embed.norm)
    for i, stage in enumerate(model.layers):
        expect(stage, f"layers.{i}", SwinTransformerStage)
        if type(stage.downsample) is not nn.Identity:
            x = _merge(graph, f"layers.{i}.downsample", x, stage)
        for j, block in enumerate(stage.blocks):
            x = _window_block(graph, f"layers.{i}.blocks.{j}", x, block)
    head = model.head
    expect(head, "head", ClassifierHead)
    expect(head.drop, "head.drop", *PASS)
    expect(head.global_pool, "head.global_pool", SelectAdaptivePool2d)
    if head.global_pool.pool_type != "avg" or head.use_conv:
        refuse("head.global_pool", head.global_pool, f"pooling {head.global_pool.pool_type!r}, expected 'avg'")
    x = graph.mean("head.global_pool", _norm(graph, "norm", x, model.norm))
    if type(head.fc) is not nn.Identity:
        expect(head.fc, "head.fc", nn.Linear)
        x = graph.linear("head.fc", x, head.fc.weight, head.fc.bias)
    graph.output("logits", x, (graph.shapes[x][1],))
    return graph


def _merge(graph: Graph, name: str, x: str, stage: SwinTransformerStage) -> str:
    expect(stage.downsample, name, PatchMerging)
    expect(stage.downsample.norm, f"{name}.norm", *NORMS)
    return merged(graph, name, x, stage.downsample.norm, stage.downsample.reduction, stage.input_resolution)


def _window_block(graph: Graph, name: str, x: str, block: nn.Module) -> str:
    expect(block, name, SwinTransformerBlock)
    attn = block.attn
    expect(attn, f"{name}.attn", WindowAttention)
    for part in ("drop_path1", "drop_path2"):
        expect(getattr(block, part), f"{name}.{part}", *PASS)
    for part in ("attn_drop", "proj_drop"):
        expect(getattr(attn, part), f"{name}.attn.{part}", *PASS)
    expect(attn.softmax, f"{name}.attn.softmax", nn.Softmax)
    expect(block.norm1, f"{name}.norm1", *NORMS)
    x = window_attention(
        graph, f"{name}.attn", x, f"{name}.norm1", block.norm1, attn, heads=attn.num_heads,
        size=block.input_resolution, window=block.window_size, shift=block.shift_size,
        bias=attn._get_rel_pos_bias().detach(), scale=attn.scale,
    )  # fmt: skip
    y = _norm(graph, f"{name}.norm2", x, block.norm2)
    return mlp(graph, f"{name}.mlp", y, block.mlp, nn.Identity(), "", x)


CONVERTER = Converter(
    {VisionTransformer: vision_transformer, VisionTransformerDistilled: vision_transformer, SwinTransformer: swin},
    (
        nn.Linear, nn.Conv2d, nn.Sequential, nn.Softmax, *NORMS, *PASS, PatchEmbed, Block, Attention, Mlp, LayerScale,
        SwinTransformerStage, SwinTransformerBlock, WindowAttention, PatchMerging, ClassifierHead, SelectAdaptivePool2d,
        FastAdaptiveAvgPool,
    ),
)  # fmt: skip
