"""`context_parallel`: a patched model whose tokens lie on the ranks of a group."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from intflash.distributed.attention import attention
from intflash.distributed.groups import Where, ranks_of
from intflash.distributed.plan import METHODS
from intflash.distributed.shards import LAYOUTS
from intflash.errors import InputError
from intflash.methods import AUTO
from intflash.models.base import CORE, IntegerCore
from intflash.models.patch import layers_of, libraries_of

_SERVED = ("transformers", "diffusers")


@dataclass
class Context:
    """How the layers of one model attend while its tokens lie on ranks.

    Attributes:
        group, layout: as for `attention`.
        length: tokens of the whole sequence, where shards may not be even; set in each forward.
        place(core, q, k): where the keys of a layer's call lie, "sharded" or "replicated".
    """

    group: Where
    layout: str
    place: Callable[[IntegerCore, Tensor, Tensor], str]
    length: int | None = None


class ShardedCore(IntegerCore):
    """The core of a layer under context parallelism: the same method and recipe, over the keys of all ranks."""

    context: Context

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, *,
        causal: bool, **options: Any,
    ) -> Tensor:  # fmt: skip
        context = self.context
        if options.get("bias") is not None:
            raise InputError("context_parallel does not serve a position bias, which is of the positions of one shard")
        keys = context.place(self, q, k)
        if attn_mask is not None and attn_mask.numel() == 1:
            attn_mask = None  # a mask of one element only says that there is one
        lengths = {"query_length": context.length, "key_length": context.length if keys == "sharded" else None}
        return attention(
            q, k, v, attn_mask, causal, scale, group=context.group, layout=context.layout, keys=keys,
            backend=self.backend, check_finite=self.check_finite, **lengths, **options,
        )  # fmt: skip


@dataclass
class ContextParallel:
    """A model under context parallelism; as a context manager it is undone at the end.

    Attributes:
        model: the model, changed in place.
        layers: names of the layers that attend over all ranks.
        layout: of its tokens.
    """

    model: nn.Module
    layers: list[str]
    layout: str
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Undo `context_parallel`: the model is patched as before. Before `intflash.unpatch`."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def context_parallel(
    model: nn.Module, group: Where = None, *, layout: str | None = None, gather: bool = True
) -> ContextParallel:
    """Run a patched transformers or diffusers model with its tokens on the ranks of a group.

    Every rank calls the model with the whole inputs, as one process does. Each computes its shard of the tokens, layer
    after layer, attends to the keys of all ranks, and gets the whole output. Attention has the bits of one process; the
    layers around it are the model's own and are computed on fewer rows.

    Args:
        model: patched by `intflash.patch`, in eval mode, the same on all ranks: of transformers an encoder or a
            decoder without its cache, of diffusers a transformer with a context parallel plan (`_cp_plan`).
        group: as for `attention`.
        layout: "contiguous" or "zigzag"; default: "zigzag" for causal models of transformers, which gives all ranks
            equal work. Models of diffusers are contiguous, and their tokens must divide among the ranks.
        gather: of transformers whether each rank gets the whole output, or its own tokens' (`unshard` gathers).

    Returns:
        A `ContextParallel`, whose `remove` undoes it.

    Raises:
        InputError: the model is not patched, of another library, or has what its shards cannot compute alone; the
            message names it.

    Example:
        >>> import torch, torch.distributed as dist, intflash
        >>> from intflash.distributed import context_parallel
        >>> from transformers import BertConfig, BertModel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = BertModel(config).eval()
        >>> with intflash.patch(model), context_parallel(model) as parallel, torch.no_grad():
        ...     print(parallel.layout, model(torch.zeros(1, 16, dtype=torch.long)).last_hidden_state.shape)
        contiguous torch.Size([1, 16, 32])
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"context_parallel takes an nn.Module, got {type(model).__name__}")
    layers = layers_of(model)
    cores = {name: core for name, core in model.named_modules() if isinstance(core, IntegerCore)}
    if not layers or len(cores) < len(layers):
        raise InputError("context_parallel takes a patched model: call intflash.patch(model, ...) first")
    if any(isinstance(core, ShardedCore) for core in cores.values()):
        raise InputError("the model is under context parallelism already: remove() that first")
    libraries = libraries_of(model)
    if len(libraries) != 1 or not libraries <= set(_SERVED):
        raise InputError(f"context_parallel serves models of {' and '.join(_SERVED)}, this one is of {libraries}")
    if layout not in (None, *LAYOUTS):
        raise InputError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    ranks = ranks_of(group)
    library = libraries.pop()
    is_causal = importlib.import_module(f"intflash.models.{library}").ADAPTER.causal
    causal = {name for name, module in layers.items() if is_causal(module)}
    _check_methods(layers, causal)
    chosen = layout or ("zigzag" if causal else "contiguous")
    context = Context(group, chosen, lambda core, q, k: "sharded")
    parallel = ContextParallel(model, list(layers), chosen)
    adapter = importlib.import_module(f"intflash.distributed.{library}_models")
    try:
        adapter.apply(model, layers, context, ranks, gather, parallel._undo)
        for core in cores.values():
            core.__class__, core.context = ShardedCore, context
            parallel._undo.append(lambda core=core: _restore(core))
    except BaseException:
        parallel.remove()
        raise
    return parallel


def _restore(core: IntegerCore) -> None:
    core.__class__ = IntegerCore
    vars(core).pop("context", None)


def _check_methods(layers: dict[str, nn.Module], causal: set[str]) -> None:
    for name, module in layers.items():
        core = module._modules[CORE]
        for method in {core.method, core.causal_method if name in causal else core.method}:
            if method not in (AUTO, *METHODS):
                raise InputError(
                    f"{name} computes method {method!r}, sharded attention has {', '.join(METHODS)}: patch with one of "
                    "them and, where layers are causal, static scales (intflash.calibrate) or a recipe"
                )


def still_patched(layers: dict[str, nn.Module]) -> None:
    """Refuse a forward whose layers would attend to a shard alone.

    Raises:
        InputError: `intflash.unpatch` came before `ContextParallel.remove`.
    """
    for name, module in layers.items():
        if not isinstance(module._modules.get(CORE), ShardedCore):
            raise InputError(f"{name} was unpatched under context parallelism: remove() that before intflash.unpatch")
