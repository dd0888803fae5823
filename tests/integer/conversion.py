"""What holds of every converted model, whatever its library."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from intflash import InputError, integer
from intflash.integer.calibration import bind
from intflash.integer.registry import translate
from intflash.integer.simulate import simulate
from oracle import sqnr

CPU = torch.device("cpu")


def randomized(model: nn.Module, seed: int = 0, spread: float = 0.05) -> nn.Module:
    """The model in evaluation mode, every parameter moved: no bias, table or token is zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=g) * spread
    return model.eval().requires_grad_(False)


def replaced(path: str, module: nn.Module) -> Callable[[nn.Module], None]:
    """A change of a model: another module stands at `path`."""

    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)

    return change


def check_refused(model: nn.Module, message: str) -> None:
    """The model is refused by a module's name, before any batch is asked for."""
    with pytest.raises(InputError, match=f"^{message} has no integer form"):
        integer.calibrate(model.eval(), iter(()))


def check_parts(model: nn.Module) -> None:
    """Each module, if of a class of its own that computes the same, is refused by its name before any work."""
    for name, module in model.named_modules():
        if name:
            known = type(module)
            module.__class__ = type("Mine", (known,), {})
            check_refused(model, rf"{re.escape(name)} \(Mine\)")
            module.__class__ = known


def check_conversion(
    model: nn.Module, batches: list, inputs: dict[str, Tensor], *, least: float
) -> integer.IntegerModel:
    """The integer model, after these checks.

    - The graph computes the model, in float64. A module of another class is refused.
    - Every executor has the same bits; so has the first input alone.
    - The results are at least `least` dB from the float model's, and within 0.5 dB of what the scheme's quantizers
      alone leave, beyond three standard errors of both noises' estimates from so many values.
    """
    check_parts(model)
    calibration = integer.calibrate(model, batches)
    graph = translate(model, calibration.size)
    made = integer.convert(model, calibration)
    bound = bind(made.program.inputs, inputs, CPU)

    exact = graph.read(_call(copy.deepcopy(model).double(), inputs, torch.float64))
    graph_found = graph.run(bound, torch.float64)
    assert list(exact) == list(graph_found) == [output.name for output in made.program.outputs]
    floats, found = graph.read(_call(model, inputs)), _named(made(**inputs))
    few = {name: x[:2] for name, x in inputs.items()}
    others = [_named(integer.convert(model, calibration, backend=name)(**few)) for name in ("torch", "reference")]
    alone = _named(made(**{name: x[:1] for name, x in inputs.items()}))
    simulated = simulate(model, calibration, integer.Options(), bound)
    for name, expected in exact.items():
        assert found[name].shape == expected.shape and found[name].dtype == torch.float32
        wide = tuple(slice(n) for n in expected.shape)  # without padding
        assert (graph_found[name][wide] - expected).abs().max() < 1e-6 * expected.abs().max()
        assert all(torch.equal(other[name], found[name][:2]) for other in others)
        assert torch.equal(alone[name], found[name][:1])
        ours, scheme = sqnr(floats[name], found[name]), sqnr(floats[name], simulated[name][wide])
        assert ours > least, f"{name}: {ours:.2f} dB, the scheme {scheme:.2f}"
        chance = 26 / math.sqrt(expected.numel())  # 3 * sqrt(2) * 10 / ln(10) * sqrt(2 / n)
        assert abs(ours - scheme) < 0.5 + chance, f"{name}: {ours:.2f} dB, the scheme {scheme:.2f}"
    return made


def _call(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype = torch.float32):
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        return model(**cast)


def _named(found) -> dict[str, Tensor]:
    return {"logits": found} if isinstance(found, Tensor) else dict(found)
