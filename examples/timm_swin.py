"""A timm Swin with integer attention: its relative-position bias and shift masks go to the kernel as they are."""

import timm
import torch

import intflash


def main() -> None:
    torch.manual_seed(0)
    # A small Swin with random weights; yours is timm.create_model("swin_tiny_patch4_window7_224", pretrained=True).
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=48, depths=(2, 2), num_heads=(2, 4), num_classes=10
    ).eval()
    images = torch.randn(4, 3, 56, 56)

    # Weights and input size are set: the bias and the masks are computed by patch.
    scales = intflash.calibrate(model, [images], method="intflash_p8")
    with torch.inference_mode():
        reference = model(images)
        for name, static in (("scales found in each call", None), ("static scales", scales)):
            with intflash.patch(model, "intflash_p8", static) as report:
                logits = model(images)
            sqnr = 20 * torch.log10(reference.norm() / (logits - reference).norm())
            print(f"{len(report.replaced)} window attention layers, {name}: {sqnr:.1f} dB")
    assert not report.left


if __name__ == "__main__":
    main()
