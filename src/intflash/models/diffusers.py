"""diffusers: every attention layer with a processor that calls torch's scaled_dot_product_attention.

The layer keeps its processor, so norms, rotary embedding and added projections stay diffusers' own;
only that one call goes to IntFlash. Layers whose dispatcher is set to another attention backend are
left as they are.
"""

from __future__ import annotations

from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from intflash.models.base import Adapter, calls_sdpa, redirected

_NATIVE = (None, "native")


def _patched_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | str | None:
    if not isinstance(module, Attention | AttentionModuleMixin):
        return None
    processor = getattr(module, "processor", None)
    kind = type(processor).__name__
    code = getattr(type(processor).__call__, "__code__", None)
    names = code.co_names if code is not None else ()
    if "dispatch_attention_fn" in names:
        backend = getattr(processor, "_attention_backend", None)
        if getattr(backend, "value", backend) not in _NATIVE:
            return f"its attention backend is {backend}, only the native one can be replaced"
    elif "scaled_dot_product_attention" not in names and not calls_sdpa(type(module)):
        return f"its processor {kind} does not call scaled_dot_product_attention"
    return redirected(type(module))


ADAPTER = Adapter(_patched_class)
