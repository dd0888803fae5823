"""Hugging Face transformers: `attn_implementation="intflash"`, registered with its mask on import of this module.

``AutoModel.from_pretrained(..., attn_implementation="intflash")`` works after importing this module,
with method "auto" (in causal layers `CAUSAL_METHOD`) and dynamic scales; `intflash.patch(model)` serves a
loaded model with any method and with static scales.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.models.swin.modeling_swin import SwinAttention
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from intflash.api import attention
from intflash.errors import InputError
from intflash.methods import AUTO
from intflash.models.base import CAUSAL_METHOD, CORE, CROSS_RECIPE, Adapter, calls_sdpa, redirected, uses_name
from intflash.models.transformers_masks import noting, window_of
from intflash.quant import QTensor

NAME = "intflash"
# The name that configurations hold instead of ours. In dozens of places transformers takes every name with "flash" in
# it for one of FlashAttention's packages, and then makes other masks or uses other attention.
INNER_NAME = "int_attention"
# The name for models without "sdpa". They add to their masks or append to them, as "eager" makes masks.
ADDED_NAME = "int_attention_added"
_OURS = (NAME, INNER_NAME, ADDED_NAME)

# Implementations whose masks are 4-D tensors, as ours are.
_SAME_MASKS = (None, "eager", "sdpa", INNER_NAME, ADDED_NAME)

# Those among them that hide later tokens by the mask alone: a call without a mask is not causal.
_HIDE_BY_MASK = (None, "eager", ADDED_NAME)

# Arguments of other attention implementations that cannot be ignored silently.
_UNSERVED = ("softcap", "head_mask", "output_attentions", "cache", "indices")

# Names of functions that make causal masks.
_CAUSAL_MASK = re.compile(r"causal.*mask|mask.*causal|masks_for_generate")

_SOFTCAP = "it caps its scores by tanh, where an integer exponent is linear in the products of codes"


def intflash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | QTensor,
    value: Tensor | QTensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: ``[B, H, N, D]`` tensors in, ``([B, N, H, Dv], None)`` out. A cache may give
    K and V as codes.

    As its "sdpa": a module is causal unless it says otherwise, by itself for more than one query without a mask; in a
    model with the masks of "eager", a call without a mask sees all keys. KV heads are not repeated. Attention sinks
    (`s_aux` of each head, `sinks` of each query) are keys of 0 with a value of 0 and the sinks as their bias.

    Raises:
        InputError: dropout, soft capping, a head mask, attention weights or an argument that only the module's own
            attention function knows.
    """
    _refuse_unserved(dropout, kwargs, _own_arguments(type(module)))
    causal = _says_causal(module) if is_causal is None else bool(is_causal)
    queries, keys = query.shape[2], key.shape[2]
    is_causal = causal and queries > 1 and attention_mask is None and not _hides_by_mask(module)
    of_decoder = queries != keys or _holds_decoder(module)
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    window = window_of(attention_mask, queries, keys) if sinks is None else None  # a sink is outside of every window
    if attention_mask is not None and not causal:
        causal = window.causal if window is not None else _may_hide_later(module, of_decoder)
    if is_causal and keys > queries:  # an empty static cache: the keys after the queries are not there yet
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    additive = window is None and attention_mask is not None and attention_mask.dtype != torch.bool
    if position_bias is not None and additive:
        position_bias, attention_mask = position_bias + attention_mask, None
    packed = attention_mask is None and kwargs.get("cu_seq_lens_q") is not None  # as FlashAttention gets them
    if sinks is not None:
        if packed:
            raise InputError("packed sequences (cu_seq_lens_q) with attention sinks are not served: pad them")
        key, value, attention_mask, position_bias = _with_sinks(
            query, key, value, attention_mask, position_bias, is_causal, sinks
        )
        is_causal = False
    core = getattr(module, CORE, None)
    options = {"bias": position_bias, "enable_gqa": query.shape[1] != key.shape[1]}
    cross = not causal and of_decoder
    if core is not None:
        options |= {"causal": causal, "cross": cross, "window": window}
    else:
        core = attention
        options |= {"method": CAUSAL_METHOD if causal else AUTO, "recipe": CROSS_RECIPE if cross else None}
        if window is not None:
            attention_mask, options = window.keep, options | window.options()
    if packed:
        if core is not attention:
            raise InputError("a patched model does not serve packed sequences (cu_seq_lens_q): load it with 'sdpa'")
        ends = {"cu_seqlens_q": kwargs["cu_seq_lens_q"], "cu_seqlens_k": kwargs["cu_seq_lens_k"]}
        options |= {name: x.to(torch.int32) for name, x in ends.items()}
    out = core(query, key, value, attention_mask, is_causal, scaling, **options)
    return out.transpose(1, 2).contiguous(), None


def _holds_decoder(module: nn.Module) -> bool:
    """Whether a layer's model has a causal decoder, whose queries may be this layer's."""
    config = getattr(module, "config", None)
    return any(getattr(config, name, False) for name in ("is_encoder_decoder", "is_decoder", "add_cross_attention"))


def _with_sinks(
    query: Tensor, key: Tensor | QTensor, value: Tensor | QTensor, mask: Tensor | None, bias: Tensor | None,
    is_causal: bool, sinks: Tensor,
) -> tuple[Tensor | QTensor, Tensor | QTensor, Tensor | None, Tensor]:  # fmt: skip
    """Returns keys, values, mask and bias with one more key, whose score is the sink and whose value is 0.

    `sinks` has one number per head, or is ``[B, H, queries, 1]``.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None and mask.dtype != torch.bool:
        bias, mask = mask if bias is None else bias + mask, None
    if is_causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()[None, None]
    sinks = sinks.detach().float()
    row = F.pad(sinks if sinks.ndim == 4 else sinks.reshape(1, -1, 1, 1), (keys, 0))
    bias = row if bias is None else F.pad(bias.float(), (0, 1)) + row
    mask = None if mask is None else F.pad(mask, (0, 1), value=True)
    return _with_zeros(key), _with_zeros(value), mask, bias


def _with_zeros(x: Tensor | QTensor) -> Tensor | QTensor:
    """Returns keys or values, of which a cache may have codes, with one more token of zeros."""
    return replace(x, data=_with_zeros(x.data)) if isinstance(x, QTensor) else F.pad(x, (0, 0, 0, 1))


# Arguments of an attention function that ours supports, or whose effect its mask includes already.
_SERVED = frozenset(inspect.signature(intflash_attention_forward).parameters) | {"s_aux", "sinks", "sliding_window"}


@functools.cache
def _own_arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    """Returns the arguments that the eager attention function beside a layer's class takes and ours does not
    support.
    """
    own = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
    return tuple(name for name in inspect.signature(own).parameters if name not in _SERVED) if own else ()


def _says_causal(module: nn.Module) -> bool:
    """Whether a layer of the interface is causal. As with transformers' "sdpa", a layer that does not say is, but where
    only masks hide later tokens and its file makes no such mask.
    """
    if hasattr(module, "is_causal"):
        return bool(module.is_causal)
    return not _hides_by_mask(module) or _makes_causal_masks(type(module))


def _hides_by_mask(module: nn.Module) -> bool:
    """Whether a layer's masks are those of "eager", which are there whenever a key is hidden."""
    return getattr(getattr(module, "config", None), "_attn_implementation", INNER_NAME) in _HIDE_BY_MASK


def _may_hide_later(module: nn.Module, of_decoder: bool) -> bool:
    """Whether the mask of a layer may hide later tokens although the layer does not say that it is causal.

    Decoders whose masks are always given need not say it, and some layers attend to their own tokens and an encoder's
    at once. The values of the mask would tell, but reading them would wait for a GPU.
    """
    return bool(getattr(module, "is_decoder", of_decoder)) and _makes_causal_masks(type(module))


@functools.cache
@torch.compiler.assume_constant_result  # torch.compile looks through the cache
def _makes_causal_masks(cls: type[nn.Module]) -> bool:
    """Whether the file of a layer's class has any function for causal masks."""
    names = dict(vars(sys.modules[cls.__module__]))
    for x in tuple(names.values()):
        if isinstance(x, type) and x.__module__ == cls.__module__:
            names |= vars(x)
    return any(_CAUSAL_MASK.search(name) for name in names)


def _refuse_unserved(dropout: float, options: dict[str, Any], own: tuple[str, ...] = ()) -> None:
    asked = [name for name in (*_UNSERVED, *own) if options.get(name) is not None and options[name] is not False]
    asked = list(dict.fromkeys(asked))
    if dropout != 0.0 or asked:
        raise InputError(f"attn_implementation 'intflash' does not serve {', '.join(asked) or f'dropout={dropout}'}")


for _name in _OURS:
    AttentionInterface.register(_name, intflash_attention_forward)
    AttentionMaskInterface.register(_name, noting(eager_mask if _name == ADDED_NAME else sdpa_mask))
for _name in ("sdpa", "eager"):  # a patched model makes its own masks
    AttentionMaskInterface.register(_name, noting(ALL_MASK_ATTENTION_FUNCTIONS[_name]))


def _inner(value: Any) -> Any:
    """Returns the implementation asked for (a name, or a dict of one per sub-configuration) with our name as
    `INNER_NAME`.
    """
    if isinstance(value, dict):
        return {key: _inner(x) for key, x in value.items()}
    return INNER_NAME if value == NAME else value


def _asked(value: Any) -> bool:
    """Whether a value of attn_implementation asks for ours anywhere."""
    return any(map(_asked, value.values())) if isinstance(value, dict) else value in _OURS


def _members(cls: type) -> list[Callable[..., Any]]:
    """Yields the functions of a class and of its bases outside torch."""
    if issubclass(cls, PreTrainedModel):  # a model, whose base class mentions all of these
        return []
    own = (base for base in cls.__mro__ if base is not object and not base.__module__.startswith("torch."))
    return [x for base in own for x in vars(base).values() if callable(x)]


@functools.cache
def _uses_interface(cls: type[nn.Module]) -> bool:
    return any(uses_name(x, "ALL_ATTENTION_FUNCTIONS") for x in _members(cls))


@functools.cache
def _own_attention(cls: type[nn.Module]) -> bool:
    """Whether a class computes attention itself, so that attn_implementation does not reach it."""
    names = ("softmax", "scaled_dot_product_attention", "logsumexp", "_flash_attention_forward")
    return not _uses_interface(cls) and any(uses_name(x, name) for x in _members(cls) for name in names)


def _load_refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Returns why a model class cannot run with attn_implementation="intflash", before it is built; None if it can."""
    if _soft_capped(config):
        return _SOFTCAP
    names = vars(sys.modules[cls.__module__])
    for name, choices in names.items():
        chosen = isinstance(choices, dict) and "eager" in choices and INNER_NAME not in choices
        if chosen and all(isinstance(x, type) and issubclass(x, nn.Module) for x in choices.values()):
            return f"it chooses its attention from {name}"
    interface = names.get("ALL_ATTENTION_FUNCTIONS")
    if "sdpa" in getattr(interface, "_local_mapping", ()):
        return "it has an 'sdpa' of its own"
    layers = [
        x for x in names.values()
        if isinstance(x, type) and issubclass(x, nn.Module) and "attention" in x.__name__.lower()
        and x.__module__ == cls.__module__
    ]  # fmt: skip
    own = [x.__name__ for x in layers if _own_attention(x)]
    # where a model has both kinds, this attribute of transformers says that all of it takes the masks of "sdpa"
    if own and not (cls._supports_sdpa and any(map(_uses_interface, layers))):
        return f"its {own[0]} does not use transformers' AttentionInterface"
    return None


def _soft_capped(owner: object) -> bool:
    """Whether a layer or configuration caps attention scores."""
    return any(getattr(owner, name, None) for name in ("attn_logit_softcapping", "attention_logits_soft_cap"))


def _refuse(cls: type, why: str) -> None:
    raise InputError(
        f'{cls.__name__} cannot run with attn_implementation="intflash": {why}. Load it with its own attention and try '
        "intflash.patch(model), which replaces the layers that it can and names those that it cannot"
    )


def _check_reached(model: PreTrainedModel) -> None:
    """Refuses a whole model in which no layer calls our attention."""
    if not any(_uses_interface(type(module)) for module in model.modules()):
        _refuse(type(model), "it has no attention layer that uses transformers' AttentionInterface")


def _install_name() -> None:
    """Registers the name in transformers: configurations hold `INNER_NAME`, and models that do not support it refuse
    it.
    """
    implementation = PreTrainedConfig._attn_implementation
    PreTrainedConfig._attn_implementation = property(
        implementation.fget, lambda config, value: implementation.fset(config, _inner(value))
    )
    checked, changed = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    @functools.wraps(checked)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        requested_attention = _inner(requested_attention)
        if requested_attention in _OURS:
            why = _load_refusal(type(self), self.config)
            if why is not None:
                _refuse(type(self), why)
            requested_attention = INNER_NAME if self._supports_sdpa else ADDED_NAME
        return checked(self, requested_attention, *args, **kwargs)

    @functools.wraps(changed)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        if _asked(attn_implementation):
            asked_of_all = not isinstance(attn_implementation, dict)
            for module in self.modules() if asked_of_all else ():
                why = _load_refusal(type(module), module.config) if isinstance(module, PreTrainedModel) else None
                if why is not None:
                    _refuse(type(module), why)
            _check_reached(self)
        return changed(self, _inner(attn_implementation), *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation
    for name in ("from_pretrained", "_from_config"):
        setattr(PreTrainedModel, name, _checking(vars(PreTrainedModel)[name]))


_building = threading.local()  # number of models under construction inside each other


def _checking(method: classmethod) -> classmethod:
    """Wraps a constructor so that it refuses a whole model in which no layer calls our attention, but not the parts
    that it builds.
    """
    build = method.__func__

    @functools.wraps(build)
    def checked(cls, *args, **kwargs):
        depth = getattr(_building, "depth", 0)
        _building.depth = depth + 1
        try:
            made = build(cls, *args, **kwargs)
        finally:
            _building.depth = depth
        model = made[0] if isinstance(made, tuple) else made  # with output_loading_info
        if depth == 0 and isinstance(model, PreTrainedModel) and model.config._attn_implementation in _OURS:
            _check_reached(model)
        return made

    return classmethod(checked)


_install_name()


class _SwinAttention(SwinAttention):
    """Swin's layer with its bias and its shift mask kept apart, which transformers would expand over the batch."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any):
        _refuse_unserved(0.0, kwargs)
        core = self.intflash_attention
        split = (hidden_states.shape[1], self.num_attention_heads, self.head_dim)
        q, k, v = (
            projection(hidden_states).view(-1, *split).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        keep = None if attention_mask is None else (attention_mask == 0).unsqueeze(1)
        out = core(q, k, v, keep, scale=self.scaling, bias=core.bias)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    @staticmethod
    def intflash_constants(module: SwinAttention, parent: nn.Module | None) -> dict[str, Tensor]:
        return {"bias": module.relative_position_bias()}


class _Swinv2SelfAttention(Swinv2SelfAttention):
    """Swin v2's cosine attention: normalized Q and K, with the logit scale multiplied into Q."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor]:
        _refuse_unserved(0.0, {"output_attentions": output_attentions})
        core = self.intflash_attention
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        q = F.normalize(q, dim=-1) * self.logit_scale.clamp(max=math.log(100.0)).exp()
        keep = None if attention_mask is None else (attention_mask == 0).unsqueeze(1)
        out = core(q, F.normalize(k, dim=-1), v, keep, scale=1.0, bias=core.bias)
        return (out.transpose(1, 2).flatten(2),)

    @staticmethod
    def intflash_constants(module: Swinv2SelfAttention, parent: nn.Module | None) -> dict[str, Tensor]:
        tokens = module.window_size[0] * module.window_size[1]
        table = module.continuous_position_bias_mlp(module.relative_coords_table).view(-1, module.num_attention_heads)
        bias = table[module.relative_position_index.view(-1)].view(1, tokens, tokens, -1).permute(0, 3, 1, 2)
        return {"bias": 16 * torch.sigmoid(bias)}


# Layers of other versions use the interface, or are left.
_REPLACED: dict[type[nn.Module], type[nn.Module]] = {}
if "combined_mask" in SwinAttention.forward.__code__.co_varnames:
    _REPLACED[SwinAttention] = _SwinAttention
if {"query_layer", "relative_position_bias_table"} <= set(Swinv2SelfAttention.forward.__code__.co_varnames):
    _REPLACED[Swinv2SelfAttention] = _Swinv2SelfAttention


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    cls = type(module)
    if cls in _REPLACED and "config" not in vars(module):
        return _REPLACED[cls]
    if not _uses_interface(cls):
        if calls_sdpa(cls):
            return redirected(cls)
        own = "attention" in cls.__name__.lower() and _own_attention(cls)
        return "it computes attention itself, not by transformers' AttentionInterface" if own else None
    if "config" not in vars(module):
        return None
    implementation = module.config._attn_implementation
    if implementation not in _SAME_MASKS:
        return f"its attn_implementation is {implementation!r}, whose masks differ: set 'sdpa' before patch"
    if getattr(module.config, "output_attentions", False):
        return "its configuration asks for attention weights (output_attentions), which are never there"
    if _soft_capped(module):
        return _SOFTCAP
    return _REPLACED.get(cls, cls)  # transformers itself calls the registered function for its own classes


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A configuration of the layer's own that selects our attention, because the model's may serve other layers and
    models.
    """
    if not _uses_interface(type(module)):
        return {}
    config = copy.deepcopy(module.config)
    config._attn_implementation = ADDED_NAME if _hides_by_mask(module) else INNER_NAME
    return {"config": config}


def _causal(module: nn.Module) -> bool:
    return _says_causal(module) if _uses_interface(type(module)) else bool(getattr(module, "is_causal", False))


ADAPTER = Adapter(_patched_class, _attributes, _causal)
