"""torchvision's ViT, on models of random weights: graph, bits and what is refused. Its Swin: test_convert_swin.py."""

import pytest
import torch
from torch import nn

from integer.conversion import check_conversion, check_refused, randomized, replaced
from intflash import InputError, integer

pytest.importorskip("torchvision")
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer, vit_b_16  # noqa: E402

SMALL = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 128}


def small(**options):
    torch.manual_seed(0)
    return randomized(VisionTransformer(**SMALL, num_classes=64, **options))


def images(count, seed=1, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{}, {"representation_size": 32}], ids=str)
def test_conversion(options):
    check_conversion(small(**options), [images(48)], {"x": images(48, 2)}, least=24)


def _attention(**options):
    def change(model):
        block = model.encoder.layers.encoder_layer_1
        block.self_attention = nn.MultiheadAttention(64, 2, **options)

    return change


REFUSED = {
    r"encoder.layers.encoder_layer_1.self_attention \(MultiheadAttention\)": _attention(),
    r"encoder.layers.encoder_layer_1.self_attention \(MultiheadAttention.*": _attention(
        batch_first=True, add_bias_kv=True
    ),
    r"encoder.ln \(BatchNorm1d\)": replaced("encoder.ln", nn.BatchNorm1d(64)),
    r"encoder.layers.encoder_layer_0.mlp \(Linear\)": replaced("encoder.layers.encoder_layer_0.mlp", nn.Linear(64, 64)),
    r"encoder.layers.encoder_layer_0.mlp.1 \(PReLU\)": replaced("encoder.layers.encoder_layer_0.mlp.1", nn.PReLU()),
    r"heads.head \(Sequential\)": replaced("heads.head", nn.Sequential()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name_before_any_work(message):
    model = small()
    REFUSED[message](model)
    check_refused(model, message)


def test_convolutional_stems_are_refused():
    torch.manual_seed(0)
    model = VisionTransformer(**SMALL, conv_stem_configs=[ConvStemConfig(8, 3, 8)]).eval()
    with pytest.raises(InputError, match=r"conv_proj.conv_bn_relu_0 \(Conv2dNormActivation\) has no integer form"):
        integer.calibrate(model, iter(()))


@pytest.mark.full
def test_full_size_vit_base():
    torch.manual_seed(0)
    model = vit_b_16().eval().requires_grad_(False)
    nn.init.normal_(model.heads.head.weight, std=0.05)  # torchvision starts it with zeros
    check_conversion(model, [images(8, size=224)], {"x": images(2, 2, 224)}, least=20)
