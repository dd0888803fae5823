"""`patch` and `unpatch` themselves, on the digit models: what is refused, failures, and the cores."""

import pickle

import pytest
import torch
from torch.nn import functional as F

import intflash
from intflash.digits import load_model
from intflash.models.base import FloatCore, IntegerCore, _Redirect
from intflash.models.patch import attach, layers_of
from oracle import randn
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


def test_a_redirected_call_keeps_every_argument():
    q, k, v = randn(2, 4, 20, 16)
    core, mask = IntegerCore("fp32", None).eval(), torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) > 0.3
    cases = (4, dict(scale=0.7)), (4, dict(is_causal=True)), (4, dict(attn_mask=mask)), (2, dict(enable_gqa=True))
    for heads, options in cases:
        want = F.scaled_dot_product_attention(q, k[:, :heads], v[:, :heads], **options)
        with _Redirect(core):
            got = F.scaled_dot_product_attention(q, k[:, :heads], v[:, :heads], **options)
        assert torch.allclose(got, want, atol=1e-5)
    with _Redirect(core), pytest.raises(intflash.InputError, match="dropout_p must be 0"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_an_unpatched_model_loads_weights():
    model = load_model("swin")
    intflash.patch(model)
    intflash.unpatch(model)
    model.load_state_dict(model.state_dict())


def test_patch_passes_its_options_to_every_layer():
    model, recipe, image = load_model("vit"), intflash.Recipe(q="head", k="head", v="head"), torch.rand(2, 1, 8, 8)
    with intflash.patch(model, recipe=recipe, backend="torch", check_finite=True):
        assert all(m.intflash_attention.recipe == recipe for m in layers_of(model).values())
        with pytest.raises(intflash.InputError, match="must be finite"):
            run(model, image * float("nan"))
    with intflash.patch(model, backend="vortex"), pytest.raises(intflash.BackendError, match="vortex"):
        run(model, image)
