"""`patch` and `unpatch` themselves, on the digit models: what is refused, failures, and the cores."""

import pickle

import pytest
import torch

import intflash
from intflash.digits import load_model
from intflash.models.base import FloatCore, IntegerCore
from intflash.models.patch import attach, layers_of
from sharp import run


def test_an_unknown_backend_is_refused_at_once():
    with pytest.raises(intflash.InputError, match="unknown backend 'nope'"):
        intflash.patch(load_model("vit"), backend="nope")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(model="vit"), "takes an nn.Module and a Recipe, got str"),
        (dict(recipe={"q": "head"}), "takes an nn.Module and a Recipe, got DigitsViT, dict"),
        (dict(scales=3), "Scales or the path of their file, got int"),
    ],
)
def test_arguments_of_other_kinds_are_refused(arguments, message):
    with pytest.raises(intflash.InputError, match=message):
        intflash.patch(arguments.pop("model", None) or load_model("vit"), **arguments)


def test_a_patch_that_fails_midway_changes_nothing():
    model, image = load_model("swin"), torch.rand(2, 1, 8, 8)
    reference, made = run(model, image), []

    def make(name):
        if len(made) == 2:
            raise intflash.InputError(f"no core for {name}")
        made.append(IntegerCore("intflash", None))
        return made[-1]

    with pytest.raises(intflash.InputError, match="no core for"):
        attach(model, make)
    assert not layers_of(model) and torch.equal(run(model, image), reference)
    assert len(intflash.patch(model).replaced) == 4


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_pickled_model_is_patched_still(name):
    model, image = load_model(name), torch.rand(2, 1, 8, 8)
    reference = run(model, image)
    intflash.patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, image), run(model, image))
    twin.load_state_dict(model.state_dict())  # its hooks work
    intflash.unpatch(twin)
    assert torch.equal(run(twin, image), reference)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (1, 2, 4, 4), (2, 1, 4, 4), (8, 1, 1, 4)])
def test_float_and_integer_cores_take_the_same_masks(shape):
    torch.manual_seed(0)
    q, mask = torch.randn(8, 2, 4, 8), torch.rand(shape) > 0.4
    mask[..., 0] = True
    core = IntegerCore("fp32", None).eval()
    assert torch.allclose(FloatCore()(q, q, q, mask), core(q, q, q, mask), atol=1e-5)
