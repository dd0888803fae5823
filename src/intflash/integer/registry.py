"""The converters: from a library's model to a `Graph`. One file `convert_LIBRARY.py` for each library."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from intflash.errors import InputError
from intflash.integer.graph import Activation, Graph


@dataclass(frozen=True)
class Converter:
    """How the models of one library become graphs. A `convert_*.py` file exports one as CONVERTER.

    Attributes:
        models: the model classes that it knows -> how a model becomes a graph. A translation refuses what has no
            integer form by `refuse`, and looks at each module's exact type where it stands.
        parts: the exact types of the modules that these models may hold, beside activation functions.
    """

    models: Mapping[type[nn.Module], Callable[[Any], Graph]]
    parts: tuple[type[nn.Module], ...]

    def check_parts(self, model: nn.Module) -> None:
        """Refuse a model that holds a module of another type, one of a subclass too: it may compute anything."""
        for name, module in model.named_modules():
            if name and type(module) not in self.parts and not _is_activation(module):
                refuse(name, module, f"its type is none of those that an integer {type(model).__name__} can hold")


LIBRARIES = ("digits", "timm", "torchvision", "transformers")


def translate(model: nn.Module, size: tuple[int, ...] | None = None) -> Graph:
    """The graph of a model.

    Args:
        size: the shape of its first input, where it takes several; None: the model's own.

    Raises:
        InputError: there is no converter for it, it is in training mode, or a module of it has no integer form.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"integer models are made of an nn.Module, got {type(model).__name__}")
    if model.training:
        raise InputError("integer models are for inference: call model.eval() first")
    for library in LIBRARIES:
        if any(_library(cls) == library for cls in type(model).__mro__):
            converter = _converter(library)
            if converter is None or type(model) not in converter.models:
                continue
            converter.check_parts(model)
            graph = converter.models[type(model)](model)
            other = size is not None and size != graph.inputs[0].shape and graph.resized is not None
            return graph.resized(size) if other else graph
    known = "; ".join(
        f"{name}: {', '.join(cls.__name__ for cls in c.models)}" for name in LIBRARIES if (c := _converter(name))
    )
    raise InputError(f"{type(model).__name__} has no converter to an integer model; there are ({known})")


def _library(cls: type) -> str:
    top, _, rest = cls.__module__.partition(".")
    return rest.partition(".")[0] if top == "intflash" else top


@functools.cache
def _converter(library: str) -> Converter | None:
    """The library's converter, where the library can be imported."""
    try:
        return importlib.import_module(f"{__package__}.convert_{library}").CONVERTER
    except (ImportError, RuntimeError):  # torchvision's operators may not fit this torch
        return None


# Elementwise, without parameters: any of them is a table.
_ACTIVATIONS = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Mish,
    nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.Hardtanh, nn.Softsign, nn.LogSigmoid,
)  # fmt: skip
# Of other libraries, by name: their modules are not imported for this.
_NAMED_ACTIVATIONS = (
    "GELU", "GELUTanh", "QuickGELU", "Sigmoid", "Tanh", "Swish", "HardSwish",  # timm
    "GELUActivation", "NewGELUActivation", "QuickGELUActivation", "FastGELUActivation", "PytorchGELUTanh", "GELUTanh",
    "SiLUActivation", "MishActivation", "ReLUSquaredActivation",  # transformers
)  # fmt: skip


def activation(module: nn.Module, name: str) -> Activation:
    """The module as an elementwise function.

    Raises:
        InputError: it may not be one.
    """
    if not _is_activation(module):
        refuse(name, module, "it is no elementwise activation function that is known")
    if getattr(module, "inplace", False):
        return lambda x: module(x.clone())
    return module


def _is_activation(module: nn.Module) -> bool:
    known = type(module) in _ACTIVATIONS or type(module).__name__ in _NAMED_ACTIVATIONS
    return known and next(module.parameters(), None) is None


def expect_patches(projection: nn.Module, name: str) -> None:
    """Refuse what is no convolution over patches side by side: one product of patch rows."""
    expect(projection, name, nn.Conv2d)
    plain = projection.padding in ((0, 0), "valid") and projection.dilation == (1, 1) and projection.groups == 1
    if not plain or projection.stride != projection.kernel_size:
        refuse(name, projection, "its patches overlap, or are padded, dilated or grouped")


def expect(module: object, name: str, *types: type) -> None:
    """Refuse a module that is not exactly of one of these types."""
    if type(module) not in types:
        refuse(name, module, f"expected {' or '.join(t.__name__ for t in types)}")


def refuse(name: str, module: object, why: str) -> None:
    """Raise InputError: a module has no integer form."""
    raise InputError(f"{name or 'the model'} ({type(module).__name__}) has no integer form: {why}")
