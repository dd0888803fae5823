"""torch's own `nn.MultiheadAttention`, alone and in `nn.TransformerEncoder` and `nn.TransformerDecoder`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intflash.errors import InputError
from intflash.models.base import Adapter


class _MultiheadAttention(nn.MultiheadAttention):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As `nn.MultiheadAttention`, but returns None in place of the attention weights, which are never computed."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise InputError("a patched nn.MultiheadAttention takes padded tensors and masks, got nested tensors")
        batched = query.ndim == 3
        same, crossed = key is query and value is query, key is not query
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        keep, bias = self._masks(query.shape[:2], key.shape[1], key_padding_mask, attn_mask, is_causal)
        projected = self._projected(query, key, value, same)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        # with this hint the mask is the causal one and need not be read
        hidden = is_causal and key_padding_mask is None
        y = self.intflash_attention(q, k, v, keep, hidden, bias=bias, causal=is_causal, cross=crossed)
        y = F.linear(y.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return y.squeeze(0), None
        return (y if self.batch_first else y.transpose(0, 1)), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> list[Tensor]:
        if self.in_proj_weight is not None:
            if same:
                return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _masks(
        self, queries: torch.Size, keys: int, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the bool mask (True: takes part) and the additive mask, each of four axes. In torch's bool masks
        True hides.
        """
        if is_causal and attn_mask is None:
            raise InputError("is_causal is a hint about attn_mask, as in torch: give the mask too")
        if is_causal and padding is None:
            return None, None
        batch = queries[0]
        if attn_mask is not None:
            of_heads = attn_mask.ndim == 3
            attn_mask = attn_mask.unflatten(0, (batch, self.num_heads)) if of_heads else attn_mask[None, None]
        if padding is not None:
            padding = padding.view(batch, 1, 1, keys)
        keep = bias = None
        for mask in (attn_mask, padding):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                keep = ~mask if keep is None else keep & ~mask
            else:
                bias = mask if bias is None else bias + mask
        return keep, bias


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    if type(module) is not nn.MultiheadAttention:
        return None
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key of its own (add_bias_kv, add_zero_attn)"
    return _MultiheadAttention


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that make an `nn.TransformerEncoderLayer` call its `self_attn` instead of computing attention
    itself.
    """
    return {"_qkv_same_embed_dim": False}


def _around(module: nn.Module) -> dict[str, Any]:
    """Attributes that stop an `nn.TransformerEncoder` from packing padded sequences into nested tensors."""
    return {"use_nested_tensor": False} if isinstance(module, nn.TransformerEncoder) else {}


ADAPTER = Adapter(_patched_class, _attributes, around=_around)
