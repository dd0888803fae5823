"""Sliding windows of transformers models: which masks have one, and models that are served by it."""

import copy

import pytest
import torch

import intflash
from intflash.models import base
from oracle import sqnr
from peaked_models import sharpen

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

import intflash.models.transformers as adapter  # noqa: E402
from intflash.models.transformers_masks import noting, window_of  # noqa: E402

WINDOW, TOKENS = 4, 12
DECODER = dict(
    vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=None, sliding_window=WINDOW,
)  # fmt: skip
MIXED = dict(head_dim=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
MODELS = {
    "mistral": lambda t: t.MistralModel(t.MistralConfig(**DECODER)),
    "qwen2": lambda t: t.Qwen2Model(t.Qwen2Config(**DECODER, use_sliding_window=True, max_window_layers=1)),
    "gemma2": lambda t: t.Gemma2Model(t.Gemma2Config(**DECODER, **MIXED, attn_logit_softcapping=None)),
    "gemma3": lambda t: t.Gemma3TextModel(t.Gemma3TextConfig(**DECODER, **MIXED)),
    "modernbert": lambda t: t.ModernBertModel(
        t.ModernBertConfig(
            vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
            pad_token_id=0, local_attention=2 * WINDOW, global_attn_every_n_layers=2,
        )
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    made = MODELS[request.param](transformers)
    made.set_attn_implementation("eager")
    return sharpen(made)


@pytest.fixture
def calls(monkeypatch):
    """The arguments by name of each call of `intflash.attention` by a patched layer."""
    seen = []

    def attention(*args, **options):
        seen.append(options | {"attn_mask": args[3]})
        return intflash.attention(*args, **options)

    for module in (base, adapter):
        monkeypatch.setattr(module, "attention", attention)
    return seen


def tokens(padded=0):
    """Two sequences; the first begins with so many padding tokens."""
    ids = torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return ids, mask


def run(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options)[0]


def as_sdpa(model):
    """The model with the masks of "sdpa", where it has them."""
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("masks", ["eager", "sdpa", "intflash"])
@pytest.mark.parametrize("padded", [None, 0, 3])
def test_a_window_is_served_as_one_and_agrees_with_eager(model, calls, masks, padded, monkeypatch):
    if masks == "sdpa" and not model._supports_sdpa:
        pytest.skip("it has no sdpa")
    ids, mask = tokens(padded or 0)
    options = {} if padded is None else dict(attention_mask=mask)
    real = mask.bool()
    reference = run(model, ids, **options)[real]
    model.set_attn_implementation(masks)
    if masks == "intflash":
        monkeypatch.setattr(adapter, "CAUSAL_METHOD", "fp32"), monkeypatch.setattr(adapter, "AUTO", "fp32")
        out = run(model, ids, **options)[real]
    else:
        with intflash.patch(model, "fp32"):
            out = run(model, ids, **options)[real]
    assert sqnr(reference, out) > 100
    windows = [x for x in calls if x.get("window_size")]
    size = (WINDOW, WINDOW) if model.config.model_type == "modernbert" else (WINDOW - 1, 0)
    assert len(windows) >= 2 and all(x["window_size"] == size for x in windows)
    for x in windows:
        assert (x["attn_mask"] is None) == (padded is None) or x["attn_mask"].shape == (2, 1, 1, TOKENS)
    if model.config.model_type != "mistral":  # the others have layers of full attention, too
        assert len(windows) < len(calls)


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("cache", ["dynamic", "sliding", "static"])
def test_a_window_with_a_cache(model, calls, cache, padded):
    """Several tokens at once and then single ones after those that are cached."""
    if model.config.model_type == "modernbert":
        pytest.skip("an encoder has no cache")
    ids, mask = tokens(padded)

    def caches():
        return {
            "dynamic": transformers.DynamicCache,
            "sliding": lambda: transformers.DynamicCache(config=model.config),
            "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 4),
        }[cache]()

    def steps():
        """Returns the outputs of 5, 4, 2 and 1 tokens, each after all before."""
        kept, outputs, start = caches(), [], 0
        for count in (5, 4, 2, 1):
            new = slice(start, start + count)
            with torch.no_grad():
                out = model(
                    ids[:, new], attention_mask=mask[:, : new.stop], past_key_values=kept, use_cache=True,
                )[0]  # fmt: skip
            outputs.append(out)
            start += count
        return torch.cat(outputs, 1)[mask.bool()]

    reference = steps()
    assert sqnr(run(model, ids, attention_mask=mask)[mask.bool()], reference) > 100
    as_sdpa(model)
    with intflash.patch(model, "fp32"):
        assert sqnr(reference, steps()) > 100
    assert cache == "static" or any(x.get("window_size") and x["causal_align"] == "bottom_right" for x in calls)


def test_bits_do_not_depend_on_the_way_a_window_is_given(model, monkeypatch):
    """By the default methods."""
    ids, mask = tokens(3)
    with intflash.patch(as_sdpa(model)):
        served = run(model, ids, attention_mask=mask)
        monkeypatch.setattr(adapter, "window_of", lambda *arguments: None)
        masked = run(model, ids, attention_mask=mask)
    assert torch.equal(served[mask.bool()], masked[mask.bool()])


def test_calibration_reads_the_mask(model):
    ids, mask = tokens(3)
    scales = intflash.calibrate(as_sdpa(model), [dict(input_ids=ids, attention_mask=mask)])
    reference = run(model, ids, attention_mask=mask)[mask.bool()]
    with intflash.patch(model, scales=scales):
        assert 20 < sqnr(reference, run(model, ids, attention_mask=mask)[mask.bool()]) < 100


def make(function, **options):
    sizes = dict(batch_size=2, q_length=9, kv_length=9) | options
    return noting(masking_utils.sdpa_mask)(mask_function=function, allow_is_causal_skip=False, **sizes)


CAUSAL = masking_utils.sliding_window_causal_mask_function(4)


@pytest.mark.parametrize(
    "function, options",
    [
        (masking_utils.causal_mask_function, {}),
        (masking_utils.and_masks(CAUSAL, masking_utils.causal_mask_function), {}),
        (masking_utils.or_masks(masking_utils.sliding_window_overlay(4), masking_utils.causal_mask_function), {}),
        (masking_utils.and_masks(masking_utils.sliding_window_overlay(4), lambda b, h, q, k: k < 3), {}),
        (masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)), {}),
        (CAUSAL, dict(q_offset=torch.tensor(0))),
        (CAUSAL, dict(q_offset=2)),  # a static cache: neither the first key nor the last is a query's own
    ],
)
def test_other_masks_have_no_window(function, options):
    mask = make(function, **options, **({"kv_length": 12} if options else {}))
    assert window_of(mask, 9, mask.shape[3]) is None


def test_a_changed_mask_has_no_window():
    mask = make(CAUSAL, attention_mask=torch.ones(2, 9, dtype=torch.bool))
    assert window_of(mask, 9, 9).window_size == (3, 0) and window_of(mask, 8, 9) is None
    for other in (mask.clone(), copy.deepcopy(mask), mask[:, :, :, :8], mask.float(), mask & mask):
        assert window_of(other, 9, other.shape[3]) is None
    mask[:, :, 3] = False
    assert window_of(mask, 9, 9) is None and window_of(copy.deepcopy(mask), 9, 9) is None
    with torch.inference_mode():
        assert window_of(make(CAUSAL), 9, 9) is None


@pytest.mark.full
def test_a_window_under_compile(model):
    """Compiled models read the mask."""
    ids, mask = tokens(3)
    reference = run(model, ids, attention_mask=mask)[mask.bool()]
    with intflash.patch(as_sdpa(model), "fp32"):
        compiled = torch.compile(model, backend="eager")
        assert sqnr(reference, run(compiled, ids, attention_mask=mask)[mask.bool()]) > 100
