"""Hugging Face transformers: `attn_implementation="intflash"`, registered with its mask on import of this module.

``AutoModel.from_pretrained(..., attn_implementation="intflash")`` works after importing this module,
with method "intflash" and dynamic scales; `intflash.patch(model)` serves a loaded model with any
method and with static scales.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.masking_utils import sdpa_mask
from transformers.models.swin.modeling_swin import SwinAttention

from intflash.api import attention
from intflash.errors import InputError
from intflash.models.base import CORE, Adapter

NAME = "intflash"
# transformers takes every name that has "flash" in it for one of FlashAttention's packages, in dozens of
# places. `patch` therefore switches a layer to this name, for which layers do as they do for "sdpa".
PATCHED_NAME = "int_attention"

# Implementations whose masks are 4-D tensors, as ours are.
_SAME_MASKS = (None, "eager", "sdpa", NAME)

# What other attention implementations do with these cannot be left out silently.
_UNSERVED = ("softcap", "s_aux", "head_mask", "output_attentions", "cache", "indices")


def intflash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: ``[B, H, N, D]`` tensors in, ``([B, N, H, Dv], None)`` out.

    As its "sdpa": without a mask a module is causal if it says so, for more than one query; KV heads
    are not repeated.

    Raises:
        InputError: dropout, soft capping, attention sinks, a head mask or attention weights are asked for.
    """
    _refuse_unserved(dropout, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    queries, keys = query.shape[2], key.shape[2]
    is_causal = bool(is_causal) and queries > 1 and attention_mask is None
    if is_causal and keys > queries:  # an empty static cache: the keys after the queries are not there yet
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    if position_bias is not None and attention_mask is not None and attention_mask.dtype != torch.bool:
        position_bias, attention_mask = position_bias + attention_mask, None
    core = getattr(module, CORE, attention)
    options = {"bias": position_bias, "enable_gqa": query.shape[1] != key.shape[1]}
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:  # packed sequences, as FlashAttention
        if core is not attention:
            raise InputError("a patched model does not serve packed sequences (cu_seq_lens_q): load it with 'sdpa'")
        packed = {"cu_seqlens_q": kwargs["cu_seq_lens_q"], "cu_seqlens_k": kwargs["cu_seq_lens_k"]}
        options |= {name: ends.to(torch.int32) for name, ends in packed.items()}
    out = core(query, key, value, attention_mask, is_causal, scaling, **options)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unserved(dropout: float, options: dict[str, Any]) -> None:
    asked = [name for name in _UNSERVED if options.get(name) is not None and options[name] is not False]
    if dropout != 0.0 or asked:
        raise InputError(f"attn_implementation 'intflash' does not serve {', '.join(asked) or f'dropout={dropout}'}")


for _name in (NAME, PATCHED_NAME):
    AttentionInterface.register(_name, intflash_attention_forward)
    AttentionMaskInterface.register(_name, sdpa_mask)

_preload_flash = modeling_utils.lazy_import_flash_attention


@functools.wraps(_preload_flash)
def _preload(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Nothing to load for "intflash"; see `PATCHED_NAME`."""
    return None if implementation == NAME else _preload_flash(implementation, *args, **kwargs)


modeling_utils.lazy_import_flash_attention = _preload


class _SwinAttention(SwinAttention):
    """Swin's layer with its bias and shift mask apart, which transformers expands over the batch."""

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


# Another version's layer goes through the interface.
_SWIN = {SwinAttention: _SwinAttention} if "combined_mask" in SwinAttention.forward.__code__.co_varnames else {}


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    cls = type(module)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names or "config" not in vars(module):
        return None
    implementation = module.config._attn_implementation
    if implementation not in _SAME_MASKS:
        return f"its attn_implementation is {implementation!r}, whose masks differ: set 'sdpa' before patch"
    if getattr(module.config, "output_attentions", False):
        return "its configuration asks for attention weights (output_attentions), which are never there"
    return _SWIN.get(cls, cls)  # transformers itself calls the registered function for its own classes


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A configuration of the layer's own, switched to us: the model's own may serve other layers and models."""
    config = copy.deepcopy(module.config)
    config._attn_implementation = PATCHED_NAME
    return {"config": config}


ADAPTER = Adapter(_patched_class, _attributes)
