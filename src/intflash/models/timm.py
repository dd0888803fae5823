"""timm: `Attention` (ViT, DeiT), Swin's `WindowAttention`, and every layer that calls torch's fused attention."""

from __future__ import annotations

from typing import Any

from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from intflash.models.base import Adapter, calls_sdpa, redirected

# Attention over channels: its "head_dim" is the number of tokens.
_UNFIT = ("ChannelAttention", "ChannelAttentionV2", "XCA")


class _Attention(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        gate = getattr(self, "gate", None)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        y = self.intflash_attention(q, k, v, attn_mask, is_causal, self.scale)
        y = self.norm(y.transpose(1, 2).flatten(2))
        if gate is not None:
            y = y * gate(x).sigmoid()
        return self.proj_drop(self.proj(y))


class _WindowAttention(WindowAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` ``[windows * B, N, C]``; `mask` ``[windows, N, N]`` is 0 between tokens that see each other."""
        core = self.intflash_attention
        keep = core.keep
        if mask is None:
            keep = None
        elif keep is None or keep.shape[0] != mask.shape[0]:  # a mask made at run time (dynamic_mask)
            keep = (mask == 0).unsqueeze(1)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = core(q, k, v, keep, scale=self.scale, bias=core.bias)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))

    @staticmethod
    def intflash_constants(module: WindowAttention, parent: nn.Module | None) -> dict[str, Any]:
        mask = parent.attn_mask if isinstance(parent, SwinTransformerBlock) else None
        keep = None if mask is None else (mask == 0).unsqueeze(1)
        return {"bias": module._get_rel_pos_bias(), "keep": keep}


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    cls = type(module)
    if cls is Attention:
        return _Attention
    if cls is WindowAttention:
        return _WindowAttention
    if cls.__name__ in _UNFIT:
        return f"{cls.__name__} attends over channels"
    if calls_sdpa(cls) and hasattr(module, "fused_attn"):
        return redirected(cls)
    return None


ADAPTER = Adapter(_patched_class)
