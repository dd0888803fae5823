"""`Int8Cache`: a KV cache of int8 codes, for text generation with a patched transformers model."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from intflash import validate
from intflash.errors import InputError
from intflash.models.base import CORE, IntegerCore
from intflash.models.transformers import ADAPTER
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import codes_of


class Int8Cache(DynamicCache):
    """Keeps K and V of every layer as int8 codes, in about half of the memory of float16.

    Each token is quantized once, by the static scales that the model was patched with. The layers attend to the codes,
    so that a model computes the same bits as with transformers' own cache. The cache goes into ``model.generate(...,
    past_key_values=...)`` or a model's forward; what else `transformers.DynamicCache` does (beam search, cropping in
    assisted generation, sliding windows) works as with floats. Each conversation needs a cache of its own.

    Args:
        model: a decoder that `intflash.patch` has given static scales of K and V in every layer.

    Raises:
        InputError: it is no such model. The message names the first layer that is not served.

    Example:
        >>> import torch, intflash
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from intflash.models.transformers_cache import Int8Cache
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
        >>> prompt = torch.arange(8)[None]
        >>> scales = intflash.calibrate(model, [{"input_ids": prompt}])
        >>> with intflash.patch(model, "intflash_bfp", scales), torch.no_grad():
        ...     cache = Int8Cache(model)
        ...     logits = model(prompt, past_key_values=cache).logits
        >>> cache.layers[0].keys.dtype, cache.layers[0].keys.shape
        (torch.int8, torch.Size([1, 2, 8, 16]))
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model, PreTrainedModel):
            raise InputError(f"Int8Cache takes a transformers model, got {type(model).__name__}")
        if model.config.is_encoder_decoder:
            raise InputError(f"Int8Cache is for decoders alone, {type(model).__name__} has an encoder too")
        super().__init__(config=model.config)
        cores = _cores(model)
        of_images = getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, DynamicLayer) or i in of_images:  # state of linear attention; keys of an image
                continue
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise InputError(f"layer {i} needs a {type(layer).__name__}, of which Int8Cache has no form of codes")
            if i not in cores:
                raise InputError(
                    f"no patched attention says that it is layer {i}: call intflash.patch(model, scales=...) before "
                    "Int8Cache"
                )
            _check_recipe(cores[i].recipe, i)
            sliding = type(layer) is DynamicSlidingWindowLayer
            made = self.layers[i] = _SlidingCodesLayer(layer.sliding_window) if sliding else _CodesLayer()
            made.recipe, made.check_finite = cores[i].recipe, cores[i].check_finite


def _cores(model: PreTrainedModel) -> dict[int, IntegerCore]:
    """The cores of the decoder's layers by their index in a cache: of two kinds of attention the causal one."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(module._modules.get(CORE), IntegerCore) and index is not None:
            found.setdefault(index, []).append(module)
    cores = {}
    for index, layers in found.items():
        layers = [layer for layer in layers if ADAPTER.causal(layer)] or layers
        if len(layers) > 1:
            raise InputError(
                f"{type(model).__name__} has more than one attention for layer {index} of a cache: give Int8Cache the "
                "part of the model whose cache it is"
            )
        cores[index] = getattr(layers[0], CORE)
    return cores


def _check_recipe(recipe: Recipe | None, layer: int) -> None:
    if recipe is None or recipe.k_scale is None or recipe.v_scale is None:
        raise InputError(
            f"layer {layer} has no static scales of K and V, so that the codes of earlier tokens would change: patch "
            "with scales=intflash.calibrate(..., granularity={'k': 'head', 'v': 'head'})"
        )
    if recipe.smooth_k or recipe.rotate:
        raise InputError(f"layer {layer} smooths or rotates K, which Int8Cache does not: patch without it")
    for name, scale in (("k", recipe.k_scale), ("v", recipe.v_scale)):
        granularity, shape = getattr(recipe, name), scale.shape if isinstance(scale, Tensor) else ()
        of_batches = len(shape) == 2 or (len(shape) == 4 and shape[0] > 1)
        if granularity not in ("tensor", "head", "channel") or of_batches:
            raise InputError(
                f"layer {layer} needs scales of K and V for all batches and tokens, per tensor, head or channel; got "
                f"{granularity!r} of {name} in shape {list(shape)}"
            )


class _Codes:
    """What both kinds of layers do with new tokens; the class behind it in the order of bases stores codes as it would
    store floats.
    """

    recipe: Recipe
    check_finite: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[QTensor, QTensor]:
        # rotary embedding leaves keys in float32 under autocast, where a layer attends in the dtype of its values
        new, bits = (key_states.detach().to(value_states.dtype), value_states.detach()), self.recipe.bits
        if self.check_finite:
            for name, x in zip("kv", new, strict=True):
                validate.check_finite_tensor(x, name)
        if self.is_initialized and self.keys.numel() and self.keys.shape[0] != key_states.shape[0]:
            raise InputError(f"the cache holds {self.keys.shape[0]} sequences, got {key_states.shape[0]}")
        if not self.is_initialized:
            made = [self.recipe.quantize(name, x) for name, x in zip("kv", new, strict=True)]
            codes, self.scales = [x.data for x in made], [x.scale for x in made]
        else:  # without the checks of each call
            by = zip(new, self.scales, strict=True)
            codes = [codes_of(x.float(), scale, bits, self.recipe.rule) for x, scale in by]
        keys, values = super().update(*codes, *args, **kwargs)
        return (
            QTensor.unchecked(keys, self.scales[0], self.recipe.k, bits),
            QTensor.unchecked(values, self.scales[1], self.recipe.v, bits),
        )


class _Growing(DynamicLayer):
    """A layer with memory for more tokens behind its own, where `DynamicLayer` copies all tokens for each new one.

    `rooms` has that memory beside the view of it that is `keys` or `values`. Another tensor in their place (of beam
    search, or an older view) is copied.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        rooms = vars(self).setdefault("rooms", {})
        for name, new in (("keys", key_states), ("values", value_states)):
            held = getattr(self, name)
            start, end = held.shape[2], held.shape[2] + new.shape[2]
            view, room = rooms.get(name, (None, None))
            is_ours = view is not None and view() is held
            writable = is_ours and (torch.is_inference_mode_enabled() or not room.is_inference())
            if not writable or end > room.shape[2]:
                room = new.new_empty(*new.shape[:2], end + (end // 4 if is_ours else 16), new.shape[3])
                room[:, :, :start] = held
            room[:, :, start:end] = new
            held = room[:, :, :end]
            setattr(self, name, held)
            rooms[name] = weakref.ref(held), room
        return self.keys, self.values

    def reset(self) -> None:
        vars(self).pop("rooms", None)
        super().reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "rooms"}


class _CodesLayer(_Codes, _Growing):
    pass


class _SlidingCodesLayer(_Codes, DynamicSlidingWindowLayer):
    pass
