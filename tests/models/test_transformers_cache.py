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
    "scaled_dot_product_attention": lambda: t.FalconForCausalLM(
        t.FalconConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=False)
    ),
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
        assert cache.get_seq_length() == layer.keys.shape[2] == 48 and len(places) <= 3
        assert layer.keys.untyped_storage().nbytes() <= 1.3 * layer.keys.nbytes
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


def test_branches_of_one_prefix_do_not_share_memory():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales), torch.no_grad():

        def logits(cache, *tokens: int):
            return [model(torch.full((2, 1), x), past_key_values=cache).logits for x in tokens][-1]

        def prefix(kind):
            cache = kind()
            model(PROMPTS, past_key_values=cache)
            logits(cache, 1)
            return cache

        found = []
        for kind in (lambda: t.DynamicCache(config=model.config), lambda: Int8Cache(model)):
            cache = prefix(kind)
            kept = [(layer.keys, layer.values) for layer in cache.layers]
            logits(cache, 2, 3)
            for layer, (keys, values) in zip(cache.layers, kept, strict=True):
                layer.keys, layer.values = keys, values
            other = copy.copy(cache)
            other.layers = [copy.copy(layer) for layer in cache.layers]
            found.append([logits(cache, 5), logits(other, 6), logits(cache, 7), logits(other, 8)])
    assert all(map(torch.equal, *found))


def test_autocast():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        caches = t.DynamicCache(config=model.config), Int8Cache(model)
        for part in (PROMPTS, PROMPTS[:, :1]):
            expected, found = (model(part, past_key_values=cache).logits for cache in caches)
            assert torch.equal(found, expected)


def test_compiled_with_a_graph_for_the_whole_model():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        calls = ((model, Int8Cache(model)), (compiled, Int8Cache(model)))
        for part in (PROMPTS, PROMPTS[:, :1], PROMPTS[:, :1]):
            expected, found = (called(part, past_key_values=cache).logits for called, cache in calls)
            assert torch.equal(found, expected)


def test_models_that_it_cannot_serve():
    model, scales = model_and_scales("llama")
    with pytest.raises(InputError, match="takes a transformers model, got Linear"):
        Int8Cache(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="no patched attention says that it is layer 0: call intflash.patch"):
        Int8Cache(model)
    for method, recipe in (("int_flash_half", None), ("intflash_bfp", intflash.Recipe("token", "token", "token"))):
        with intflash.patch(model, method, recipe=recipe), pytest.raises(InputError, match="layer 0 has no static"):
            Int8Cache(model)
    blocks = intflash.Recipe(k="block", block_size=8, k_scale=0.02, v_scale=0.02)
    of_batches = intflash.Recipe(k="head", k_scale=torch.full((2, 2), 0.02), v_scale=0.02)
    for recipe, got in ((blocks, "got 'block' of k"), (of_batches, r"got 'head' of k in shape \[2, 2\]")):
        with intflash.patch(model, "intflash_bfp", recipe=recipe), pytest.raises(InputError, match=got):
            Int8Cache(model)
    small = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    with pytest.raises(InputError, match="for decoders alone, BartForConditionalGeneration has an encoder"):
        Int8Cache(t.BartForConditionalGeneration(t.BartConfig(vocab_size=50, **small)))


def test_models_with_two_decoders_are_refused():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales):
        model.model.other = model.model.layers[0].self_attn
        try:
            assert Int8Cache(model).layers[0].recipe is not None  # the same layer twice
            model.model.other = copy.deepcopy(model.model.other)
            with pytest.raises(InputError, match="LlamaForCausalLM has more than one attention for layer 0"):
                Int8Cache(model)
        finally:
            del model.model.other


def test_bad_calls():
    model, scales = model_and_scales("llama")
    with intflash.patch(model, "intflash_bfp", scales, check_finite=True):
        cache, x = Int8Cache(model), torch.randn(2, 2, 7, 16)
        cache.update(x, x, 0)
        with pytest.raises(InputError, match="the cache holds 2 sequences, got 1"):
            cache.update(x[:1], x[:1], 0)
        with pytest.raises(InputError, match="v must be finite"):
            cache.update(x, x / 0, 0)
    with pytest.raises(InputError, match="softmax of torch takes tensors, got a QTensor"):
        torch.softmax(cache.update(x, x, 0)[0], -1)
