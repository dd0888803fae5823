"""What an adapter is, and the module that every adapted attention layer calls for its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from intflash.api import attention
from intflash.errors import InputError
from intflash.methods import get_method
from intflash.numerics.exp import quantize_bias
from intflash.quant import Recipe

CORE = "intflash_attention"  # the name of the core in each adapted module


@dataclass(frozen=True)
class Adapter:
    """How one library's attention layers are replaced. A module of this package exports one as ADAPTER.

    Attributes:
        patched_class: (module, parent) -> the class that the module gets, a subclass of its own whose
            forward calls ``self.intflash_attention(q, k, v, ...)``; its own class where the library
            itself will call the core; None: no layer of this adapter; a str: why it is left as it is.
        attributes: (module) -> what replaces attributes of the module's own while it is patched.
    """

    patched_class: Callable[[nn.Module, nn.Module | None], type[nn.Module] | str | None]
    attributes: Callable[[nn.Module], dict[str, Any]] = lambda module: {}


class Core(nn.Module):
    """softmax(scale * q k^T + bias) v of one layer; subclasses say how.

    Holds the layer's constant relative-position bias and window mask as buffers that follow the model
    from device to device and never enter its state dict.
    """

    integer_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self.register_buffer("keep", None, persistent=False)

    def hold(self, bias: Tensor | None = None, keep: Tensor | None = None) -> None:
        """Keep a float bias ``[1, H, N, N]`` and a bool mask ``[W, 1, N, N]`` for this layer's calls, where given."""
        if bias is not None:
            bias = bias.detach()
            self.bias = quantize_bias(bias) if self.integer_bias else bias.clone()
        if keep is not None:
            self.keep = keep

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        bias: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``[B, H, N, Dv]`` as `intflash.attention`; the first axis of a mask may divide the batch."""
        raise NotImplementedError


class IntegerCore(Core):
    """Attention by an IntFlash method, with dynamic or static scales."""

    def __init__(
        self, method: str, recipe: Recipe | None, backend: str | None = None, check_finite: bool = False
    ) -> None:
        super().__init__()
        self.method, self.recipe, self.backend, self.check_finite = method, recipe, backend, check_finite
        self.integer_bias = get_method(method).integer_bias

    def forward(self, q, k, v, attn_mask=None, is_causal=False, scale=None, *, bias=None, enable_gqa=False):
        if self.training:
            raise InputError("IntFlash is for inference: call model.eval() before a patched model")
        if q.dtype != v.dtype or k.dtype != v.dtype:
            # under autocast norms and logit scales leave q or k in float32, where torch's attention casts too
            q, k = q.to(v.dtype), k.to(v.dtype)
        return attention(
            q, k, v, attn_mask, is_causal, scale, method=self.method, backend=self.backend, recipe=self.recipe,
            bias=bias, enable_gqa=enable_gqa, check_finite=self.check_finite,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Static scales follow the model's device, but stay float32 whatever its dtype becomes."""
        super()._apply(fn, recurse)
        if self.recipe is not None:
            self.recipe = _on_device(self.recipe, fn(torch.zeros(1)).device)
        return self


def _on_device(recipe: Recipe, device: torch.device) -> Recipe:
    """Static scales where a backend wants them: on a GPU tensors with a fixed address (CUDA graphs read them
    without a copy), on a CPU numbers where there is one.
    """

    def place(scale: Tensor | float) -> Tensor | float:
        if device.type == "cpu" and (not isinstance(scale, Tensor) or scale.numel() == 1):
            return float(scale)
        with torch.inference_mode(False):
            tensor = torch.as_tensor(scale, dtype=torch.float32).to(device, copy=True)
        tensor = tensor.reshape(1, 1, 1, 1) if tensor.ndim == 0 else tensor
        torch._dynamo.mark_static_address(tensor)
        return tensor

    given = {name: getattr(recipe, name) for name in ("q_scale", "k_scale", "v_scale")}
    return replace(recipe, **{name: place(scale) for name, scale in given.items() if scale is not None})


class FloatCore(Core):
    """torch's scaled_dot_product_attention, for observing a layer as it is without IntFlash."""

    def forward(self, q, k, v, attn_mask=None, is_causal=False, scale=None, *, bias=None, enable_gqa=False):
        if attn_mask is not None and attn_mask.ndim == q.ndim and 1 < attn_mask.shape[0] < q.shape[0]:
            attn_mask = attn_mask.repeat(q.shape[0] // attn_mask.shape[0], 1, 1, 1)
        if bias is not None:
            bias = bias.to(q.dtype)
            if attn_mask is None:
                attn_mask = bias
            elif attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, bias, float("-inf"))
            else:
                attn_mask = attn_mask + bias
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


class _Redirect(TorchFunctionMode):
    """While entered, scaled_dot_product_attention calls go to a core."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core, self.calls = core, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return _sdpa(self.core, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sdpa(
    core: Core, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """torch's signature of scaled_dot_product_attention, computed by a core."""
    if dropout_p != 0.0:
        raise InputError(f"dropout_p must be 0, IntFlash is for inference; got {dropout_p}")
    enable_gqa = enable_gqa or key.shape[-3] == 1 < query.shape[-3]  # torch broadcasts one KV head unasked
    return core(query, key, value, attn_mask, is_causal, scale, enable_gqa=enable_gqa)


@functools.cache
def redirected(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` whose forward is the same, but for scaled_dot_product_attention.

    For layers that call it exactly once; everything around it (norms, gates, rotary embedding) stays
    the library's own code.
    """

    def forward(self, *args, **kwargs):
        with _Redirect(getattr(self, CORE)) as redirect:
            out = cls.forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and redirect.calls != 1:
            raise InputError(f"{cls.__name__} called scaled_dot_product_attention {redirect.calls} times, expected 1")
        return out

    body = {
        "forward": forward,
        "fused_attn": property(lambda self: True),
        "__module__": cls.__module__,
        "__reduce_ex__": lambda self, protocol: (_blank, (cls,), vars(self)),  # pickle cannot find it by its name
    }
    return type(f"IntFlash{cls.__name__}", (cls,), body)


def _blank(cls: type[nn.Module]) -> nn.Module:
    """A redirected module of `cls` without its state, for pickle and deepcopy."""
    made = redirected(cls)
    return made.__new__(made)


def calls_sdpa(cls: type[nn.Module]) -> bool:
    """Does the forward of `cls` itself call torch's scaled_dot_product_attention?"""
    code = getattr(cls.forward, "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names
