"""transformers: tokens are cut ahead of the base model, whose output is put together again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from intflash.distributed.context import Context, still_patched
from intflash.distributed.groups import Ranks
from intflash.distributed.sequence import shard, unshard
from intflash.errors import InputError

# Inputs of a base model whose last axis is tokens; of `inputs_embeds` it is the one before.
_TOKENS = ("input_ids", "position_ids", "token_type_ids")
_CACHES = ("past_key_values", "cache")


def apply(
    model: nn.Module, layers: Mapping[str, nn.Module], context: Context, ranks: Ranks, gather: bool,
    undo: list[Callable[[], None]],
) -> None:  # fmt: skip
    """Install what cuts the inputs and gathers the output."""
    base = getattr(model, "base_model", model)
    signature = inspect.signature(base.forward)
    _check(base, signature, layers)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        still_patched(layers)
        given = dict(signature.bind(*args, **kwargs).arguments)
        rest = given.pop(_rest_of(signature), {})
        return (), _cut(given, signature, context) | _refuse_rest(rest)

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        length, context.length = context.length, None
        return _whole(output, length, context, ranks) if gather else output

    undo.append(base.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.append(base.register_forward_hook(after).remove)


def _rest_of(signature: inspect.Signature) -> str | None:
    """The name of the parameter that takes all others."""
    kinds = (name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD)
    return next(kinds, None)


def _check(base: nn.Module, signature: inspect.Signature, layers: Mapping[str, nn.Module]) -> None:
    """What a shard of the tokens cannot compute alone."""
    config, name = base.config, type(base).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{name} is an encoder and a decoder, whose sequences differ: context_parallel does not serve it"
        )
    if not {"input_ids", "position_ids"} <= set(signature.parameters):
        raise InputError(f"{name} does not take input_ids and position_ids, which say where a shard's tokens are")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = {"sliding_attention"}
    if kinds - {"full_attention"}:
        raise InputError(f"{name} has layers of {', '.join(sorted(kinds))}: only full attention sees all ranks' keys")
    for layer, module in layers.items():
        if getattr(module, "sinks", None) is not None:
            raise InputError(f"{layer} has attention sinks, extra keys that every rank would count once")
    if any("attention_bias_bucket" in n or "relative_attention_bias" in n for n, _ in base.named_modules()):
        raise InputError(f"{name} has a relative position bias, which it computes for the positions of one shard")


def _cut(given: dict[str, Any], signature: inspect.Signature, context: Context) -> dict[str, Any]:
    """The inputs of this rank's tokens, and a mask of all keys."""
    for name in _CACHES:
        if given.get(name) is not None:
            raise InputError(
                f"a KV cache ({name}) is not served by context_parallel: give all tokens, or attend to a sharded cache "
                "by intflash.distributed.attention(..., queries='replicated')"
            )
    ids, embeds, mask = given.get("input_ids"), given.get("inputs_embeds"), given.get("attention_mask")
    first = ids if ids is not None else embeds
    if not isinstance(first, Tensor):
        raise InputError("the model needs input_ids or inputs_embeds as tensors")
    length = first.shape[1]
    if given.get("position_ids") is None:
        given["position_ids"] = torch.arange(length, device=first.device)[None]
    where = {"group": context.group, "layout": context.layout}
    for name in _TOKENS:
        if given.get(name) is not None:
            given[name] = shard(given[name], -1, **where)
    if embeds is not None:
        given["inputs_embeds"] = shard(embeds, 1, **where)
    if mask is None:
        mask = torch.ones(1, 1, dtype=torch.bool, device=first.device)
    elif not isinstance(mask, Tensor) or mask.ndim != 2:
        raise InputError("context_parallel takes an attention_mask [batch, tokens] for padding, or none")
    # of four axes, transformers takes it as it is; causality is the layers' own
    given["attention_mask"] = mask.bool()[:, None, None]
    if "use_cache" in signature.parameters:
        given["use_cache"] = False
    context.length = length
    return given


def _refuse_rest(rest: dict[str, Any]) -> dict[str, Any]:
    asked = [name for name in ("output_attentions", "cu_seq_lens_q", *_CACHES) if rest.get(name) is not None]
    asked = [name for name in asked if rest[name] is not False]
    if asked:
        raise InputError(f"context_parallel does not serve {', '.join(asked)}")
    return rest


def _whole(output: Any, length: int, context: Context, ranks: Ranks) -> Any:
    """The output of all tokens; what is made of the first token is the first rank's."""
    if isinstance(output, tuple):
        raise InputError("context_parallel takes outputs by name: call the model with return_dict=True")

    def gathered(x: Tensor) -> Tensor:
        return unshard(x, 1, length=length, group=context.group, layout=context.layout)

    for name, value in list(output.items()):
        if name in ("last_hidden_state", "hidden_states"):
            output[name] = tuple(map(gathered, value)) if isinstance(value, tuple) else gathered(value)
        elif name == "pooler_output":
            output[name] = ranks.gather(value.contiguous())[0]
        elif value is not None:
            raise InputError(f"context_parallel cannot gather {name}: ask for fewer outputs, or pass gather=False")
    return output
