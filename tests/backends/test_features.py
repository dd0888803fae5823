"""A backend serves the features that it names and refuses every other, including features that do not exist yet."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch

import intflash
from intflash import BackendError, QTensor, Recipe
from intflash.backends import backends, features, select
from intflash.call import prepare
from intflash.methods import METHODS
from intflash.problem import Problem

X = torch.randn(1, 2, 20, 16)
BACKENDS = list(backends().values())
NAMES = [b.name for b in BACKENDS]


@dataclass(slots=True, eq=False)
class NewerProblem(Problem):
    window: int | None = None
    sink: float = 0.0


@dataclass(frozen=True)
class NewerRecipe(Recipe):
    zero_point: int = 0


@dataclass(frozen=True)
class NewerQTensor(QTensor):
    zero_point: torch.Tensor | None = None


def newer(problem: Problem, **changes) -> NewerProblem:
    return NewerProblem(**{f.name: getattr(problem, f.name) for f in fields(Problem)}, **changes)


def first_method(backend) -> str:
    return next(iter(backend.serves))


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_a_new_field_is_refused_by_every_backend(backend):
    for method in backend.serves:
        problem = prepare(X, X, X, method=method)[0]
        assert features.unserved(newer(problem), backend.serves) is None  # not used
        assert f"no NewerProblem.window for {method}" in backend.unsupported(newer(problem, window=3))
        assert "no NewerProblem.sink and no NewerProblem.window" in backend.unsupported(
            newer(problem, window=0, sink=1.0)
        )
        recipe = {f.name: getattr(problem.recipe, f.name) for f in fields(Recipe)}
        assert features.unserved(replace(problem, recipe=NewerRecipe(**recipe)), backend.serves) is None
        problem = replace(problem, recipe=NewerRecipe(**recipe, zero_point=1))
        assert "no NewerRecipe.zero_point" in backend.unsupported(problem)


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_new_values_of_known_fields_are_refused_by_every_backend(backend):
    problem = prepare(X, X, X, method=first_method(backend))[0]
    codes = [intflash.quantize(X) for _ in range(3)]
    shifted = NewerQTensor(codes[0].data, codes[0].scale, zero_point=torch.ones(1))
    for change, name in (
        (dict(out_dtype=torch.float64), "float64 output"),
        (dict(q=X.double()), "float64 inputs"),
        (dict(recipe=_like(problem.recipe, k="group")), "k per group"),
        (dict(zip("qkv", (shifted, *codes[1:]), strict=True)), "NewerQTensor.zero_point"),
        (dict(q=_like(codes[0], bits=2), k=codes[1], v=codes[2]), "2-bit codes"),
    ):
        assert f"no {name}" in backend.unsupported(replace(problem, **change))


def _like(x, **changes):
    """A frozen value with fields that today's checks refuse."""
    copy = object.__new__(type(x))
    copy.__dict__.update(x.__dict__ | changes)
    return copy


def test_the_error_names_the_missing_features():
    problem = newer(prepare(X, X, X)[0], window=3)
    with pytest.raises(
        BackendError, match="backend 'torch' cannot serve method 'intflash_bfp': it has no NewerProblem.window"
    ):
        select(problem, "torch")
    with pytest.raises(BackendError, match="no backend can serve .*reference: it has no NewerProblem.window"):
        select(problem, None)
    with pytest.raises(BackendError, match="it has no log-sum-exp for qflash"):
        intflash.attention(X, X, X, method="qflash", return_lse=True, backend="cpu")


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_every_served_feature_exists(backend):
    for method, served in backend.serves.items():
        assert served <= features.EVERY, f"{backend.name} {method} names {sorted(served - features.EVERY)}"
    assert backend.serves.keys() <= METHODS.keys()


def test_the_reference_and_torch_serve_every_feature_of_every_method():
    for name in ("reference", "torch"):
        assert backends()[name].serves.keys() == METHODS.keys()
        assert set(backends()[name].serves.values()) == {features.EVERY}


def test_every_field_is_known():
    """A new field must be named in `features`, or be refused with every value but its default."""
    assert features._PROBLEM == {f.name for f in fields(Problem)}
    assert features._RECIPE == {f.name for f in fields(Recipe)}
    assert features._QTENSOR == {f.name for f in fields(QTensor)}


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_granularities_of_a_method_are_served_by_the_backends_that_have_it(backend):
    """Vortex has kernels for fewer granularities. CUDA's need one scale of K and V per tensor or head."""
    for method, served in backend.serves.items():
        missing = {
            f"{name} per {kind}"
            for name, kinds in METHODS[method].granularities.items()
            for kind in kinds
            if f"{name} per {kind}" not in served
        }
        if backend.name == "vortex":
            assert all(x.rpartition(" ")[2] in ("token", "block") for x in missing) or method == "fp32"
        elif backend.name == "cuda":
            assert missing <= {"k per block", "v per channel"}
        else:
            assert not missing, (backend.name, method, missing)
