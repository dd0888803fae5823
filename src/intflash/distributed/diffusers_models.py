"""diffusers: its own hooks cut and gather tokens, by the plan that each of its models has for context parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from intflash.distributed.context import Context, still_patched
from intflash.distributed.groups import Ranks
from intflash.errors import InputError
from intflash.models.base import IntegerCore
from intflash.models.patch import original_class

TEXT = "encoder_hidden_states"


def apply(
    model: nn.Module, layers: Mapping[str, nn.Module], context: Context, ranks: Ranks, gather: bool,
    undo: list[Callable[[], None]],
) -> None:  # fmt: skip
    """Install diffusers' hooks, and ones that say which keys a layer is given."""
    if context.layout == "zigzag" or not gather:
        raise InputError(
            "diffusers' plans cut contiguous shards and gather the output: layout and gather cannot differ"
        )
    plan = getattr(model, "_cp_plan", None)
    if plan is None:
        raise InputError(
            f"{type(model).__name__} has no context parallel plan (_cp_plan), which says how tokens are cut"
        )
    if ranks.size > 1:
        _cut(model, plan, context, undo)
    text_is_cut = any(isinstance(of, Mapping) and TEXT in of for of in plan.values())
    given: dict[int, tuple[int, int | None]] = {}  # tokens of a layer's hidden states and of its text, of this forward

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        still_patched(layers)
        arguments = signatures[type(module)].bind(module, *args, **kwargs).arguments
        text = arguments.get(TEXT)
        hidden = next(x for x in arguments.values() if isinstance(x, Tensor))
        for core in module.modules():
            if isinstance(core, IntegerCore):
                given[id(core)] = hidden.shape[1], None if text is None else text.shape[1]

    signatures = {type(module): inspect.signature(original_class(module).forward) for module in layers.values()}
    for module in layers.values():
        undo.append(module.register_forward_pre_hook(note, with_kwargs=True).remove)

    def place(core: IntegerCore, q: Tensor, k: Tensor) -> str:
        hidden, text = given[id(core)]
        if text is None or text_is_cut:
            return "sharded"
        if q.shape[2] == hidden and k.shape[2] <= text:
            return "replicated"
        raise InputError(
            f"a layer attends to {k.shape[2]} keys, of its {hidden} tokens and of {text} of text that every rank "
            "has: text that is joined to sharded tokens would count once for each rank"
        )

    context.place = place


def _cut(model: nn.Module, plan: Any, context: Context, undo: list[Callable[[], None]]) -> None:
    try:
        from diffusers import ContextParallelConfig
        from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
    except ImportError as error:
        raise InputError(f"this version of diffusers has no context parallelism: {error}") from None
    mesh = context.group
    if not isinstance(mesh, DeviceMesh):
        group = dist.group.WORLD if mesh is None else mesh
        mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    elif mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise InputError(
                "a mesh of two axes needs names for diffusers' hooks: init_device_mesh(mesh_dim_names=...)"
            )
        mesh = mesh._flatten()
    config = ContextParallelConfig(ring_degree=mesh.size())
    config._flattened_mesh = mesh  # all that the hooks read; diffusers' own attention is not used
    apply_context_parallel(model, config, plan)
    undo.append(lambda: remove_context_parallel(model, plan))
