"""transformers: ViT, DeiT and DINOv2, as encoders and classifiers, and BERT, as an encoder and with its usual heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert as bert
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.vit import modeling_vit as vit

from intflash.integer.graph import Activation, Graph
from intflash.integer.registry import Converter, activation, expect, expect_patches, refuse

PASS = (nn.Identity, nn.Dropout, dinov2.Dinov2DropPath)  # in evaluation mode
FIRST = torch.tensor([[0]])  # the row of the class token


def _check_results(model: nn.Module) -> None:
    """Refuse a configuration by which the model returns a tuple, or more than an integer model has."""
    for option, expected in {"return_dict": True, "output_hidden_states": False, "output_attentions": False}.items():
        found = getattr(model.config, option)
        if found != expected:
            refuse("", model, f"expected {option}={expected} in its configuration, got {found}")


def _read(names: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Tensor]]:
    """How the results of these names are read from what a model returns."""
    return lambda result: {name: getattr(result, name) for name in names}


def _norm(graph: Graph, name: str, x: str, norm: nn.Module, rows: Tensor | None = None, *, shown: str = "") -> str:
    expect(norm, name, nn.LayerNorm)
    return graph.layer_norm(shown or name, x, norm, rows)


def _linear(
    graph: Graph, name: str, x: str, linear: nn.Module, *, act: Activation | None = None, residual: str | None = None,
    scale: Tensor | None = None,
) -> str:  # fmt: skip
    """A linear, its rows times `scale`."""
    expect(linear, name, nn.Linear)
    weight, bias = linear.weight.detach(), linear.bias
    if scale is not None:
        weight = weight * scale[:, None]
        bias = None if bias is None else bias.detach() * scale
    return graph.linear(name, x, weight, bias, activation=act, residual=residual)


def _attention(
    graph: Graph, name: str, x: str, projections: Mapping[str, nn.Module], heads: int, scale: float, mask: str | None
) -> str:
    """Attention whose queries, keys and values have a linear each: one product."""
    for part, linear in projections.items():
        expect(linear, f"{name}.{part}", nn.Linear)
    linears = list(projections.values())
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias.detach() for x in linears]
    q, k, v = graph.heads(f"{name}.{'+'.join(projections)}", x, weight, torch.cat(biases), heads)
    return graph.attention(name, q, k, v, scale=scale, mask=mask)


def _pooled(graph: Graph, name: str, x: str, norm_name: str, norm: nn.Module, pooler: nn.Module) -> str:
    """The class token of LayerNorm(x), by a linear and its function."""
    expect(pooler, name, vit.ViTPooler, deit.DeiTPooler, bert.BertPooler)
    y = _norm(graph, norm_name, x, norm, FIRST, shown=f"{norm_name}[0]")
    return _linear(graph, f"{name}.dense", y, pooler.dense, act=activation(pooler.activation, f"{name}.activation"))


# Images

_ENCODERS = (vit.ViTModel, deit.DeiTModel, dinov2.Dinov2Model)
_CLASSIFIERS = {
    vit.ViTForImageClassification: "vit",
    deit.DeiTForImageClassification: "deit",
    deit.DeiTForImageClassificationWithTeacher: "deit",
    dinov2.Dinov2ForImageClassification: "dinov2",
}
_IMAGE_MODELS = (*_ENCODERS, *_CLASSIFIERS)


def image_model(model: nn.Module, image: tuple[int, ...] | None = None) -> Graph:
    """The graph of a ViT, DeiT or DINOv2.

    Args:
        image: channels, height and width; DINOv2 takes other sizes than its own.

    Raises:
        InputError: a module has no integer form; the message names it.
    """
    _check_results(model)
    graph = Graph(result="dict")
    prefix = _CLASSIFIERS.get(type(model), "")
    encoder = getattr(model, prefix) if prefix else model
    expect(encoder, prefix, *_ENCODERS)
    name = f"{prefix}." if prefix else ""
    if type(encoder) is dinov2.Dinov2Model:
        graph.resized = lambda other: image_model(model, other)
    x = _image_embeddings(graph, f"{name}embeddings", encoder.embeddings, image)
    if type(encoder) is dinov2.Dinov2Model:
        for i, layer in enumerate(encoder.encoder.layer):
            x = _dinov2_layer(graph, f"{name}encoder.layer.{i}", x, layer)
    else:
        for i, layer in enumerate(encoder.layers):
            x = _vit_layer(graph, f"{name}layers.{i}", x, layer)
    if prefix:
        _classifier(graph, f"{name}layernorm", x, encoder.layernorm, model)
    else:
        _features(graph, x, model)
    graph.read = _read(graph.results)
    return graph


def _image_embeddings(graph: Graph, name: str, module: nn.Module, image: tuple[int, ...] | None) -> str:
    """Patches, class and distillation tokens, and positions, interpolated as DINOv2 does for another size."""
    expect(module, name, vit.ViTEmbeddings, deit.DeiTEmbeddings, dinov2.Dinov2Embeddings)
    expect(module.dropout, f"{name}.dropout", *PASS)
    projection = module.patch_embeddings.projection
    expect_patches(projection, f"{name}.patch_embeddings.projection")
    channels, height, width = image or (projection.in_channels, *module.patch_embeddings.image_size)
    rows = graph.patches(
        f"{name}.patch_embeddings", graph.image("pixel_values", (channels, height, width)), projection.stride
    )
    tokens = [getattr(module, token, None) for token in ("cls_token", "distillation_token")]
    prefix = torch.cat([x.detach()[0] for x in tokens if x is not None])
    constant = torch.cat([prefix, prefix.new_zeros(graph.shapes[rows][0], prefix.shape[1])])
    positions = module.position_embeddings.detach()
    if type(module) is dinov2.Dinov2Embeddings:
        positions = module.interpolate_pos_encoding(constant[None], height, width).detach()
    constant = constant + positions[0]
    return graph.linear(
        f"{name}.patch_embeddings.projection", rows, projection.weight.flatten(1), projection.bias, residual=constant,
        store_rows=torch.arange(len(prefix), len(constant)),
    )  # fmt: skip


def _image_attention(graph: Graph, name: str, y: str, module: nn.Module) -> str:
    expect(module, name, vit.ViTAttention, deit.DeiTAttention, dinov2.Dinov2Attention)
    if not hasattr(module, "q_proj"):
        refuse(name, module, "a newer transformers is needed, in which it holds q_proj, k_proj, v_proj and o_proj")
    parts = {part: getattr(module, part) for part in ("q_proj", "k_proj", "v_proj")}
    return _attention(graph, name, y, parts, module.num_attention_heads, module.scaling, None)


def _mlp(graph: Graph, name: str, y: str, module: nn.Module, residual: str, scale: Tensor | None = None) -> str:
    expect(module, name, vit.ViTMLP, deit.DeiTMLP, dinov2.Dinov2MLP)
    act = activation(module.activation_fn, f"{name}.activation_fn")
    y = _linear(graph, f"{name}.fc1", y, module.fc1, act=act)
    return _linear(graph, f"{name}.fc2", y, module.fc2, residual=residual, scale=scale)


def _vit_layer(graph: Graph, name: str, x: str, layer: nn.Module) -> str:
    expect(layer, name, vit.ViTLayer, deit.DeiTLayer)
    expect(layer.dropout, f"{name}.dropout", *PASS)
    y = _norm(graph, f"{name}.layernorm_before", x, layer.layernorm_before)
    y = _image_attention(graph, f"{name}.attention", y, layer.attention)
    x = _linear(graph, f"{name}.attention.o_proj", y, layer.attention.o_proj, residual=x)
    y = _norm(graph, f"{name}.layernorm_after", x, layer.layernorm_after)
    return _mlp(graph, f"{name}.mlp", y, layer.mlp, x)


def _dinov2_layer(graph: Graph, name: str, x: str, layer: nn.Module) -> str:
    expect(layer, name, dinov2.Dinov2Layer)
    expect(layer.drop_path, f"{name}.drop_path", *PASS)
    for part in ("layer_scale1", "layer_scale2"):
        expect(getattr(layer, part), f"{name}.{part}", dinov2.Dinov2LayerScale)
    y = _norm(graph, f"{name}.norm1", x, layer.norm1)
    y = _image_attention(graph, f"{name}.attention", y, layer.attention)
    scale = layer.layer_scale1.lambda1.detach()
    x = _linear(graph, f"{name}.attention.o_proj", y, layer.attention.o_proj, residual=x, scale=scale)
    y = _norm(graph, f"{name}.norm2", x, layer.norm2)
    return _mlp(graph, f"{name}.mlp", y, layer.mlp, x, layer.layer_scale2.lambda1.detach())


def _features(graph: Graph, x: str, model: nn.Module) -> None:
    """The results of an encoder: every token, and what its pooler makes of the class token."""
    graph.output("last_hidden_state", _norm(graph, "layernorm", x, model.layernorm), graph.shapes[x])
    if type(model) is dinov2.Dinov2Model:
        pooled = _norm(graph, "layernorm", x, model.layernorm, FIRST, shown="layernorm[0]")
    elif model.pooler is None:
        return
    else:
        pooled = _pooled(graph, "pooler", x, "layernorm", model.layernorm, model.pooler)
    graph.output("pooler_output", pooled, (graph.shapes[pooled][1],))


def _classifier(graph: Graph, norm_name: str, x: str, norm: nn.Module, model: nn.Module) -> None:
    """The logits of the class token, and for some models those of another token or of the patches' mean."""
    if type(model) is deit.DeiTForImageClassificationWithTeacher:
        _teacher_logits(graph, _norm(graph, norm_name, x, norm, torch.tensor([[0], [1]])), model)
        return
    token = _norm(graph, norm_name, x, norm, FIRST)
    expect(model.classifier, "classifier", nn.Linear)
    if type(model) is not dinov2.Dinov2ForImageClassification:
        graph.output("logits", _linear(graph, "classifier", token, model.classifier), (model.num_labels,))
        return
    # class token and mean of the patches, side by side: the sum of two products
    weight = model.classifier.weight.detach().split(graph.shapes[x][1], dim=1)
    patches = graph.mean("patch_tokens", _norm(graph, norm_name, x, norm, shown=f"{norm_name}[all]"), 1)
    y = graph.linear("classifier.patch_tokens", patches, weight[1])
    y = graph.linear("classifier", token, weight[0], model.classifier.bias, residual=y)
    graph.output("logits", y, (model.num_labels,))


def _teacher_logits(graph: Graph, y: str, model: nn.Module) -> None:
    """Both heads and their average: products with the class and the distillation token, side by side."""
    heads = {"cls": model.cls_classifier, "distillation": model.distillation_classifier}
    for name, head in heads.items():
        expect(head, f"{name}_classifier", nn.Linear)
    weights, biases = (torch.stack([getattr(h, part).detach() for h in heads.values()]) for part in ("weight", "bias"))
    for name, part in {"logits": (0.5, 0.5), "cls_logits": (1.0, 0.0), "distillation_logits": (0.0, 1.0)}.items():
        weight = torch.cat([w * p for w, p in zip(weights, part, strict=True)], dim=1)
        bias = sum(b * p for b, p in zip(biases, part, strict=True))
        graph.output(name, graph.linear(name.replace("logits", "classifier"), y, weight, bias), (len(bias),))


# Sequences

_BERT_MODELS = (
    bert.BertModel, bert.BertForMaskedLM, bert.BertForPreTraining, bert.BertForSequenceClassification,
    bert.BertForTokenClassification, bert.BertForNextSentencePrediction,
)  # fmt: skip


def sequence_model(model: nn.Module, size: tuple[int, ...] | None = None) -> Graph:
    """The graph of a BERT for sequences of up to that many tokens, by default the most that it has positions for.

    Raises:
        InputError: a module has no integer form; the message names it.
    """
    _check_results(model)
    config = model.config
    if config.is_decoder or config.add_cross_attention:
        refuse("", model, "a decoder: causal and cross attention have no integer form")
    graph = Graph(result="dict", resized=lambda other: sequence_model(model, other))
    name, encoder = ("", model) if type(model) is bert.BertModel else ("bert.", model.bert)
    expect(encoder, name.rstrip("."), bert.BertModel)
    expect(encoder.embeddings, f"{name}embeddings", bert.BertEmbeddings)
    expect(encoder.embeddings.position_embeddings, f"{name}embeddings.position_embeddings", nn.Embedding)
    most = encoder.embeddings.position_embeddings.num_embeddings
    (tokens,) = size or (most,)
    if tokens > most:
        refuse(f"{name}embeddings.position_embeddings", encoder.embeddings, f"{tokens} tokens, it has {most} positions")
    x, norm_name, norm = _bert_embeddings(graph, f"{name}embeddings", encoder.embeddings, tokens)
    for i, layer in enumerate(encoder.encoder.layer):
        x, norm_name, norm = _bert_layer(graph, f"{name}encoder.layer.{i}", x, norm_name, norm, layer)
    _bert_results(graph, name, x, norm_name, norm, model, encoder)
    graph.read = _read(graph.results)
    return graph


Summed = tuple[str, str, nn.Module]  # a sum, and the name and module of the LayerNorm that reads it


def _bert_embeddings(graph: Graph, name: str, module: nn.Module, tokens: int) -> Summed:
    expect(module.dropout, f"{name}.dropout", *PASS)
    for part in ("word_embeddings", "token_type_embeddings"):
        expect(getattr(module, part), f"{name}.{part}", nn.Embedding)
    words, types = module.word_embeddings.weight, module.token_type_embeddings.weight
    ids = graph.index("input_ids", tokens, len(words))
    graph.mask("attention_mask", tokens)
    kinds = graph.index("token_type_ids", tokens, len(types), optional=True)
    rows = module.position_embeddings.weight[:tokens]
    return graph.embedding(name, (ids, kinds), (words, types), rows), f"{name}.LayerNorm", module.LayerNorm


def _bert_layer(graph: Graph, name: str, x: str, norm_name: str, norm: nn.Module, layer: nn.Module) -> Summed:
    """A layer reads a normalized sum, and leaves one that the next layer normalizes."""
    expect(layer, name, bert.BertLayer)
    expect(layer.attention, f"{name}.attention", bert.BertAttention)
    attn, out = layer.attention.self, layer.attention.output
    expect(attn, f"{name}.attention.self", bert.BertSelfAttention)
    expect(attn.dropout, f"{name}.attention.self.dropout", *PASS)
    if attn.is_causal:
        refuse(f"{name}.attention.self", attn, "its attention is causal")
    expect(out, f"{name}.attention.output", bert.BertSelfOutput)
    expect(layer.intermediate, f"{name}.intermediate", bert.BertIntermediate)
    expect(layer.output, f"{name}.output", bert.BertOutput)
    for part in (f"{name}.attention.output", out), (f"{name}.output", layer.output):
        expect(part[1].dropout, f"{part[0]}.dropout", *PASS)
    x = _norm(graph, norm_name, x, norm)
    parts = {part: getattr(attn, part) for part in ("query", "key", "value")}
    y = _attention(graph, f"{name}.attention.self", x, parts, attn.num_attention_heads, attn.scaling, "attention_mask")
    x = _linear(graph, f"{name}.attention.output.dense", y, out.dense, residual=x)
    x = _norm(graph, f"{name}.attention.output.LayerNorm", x, out.LayerNorm)
    act = activation(layer.intermediate.intermediate_act_fn, f"{name}.intermediate.intermediate_act_fn")
    y = _linear(graph, f"{name}.intermediate.dense", x, layer.intermediate.dense, act=act)
    x = _linear(graph, f"{name}.output.dense", y, layer.output.dense, residual=x)
    return x, f"{name}.output.LayerNorm", layer.output.LayerNorm


def _bert_results(
    graph: Graph, name: str, x: str, norm_name: str, norm: nn.Module, model: nn.Module, encoder: nn.Module
) -> None:
    """What a model returns, of the last layer's sum."""
    expect(getattr(model, "dropout", nn.Identity()), "dropout", *PASS)
    tokens, _ = graph.shapes[x]

    def hidden() -> str:
        return _norm(graph, norm_name, x, norm)

    def pooled() -> str:
        return _pooled(graph, f"{name}pooler", x, norm_name, norm, encoder.pooler)

    def of_pooled(result: str, head_name: str, head: nn.Module) -> None:
        y = _linear(graph, head_name, pooled(), head)
        graph.output(result, y, (head.out_features,))

    def words(result: str) -> None:
        head = model.cls.predictions
        expect(head, "cls.predictions", bert.BertLMPredictionHead)
        expect(head.transform, "cls.predictions.transform", bert.BertPredictionHeadTransform)
        part, transform = "cls.predictions.transform", head.transform
        act = activation(transform.transform_act_fn, f"{part}.transform_act_fn")
        y = _linear(graph, f"{part}.dense", hidden(), transform.dense, act=act)
        y = _norm(graph, f"{part}.LayerNorm", y, transform.LayerNorm)
        y = _linear(graph, "cls.predictions.decoder", y, head.decoder)
        graph.output(result, y, (tokens, head.decoder.out_features))

    match model:
        case bert.BertModel():
            graph.output("last_hidden_state", hidden(), graph.shapes[x])
            if model.pooler is not None:
                y = pooled()
                graph.output("pooler_output", y, (graph.shapes[y][1],))
        case bert.BertForMaskedLM():
            words("logits")
        case bert.BertForPreTraining():
            words("prediction_logits")
            of_pooled("seq_relationship_logits", "cls.seq_relationship", model.cls.seq_relationship)
        case bert.BertForNextSentencePrediction():
            of_pooled("logits", "cls.seq_relationship", model.cls.seq_relationship)
        case bert.BertForSequenceClassification():
            of_pooled("logits", "classifier", model.classifier)
        case bert.BertForTokenClassification():
            y = _linear(graph, "classifier", hidden(), model.classifier)
            graph.output("logits", y, (tokens, model.classifier.out_features))


CONVERTER = Converter(
    dict.fromkeys(_IMAGE_MODELS, image_model) | dict.fromkeys(_BERT_MODELS, sequence_model),
    (
        nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding, nn.ModuleList, *PASS, *_ENCODERS, bert.BertModel,
        vit.ViTEmbeddings, vit.ViTPatchEmbeddings, vit.ViTLayer, vit.ViTAttention, vit.ViTMLP, vit.ViTPooler,
        deit.DeiTEmbeddings, deit.DeiTPatchEmbeddings, deit.DeiTLayer, deit.DeiTAttention, deit.DeiTMLP,
        deit.DeiTPooler, dinov2.Dinov2Embeddings, dinov2.Dinov2PatchEmbeddings, dinov2.Dinov2Encoder,
        dinov2.Dinov2Layer, dinov2.Dinov2Attention, dinov2.Dinov2MLP, dinov2.Dinov2LayerScale, bert.BertEmbeddings,
        bert.BertEncoder, bert.BertLayer, bert.BertAttention, bert.BertSelfAttention, bert.BertSelfOutput,
        bert.BertIntermediate, bert.BertOutput, bert.BertPooler, bert.BertOnlyMLMHead, bert.BertPreTrainingHeads,
        bert.BertOnlyNSPHead, bert.BertLMPredictionHead, bert.BertPredictionHeadTransform,
    ),
)  # fmt: skip
