"""Small models with random weights of every family that timm, transformers and diffusers register, and their inputs.

A family that cannot be built small raises `Unbuildable` with the reason, which the tests show as a skip.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sharp import sharpen

LARGEST = 40_000_000  # parameters of a model that is still small
VOCABULARY = 256
TOKENS = 12

# Integers of a transformers configuration by name: the first pattern that fits decides.
SIZES = (
    (r"vocab_size|vocab_size_.*|.*_vocab_size", VOCABULARY),
    (r".*(key_value_heads|kv_heads)|multi_query_group_num", 2),
    (r".*heads|n_head|num_attention_heads_per_layer", 4),
    (r"num_hidden_groups", 1),
    (r".*_layers|n_layers?|depth|num_blocks|encoder_depth|num_layers_.*", 2),
    (r"hidden_size|d_model|n_embd|embed_dim|.*_hidden_size|embedding_size|dim|hidden_dim|d_embed|n_embed|.*_embed_dim", 64),
    (r"projection_dim|.*projection_size|.*_proj_dim|output_dim|pooler_.*size", 64),
    (r"intermediate_size|ffn_dim|d_ff|.*_ffn_dim|.*intermediate_size|d_inner|n_inner|ff_dim|dim_ff", 96),
    (r"head_dim|d_kv|d_head|attention_head_size|.*_head_dim", 16),
    (r"num_experts|num_local_experts|n_routed_experts|.*_num_experts", 4),
    (r"num_experts_per_tok|.*_topk|moe_topk", 2),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"max_position_embeddings|n_positions|max_sequence_length", 128),
)  # fmt: skip
# Tried from the smallest on: which patterns of SIZES apply.
LEVELS = (range(len(SIZES)), (0, 1, 2, 3, 4), (0, 3, 4), (4,))


class Unbuildable(Exception):
    """No small model of this family, and why."""


def _size(name: str, value: Any, level: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        depths = name in ("depths", "num_layers", "layers") and isinstance(value, list | tuple)
        return [2 if isinstance(x, int) else x for x in value] if depths else None
    if re.fullmatch(r".*(token_id|token_index|token_idx|_id)", name) and value >= VOCABULARY:
        return VOCABULARY - 1 - sum(map(ord, name)) % 100
    return next((SIZES[i][1] for i in level if re.fullmatch(SIZES[i][0], name)), None)


def _small_config(cls: type, level: Any) -> Any:
    from transformers import PreTrainedConfig

    default, given = cls(), {}
    for name, value in vars(default).items():
        if name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            given[name] = _small_config(type(value), level)
            if "dict" in str(inspect.signature(cls).parameters.get(name, "")):
                given[name] = given[name].to_dict()
        else:
            small = _size(name, value, level)
            if small is not None:
                given[name] = small
    for lists in ("layer_types", "mlp_layer_types", "block_types", "indexer_types", "layers_block_type"):
        value, layers = getattr(default, lists, None), given.get("num_hidden_layers")
        if isinstance(value, list) and layers:
            kinds = sorted(set(value), key=value.index)
            given[lists] = (kinds + [kinds[-1]] * layers)[:layers]
    return cls(**given)


def transformers_families() -> list[str]:
    """The model types that AutoModel builds."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    known = {config.model_type for config in MODEL_MAPPING}
    return sorted(name for name in CONFIG_MAPPING if name in known)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _class_of(family: str) -> tuple[type, type]:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config = CONFIG_MAPPING[family]
    found = MODEL_MAPPING[config]
    return config, found[0] if isinstance(found, tuple) else found


def transformers_model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """(model with "sdpa" or, where it has none, its own attention; inputs)."""
    try:
        config_class, model_class = _class_of(family)
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {error}") from error
    why: Exception | str = ""
    for level in LEVELS:
        try:
            config = _small_config(config_class, level)
            with torch.device("meta"):
                size = parameters(model_class(config))
            if size > LARGEST:
                why = why or f"{size} parameters"
                continue
            torch.manual_seed(0)
            model = sharpen(model_class(_small_config(config_class, level)))
            inputs = transformers_inputs(model)
            with torch.no_grad():
                first = values(model(**inputs))
            if not first.isfinite().all():
                raise ValueError("its output is not finite")
            return model, inputs
        except Exception as error:
            why = why or error
    raise Unbuildable(f"{type(why).__name__}: {why}"[:200])


def rebuilt(model: nn.Module, implementation: str) -> nn.Module:
    """The same model with another attention implementation, as loading does it."""
    config = type(model.config).from_dict(model.config.to_dict())
    twin = type(model)._from_config(config, attn_implementation=implementation)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def transformers_inputs(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(2)
    takes = inspect.signature(model.forward).parameters
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    vocabulary = min(getattr(text, "vocab_size", VOCABULARY) or VOCABULARY, 100)
    given: dict[str, Tensor] = {}
    if "input_ids" in takes:
        given["input_ids"] = torch.randint(3, vocabulary, (2, TOKENS))
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.long)
    if model.config.is_encoder_decoder and "decoder_input_ids" in takes:
        given["decoder_input_ids"] = torch.randint(3, vocabulary, (2, TOKENS))
    needs_pixels = "pixel_values" in takes and (
        "input_ids" not in takes or takes["pixel_values"].default is inspect.Parameter.empty or _both(model)
    )
    if needs_pixels:
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", 64) or 64
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3)) or 3
        given["pixel_values"] = torch.randn(2, channels, height, width)
    if "input_values" in takes and "input_ids" not in takes:
        given["input_values"] = torch.randn(2, 4000)
    if "input_features" in takes and "input_ids" not in takes:
        bins = getattr(model.config, "num_mel_bins", getattr(model.config, "input_feat_per_channel", 80))
        position = getattr(model.config, "max_source_positions", 60)
        given["input_features"] = torch.randn(2, bins, 2 * min(position, 1500))
    if not given:
        raise Unbuildable(f"inputs {list(takes)[:4]}")
    return given


def _both(model: nn.Module) -> bool:
    return model.config.model_type in (
        "clip",
        "siglip",
        "siglip2",
        "align",
        "altclip",
        "chinese_clip",
        "clipseg",
        "metaclip_2",
    )


def values(out: Any) -> Tensor:
    """The first floating tensor of an output."""
    if isinstance(out, Tensor):
        return out
    for x in out.values() if hasattr(out, "values") else out:
        found = x if isinstance(x, Tensor) else values(x) if isinstance(x, tuple | list | dict) and len(x) else None
        if found is not None and found.is_floating_point():
            return found
    raise Unbuildable("no tensor in its output")


def quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
