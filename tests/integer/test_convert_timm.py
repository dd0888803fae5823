"""timm ViT and DeiT in all their forms, on models of random weights: graph, bits and what is refused."""

import copy

import pytest
import torch
from torch import nn

from integer.conversion import check_parts, check_refused, replaced
from intflash import InputError, integer
from intflash.integer.registry import translate
from intflash.integer.simulate import simulate
from oracle import sqnr
from peaked_models import run, sharpen

timm = pytest.importorskip("timm")

SMALL = {"img_size": 64, "depth": 2}
VARIANTS = {
    "class token": ("vit_tiny_patch16_224", {}),
    "deit": ("deit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "registers, average": ("vit_tiny_patch16_224", {"reg_tokens": 4, "global_pool": "avg"}),
    "average of all, norm first": (
        "vit_tiny_patch16_224", {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True},
    ),
    "no class token": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "layer scale, no position for the class": (
        "vit_tiny_patch16_224", {"init_values": 0.1, "no_embed_class": True, "qkv_bias": False},
    ),
    "norm before the blocks": ("vit_tiny_patch16_224", {"pre_norm": True}),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none", "global_pool": "avg"}),
    "features": ("vit_tiny_patch16_224", {"num_classes": 0}),
    "pooled features": ("vit_tiny_patch16_224", {"num_classes": 0, "global_pool": "avg"}),
    "relu": ("vit_tiny_patch16_224", {"act_layer": nn.ReLU}),
}  # fmt: skip


def small(name, **options):
    torch.manual_seed(0)
    return sharpen(timm.create_model(name, **SMALL, **options))


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def variant(request):
    """(model, images, its logits, calibration)."""
    name, options = VARIANTS[request.param]
    model = small(name, **options)
    torch.manual_seed(1)
    images = torch.randn(24, 3, 64, 64)
    return model, images, run(model, images), integer.calibrate(model, [images[:16], images[16:]])


def test_graph_is_the_model(variant):
    model, images, logits, _ = variant
    check_parts(model)
    found = translate(model).run({"x": images[:2]}, torch.float64)["logits"]
    expected = run(copy.deepcopy(model).double(), images[:2].double())
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_integer_model(variant):
    """Equal bits of both executors and in any batch; as close to the float model as the scheme's quantizers are."""
    model, images, logits, calibration = variant
    made = integer.convert(model, calibration)
    found = made(images)
    assert found.shape == logits.shape and found.dtype == torch.float32
    reference = integer.convert(model, calibration, backend="reference")
    assert torch.equal(reference(images[:2]), found[:2])
    assert torch.equal(made(images[5:6]), found[5:6])
    simulated = simulate(model, calibration, integer.Options(), {"x": images})["logits"]
    assert sqnr(logits, found) > 24
    assert abs(sqnr(logits, found) - sqnr(logits, simulated)) < 1.0


def test_saved_without_timm(variant, tmp_path):
    model, images, _, calibration = variant
    made = integer.convert(model, calibration)
    made.save(tmp_path / "model")
    assert torch.equal(integer.load(tmp_path / "model")(images[:2]), made(images[:2]))


def test_in_place_activations():
    """A function that writes into its argument is tabulated like any other."""
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for inplace in (False, True):
        model = small("vit_tiny_patch16_224")
        for block in model.blocks:
            block.mlp.act = nn.SiLU(inplace=inplace)
        found.append(integer.convert(model, integer.calibrate(model, [images]))(images))
    assert torch.equal(*found)


def _gated(model):
    model.blocks[1].attn.gate = nn.Linear(192, 192)


def _dilated(model):
    model.patch_embed.proj.dilation = (2, 2)


REFUSED = {
    r"patch_embed.proj \(Conv2d\)": _dilated,
    r"blocks.1.attn.qkv \(LayerNorm\)": replaced("blocks.1.attn.qkv", nn.LayerNorm(192)),
    r"blocks.0.drop_path1 \(Linear\)": replaced("blocks.0.drop_path1", nn.Linear(192, 192)),
    r"blocks.1.attn.gate \(Linear\)": _gated,
    r"blocks.0.attn.q_norm \(LayerNorm\)": replaced("blocks.0.attn.q_norm", nn.LayerNorm(64)),
    r"blocks.1.norm1 \(BatchNorm1d\)": replaced("blocks.1.norm1", nn.BatchNorm1d(192).eval()),
    r"blocks.0.mlp.act \(Softmax\)": replaced("blocks.0.mlp.act", nn.Softmax(-1)),
    r"blocks.0.mlp.act \(PReLU\)": replaced("blocks.0.mlp.act", nn.PReLU()),
    r"blocks.1.mlp.fc2 \(Bilinear\)": replaced("blocks.1.mlp.fc2", nn.Bilinear(2, 2, 2)),
    r"patch_embed.norm \(LayerNorm\)": replaced("patch_embed.norm", nn.LayerNorm(192)),
    r"head \(Sequential\)": replaced("head", nn.Sequential(nn.Linear(192, 10))),
    r"norm \(Softmax\)": replaced("norm", nn.Softmax(-1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name_before_any_work(message):
    model = small("vit_tiny_patch16_224")
    REFUSED[message](model)
    check_refused(model, message)


def test_other_models_are_refused():
    for options, message in (
        ({"global_pool": "map"}, r"attn_pool \(AttentionPoolLatent\) has no integer form"),
        ({"global_pool": "max"}, "global_pool 'max'"),
        ({"dynamic_img_size": True}, "dynamic_img_size"),
    ):
        with pytest.raises(InputError, match=message):
            integer.calibrate(small("vit_tiny_patch16_224", **options), iter(()))
    torch.manual_seed(0)
    with pytest.raises(InputError, match="ResNet has no converter"):
        integer.calibrate(timm.create_model("resnet18").eval(), iter(()))

    class Mine(type(small("vit_tiny_patch16_224"))):
        pass

    with pytest.raises(InputError, match="Mine has no converter"):
        integer.calibrate(Mine(**SMALL, embed_dim=192, num_heads=3).eval(), iter(()))


def test_uint8_images_have_imagenets_normalization():
    model = small("vit_tiny_patch16_224")
    torch.manual_seed(2)
    pixels = torch.randint(0, 256, (24, 3, 64, 64), dtype=torch.uint8)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = (pixels / 255 - mean) / std
    calibration = integer.calibrate(model, [images])
    made = integer.convert(model, calibration, image="uint8")
    assert sqnr(run(model, images), made(pixels)) > 24
    assert torch.equal(
        integer.convert(model, calibration, image="uint8", backend="reference")(pixels[:2]), made(pixels[:2])
    )
