"""Inductor's lowering of the custom op: the code that it generates calls a native function instead of the op.

That saves torch's dispatcher, which converts each argument twice at every call. Whatever else torch does with the op
goes through the dispatcher, Inductor's wrapper code in C++ too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_names: dict[Any, str] = {}  # of the native function that serves an overload, as generated code writes it


def call_natively(op: Any, function: Callable[..., Tensor]) -> None:
    """Let generated code call `function` for `op`, an overload that returns one tensor. Both take the same arguments,
    by position.

    Torch keeps generated code on disk. So the name is one that the code finds without an import, and it stays: where
    there is no native function, `function` is the op itself.
    """
    name = op.name().split("::")[1].replace(".", "_")
    setattr(torch.ops.intflash, name, function)
    _names[op] = f"torch.ops.intflash.{name}"


def register_lowerings() -> None:
    """Register the lowerings if Inductor has been imported.

    Fake kernels call this: Inductor is not imported before torch traces an op, and it lowers the op afterwards.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    for op, name in _names.items():
        if op not in lowering.lowerings:
            _register(lowering, op, name)


def _register(lowering: Any, op: Any, name: str) -> None:
    from torch._inductor.virtualized import V

    through_dispatcher = lowering.fallback_handler(op)

    def lower(*arguments: Any) -> Any:
        found = through_dispatcher(*arguments)
        if not V.graph.cpp_wrapper:
            node = next(x for x in reversed(V.graph.operations) if getattr(x, "op_overload", None) is op)
            node.python_kernel_name = name
        return found

    lowering.add_needs_realized_inputs(op)
    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)  # as of any custom op
    lowering.register_lowering(op, type_promotion_kind=None)(lower)
