"""A timm ViT as an integer model: calibrate, convert, save, load without the float model, compare."""

import tempfile
from pathlib import Path

import timm
import torch

from intflash import integer


def main() -> None:
    torch.manual_seed(0)
    # A small ViT with random weights; yours is timm.create_model("vit_small_patch16_224", pretrained=True).
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=96, depth=3, num_heads=3, num_classes=10
    ).eval()
    batches = [torch.randn(32, 3, 64, 64) for _ in range(4)]  # yours: 128 images like those of deployment
    images = torch.randn(8, 3, 64, 64)

    calibration = integer.calibrate(model, batches)
    made = integer.convert(model, calibration)
    print(made.report().splitlines()[0])
    for line in made.report().splitlines()[1:5]:
        print(line)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vit.safetensors"
        made.save(path)
        loaded = integer.load(path)  # needs neither the float model nor timm
        print(f"{path.stat().st_size / 1e6:.2f} MB, made of {loaded.provenance['model']}")

    with torch.no_grad():
        reference, logits = model(images), loaded(images)
    sqnr = 20 * torch.log10(reference.norm() / (logits - reference).norm())
    print(f"logits: {sqnr:.1f} dB, same classes: {bool((logits.argmax(-1) == reference.argmax(-1)).all())}")
    print(f"one image alone has the same bits: {torch.equal(loaded(images[:1]), logits[:1])}")


if __name__ == "__main__":
    main()
