"""`Int8Cache`: a KV cache of int8 codes, for text generation with a patched transformers model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from intflash.errors import InputError
from intflash.models.base import CORE, IntegerCore
from intflash.models.transformers import ADAPTER
from intflash.quant import QTensor, Recipe
from intflash.quant.quantizers import codes_of


class Int8Cache(DynamicCache):
    """Keeps K and V of every layer as int8 codes, a quarter of the bytes of float32 and half of those of float16.

    Each token is quantized once, by the static scales that the model was patched with. The layers attend to the codes,
    so that a model computes the same bits as with transformers' own cache. The cache goes into ``model.generate(...,
    past_key_values=...)`` or a model's forward; what else `transformers.DynamicCache` does (beam search, cropping in
    assisted generation, sliding windows) works as with floats. One cache is for one sequence of calls.

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
        recipes = _recipes(model)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, DynamicLayer):  # state of linear attention
                continue
            if i not in recipes:
                raise InputError(f"layer {i} is not patched: call intflash.patch(model, scales=...) before Int8Cache")
            _check_recipe(recipes[i], i)
            if type(layer) is DynamicLayer:
                self.layers[i] = _CodesLayer()
            elif type(layer) is DynamicSlidingWindowLayer:
                self.layers[i] = _SlidingCodesLayer(layer.sliding_window)
            else:
                raise InputError(f"layer {i} needs a {type(layer).__name__}, of which Int8Cache has no form of codes")
            self.layers[i].recipe = recipes[i]


def _recipes(model: PreTrainedModel) -> dict[int, Recipe | None]:
    """The recipe of each patched causal layer, by the layer's index in a cache."""
    found: dict[int, Recipe | None] = {}
    for module in model.modules():
        core, index = module._modules.get(CORE), getattr(module, "layer_idx", None)
        if isinstance(core, IntegerCore) and index is not None and ADAPTER.causal(module):
            found[index] = core.recipe
    return found


def _check_recipe(recipe: Recipe | None, layer: int) -> None:
    if recipe is None or recipe.k_scale is None or recipe.v_scale is None:
        raise InputError(
            f"layer {layer} has no static scales of K and V, so that the codes of earlier tokens would change: give "
            "intflash.patch scales=intflash.calibrate(...)"
        )
    if recipe.smooth_k or recipe.rotate:
        raise InputError(f"layer {layer} smooths or rotates K, which Int8Cache does not: patch without it")


class _Codes:
    """What both kinds of layers do with new tokens; the class behind it in the order of bases stores codes as it would
    store floats.
    """

    recipe: Recipe

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[QTensor, QTensor]:
        new, bits = (key_states, value_states), self.recipe.bits
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
    """A layer whose memory grows by half, where `DynamicLayer` copies all tokens for each new one.

    `keys` and `values` are the first tokens of larger tensors. What replaces them (beam search) gets new memory.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values, self.rooms = key_states[:, :, :0], value_states[:, :, :0], {}
        for name, new in (("keys", key_states), ("values", value_states)):
            held = getattr(self, name)
            end = held.shape[2] + new.shape[2]
            room = self.rooms.get(name)
            if room is None or not _holds(room, held, end):
                self.rooms[name] = room = new.new_empty(*new.shape[:2], end + end // 2, new.shape[3])
                room[:, :, : held.shape[2]] = held
            room[:, :, held.shape[2] : end] = new
            setattr(self, name, room[:, :, :end])
        return self.keys, self.values


def _holds(room: Tensor, held: Tensor, end: int) -> bool:
    """Whether `held` is the first tokens of `room`, which has memory for `end` of them that may be written."""
    same = room.data_ptr() == held.data_ptr() and room.stride() == held.stride() and room.shape[0] == held.shape[0]
    return same and end <= room.shape[2] and (torch.is_inference_mode_enabled() or not room.is_inference())


class _CodesLayer(_Codes, _Growing):
    pass


class _SlidingCodesLayer(_Codes, DynamicSlidingWindowLayer):
    pass
