"""diffusers: every attention layer with a processor that calls torch's scaled_dot_product_attention.

The layer keeps its processor, so norms, rotary embedding and added projections stay diffusers' own;
only that call goes to IntFlash, or those calls where there are several (Wan's image keys, IP-Adapter).
Layers whose dispatcher is set to another attention backend are left as they are.
"""

from __future__ import annotations

from typing import Any

from diffusers.models import attention_processor
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention
from torch import nn

from intflash.models.base import Adapter, calls_sdpa, redirected, uses_name

_NATIVE = (None, "native")

# Processors that compute the softmax themselves -> the same computation by scaled_dot_product_attention.
_FUSED = {
    attention_processor.AttnProcessor: attention_processor.AttnProcessor2_0,
    attention_processor.AttnAddedKVProcessor: attention_processor.AttnAddedKVProcessor2_0,
}

# Processors that call scaled_dot_product_attention once for each sample of the batch.
_LOOPS = ("MochiAttnProcessor2_0",)


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    if not isinstance(module, Attention | AttentionModuleMixin | MochiAttention):
        return redirected(type(module)) if calls_sdpa(type(module)) else None
    processor = getattr(module, "processor", None)
    kind = _FUSED.get(type(processor), type(processor))
    call = kind.__call__
    if uses_name(call, "dispatch_attention_fn"):
        backend = getattr(processor, "_attention_backend", None)
        if getattr(backend, "value", backend) not in _NATIVE:
            return f"its attention backend is {backend}, only the native one can be replaced"
    elif not uses_name(call, "scaled_dot_product_attention") and not calls_sdpa(type(module)):
        return f"its processor {kind.__name__} does not call scaled_dot_product_attention"
    return redirected(type(module), kind.__name__ in _LOOPS)


def _attributes(module: nn.Module) -> dict[str, Any]:
    fused = _FUSED.get(type(vars(module).get("processor")))
    return {} if fused is None else {"processor": fused()}


ADAPTER = Adapter(_patched_class, _attributes)
