"""Every family of timm, transformers and diffusers that can be built small: plumbing, causality and padding.

With method "fp32" a patched model computes what its own attention does, so that a difference is a mask, a scale or an
argument that was lost. A few families of each library run in `make test`, all of them in `make test-full`.
"""

import contextlib
import copy
import signal

import pytest
import small_models
import torch

import intflash
from oracle import sqnr

AGREE = 100  # dB
# Models whose rounding in float32 alone costs as much (99 to 105 dB): their error must be at most twice that.
ROUNDING = ("visformer",)
KEPT = 8  # tokens whose outputs must not depend on later or padded ones

QUICK_TRANSFORMERS = (
    "bart", "bert", "bloom", "deberta-v2", "doge", "falcon", "gpt2", "gpt_neox", "gpt_oss", "llama", "mpnet",
    "openai-gpt", "siglip_vision_model", "t5", "vit", "xglm",
)  # fmt: skip
QUICK_TIMM = ("swin_transformer",)
# Families of which none may be refused, so that a test in which everything is refused fails.
SERVED = (
    "bart",
    "bert",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "siglip_vision_model",
    "swin_transformer",
    "t5",
    "vit",
)


@pytest.fixture(autouse=True)
def within_two_minutes():
    """Skips a model that takes longer."""

    def late(number, frame):
        pytest.skip("it takes more than two minutes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def families(library, names, quick):
    """Returns parameters that skip where the library is not installed."""
    try:
        found = names()
    except ImportError:
        return [pytest.param("none", marks=pytest.mark.skip(f"{library} is not installed"))]
    return [pytest.param(x, marks=() if x in quick else pytest.mark.full) for x in found]


def output(model, inputs):
    torch.manual_seed(3)  # some models draw at random
    with torch.no_grad():
        return small_models.values(model(**inputs))


def other(inputs, name, rows):
    """Returns the inputs with other tokens after the kept ones in these rows."""
    ids = inputs[name].clone()
    ids[rows, KEPT:] = (7 * ids[rows, KEPT:] + 11) % 97 + 3
    return inputs | {name: ids}


class Expected:
    """A model's own outputs, and the tokens on which they do not depend."""

    def __init__(self, model, inputs, exact=False):
        self.model, self.inputs, self.agree = model, inputs, AGREE
        self.out = output(model, inputs)
        if exact:
            doubles = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
            rounded, self.out = self.out, output(copy.deepcopy(model).double(), doubles)
            self.agree = min(AGREE, sqnr(self.out, rounded) - 6)
        self.target = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        self.causal = self.padded = False
        if self.out.ndim != 3 or self.target not in inputs or self.out.shape[1] != inputs[self.target].shape[1]:
            return
        self.causal = torch.equal(*self.endings(model))
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"].clone()
            mask[1, KEPT:] = 0
            self.short = inputs | {"attention_mask": mask}
            self.short_out = self.real(output(model, self.short))
            self.padded = sqnr(self.short_out, self.noisy(model)) > AGREE

    def endings(self, model):
        """Returns the outputs of the kept tokens with two endings."""
        changed = other(self.inputs, self.target, slice(None))
        return output(model, self.inputs)[:, :KEPT], output(model, changed)[:, :KEPT]

    def real(self, out):
        """Removes the outputs of padded tokens, which are those of the second sequence after the kept ones."""
        return out if self.target != "input_ids" else torch.cat((out[0], out[1, :KEPT]))

    def noisy(self, model):
        return self.real(output(model, other(self.short, "input_ids", slice(1, None))))

    def check(self, model):
        """Checks in what a model with method "fp32" must agree."""
        assert sqnr(self.out, output(model, self.inputs)) > self.agree
        if self.causal:
            assert torch.equal(*self.endings(model))
        if self.padded:
            assert sqnr(self.short_out, self.real(output(model, self.short))) > AGREE
            assert sqnr(self.short_out, self.noisy(model)) > AGREE


def expected(make, *args):
    small_models.quiet()
    try:
        return Expected(*make(*args), exact=args[0] in ROUNDING)
    except small_models.Unbuildable as why:
        pytest.skip(f"no small model: {why}")


@contextlib.contextmanager
def refused_unless_served(family):
    """Allows a model to be refused with our error."""
    try:
        yield
    except intflash.InputError:
        assert family not in SERVED


def check_patch(known, family):
    with refused_unless_served(family):
        with intflash.patch(known.model, "fp32") as report:
            known.check(known.model)
            assert report.ran
        if known.causal:
            with intflash.patch(known.model):
                assert torch.equal(*known.endings(known.model))
    assert sqnr(known.out, output(known.model, known.inputs)) > known.agree  # patch leaves nothing behind


@pytest.mark.parametrize("family", families("transformers", small_models.transformers_families, QUICK_TRANSFORMERS))
def test_transformers(family, monkeypatch):
    import intflash.models.transformers as adapter

    known = expected(small_models.transformers_model, family)
    check_patch(known, family)
    with refused_unless_served(family):
        named = small_models.rebuilt(known.model, "intflash")
        if known.causal:
            assert torch.equal(*known.endings(named))
        served = adapter.attention
        monkeypatch.setattr(
            adapter, "attention", lambda *args, **options: served(*args, **options | {"method": "fp32", "recipe": None})
        )
        known.check(named)


@pytest.mark.parametrize("family", families("timm", small_models.timm_families, QUICK_TIMM))
def test_timm(family):
    check_patch(expected(small_models.timm_model, family), family)


@pytest.mark.parametrize("family", families("diffusers", small_models.diffusers_families, ()))
def test_diffusers(family):
    check_patch(expected(small_models.diffusers_model, family), family)
