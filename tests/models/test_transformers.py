"""transformers models: encoders, Swin, and decoders with grouped KV heads, causal and padded masks."""

import pickle

import pytest
import torch
from torch.nn import functional as F

import intflash
from intflash.models.base import CROSS_RECIPE, IntegerCore
from oracle import sqnr
from sharp import run, sharpen

transformers = pytest.importorskip("transformers")
import intflash.models.transformers as adapter  # noqa: E402

VISION = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
)
DECODER = dict(
    vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128,
)  # fmt: skip
SWIN = dict(image_size=56, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=7)


def vision_model(name: str) -> torch.nn.Module:
    t = transformers
    return {
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**VISION)),
        "deit": lambda: t.DeiTForImageClassification(t.DeiTConfig(**VISION)),
        "swin": lambda: t.SwinForImageClassification(t.SwinConfig(**SWIN)),
        "siglip": lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**VISION)),
    }[name]()


def decoder() -> torch.nn.Module:
    torch.manual_seed(0)
    return sharpen(transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)))


@pytest.mark.parametrize("name, layers", [("vit", 3), ("deit", 3), ("swin", 4), ("siglip", 4)])
def test_vision_models(name, layers):
    torch.manual_seed(0)
    model = sharpen(vision_model(name), gain=1.5 if name == "siglip" else 3.0)  # its initial projections are larger
    pixels = torch.randn(2, 3, 56 if name == "swin" else 32, 56 if name == "swin" else 32)
    reference = run(model, pixels)
    scales = intflash.calibrate(model, [pixels])
    keys = list(model.state_dict())
    for chosen in (None, scales):
        with intflash.patch(model, scales=chosen) as report:
            out = run(model, pixels)
            assert list(model.state_dict()) == keys
        assert len(report.replaced) == layers
        assert 25 < sqnr(reference, out) < 100
    assert torch.equal(run(model, pixels), reference)
    if name == "siglip":
        assert report.replaced["head.attention"] == "MultiheadAttention"


def attention_mask(ids, padded):
    """The first of two sequences begins with five tokens of padding."""
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    return mask


@pytest.mark.parametrize("padded", [False, True])
def test_decoder_with_grouped_heads_and_causal_mask(padded):
    model, ids = decoder(), torch.randint(0, 100, (2, 17))
    mask = attention_mask(ids, padded)
    reference = run(model, ids, attention_mask=mask)
    with intflash.patch(model) as report:
        out = run(model, ids, attention_mask=mask)
    assert set(report.replaced.values()) == {"LlamaAttention"} and len(report.replaced) == 3
    real = mask.bool()
    assert 25 < sqnr(reference[real], out[real]) < 100


@pytest.mark.parametrize("padded", [False, True])
def test_causality_with_static_scales(padded):
    """With static scales a later token cannot change an earlier output by a single bit."""
    model, ids = decoder(), torch.randint(0, 100, (2, 12))
    mask = attention_mask(ids, padded)
    scales = intflash.calibrate(model, [ids])
    assert scales.layers["model.layers.0.self_attn"].kv_heads == 2
    later = ids.clone()
    later[:, 8:] = (ids[:, 8:] + 7) % 100
    with intflash.patch(model, scales=scales):
        out, changed = (run(model, x, attention_mask=mask) for x in (ids, later))
    assert torch.equal(out[:, :8], changed[:, :8]) and not torch.equal(out[:, 8:], changed[:, 8:])


def test_generation_with_a_cache():
    model, ids = decoder(), torch.randint(0, 100, (1, 6))
    options = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
    scales = intflash.calibrate(model, [ids])
    with intflash.patch(model, scales=scales):
        cached = model.generate(ids, **options)
        whole = model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached, whole) and cached.shape == (1, 10)


def test_the_name_intflash():
    model, ids = decoder(), torch.randint(0, 100, (2, 9))
    config = transformers.LlamaConfig(**DECODER)
    named = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="intflash").eval()
    named.load_state_dict(model.state_dict())
    with intflash.patch(model) as report:
        assert len(report.replaced) == 3
        assert torch.equal(run(named, ids), run(model, ids))
    other = decoder()
    other.set_attn_implementation("intflash")
    assert torch.equal(run(other, ids), run(named, ids))


def test_packed_sequences_as_flash_attention_gets_them():
    q, k = torch.randn(1, 4, 11, 16), torch.randn(1, 2, 13, 16)
    ends = torch.tensor([0, 4, 11]), torch.tensor([0, 6, 13])
    packed = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), ends, strict=True))
    out, _ = adapter.intflash_attention_forward(
        torch.nn.Module(), q, k, k, None, is_causal=False, max_length_q=7, **packed
    )
    want = intflash.attention(
        q,
        k,
        k,
        enable_gqa=True,
        recipe=CROSS_RECIPE,  # other queries than keys
        **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (x.int() for x in ends), strict=True)),
    )
    assert out.shape == (1, 11, 4, 16) and torch.equal(out.transpose(1, 2), want)


def test_the_interface_computes_what_sdpas_does():
    def forward(q, k, v, mask=None, **options):
        layer = torch.nn.Module()
        layer.intflash_attention = IntegerCore("fp32", None).eval()
        return adapter.intflash_attention_forward(layer, q, k, v, mask, **options)[0].transpose(1, 2)

    q, (k, v) = torch.randn(1, 4, 5, 16), torch.randn(2, 1, 4, 9, 16)
    bias, mask, lowest = torch.randn(1, 4, 5, 9), torch.zeros(1, 1, 5, 9), torch.finfo(torch.float32).min
    mask[..., 7:] = lowest
    later = torch.full((5, 5), lowest).triu(1)
    sdpa, seen = F.scaled_dot_product_attention, (k[:, :, :5], v[:, :, :5])
    for got, want in (
        (forward(q, k, v, is_causal=False, scaling=0.7), sdpa(q, k, v, scale=0.7)),
        (forward(q, k, v, is_causal=True), sdpa(q, *seen, is_causal=True)),
        (forward(q, k, v, is_causal=True, position_bias=bias), sdpa(q, *seen, bias[..., :5] + later)),
        (forward(q[:, :, :1], k, v, is_causal=True), sdpa(q[:, :, :1], k, v)),
        (forward(q, k, v, mask, position_bias=bias), sdpa(q, k, v, bias + mask)),
    ):
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"indices": torch.zeros(4)}, {"dropout": 0.1}])
def test_what_is_not_served_is_refused(option):
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(intflash.InputError, match="does not serve"):
        adapter.intflash_attention_forward(torch.nn.Module(), q, q, q, None, is_causal=False, **option)


def test_masks_reach_the_attention():
    """The name is registered for masks too: without, transformers passes none."""
    model, ids = decoder(), torch.randint(0, 100, (2, 9))
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    with intflash.patch(model):
        with_mask, without = run(model, ids, attention_mask=mask), run(model, ids)
    assert not torch.equal(with_mask[:, 4:], without[:, 4:])


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return sharpen(transformers.BertModel(config), gain=10.0)


@pytest.mark.parametrize("patched, unpatched", [("encoder", ""), ("", "encoder")])
def test_unpatch_of_another_part_than_was_patched(patched, unpatched):
    model, ids = bert(), torch.randint(0, 100, (2, 9))
    reference = run(model, ids)
    intflash.patch(model.get_submodule(patched), "qflash")
    assert not torch.equal(run(model, ids), reference)
    intflash.unpatch(model.get_submodule(unpatched))
    assert torch.equal(run(model, ids), reference)
    intflash.unpatch(model)
    assert torch.equal(run(model, ids), reference)


def test_unpatch_after_a_layer_was_removed():
    model, ids = bert(), torch.randint(0, 100, (2, 9))
    intflash.patch(model)
    model.encoder.layer = model.encoder.layer[:1]
    intflash.unpatch(model)
    out = run(model, ids)
    twin = bert()
    twin.encoder.layer = twin.encoder.layer[:1]
    assert torch.equal(out, run(twin, ids))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_of_the_same_configuration_is_not_touched(implementation):
    config = transformers.ViTConfig(**VISION, attn_implementation=implementation)
    a, b = (transformers.ViTModel(config).eval() for _ in range(2))
    pixels = torch.randn(1, 3, 32, 32)
    before, reference = run(a, pixels), run(b, pixels)
    with intflash.patch(a):
        assert not torch.equal(run(a, pixels), before)
        assert torch.equal(run(b, pixels), reference) and b.config._attn_implementation == implementation
    assert torch.equal(run(a, pixels), before) and a.layers[0].attention.config is a.config


def test_a_pickled_model_is_patched_still():
    model, ids = bert(), torch.randint(0, 100, (2, 9))
    reference = run(model, ids)
    intflash.patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, ids), run(model, ids))
    intflash.unpatch(twin)
    assert torch.equal(run(twin, ids), reference)


def test_attention_weights_are_refused():
    model, pixels = vision_model("swin").eval(), torch.randn(1, 3, 56, 56)
    with intflash.patch(model), pytest.raises(intflash.InputError, match="does not serve output_attentions"):
        run(model, pixels, output_attentions=True)
    eager = transformers.ViTModel(transformers.ViTConfig(**VISION, attn_implementation="eager"))
    eager.config.output_attentions = True
    with pytest.raises(intflash.InputError, match="asks for attention weights"):
        intflash.patch(eager)


def test_an_implementation_with_other_masks_is_left():
    model = decoder()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(intflash.InputError, match="'flash_attention_2', whose masks differ"):
        intflash.patch(model)
