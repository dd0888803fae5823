"""transformers models: encoders, Swin, and decoders with grouped KV heads, causal and padded masks."""

import pickle

import pytest
import small_models
import torch
from torch.nn import functional as F

import intflash
from intflash.models.base import CAUSAL_METHOD, CROSS_RECIPE, IntegerCore
from oracle import sqnr
from peaked_models import run, sharpen

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import create_causal_mask  # noqa: E402, F401  (as in the file of a decoder)

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
    """The first of two sequences begins with five padding tokens."""
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
    """With static scales a later token changes no bit of an earlier output."""
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
def test_unsupported_arguments_are_refused(option):
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(intflash.InputError, match="does not serve"):
        adapter.intflash_attention_forward(torch.nn.Module(), q, q, q, None, is_causal=False, **option)


def test_masks_reach_the_attention():
    """The name is registered for masks too. Otherwise transformers passes no mask."""
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


def test_a_pickled_model_stays_patched():
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


TINY = dict(vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ENCODER = TINY | dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)

# Models that do not use transformers' AttentionInterface, or lose masks or causality with it.
NOT_OF_THE_INTERFACE = {
    "Bloom": TINY | dict(hidden_size=32, n_layer=1, n_head=4),
    "XGLM": TINY | dict(d_model=32, num_layers=1, attention_heads=4, ffn_dim=64),
    "MPNet": ENCODER,
    "Longformer": ENCODER | dict(attention_window=[4]),
    "DebertaV2": ENCODER,
    "XLNet": TINY | dict(d_model=32, n_layer=1, n_head=4, d_inner=64),
    "OpenAIGPT": dict(vocab_size=100, n_embd=32, n_layer=1, n_head=4),
    "Falcon": ENCODER,
    "GPTNeo": TINY | dict(hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]),
    "Mpt": TINY | dict(d_model=32, n_layers=1, n_heads=4),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_OF_THE_INTERFACE)
def test_a_model_that_does_not_use_the_interface_is_refused_by_name(name, tmp_path):
    """However it is loaded or switched. Its own attention still works."""
    message = rf'{name}Model cannot run with attn_implementation="intflash"(.|\n)*intflash.patch\(model\)'
    cls, config = (getattr(transformers, name + kind) for kind in ("Model", "Config"))
    torch.manual_seed(0)
    model = cls(config(**NOT_OF_THE_INTERFACE[name])).eval()
    ids = torch.randint(3, 100, (1, 8))
    with torch.no_grad():
        before = model(ids)[0]
    with pytest.raises(intflash.InputError, match=message):
        model.set_attn_implementation("intflash")
    with torch.no_grad():
        assert torch.equal(model(ids)[0], before)
    model.save_pretrained(tmp_path)
    for make in (
        lambda: cls.from_pretrained(tmp_path, attn_implementation="intflash"),
        lambda: transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="intflash"),
        lambda: transformers.AutoModel.from_config(model.config, attn_implementation="intflash"),
    ):
        with pytest.raises(intflash.InputError, match=message):
            make()


def load(model, route):
    """Returns the model patched, or another one with its weights that is loaded by name."""
    if route == "patch":
        intflash.patch(model)
        return model
    named = type(model)._from_config(type(model.config).from_dict(model.config.to_dict()), attn_implementation=NAME)
    named.load_state_dict(model.state_dict())
    return named.eval()


NAME = "intflash"
ROUTES = pytest.mark.parametrize("route", ["patch", "name"])


def first_tensor(model, **inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@ROUTES
@pytest.mark.parametrize("padded", [False, True])
def test_by_default_later_tokens_change_no_earlier_logit(route, padded):
    reference = decoder()
    ids = torch.randint(0, 100, (2, 12))
    mask = attention_mask(ids, padded)
    before = run(reference, ids, attention_mask=mask)
    model = load(reference, route)
    for _ in range(4):
        later = torch.cat((ids[:, :8], torch.randint(0, 100, (2, 4))), dim=1)
        out, changed = (run(model, x, attention_mask=mask) for x in (ids, later))
        assert torch.equal(out[:, :8], changed[:, :8]) and not torch.equal(out[:, 8:], changed[:, 8:])
    assert 30 < sqnr(before[mask.bool()], out[mask.bool()]) < 100


@ROUTES
def test_by_default_later_target_tokens_change_no_earlier_output(route):
    """In an encoder and decoder, the largest query of the cross attention may be a later token's."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        **TINY, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, forced_eos_token_id=None,
    )  # fmt: skip
    model = load(sharpen(transformers.BartModel(config), gain=6.0), route)
    source, target = torch.randint(3, 100, (1, 9)), torch.randint(3, 100, (1, 9))
    out = first_tensor(model, input_ids=source, decoder_input_ids=target)
    for _ in range(8):
        later = torch.cat((target[:, :5], torch.randint(3, 100, (1, 4))), dim=1)
        changed = first_tensor(model, input_ids=source, decoder_input_ids=later)
        assert torch.equal(out[:, :5], changed[:, :5])


def test_swin_v2():
    torch.manual_seed(0)
    sizes = dict(image_size=56, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=7)
    model = sharpen(transformers.Swinv2Model(transformers.Swinv2Config(**sizes)))
    pixels = torch.randn(2, 3, 56, 56)
    reference = first_tensor(model, pixel_values=pixels)
    with intflash.patch(model, "fp32") as report:
        assert sqnr(reference, first_tensor(model, pixel_values=pixels)) > 100
        assert len(report.ran) == 4 and set(report.replaced.values()) == {"Swinv2SelfAttention"}
    with intflash.patch(model):
        assert 25 < sqnr(reference, first_tensor(model, pixel_values=pixels)) < 100
    assert torch.equal(first_tensor(model, pixel_values=pixels), reference)


def test_sam():
    """Its image encoder computes attention with a relative-position bias, its decoder in layers of its own."""
    torch.manual_seed(0)
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8, window_size=4,
        global_attn_indexes=[1], output_channels=32, mlp_dim=64,
        num_pos_feats=16,
    )  # fmt: skip
    prompt = dict(hidden_size=32, image_size=64, patch_size=8, image_embedding_size=8, mask_input_channels=4)
    masks = dict(hidden_size=32, num_attention_heads=4, mlp_dim=64, iou_head_hidden_dim=32, num_hidden_layers=1)
    model = sharpen(
        transformers.SamModel(
            transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=masks)
        )
    )
    inputs = dict(pixel_values=torch.randn(1, 3, 64, 64), input_points=torch.tensor([[[[20.0, 30.0]]]]))
    with torch.no_grad():
        reference = model(**inputs).pred_masks
        with intflash.patch(model, "fp32") as report:
            assert sqnr(reference, model(**inputs).pred_masks) > 100
            assert len(report.ran) == len(report.replaced) and "SamVisionSdpaAttention" in report.replaced.values()
        with intflash.patch(model):
            assert 20 < sqnr(reference, model(**inputs).pred_masks) < 100


def test_a_soft_cap_is_refused_with_the_reason():
    def config(**options):
        return transformers.Gemma2Config(**DECODER, head_dim=16, **options)

    with pytest.raises(intflash.InputError, match="caps its scores by tanh"):
        transformers.AutoModel.from_config(config(), attn_implementation="intflash")
    with pytest.raises(intflash.InputError, match="caps its scores by tanh"):
        intflash.patch(transformers.Gemma2Model(config()).eval())
    assert len(intflash.patch(transformers.Gemma2Model(config(attn_logit_softcapping=None)).eval()).replaced) == 3


def test_a_layer_that_does_not_say_is_causal():
    """As for transformers' "sdpa". Doge's layers do not say it, and add a learned term to the causal mask."""
    torch.manual_seed(0)
    model, ids = sharpen(transformers.DogeModel(transformers.DogeConfig(**DECODER))), torch.randint(0, 100, (2, 12))
    assert not hasattr(model.layers[0].self_attn, "is_causal")
    later = torch.cat((ids[:, :8], (ids[:, 8:] + 7) % 100), dim=1)
    for route in ("name", "patch"):
        loaded = load(model, route)
        a, b = (first_tensor(loaded, input_ids=x) for x in (ids, later))
        assert torch.equal(a[:, :8], b[:, :8])


class Layer(torch.nn.Module):
    """A layer of the interface with a default core, in a file that makes causal masks."""

    def __init__(self, implementation="eager", **attributes):
        super().__init__()
        self.config = transformers.PreTrainedConfig(attn_implementation=implementation)
        vars(self).update(attributes)
        self.intflash_attention = IntegerCore("intflash", None, None, False, CAUSAL_METHOD, CROSS_RECIPE).eval()


@pytest.mark.parametrize(
    "layer, encoder",
    [
        (Layer(is_causal=False, is_decoder=True), 0),  # NLLB-MoE, Pegasus-X and BigBird-Pegasus leave `is_causal` out
        (Layer("sdpa", is_causal=False), 4),  # T5Gemma 2 attends to its own tokens and the encoder's at once
    ],
)
def test_a_layer_whose_mask_hides_later_tokens_without_its_saying_so(layer, encoder):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    mask = F.pad(torch.zeros(9, 9).masked_fill(hidden, torch.finfo(torch.float32).min), (0, encoder))[None, None]
    own = torch.randn(2, 1, 2, encoder, 16)

    def forward(*x):
        key, value = (torch.cat(pair, 2) for pair in zip(x[1:], own, strict=True))
        return adapter.intflash_attention_forward(layer, x[0], key, value, mask)[0]

    later = [torch.cat((x[:, :, :6], 10 * torch.randn(1, 2, 3, 16)), 2) for x in (q, k, v)]
    assert torch.equal(forward(q, k, v)[:, :6], forward(*later)[:, :6])


def test_a_layer_with_the_masks_of_eager_sees_all_keys_without_a_mask():
    """Splinter's layers do not say that they are not causal, and its encoder gives no mask where nothing is padded."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    for attributes in ({}, {"is_causal": True}):
        layer = Layer(**attributes)
        layer.intflash_attention = IntegerCore("fp32", None).eval()
        out = adapter.intflash_attention_forward(layer, q, k, v, None)[0].transpose(1, 2)
        assert sqnr(F.scaled_dot_product_attention(q, k, v), out) > 100


@ROUTES
def test_a_model_without_sdpa_gets_its_own_kind_of_mask(route):
    """DeepSeek V4 appends the terms of its scores to its mask, which a bool mask could not hold."""
    torch.manual_seed(0)
    model, inputs = small_models.transformers_model("deepseek_v4")
    reference = first_tensor(model, **inputs)
    assert 35 < sqnr(reference, first_tensor(load(model, route), **inputs)) < 100


@pytest.mark.parametrize("kind", ["of each query", "unknown"])
def test_an_argument_of_the_models_own_attention_is_served_or_refused(kind, monkeypatch):
    """Inkling 2 calls its attention with sinks of each query. Arguments that ours does not support are not ignored."""
    model, inputs = small_models.transformers_model("inkling2_text")
    reference = first_tensor(model, **inputs)
    if kind == "of each query":
        with intflash.patch(model, "fp32"):
            assert sqnr(reference, first_tensor(model, **inputs)) > 100
        return
    monkeypatch.setattr(adapter, "_own_arguments", lambda cls: ("sinks",))
    with intflash.patch(model, "fp32"), pytest.raises(intflash.InputError, match="does not serve sinks"):
        first_tensor(model, **inputs)


@ROUTES
@pytest.mark.parametrize("padded", [False, True])
def test_attention_sinks(route, padded):
    """The sink of a head is one more key with a value of 0."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **DECODER, head_dim=16, num_local_experts=1, num_experts_per_tok=1, sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "full_attention"], attn_implementation="eager",
    )  # fmt: skip
    model = sharpen(transformers.GptOssModel(config))
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    ids = torch.randint(0, 100, (2, 12))
    inputs = dict(input_ids=ids, attention_mask=attention_mask(ids, padded))
    real = inputs["attention_mask"].bool()
    reference = first_tensor(model, **inputs)[real]
    if route == "patch":
        with intflash.patch(model, "fp32"):
            assert sqnr(reference, first_tensor(model, **inputs)[real]) > 100
    model = load(model, route)
    out = first_tensor(model, **inputs)
    assert 25 < sqnr(reference, out[real]) < 100
    later = dict(inputs, input_ids=torch.cat((ids[:, :8], (ids[:, 8:] + 7) % 100), dim=1))
    assert torch.equal(first_tensor(model, **later)[:, :8], out[:, :8])


def test_cpu_offload():
    """accelerate's hooks hold each layer's forward and load its weights when it runs."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = bert(), torch.randint(3, 100, (2, 9))
    reference = run(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with intflash.patch(model) as report:
        assert 15 < sqnr(reference, run(model, ids)) < 100
        assert report.ran == list(report.replaced) and len(report.ran) == 2
    assert torch.equal(run(model, ids), reference)


def test_an_encoder_decoder_with_padding_compiles():
    sizes = dict(vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    model = transformers.T5Model(transformers.T5Config(**sizes)).eval()
    ids = torch.arange(24).view(2, 12) + 3
    mask = (torch.arange(12) < torch.tensor([[8], [12]])).long()
    inputs = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    intflash.patch(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs)
        assert torch.equal(compiled.last_hidden_state, model(**inputs).last_hidden_state)
