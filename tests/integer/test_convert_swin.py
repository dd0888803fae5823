"""Swin v1 of timm and torchvision and the digit Swin: windows as row maps, on models of random weights."""

import pytest
import torch
from torch import nn

from integer.conversion import check_conversion, check_refused, randomized, replaced
from intflash import InputError, integer
from intflash.digits import load_model, load_split
from intflash.digits.swin import from_windows, shift_mask, to_windows
from intflash.integer import windows

timm = pytest.importorskip("timm")
tv = pytest.importorskip("torchvision.models.swin_transformer")
from timm.models.swin_transformer import SwinTransformer, window_partition  # noqa: E402
from timm.models.swin_transformer_v2 import SwinTransformerV2  # noqa: E402

SMALL = {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 64}


def small(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4}
    return randomized(SwinTransformer(**sizes | SMALL | options))


def small_torchvision(**options):
    torch.manual_seed(0)
    return randomized(tv.SwinTransformer(patch_size=[2, 2], window_size=[4, 4], **SMALL | options))


def images(count, *size, seed=1):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "timm": small,
    "timm, wide windows": lambda: small(img_size=(16, 32), window_size=(2, 8), depths=(2,), num_heads=(2,)),
    "timm, features": lambda: small(num_classes=0),
    "timm, one window, no patch norm, no bias": lambda: small(img_size=16, window_size=8, qkv_bias=False),
    "torchvision": small_torchvision,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_conversion(name):
    model = VARIANTS[name]()
    size = model.patch_embed.img_size if hasattr(model, "patch_embed") else (32, 32)
    made = check_conversion(model, [images(24, *size)], {"x": images(24, *size, seed=2)}, least=24)
    assert [i.shape for i in made.program.inputs] == [(3, *size)]


def test_torchvision_takes_the_size_of_its_calibration():
    model = small_torchvision()
    check_conversion(model, [images(24, 16, 32)], {"x": images(24, 16, 32, seed=2)}, least=24)
    with pytest.raises(InputError, match=r"images of one size, got \[\(3, 16, 32\), \(3, 32, 32\)\]"):
        integer.calibrate(model, [images(2, 16, 32), images(2, 32, 32)])


def test_digits():
    """Held-out digits: at most two of 599 below float32."""
    train, held_out = load_split()
    model = load_model("swin")
    made = check_conversion(model, [train.images[:128]], {"images": held_out.images[:48]}, least=40)
    floats, found = (int((m(held_out.images).argmax(1) == held_out.labels).sum()) for m in (model, made))
    assert found >= floats - 2


@pytest.mark.parametrize("shift", [(0, 0), (1, 2), (0, 3)])
def test_window_rows_are_roll_and_partition(shift):
    x = torch.arange(8 * 12).view(1, 8, 12, 1)
    expected = window_partition(x.roll((-shift[0], -shift[1]), (1, 2)), (4, 6)).flatten()
    assert torch.equal(windows.window_rows((8, 12), (4, 6), shift), expected)


@pytest.mark.parametrize("shift", [(0, 0), (1, 2), (2, 3)])
def test_window_maps_are_the_specifications(shift):
    """docs/numerics.md, "Windows and patch merging", row by row."""
    (h, w), (wh, ww), (a, b) = (8, 12), (4, 6), shift
    at = [
        [(si * wh + ni, sj * ww + nj) for ni in range(wh) for nj in range(ww)]
        for si in range(h // wh) for sj in range(w // ww)
    ]  # fmt: skip
    tokens = [(y + a) % h * w + (x + b) % w for window in at for y, x in window]
    assert windows.window_rows((h, w), (wh, ww), shift).tolist() == tokens

    def part(y, side, window, shift):
        return (y >= side - window) + (y >= side - shift)

    parts = [[(part(y, h, wh, a), part(x, w, ww, b)) for y, x in window] for window in at]
    seen = [[[[p == q for q in window] for p in window]] for window in parts]
    assert windows.shifted_mask((h, w), (wh, ww), shift).tolist() == seen
    merged = [[(2 * i + y) * 4 + 2 * j + x for y, x in ((0, 0), (1, 0), (0, 1), (1, 1))]
              for i in range(2) for j in range(2)]  # fmt: skip
    assert windows.merge_rows((4, 4), windows.COLUMN_MAJOR).tolist() == merged


def test_shifted_mask_is_that_of_the_models():
    block = small().layers[0].blocks[1]
    assert torch.equal(windows.shifted_mask((16, 16), (4, 4), (2, 2))[:, 0], block.attn_mask == 0)
    assert torch.equal(windows.shifted_mask((14, 14), (7, 7), (3, 3)), shift_mask(14))
    tokens = torch.arange(196).view(1, 14, 14, 1)
    assert torch.equal(from_windows(to_windows(tokens), 14), tokens)


REFUSED = {
    r"patch_embed.norm \(BatchNorm2d\)": replaced("patch_embed.norm", nn.BatchNorm2d(32)),
    r"layers.0.blocks.1.norm1 \(BatchNorm1d\)": replaced("layers.0.blocks.1.norm1", nn.BatchNorm1d(32)),
    r"layers.0.blocks.1.attn \(Linear\)": replaced("layers.0.blocks.1.attn", nn.Linear(32, 32)),
    r"layers.0.blocks.0.attn.proj \(Sequential\)": replaced("layers.0.blocks.0.attn.proj", nn.Sequential()),
    r"layers.1.downsample \(Conv2d\)": replaced("layers.1.downsample", nn.Conv2d(32, 64, 2, 2)),
    r"layers.1.blocks.0.mlp.act \(PReLU\)": replaced("layers.1.blocks.0.mlp.act", nn.PReLU()),
    r"head.fc \(Sequential\)": replaced("head.fc", nn.Sequential()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name_before_any_work(message):
    model = small()
    REFUSED[message](model)
    check_refused(model, message)


DEEP = {"depths": (1, 1, 1), "num_heads": (2, 2, 2)}  # 6, 3 and, padded, 2 tokens a side


@pytest.mark.parametrize(
    "options, message",
    [
        ({"img_size": 36}, r"layers.0.blocks.0.attn \(WindowAttention\).*windows of 4 x 4 do not divide 18 x 18"),
        ({"img_size": 12, "window_size": 3} | DEEP, r"layers.2.downsample \(Linear\).*3 x 3 tokens are no patches"),
        ({"global_pool": "max"}, r"head.global_pool.pool \(\w*MaxPool\w*\) has no integer form"),
        ({"strict_img_size": False}, "dynamic_img_size"),
    ],
)
def test_sizes_and_pooling_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        integer.calibrate(small(**options), iter(()))


def test_swin_v2_is_refused():
    torch.manual_seed(0)
    with pytest.raises(InputError, match="SwinTransformerV2 has no converter"):
        integer.calibrate(SwinTransformerV2(32, 4, embed_dim=32, depths=(1,), num_heads=(1,)).eval(), iter(()))
    v2 = tv.SwinTransformer([2, 2], 32, [2], [2], [4, 4], num_classes=4, block=tv.SwinTransformerBlockV2).eval()
    with pytest.raises(InputError, match=r"features.1.0 \(SwinTransformerBlockV2\) has no integer form"):
        integer.calibrate(v2, iter(()))


@pytest.mark.full
@pytest.mark.parametrize("make", [lambda: timm.create_model("swin_tiny_patch4_window7_224"), lambda: tv.swin_t()])
def test_full_size_swin_tiny(make):
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    check_conversion(model, [images(8, 224, 224)], {"x": images(4, 224, 224, seed=2)}, least=24)
