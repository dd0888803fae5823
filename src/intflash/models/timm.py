"""timm: `Attention` (ViT, DeiT), Swin v1 and v2, and every layer that calls torch's fused attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from intflash.models.base import Adapter, Core, calls_sdpa, redirected

# Attention over channels, whose "head_dim" is the number of tokens.
_UNFIT = ("ChannelAttention", "ChannelAttentionV2", "XCA")


class _Attention(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        gate = getattr(self, "gate", None)
        qkv = self.qkv(x)
        q, k, v = qkv.reshape(*qkv.shape[:-1], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        y = self.intflash_attention(q, k, v, attn_mask, is_causal, self.scale)
        y = y.transpose(1, 2).flatten(2)
        if hasattr(self, "norm"):  # like the gate, not in every version
            y = self.norm(y)
        if gate is not None:
            y = y * gate(x).sigmoid()
        return self.proj_drop(self.proj(y))


class _WindowAttention(WindowAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` ``[windows * B, N, C]``. `mask` ``[windows, N, N]`` is 0 between tokens that see each other."""
        core = self.intflash_attention
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = core(q, k, v, _window_mask(core, mask), scale=self.scale, bias=core.bias)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))

    @staticmethod
    def intflash_constants(module: WindowAttention, parent: nn.Module | None) -> dict[str, Any]:
        return {"bias": module._get_rel_pos_bias(), "keep": _shift_mask(parent)}


class _WindowAttentionV2(WindowAttentionV2):
    """Cosine attention: normalized Q and K, with the logit scale multiplied into Q."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        core = self.intflash_attention
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q = F.normalize(q, dim=-1) * self.logit_scale.clamp(max=math.log(100.0)).exp()
        y = core(q, F.normalize(k, dim=-1), v, _window_mask(core, mask), scale=1.0, bias=core.bias)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))

    @staticmethod
    def intflash_constants(module: WindowAttentionV2, parent: nn.Module | None) -> dict[str, Any]:
        tokens = module.window_size[0] * module.window_size[1]
        table = module.cpb_mlp(module.relative_coords_table).view(-1, module.num_heads)
        bias = table[module.relative_position_index.view(-1)].view(1, tokens, tokens, -1).permute(0, 3, 1, 2)
        return {"bias": 16 * torch.sigmoid(bias), "keep": _shift_mask(parent)}


def _shift_mask(block: nn.Module | None) -> Tensor | None:
    """Returns a block's mask of its shifted windows as bool ``[windows, 1, N, N]``, if it is known beforehand."""
    known = isinstance(block, SwinTransformerBlock | SwinTransformerV2Block)
    return (block.attn_mask == 0).unsqueeze(1) if known and block.attn_mask is not None else None


def _window_mask(core: Core, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of this call: the one that the core holds, unless the block made another (its dynamic_mask)."""
    if mask is None or (core.keep is not None and core.keep.shape[0] == mask.shape[0]):
        return None if mask is None else core.keep
    return (mask == 0).unsqueeze(1)


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    cls = type(module)
    if cls is Attention:
        return _Attention
    if cls is WindowAttention:
        return _WindowAttention
    if cls is WindowAttentionV2:
        return _WindowAttentionV2
    if cls.__name__ in _UNFIT:
        return f"{cls.__name__} attends over channels"
    if calls_sdpa(cls) and hasattr(module, "fused_attn"):
        return redirected(cls)
    return None


ADAPTER = Adapter(_patched_class)
