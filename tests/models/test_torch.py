"""torch's nn.MultiheadAttention and the layers that contain it, compared with their own computation."""

import pytest
import torch
from torch import nn

import intflash
from oracle import sqnr
from peaked_models import run, sharpen


def attention(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return sharpen(nn.MultiheadAttention(32, 4, **options))


def compare(model, *args, **kwargs):
    """Compares the layer's output with the patched one, which computes as torch does with method "fp32"."""
    with torch.no_grad():
        want = model(*args, **kwargs)[0]
        with intflash.patch(model, "fp32"):
            got, weights = model(*args, **kwargs)
    assert weights is None
    return want, got


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 24, "vdim": 40}])
def test_projections_and_layouts(batch_first, options):
    model = attention(batch_first=batch_first, **options)
    q, k, v = (torch.randn(2, n, options.get(d, 32)) for n, d in ((5, "qdim"), (7, "kdim"), (7, "vdim")))
    given = (q, k, v) if batch_first else (x.transpose(0, 1) for x in (q, k, v))
    want, got = compare(model, *given)
    assert got.shape == want.shape and sqnr(want, got) > 100
    want, got = compare(model, q[0], k[0], v[0])  # not batched
    assert got.shape == want.shape and sqnr(want, got) > 100


def masks():
    torch.manual_seed(0)
    hidden = torch.rand(5, 5) > 0.7
    hidden.fill_diagonal_(False)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    added = torch.zeros(2, 5).masked_fill(padding, float("-inf"))
    later = nn.Transformer.generate_square_subsequent_mask(5)
    return {
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(5, 5)},
        "of heads": {"attn_mask": torch.randn(8, 5, 5)},
        "padding": {"key_padding_mask": padding},
        "both bool": {"attn_mask": later.isinf(), "key_padding_mask": padding},
        "both float": {"attn_mask": torch.randn(5, 5), "key_padding_mask": torch.randn(2, 5)},
        "mixed": {"attn_mask": torch.randn(5, 5), "key_padding_mask": added},
        "causal": {"attn_mask": later, "is_causal": True, "need_weights": False},
        "causal, padded": {"attn_mask": later.isinf(), "is_causal": True, "key_padding_mask": padding},
    }  # fmt: skip


@pytest.mark.parametrize("name", masks())
def test_masks(name):
    x = torch.randn(2, 5, 32)
    want, got = compare(attention(batch_first=True), x, x, x, **masks()[name])
    assert sqnr(want, got) > 100


def test_unsupported_calls_are_refused_or_left():
    model, x = attention(batch_first=True), torch.randn(2, 5, 32)
    with intflash.patch(model, "fp32"):
        with pytest.raises(intflash.InputError, match="give the mask too"):
            model(x, x, x, is_causal=True)
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        with pytest.raises(intflash.InputError, match="got nested tensors"):
            model(nested, nested, nested)
    for options in (dict(add_bias_kv=True), dict(add_zero_attn=True)):
        with pytest.raises(intflash.InputError, match="adds a key of its own"):
            intflash.patch(attention(**options))


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_does_not_use_torchs_fast_path(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    model = sharpen(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first))
    x, padding = torch.randn(2, 9, 32), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    reference = run(model, x, src_key_padding_mask=padding)
    with intflash.patch(model) as report:
        out = run(model, x, src_key_padding_mask=padding)
        assert report.ran == list(report.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
        noise = x.clone()
        noise[1, 6:] = 0.5  # within the scales: padded tokens change nothing
    assert 30 < sqnr(reference[~padding], out[~padding]) < 100
    with intflash.patch(model, "fp32"):
        assert sqnr(reference[~padding], run(model, x, src_key_padding_mask=padding)[~padding]) > 100
        a, b = (run(model, y, src_key_padding_mask=padding)[~padding] for y in (x, noise))
        assert torch.equal(a, b)
    assert torch.equal(run(model, x, src_key_padding_mask=padding), reference)


def test_a_decoder_is_causal_by_default():
    torch.manual_seed(0)
    model = sharpen(nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 2))
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 6, 32)
    later = nn.Transformer.generate_square_subsequent_mask(9)
    reference = run(model, x, memory, later)
    with intflash.patch(model) as report:
        out = run(model, x, memory, later)
        assert len(report.ran) == 4 and 25 < sqnr(reference, out) < 100
        for _ in range(8):  # in some the largest query of the cross attention is a later one
            ending = torch.cat((x[:, :5], torch.randn(2, 4, 32)), dim=1)
            assert torch.equal(run(model, ending, memory, later)[:, :5], out[:, :5])
