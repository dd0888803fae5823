"""`patch` replaces a model's attention layers by IntFlash, `unpatch` restores them, and a report says what was
replaced and what was not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from intflash.backends import get_backend
from intflash.errors import InputError
from intflash.methods import AUTO, example
from intflash.models.base import (
    CAUSAL_METHOD,
    CORE,
    CROSS_RECIPE,
    Adapter,
    Core,
    IntegerCore,
    WrappedForward,
    calls_sdpa,
    causal_refusal,
    keeps_causality,
    redirected,
    uses_name,
)
from intflash.quant import Recipe
from intflash.quant.calibrate import Scales

_ORIGINAL = "_intflash_original"  # the attribute of a patched module that holds what it was
_AROUND = "_intflash_around"  # the attribute that holds replaced attributes, in a module that contains patched ones
_LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass
class _Original:
    """What a patched module was before: its class and the attributes that were replaced; and what was added to it."""

    library: str
    cls: type[nn.Module]
    attributes: dict[str, Any]
    hook: RemovableHandle

    @property
    def wrapped(self) -> bool:
        """Whether a wrapper had replaced the module's forward before the patch."""
        return "forward" in self.attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers, through the adapter, what the library calls, in a process that loads a pickled model."""
        self.__dict__.update(state)
        _adapter(self.library)


@dataclass
class Patch:
    """A patched model; as a context manager it unpatches at the end.

    Attributes:
        model: the model, changed in place.
        method: the attention method, or "auto"; "" for none of IntFlash's.
        replaced: name of each replaced layer -> its original class.
        left: name of each attention-like module that was left as it is -> why.
        static: calibrated scales are in use.
        causal: names of the replaced layers that say that they are causal.
        causal_note: how the outputs of causal layers depend on later tokens.
    """

    model: nn.Module
    method: str
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    static: bool = False
    causal: list[str] = field(default_factory=list)
    causal_note: str = ""
    _cores: dict[str, Core] = field(default_factory=dict, repr=False)

    @property
    def ran(self) -> list[str]:
        """Returns the names of the replaced layers whose attention IntFlash has computed since the patch, in the
        model's order.
        """
        return [name for name, core in self._cores.items() if core.record["ran"]]

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        unpatch(self.model)

    def __str__(self) -> str:
        kinds = sorted(set(self.replaced.values()))
        scales = "static" if self.static else "dynamic"
        lines = [f"{self.method} ({scales} scales) in {len(self.replaced)} layers of {', '.join(kinds)}"]
        if self.causal and self.causal_note:
            lines.append(f"{len(self.causal)} causal layers: {self.causal_note}")
        ran = set(self.ran)
        idle = [name for name in self.replaced if name not in ran] if ran else []
        if idle:
            lines.append(f"not reached by any forward so far: {', '.join(idle)}")
        return "\n".join(lines + [f"left {name}: {reason}" for name, reason in self.left.items()])


def patch(
    model: nn.Module,
    method: str | None = None,
    scales: Scales | str | Path | None = None,
    *,
    backend: str | None = None,
    recipe: Recipe | None = None,
    check_finite: bool = False,
) -> Patch:
    """Compute a model's attention by IntFlash, in place, without touching its weights or state dict.

    Args:
        model: a model whose attention layers come from timm, torchvision, transformers, diffusers or
            `intflash.digits`, are `torch.nn.MultiheadAttention`, or call torch's scaled_dot_product_attention
            themselves; patch it after its weights are loaded and its input size is set.
        method: a name from ``intflash.info()["methods"]``, or "auto"; default: the scales file's, else "auto", and
            "int_flash_half" in causal layers, whose scales per token do not depend on later tokens.
        scales: a file written by `intflash.calibrate`, or its `Scales`: static scales, no reduction
            at run time. None: every call takes its own maxima.
        backend: a backend's name; None: the best that can serve.
        recipe: how dynamic inputs are quantized (granularity, smoothing, rotation); not with `scales`.
        check_finite: look for NaN and infinity in every layer's Q, K and V, which costs time (and on a
            GPU waits for the device); integer codes cannot carry them on as floats do.

    Returns:
        A `Patch` that tells what was replaced and what was left, and can be used as a context manager.

    Raises:
        InputError: no layer can be replaced, the model is patched already, a layer is causal and the method takes
            dynamic scales over all tokens, or the scales do not fit the model; the message shows the differences.

    Example:
        >>> import torch, intflash
        >>> from intflash.digits import load_model
        >>> model = load_model("vit")
        >>> with intflash.patch(model) as report:
        ...     print(len(report.replaced), model(torch.zeros(1, 1, 8, 8)).shape)
        4 torch.Size([1, 10])
    """
    if not isinstance(model, nn.Module) or not isinstance(recipe, Recipe | None):
        raise InputError(f"patch takes an nn.Module and a Recipe, got {type(model).__name__}, {type(recipe).__name__}")
    if scales is not None and recipe is not None:
        raise InputError("scales come with their own recipe: give one of scales and recipe")
    if isinstance(scales, str | Path):
        scales = Scales.load(scales)
    if not isinstance(scales, Scales | None):
        raise InputError(f"scales must be Scales or the path of their file, got {type(scales).__name__}")
    if backend is not None:
        get_backend(backend)  # refuses an unknown name
    causal_method = cross_recipe = None
    if method is None:
        method = scales.method if scales is not None else AUTO
        if scales is None and recipe is None:
            causal_method, cross_recipe = CAUSAL_METHOD, CROSS_RECIPE
    chosen = example(method)
    kept = scales is not None or keeps_causality(method, recipe or chosen.recipe)
    if kept or recipe is not None:
        causal_method = method
    elif causal_method is None:
        causal_method = ""  # a causal call is refused
    if scales is not None:
        _check_fit(model, scales)
        for name in "qkv":
            if scales.granularity[name] not in chosen.granularities[name]:
                raise InputError(
                    f"the scales are per {scales.granularity[name]} for {name}, method {method!r} takes "
                    f"{chosen.granularities[name]}"
                )

    def core(name: str) -> Core:
        own, *others = [recipe] if scales is None else _static_recipes(chosen.recipe, scales, name)
        return IntegerCore(method, own, backend, check_finite, causal_method, cross_recipe, others)

    def check(causal: list[str]) -> None:
        if causal and not causal_method:
            raise InputError(f"{causal[0]} is causal: {causal_refusal(method)}")

    report = attach(model, core, check)
    report.method, report.static = method, scales is not None
    report.causal_note = (
        "scales over all tokens, as the recipe says: later tokens change earlier outputs slightly"
        if not kept and recipe is not None
        else f"{causal_method}, later tokens do not change earlier outputs"
    )
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: the model's own attention again. Does nothing to a model that is not patched.

    Args:
        model: the model given to `patch`; it is changed in place.

    Raises:
        InputError: it is no model, or a wrapper added after `patch` holds a layer's patched forward.

    Example:
        >>> import intflash
        >>> from intflash.digits import load_model
        >>> model = load_model("vit")
        >>> before = type(model.blocks[0])
        >>> report = intflash.patch(model)
        >>> intflash.unpatch(model)
        >>> type(model.blocks[0]) is before
        True
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"unpatch takes an nn.Module, got {type(model).__name__}")
    layers = layers_of(model)
    for name, module in layers.items():
        if _wrapped_later(module):
            raise InputError(
                f"the forward of {name or type(module).__name__} was wrapped after patch, and the wrapper holds the "
                "patched forward: remove the wrapper first (offloading and caching hooks have a call for it)"
            )
    for module in layers.values():
        original = vars(module).pop(_ORIGINAL)
        held = _bound(module, type(module).forward)
        module.__class__ = original.cls
        vars(module).update({name: MethodType(original.cls.forward, module) for name in held})
        vars(module).update(original.attributes)
        original.hook.remove()
        module._modules.pop(CORE, None)  # absent where a patch failed
    for module in model.modules():
        vars(module).update(vars(module).pop(_AROUND, {}))


def _wrapped_later(module: nn.Module) -> bool:
    """Whether a wrapper that was added after the patch would call the patched forward after `unpatch`."""
    original = vars(module)[_ORIGINAL]
    replaced = type(module) is not original.cls and not hasattr(type(module), "intflash_one_core")
    return replaced and "forward" in vars(module) and not original.wrapped and not _bound(module, type(module).forward)


def _bound(module: nn.Module, forward: Callable[..., Any]) -> list[str]:
    """Returns the names of a module's attributes that hold this forward bound to it, as wrappers do."""
    return [
        name for name, x in vars(module).items()
        if isinstance(x, MethodType) and x.__func__ is forward and x.__self__ is module
    ]  # fmt: skip


def attach(
    model: nn.Module, make_core: Callable[[str], Core], check: Callable[[list[str]], None] = lambda causal: None
) -> Patch:
    """Gives every layer that an adapter knows the core ``make_core(its name)``, after ``check(causal layers)``.

    Raises:
        InputError: the model is patched already, or no adapter knows any of its layers.
    """
    if layers_of(model):
        raise InputError("the model is patched already: unpatch it first")
    targets, left = {}, {}
    for name, module, parent in _walk(model):
        found, library = _target(module, parent)
        if isinstance(found, type):
            targets[name] = (module, parent, found, library)
        elif found is not None:
            left[name] = found
    left = {name: why for name, why in left.items() if not _related(name, targets)}
    if not targets:
        seen = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "it has none"
        raise InputError(
            f"no attention layer of {type(model).__name__} can be replaced: {seen}. Code of your own can call "
            "intflash.sdpa, which takes the arguments of torch's scaled_dot_product_attention"
        )
    report = Patch(model, "", {name: type(target[0]).__name__ for name, target in targets.items()}, left)
    report.causal = [
        name for name, (module, _, _, library) in targets.items() if (_adapter(library) or _GENERIC).causal(module)
    ]
    check(report.causal)
    try:
        for name, target in targets.items():
            report._cores[name] = core = make_core(name)
            # otherwise the library's calls say it
            core.causal = name in report.causal and target[2] is not type(target[0])
            _install(*target, core)
        _switch_around(model, targets)
    except BaseException:
        unpatch(model)
        raise
    return report


def _install(module: nn.Module, parent: nn.Module | None, patched: type[nn.Module], library: str, core: Core) -> None:
    attributes = (_adapter(library) or _GENERIC).attributes(module)
    if "forward" in vars(module) and patched is not type(module):  # otherwise the library's own code calls the core
        held = _bound(module, type(module).forward)
        if held:  # a wrapper's reference to the original forward
            attributes |= {name: MethodType(patched.forward, module) for name in held if name not in attributes}
        else:
            attributes["forward"] = WrappedForward(module, vars(module)["forward"])
    replaced = {name: vars(module)[name] for name in attributes}
    hook = module.register_load_state_dict_post_hook(_hold)
    vars(module)[_ORIGINAL] = _Original(library, type(module), replaced, hook)
    vars(module).update(attributes)
    module.__class__ = patched
    setattr(module, CORE, core.train(module.training))
    _hold(module, parent=parent)
    parameter = next(module.parameters(), None)
    if parameter is not None and not parameter.is_meta:  # for an offloaded layer the inputs' device decides
        core.to(parameter.device)


def _switch_around(model: nn.Module, targets: Iterable[str]) -> None:
    """Replaces the attributes by which a module that contains patched layers would bypass them."""
    holders = {name.rsplit(".", i)[0] for name in targets for i in range(1, name.count(".") + 1)} | {""}
    for name, module in model.named_modules():
        adapter = _adapter(_library(type(module))) if name in holders else None
        attributes = adapter.around(module) if adapter is not None else {}
        if attributes:
            vars(module)[_AROUND] = {name: vars(module)[name] for name in attributes}
            vars(module).update(attributes)


def _hold(module: nn.Module, _keys: object = None, parent: nn.Module | None = None) -> None:
    """Gives the core what is constant in its layer (a bias table, a shift mask): now, and again after the layer
    loads a state.
    """
    constants = getattr(type(module), "intflash_constants", lambda module, parent: {})
    with torch.inference_mode(False), torch.no_grad():
        getattr(module, CORE).hold(**constants(module, parent))


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns name -> module of the layers that have a core."""
    return {name: module for name, module in model.named_modules() if _ORIGINAL in vars(module)}


def libraries_of(model: nn.Module) -> set[str]:
    """Returns the libraries whose adapters serve a patched model."""
    return {vars(module)[_ORIGINAL].library for module in layers_of(model).values()}


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a patched layer had."""
    return vars(module)[_ORIGINAL].cls


def describe_layers(model: nn.Module) -> dict[str, dict[str, float | int | None]]:
    """Returns name -> heads, kv_heads, head_dim (None where the module does not say) and weight fingerprint."""
    names = [name for name, module, parent in _walk(model) if isinstance(_target(module, parent)[0], type)]
    return {name: _describe(model.get_submodule(name)) for name in names or layers_of(model)}


def fingerprint(module: nn.Module) -> float:
    """Returns a normalized projection of a module's weights on a fixed sequence, which differs for other weights.

    Raises:
        InputError: the weights are on device meta.
    """
    total, norm = 0.0, 0.0
    for parameter in module.parameters():
        if parameter.is_meta:
            raise InputError(
                f"static scales belong to weights, and those of {type(module).__name__} are on device meta: load them "
                "first, or use dynamic scales"
            )
        w = parameter.detach().flatten()[:4096].double().cpu()
        weyl = torch.arange(1, len(w) + 1, dtype=torch.float64) * 0.6180339887498949 % 1 - 0.5
        total, norm = total + float(w @ weyl), norm + float(w @ w)
    return round(total / norm**0.5, 6) if norm else 0.0


def _describe(module: nn.Module) -> dict[str, float | int | None]:
    def number(*names: str) -> int | None:
        return next((getattr(module, n) for n in names if isinstance(getattr(module, n, None), int)), None)

    heads = number("num_heads", "num_attention_heads", "heads")
    return {
        "heads": heads,
        "kv_heads": number("num_kv_heads", "num_key_value_heads"),
        "head_dim": number("head_dim", "attention_head_size"),
        "weights": fingerprint(module),
    }


def _check_fit(model: nn.Module, scales: Scales) -> None:
    layers = describe_layers(model)
    known = {name: layers[name.partition("#")[0]] for name in scales.layers if name.partition("#")[0] in layers}
    differences = scales.differences(type(model).__name__, layers | known)
    if differences:
        shown = "\n  ".join(differences[:10]) + ("\n  ..." if len(differences) > 10 else "")
        count = "1 difference" if len(differences) == 1 else f"{len(differences)} differences"
        raise InputError(f"the scales do not fit the model ({count}):\n  {shown}")


def _static_recipes(base: Recipe, scales: Scales, layer: str) -> list[Recipe]:
    """Returns the recipes of a layer's attention calls, in the order in which its forward makes them."""
    granularity = {name: scales.granularity[name] for name in "qkv"}
    recipes = []
    while (key := call_name(layer, len(recipes))) in scales.layers:
        given = {f"{name}_scale": scales.layers[key].tensor(name, scales.granularity[name]) for name in "qkv"}
        recipes.append(replace(base, smooth_k=False, rotate=False, **granularity, **given))
    return recipes


def call_name(layer: str, call: int) -> str:
    """Returns the name in a scales file of the n-th attention call (from 0) in a forward of a layer."""
    return layer if call == 0 else f"{layer}#{call}"


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yields (name, module, parent) of every module, each once."""
    parents: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parents[name] = module
        yield name, module, parents[name.rpartition(".")[0]] if name else None


def _target(module: nn.Module, parent: nn.Module | None) -> tuple[type[nn.Module] | str | None, str]:
    """Returns (the class to give to a module, or why an attention-like module is left, or None; the adapter's name)."""
    if isinstance(module, Core):
        return None, ""
    found, library = _adapted(module, parent)
    if isinstance(found, type):
        return _through_wrapper(module, found), library
    if found is not None:
        return found, library
    if not (isinstance(module, nn.MultiheadAttention) or _LOOKS_LIKE_ATTENTION.search(type(module).__name__)):
        return None, ""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    known = _adapter(library) is not None
    return (f"{kind} is not known to its adapter" if known else f"no adapter for {kind}"), ""


def _adapted(module: nn.Module, parent: nn.Module | None) -> tuple[type[nn.Module] | str | None, str]:
    """Returns what the adapters say about a module, and the library whose adapter it is."""
    # torch's own layers belong to the library that contains them
    libraries = [_library(type(m)) for m in (module, parent) if m is not None]
    for library in libraries:
        adapter = _adapter(library)
        found = adapter.patched_class(module, parent) if adapter is not None else None
        if found is not None:
            return found, library
    own = libraries[0]
    return (None if _adapter(own) is not None else _GENERIC.patched_class(module, parent)), own


def _through_wrapper(module: nn.Module, patched: type[nn.Module]) -> type[nn.Module] | str:
    """Returns the class to give to a module whose forward a wrapper (offloading, caching) may have replaced."""
    cls = type(module)
    if "forward" not in vars(module) or patched is cls or hasattr(patched, "intflash_one_core"):
        return patched
    if hasattr(patched, "intflash_constants") and any(parameter.is_meta for parameter in module.parameters()):
        return "its weights are offloaded, and its bias is computed from them: patch before offloading"
    if _bound(module, cls.forward):
        return patched
    if calls_sdpa(cls):
        return redirected(cls)
    return "its forward was replaced by a wrapper, which calls the old one: patch before adding the wrapper"


def _generic_class(module: nn.Module, parent: nn.Module | None) -> type[nn.Module] | None:
    """Serves libraries without an adapter: classes that call torch's scaled_dot_product_attention themselves."""
    cls = type(module)
    own = (x for base in cls.__mro__ if _library(base) not in ("torch", "builtins") for x in vars(base).values())
    return redirected(cls) if any(uses_name(x, "scaled_dot_product_attention") for x in own) else None


_GENERIC = Adapter(_generic_class)


def _related(name: str, targets: dict[str, object]) -> bool:
    """Whether a module is inside a replaced layer, or only contains one."""
    return any(name.startswith(t + ".") or t.startswith(name + ".") for t in targets)


def _library(cls: type[nn.Module]) -> str:
    """Returns the library that a class comes from. Our own packages count as libraries."""
    parts = cls.__module__.split(".")
    return parts[1] if parts[0] == "intflash" and len(parts) > 1 else parts[0]


@functools.cache
def _adapter(library: str) -> Adapter | None:
    """Returns the adapter of a library: the module of that name in this package, if there is one."""
    if importlib.util.find_spec(f"{__package__}.{library}") is None:
        return None
    return getattr(importlib.import_module(f"{__package__}.{library}"), "ADAPTER", None)
