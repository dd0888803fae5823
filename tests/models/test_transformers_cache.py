"""`Int8Cache`: text generation from codes has the bits of generation from a cache of floats."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import intflash
from intflash import InputError, QTensor
from peaked_models import sharpen

t = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # older versions have no `cache`

from intflash.models.transformers_cache import Int8Cache  # noqa: E402

SIZES = dict(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, head_dim=16,
)  # fmt: skip
MODELS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
    "sliding windows": lambda: t.MistralForCausalLM(t.MistralConfig(**SIZES, sliding_window=9)),
    "windows in some layers": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, sliding_window=8)),
    "sinks": lambda: t.GptOssForCausalLM(
        t.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    ),
}
PROMPTS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))


@functools.cache
def model_and_scales(name: str):
    torch.manual_seed(0)
    model = sharpen(MODELS[name]())
    other = torch.randint(0, 100, (4, 40))
    return model, intflash.calibrate(model, [{"input_ids": other}], granularity={"k": "head", "v": "head"})


def generated(model, cache, prompts=PROMPTS, **options):
    mask = torch.ones_like(prompts)
    if len(prompts) > 1:
        mask[0, :5] = 0  # the first prompt is shorter
    return model.generate(
        prompts, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, past_key_values=cache,
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", ({}, dict(num_beams=3), dict(prompt_lookup_num_tokens=3)), ids=("greedy", "beams", "looked up")
)
@pytest.mark.parametrize("name", MODELS)
def test_generates_the_bits_of_a_cache_of_floats(name, options):
    model, scales = model_and_scales(name)
    prompts = PROMPTS[1:] if "prompt_lookup_num_tokens" in options else PROMPTS
    with intflash.patch(model, "intflash_bfp", scales):
        cache = Int8Cache(model)
        found = generated(model, cache, prompts, **options)
        expected = generated(model, None, prompts, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, expected.scores, strict=True))
    for layer in cache.layers:
        assert layer.keys.dtype == layer.values.dtype == torch.int8


def test_memory_grows_seldom_and_is_not_shared():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales), torch.no_grad():
        cache = Int8Cache(model)
        model(PROMPTS, past_key_values=cache)
        layer, places = cache.layers[0], set()
        for token in PROMPTS.mT[:, :, None]:
            model(token, past_key_values=cache)
            places.add(layer.keys.data_ptr())
        assert cache.get_seq_length() == layer.keys.shape[2] == 48 and len(places) == 2
        other = copy.deepcopy(cache)
        ahead = [model(PROMPTS[:, i : i + 1], past_key_values=cache).logits for i in (0, 1)]
        assert torch.equal(model(PROMPTS[:, :1], past_key_values=other).logits, ahead[0])
        assert torch.equal(model(PROMPTS[:, 1:2], past_key_values=other).logits, ahead[1])
        cache.crop(-2)
        assert torch.equal(model(PROMPTS[:, :1], past_key_values=cache).logits, ahead[0])
        cache.reset()
        assert cache.get_seq_length() == 0


def test_memory_of_inference_mode_is_not_written_outside():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales):
        cache = Int8Cache(model)
        with torch.inference_mode():
            model(PROMPTS, past_key_values=cache)
        with torch.no_grad():
            model(PROMPTS[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 25


def test_layers_get_codes_with_their_scales():
    model, scales = model_and_scales("llama")
    x = torch.randn(1, 2, 7, 16)
    with intflash.patch(model, "intflash_bfp", scales):
        k, v = Int8Cache(model).update(x, 2 * x, 1)
    assert isinstance(k, QTensor) and isinstance(v, QTensor)
    kept = scales.layers["model.layers.1.self_attn"]
    for found, values, scale in ((k, x, kept.k), (v, 2 * x, kept.v)):
        expected = intflash.quantize(values, "head", scale=torch.tensor(scale))
        assert torch.equal(found.data, expected.data) and torch.equal(found.scale, expected.scale)


def test_models_that_it_cannot_serve():
    model, scales = model_and_scales("llama")
    with pytest.raises(InputError, match="takes a transformers model, got Linear"):
        Int8Cache(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="layer 0 is not patched: call intflash.patch"):
        Int8Cache(model)
    for method, recipe in (("int_flash_half", None), ("intflash_bfp", intflash.Recipe("token", "token", "token"))):
        with intflash.patch(model, method, recipe=recipe), pytest.raises(InputError, match="layer 0 has no static"):
            Int8Cache(model)
    small = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    with pytest.raises(InputError, match="for decoders alone, BartForConditionalGeneration has an encoder"):
        Int8Cache(t.BartForConditionalGeneration(t.BartConfig(vocab_size=50, **small)))
