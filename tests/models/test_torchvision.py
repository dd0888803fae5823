"""torchvision models: ViT and both Swins, shifted windows, padding and cosine attention included."""

import pytest
import torch

import intflash
from oracle import sqnr
from peaked_models import run, sharpen

pytest.importorskip("torchvision")
from torchvision.models.swin_transformer import (  # noqa: E402
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import VisionTransformer  # noqa: E402

SMALL = dict(patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], num_classes=10)


def swin(window: int) -> torch.nn.Module:
    return SwinTransformer(window_size=[window, window], **SMALL)


def swin_v2(window: int) -> torch.nn.Module:
    parts = dict(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)
    return SwinTransformer(window_size=[window, window], **SMALL, **parts)


MODELS = {
    "vit": (lambda: VisionTransformer(64, 8, 3, 4, 64, 128, num_classes=10), 64, 3, "MultiheadAttention"),
    "swin": (lambda: swin(7), 112, 4, "ShiftedWindowAttention"),
    "swin_padded": (lambda: swin(7), 96, 4, "ShiftedWindowAttention"),
    "swin_v2": (lambda: swin_v2(8), 128, 4, "ShiftedWindowAttentionV2"),
    "swin_v2_padded": (lambda: swin_v2(7), 96, 4, "ShiftedWindowAttentionV2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_torchvision_models(name):
    make, size, layers, kind = MODELS[name]
    torch.manual_seed(0)
    model = sharpen(make(), gain=1.5 if name == "vit" else 3.0)  # its initial projections are larger
    image = torch.randn(2, 3, size, size)
    reference = run(model, image)
    scales = intflash.calibrate(model, [image])
    for chosen in (None, scales):
        with intflash.patch(model, scales=chosen) as report:
            logits = run(model, image)
        assert len(report.replaced) == layers and set(report.replaced.values()) == {kind}
        assert 28 < sqnr(reference, logits) < 100
        assert torch.equal(logits.argmax(1), reference.argmax(1))
    assert torch.equal(run(model, image), reference)


def test_swin_v2_under_autocast():
    """The logit scale is float32, so that Q is float32 where K and V are not."""
    torch.manual_seed(0)
    model, image = sharpen(swin_v2(8)), torch.randn(1, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        reference = run(model, image)
        with intflash.patch(model):
            assert 20 < sqnr(reference, run(model, image)) < 60
