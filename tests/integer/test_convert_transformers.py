"""transformers' ViT, DeiT, DINOv2 and BERT, on models of random weights: graph, bits, padding and what is refused."""

import pytest
import torch
from torch import nn

from integer.conversion import check_conversion, check_refused, randomized, replaced
from intflash import InputError, integer

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = SMALL | {"image_size": 32, "patch_size": 8, "num_labels": 48}
CONFIGS = {
    "ViT": transformers.ViTConfig(**IMAGE, intermediate_size=128),
    "DeiT": transformers.DeiTConfig(**IMAGE, intermediate_size=128, qkv_bias=False),
    "Dinov2": transformers.Dinov2Config(**IMAGE, mlp_ratio=2, layerscale_value=0.5, drop_path_rate=0.1),
    "Bert": transformers.BertConfig(
        **SMALL, intermediate_size=128, vocab_size=60, max_position_embeddings=24, num_labels=48
    ),
}
IMAGE_MODELS = (
    "ViTModel", "ViTForImageClassification", "DeiTModel", "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher", "Dinov2Model", "Dinov2ForImageClassification",
)  # fmt: skip
BERT_MODELS = ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification",
               "BertForTokenClassification")  # fmt: skip


def small(name, **options):
    library = next(key for key in CONFIGS if name.startswith(key))
    torch.manual_seed(0)
    config = type(CONFIGS[library])(**CONFIGS[library].to_dict() | options)
    return randomized(getattr(transformers, name)(config))


def images(count, height=32, width=32, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 3, height, width, generator=g)}


def tokens(count, length, *, seed=1, shortest=None):
    """Random sequences; with `shortest` every other length from it on, the rest of each is padding."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (count, length), generator=g)
    types = torch.randint(0, 2, (count, length), generator=g)
    lengths = length - torch.arange(count) % (length - (length if shortest is None else shortest) + 1)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models(name):
    made = check_conversion(small(name), [images(48)], images(48, seed=2), least=24)
    few = images(2)
    results = made(**few)
    # read by name, as attributes and by position; called by position too
    first = next(iter(results))
    assert torch.equal(results[0], results[first]) and torch.equal(getattr(results, first), results[0])
    assert torch.equal(made(few["pixel_values"])[first], results[first])
    with pytest.raises(AttributeError, match="the model's results are"):
        results.loss  # noqa: B018


def test_dinov2_of_another_size():
    made = check_conversion(
        small("Dinov2ForImageClassification"), [images(48, 48, 40)], images(48, 48, 40, seed=2), least=24
    )
    assert made.program.inputs[0].shape == (3, 48, 40)


@pytest.mark.parametrize("name", BERT_MODELS)
def test_bert(name):
    check_conversion(small(name), [tokens(32, 14, shortest=6), tokens(32, 20)], tokens(48, 20, seed=2), least=24)


@pytest.fixture(scope="module")
def masked_lm():
    """(model, calibration on sequences of up to 20 tokens)."""
    model = small("BertForMaskedLM")
    return model, integer.calibrate(model, [tokens(16, 12), tokens(16, 20, shortest=9), tokens(16, 15)])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_padding_changes_no_bit(masked_lm, backend):
    """Tokens have the same bits alone, padded by the caller to any length, and whatever stands in the padding."""
    made = integer.convert(*masked_lm, backend=backend)
    batch = tokens(3, 12, seed=3)
    expected = made(**batch).logits
    assert expected.shape == (3, 12, 60)
    for filler in (0, 7):
        padded = {name: nn.functional.pad(x, (0, 6), value=filler) for name, x in batch.items()}
        padded["attention_mask"][:, 12:] = 0
        padded["token_type_ids"][:, 12:] = filler % 2
        assert torch.equal(made(**padded).logits[:, :12], expected)
    # sequences of several lengths in one batch, each as it is alone
    mixed = tokens(4, 20, seed=4, shortest=17)
    together = made(**mixed).logits
    for i, mask in enumerate(mixed["attention_mask"].bool()):
        alone = made(**{name: x[i : i + 1, mask] for name, x in mixed.items()}).logits
        assert torch.equal(alone[0], together[i, mask])


def test_padding_is_not_observed(masked_lm):
    """Calibration with padding finds what calibration without it does."""
    model = small("BertModel")
    short = tokens(16, 9)
    padded = {name: nn.functional.pad(x, (0, 5), value=int(name == "token_type_ids")) for name, x in short.items()}
    one, other = integer.calibrate(model, [short]), integer.calibrate(model, [padded])
    assert one.size == (9,) and other.size == (14,)
    for name, ranges in one.ranges.items():
        for a, b in zip(ranges.clips("absmax"), other.ranges[name].clips("absmax"), strict=True):
            assert torch.allclose(a, b, rtol=1e-4), name


def test_optional_inputs_and_positions(masked_lm):
    made = integer.convert(*masked_lm)
    batch = tokens(2, 12)
    full = {"input_ids": batch["input_ids"], "attention_mask": torch.ones(2, 12, dtype=torch.bool)}
    full["token_type_ids"] = torch.zeros(2, 12, dtype=torch.int64)
    assert torch.equal(made(batch["input_ids"]).logits, made(**full).logits)
    assert torch.equal(made(*full.values()).logits, made(**full).logits)


def test_saved_without_transformers(masked_lm, tmp_path):
    made = integer.convert(*masked_lm)
    made.save(tmp_path / "model")
    batch = tokens(2, 13)
    assert torch.equal(integer.load(tmp_path / "model")(**batch).logits, made(**batch).logits)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b | {"input_ids": b["input_ids"].repeat(1, 2)}, r"input_ids: .*\[B, at most 20\], got \[2, 24\]"),
        (lambda b: b | {"attention_mask": b["attention_mask"][:, :5]}, r"different batches: \[2, 12\] and \[2, 5\]"),
        (lambda b: b | {"input_ids": b["input_ids"] + 60}, r"input_ids: expected indices in \[0, 60\)"),
        (lambda b: b | {"position_ids": b["input_ids"]}, r"unknown inputs \['position_ids'\]"),
        (lambda b: {"attention_mask": b["attention_mask"]}, "expected the input 'input_ids'"),
        (lambda b: b | {"attention_mask": b["attention_mask"].float()}, "attention_mask: expected bool or integers"),
    ],
)  # fmt: skip
def test_bad_inputs(masked_lm, change, message):
    made = integer.convert(*masked_lm)
    with pytest.raises(InputError, match=message):
        made(**change(tokens(2, 12)))


def test_more_tokens_than_positions(masked_lm):
    with pytest.raises(InputError, match="bert.embeddings.position_embeddings.*25 tokens, it has 24 positions"):
        integer.calibrate(masked_lm[0], [tokens(2, 25)])


REFUSED = {
    r"layers.1.layernorm_after \(BatchNorm1d\)": (
        "ViTModel", replaced("layers.1.layernorm_after", nn.BatchNorm1d(64)),
    ),
    r"layers.0.attention \(Linear\)": ("ViTModel", replaced("layers.0.attention", nn.Linear(64, 64))),
    r"layers.1.mlp.activation_fn \(Softmax\)": ("DeiTModel", replaced("layers.1.mlp.activation_fn", nn.Softmax(-1))),
    r"pooler.activation \(PReLU\)": ("DeiTModel", replaced("pooler.activation", nn.PReLU())),
    r"classifier \(Identity\)": ("ViTForImageClassification", replaced("classifier", nn.Identity())),
    r"encoder.layer.0.layer_scale2 \(Identity\)": (
        "Dinov2Model", replaced("encoder.layer.0.layer_scale2", nn.Identity()),
    ),
    r"embeddings.LayerNorm \(RMSNorm\)": ("BertModel", replaced("embeddings.LayerNorm", nn.RMSNorm(64))),
    r"encoder.layer.1.attention.self.key \(Bilinear\)": (
        "BertModel", replaced("encoder.layer.1.attention.self.key", nn.Bilinear(2, 2, 2)),
    ),
    r"cls.predictions.transform \(Identity\)": (
        "BertForMaskedLM", replaced("cls.predictions.transform", nn.Identity()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name_before_any_work(message):
    name, change = REFUSED[message]
    model = small(name)
    change(model)
    check_refused(model, message)


def test_other_forms_are_refused():
    with pytest.raises(InputError, match=r"^encoder.layer.0.mlp \(Dinov2SwiGLUFFN\) has no integer form"):
        integer.calibrate(small("Dinov2Model", use_swiglu_ffn=True), iter(()))
    with pytest.raises(InputError, match=r"BertModel\) has no integer form: a decoder"):
        integer.calibrate(small("BertModel", is_decoder=True), iter(()))
    for option, value in {"return_dict": False, "output_hidden_states": True, "output_attentions": True}.items():
        for name in ("ViTModel", "BertForMaskedLM"):
            with pytest.raises(InputError, match=rf"{name}\) has no integer form: .*{option}={not value}.*got {value}"):
                integer.calibrate(small(name, **{option: value}), iter(()))
    with pytest.raises(InputError, match="BertForQuestionAnswering has no converter"):
        integer.calibrate(small("BertForQuestionAnswering"), iter(()))
    with pytest.raises(InputError, match="BertForMultipleChoice has no converter"):
        integer.calibrate(small("BertForMultipleChoice"), iter(()))
