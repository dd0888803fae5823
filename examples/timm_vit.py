"""A timm ViT with integer attention: patch it, compare its logits, undo the patch."""

import timm
import torch

import intflash


def main() -> None:
    torch.manual_seed(0)
    # A small ViT with random weights; yours is timm.create_model("vit_small_patch16_224", pretrained=True).
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=96, depth=3, num_heads=3, num_classes=10
    ).eval()
    images = torch.randn(4, 3, 64, 64)

    with torch.inference_mode():
        reference = model(images)
        # One scale for each head of each image: no image depends on the others of its batch.
        report = intflash.patch(model, "intflash_p8", recipe=intflash.Recipe(q="head", k="head", v="head"))
        print(report)
        logits = model(images)
        alone = model(images[:1])
        intflash.unpatch(model)
        assert torch.equal(model(images), reference)  # the float model again

    sqnr = 20 * torch.log10(reference.norm() / (logits - reference).norm())
    print(f"logits: {sqnr:.1f} dB, same classes: {bool((logits.argmax(-1) == reference.argmax(-1)).all())}")
    print(f"largest difference of one image alone from the batch: {(alone - logits[:1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
