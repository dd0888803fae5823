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

from peaked_models import sharpen

LARGEST = 40_000_000  # parameters of a model that is still small
VOCABULARY = 256
TOKENS = 12

# Integers of a transformers configuration by name: the first matching pattern decides.
SIZES = (
    (r"vocab_size|vocab_size_.*|.*_vocab_size", VOCABULARY),
    (r".*(key_value_heads|kv_heads)|multi_query_group_num", 2),
    (r".*heads|n_head|num_attention_heads_per_layer", 4),
    (r"num_hidden_groups", 1),
    (r".*_layers|n_layers?|depth|num_blocks|encoder_depth|num_layers_.*", 2),
    (r"(.*_)?hidden_size|d_model|n_embd|(.*_)?embed_dim|embedding_size|dim|hidden_dim|d_embed|n_embed", 64),
    (r"projection_dim|.*projection_size|.*_proj_dim|output_dim|pooler_.*size", 64),
    (r"intermediate_size|ffn_dim|d_ff|.*_ffn_dim|.*intermediate_size|d_inner|n_inner|ff_dim|dim_ff", 96),
    (r"head_dim|d_kv|d_head|attention_head_size|.*_head_dim", 16),
    (r"num_experts|num_local_experts|n_routed_experts|.*_num_experts", 4),
    (r"num_experts_per_tok|.*_topk|moe_topk", 2),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"max_position_embeddings|n_positions|max_sequence_length", 128),
    (r"sliding_window|local_attention", 6),
)  # fmt: skip
# Which patterns of SIZES apply, tried from the smallest on.
LEVELS = (range(len(SIZES)), (0, 1, 2, 3, 4), (0, 3, 4), (4,))


class Unbuildable(Exception):
    """There is no small model of this family; the message says why."""


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
    """Returns the model types that AutoModel builds."""
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
    """Returns (the model with "sdpa" or, where it has none, its own attention; inputs)."""
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
    """Returns the same model with another attention implementation, as loading would build it."""
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
        "git",
        "metaclip_2",
    )


def values(out: Any) -> Tensor:
    """Returns the first floating-point tensor of an output."""
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


class ByName(nn.Module):
    """A model whose only input is called `x`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def timm_families() -> list[str]:
    """Returns timm's modules."""
    import timm

    return [name for name in timm.list_modules() if timm.list_models(module=name)]


def timm_model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns the smallest of a few models of a module, at its own image size."""
    import timm

    names = timm.list_models(module=family)
    small = [name for name in names if re.search(r"tiny|small|nano|mini|micro|atto|femto|pico|xx?s|_s\b", name)]
    sizes = {}
    for name in (small + names)[:6]:
        with torch.device("meta"):
            try:
                model = timm.create_model(name)
            except Exception:  # it computes with values while it is built
                continue
        sizes[name] = parameters(model) * model.default_cfg["input_size"][-1] ** 2
    if not sizes:
        raise Unbuildable("none can be built without memory")
    name = min(sizes, key=sizes.get)
    if sizes[name] > 100_000_000 * 224**2:
        raise Unbuildable(f"{name} is large")
    torch.manual_seed(0)
    model = sharpen(timm.create_model(name))
    image = torch.randn(1, *model.default_cfg["input_size"])
    return ByName(model).eval(), {"x": image}


# diffusers: sizes by name of the constructor's argument, and inputs by name of the forward's.
DIFFUSERS = dict(
    num_layers=2, num_single_layers=1, num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
    joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, cross_attention_dim=32,
    caption_channels=32, sample_size=8, patch_size=2, text_dim=32, freq_dim=16, ffn_dim=32, text_embed_dim=32,
    time_embed_dim=32,
)  # fmt: skip


def diffusers_families() -> list[str]:
    """Returns diffusers' denoising networks."""
    import diffusers

    return [
        name
        for name in diffusers._import_structure["models"]
        if re.search(r"Transformer\w*Model|DiT\w*Model|UNet", name)
    ]


def diffusers_model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import diffusers

    try:
        cls = getattr(diffusers, family)
        takes = inspect.signature(cls.__init__).parameters
        given = {
            name: size for name, size in DIFFUSERS.items() if name in takes and isinstance(takes[name].default, int)
        }
        with torch.device("meta"):
            size = parameters(cls(**given))
        if size > LARGEST:
            raise Unbuildable(f"{size} parameters")
        torch.manual_seed(0)
        model = sharpen(cls(**given))
        inputs = _diffusers_inputs(model)
        with torch.no_grad():
            first = values(model(**inputs))
        if not first.isfinite().all():
            raise Unbuildable("its output is not finite")
        return model, inputs
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {error}"[:200]) from error


def _diffusers_inputs(model: nn.Module) -> dict[str, Tensor]:
    takes = inspect.signature(model.forward).parameters
    config = model.config
    channels = config.get("in_channels", 4)
    text = next(
        (
            config[x]
            for x in ("cross_attention_dim", "joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels")
            if isinstance(config.get(x), int)
        ),
        32,
    )
    frames = "3D" in type(model).__name__
    latents = torch.randn(1, channels, 2, 8, 8) if frames else torch.randn(1, channels, 8, 8)
    if "img_ids" in takes:
        latents = torch.randn(1, 16, channels)
    found = {
        "hidden_states": latents, "sample": latents, "timestep": torch.tensor([10]),
        "encoder_hidden_states": torch.randn(1, 7, text), "pooled_projections": torch.randn(1, 32),
        "encoder_attention_mask": torch.ones(1, 7, dtype=torch.bool), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3), "class_labels": torch.tensor([1]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return {name: x for name, x in found.items() if name in takes}
