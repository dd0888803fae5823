"""What an adapter is, and the module that computes the attention of every patched layer."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from intflash.api import attention
from intflash.errors import InputError
from intflash.models.bias import exact_codes, fraction_bits, with_codes
from intflash.quant import QTensor, Recipe

CORE = "intflash_attention"  # the name of the core in each patched module

# The method of causal layers where the caller chose none. Q and K have a scale per token and V stays in floating point,
# so that no value of one token depends on a later token.
CAUSAL_METHOD = "int_flash_half"

# The recipe of the default method where the queries of a sequence, which may be causal, attend to the keys of another
# sequence.
CROSS_RECIPE = Recipe(q="token")


class Window(NamedTuple):
    """A sliding window and padding, which say what a mask of all queries and keys says.

    Attributes:
        keep: bool ``[B, 1, 1, Nk]``, False for padding; None where nothing is padded.
        window_size, causal_align: as for `intflash.attention`; causal where the window ends at the query's own key.
    """

    keep: Tensor | None
    window_size: tuple[int, int]
    causal_align: str

    @property
    def causal(self) -> bool:
        return self.window_size[1] == 0

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `intflash.attention` that go with the mask `keep`."""
        return {"window_size": self.window_size, "causal_align": self.causal_align}


@dataclass(frozen=True)
class Adapter:
    """How one library's attention layers are replaced. A module of this package exports one as ADAPTER.

    Attributes:
        patched_class: (module, parent) -> the class that the module gets, a subclass of its own whose
            forward calls ``self.intflash_attention(q, k, v, ...)``; its own class where the library
            itself will call the core; None: no layer of this adapter; a str: why it is left as it is.
        attributes: (module) -> what replaces attributes of the module's own while it is patched.
        causal: (module) -> whether the module says that its tokens must not see later ones.
        around: (module) -> what replaces attributes of a module that holds patched layers.
    """

    patched_class: Callable[[nn.Module, nn.Module | None], type[nn.Module] | str | None]
    attributes: Callable[[nn.Module], dict[str, Any]] = lambda module: {}
    causal: Callable[[nn.Module], bool] = lambda module: bool(getattr(module, "is_causal", False))
    around: Callable[[nn.Module], dict[str, Any]] = lambda module: {}


class Core(nn.Module):
    """softmax(scale * q k^T + bias) v of one layer; subclasses say how.

    Holds the layer's constant relative-position bias and window mask as buffers that follow the model
    from device to device and never enter its state dict.
    """

    bias_fraction_bits: int | None = None  # of a float bias that the method quantizes

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self.register_buffer("keep", None, persistent=False)
        self.causal = False  # the layer declares it, but its calls may not say so
        self.record = {"ran": False}  # a dict, because setting an attribute of an nn.Module takes ten times as long

    def at(self, call: int) -> Core:
        """Returns the core of the layer's n-th call of attention in one forward, counted from 0."""
        return self

    def check_calls(self, calls: int) -> None:
        """Refuses a forward that made another number of calls than the core expects."""

    def hold(self, bias: Tensor | None = None, keep: Tensor | None = None) -> None:
        """Stores a float bias ``[1, H, N, N]`` and a bool mask ``[W, 1, N, N]`` for this layer's calls, where given."""
        if bias is not None:
            bias = bias.detach()
            bits = self.bias_fraction_bits
            codes = None if bits is None or bias.is_meta else exact_codes(bias, bits)
            self.bias = bias.clone() if codes is None else codes
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
        causal: bool = False,
        cross: bool = False,
        window: Window | None = None,
    ) -> Tensor:
        """Returns ``[B, H, N, Dv]`` as `intflash.attention` does. The first axis of a mask may divide the batch.

        `causal`: later tokens must not change this output, although a mask hides them and not `is_causal`. `cross`: the
        keys belong to another sequence, so that only the scale of Q could make one token depend on others. `window`:
        what `attn_mask` says, for a core that needs not read it.
        """
        raise NotImplementedError


class IntegerCore(Core):
    """Attention by an IntFlash method, with dynamic or static scales.

    Args:
        method, recipe, backend, check_finite: as for `intflash.attention`.
        causal_method: the method of causal calls; "" refuses them.
        cross_recipe: the recipe of calls with another sequence's keys; None: `recipe`.
        others: where a layer calls attention several times in one forward, the static recipes of its second and
            further calls.
    """

    def __init__(
        self,
        method: str,
        recipe: Recipe | None,
        backend: str | None = None,
        check_finite: bool = False,
        causal_method: str | None = None,
        cross_recipe: Recipe | None = None,
        others: Sequence[Recipe] = (),
    ) -> None:
        super().__init__()
        self.method, self.recipe, self.backend, self.check_finite = method, recipe, backend, check_finite
        self.causal_method = method if causal_method is None else causal_method
        self.cross_recipe = cross_recipe
        self.bias_fraction_bits = fraction_bits(method)
        self.others = nn.ModuleList(IntegerCore(method, other, backend, check_finite) for other in others)

    @property
    def static(self) -> bool:
        return self.recipe is not None and any(scale is not None for scale in self.recipe.scales)

    def at(self, call: int) -> Core:
        if call == 0 or not self.static:
            return self
        if call > len(self.others):
            self.check_calls(call + 1)
        return self.others[call - 1]

    def check_calls(self, calls: int) -> None:
        if self.static and calls != 1 + len(self.others):
            raise InputError(
                f"the static scales are for {1 + len(self.others)} attention calls in a forward of this layer, it made "
                f"{calls}: calibrate with the inputs and adapters that the model is used with"
            )

    def forward(
        self, q, k, v, attn_mask=None, is_causal=False, scale=None, *, bias=None, enable_gqa=False,
        causal=False, cross=False, window=None,
    ):  # fmt: skip
        if self.training:
            raise InputError("IntFlash is for inference: call model.eval() before a patched model")
        self.record["ran"] = True
        method, recipe = self.method, self.recipe
        if (is_causal or causal or self.causal) and self.causal_method != method:
            if not self.causal_method:
                raise InputError(causal_refusal(method))
            method, recipe = self.causal_method, None
        elif cross and self.cross_recipe is not None:
            recipe = self.cross_recipe
        if k.shape[-2] == 0:
            return without_keys(q, v)
        if isinstance(k, QTensor):  # from a cache of codes, whose scales are the recipe's
            recipe = None if recipe is None else replace(recipe, k_scale=None, v_scale=None)
            if torch.is_autocast_enabled(q.device.type):
                q = q.to(torch.get_autocast_dtype(q.device.type))  # as values that are no codes have it
        elif q.dtype != v.dtype or k.dtype != v.dtype:
            # under autocast, norms and logit scales leave q or k in float32; torch's attention casts them too
            q, k = q.to(v.dtype), k.to(v.dtype)
        options = {}
        if window is not None:
            attn_mask, options = window.keep, window.options()
        return self.attend(
            q, k, v, attn_mask, is_causal, scale, causal=is_causal or causal or self.causal, method=method,
            recipe=recipe, bias=bias, enable_gqa=enable_gqa, **options,
        )  # fmt: skip

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, *,
        causal: bool, method: str, bias: Tensor | None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """The attention of a call, in one process; `causal`: later tokens are hidden, be it by the mask."""
        bits = fraction_bits(method)
        if bits is not None and not self.check_finite:  # of codes no value could be checked
            attn_mask, bias = with_codes(attn_mask, bias, bits)
        return attention(
            q, k, v, attn_mask, is_causal, scale, method=method, bias=bias, backend=self.backend,
            check_finite=self.check_finite, **options,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Keeps static scales in float32 when the dtype of the layer changes; they follow the model's device."""
        super()._apply(fn, recurse)
        if self.recipe is not None:
            self.recipe = _on_device(self.recipe, fn(torch.zeros(1)).device)
        return self


def without_keys(q: Tensor, v: Tensor) -> Tensor:
    """Computes attention over no keys, as torch does: zeros."""
    return v.new_zeros(*q.shape[:-1], v.shape[-1])


def _on_device(recipe: Recipe, device: torch.device) -> Recipe:
    """Converts static scales to what a backend prefers: on a GPU tensors with a fixed address, which CUDA graphs
    read without a copy; on a CPU numbers, where there is a single scale.
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


# Methods that compute scales over all tokens internally, whatever their recipe says.
_SCALES_WITHIN = ("fp8", "fp8_head")


def keeps_causality(method: str, recipe: Recipe) -> bool:
    """Whether no code or scale of one token depends on another token, so that later tokens change no earlier output."""

    def of_one_token(name: str) -> bool:
        granularity = getattr(recipe, name)
        alone = granularity in ("token", "none") or (granularity == "block" and recipe.block_size == 1)
        return alone or getattr(recipe, f"{name}_scale") is not None

    return method not in _SCALES_WITHIN and not recipe.smooth_k and all(of_one_token(name) for name in "qkv")


def causal_refusal(method: str) -> str:
    """Returns why a causal layer must not use this method with dynamic scales."""
    return (
        f"method {method!r} takes its dynamic scales over all tokens, so that in a causal layer later tokens would "
        f"change earlier outputs: give scales=intflash.calibrate(...), method={CAUSAL_METHOD!r} (scales per token), or "
        "a recipe, which is taken as it is"
    )


class FloatCore(Core):
    """torch's scaled_dot_product_attention, to observe a layer as it is without IntFlash."""

    def forward(
        self, q, k, v, attn_mask=None, is_causal=False, scale=None, *, bias=None, enable_gqa=False,
        causal=False, cross=False, window=None,
    ):  # fmt: skip
        self.record["ran"] = True
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
        if is_causal and attn_mask is not None:  # torch takes one of them
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            if attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & seen
            else:
                attn_mask = attn_mask.masked_fill(~seen, float("-inf"))
            is_causal = False
        with torch._C.DisableTorchFunction():  # not a call of the layer that holds this one
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )


class _Redirect(TorchFunctionMode):
    """A context in which calls of scaled_dot_product_attention go to a core."""

    def __init__(self, core: Core, one_core: bool = False) -> None:
        super().__init__()
        self.core, self.one_core, self.calls = core, one_core, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            core = self.core if self.one_core else self.core.at(self.calls)
            self.calls += 1
            return _sdpa(core, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sdpa(
    core: Core, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """scaled_dot_product_attention with torch's signature, computed by a core."""
    if dropout_p != 0.0:
        raise InputError(f"dropout_p must be 0, IntFlash is for inference; got {dropout_p}")
    if query.ndim == 2:  # torch takes one head without its axis
        return _sdpa(core, query[None], key[None], value[None], attn_mask, 0.0, is_causal, scale)[0]
    enable_gqa = enable_gqa or key.shape[-3] == 1 < query.shape[-3]  # torch broadcasts a single KV head
    return core(query, key, value, attn_mask, is_causal, scale, enable_gqa=enable_gqa)


def run_redirected(module: nn.Module, forward: Callable[..., Any], may_skip: bool, args: tuple, kwargs: dict) -> Any:
    """Runs a layer's forward with its scaled_dot_product_attention calls computed by the layer's core.

    A layer may call it several times (text and image keys, an adapter's keys). Each call has its own static scales.
    `may_skip`: a wrapper may return what an earlier forward computed.
    """
    core = module._modules.get(CORE)
    if core is None:  # a wrapper kept this forward after `unpatch`
        return forward(*args, **kwargs)
    one_core = module.intflash_one_core
    with _Redirect(core, one_core) as redirect:
        out = forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        if redirect.calls == 0 and not may_skip:
            raise InputError(
                f"the forward of {type(module).__bases__[0].__name__} did not call scaled_dot_product_attention, which "
                "IntFlash replaces: choose the layer's 'sdpa' implementation, or unpatch the model"
            )
        if redirect.calls and not one_core:
            core.check_calls(redirect.calls)
    return out


@functools.cache
def redirected(cls: type[nn.Module], one_core: bool = False) -> type[nn.Module]:
    """Returns a subclass of `cls` with the same forward, except for scaled_dot_product_attention.

    Everything around it (norms, gates, rotary embedding) stays the library's own code. `one_core`: the layer calls it
    in a loop over its inputs, so that the calls share their scales.
    """

    def forward(self, *args, **kwargs):
        return run_redirected(self, functools.partial(cls.forward, self), False, args, kwargs)

    body = {
        "forward": forward,
        "fused_attn": property(lambda self: True),
        "intflash_one_core": one_core,
        "__module__": cls.__module__,
        # because its name cannot be imported
        "__reduce_ex__": lambda self, protocol: (_blank, (cls, one_core), vars(self)),
    }
    return type(f"IntFlash{cls.__name__}", (cls,), body)


def _blank(cls: type[nn.Module], one_core: bool = False) -> nn.Module:
    """Returns a redirected module of `cls` without its state, for pickle and deepcopy."""
    made = redirected(cls, one_core)
    return made.__new__(made)


class WrappedForward:
    """The forward of a redirected module that a wrapper (offloading, caching) has replaced in the instance."""

    def __init__(self, module: nn.Module, wrapper: Callable[..., Any]) -> None:
        self.module, self.wrapper = module, wrapper
        functools.update_wrapper(self, wrapper, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_redirected(self.module, self.wrapper, True, args, kwargs)


def calls_sdpa(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` itself calls torch's scaled_dot_product_attention."""
    return uses_name(cls.forward, "scaled_dot_product_attention")


def uses_name(function: object, name: str) -> bool:
    """Whether a Python function, or a function inside it, refers to a global or attribute of that name."""

    def within(code: types.CodeType) -> bool:
        return name in code.co_names or any(within(x) for x in code.co_consts if isinstance(x, types.CodeType))

    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code is not None and within(code)
