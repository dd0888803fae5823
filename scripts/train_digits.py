"""Train the digit models with a fixed seed and write their weights into the package.

    python scripts/train_digits.py vit        # some minutes on two cores
    python scripts/train_digits.py swin

The last epoch's weights are kept. The held-out third is never used to choose anything.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from intflash.digits import ARCHITECTURES, load_split

WEIGHTS = Path(__file__).resolve().parents[1] / "src/intflash/digits/weights"


def augment(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Upscales 8x8 images to `size` under a random rotation, scale, shear and shift."""
    n = len(images)

    def uniform(limit: float) -> Tensor:
        return (torch.rand(n, generator=generator) * 2 - 1) * limit

    angle, shear = uniform(math.radians(12)), uniform(0.15)
    sx, sy = 1 + uniform(0.12), 1 + uniform(0.12)
    dx, dy = uniform(0.15), uniform(0.15)
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack([cos * sx, -sin * sx + shear, dx, sin * sy, cos * sy, dy], dim=1).view(n, 2, 3)
    grid = F.affine_grid(theta, [n, 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def train(name: str, epochs: int, batch: int, peak_lr: float, seed: int, folder: Path) -> Path:
    """Trains from scratch, prints the held-out Top-1 and writes <name>.safetensors into `folder`."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    data, held_out = load_split()
    model = ARCHITECTURES[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.05)
    steps = epochs * math.ceil(len(data) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.1)
    start = time.time()
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for at in torch.randperm(len(data), generator=generator).split(batch):
            images = augment(data.images[at], model.SIZE, generator)
            loss = F.cross_entropy(model(images), data.labels[at], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(at)
        if (epoch + 1) % 5 == 0:
            print(f"{name} epoch {epoch + 1:3d}: loss {total / len(data):.4f}, {time.time() - start:.0f} s", flush=True)
    model.eval()
    with torch.inference_mode():
        correct = (model(held_out.images).argmax(1) == held_out.labels).sum().item()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    print(f"{path}: {path.stat().st_size:,} bytes, held-out Top-1 {correct}/{len(held_out)}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=tuple(ARCHITECTURES))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    train(args.model, args.epochs, args.batch, args.lr, args.seed, args.out)


if __name__ == "__main__":
    main()
